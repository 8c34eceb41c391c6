"""kill -9 at random moments: the finished run is bitwise equal to the undisturbed one."""

import functools

import pytest

from tests.survival import runs

WEIGHTS = {
    runs.PREPARING: 2,
    runs.COMPILING: 1,
    runs.INITIALIZING: 1,
    runs.TRAINING: 6,
    runs.SAVING: 6,
    runs.EVALUATING: 4,
    runs.MEASURING: 1,
    runs.ANYWHERE: 4,
}


@pytest.mark.slow
@pytest.mark.parametrize('count', [1, 2])
def test_a_run_that_is_killed_again_and_again_ends_as_if_undisturbed(
    count, small, tmp_path, rng, counts, kills
):
    straight = tmp_path / 'straight'
    runs.finish(small(count), straight, count)
    moments = runs.drawn(kills, WEIGHTS, rng)
    kill = functools.partial(runs.killed, rng=rng)
    counts(runs.disturb(small(count), straight, count, moments, rng, kill))
