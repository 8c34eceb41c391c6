"""The rules of a study's protocol, by which `validate` refuses a study before it starts."""

import itertools
import math
from collections.abc import Iterator

from qkattn.config import ANNEALED, Study
from qkattn.config.setting import check_section
from qkattn.errors import ConfigError
from qkattn.stats.inference import MIN_PAIRS
from qkattn.stats.sweep import MIN_SEEDS, MIN_VALUES
from qkattn.study.tuning import MODEL_KNOBS, TRIAL_KNOBS, screening_seeds


def broken(study: Study) -> Iterator[str]:
    """A sentence for every rule that the settings of a study break, not those of its runs."""
    trials, tuning, controls = study.base.trials, study.tuning, study.controls
    model_grids = {f'tuning.{knob}s': getattr(tuning, f'{knob}s') for knob in MODEL_KNOBS}
    if study.match is None and len(study.destinations) > 1:
        yield f'destinations={study.destinations} have no effect with match=None; give one'
    if not tuning.seeds:
        for name, values in ({'expected': study.expected} | model_grids).items():
            if values:
                yield f'{name}={values} need tuning.seeds: without them there is no verdict'
        return
    if study.baseline not in study.variants:
        yield (
            f'variants={study.variants} must contain the baseline {study.baseline!r} for a verdict'
        )
    if not (optimizer := study.base.optimizer).anneals:
        yield (
            f'optimizer.schedule={optimizer.schedule} with '
            f'final_fraction={optimizer.final_fraction} does not anneal, which a verdict needs; '
            f'use linear or cosine with final_fraction={ANNEALED} or less'
        )
    if len(trials.learning_rates) < 2:
        yield (
            f'trials.learning_rates={trials.learning_rates} must be a grid with tuning.seeds, as '
            'in (0.001, 0.002, 0.004)'
        )
    fresh = {'trials.seeds': trials.seeds, 'controls.longer_seeds': controls.longer_seeds}
    for name, seeds in fresh.items():
        if len(seeds) < MIN_PAIRS and (seeds or name == 'trials.seeds'):
            yield f'{name}={seeds} must be at least {MIN_PAIRS} seeds for a verdict'
        if shared := sorted({*screening_seeds(tuning)} & {*seeds}):
            yield (
                f'tuning.seeds, or those that the tuning may draw, and {name} share '
                f'{tuple(shared)}: settings tuned on a seed look better on it, so the verdict '
                'needs other seeds'
            )
    grids = {f'trials.{knob}s': getattr(trials, f'{knob}s') for knob in TRIAL_KNOBS}
    grids |= {name: values for name, values in model_grids.items() if values}
    for name, values in grids.items():
        if len(values) > 1 and not _ascends(values):
            yield f'{name}={values} must ascend by a constant factor, as in (0.001, 0.002, 0.004)'
    points, num_seeds = max(map(len, grids.values())), len(tuning.seeds)
    if tuning.max_points < (least := max(points, MIN_VALUES)):
        yield (
            f'tuning.max_points={tuning.max_points} must be at least {least}: the longest grid has '
            f'{points}, and a best value needs worse ones beside it'
        )
    if tuning.max_seeds < (least := max(num_seeds, MIN_SEEDS)):
        yield (
            f'tuning.max_seeds={tuning.max_seeds} must be at least {least}: tuning.seeds has '
            f'{num_seeds}, and one seed shows no best value'
        )
    numbers = num_seeds, tuning.max_seeds, len(trials.seeds), len(controls.longer_seeds)
    if any(number % study.base.mesh.trial for number in numbers):
        yield (
            f'mesh.trial={study.base.mesh.trial} must divide the numbers of tuning.seeds, '
            f'tuning.max_seeds, trials.seeds and controls.longer_seeds, {numbers}'
        )


def _ascends(values: tuple[float, ...]) -> bool:
    """Whether a grid ascends by one factor from above 0."""
    first, second, *_ = values
    return 0 < first < second < math.inf and all(
        math.isclose(right / left, second / first, rel_tol=1e-3)
        for left, right in itertools.pairwise(values)
    )


def validate(study: Study) -> None:
    """Raises ConfigError for the first rule that the study breaks."""
    check_section('', study)
    for sentence in broken(study):
        raise ConfigError(sentence)
