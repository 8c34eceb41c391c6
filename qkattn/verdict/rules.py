"""The rules that a verdict depends on.

A rule checks the results of a study and yields a remark for each violation. A blocking remark
withholds verdicts.
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

# The loss of a baseline language model has to fall by this much, in nats/token, from position 4 to
# the last half of its context.
MIN_GAIN = 0.1
# A baseline translator has to exceed the BLEU of IBM model 1 by this much.
MIN_BLEU_GAIN = 10.0
# The loss of a baseline translator has to rise by this much, in nats/token, if its source sentences
# are exchanged with each other.
MIN_SOURCES = 0.5
# An arm's losses may spread over seeds at most this many times as much as losses of similar arms.
MAX_SPREAD = 3.0
# Findings that withhold every verdict unless the ledger accepts them with a reason.
UNCOMMITTED, COMMITS = ledger.ACCEPTABLE
# The model fields that define a variant or are changed to match its cost.
_MATCHED_FIELDS = ('score', 'value', 'd_model', 'd_ff', 'num_heads', 'head_size', 'num_layers')
# Settings that do not affect the comparison of two arms.
_HARMLESS = (*HARMLESS, 'trials.seeds')
# The amounts of evaluated text, which arms have to share.
_MEASURED = ('eval_tokens', 'eval_rows', 'test_tokens')
# Fields of provenance on software and devices, besides 'versions.*' and 'imported.*'.
_SOFTWARE = ('python', 'git.commit', 'devices.kind', 'devices.platform')


def check(study: TrainedStudy, arms: Sequence[TrainedArm]) -> tuple[Remark, ...]:
    """Applies all rules to a study and its arms.

    Returns:
        The remarks, blocking remarks first. A remark that all arms share appears once.
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
    """Returns the same remark, but about every arm in place of one arm."""
    return dataclasses.replace(remark, arm=None, every_arm=True)


def _merged(remarks: Sequence[Remark], num_arms: int) -> list[Remark]:
    """Replaces equal remarks about all arms by one general remark, and drops duplicates."""
    merged: list[Remark] = []
    for remark in remarks:
        general_remark = _about_every_arm(remark)
        arms_with_remark: set[ArmKey] = set()
        for other in remarks:
            if other.arm is not None and _about_every_arm(other) == general_remark:
                arms_with_remark.add(other.arm)

        is_about_arm = remark.arm is not None
        all_arms_have_remark = num_arms > 1 and len(arms_with_remark) == num_arms
        merged_remark = general_remark if is_about_arm and all_arms_have_remark else remark
        if merged_remark not in merged:
            merged.append(merged_remark)
    return merged


def _blocking_remark(code: RemarkCode, arm: ArmKey | None = None, /, **data: Any) -> Remark:
    """Returns a remark that withholds the verdict on `arm`, or every verdict if it is None."""
    return Remark(code, data, blocks=True, arm=arm)


def _tuning(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """Requires that the learning rate is tuned, with other seeds than the verdict runs."""
    if not study.tuned:
        return
    learning_rates = study.grids['learning_rate']
    if len(learning_rates) < 2:
        yield _blocking_remark(RemarkCode.LEARNING_RATE_NOT_TUNED, learning_rates=learning_rates)

    seeds_in_screening = set(study.tuning.seeds)
    seeds_in_verdict = set(study.seeds)
    # Trials may have other seeds than the study declares.
    for trial in study.trials:
        if trial.run.stage == SCREENING:
            seeds_in_screening.add(trial.seed)
        elif trial.run.stage == VERDICT:
            seeds_in_verdict.add(trial.seed)
    shared_seeds = sorted(seeds_in_screening & seeds_in_verdict)
    if shared_seeds:
        yield _blocking_remark(RemarkCode.SHARED_SEEDS, seeds=tuple(shared_seeds))


def _declaration(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """Requires that study.json and the results of runs still have the hashes in the ledger."""
    hash_of_study_json = study.declaration
    if study.ledger.declaration != hash_of_study_json:
        yield _blocking_remark(RemarkCode.OTHER_DECLARATION)

    arm_of_run = {run.name: run.key for run in study.runs}
    for run_name, look in study.altered.items():
        # A run that has left the plan has no arm, so the remark is about the study.
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
    # The learning rate ends at final_fraction of its peak, except in schedules without decay.
    final_fraction = optimizer.final_fraction if optimizer.decays else None
    yield _blocking_remark(
        RemarkCode.NOT_ANNEALED,
        schedule=optimizer.schedule,
        final_fraction=final_fraction,
        limit=ANNEALED,
    )


def _results(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    """Requires that each run of the arm has results of all its trials, or of none.

    Only an incomplete verdict run withholds the verdict.
    """
    for run in study.runs:
        if run.key != arm.key:
            continue
        num_results = len(run.trials)
        is_incomplete = 0 < num_results < run.num_trials
        if is_incomplete:
            data = {
                'readable': num_results,
                'planned': run.num_trials,
                'stage': None if run.stage == SINGLE else run.stage,
                'run': run.name,
            }
            yield Remark(RemarkCode.MISSING_RESULTS, data, blocks=run.stage == VERDICT)


def _matching(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    """Requires that the arm has the baseline's cost, such as parameters, within the tolerance.

    Controls at the baseline's shape are exempt.
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
    """Requires that the arm was declared before anyone looked at results."""
    if arm.key.declared in study.ledger.post_hoc:
        yield _blocking_remark(RemarkCode.POST_HOC, first_look=study.ledger.first_look)


def _seeds(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    """Requires that the arm's runs have the declared seeds.

    Screening may draw further seeds, but only in the order of `screening_seeds`. For example, if
    the seeds 0 and 1 are declared, (0, 1, 2) is valid and (0, 1, 3) is not.
    """
    seeds_in_screening: list[int] = []
    seeds_in_verdict: list[int] = []
    for run in study.runs:
        if run.key == arm.key and run.stage == SCREENING:
            seeds_in_screening += run.seeds
        elif run.key == arm.key and run.stage == VERDICT:
            seeds_in_verdict += run.seeds

    # Several screening runs of the arm have the same seeds.
    seeds_in_screening = list(dict.fromkeys(seeds_in_screening))
    allowed_in_screening = screening_seeds(study.tuning)  # the declared seeds come first
    num_expected = max(len(seeds_in_screening), len(study.tuning.seeds))
    expected_in_screening = allowed_in_screening[:num_expected]
    if seeds_in_screening and sorted(seeds_in_screening) != sorted(expected_in_screening):
        yield _blocking_remark(
            RemarkCode.OTHER_SEEDS,
            stage=SCREENING,
            actual=tuple(seeds_in_screening),
            declared=allowed_in_screening,
        )

    expected_in_verdict = study.verdict_seeds(arm.key)
    if seeds_in_verdict and sorted(seeds_in_verdict) != sorted(expected_in_verdict):
        yield _blocking_remark(
            RemarkCode.OTHER_SEEDS,
            stage=VERDICT,
            actual=tuple(seeds_in_verdict),
            declared=expected_in_verdict,
        )


def _settings(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    """Requires that every knob is tuned, and that the verdict run has the tuned values.

    A knob is a tunable setting, such as the learning rate. The best value in its sweep has to lie
    between worse values, and a bound on the loss at the optimum has to be known.
    """
    for knob, sweep in arm.sweeps.items():
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
    knob_to_screen = tuning.knob  # None if all knobs are screened
    if knob_to_screen is not None:
        yield _blocking_remark(
            RemarkCode.SCREENING_INCOMPLETE, knob=knob_to_screen, values=tuning.values
        )
        return

    for index, knob in enumerate(KNOBS):
        expected = tuning.settings[index]  # settings are in the order of KNOBS
        verdict_values = [trial.settings[index] for trial in arm.verdict_trials]
        distinct_values = dict.fromkeys(verdict_values)
        for actual in distinct_values:
            if actual != expected:
                yield _blocking_remark(
                    RemarkCode.OTHER_SETTING,
                    knob=knob,
                    tuned=knob in study.tuned_knobs,
                    actual=actual,
                    expected=expected,
                )


def _splits(study: TrainedStudy, arm: TrainedArm) -> Iterator[Remark]:
    """Requires a test split, and at least MIN_DOCUMENTS documents in each split of text."""
    if not arm.chosen:
        return
    if arm.split != TEST:
        yield _blocking_remark(RemarkCode.NO_TEST)
    for split, documents in arm.example.documents.items():
        # Only text has bits per byte.
        is_text = arm.example.metrics[f'{split}_bits_per_byte'] is not None
        num_documents = len(documents.names)
        if is_text and num_documents < MIN_DOCUMENTS:
            yield _blocking_remark(
                RemarkCode.FEW_DOCUMENTS,
                split=split,
                documents=num_documents,
                needed=MIN_DOCUMENTS,
            )


def baselines(study: TrainedStudy, arms: Sequence[TrainedArm]) -> list[TrainedArm]:
    """Returns the baselines that have results; none if the study has no recorded yardsticks."""
    if study.yardsticks is None:
        return []
    return [arm for arm in arms if arm.is_baseline and arm.loss]


def why_untrained(arm: TrainedArm) -> Iterator[Remark]:
    """Yields the reasons why a baseline is not trained well enough to compare arms with it.

    A baseline has to beat its yardstick, such as the loss of n-grams. A language model also has to
    use its context, and a translator its source sentences.
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
    """Yields how an arm fails to beat a yardstick.

    A yardstick is the loss or BLEU of methods that only count. For example, an arm with a loss of
    3.2 nats/token does not beat 5-grams with a loss of 3.1.

    Yields:
        The code and the data of a remark: BELOW_YARDSTICK or LOW_BLEU.
    """
    if arm.loss is None:
        return
    best_method = yardstick.best(arm.split)
    if best_method is not None:
        method_name, method_loss = best_method
        if arm.loss.mean >= method_loss:
            data = {
                'split': arm.split,
                'loss': arm.loss.mean,
                'tokens': yardstick.tokens,
                'name': method_name,
                'yardstick': method_loss,
            }
            yield RemarkCode.BELOW_YARDSTICK, data

    method_bleu = yardstick.bleu.get(arm.split)
    if method_bleu is not None:
        needed_bleu = method_bleu + MIN_BLEU_GAIN
        if arm.bleu is None or arm.bleu < needed_bleu:
            data = {'bleu': arm.bleu, 'word_by_word': method_bleu, 'needed': needed_bleu}
            yield RemarkCode.LOW_BLEU, data


def _arms_below_yardstick(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """Reports arms that do not beat their baseline's yardstick, without withholding verdicts."""
    if study.yardsticks is None:
        return
    # In place of each code of a baseline, the code of an arm, which withholds no verdict.
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
    """Requires that the baselines of a tuned study are trained well enough to compare with."""
    if not study.tuned:
        return
    lacks_yardsticks = study.yardsticks is None  # yardsticks.json is missing
    # `chosen` are the trials that enter the verdict; there are none if all diverged.
    has_finished_baseline = any(arm.is_baseline and arm.chosen for arm in arms)
    if lacks_yardsticks and has_finished_baseline:
        yield _blocking_remark(RemarkCode.NO_YARDSTICK)
    for baseline in baselines(study, arms):
        yield from why_untrained(baseline)


def _spread(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """Requires that an arm's losses spread over seeds no more than is usual.

    The standard deviation (sd) over seeds may be at most MAX_SPREAD times the median sd of the
    other arms with the same baseline.
    """
    if not study.tuned:
        return
    sds_by_baseline: dict[ArmKey, dict[ArmKey, float]] = {}
    for arm in arms:
        if arm.loss and arm.loss.sd:
            sd_by_arm = sds_by_baseline.setdefault(arm.baseline_key, {})
            sd_by_arm[arm.key] = arm.loss.sd

    for sd_by_arm in sds_by_baseline.values():
        if len(sd_by_arm) < 2:
            continue
        for key, sd in sd_by_arm.items():
            other_sds = [other_sd for other_key, other_sd in sd_by_arm.items() if other_key != key]
            usual_sd = statistics.median(other_sds)
            if sd > MAX_SPREAD * usual_sd:
                yield _blocking_remark(
                    RemarkCode.BIMODAL_SEEDS, key, sd=sd, usual=usual_sd, times=MAX_SPREAD
                )


def _differences(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """Requires that an arm differs from its baseline only in what the study varies."""
    varied_settings = _varied_settings(study)
    arms_with_verdict_trials = [arm for arm in arms if arm.verdict_trials]
    for arm, baseline in with_baselines(arms_with_verdict_trials):
        if baseline is None or baseline is arm:
            continue
        # Values by name, such as {'train.num_steps': 4000, ...}.
        arm_values = _values_to_share(arm, varied_settings)
        baseline_values = _values_to_share(baseline, varied_settings)
        distinct_names = dict.fromkeys([*baseline_values, *arm_values])
        for name in distinct_names:
            arm_value = str(arm_values.get(name, 'absent'))
            baseline_value = str(baseline_values.get(name, 'absent'))
            if arm_value != baseline_value:
                yield _blocking_remark(
                    RemarkCode.DIFFERS_FROM_BASELINE,
                    arm.key,
                    name=name,
                    value=arm_value,
                    baseline=baseline_value,
                )


def _varied_settings(study: TrainedStudy) -> set[str]:
    """Returns the names of settings in which arms of a study may differ, such as 'model.d_ff'."""
    varied = set(_HARMLESS)
    for field in _MATCHED_FIELDS:
        varied.add(f'model.{field}')
    for variant in study.variants:
        # For example, 'qk/vo?num_kv_heads=1&qk_norm=True' sets num_kv_heads and qk_norm.
        for field in re.findall(r'[?&](\w+)=', variant):
            varied.add(f'model.{field}')
    for knob in study.tuned_knobs:
        if knob in MODEL_KNOBS:
            varied.add(f'model.{knob}')
        else:
            varied.add(f'trials.{knob}s')  # such as 'trials.learning_rates'
    return varied


def _values_to_share(arm: TrainedArm, varied: Collection[str]) -> dict[str, Any]:
    """Returns the values that an arm has to share with its baseline, by name.

    For example, {'train.num_steps': 4000, 'eval_rows': 256, ...}.

    Args:
        varied: The names of settings in which arms may differ. They are left out, as are settings
            of the machine.
    """
    trial = arm.example  # all trials of an arm have the same values
    values: dict[str, Any] = {}
    for setting_name, setting in flat(trial.run.config):
        is_of_machine = setting_name.startswith(OF_MACHINE)
        if setting_name not in varied and not is_of_machine:
            values[setting_name] = setting
    for field, data_value in flat(trial.data):
        values[f'data.{field}'] = data_value
    for field in _MEASURED:  # 'eval_tokens', 'eval_rows' and 'test_tokens'
        values[field] = getattr(trial, field)
    # The cost, such as the number of parameters, that arms are matched to.
    values['target_parameters'] = trial.run.target
    return values


def _software(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """Reports software and devices that differ between runs or between starts of one run.

    Different code and uncommitted changes withhold every verdict, but the ledger may accept them
    with a reason. Code without a commit and other differences, such as versions, are only
    mentioned.
    """
    # For example, {'git.commit': {'3f2a': [key], '9c41': [other_key]}, ...}.
    arms_by_value_of_field = _arms_by_provenance(arms)
    accepted_reasons = study.ledger.accepted  # such as {'commits': 'only docs differ'}
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

    # An image or an installed package has no git history.
    arms_by_commit = arms_by_value_of_field.get('git.commit', {})
    if 'None' in arms_by_commit:
        yield Remark(RemarkCode.UNKNOWN_CODE)


def _arms_by_provenance(arms: Sequence[TrainedArm]) -> dict[str, dict[str, list[ArmKey]]]:
    """Returns the arms by field and value of their provenance: software and machine.

    For example, if two arms were trained at different commits with the same Python:

        {'git.commit': {'3f2a': [key], '9c41': [other_key]}, 'python': {'3.12.4': [key, other_key]}}
    """
    arms_by_value_of_field: dict[str, dict[str, list[ArmKey]]] = {}
    for arm in arms:
        for trial in arm.trials:
            # A resumed run has the provenance of several starts.
            earlier_starts = trial.provenance.get('earlier', ())
            for provenance in (trial.provenance, *earlier_starts):
                for field, value in flat(provenance):
                    arms_by_value = arms_by_value_of_field.setdefault(field, {})
                    arm_keys = arms_by_value.setdefault(str(value), [])
                    if arm.key not in arm_keys:
                        arm_keys.append(arm.key)
    return arms_by_value_of_field


def _evaluation(study: TrainedStudy, arms: Sequence[TrainedArm]) -> Iterator[Remark]:
    """Reports how much text the arms' losses were measured on."""
    trials: list[Trial] = []
    document_counts: list[int] = []
    for arm in arms:
        trials += arm.chosen
        for trial in arm.chosen:
            for documents in trial.documents.values():
                document_counts.append(len(documents.names))
    token_counts = _distinct(trial.eval_tokens for trial in trials)
    if token_counts:
        data = {
            'tokens': token_counts,
            'rows': _distinct(trial.eval_rows for trial in trials),
            'test_tokens': _distinct(trial.test_tokens for trial in trials),
            'documents': _distinct(document_counts),
        }
        yield Remark(RemarkCode.EVALUATION, data)


def _distinct(counts: Iterable[int | None]) -> tuple[int, ...]:
    """Returns the distinct counts, ascending, without None."""
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
