"""Checks of a study's own settings, before anything compiles."""

import math

from qkattn.config import Study
from qkattn.config.validate import check_types
from qkattn.errors import ConfigError
from qkattn.stats.inference import MIN_PAIRS
from qkattn.study import matching


def validate_study(study: Study) -> None:
    """Raises ConfigError for the first impossible setting of the study itself, not of its runs."""
    check_types('study', study)
    check_types('tuning', study.tuning)
    for name in ('variants', 'sizes', 'destinations'):
        values = getattr(study, name)
        if not values or len(set(values)) != len(values):
            raise ConfigError(f'{name}={values} must hold at least one entry, none twice')
    for name, valid in (('match', (*matching.UNITS, None)), ('fill', ('d_ff', None))):
        if getattr(study, name) not in valid:
            options = ', '.join(map(str, valid[:-1]))
            raise ConfigError(f'{name}={getattr(study, name)!r} must be {options} or None')
    for destination in study.destinations:
        if destination not in matching.DESTINATIONS:
            raise ConfigError(
                f'destinations={study.destinations} must be of {", ".join(matching.DESTINATIONS)}'
            )
    if study.match is None and len(study.destinations) > 1:
        raise ConfigError(
            f'destinations={study.destinations} have no effect with match=None; give one'
        )
    for name in ('tolerance', 'margin'):
        if not 0 < getattr(study, name) < math.inf:
            raise ConfigError(f'{name}={getattr(study, name)} must be above 0 and finite')
    if study.tuning.seeds:
        _check_tuning(study)
        _check_verdict(study)
    elif study.tuning.score_scales:
        raise ConfigError(
            f'tuning.score_scales={study.tuning.score_scales} need tuning.seeds to be screened with'
        )


def _check_tuning(study: Study) -> None:
    tuning, trials = study.tuning, study.base.trials
    seeds = tuning.seeds
    if len(set(seeds)) != len(seeds) or not all(0 <= seed < 2**31 for seed in seeds):
        raise ConfigError(f'tuning.seeds={seeds} must be from 0 to 2**31 - 1, none twice')
    if shared := sorted(set(seeds) & set(trials.seeds)):
        raise ConfigError(
            f'tuning.seeds and trials.seeds share {shared[0]}: settings tuned on a seed look '
            'better on it, so the verdict needs other seeds'
        )
    if len(trials.learning_rates) < 2:
        raise ConfigError(
            f'trials.learning_rates={trials.learning_rates} must be a grid with '
            'tuning.seeds, as in (0.001, 0.002, 0.004)'
        )
    if len(tuning.score_scales) == 1:
        raise ConfigError(
            f'tuning.score_scales={tuning.score_scales} must be a grid, or empty for the '
            "model's own; set a single value as base.model.score_scale"
        )
    for name, values in (
        ('trials.learning_rates', trials.learning_rates),
        ('trials.weight_decays', trials.weight_decays),
        ('tuning.score_scales', tuning.score_scales),
    ):
        if len(values) > 1 and not _is_geometric(values):
            raise ConfigError(
                f'{name}={values} must ascend by a constant factor, as in (0.001, 0.002, 0.004)'
            )
        if len(values) > tuning.max_points:
            raise ConfigError(
                f'tuning.max_points={tuning.max_points} must be at least {len(values)}, '
                f'the number of {name}'
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
    for name, seeds in (('tuning.seeds', study.tuning.seeds), ('trials.seeds', trials.seeds)):
        if len(seeds) % study.base.mesh.trial:
            raise ConfigError(
                f'mesh.trial={study.base.mesh.trial} must divide the number of {name}, {len(seeds)}'
            )


def _is_geometric(values: tuple[float, ...]) -> bool:
    if not 0 < values[0] < values[1] < math.inf:
        return False
    return all(
        math.isclose(right / left, values[1] / values[0], rel_tol=1e-3)
        for left, right in zip(values, values[1:], strict=False)
    )
