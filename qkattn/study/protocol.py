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
    """Returns the study with explicit corpora and controls.

    - `corpora` defaults to the corpus of the base config.
    - `controls.longer_seeds` defaults to `trials.seeds`.
    - A study without tuning has no controls.
    - A study without matching has no same-shape controls, as all its arms have the same shape.
    """
    is_tuned = bool(study.tuning.seeds)
    is_matched = study.match is not None
    longer = study.controls.longer if is_tuned else None
    longer_seeds: tuple[int, ...] = ()
    if longer:
        longer_seeds = study.controls.longer_seeds or study.base.trials.seeds
    controls = ControlsConfig(
        equal_shape=study.controls.equal_shape and is_tuned and is_matched,
        longer=longer,
        longer_seeds=longer_seeds,
    )
    corpora = study.corpora or (study.base.data.name,)
    return dataclasses.replace(study, corpora=corpora, controls=controls)


def check_protocol(study: Study) -> None:
    """Raises ConfigError if the settings of a study violate the protocol."""
    if study.match is None and len(study.destinations) > 1:
        raise ConfigError(
            f'destinations={study.destinations} have no effect with match=None; give one'
        )
    is_tuned = bool(study.tuning.seeds)
    if not is_tuned:
        _check_untuned(study)
        return

    # A tuned study has verdicts.
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
    # Such as {'expected': (), 'tuning.init_qks': (), ...}.
    settings_of_tuned_studies = {'expected': study.expected, **_model_grids(study)}
    for name, values in settings_of_tuned_studies.items():
        if values:
            raise ConfigError(
                f'{name}={values} need tuning.seeds: without them there is no verdict'
            )


def _check_baseline(study: Study) -> None:
    """Raises ConfigError unless there is a baseline with a tuned, annealed learning rate."""
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
    """Raises ConfigError if seeds are too few for a verdict, or are also used in tuning.

    Args:
        name: The name of the setting, such as 'trials.seeds'.
        seeds: The seeds in this setting.
        tuning: The config of the tuning.
    """
    if len(seeds) < MIN_PAIRS:
        raise ConfigError(f'{name}={seeds} must be at least {MIN_PAIRS} seeds for a verdict')
    all_screening_seeds = screening_seeds(tuning)  # `tuning.seeds` and those it may draw
    shared_seeds = sorted(set(all_screening_seeds).intersection(seeds))
    if shared_seeds:
        raise ConfigError(
            f'tuning.seeds, or those that the tuning may draw, and {name} share '
            f'{tuple(shared_seeds)}: settings tuned on a seed look better on it, so the verdict '
            'needs other seeds'
        )


def _check_grids(study: Study) -> None:
    """Raises ConfigError if a grid does not ascend, or `max_points` or `max_seeds` is too low."""
    # By setting, such as {'trials.learning_rates': (0.001, 0.002, 0.004), ...}.
    grids = {f'trials.{knob}s': getattr(study.base.trials, f'{knob}s') for knob in TRIAL_KNOBS}
    for name, values in _model_grids(study).items():
        if values:
            grids[name] = values
    for name, values in grids.items():
        if len(values) > 1 and not _ascends(values):
            raise ConfigError(
                f'{name}={values} must ascend by a constant factor, as in (0.001, 0.002, 0.004)'
            )

    tuning = study.tuning
    longest = max(len(values) for values in grids.values())
    least_points = max(longest, MIN_VALUES)
    if tuning.max_points < least_points:
        raise ConfigError(
            f'tuning.max_points={tuning.max_points} must be at least {least_points}: the longest '
            f'grid has {longest}, and a best value needs worse ones beside it'
        )

    least_seeds = max(len(tuning.seeds), MIN_SEEDS)
    if tuning.max_seeds < least_seeds:
        raise ConfigError(
            f'tuning.max_seeds={tuning.max_seeds} must be at least {least_seeds}: tuning.seeds has '
            f'{len(tuning.seeds)}, and one seed shows no best value'
        )


def _check_mesh(study: Study) -> None:
    """Raises ConfigError unless `mesh.trial` divides all numbers of seeds.

    The trials of a run are divided among `mesh.trial` devices.
    """
    mesh_trial = study.base.mesh.trial
    seed_counts = (
        len(study.tuning.seeds),
        study.tuning.max_seeds,
        len(study.base.trials.seeds),
        len(study.controls.longer_seeds),
    )
    if any(count % mesh_trial != 0 for count in seed_counts):
        raise ConfigError(
            f'mesh.trial={mesh_trial} must divide the numbers of tuning.seeds, '
            f'tuning.max_seeds, trials.seeds and controls.longer_seeds, {seed_counts}'
        )


def _model_grids(study: Study) -> dict[str, tuple[float, ...]]:
    """Returns the grid of each model field by the name of its setting, such as 'tuning.init_qks'.

    The grid is () if the field is not tuned.
    """
    return {f'tuning.{knob}s': getattr(study.tuning, f'{knob}s') for knob in MODEL_KNOBS}


def _ascends(values: tuple[float, ...]) -> bool:
    """Returns whether a grid of at least two values is positive and ascends by one factor."""
    first = values[0]
    second = values[1]
    if not 0 < first < second < math.inf:
        return False
    factor = second / first
    return all(
        math.isclose(right / left, factor, rel_tol=1e-3)
        for left, right in itertools.pairwise(values)
    )
