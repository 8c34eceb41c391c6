"""The rules that a verdict depends on.

Each rule is a function that checks the results of a study and yields a remark for each violation. A
blocking remark withholds verdicts. Rules read measurements on the validation and test splits; they
do not read training losses. Three of them repeat checks that `qkattn.study.arms` makes before a
study starts.
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
from qkattn.verdict.runs import Trial
from qkattn.verdict.trained_arm import TrainedArm, with_baselines
from qkattn.verdict.trained_study import TrainedStudy, Yardstick

# A baseline language model has to lose at least this many nats/token less over the last half of its
# context than at position 4.
MIN_GAIN = 0.1
# A baseline translator has to have at least this much more BLEU than IBM model 1.
MIN_BLEU_GAIN = 10.0
# The loss of a baseline translator has to rise by at least this many nats/token if its sources are
# exchanged for those of other pairs.
MIN_SOURCES = 0.5
# The sd of an arm's losses over seeds may be at most this many times the median sd of the other
# arms in its group.
MAX_SPREAD = 3.0
# An entry of the ledger may accept these two findings; otherwise they withhold every verdict.
UNCOMMITTED, COMMITS = ledger.ACCEPTABLE
# Arms may differ in these model fields: the circuits, and the dimensions that matching solves for.
_MATCHED_FIELDS = ('score', 'value', 'd_model', 'd_ff', 'num_heads', 'head_size', 'num_layers')
# Arms may differ in these settings, as they do not affect the comparison. Trials are paired by
# seed, so further seeds do no harm.
_HARMLESS = (*HARMLESS, 'trials.seeds')
# Arms have to share these results: how much they were evaluated on.
_MEASURED = ('eval_tokens', 'eval_rows', 'test_tokens')
# Fields of provenance about the software and the devices of a run. 'versions.*' and 'imported.*'
# are further ones.
_SOFTWARE = ('python', 'git.commit', 'devices.kind', 'devices.platform')


def check(study: TrainedStudy, arms: Sequence[TrainedArm]) -> tuple[Remark, ...]:
    """Applies all rules; returns their remarks, the blocking ones first.

    A remark that every arm has is given once, about all arms.
    """
    remarks: list[Remark] = []
    for rule in RULES_OF_STUDY:
        remarks += rule(study, arms)
    rules_of_arm = [*RULES_OF_ARM]
    if study.tuned:
        rules_of_arm += RULES_OF_TUNED_ARM
    for arm in arms:
        for rule_of_arm in rules_of_arm:
            for remark in rule_of_arm(study, arm):
                remarks.append(dataclasses.replace(remark, arm=arm.key))
    for rule in RULES_OF_ALL_ARMS:
        remarks += rule(study, arms)

    merged = _merged(remarks, len(arms))
    blocking = [remark for remark in merged if remark.blocks]
    not_blocking = [remark for remark in merged if not remark.blocks]
    return (*blocking, *not_blocking)


def _about_every_arm(remark: Remark) -> Remark:
    """Returns the same remark about every arm; it names none."""
    return dataclasses.replace(remark, arm=None, every_arm=True)


def _merged(remarks: Sequence[Remark], num_arms: int) -> list[Remark]:
    """Merges the remarks of arms: if all of several arms have the same one, it is given once.

    If three arms are all trained without annealing, the result has one remark about every arm in
    place of three. Repeated remarks are removed, too.
    """
    merged: list[Remark] = []
    for remark in remarks:
        # The same remark about two arms differs only in the arm.
        about_every_arm = _about_every_arm(remark)
        arms_with_remark: set[ArmKey] = set()
        for other in remarks:
            if other.arm is not None and _about_every_arm(other) == about_every_arm:
                arms_with_remark.add(other.arm)

        is_about_arm = remark.arm is not None
        if is_about_arm and num_arms > 1 and len(arms_with_remark) == num_arms:
            merged_remark = about_every_arm
        else:
            merged_remark = remark
        if merged_remark not in merged:
            merged.append(merged_remark)
    return merged


def _blocking_remark(code: RemarkCode, arm: ArmKey | None = None, /, **data: Any) -> Remark:
    """Returns a remark that withholds verdicts: of `arm`, or of every arm if it is None.

    Rules about each arm leave the arm out; `check` fills it in.
    """
    return Remark(code, data, blocks=True, arm=arm)


def _tuning(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """Requires that the learning rate is tuned, on other seeds than those of the verdict."""
    if not study.tuned:
        return
    rates = study.grids['learning_rate']
    if len(rates) < 2:
        yield _blocking_remark(RemarkCode.LEARNING_RATE_NOT_TUNED, learning_rates=rates)

    # The seeds that the study declares, and those that its trials have.
    seeds_of_screening = set(study.tuning.seeds)
    seeds_of_verdict = set(study.seeds)
    for trial in study.trials:
        if trial.run.stage == SCREENING:
            seeds_of_screening.add(trial.seed)
        elif trial.run.stage == VERDICT:
            seeds_of_verdict.add(trial.seed)
    shared = sorted(seeds_of_screening & seeds_of_verdict)
    if shared:
        yield _blocking_remark(RemarkCode.SHARED_SEEDS, seeds=tuple(shared))


def _declaration(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """Requires that study.json and the results of runs are still as the ledger recorded them.

    The ledger records the hash of study.json when the study is declared. Whenever somebody looks at
    results, it records the hashes of the runs under the number of this look.
    """
    if study.ledger.declaration != study.declaration:
        yield _blocking_remark(RemarkCode.OTHER_DECLARATION)

    # The runs whose results have changed since a look, with the number of the first look at them.
    arm_of_run = {run.name: run.key for run in study.runs}
    for run_name, look in study.altered.items():
        # A run that the plan no longer has belongs to no arm. Its remark is about the study.
        arm = arm_of_run.get(run_name)
        yield _blocking_remark(RemarkCode.ALTERED, arm, run=run_name, look=look)


def _annealing(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    """Requires a schedule that anneals the learning rate."""
    settings = arm.example.run.config['optimizer']
    optimizer = OptimizerConfig(
        schedule=settings['schedule'], final_fraction=settings['final_fraction']
    )
    if optimizer.anneals:
        return
    # A schedule that does not decay, such as 'constant', ignores final_fraction.
    final_fraction = optimizer.final_fraction if optimizer.decays else None
    yield _blocking_remark(
        RemarkCode.NOT_ANNEALED,
        schedule=optimizer.schedule,
        final_fraction=final_fraction,
        limit=ANNEALED,
    )


def _results(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    """Requires that each run of the arm has the results of all its trials, or of none.

    Missing results of the verdict run withhold the verdict. Those of a screening run are only
    mentioned.
    """
    for run in study.runs:
        if run.key != arm.key:
            continue
        is_incomplete = 0 < len(run.trials) < run.num_trials
        if is_incomplete:
            data = {
                'readable': len(run.trials),
                'planned': run.num_trials,
                'stage': None if run.stage == SINGLE else run.stage,
                'run': run.name,
            }
            yield Remark(RemarkCode.MISSING_RESULTS, data, blocks=run.stage == VERDICT)


def _matching(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    """Requires that the arm costs what the baseline costs, up to the tolerance of the study.

    For example, an arm with 1.002 times the baseline's parameters has a residual of 0.002, which is
    too much for a tolerance of 0.001. Controls at the baseline's shape cost less and are exempt.
    """
    residual = arm.example.run.residual  # (cost - baseline's cost) / baseline's cost
    if study.match is None or residual is None or arm.key.control == SAME_SHAPE:
        return
    if abs(residual) > study.tolerance:
        yield _blocking_remark(
            RemarkCode.OVER_TOLERANCE,
            matched=study.match,
            residual=residual,
            tolerance=study.tolerance,
        )


def _post_hoc(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    """Requires that the arm was declared before the first look at results.

    Results may have influenced the choice of an arm that was added later.
    """
    if arm.key.declared in study.ledger.post_hoc:
        yield _blocking_remark(RemarkCode.POST_HOC, first_look=study.ledger.first_look)


def _seeds(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    """Requires that the arm's runs have the declared seeds, so that results cannot select them.

    The verdict has to have all its declared seeds. Screening has its declared seeds, and may draw
    further ones in a fixed order (`screening_seeds`) until it stops. If the seeds 0 and 1 are
    declared, then (0, 1) and (0, 1, 2) are valid screenings, but not (0, 1, 3).
    """
    screening: list[int] = []
    verdict: list[int] = []
    for run in study.runs:
        if run.key == arm.key and run.stage == SCREENING:
            screening += run.seeds
        elif run.key == arm.key and run.stage == VERDICT:
            verdict += run.seeds

    # The screenings of several settings repeat the same seeds.
    screening = list(dict.fromkeys(screening))
    valid_screening = screening_seeds(study.tuning)  # all seeds that screening may use
    num_seeds = max(len(screening), len(study.tuning.seeds))
    if screening and sorted(screening) != sorted(valid_screening[:num_seeds]):
        yield _blocking_remark(
            RemarkCode.OTHER_SEEDS,
            stage=SCREENING,
            actual=tuple(screening),
            declared=valid_screening,
        )

    valid_verdict = study.verdict_seeds(arm.key)
    if verdict and sorted(verdict) != sorted(valid_verdict):
        yield _blocking_remark(
            RemarkCode.OTHER_SEEDS,
            stage=VERDICT,
            actual=tuple(verdict),
            declared=valid_verdict,
        )


def _settings(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    """Requires that screening determines the arm's settings and that its verdict run uses them.

    A knob is a setting that may be tuned, such as the learning rate. Screening measures the loss at
    several values of a knob: its sweep. There are three requirements:

    1. Every sweep determines the best value of its knob: worse values lie on both sides of it, and
       the losses bound where the optimum is.
    2. Every knob is screened before the verdict run.
    3. The verdict run has the chosen value of every knob.
    """
    for knob, sweep in arm.sweeps.items():
        # `at_worst` bounds how much lower the loss at the optimum may be. It is None if the losses
        # do not bound where the optimum is.
        is_optimum_bounded = sweep.at_worst is not None
        if not sweep.bracketed:
            yield _blocking_remark(
                RemarkCode.NOT_BRACKETED,
                knob=knob,
                low=sweep.values[0],
                high=sweep.values[-1],
                best=sweep.best,
            )
        elif not is_optimum_bounded:
            yield _blocking_remark(RemarkCode.UNBOUNDED_OPTIMUM, knob=knob)
    if not arm.verdict_trials:
        return

    tuning = arm.tuning
    knob_to_screen = tuning.knob  # None once all knobs are screened
    if knob_to_screen is not None:
        # The values that a verdict run must have are not known yet.
        yield _blocking_remark(
            RemarkCode.SCREENING_INCOMPLETE, knob=knob_to_screen, values=tuning.values
        )
        return

    for index, knob in enumerate(KNOBS):
        expected = tuning.settings[index]
        values_in_verdict = dict.fromkeys(trial.settings[index] for trial in arm.verdict_trials)
        for actual in values_in_verdict:
            if actual != expected:
                yield _blocking_remark(
                    RemarkCode.OTHER_SETTING,
                    knob=knob,
                    tuned=knob in study.tuned_knobs,
                    actual=actual,
                    expected=expected,
                )


def _splits(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    """Requires a test split, and MIN_DOCUMENTS documents or more in each split of text."""
    if not arm.chosen:
        return
    if arm.split != TEST:
        yield _blocking_remark(RemarkCode.NO_TEST)
    for split, documents in arm.example.documents.items():
        # Only results on text have bits per byte.
        is_text = arm.example.metrics[f'{split}_bits_per_byte'] is not None
        number = len(documents.names)
        if is_text and number < MIN_DOCUMENTS:
            yield _blocking_remark(
                RemarkCode.FEW_DOCUMENTS, split=split, documents=number, needed=MIN_DOCUMENTS
            )


def baselines(study: TrainedStudy, arms: Sequence[TrainedArm]) -> list[TrainedArm]:
    """Returns the baselines that have results; none if the study has no recorded yardsticks."""
    if study.yardsticks is None:
        return []
    return [arm for arm in arms if arm.is_baseline and arm.loss]


def why_untrained(arm: TrainedArm) -> Iterator[Remark]:
    """Yields a remark for each reason why a baseline is not trained enough to compare arms with.

    A baseline has to beat its yardstick: the losses or the BLEU of methods that only count, such as
    n-grams. Beyond that, a language model has to use its context, and a translator its source
    sentences. Without a yardstick, or with one of an earlier definition, this is not known.
    """
    yardstick = arm.yardstick
    if yardstick is None:
        yield _blocking_remark(RemarkCode.NO_YARDSTICK, arm.key)
        return
    if not yardstick.is_current:
        yield _blocking_remark(RemarkCode.OUTDATED_YARDSTICK, arm.key)
        return
    for code, data in shortfalls(arm, yardstick):
        yield _blocking_remark(code, arm.key, **data)
    context_gain = yardstick.context_gain
    if context_gain is not None and context_gain < MIN_GAIN:
        yield _blocking_remark(
            RemarkCode.LITTLE_CONTEXT, arm.key, gain=context_gain, needed=MIN_GAIN
        )
    source_gain = yardstick.source_gain
    if source_gain is not None and source_gain < MIN_SOURCES:
        yield _blocking_remark(
            RemarkCode.SOURCES_UNUSED, arm.key, cost=source_gain, needed=MIN_SOURCES
        )


def shortfalls(
    arm: TrainedArm, yardstick: Yardstick
) -> Iterator[tuple[RemarkCode, dict[str, Any]]]:
    """Yields each way in which an arm does not beat a yardstick: a code with its numbers.

    A yardstick has the losses and the BLEU of methods that only count. For example, a model
    with a loss of 3.2 nats/token does not beat 5-grams with a loss of 3.1. The codes are those of
    remarks on a baseline. An arm without a loss yields nothing.
    """
    if arm.loss is None:
        return
    best = yardstick.best(arm.split)
    if best is not None:
        name, yardstick_loss = best
        if arm.loss.mean >= yardstick_loss:
            data = {
                'split': arm.split,
                'loss': arm.loss.mean,
                'tokens': yardstick.tokens,
                'name': name,
                'yardstick': yardstick_loss,
            }
            yield RemarkCode.BELOW_YARDSTICK, data

    word_by_word = yardstick.bleu.get(arm.split)
    if word_by_word is not None:
        needed = word_by_word + MIN_BLEU_GAIN
        if arm.bleu is None or arm.bleu < needed:
            data = {'bleu': arm.bleu, 'word_by_word': word_by_word, 'needed': needed}
            yield RemarkCode.LOW_BLEU, data


def _arms_below_yardstick(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """Marks arms and controls that do not beat the yardstick of their baseline.

    These remarks withhold no verdict.
    """
    if study.yardsticks is None:
        return
    # The codes that `shortfalls` yields withhold verdicts. Other arms have codes of their own.
    code_of_arm = {
        RemarkCode.BELOW_YARDSTICK: RemarkCode.ARM_BELOW_YARDSTICK,
        RemarkCode.LOW_BLEU: RemarkCode.ARM_LOW_BLEU,
    }
    for arm in arms:
        yardstick = study.yardsticks.get(arm.baseline_key)
        if arm.is_baseline or yardstick is None or not yardstick.is_current:
            continue
        for code, data in shortfalls(arm, yardstick):
            yield Remark(code_of_arm[code], data, arm=arm.key)


def _baselines_trained(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """Requires that the baselines of a tuned study are trained enough to compare arms with."""
    if not study.tuned:
        return
    has_finished_baseline = any(arm.is_baseline and arm.chosen for arm in arms)
    if study.yardsticks is None and has_finished_baseline:
        # yardsticks.json is missing. The remark is about the study, as no baseline has a yardstick.
        yield _blocking_remark(RemarkCode.NO_YARDSTICK)
    for baseline in baselines(study, arms):
        yield from why_untrained(baseline)


def _spread(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """Requires that the seeds of each arm of a tuned study end about as close as those of others.

    For example, the losses of an arm have a standard deviation (sd) of 0.020 over seeds, and the
    median sd of the other arms is 0.005. The arm is marked, as 0.020 is more than MAX_SPREAD = 3
    times 0.005. The other arms are those with the same size, corpus and length of training.
    """
    if not study.tuned:
        return
    sds_by_baseline: dict[ArmKey, dict[ArmKey, float]] = {}
    for arm in arms:
        if arm.loss and arm.loss.sd:
            sds = sds_by_baseline.setdefault(arm.baseline_key, {})
            sds[arm.key] = arm.loss.sd

    for sds in sds_by_baseline.values():
        for key, sd in sds.items():
            other_sds = [other_sd for other, other_sd in sds.items() if other != key]
            if not other_sds:
                continue
            usual_sd = statistics.median(other_sds)
            if sd > MAX_SPREAD * usual_sd:
                yield _blocking_remark(
                    RemarkCode.BIMODAL_SEEDS, key, sd=sd, usual=usual_sd, times=MAX_SPREAD
                )


def _differences(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """Requires that an arm differs from its baseline only in what the study varies.

    All other settings, the data and the amount of evaluation have to be equal
    (`_values_to_share`).
    """
    varied = _varied_settings(study)
    arms_with_verdict_trials = [arm for arm in arms if arm.verdict_trials]
    for arm, baseline in with_baselines(arms_with_verdict_trials):
        if baseline is None or baseline is arm:
            continue
        values = _values_to_share(arm, varied)
        baseline_values = _values_to_share(baseline, varied)
        for name in dict.fromkeys([*baseline_values, *values]):
            value = str(values.get(name, 'absent'))
            baseline_value = str(baseline_values.get(name, 'absent'))
            if value != baseline_value:
                yield _blocking_remark(
                    RemarkCode.DIFFERS_FROM_BASELINE,
                    arm.key,
                    name=name,
                    value=value,
                    baseline=baseline_value,
                )


def _varied_settings(study: TrainedStudy) -> set[str]:
    """Returns the settings in which arms of a study may differ, by name, such as 'model.d_ff'.

    There are four kinds: settings that affect no comparison, dimensions that matching solves for,
    settings that variants set, and settings that are tuned.
    """
    varied = set(_HARMLESS)
    for field in _MATCHED_FIELDS:
        varied.add(f'model.{field}')
    for variant in study.variants:
        # 'qk/vo?num_kv_heads=1&qk_norm=True' sets the fields num_kv_heads and qk_norm.
        for field in re.findall(r'[?&](\w+)=', variant):
            varied.add(f'model.{field}')
    for knob in study.tuned_knobs:
        if knob in MODEL_KNOBS:
            varied.add(f'model.{knob}')
        else:
            # Trials list the values of a tuned setting: trials.learning_rates.
            varied.add(f'trials.{knob}s')
    return varied


def _values_to_share(arm: TrainedArm, varied: Collection[str]) -> dict[str, Any]:
    """Returns the values that have to be equal for an arm and its baseline, by name.

    An example is {'model.num_layers': 4, 'data.tokenizer': 'bytes', 'eval_rows': 256, ...}. The
    values are the settings of the arm's runs, its data, how much it was evaluated on, and the cost
    that it is matched to. Settings in `varied` and of the machine may differ, and are left out.
    """
    trial = arm.example  # all trials of the arm share these values
    values: dict[str, Any] = {}
    for name, value in flat(trial.run.config):
        if name not in varied and not name.startswith(OF_MACHINE):
            values[name] = value
    for name, value in flat(trial.data):
        values[f'data.{name}'] = value
    for name in _MEASURED:
        values[name] = getattr(trial, name)
    values['target_parameters'] = trial.run.target
    return values


def _software(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """Reports software and devices that differ between runs or between starts of one run.

    Different code and uncommitted changes withhold every verdict, but the ledger may accept them
    with a reason. Other differences, such as versions, are only mentioned.
    """
    arms_by_value_of_field = _arms_by_provenance(arms)
    accepted_reasons = study.ledger.accepted  # by COMMITS or UNCOMMITTED
    for field, arms_by_value in arms_by_value_of_field.items():
        is_code = field == 'git.commit' or field.startswith('imported.')
        is_version_or_device = field in _SOFTWARE or field.startswith('versions.')
        has_several_values = len(arms_by_value) > 1
        if has_several_values and (is_code or is_version_or_device):
            reason = accepted_reasons.get(COMMITS) if is_code else None
            values = {value: tuple(arm_keys) for value, arm_keys in arms_by_value.items()}
            data = {'name': field, 'values': values, 'accepted': reason}
            is_unaccepted_code = is_code and reason is None
            yield Remark(RemarkCode.SOFTWARE_DIFFERS, data, blocks=is_unaccepted_code)

    arms_by_dirty = arms_by_value_of_field.get('git.dirty', {})  # by 'True' or 'False'
    has_uncommitted_changes = 'True' in arms_by_dirty
    if has_uncommitted_changes:
        reason = accepted_reasons.get(UNCOMMITTED)
        yield Remark(RemarkCode.UNCOMMITTED_CHANGES, {'accepted': reason}, blocks=reason is None)


def _arms_by_provenance(arms: Sequence[TrainedArm]) -> dict[str, dict[str, list[ArmKey]]]:
    """Returns which arms have which value of each field of their provenance.

    The provenance of a run says on what software and machine it was trained. For example, two arms
    were trained at different commits with the same Python:

        {'git.commit': {'3f2a': [key], '9c41': [other_key]}, 'python': {'3.12.4': [key, other_key]}}

    A run that was resumed has the provenance of several starts, and its arm is listed for all.
    """
    arms_by_value_of: dict[str, dict[str, list[ArmKey]]] = {}
    for arm in arms:
        for trial in arm.trials:
            earlier_starts = trial.provenance.get('earlier', ())
            for start in (trial.provenance, *earlier_starts):
                for name, value in flat(start):
                    arms_by_value = arms_by_value_of.setdefault(name, {})
                    arms_with_value = arms_by_value.setdefault(str(value), [])
                    if arm.key not in arms_with_value:
                        arms_with_value.append(arm.key)
    return arms_by_value_of


def _evaluation(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """Reports how much text the arms' losses were measured on.

    Each number is a tuple of the values that trials have, such as (65536,) if all have the same.
    """
    chosen: list[Trial] = []
    document_counts: list[int] = []
    for arm in arms:
        chosen += arm.chosen
        for trial in arm.chosen:
            for documents in trial.documents.values():
                document_counts.append(len(documents.names))
    tokens = _distinct(trial.eval_tokens for trial in chosen)
    if tokens:
        data = {
            'tokens': tokens,
            'rows': _distinct(trial.eval_rows for trial in chosen),
            'test_tokens': _distinct(trial.test_tokens for trial in chosen),
            'documents': _distinct(document_counts),
        }
        yield Remark(RemarkCode.EVALUATION, data)


def _distinct(counts: Iterable[int | None]) -> tuple[int, ...]:
    """Returns the different counts, ascending, without None (unknown)."""
    known = {count for count in counts if count is not None}
    return tuple(sorted(known))


# Rules about the study as a whole.
RULES_OF_STUDY = (_tuning, _declaration)
# Rules about each arm.
RULES_OF_ARM = (_annealing, _results, _matching)
# Rules about each arm of a tuned study.
RULES_OF_TUNED_ARM = (_post_hoc, _seeds, _settings, _splits)
# Rules about all arms together.
RULES_OF_ALL_ARMS = (
    _baselines_trained,
    _spread,
    _arms_below_yardstick,
    _differences,
    _software,
    _evaluation,
)
