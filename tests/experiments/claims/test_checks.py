"""Exact checks find mistakes; measures speak by their numbers.

`experiments.verify` holds what both give against claims.json.
"""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np
import pytest

from experiments.claims import declared, measures
from experiments.claims.checks import counts, rewrites
from experiments.claims.claim import Kind, Speaks, exact_row
from experiments.claims.export import read_claims
from experiments.claims.studies import Results
from qkattn.attention.registry import SCORES
from qkattn.attention.scores import identity, qk
from qkattn.verdict import Remark, RemarkCode
from tests.experiments.claims.conftest import CLAIMS
from tests.lanes import slow_except


def test_an_exact_row_has_its_context_as_text():
    row = exact_row('rank', 3, 3, D=4, head_size=2)
    assert row.context == {'D': '4', 'head_size': '2'}


@pytest.mark.parametrize(
    ('error', 'speaks'), [(1e-3, Speaks.FOR), (2e-3, Speaks.AGAINST), (-2e-3, Speaks.AGAINST)]
)
def test_an_exact_row_speaks_by_its_tolerance(error, speaks):
    row = exact_row('error', error, expected=0, tolerance=1e-3)
    assert row.speaks == speaks


def has_false_exact_row(rows):
    return any(row.speaks == Speaks.AGAINST and row.kind == Kind.EXACT for row in rows)


def interleaved_heads(x_BTD, square, num_heads):
    """A faulty square_attention: head n gets every N-th column instead of D / N adjacent ones."""
    d_model = x_BTD.shape[2]
    wrong_order = np.arange(d_model).reshape(-1, num_heads).T.ravel()
    mixed = {}
    for name, weight in square.items():
        mixed[name] = weight if name == 'w_o' else weight[:, wrong_order]
    return square_attention(x_BTD, mixed, num_heads)


def scores_of_the_first_head(layer, x_BTD):
    """A faulty softmax_input: all heads get the scores of head 0."""
    s_BNTS = np.einsum('BTD,NDE,BSE->BNTS', x_BTD, layer.score.matrix(), x_BTD)
    return s_BNTS[:, :1].repeat(layer.spec.num_heads, axis=1)


class Mistake(NamedTuple):
    """A deliberate error: `wrong` replaces the attribute or item `name` of `owner`.

    The checks in `checks` must notice the error.
    """

    checks: tuple
    owner: object
    name: str
    wrong: object


square_attention = rewrites.square_attention  # before a mistake replaces it
MISTAKES = {
    'W_QK is two matrices': Mistake(
        checks=(
            counts.merged_against_factored,
            counts.multiply_adds,
            counts.where_they_cross,
        ),
        owner=SCORES,
        name='merged',
        wrong=qk.FullSize,
    ),
    'one pattern': Mistake(
        checks=(counts.heads_of_a_fixed_width,),
        owner=counts,
        name='softmax_input',
        wrong=scores_of_the_first_head,
    ),
    'heads interleaved': Mistake(
        checks=(rewrites.side_by_side,),
        owner=rewrites,
        name='square_attention',
        wrong=interleaved_heads,
    ),
    'M^T for M^-1': Mistake(
        checks=(rewrites.gauge,),
        owner=np.linalg,
        name='inv',
        wrong=np.transpose,
    ),
    'Q Q^T is not tied': Mistake(
        checks=(rewrites.where_and_what,),
        owner=SCORES,
        name='shared_qk',
        wrong=qk.QK,
    ),
    'W_Q = I': Mistake(
        checks=(rewrites.worked_by_hand,),
        owner=SCORES,
        name='qk',
        wrong=identity.QueryFree,
    ),
}


def test_every_check_is_known_to_fail():
    """Each check has been seen to fail.

    Either a committed row of its claim is false, or a deliberate error in `MISTAKES` breaks the
    check.
    """
    claims_with_a_false_row = set()
    for claim in read_claims(CLAIMS):
        if has_false_exact_row(claim.rows):
            claims_with_a_false_row.add(claim.name)

    checks_broken_by_mistakes = set()
    for mistake in MISTAKES.values():
        checks_broken_by_mistakes.update(mistake.checks)

    for name, claim in declared.claims().items():
        if name in claims_with_a_false_row:
            continue
        for check in claim.checks:
            assert check in checks_broken_by_mistakes, check


@pytest.mark.parametrize('name', slow_except(['heads interleaved', 'M^T for M^-1'], MISTAKES))
def test_a_check_fails_after_a_mistake(name, monkeypatch):
    mistake = MISTAKES[name]
    if isinstance(mistake.owner, dict):
        monkeypatch.setitem(mistake.owner, mistake.name, mistake.wrong)
    else:
        monkeypatch.setattr(mistake.owner, mistake.name, mistake.wrong)

    with jax.enable_x64(True):
        for check in mistake.checks:
            assert has_false_exact_row(check()), check


@pytest.fixture(scope='module')
def untuned_study(committed):
    """The findings of the study quickstart, whose second arm has a difference."""
    return Results(committed).study('quickstart')


def with_interval(arm, low, high):
    """The arm, where the interval of the difference is replaced by `low` to `high`."""
    difference = dataclasses.replace(arm.difference, low=low, high=high)
    comparison = dataclasses.replace(arm.comparison, difference=difference)
    return dataclasses.replace(arm, comparison=comparison)


def what_the_difference_says(study, arm, baseline, monkeypatch):
    """What the measure `at_one_rate` says of a claim by the difference of an arm from its baseline.

    Speaks.FOR or AGAINST the claim, which is that the arm is better by more than the margin, or
    OPEN.
    """
    monkeypatch.setattr(measures, '_arms_with_baselines', lambda *_: [(arm, baseline)])
    rows = measures.at_one_rate(study, 'merged/vo')
    assert len(rows) == 1
    return rows[0].speaks


# Intervals of the difference in nats/token. The margin is far below 1.
INTERVALS = [
    pytest.param(-2, -1, Speaks.FOR, id='better'),
    pytest.param(1, 2, Speaks.AGAINST, id='worse'),
    pytest.param(-1, 1, Speaks.OPEN, id='unclear'),
]


@pytest.mark.stored
@pytest.mark.parametrize(('low', 'high', 'speaks'), INTERVALS)
def test_an_untuned_difference_speaks_by_its_interval(
    low, high, speaks, untuned_study, monkeypatch
):
    baseline = untuned_study.arms[1]
    arm = with_interval(baseline, low, high)
    assert what_the_difference_says(untuned_study, arm, baseline, monkeypatch) == speaks


@pytest.mark.stored
@pytest.mark.parametrize(('low', 'high'), [(-2, -1), (1, 2), (-1, 1)])
def test_an_untuned_difference_stays_open_without_a_sound_baseline(
    low, high, untuned_study, monkeypatch
):
    """With an unsound baseline, a claim stays open at every interval of the difference."""
    # The study's second arm serves as a sound baseline.
    sound = untuned_study.arms[1]
    arm = with_interval(sound, low, high)

    # A baseline is unsound if a remark blocks its verdict.
    blocking_remark = Remark(RemarkCode.OVER_TOLERANCE, blocks=True)
    blocked = dataclasses.replace(sound, remarks=(blocking_remark,))
    assert what_the_difference_says(untuned_study, arm, blocked, monkeypatch) == Speaks.OPEN

    # A baseline is also unsound if one of its trials has diverged. Divergence is counted over
    # `verdict_trials`. Here they are the `chosen` trials, since the study has one learning rate.
    first_trial, *other_trials = sound.chosen
    diverged_trial = dataclasses.replace(first_trial, status='diverged')
    diverged = dataclasses.replace(sound, verdict_trials=(diverged_trial, *other_trials))
    assert what_the_difference_says(untuned_study, arm, diverged, monkeypatch) == Speaks.OPEN
