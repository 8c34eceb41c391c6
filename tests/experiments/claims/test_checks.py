"""Exact checks find mistakes; measures speak by their numbers.

`experiments.verify` holds what both give against claims.json.
"""

import dataclasses

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


def test_an_exact_row_speaks_by_its_tolerance():
    assert exact_row('rank', 3, 3, D=4, head_size=2).context == {'D': '4', 'head_size': '2'}
    spoken = [exact_row('error', value, 0, 1e-3).speaks for value in (1e-3, 2e-3, -2e-3)]
    assert spoken == [Speaks.FOR, Speaks.AGAINST, Speaks.AGAINST]


def has_false_exact_row(rows):
    return any(row.speaks == Speaks.AGAINST and row.kind == Kind.EXACT for row in rows)


def interleaved(x_BTD, square, num_heads):
    """Head n takes every N-th column in place of D / N in a row."""
    order = np.arange(x_BTD.shape[2]).reshape(-1, num_heads).T.ravel()
    mixed = {name: w[:, order] if name != 'w_o' else w for name, w in square.items()}
    return square_attention(x_BTD, mixed, num_heads)


def pattern_of_the_first_head(layer, x_BTD):
    """The scores of head 0 for all heads."""
    s_BNTS = np.einsum('BTD,NDE,BSE->BNTS', x_BTD, layer.score.matrix(), x_BTD)
    return s_BNTS[:, :1].repeat(layer.spec.num_heads, axis=1)


square_attention = rewrites.square_attention
# Checks that find a mistake, and the object, attribute and value that make it.
MISTAKES = {
    'W_QK is two matrices': (
        (counts.merged_against_factored, counts.multiply_adds, counts.where_they_cross),
        (SCORES, 'merged', qk.FullSize),
    ),
    'one pattern': (
        (counts.heads_of_a_fixed_width,),
        (counts, 'softmax_input', pattern_of_the_first_head),
    ),
    'heads interleaved': ((rewrites.side_by_side,), (rewrites, 'square_attention', interleaved)),
    'M^T for M^-1': ((rewrites.gauge,), (np.linalg, 'inv', np.transpose)),
    'Q Q^T is not tied': ((rewrites.where_and_what,), (SCORES, 'shared_qk', qk.QK)),
    'W_Q = I': ((rewrites.worked_by_hand,), (SCORES, 'qk', identity.QueryFree)),
}


def test_every_check_speaks_against_in_a_stored_claim_or_after_a_mistake():
    """Each check is shown to be able to fail: in a committed claim, or by one of `MISTAKES`."""
    stored = {claim.name for claim in read_claims(CLAIMS) if has_false_exact_row(claim.rows)}
    caught = {check for checks, _ in MISTAKES.values() for check in checks}
    for name, claim in declared.claims().items():
        for check in claim.checks:
            assert name in stored or check in caught, check


@pytest.mark.parametrize('mistake', slow_except(['heads interleaved', 'M^T for M^-1'], MISTAKES))
def test_a_check_speaks_against_after_a_mistake(mistake, monkeypatch):
    checks, (owner, name, value) = MISTAKES[mistake]
    replace = monkeypatch.setitem if isinstance(owner, dict) else monkeypatch.setattr
    replace(owner, name, value)
    with jax.enable_x64(True):
        assert all(has_false_exact_row(check()) for check in checks)


@pytest.mark.stored
def test_an_untuned_difference_speaks_by_the_ends_of_its_interval(committed, monkeypatch):
    """It stays open where a rule withholds the baseline's verdict, or where a trial diverged."""
    loaded = Results(committed).study('quickstart')
    sound = loaded.arms[1]
    remark = Remark(RemarkCode.OVER_TOLERANCE, blocks=True)
    withheld = dataclasses.replace(sound, remarks=(remark,))
    first_diverged = dataclasses.replace(sound.chosen[0], status='diverged')
    diverged = dataclasses.replace(sound, verdict_trials=(first_diverged, *sound.chosen[1:]))
    for low, high, speaks in ((-2, -1, Speaks.FOR), (1, 2, Speaks.AGAINST), (-1, 1, Speaks.OPEN)):
        difference = dataclasses.replace(sound.difference, low=low, high=high)
        comparison = dataclasses.replace(sound.comparison, difference=difference)
        arm = dataclasses.replace(sound, comparison=comparison)
        pairs = [(arm, baseline) for baseline in (sound, withheld, diverged)]
        monkeypatch.setattr(measures, '_arms_with_baselines', lambda _, pairs=pairs: pairs)
        spoken = [row.speaks for row in measures.at_one_rate(loaded, 'merged/vo')]
        assert spoken == [speaks, Speaks.OPEN, Speaks.OPEN]
