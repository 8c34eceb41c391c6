"""The rules that a verdict depends on, applied to results: functions that give remarks.

Results are validation and test measurements only; training losses are not read. Three rules of
`qkattn.study.arms`, which refuse a study before it starts, hold for results, too.
"""

import dataclasses
import itertools
import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from qkattn.config import ANNEALED, OptimizerConfig
from qkattn.config.serialize import OF_MACHINE
from qkattn.stats.inference import MIN_DOCUMENTS
from qkattn.storage import ledger
from qkattn.storage.records import flat
from qkattn.study.arm_key import SAME_SHAPE, ArmKey
from qkattn.study.chain import HARMLESS
from qkattn.study.tuning import KNOBS, MODEL_KNOBS, SCREENING, SINGLE, VERDICT, screening_seeds
from qkattn.verdict.codes import TEST, Remark, RemarkCode
from qkattn.verdict.trained_arm import TrainedArm, with_baselines
from qkattn.verdict.trained_study import TrainedStudy, Yardstick

# Nats/token that a language model gains between position 4 and the last half of its context.
MIN_GAIN = 0.1
# BLEU that a translator gains over IBM model 1.
MIN_BLEU_GAIN = 10.0
# Nats/token that a translation loses with the sources of other pairs.
MIN_SOURCES = 0.5
# How many times the median sd of the other arms of its group an arm's losses may spread over seeds.
MAX_SPREAD = 3.0
# What an entry of the ledger accepts that would otherwise withhold every verdict.
UNCOMMITTED, COMMITS = ledger.ACCEPTABLE
# The factors of every study, and the shapes that matching solves for.
_FACTORS = ('score', 'value', 'd_model', 'd_ff', 'num_heads', 'head_size', 'num_layers')
# Trials are paired by seed whatever the other seeds are.
_HARMLESS = (*HARMLESS, 'trials.seeds')
_MEASURED = ('eval_tokens', 'eval_rows', 'test_tokens')
_SOFTWARE = ('python', 'git.commit', 'devices.kind', 'devices.platform')


def check(study: TrainedStudy, arms: Sequence[TrainedArm]) -> tuple[Remark, ...]:
    """The remarks of all rules, the blocking ones first; one that all arms share is one remark."""
    remarks = [remark for rule in OF_STUDY for remark in rule(study, arms)]
    for arm in arms:
        for rule in (*OF_ARM, *(OF_TUNED_ARM if study.tuned else ())):
            remarks += [dataclasses.replace(remark, arm=arm.key) for remark in rule(study, arm)]
    remarks += [remark for rule in OF_ARMS for remark in rule(study, arms)]
    merged: list[Remark] = []
    for remark in remarks:
        content = remark.code, remark.data, remark.blocks
        alike = {r.arm for r in remarks if r.arm and (r.code, r.data, r.blocks) == content}
        if remark.arm and len(alike) == len(arms) > 1:
            remark = Remark(*content, every_arm=True)
        if remark not in merged:
            merged.append(remark)
    return tuple(sorted(merged, key=lambda remark: not remark.blocks))


def _block(code: RemarkCode, arm: ArmKey | None = None, /, **data: Any) -> Remark:
    """A remark that withholds verdicts; rules of an arm leave the arm out."""
    return Remark(code, data, True, arm)


def _tuning(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """The learning rate is tuned, on other seeds than those of the verdict."""
    if not study.tuned:
        return
    if len(rates := study.grids['learning_rate']) < 2:
        yield _block(RemarkCode.LEARNING_RATE_NOT_TUNED, learning_rates=rates)
    seeds = {SCREENING: set(study.tuning.seeds), VERDICT: set(study.seeds), SINGLE: set()}
    for trial in study.trials:
        seeds[trial.run.stage].add(trial.seed)
    if shared := sorted(seeds[SCREENING] & seeds[VERDICT]):
        yield _block(RemarkCode.SHARED_SEEDS, seeds=tuple(shared))


def _declaration(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """The study is what its ledger declares, and its runs are what looks have seen."""
    if study.ledger.declaration != study.declaration:
        yield _block(RemarkCode.OTHER_DECLARATION)
    arms_of = {run.name: run.key for run in study.runs}
    for run, look in study.altered.items():
        yield _block(RemarkCode.ALTERED, arms_of.get(run), run=run, look=look)


def _annealing(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    """The schedule anneals the learning rate."""
    planned = arm.example.run.config['optimizer']
    about = {name: planned[name] for name in ('schedule', 'final_fraction')}
    if not (optimizer := OptimizerConfig(**about)).anneals:
        about['final_fraction'] = optimizer.final_fraction if optimizer.decays else None
        yield _block(RemarkCode.NOT_ANNEALED, **about, limit=ANNEALED)


def _results(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    for run in (run for run in study.runs if run.key == arm.key):
        if 0 < len(run.trials) < run.num_trials:
            counts = {'readable': len(run.trials), 'planned': run.num_trials}
            about = {'stage': None if run.stage == SINGLE else run.stage, 'run': run.name}
            yield Remark(RemarkCode.MISSING_RESULTS, counts | about, run.stage == VERDICT)


def _matching(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    residual = arm.example.run.residual
    matched = study.match
    if matched is None or residual is None or arm.key.control == SAME_SHAPE:
        return
    if abs(residual) > study.tolerance:
        about = {'residual': residual, 'tolerance': study.tolerance}
        yield _block(RemarkCode.OVER_TOLERANCE, matched=matched, **about)


def _post_hoc(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    """An arm that was added after a look depends on its results, and gets no verdict."""
    if arm.key.declared in study.ledger.post_hoc:
        yield _block(RemarkCode.POST_HOC, first_look=study.ledger.first_look)


def _seeds(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    """The runs of a stage have the declared seeds, which are not selected by results.

    Screening seeds beyond the first ones count on from the last of these.
    """
    first = len(study.tuning.seeds)
    drawn = screening_seeds(study.tuning)
    screening = [drawn[:number] for number in range(first, len(drawn) + 1)]
    for stage, allowed in ((SCREENING, screening), (VERDICT, [study.verdict_seeds(arm.key)])):
        runs = [r.seeds for r in study.runs if r.key == arm.key and r.stage == stage]
        actual = [seed for of_run in runs for seed in of_run]
        if stage == SCREENING:  # every knob has runs of its own
            actual = list(dict.fromkeys(actual))
        if actual and sorted(actual) not in map(sorted, allowed):
            data = {'stage': stage, 'actual': tuple(actual), 'declared': allowed[-1]}
            yield _block(RemarkCode.OTHER_SEEDS, **data)


def _settings(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    """Verdict runs use the settings that screening chooses, which are well determined."""
    for knob, sweep in arm.sweeps.items():
        if not sweep.bracketed:
            ends = {'low': sweep.values[0], 'high': sweep.values[-1]}
            yield _block(RemarkCode.NOT_BRACKETED, knob=knob, **ends, best=sweep.best)
        elif sweep.at_worst is None:
            yield _block(RemarkCode.UNBOUNDED_OPTIMUM, knob=knob)
    if not arm.verdict_trials:
        return
    if (knob := arm.tuning.knob) is not None:
        yield _block(RemarkCode.SCREENING_INCOMPLETE, knob=knob, values=arm.tuning.values)
        return
    for place, (knob, expected) in enumerate(zip(KNOBS, arm.tuning.settings, strict=True)):
        for actual in dict.fromkeys(trial.at[place] for trial in arm.verdict_trials):
            if actual != expected:
                about = {'knob': knob, 'tuned': knob in study.tuned_knobs}
                yield _block(RemarkCode.OTHER_SETTING, **about, actual=actual, expected=expected)


def _splits(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    """Arms are decided on a test split, and splits of text have many documents."""
    if arm.chosen and arm.split != TEST:
        yield _block(RemarkCode.NO_TEST)
    for split, documents in arm.example.documents.items() if arm.chosen else ():
        is_text = arm.example.metrics[f'{split}_bits_per_byte'] is not None
        if is_text and (number := len(documents.names)) < MIN_DOCUMENTS:
            counts = {'documents': number, 'needed': MIN_DOCUMENTS}
            yield _block(RemarkCode.FEW_DOCUMENTS, split=split, **counts)


def baselines(study: TrainedStudy, arms: Sequence[TrainedArm]) -> list[TrainedArm]:
    """Those with results, beside their yardsticks; none of a study that has recorded none."""
    return [a for a in arms if a.is_baseline and a.loss and study.yardsticks is not None]


def untrained(arm: TrainedArm) -> Iterator[Remark]:
    """What a baseline lacks to be trained enough to compare."""
    if (yardstick := arm.yardstick) is None:
        yield _block(RemarkCode.NO_YARDSTICK, arm.key)
        return
    if not yardstick.is_current:
        yield _block(RemarkCode.OUTDATED_YARDSTICK, arm.key)
        return
    yield from (_block(code, arm.key, **data) for code, data in shortfalls(arm, yardstick))
    for code, name, value, needed in (
        (RemarkCode.LITTLE_CONTEXT, 'gain', yardstick.gain, MIN_GAIN),
        (RemarkCode.SOURCES_UNUSED, 'cost', yardstick.sources, MIN_SOURCES),
    ):
        if value is not None and value < needed:
            yield _block(code, arm.key, **{name: value, 'needed': needed})


def shortfalls(
    arm: TrainedArm, yardstick: Yardstick
) -> Iterator[tuple[RemarkCode, dict[str, Any]]]:
    """The codes, with their data, of what the losses and translations of a baseline lack."""
    best = yardstick.best(arm.split)
    if best and arm.loss and arm.loss.mean >= best[1]:
        data = {'split': arm.split, 'loss': arm.loss.mean, 'tokens': yardstick.tokens}
        yield RemarkCode.BELOW_YARDSTICK, data | {'name': best[0], 'yardstick': best[1]}
    word_by_word = yardstick.bleu.get(arm.split)
    if word_by_word is not None and arm.loss:
        needed = word_by_word + MIN_BLEU_GAIN
        if arm.bleu is None or arm.bleu < needed:
            data = {'bleu': arm.bleu, 'word_by_word': word_by_word, 'needed': needed}
            yield RemarkCode.LOW_BLEU, data


def _short_arms(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """The arms beside a baseline that fall short of what it has to beat, controls included."""
    of_arm = {RemarkCode.BELOW_YARDSTICK: RemarkCode.ARM_BELOW_YARDSTICK}
    of_arm[RemarkCode.LOW_BLEU] = RemarkCode.ARM_LOW_BLEU
    for arm in arms:
        yardstick = (study.yardsticks or {}).get(arm.group)
        if yardstick and yardstick.is_current and not arm.is_baseline:
            for code, data in shortfalls(arm, yardstick):
                yield Remark(of_arm[code], data, arm=arm.key)


def _trained(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """Baselines beat their yardsticks, and the seeds of an arm end close to each other."""
    if not study.tuned:
        return
    if study.yardsticks is None and any(arm.is_baseline and arm.chosen for arm in arms):
        yield _block(RemarkCode.NO_YARDSTICK)
    for baseline in baselines(study, arms):
        yield from untrained(baseline)
    for group in dict.fromkeys(arm.group for arm in arms):
        spreads = [(a, a.loss.sd) for a in arms if a.group == group and a.loss and a.loss.sd]
        for arm, sd in spreads:
            others = [other for one, other in spreads if one is not arm]
            if others and sd > MAX_SPREAD * (usual := statistics.median(others)):
                data = {'sd': sd, 'usual': usual, 'times': MAX_SPREAD}
                yield _block(RemarkCode.BIMODAL_SEEDS, arm.key, **data)


def _differences(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """Settings and data in which an arm differs from its baseline without being factors."""
    of_variants = [name for v in study.variants for name in re.findall(r'[?&](\w+)=', v)]
    factors = {*_HARMLESS, *(f'model.{name}' for name in (*_FACTORS, *of_variants))}
    factors |= {f'model.{k}' if k in MODEL_KNOBS else f'trials.{k}s' for k in study.tuned_knobs}

    def facts(arm: TrainedArm) -> dict[str, Any]:
        trial = arm.example
        settings = flat(trial.run.config)
        return {
            **{n: v for n, v in settings if n not in factors and not n.startswith(OF_MACHINE)},
            **{f'data.{name}': value for name, value in flat(trial.data)},
            **{n: getattr(trial, n) for n in _MEASURED},
            'target_parameters': trial.run.target,
        }

    for arm, baseline in with_baselines([arm for arm in arms if arm.verdict_trials]):
        if baseline is not None and baseline is not arm:
            of_arm = facts(arm)
            of_baseline = facts(baseline)
            for name in dict.fromkeys((*of_baseline, *of_arm)):
                value, other = (str(of.get(name, 'absent')) for of in (of_arm, of_baseline))
                if value != other:
                    data = {'name': name, 'value': value, 'baseline': other}
                    yield _block(RemarkCode.DIFFERS_FROM_BASELINE, arm.key, **data)


def _software(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """Versions and devices, which seldom affect results; and the code, which may.

    Results of several commits, or of uncommitted changes, withhold every verdict unless
    the ledger accepts them; also where a run was resumed on another commit.
    """
    facts: dict[str, dict[str, dict[ArmKey, None]]] = {}
    for trial in (trial for arm in arms for trial in arm.trials):
        starts = trial.provenance, *trial.provenance.get('earlier', ())
        for name, value in itertools.chain.from_iterable(map(flat, starts)):
            facts.setdefault(name, {}).setdefault(str(value), {})[trial.run.key] = None
    accepted = study.ledger.accepted
    for name, arms_of in facts.items():
        if len(arms_of) > 1 and (name.startswith(('versions.', 'imported.')) or name in _SOFTWARE):
            values = {value: tuple(keys) for value, keys in arms_of.items()}
            is_code = name == 'git.commit' or name.startswith('imported.')
            why = accepted.get(COMMITS) if is_code else None
            data = {'name': name, 'values': values, 'accepted': why}
            yield Remark(RemarkCode.SOFTWARE_DIFFERS, data, is_code and why is None)
    if 'True' in facts.get('git.dirty', ()):
        why = accepted.get(UNCOMMITTED)
        yield Remark(RemarkCode.UNCOMMITTED_CHANGES, {'accepted': why}, why is None)


def _evaluation(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """The amount of text behind losses; the error over documents is part of every interval."""
    chosen = [trial for arm in arms for trial in arm.chosen]
    data = {
        'tokens': {trial.eval_tokens for trial in chosen},
        'rows': {trial.eval_rows for trial in chosen},
        'test_tokens': {trial.test_tokens for trial in chosen},
        'documents': {len(d.names) for trial in chosen for d in trial.documents.values()},
    }
    if data['tokens'] - {None}:
        counts = {name: tuple(sorted(values - {None})) for name, values in data.items()}
        yield Remark(RemarkCode.EVALUATION, counts)


OF_STUDY = (_tuning, _declaration)
OF_ARM = (_annealing, _results, _matching)
OF_TUNED_ARM = (_post_hoc, _seeds, _settings, _splits)
OF_ARMS = (_trained, _short_arms, _differences, _software, _evaluation)
