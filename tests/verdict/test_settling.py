"""Differences that a longer training leaves as they are, and those that it moves."""

import json

import numpy as np
import pytest

from experiments.claims.protocol import language_model
from qkattn.report import tables
from qkattn.verdict import find, load_study, longer
from qkattn.verdict.settling import Length, Settling, Trained, settle
from tests.studies import VERDICT_SEEDS, tuned_arm, write_tuned

MARGIN = 0.01
ERROR = 0.001
BASE = 2.0 + 0.002 * np.arange(8)
NOISE = 1e-4 * np.sin(np.arange(8))
FRESH = tuple(range(56, 64))


@pytest.mark.parametrize(
    ('short', 'long', 'error', 'equivalent', 'code', 'towards'),
    [
        (0.05, 0.05 - MARGIN + 1e-6, ERROR, False, Length.SETTLED, 'better'),
        (0.05, 0.05 - MARGIN - 1e-6, ERROR, False, Length.SHRINKS, 'better'),
        (0.05, 0.05 + MARGIN + 1e-6, ERROR, False, Length.GROWS, 'worse'),
        (-0.05, -0.05 - MARGIN - 1e-6, ERROR, False, Length.GROWS, 'better'),
        (0.05, 0.025, 0.009, False, Length.SETTLED, 'better'),  # within 3 standard errors
        (0.003, -0.001, ERROR, False, Length.TURNS, 'better'),  # within the margin
        (0.003, -0.001, ERROR, True, Length.SETTLED, 'better'),
        (0.003, 0.011, ERROR, True, Length.GROWS, 'worse'),  # beyond the margin
        (0.05, -0.05, 1.0, False, Length.TURNS, 'better'),  # whatever the errors
    ],
)
def test_a_difference_is_settled_if_longer_training_leaves_it_within_the_limit(
    short, long, error, equivalent, code, towards
):
    pair = Trained(400, short, error), Trained(1600, long, error)
    settling = settle(*pair, MARGIN, equivalent=equivalent)
    assert (settling.code, settling.towards, settling.times) == (code, towards, 4)
    assert settling.limit == pytest.approx(max(MARGIN, 3 * np.sqrt(2) * error))


@pytest.mark.parametrize('long', [None, Trained(1599, 0.05, ERROR)])
def test_a_difference_at_one_length_is_not_called_settled(long):
    one = Settling(Length.ONE_LENGTH)
    assert settle(Trained(400, 0.05, ERROR), long, MARGIN) == one
    assert settle(None, Trained(1600, 0.05, ERROR), MARGIN) == one


def short_records(**changes):
    arm = tuned_arm('b/vo', losses=list(BASE + 0.05 + NOISE), **changes)
    return tuned_arm('qk/vo', losses=list(BASE), **changes) + arm


def long_records(shift, seeds=FRESH, rate=None, **changes):
    """A study of four times the steps; `rate` is that of the verdict of its arm."""
    changes |= {'seeds': seeds, 'num_steps': 1600, 'num_tokens': 1600 * 768}
    arm = tuned_arm('b/vo', losses=list(BASE + shift + NOISE), learning_rate=rate, **changes)
    return tuned_arm('qk/vo', losses=list(BASE), **changes) + arm


def write_of_length(directory, records, seeds, num_steps, **changes):
    """Writes a tuned study whose arms train for `num_steps` steps."""
    path = write_tuned(directory, records, seeds=list(seeds), **changes)
    base = json.loads((path / 'study.json').read_text())['base']
    base['train'] |= {'num_steps': num_steps}
    return write_tuned(path, records, seeds=list(seeds), base=base, **changes)


def settling_of_b(path):
    arms = [arm for arm in find(load_study(path)).arms if arm.variant == 'b/vo']
    return arms[0].settling


@pytest.mark.parametrize(
    ('shift', 'changes', 'code'),
    [
        # The short study has a difference of about 0.05; `shift` is that of the longer one.
        (0.052, {}, Length.SETTLED),
        (0.02, {}, Length.SHRINKS),
        (-0.05, {}, Length.TURNS),
        # A study of the same seeds, of too few steps or of other settings is no second length.
        (0.052, {'seeds': VERDICT_SEEDS}, Length.ONE_LENGTH),  # not fresh
        (0.052, {'steps': 1599}, Length.ONE_LENGTH),
        (0.052, {'matched': 'flops'}, Length.ONE_LENGTH),
        (0.052, {'fill': None}, Length.ONE_LENGTH),
        (0.052, {'size': 'd_model=64'}, Length.ONE_LENGTH),
        (0.052, {'corpus': 'text'}, Length.ONE_LENGTH),
        (0.052, {'rate': 1e-3}, Length.ONE_LENGTH),  # not its own tuned rate
    ],
)
def test_a_longer_study_beside_it_says_whether_a_difference_is_settled(
    tmp_path, shift, changes, code
):
    path = write_of_length(tmp_path / 'short', short_records(), VERDICT_SEEDS, 400)
    seeds = changes.get('seeds', FRESH)
    steps = changes.get('steps', 1600)
    fields = {name: changes[name] for name in ('matched', 'fill') if name in changes}
    of_arms = {name: changes[name] for name in ('size', 'corpus', 'rate') if name in changes}
    write_of_length(
        tmp_path / 'long', long_records(shift, seeds, **of_arms), seeds, steps, **fields
    )
    assert settling_of_b(path).code is code
    assert settling_of_b(tmp_path / 'long').code is Length.ONE_LENGTH
    if code is Length.SHRINKS:
        assert settling_of_b(path).longer == pytest.approx(0.02, abs=1e-3)


@pytest.mark.parametrize(
    ('shift', 'sentence'),
    [
        (0.052, 'is worse than qk/vo by more than the margin, settled'),
        (0.02, 'is worse than qk/vo by more than the margin at this length'),
    ],
)
def test_the_summary_says_how_long_a_verdict_holds(tmp_path, shift, sentence):
    path = write_of_length(tmp_path / 'short', short_records(), VERDICT_SEEDS, 400)
    write_of_length(tmp_path / 'long', long_records(shift, FRESH), FRESH, 1600)
    assert sentence in tables.summary(find(load_study(path)))[0]


def test_a_difference_without_a_longer_study_is_at_its_length(tmp_path):
    path = write_of_length(tmp_path / 'short', short_records(), VERDICT_SEEDS, 400)
    (tmp_path / 'damaged').mkdir()
    (tmp_path / 'damaged/study.json').write_text('{')
    assert settling_of_b(path).code is Length.ONE_LENGTH


@pytest.mark.parametrize(
    ('longer_seeds', 'code'),
    [(FRESH, Length.SETTLED), (VERDICT_SEEDS, Length.ONE_LENGTH), ((), Length.ONE_LENGTH)],
)
def test_a_control_trained_longer_needs_fresh_seeds(tmp_path, longer_seeds, code):
    seeds = longer_seeds or VERDICT_SEEDS
    records = short_records() + long_records(0.052, seeds, control='longer')
    controls = {'equal_shape': True, 'longer': 4, 'longer_seeds': list(longer_seeds)}
    path = write_of_length(tmp_path / 'short', records, VERDICT_SEEDS, 400, controls=controls)
    assert settling_of_b(path).code is code


def test_the_base_may_differ_in_the_length_of_training_alone():
    short = language_model('cpu')
    long = language_model('cpu', seeds=6, first_seed=56, evaluations=8, times_as_long=4)
    rope = language_model('cpu', positions='rope')
    assert longer._settings_to_compare(short) == longer._settings_to_compare(long)
    assert longer._settings_to_compare(rope) != longer._settings_to_compare(short)
