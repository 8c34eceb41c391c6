"""Checks that a study was run by its own rules, which a verdict depends on.

Results are validation and test measurements only; training losses are not read.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qkattn.config import ANNEALED, OptimizerConfig
from qkattn.config.serialize import OF_MACHINE
from qkattn.stats.inference import MIN_DOCUMENTS
from qkattn.storage import ledger
from qkattn.storage.records import flat
from qkattn.study.place import EQUAL_SHAPE, LONGER, Place
from qkattn.study.tuning import KNOBS, MODEL_KNOBS, SCREENING, SINGLE, VERDICT
from qkattn.verdict import trained
from qkattn.verdict.arms import Arm
from qkattn.verdict.codes import TEST, Remark, RemarkCode
from qkattn.verdict.load import Study

ENOUGH_SEEDS = 5
# What an entry of the ledger accepts that would otherwise withhold every verdict.
UNCOMMITTED, COMMITS = ledger.ACCEPTABLE
# The factors of every study, and the shapes that matching solves for.
_FACTORS = ('score', 'value', 'd_model', 'd_ff', 'num_heads', 'head_size', 'num_layers')
# Settings that do not affect results; trials with shared seeds are paired whatever the others are.
_HARMLESS = (
    *('train.steps_per_dispatch', 'train.log_every', 'train.eval_every', 'train.checkpoint_every'),
    *('train.lifting', 'train.logits_chunk', 'model.remat', 'model.scan_unroll', 'trials.seeds'),
)
_MEASURED = ('eval_tokens', 'eval_rows', 'test_tokens', 'target_parameters')
_SOFTWARE = ('python', 'git.commit', 'devices.kind', 'devices.platform')


def check(study: Study, arms: Sequence[Arm]) -> tuple[Remark, ...]:
    """All remarks, the blocking ones first."""
    remarks = [*_tuning_of(study), *_declaration(study)]
    for arm in arms:
        remarks += [*_training(study, arm), *_results(study, arm), *_matching(study, arm)]
        if study.tuning:
            remarks += [*_post_hoc(study, arm), *_seeds(study, arm), *_settings(study, arm)]
            remarks += _splits(arm)
    remarks += trained.check(study, arms) if study.tuning else ()
    remarks += [*_differences(study, arms), *_software(study, arms), *_look(study, arms)]
    remarks += [*_few_seeds(study, arms), *_diverged(arms), *_evaluation(arms)]
    return tuple(sorted(_merged(remarks, len(arms)), key=lambda remark: not remark.blocks))


def _merged(remarks: Sequence[Remark], num_arms: int) -> list[Remark]:
    """The remarks without repetitions; a finding that all arms share becomes one remark."""
    merged: list[Remark] = []
    for remark in remarks:
        same = [r for r in remarks if r.arm and dataclasses.replace(r, arm=remark.arm) == remark]
        if remark.arm and len({other.arm for other in same}) == num_arms > 1:
            remark = dataclasses.replace(remark, arm=None, every_arm=True)
        if remark not in merged:
            merged.append(remark)
    return merged


def _tuning_of(study: Study) -> Iterator[Remark]:
    """The learning rate is tuned, and on other seeds, as those favour the chosen value."""
    if study.tuning is None:
        return
    if 'learning_rate' not in study.tuning.knobs:
        data = {'learning_rates': study.tuning.learning_rates}
        yield Remark(RemarkCode.LEARNING_RATE_NOT_TUNED, data, blocks=True)
    seeds = {SCREENING: set(study.tuning.seeds), VERDICT: set(study.seeds), SINGLE: set()}
    for trial in study.trials:
        seeds[trial.stage].add(trial.seed)
    if both := seeds[SCREENING] & seeds[VERDICT]:
        yield Remark(RemarkCode.SHARED_SEEDS, {'seeds': tuple(sorted(both))}, blocks=True)


def _declaration(study: Study) -> Iterator[Remark]:
    """The study is what its ledger declares, and no run was left out of its plan."""
    if study.ledger and study.ledger.declaration != study.declaration:
        yield Remark(RemarkCode.OTHER_DECLARATION, {}, blocks=True)
    for run, look in study.altered.items():
        arm = study.by_name[run].place if run in study.by_name else None
        yield Remark(RemarkCode.ALTERED, {'run': run, 'look': look}, True, arm)
    if study.orphans:
        yield Remark(RemarkCode.ORPHANED_RUNS, {'runs': study.orphans})


def _post_hoc(study: Study, arm: Arm) -> Iterator[Remark]:
    """An arm that was added after a look at results was chosen by them, and gets no word."""
    if study.ledger and arm.place.declared in study.ledger.post_hoc:
        data = {'first_look': study.ledger.first_look}
        yield Remark(RemarkCode.POST_HOC, data, True, arm.place)


def _splits(arm: Arm) -> Iterator[Remark]:
    """The loss that decides is that of a test split, and splits of text have many documents."""
    if arm.chosen and arm.split != TEST:
        yield Remark(RemarkCode.NO_TEST, {}, True, arm.place)
    for split, found in arm.example.documents.items() if arm.chosen else ():
        is_text = arm.example.metrics[f'{split}_bits_per_byte'] is not None
        if is_text and len(found.names) < MIN_DOCUMENTS:
            data = {'split': split, 'documents': len(found.names), 'needed': MIN_DOCUMENTS}
            yield Remark(RemarkCode.FEW_DOCUMENTS, data, True, arm.place)


def _look(study: Study, arms: Sequence[Arm]) -> Iterator[Remark]:
    """The next look, if some of the arms have results for it and others do not."""
    primary = [place for place in study.arms if place.control is None]
    for number, count in enumerate(study.looks if study.tuning else (), start=1):
        seeds = study.seeds[:count]
        reached = [arm.place for arm in arms if arm.control is None and arm.reached(seeds)]
        if len(reached) < len(primary) and len(study.looks) > 1:
            counts = {'look': number, 'looks': len(study.looks), 'seeds': count}
            counts |= {'reached': len(reached), 'arms': len(primary)}
            yield Remark(RemarkCode.LOOK_IN_PROGRESS, counts)
            return


def _training(study: Study, arm: Arm) -> Iterator[Remark]:
    """Verdict trials are trained to the end of a schedule that anneals the learning rate."""
    if short := [t for t in arm.verdict_trials if t.finished and t.stopped_early]:
        counts = {'stopped': len(short), 'trials': len(arm.verdict_trials)}
        steps = {'step': short[0].num_steps, 'num_steps': short[0].planned_steps}
        blocks = len(short) == len(arm.verdict_trials)
        yield Remark(RemarkCode.STOPPED_EARLY, counts | steps, blocks, arm.place)
    planned = study.by_name[arm.example.run].config['optimizer']
    schedule, final = planned['schedule'], planned['final_fraction']
    optimizer = OptimizerConfig(schedule=schedule, final_fraction=final)
    if not optimizer.anneals:
        reached = {'final_fraction': final if optimizer.decays else None, 'limit': ANNEALED}
        yield Remark(RemarkCode.NOT_ANNEALED, {'schedule': schedule} | reached, True, arm.place)


def _results(study: Study, arm: Arm) -> Iterator[Remark]:
    for run in (study.by_name[name] for name in dict.fromkeys(trial.run for trial in arm.trials)):
        if len(run.trials) < run.num_trials:
            counts = {'readable': len(run.trials), 'planned': run.num_trials}
            about = {'stage': None if run.stage == SINGLE else run.stage, 'run': run.name}
            blocks = run.stage == VERDICT
            yield Remark(RemarkCode.MISSING_RESULTS, counts | about, blocks, arm.place)


def _matching(study: Study, arm: Arm) -> Iterator[Remark]:
    residual = arm.example.residual
    if study.matched is None or residual is None:
        return
    if abs(residual) > study.tolerance and arm.control != EQUAL_SHAPE:
        data = {'matched': study.matched, 'residual': residual, 'tolerance': study.tolerance}
        yield Remark(RemarkCode.OVER_TOLERANCE, data, True, arm.place)
    parameters, target = arm.example.parameters['total'], arm.example.target_parameters
    if study.matched == 'total' and abs(parameters / target - 1 - residual) > 1e-6:
        data = {'parameters': parameters, 'target': target, 'residual': residual}
        yield Remark(RemarkCode.OTHER_PARAMETER_COUNT, data, True, arm.place)


def _seeds(study: Study, arm: Arm) -> Iterator[Remark]:
    """The runs of a stage have the declared seeds, up to a look: they are not selected by results.

    Screening seeds beyond the first ones count on from the last of these.
    """
    longer = arm.control == LONGER and study.controls['longer_seeds']
    seeds = tuple(longer or study.seeds)
    looks = [seeds] if longer else [seeds[:count] for count in study.looks]
    first = study.tuning.seeds
    further = range(max(first) + 1, max(first) + 1 + study.tuning.max_seeds - len(first))
    screening = [(*first, *further[:count]) for count in range(len(further) + 1)]
    for stage, allowed in ((SCREENING, screening), (VERDICT, looks)):
        own = [r.seeds for r in study.runs if r.place == arm.place and r.stage == stage]
        actual = tuple(dict.fromkeys(seed for of in own for seed in of))
        if actual and sorted(actual) not in [sorted(of) for of in allowed]:
            data = {'stage': stage, 'actual': actual, 'declared': allowed[-1]}
            yield Remark(RemarkCode.OTHER_SEEDS, data, True, arm.place)


def _settings(study: Study, arm: Arm) -> Iterator[Remark]:
    """The verdict is run at the settings that the screening chooses; these are known well."""
    for knob in arm.not_bracketed:
        values, best = arm.sweeps[knob].values, arm.sweeps[knob].best
        data = {'knob': knob, 'low': values[0], 'high': values[-1], 'best': best}
        yield Remark(RemarkCode.NOT_BRACKETED, data, True, arm.place)
    for knob in arm.unbounded:
        yield Remark(RemarkCode.UNBOUNDED_OPTIMUM, {'knob': knob}, True, arm.place)
    if not arm.verdict_trials:
        return
    tuning, ran_at = arm.tuning, arm.verdict_trials[0].at
    if tuning.knob is not None:
        data = {'knob': tuning.knob, 'values': tuning.values}
        yield Remark(RemarkCode.SCREENING_INCOMPLETE, data, True, arm.place)
    else:
        for knob, actual, expected in zip(KNOBS, ran_at, tuning.settings, strict=True):
            if actual != expected:
                data = {'knob': knob, 'actual': actual, 'expected': expected}
                data |= {'tuned': knob in study.tuning.knobs}
                yield Remark(RemarkCode.OTHER_SETTING, data, True, arm.place)
    if len({trial.at for trial in arm.verdict_trials}) > 1:
        yield Remark(RemarkCode.SEVERAL_SETTINGS, {}, True, arm.place)


def _differences(study: Study, arms: Sequence[Arm]) -> Iterator[Remark]:
    """Settings and data that differ between the arms of one baseline.

    One remark for each setting or fact that differs, with its values and arms. If it can affect
    results, each arm that differs from the baseline gets a blocking remark as well.
    """
    factors = _declared_factors(study)
    for group in dict.fromkeys(arm.group for arm in arms):
        own = [arm for arm in arms if arm.group == group and arm.verdict_trials]
        yield from _unlike(study, {arm.place: _facts(study, arm, factors) for arm in own})


def _declared_factors(study: Study) -> set[str]:
    """The settings that may differ: those of variants and of matching, and the tuned knobs."""
    own = [name for v in study.variants for name in re.findall(r'[?&](\w+)=', v)]
    tuned = study.tuning.knobs if study.tuning else ()
    knobs = {f'model.{k}' if k in MODEL_KNOBS else f'trials.{k}s' for k in tuned}
    return knobs | {f'model.{name}' for name in (*_FACTORS, *own)}


def _facts(study: Study, arm: Arm, factors: set[str]) -> dict[str, Any]:
    """Settings of the arm's run, and the data it was measured on."""
    example = arm.example
    settings = flat(study.by_name[example.run].config)
    return {
        **{n: v for n, v in settings if n not in factors and not n.startswith(OF_MACHINE)},
        **{f'data.{name}': value for name, value in flat(example.data)},
        **{n: getattr(example, n) for n in _MEASURED},
    }


def _unlike(study: Study, of_arms: Mapping[Place, dict[str, Any]]) -> Iterator[Remark]:
    for name in dict.fromkeys(name for of in of_arms.values() for name in of):
        values = {place: of.get(name, 'absent') for place, of in of_arms.items()}
        if len(set(map(repr, values.values()))) == 1:
            continue
        by_value: dict[str, tuple[str, ...]] = {}
        for place, value in values.items():
            label = f'{place.variant} ({place.control})' if place.control else place.variant
            by_value[str(value)] = (*by_value.get(str(value), ()), label)
        first = next(iter(values))
        size = first.size if len(study.sizes) > 1 else None
        corpus = first.corpus if len(study.corpora) > 1 else None
        where = {'name': name, 'size': size, 'corpus': corpus}
        found = {'values': by_value, 'harmless': name in _HARMLESS}
        yield Remark(RemarkCode.DIFFERS, where | found)
        baselines = [place for place in values if place.variant == study.baseline]
        if name in _HARMLESS or not baselines:
            continue
        baseline = values[baselines[0]]
        for place, value in values.items():
            if repr(value) != repr(baseline):
                data = {'name': name, 'value': str(value), 'baseline': str(baseline)}
                yield Remark(RemarkCode.DIFFERS_FROM_BASELINE, data, True, place)


def _software(study: Study, arms: Sequence[Arm]) -> Iterator[Remark]:
    """Versions and devices, which seldom affect results; and the code, which may.

    Results of several commits, or of changes that no commit holds, withhold every verdict unless
    the ledger accepts them.
    """
    facts: dict[str, dict[str, set[tuple[Place, str]]]] = {}
    for trial in (trial for arm in arms for trial in arm.trials):
        for name, value in flat(trial.provenance):
            where = trial.place, trial.stage
            facts.setdefault(name, {}).setdefault(str(value), set()).add(where)
    accepted = study.ledger.accepted if study.ledger else {}
    for name, places in facts.items():
        if len(places) > 1 and (name.startswith(('versions.', 'imported.')) or name in _SOFTWARE):
            values = {value: tuple(sorted(of, key=str)) for value, of in places.items()}
            is_code = name == 'git.commit' or name.startswith('imported.')
            why = accepted.get(COMMITS) if is_code else None
            data = {'name': name, 'values': values, 'accepted': why}
            yield Remark(RemarkCode.SOFTWARE_DIFFERS, data, is_code and why is None)
    if 'True' in facts.get('git.dirty', ()):
        why = accepted.get(UNCOMMITTED)
        yield Remark(RemarkCode.UNCOMMITTED_CHANGES, {'accepted': why}, why is None)


def _few_seeds(study: Study, arms: Sequence[Arm]) -> Iterator[Remark]:
    few = [arm for arm in arms if arm.verdict_trials and len(arm.chosen) < ENOUGH_SEEDS]
    if study.tuning and few:
        counts = tuple(sorted({len(arm.chosen) for arm in few}))
        places = None if len(few) == len(arms) else tuple(arm.place for arm in few)
        data = {'counts': counts, 'enough': ENOUGH_SEEDS, 'arms': places}
        yield Remark(RemarkCode.FEW_SEEDS, data)


def _diverged(arms: Sequence[Arm]) -> Iterator[Remark]:
    diverged = []
    for arm in arms:
        counts = tuple(
            (
                stage if arm.screening_trials else None,
                sum(not t.finished for t in of),
                len(of),
                tuple(t.diverged_at for t in of if t.diverged_at is not None),
            )
            for stage, of in ((SCREENING, arm.screening_trials), (VERDICT, arm.verdict_trials))
            if not all(trial.finished for trial in of)
        )
        diverged += [(arm.place, counts)] if counts else []
    if diverged:
        yield Remark(RemarkCode.DIVERGED, {'arms': tuple(diverged)})


def _evaluation(arms: Sequence[Arm]) -> Iterator[Remark]:
    """How much text losses are over; the error over documents is part of every interval."""
    chosen = [trial for arm in arms for trial in arm.chosen]
    data = {
        'tokens': {trial.eval_tokens for trial in chosen},
        'rows': {trial.eval_rows for trial in chosen},
        'test_tokens': {trial.test_tokens for trial in chosen},
        'documents': {len(of.names) for t in chosen for of in t.documents.values()},
    }
    if data['tokens'] - {None}:
        counts = {name: tuple(sorted(values - {None})) for name, values in data.items()}
        yield Remark(RemarkCode.EVALUATION, counts)
