"""The rules that a verdict depends on, applied to results: functions that give remarks.

Results are validation and test measurements only; training losses are not read. Three rules of
`qkattn.study.arms`, which refuse a study before it starts, hold for results, too.
"""

import dataclasses
import re
import statistics
from collections.abc import Collection, Iterable, Iterator, Sequence
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
# Results that arms share, beside settings and data: how much they were evaluated on.
_MEASURED = ('eval_tokens', 'eval_rows', 'test_tokens')
# Facts about the software and the machine of a run, beside versions and imported modules.
_SOFTWARE = ('python', 'git.commit', 'devices.kind', 'devices.platform')


def check(study: TrainedStudy, arms: Sequence[TrainedArm]) -> tuple[Remark, ...]:
    """The remarks of all rules, the blocking ones first; one that all arms share is one remark."""
    remarks: list[Remark] = []
    for rule in OF_STUDY:
        remarks += rule(study, arms)
    rules_of_arm = (*OF_ARM, *OF_TUNED_ARM) if study.tuned else OF_ARM
    for arm in arms:
        for rule_of_arm in rules_of_arm:
            for remark in rule_of_arm(study, arm):
                remarks.append(dataclasses.replace(remark, arm=arm.key))
    for rule in OF_ARMS:
        remarks += rule(study, arms)
    return tuple(sorted(_merged(remarks, len(arms)), key=lambda remark: not remark.blocks))


def _merged(remarks: Sequence[Remark], num_arms: int) -> list[Remark]:
    """The remarks, each once; one that each of several arms has is about every arm."""
    merged: list[Remark] = []
    for remark in remarks:
        shared = dataclasses.replace(remark, arm=None, every_arm=True)
        arms = {
            other.arm
            for other in remarks
            if other.arm and dataclasses.replace(other, arm=None, every_arm=True) == shared
        }
        if remark.arm and len(arms) == num_arms > 1:
            remark = shared
        if remark not in merged:
            merged.append(remark)
    return merged


def _block(code: RemarkCode, arm: ArmKey | None = None, /, **data: Any) -> Remark:
    """A remark that withholds verdicts; rules of an arm leave the arm out, which `check` adds."""
    return Remark(code, data, blocks=True, arm=arm)


def _tuning(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """The learning rate is tuned, on other seeds than those of the verdict."""
    if not study.tuned:
        return
    rates = study.grids['learning_rate']
    if len(rates) < 2:
        yield _block(RemarkCode.LEARNING_RATE_NOT_TUNED, learning_rates=rates)
    seeds = {SCREENING: set(study.tuning.seeds), VERDICT: set(study.seeds), SINGLE: set()}
    for trial in study.trials:
        seeds[trial.run.stage].add(trial.seed)
    shared = sorted(seeds[SCREENING] & seeds[VERDICT])
    if shared:
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
    schedule = planned['schedule']
    optimizer = OptimizerConfig(schedule=schedule, final_fraction=planned['final_fraction'])
    if not optimizer.anneals:
        final_fraction = optimizer.final_fraction if optimizer.decays else None
        yield _block(
            RemarkCode.NOT_ANNEALED,
            schedule=schedule,
            final_fraction=final_fraction,
            limit=ANNEALED,
        )


def _results(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    """The runs of an arm that ended have results of all their trials."""
    for run in study.runs:
        if run.key == arm.key and 0 < len(run.trials) < run.num_trials:
            data = {
                'readable': len(run.trials),
                'planned': run.num_trials,
                'stage': None if run.stage == SINGLE else run.stage,
                'run': run.name,
            }
            yield Remark(RemarkCode.MISSING_RESULTS, data, blocks=run.stage == VERDICT)


def _matching(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    """An arm costs what the baseline costs, up to the tolerance; but not at the same shape."""
    residual = arm.example.run.residual  # (cost - that of the baseline) / that of the baseline
    if study.match is None or residual is None or arm.key.control == SAME_SHAPE:
        return
    if abs(residual) > study.tolerance:
        yield _block(
            RemarkCode.OVER_TOLERANCE,
            matched=study.match,
            residual=residual,
            tolerance=study.tolerance,
        )


def _post_hoc(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    """An arm that was added after a look depends on its results, and gets no verdict."""
    if arm.key.declared in study.ledger.post_hoc:
        yield _block(RemarkCode.POST_HOC, first_look=study.ledger.first_look)


def _seeds(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    """The runs of a stage have the declared seeds, which are not selected by results.

    Screening seeds beyond the first ones count on from the last of these, as many as it needs.
    """
    drawn = screening_seeds(study.tuning)
    first = len(study.tuning.seeds)
    allowed = {
        SCREENING: [drawn[:number] for number in range(first, len(drawn) + 1)],
        VERDICT: [study.verdict_seeds(arm.key)],
    }
    for stage, valid in allowed.items():
        actual: list[int] = []
        for run in study.runs:
            if run.key == arm.key and run.stage == stage:
                actual += run.seeds
        if stage == SCREENING:  # every knob has runs of its own
            actual = list(dict.fromkeys(actual))
        if actual and sorted(actual) not in [sorted(seeds) for seeds in valid]:
            declared = valid[-1]
            yield _block(
                RemarkCode.OTHER_SEEDS, stage=stage, actual=tuple(actual), declared=declared
            )


def _settings(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    """Verdict runs use the settings that screening chooses, which are well determined."""
    for knob, sweep in arm.sweeps.items():
        if not sweep.bracketed:
            yield _block(
                RemarkCode.NOT_BRACKETED,
                knob=knob,
                low=sweep.values[0],
                high=sweep.values[-1],
                best=sweep.best,
            )
        elif sweep.at_worst is None:
            yield _block(RemarkCode.UNBOUNDED_OPTIMUM, knob=knob)
    if not arm.verdict_trials:
        return
    tuning = arm.tuning
    if tuning.knob is not None:
        yield _block(RemarkCode.SCREENING_INCOMPLETE, knob=tuning.knob, values=tuning.values)
        return
    for place, (knob, expected) in enumerate(zip(KNOBS, tuning.settings, strict=True)):
        for actual in dict.fromkeys(trial.settings[place] for trial in arm.verdict_trials):
            if actual != expected:
                yield _block(
                    RemarkCode.OTHER_SETTING,
                    knob=knob,
                    tuned=knob in study.tuned_knobs,
                    actual=actual,
                    expected=expected,
                )


def _splits(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    """Arms are decided on a test split, and splits of text have many documents."""
    if not arm.chosen:
        return
    if arm.split != TEST:
        yield _block(RemarkCode.NO_TEST)
    for split, documents in arm.example.documents.items():
        is_text = arm.example.metrics[f'{split}_bits_per_byte'] is not None
        number = len(documents.names)
        if is_text and number < MIN_DOCUMENTS:
            yield _block(
                RemarkCode.FEW_DOCUMENTS, split=split, documents=number, needed=MIN_DOCUMENTS
            )


def baselines(study: TrainedStudy, arms: Sequence[TrainedArm]) -> list[TrainedArm]:
    """The baselines with results; none of a study that has recorded no yardsticks."""
    if study.yardsticks is None:
        return []
    return [arm for arm in arms if arm.is_baseline and arm.loss]


def untrained(arm: TrainedArm) -> Iterator[Remark]:
    """What a baseline lacks to be trained enough to compare: it has to beat its yardstick."""
    yardstick = arm.yardstick
    if yardstick is None:
        yield _block(RemarkCode.NO_YARDSTICK, arm.key)
        return
    if not yardstick.is_current:
        yield _block(RemarkCode.OUTDATED_YARDSTICK, arm.key)
        return
    for code, data in shortfalls(arm, yardstick):
        yield _block(code, arm.key, **data)
    if yardstick.gain is not None and yardstick.gain < MIN_GAIN:
        yield _block(RemarkCode.LITTLE_CONTEXT, arm.key, gain=yardstick.gain, needed=MIN_GAIN)
    if yardstick.sources is not None and yardstick.sources < MIN_SOURCES:
        cost = yardstick.sources
        yield _block(RemarkCode.SOURCES_UNUSED, arm.key, cost=cost, needed=MIN_SOURCES)


def shortfalls(
    arm: TrainedArm, yardstick: Yardstick
) -> Iterator[tuple[RemarkCode, dict[str, Any]]]:
    """Where an arm does not beat a yardstick, the losses and BLEU of methods that only count.

    Yields the code for a baseline, with its data.
    """
    best = yardstick.best(arm.split)
    if best and arm.loss and arm.loss.mean >= best[1]:
        name, loss = best
        yield (
            RemarkCode.BELOW_YARDSTICK,
            {
                'split': arm.split,
                'loss': arm.loss.mean,
                'tokens': yardstick.tokens,
                'name': name,
                'yardstick': loss,
            },
        )
    word_by_word = yardstick.bleu.get(arm.split)
    if word_by_word is not None and arm.loss:
        needed = word_by_word + MIN_BLEU_GAIN
        if arm.bleu is None or arm.bleu < needed:
            data = {'bleu': arm.bleu, 'word_by_word': word_by_word, 'needed': needed}
            yield RemarkCode.LOW_BLEU, data


def _short_arms(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """The arms beside a baseline that fall short of what it has to beat, controls included."""
    codes_of_arms = {
        RemarkCode.BELOW_YARDSTICK: RemarkCode.ARM_BELOW_YARDSTICK,
        RemarkCode.LOW_BLEU: RemarkCode.ARM_LOW_BLEU,
    }
    for arm in arms:
        yardstick = (study.yardsticks or {}).get(arm.group)
        if yardstick and yardstick.is_current and not arm.is_baseline:
            for code, data in shortfalls(arm, yardstick):
                yield Remark(codes_of_arms[code], data, arm=arm.key)


def _trained(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """Baselines beat their yardsticks, and the seeds of an arm end close to each other."""
    if not study.tuned:
        return
    if study.yardsticks is None and any(arm.is_baseline and arm.chosen for arm in arms):
        yield _block(RemarkCode.NO_YARDSTICK)
    for baseline in baselines(study, arms):
        yield from untrained(baseline)
    for group in dict.fromkeys(arm.group for arm in arms):
        # Standard deviations of losses over seeds, of the arms with one.
        spreads = {
            arm.key: arm.loss.sd for arm in arms if arm.group == group and arm.loss and arm.loss.sd
        }
        for key, sd in spreads.items():
            others = [spread for other, spread in spreads.items() if other != key]
            if not others:
                continue
            usual = statistics.median(others)
            if sd > MAX_SPREAD * usual:
                yield _block(RemarkCode.BIMODAL_SEEDS, key, sd=sd, usual=usual, times=MAX_SPREAD)


def _differences(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """Settings and data in which an arm differs from its baseline without being factors.

    Factors are what variants set, what matching solves for, and what is tuned.
    """
    factors = {*_HARMLESS, *(f'model.{name}' for name in _FACTORS)}
    for variant in study.variants:
        # The fields of 'qk/vo?num_kv_heads=1&qk_norm=True': num_kv_heads and qk_norm.
        factors |= {f'model.{name}' for name in re.findall(r'[?&](\w+)=', variant)}
    for knob in study.tuned_knobs:
        factors.add(f'model.{knob}' if knob in MODEL_KNOBS else f'trials.{knob}s')
    for arm, baseline in with_baselines([arm for arm in arms if arm.verdict_trials]):
        if baseline is None or baseline is arm:
            continue
        of_arm = _facts(arm, factors)
        of_baseline = _facts(baseline, factors)
        for name in dict.fromkeys((*of_baseline, *of_arm)):
            value = str(of_arm.get(name, 'absent'))
            other = str(of_baseline.get(name, 'absent'))
            if value != other:
                yield _block(
                    RemarkCode.DIFFERS_FROM_BASELINE,
                    arm.key,
                    name=name,
                    value=value,
                    baseline=other,
                )


def _facts(arm: TrainedArm, factors: Collection[str]) -> dict[str, Any]:
    """By name what an arm shares with its baseline: settings but the factors, data, target."""
    trial = arm.example
    facts: dict[str, Any] = {}
    for name, value in flat(trial.run.config):
        if name not in factors and not name.startswith(OF_MACHINE):
            facts[name] = value
    for name, value in flat(trial.data):
        facts[f'data.{name}'] = value
    for name in _MEASURED:
        facts[name] = getattr(trial, name)
    facts['target_parameters'] = trial.run.target
    return facts


def _software(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """Versions and devices, which seldom affect results; and the code, which may.

    Results of several commits, or of uncommitted changes, withhold every verdict unless
    the ledger accepts them; also where a run was resumed on another commit.
    """
    # By the name of a fact, as 'git.commit', the arms of each of its values.
    facts: dict[str, dict[str, dict[ArmKey, None]]] = {}
    for arm in arms:
        for trial in arm.trials:
            for start in (trial.provenance, *trial.provenance.get('earlier', ())):
                for name, value in flat(start):
                    arms_by_value = facts.setdefault(name, {})
                    arms_by_value.setdefault(str(value), {})[trial.run.key] = None
    accepted = study.ledger.accepted
    for name, arms_by_value in facts.items():
        is_software = name.startswith(('versions.', 'imported.')) or name in _SOFTWARE
        if not is_software or len(arms_by_value) == 1:
            continue
        is_code = name == 'git.commit' or name.startswith('imported.')
        why = accepted.get(COMMITS) if is_code else None
        values = {value: tuple(keys) for value, keys in arms_by_value.items()}
        data = {'name': name, 'values': values, 'accepted': why}
        yield Remark(RemarkCode.SOFTWARE_DIFFERS, data, blocks=is_code and why is None)
    if 'True' in facts.get('git.dirty', ()):
        why = accepted.get(UNCOMMITTED)
        yield Remark(RemarkCode.UNCOMMITTED_CHANGES, {'accepted': why}, blocks=why is None)


def _evaluation(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """The amount of text behind losses; the error over documents is part of every interval."""
    chosen = [trial for arm in arms for trial in arm.chosen]
    tokens = _numbers(trial.eval_tokens for trial in chosen)
    if tokens:
        data = {
            'tokens': tokens,
            'rows': _numbers(trial.eval_rows for trial in chosen),
            'test_tokens': _numbers(trial.test_tokens for trial in chosen),
            'documents': _numbers(
                len(documents.names) for trial in chosen for documents in trial.documents.values()
            ),
        }
        yield Remark(RemarkCode.EVALUATION, data)


def _numbers(counts: Iterable[int | None]) -> tuple[int, ...]:
    """The counts that are known, each once, ascending."""
    return tuple(sorted({count for count in counts if count is not None}))


# The rules: of a study as a whole, of each arm, of each arm of a tuned study, of arms together.
OF_STUDY = (_tuning, _declaration)
OF_ARM = (_annealing, _results, _matching)
OF_TUNED_ARM = (_post_hoc, _seeds, _settings, _splits)
OF_ARMS = (_trained, _short_arms, _differences, _software, _evaluation)
