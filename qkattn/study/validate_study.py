"""Checks of a study's own settings, before anything compiles."""

import dataclasses
import itertools
import math

from qkattn.config import Study, TuningConfig
from qkattn.config.setting import check_section
from qkattn.data.tasks.task_registry import task_of
from qkattn.errors import ConfigError
from qkattn.stats.inference import MIN_PAIRS
from qkattn.stats.sweep import MIN_SEEDS, MIN_VALUES
from qkattn.study.place import parse_expected
from qkattn.study.tuning import MODEL_KNOBS, screening_seeds


def validate_study(study: Study) -> None:
    """Raises ConfigError for the first impossible setting of the study itself, not of its runs."""
    check_section('', study)
    for name in study.corpora:
        _check_corpus(study, name)
    if study.match is None and len(study.destinations) > 1:
        raise ConfigError(
            f'destinations={study.destinations} have no effect with match=None; give one'
        )
    _check_expected(study)
    if study.tuning.seeds:
        _check_tuning(study)
        _check_verdict(study)
        _check_controls(study)
    elif study.looks:
        raise ConfigError(f'looks={study.looks} need tuning.seeds: others have no verdict')
    else:
        for name, values in _model_grids(study.tuning).items():
            if values:
                raise ConfigError(f'{name}={values} need tuning.seeds to be screened with')


def _check_expected(study: Study) -> None:
    """Each positive control is an arm of the study that can get a word."""
    for text in study.expected:
        of = parse_expected(text)
        known = [variant for variant in study.variants if variant != study.baseline]
        if not of.equal_shape and len(study.destinations) > 1:
            known = [f'{name} [{place}]' for name in known for place in study.destinations]
        if of.variant not in known:
            raise ConfigError(
                f'expected={text!r}: {of.variant!r} is none of the arms that are compared with '
                f'{study.baseline!r}; they are {", ".join(map(repr, known))}'
            )
        if of.equal_shape and not (study.controls.equal_shape and study.match):
            raise ConfigError(f'expected={text!r} needs controls.equal_shape and a match')
        if not study.tuning.seeds:
            raise ConfigError(f'expected={text!r} needs tuning.seeds: others have no verdict')


def _model_grids(tuning: TuningConfig) -> dict[str, tuple[float, ...]]:
    """The grids of the model's settings, by name."""
    return {f'tuning.{knob}s': getattr(tuning, f'{knob}s') for knob in MODEL_KNOBS}


def _check_tuning(study: Study) -> None:
    tuning, trials = study.tuning, study.base.trials
    seeds = tuning.seeds
    if tuning.max_seeds < len(seeds):
        raise ConfigError(
            f'tuning.max_seeds={tuning.max_seeds} must be at least {len(seeds)}, the number of '
            'tuning.seeds'
        )
    for name, number, least in (
        ('max_seeds', tuning.max_seeds, MIN_SEEDS),
        ('max_points', tuning.max_points, MIN_VALUES),
    ):
        if number < least:
            raise ConfigError(
                f'tuning.{name}={number} must be at least {least}: a verdict needs a best value '
                f'that {MIN_SEEDS} seeds or more show to have worse ones on both sides'
            )
    _check_fresh(study, 'trials.seeds', trials.seeds)
    if len(trials.learning_rates) < 2:
        raise ConfigError(
            f'trials.learning_rates={trials.learning_rates} must be a grid with '
            'tuning.seeds, as in (0.001, 0.002, 0.004)'
        )
    for name, values in _model_grids(tuning).items():
        if len(values) == 1:
            field = name.removeprefix('tuning.').removesuffix('s')
            raise ConfigError(
                f"{name}={values} must be a grid, or empty for the model's own; set a single value "
                f'as base.model.{field}'
            )
    grids = {
        'trials.learning_rates': trials.learning_rates,
        'trials.weight_decays': trials.weight_decays,
        **_model_grids(tuning),
    }
    for name, values in grids.items():
        if len(values) > 1 and not _is_geometric(values):
            raise ConfigError(
                f'{name}={values} must ascend by a constant factor, as in (0.001, 0.002, 0.004)'
            )
        if len(values) > tuning.max_points:
            raise ConfigError(
                f'tuning.max_points={tuning.max_points} must be at least {len(values)}, '
                f'the number of {name}'
            )


def _check_fresh(study: Study, name: str, seeds: tuple[int, ...]) -> None:
    """Seeds of a verdict are none of those that the screening has or may draw."""
    first, drawn = study.tuning.seeds, screening_seeds(study.tuning)
    if shared := sorted(set(seeds) & set(drawn)):
        whose = 'tuning.seeds' if shared[0] in first else f'the seeds up to {drawn[-1]} of tuning'
        raise ConfigError(
            f'{whose} and {name} share {shared[0]}: settings tuned on a seed look better on it, so '
            'the verdict needs other seeds'
        )


def _check_corpus(study: Study, name: str) -> None:
    data = dataclasses.replace(study.base.data, name=name)
    try:
        task_of(dataclasses.replace(study.base, data=data))
    except ConfigError as error:
        raise ConfigError(f'corpora={study.corpora}: {error}') from error


def _check_controls(study: Study) -> None:
    """Controls of a longer budget, and looks."""
    seeds = study.controls.longer_seeds
    number = len(study.base.trials.seeds)
    if seeds and len(seeds) < MIN_PAIRS:
        raise ConfigError(
            f'controls.longer_seeds={seeds} must be at least {MIN_PAIRS}, or empty for trials.seeds'
        )
    _check_fresh(study, 'controls.longer_seeds', seeds)
    looks = study.looks or (number,)
    if looks[-1] != number or any(b <= a for a, b in itertools.pairwise((0, *looks))):
        raise ConfigError(
            f'looks={looks} must ascend from at least 1 to {number}, the number of trials.seeds'
        )


def _check_verdict(study: Study) -> None:
    """Settings without which training gives no verdict."""
    trials, optimizer = study.base.trials, study.base.optimizer
    if study.baseline not in study.variants:
        raise ConfigError(
            f'variants={study.variants} must contain the baseline {study.baseline!r} for a verdict'
        )
    if len(trials.seeds) < MIN_PAIRS:
        raise ConfigError(
            f'trials.seeds={trials.seeds} must be at least {MIN_PAIRS} for a verdict; '
            'five or more are usual'
        )
    if not optimizer.anneals:
        raise ConfigError(
            f'optimizer.schedule={optimizer.schedule} with final_fraction='
            f'{optimizer.final_fraction} does not anneal, which a verdict needs; use linear or '
            'cosine with final_fraction=0.1 or less'
        )
    numbers = {
        'the number of tuning.seeds': len(study.tuning.seeds),
        'tuning.max_seeds': study.tuning.max_seeds,
        'the number of trials.seeds': len(trials.seeds),
        'the number of controls.longer_seeds': len(study.controls.longer_seeds),
    } | {f'look {place} of looks': look for place, look in enumerate(study.looks, start=1)}
    for name, number in numbers.items():
        if number % study.base.mesh.trial:
            raise ConfigError(f'mesh.trial={study.base.mesh.trial} must divide {name}, {number}')


def _is_geometric(values: tuple[float, ...]) -> bool:
    if not 0 < values[0] < values[1] < math.inf:
        return False
    return all(
        math.isclose(right / left, values[1] / values[0], rel_tol=1e-3)
        for left, right in zip(values, values[1:], strict=False)
    )
