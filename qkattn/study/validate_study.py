"""What makes a study impossible, found before anything compiles."""

import math

from qkattn.config import Study
from qkattn.config.validate import check_types
from qkattn.errors import ConfigError
from qkattn.stats.inference import MIN_PAIRS
from qkattn.study import matching


def validate_study(study: Study) -> None:
    """Raises ConfigError for the first setting of its own, not of its runs, that cannot work."""
    check_types('study', study)
    check_types('tuning', study.tuning)
    for name in ('variants', 'sizes', 'destinations'):
        values = getattr(study, name)
        if not values or len(set(values)) != len(values):
            raise ConfigError(f'{name}={values} must hold at least one entry, none twice')
    for name, valid in (('match', (*matching.UNITS, None)), ('fill', ('d_ff', None))):
        if getattr(study, name) not in valid:
            said = ', '.join(map(str, valid[:-1]))
            raise ConfigError(f'{name}={getattr(study, name)!r} must be {said} or None')
    for destination in study.destinations:
        if destination not in matching.DESTINATIONS:
            raise ConfigError(
                f'destinations={study.destinations} must be of {", ".join(matching.DESTINATIONS)}'
            )
    if study.match is None and len(study.destinations) > 1:
        raise ConfigError(
            f'destinations={study.destinations} mean nothing with match=None: nothing is moved'
        )
    for name in ('tolerance', 'margin'):
        if not 0 < getattr(study, name) < math.inf:
            raise ConfigError(f'{name}={getattr(study, name)} must be above 0 and finite')
    if study.tuning.seeds:
        _check_tuning(study)
        _check_verdict(study)
    elif study.tuning.score_scales:
        raise ConfigError(
            f'tuning.score_scales={study.tuning.score_scales} are screened with tuning.seeds, '
            'of which there are none'
        )


def _check_tuning(study: Study) -> None:
    tuning, trials = study.tuning, study.base.trials
    seeds = tuning.seeds
    if len(set(seeds)) != len(seeds) or not all(0 <= seed < 2**31 for seed in seeds):
        raise ConfigError(f'tuning.seeds={seeds} must be from 0 to 2**31 - 1, none twice')
    if shared := sorted(set(seeds) & set(trials.seeds)):
        raise ConfigError(
            f'tuning.seeds and trials.seeds share {shared[0]}: settings that a seed has chosen '
            'look better on it, so the verdict needs other seeds'
        )
    if len(trials.learning_rates) < 2:
        raise ConfigError(
            f'trials.learning_rates={trials.learning_rates} must be a grid to tune on with '
            'tuning.seeds, as in (0.001, 0.002, 0.004)'
        )
    if len(tuning.score_scales) == 1:
        raise ConfigError(
            f'tuning.score_scales={tuning.score_scales} must be a grid, or empty for the '
            "models' own; a single one is base.model.score_scale"
        )
    for name, values in (
        ('trials.learning_rates', trials.learning_rates),
        ('trials.weight_decays', trials.weight_decays),
        ('tuning.score_scales', tuning.score_scales),
    ):
        if len(values) > 1 and not _is_geometric(values):
            raise ConfigError(
                f'{name}={values} must ascend by one factor to be tuned on, '
                'as in (0.001, 0.002, 0.004)'
            )
        if len(values) > tuning.max_points:
            raise ConfigError(
                f'tuning.max_points={tuning.max_points} must be at least {len(values)}, '
                f'the number of {name}'
            )


def _check_verdict(study: Study) -> None:
    """What no training could make up for."""
    trials, optimizer = study.base.trials, study.base.optimizer
    if study.baseline not in study.variants:
        raise ConfigError(
            f'variants={study.variants} must hold the baseline {study.baseline!r}, '
            'without which there is no verdict'
        )
    if len(trials.seeds) < MIN_PAIRS:
        raise ConfigError(
            f'trials.seeds={trials.seeds} must be at least {MIN_PAIRS} for a verdict; '
            'five or more are usual'
        )
    if not optimizer.anneals:
        raise ConfigError(
            f'optimizer.schedule={optimizer.schedule} with final_fraction='
            f'{optimizer.final_fraction} does not anneal, and losses before the anneal give no '
            'verdict: take linear or cosine, to 0.1 or less'
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
