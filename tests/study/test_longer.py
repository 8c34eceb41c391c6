"""Which arms are trained longer: those with a word from the tests, and the baseline."""

import pytest

from qkattn.study.arms import build_arms
from qkattn.study.longer import losses_of, to_lengthen
from tests.study.test_plan import STUDY

SEEDS = range(6)
NOISE = (0.010, -0.012, 0.004, -0.008, 0.011, -0.005)


@pytest.fixture(scope='module')
def arms():
    return build_arms(STUDY)


def losses(mean, missing=()):
    own = {seed: 3 + mean + NOISE[seed] for seed in SEEDS}
    return own | dict.fromkeys(missing)


@pytest.mark.parametrize(
    ('mean', 'comparisons', 'number'),
    # The difference of 0.015 has p = 0.01 against zero; corrected for 12 arms it is no word.
    [(0.015, 1, 2), (0.015, 12, 0), (0.2, 12, 2), (-0.2, 12, 2), (0.0, 1, 0)],
)
def test_a_word_is_corrected_for_the_whole_study(arms, mean, comparisons, number):
    of = {arms[0].place: dict.fromkeys(SEEDS, 3.0), arms[1].place: losses(mean)}
    assert to_lengthen(STUDY, arms, of, comparisons) == arms[:number]


def test_divergence_helps_nobody_to_a_word(arms):
    of = {arms[0].place: dict.fromkeys(SEEDS, 3.0), arms[1].place: losses(-0.2, missing=[2])}
    assert not to_lengthen(STUDY, arms, of, 1)
    of[arms[1].place] = dict.fromkeys(SEEDS)
    assert not to_lengthen(STUDY, arms, of, 1)
    trial = {'trial': {'seed': 4}, 'status': 'diverged', 'test_loss': 1.0}
    assert losses_of([trial]) == {4: None}
