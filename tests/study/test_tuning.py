"""Settings are found one after another, from nothing but what was measured."""

import math

import numpy as np
import pytest

from qkattn.config import TuningConfig
from qkattn.study.tuning import KNOBS, Tuning, tune

GRIDS = dict.fromkeys(KNOBS, (1.0,)) | {
    'learning_rate': (1e-3, 2e-3, 4e-3),
    'weight_decay': (0.1,),
    'score_scale': (0.5, 1.0, 2.0),
}
REST = (1.0,) * (len(KNOBS) - 3)


def losses(settings, optimum):
    away = sum(math.log(s / o) ** 2 for s, o in zip(settings, optimum, strict=False))
    return {seed: 2 + 0.01 * seed + 0.1 * away for seed in (10, 11)}


def limits(max_points, **fields):
    return TuningConfig(**{'seeds': (10, 11), 'max_points': max_points} | fields)


def followed(grids, max_points, optimum) -> tuple[Tuning, dict, list]:
    """Measures what is asked for until nothing is."""
    measured, asked = {}, []
    while True:
        found = tune(grids, limits(max_points), measured)
        if found.knob is None:
            return found, measured, asked
        asked.append((found.knob, found.values))
        for value in found.values:
            assert found.at(value) not in measured
            measured[found.at(value)] = losses(found.at(value), optimum)


def test_nothing_is_measured_twice_and_every_knob_is_found():
    found, measured, asked = followed(GRIDS, 9, (2.2e-3, 0.3, 0.9))
    assert [knob for knob, _ in asked] == ['learning_rate', 'score_scale']
    assert found.settings[:3] == (
        pytest.approx(2.2e-3, rel=1e-9),
        0.1,
        pytest.approx(0.9, rel=1e-9),
    )
    assert list(found.sweeps) == ['learning_rate', 'score_scale']
    assert all(sweep.bracketed for sweep in found.sweeps.values())
    assert {settings[1] for settings in measured} == {0.1}
    # More measurements than asked for change nothing.
    other = {at + REST: {10: 0.0, 11: 0.0} for at in ((3e-3, 0.1, 1.0), (2e-3, 0.2, 1.0))}
    assert tune(GRIDS, limits(9), measured | other) == found


def test_what_an_earlier_knob_has_measured_is_not_asked_for_again():
    # The best rate is the last one that may be tried: no vertex, and its point at scale 1 is known.
    found, _, asked = followed(GRIDS, 4, (1.0, 0.1, 1.1))
    assert asked == [
        ('learning_rate', (1e-3, 2e-3, 4e-3)),
        ('learning_rate', (8e-3,)),
        ('score_scale', (0.5, 2.0)),
    ]
    assert not found.sweeps['learning_rate'].bracketed and found.settings[0] == 8e-3
    assert found.sweeps['score_scale'].values == (0.5, 1.0, 2.0)
    assert found.settings[2] == pytest.approx(1.1, rel=1e-9)


def screened(limits, sd, curvature=0.1, diverged=lambda rate, seed: False):
    """Screens until nothing is asked for: the tuning, its measurements, and what was asked for."""
    grids = {knob: values[:1] for knob, values in GRIDS.items()} | {
        'learning_rate': GRIDS['learning_rate']
    }
    measured, asked = {}, []
    while (found := tune(grids, limits, measured)).knob:
        asked.append((found.values, found.seeds))
        for value in found.values:
            for seed in found.seeds:
                noise = sd * np.random.default_rng([seed, round(1e7 * value)]).normal()
                loss = 2 + 0.1 * seed + curvature * math.log(value / 2.2e-3) ** 2 + noise
                of = measured.setdefault(found.at(value), {})
                assert seed not in of
                of[seed] = None if diverged(value, seed) else loss
    return found, measured, asked


def test_further_seeds_are_drawn_until_the_excess_over_the_optimum_is_bounded():
    few, _, _ = screened(limits(5, max_seeds=16), sd=0.01)
    bound = few.sweeps['learning_rate'].at_worst / 2
    more, _, asked = screened(limits(5, max_seeds=16, max_excess=bound), sd=0.01)
    assert len(asked) > 1 and more.sweeps['learning_rate'].at_worst <= bound
    assert screened(limits(5, max_seeds=4, max_excess=1e-9), sd=0.01)[2][-1][1] == (12, 13)


def test_further_seeds_are_drawn_until_the_bracket_is_significant():
    sharp, _, asked = screened(limits(5, max_seeds=8), sd=1e-4)
    assert asked == [(GRIDS['learning_rate'], (10, 11))] and sharp.sweeps['learning_rate'].bracketed
    noisy, measured, asked = screened(limits(5, max_seeds=12), sd=0.08)
    drawn = [seeds for _, seeds in asked]
    assert drawn[0] == (10, 11) and (12, 13) in drawn and len(drawn) > 2
    sweep = noisy.sweeps['learning_rate']
    assert sweep.bracketed and sweep.optimum_low and drawn[-1][-1] < 21
    # All values of the grid get them, so that a seed's level cancels.
    assert {tuple(of) for of in measured.values()} == {tuple(range(10, drawn[-1][-1] + 1))}
    assert set(sweep.values) == {settings[0] for settings in measured}


def test_a_value_at_which_a_seed_diverged_gets_no_further_seeds():
    _, measured, asked = screened(
        limits(5, max_seeds=6), sd=0.1, diverged=lambda rate, seed: rate > 3e-3 and seed == 11
    )
    assert {at[0]: len(of) for at, of in measured.items() if at[0] > 3e-3} == {4e-3: 2}
    assert max(len(of) for of in measured.values()) > 2
    assert all(4e-3 not in values for values, seeds in asked if seeds != (10, 11))
