"""The protocol of a study: its defaults, and the rules that a verdict requires."""

import dataclasses
import itertools
import math

from qkattn.config import ANNEALED, ControlsConfig, Study, TuningConfig
from qkattn.errors import ConfigError
from qkattn.stats.inference import MIN_PAIRS
from qkattn.stats.sweep import MIN_SEEDS, MIN_VALUES
from qkattn.study.tuning import MODEL_KNOBS, TRIAL_KNOBS, screening_seeds


def resolved(study: Study) -> Study:
    """Returns the study with its corpora and controls filled in.

    By default, the only corpus is that of the base config, and controls that are trained longer
    have the seeds of the verdict. A study without tuning has no controls. A study without matching
    has no controls at the baseline's shape, as all its arms have that shape.
    """
    is_tuned = bool(study.tuning.seeds)
    longer = study.controls.longer if is_tuned else None
    longer_seeds: tuple[int, ...] = ()
    if longer:
        longer_seeds = study.controls.longer_seeds or study.base.trials.seeds
    controls = ControlsConfig(
        equal_shape=study.controls.equal_shape and is_tuned and study.match is not None,
        longer=longer,
        longer_seeds=longer_seeds,
    )
    corpora = study.corpora or (study.base.data.name,)
    return dataclasses.replace(study, corpora=corpora, controls=controls)


def check_protocol(study: Study) -> None:
    """Raises ConfigError if the settings of a study break a rule of the protocol."""
    if study.match is None and len(study.destinations) > 1:
        raise ConfigError(
            f'destinations={study.destinations} have no effect with match=None; give one'
        )
    if not study.tuning.seeds:
        _check_untuned(study)
        return

    # Only a tuned study has verdicts, which need all of this.
    _check_baseline(study)
    _check_verdict_seeds('trials.seeds', study.base.trials.seeds, study.tuning)
    if study.controls.longer_seeds:
        _check_verdict_seeds('controls.longer_seeds', study.controls.longer_seeds, study.tuning)
    _check_grids(study)
    _check_mesh(study)


def _check_untuned(study: Study) -> None:
    """Raises ConfigError for a setting that has no effect without tuning."""
    if study.repeats is not None:
        raise ConfigError(
            f'repeats={study.repeats!r} needs tuning.seeds: without them there is no verdict'
        )
    # `expected` are positive controls, which need a verdict. Grids of model fields need tuning.
    needs_tuning = {'expected': study.expected, **_model_grids(study)}
    for name, values in needs_tuning.items():
        if values:
            raise ConfigError(
                f'{name}={values} need tuning.seeds: without them there is no verdict'
            )


def _check_baseline(study: Study) -> None:
    """Raises ConfigError unless the study trains its baseline in the way that a verdict needs.

    The learning rate has to be tuned and to anneal.
    """
    if study.baseline not in study.variants:
        raise ConfigError(
            f'variants={study.variants} must contain the baseline {study.baseline!r} for a verdict'
        )
    optimizer = study.base.optimizer
    if not optimizer.anneals:
        raise ConfigError(
            f'optimizer.schedule={optimizer.schedule} with '
            f'final_fraction={optimizer.final_fraction} does not anneal, which a verdict needs; '
            f'use linear, cosine or wsd with final_fraction={ANNEALED} or less'
        )
    learning_rates = study.base.trials.learning_rates
    if len(learning_rates) < 2:
        raise ConfigError(
            f'trials.learning_rates={learning_rates} must be a grid with tuning.seeds, as '
            'in (0.001, 0.002, 0.004)'
        )


def _check_verdict_seeds(name: str, seeds: tuple[int, ...], tuning: TuningConfig) -> None:
    """Raises ConfigError unless the seeds in the setting `name` are enough and not tuned on."""
    if len(seeds) < MIN_PAIRS:
        raise ConfigError(f'{name}={seeds} must be at least {MIN_PAIRS} seeds for a verdict')
    # tuning.seeds, and the seeds that are drawn if screening needs more.
    all_screening_seeds = screening_seeds(tuning)
    shared = sorted(set(all_screening_seeds).intersection(seeds))
    if shared:
        raise ConfigError(
            f'tuning.seeds, or those that the tuning may draw, and {name} share '
            f'{tuple(shared)}: settings tuned on a seed look better on it, so the verdict '
            'needs other seeds'
        )


def _check_grids(study: Study) -> None:
    """Raises ConfigError unless grids ascend, and may grow until they show a best value.

    A best value shows if there are worse values on both sides of it. While it does not, tuning adds
    values to a grid, and seeds to a value, up to the limits `max_points` and `max_seeds`.
    """
    # The grids by setting, as in {'trials.learning_rates': (0.001, 0.002, 0.004), ...}.
    grids = {f'trials.{knob}s': getattr(study.base.trials, f'{knob}s') for knob in TRIAL_KNOBS}
    for name, values in _model_grids(study).items():
        if values:
            grids[name] = values

    # Every grid of two or more values ascends.
    for name, values in grids.items():
        if len(values) > 1 and not _ascends(values):
            raise ConfigError(
                f'{name}={values} must ascend by a constant factor, as in (0.001, 0.002, 0.004)'
            )

    # The limits leave room for the longest grid, and for worse values beside a best one.
    tuning = study.tuning
    longest = max(len(values) for values in grids.values())
    least_points = max(longest, MIN_VALUES)
    if tuning.max_points < least_points:
        raise ConfigError(
            f'tuning.max_points={tuning.max_points} must be at least {least_points}: the longest '
            f'grid has {longest}, and a best value needs worse ones beside it'
        )

    # They leave room for the first seeds, and for enough seeds to show noise.
    least_seeds = max(len(tuning.seeds), MIN_SEEDS)
    if tuning.max_seeds < least_seeds:
        raise ConfigError(
            f'tuning.max_seeds={tuning.max_seeds} must be at least {least_seeds}: tuning.seeds has '
            f'{len(tuning.seeds)}, and one seed shows no best value'
        )


def _check_mesh(study: Study) -> None:
    """Raises ConfigError unless the trial axis of the mesh divides every number of seeds."""
    num_devices = study.base.mesh.trial
    numbers = (
        len(study.tuning.seeds),
        study.tuning.max_seeds,
        len(study.base.trials.seeds),
        len(study.controls.longer_seeds),
    )
    if any(number % num_devices for number in numbers):
        raise ConfigError(
            f'mesh.trial={num_devices} must divide the numbers of tuning.seeds, '
            f'tuning.max_seeds, trials.seeds and controls.longer_seeds, {numbers}'
        )


def _model_grids(study: Study) -> dict[str, tuple[float, ...]]:
    """Returns the grids of model fields by setting, such as 'tuning.init_qks'; () if not tuned."""
    return {f'tuning.{knob}s': getattr(study.tuning, f'{knob}s') for knob in MODEL_KNOBS}


def _ascends(values: tuple[float, ...]) -> bool:
    """Returns whether a grid of two or more positive values ascends by a constant factor."""
    first = values[0]
    second = values[1]
    if not 0 < first < second < math.inf:
        return False
    return all(
        math.isclose(right / left, second / first, rel_tol=1e-3)
        for left, right in itertools.pairwise(values)
    )
