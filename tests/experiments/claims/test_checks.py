"""Exact checks find mistakes; measures speak by their numbers.

`experiments.verify` holds what both give against claims.json.
"""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.claims import declared, measures
from experiments.claims.checks import counts, rewrites
from experiments.claims.claim import Kind, Speaks, exact
from experiments.claims.export import read_claims
from experiments.claims.studies import Results
from qkattn.attention.registry import SCORES
from qkattn.attention.scores import identity, qk
from qkattn.verdict import Remark, RemarkCode
from tests.experiments.claims.conftest import CLAIMS
from tests.lanes import only


def test_an_exact_row_speaks_by_its_tolerance():
    assert exact('rank', 3, 3, D=4, head_size=2).context == {'D': '4', 'head_size': '2'}
    spoken = [exact('error', value, 0, 1e-3).speaks for value in (1e-3, 2e-3, -2e-3)]
    assert spoken == [Speaks.FOR, Speaks.AGAINST, Speaks.AGAINST]


def against(rows):
    return any(row.speaks == Speaks.AGAINST and row.kind == Kind.EXACT for row in rows)


def interleaved(x_BTD, square, num_heads):
    """Head n takes every N-th column in place of D / N in a row."""
    order = np.arange(x_BTD.shape[2]).reshape(-1, num_heads).T.ravel()
    mixed = {name: w[:, order] if name != 'w_o' else w for name, w in square.items()}
    return square_attention(x_BTD, mixed, num_heads)


def first_head(layer, x_BTD):
    """The scores of head 0 for all heads."""
    s_BNTS = np.einsum('BTD,NDE,BSE->BNTS', x_BTD, layer.score.matrix(), x_BTD)
    return s_BNTS[:, :1].repeat(layer.spec.num_heads, axis=1)


square_attention = rewrites.square_attention
# Checks that find a mistake, and the object, attribute and value that make it.
WRONG = {
    'W_QK is two matrices': (
        (counts.merged_against_factored, counts.multiply_adds, counts.where_they_cross),
        (SCORES, 'merged', qk.FullSize),
    ),
    'one pattern': ((counts.heads_of_a_fixed_width,), (counts, 'softmax_input', first_head)),
    'heads interleaved': ((rewrites.side_by_side,), (rewrites, 'square_attention', interleaved)),
    'M^T for M^-1': ((rewrites.gauge,), (np.linalg, 'inv', np.transpose)),
    'Q Q^T is not tied': ((rewrites.where_and_what,), (SCORES, 'shared_qk', qk.QK)),
    'W_Q = I': ((rewrites.worked_by_hand,), (SCORES, 'qk', identity.QueryFree)),
}


def test_every_check_is_seen_to_speak_against():
    """By what is stored of its claim, or by a mistake above."""
    stored = {claim.name for claim in read_claims(CLAIMS) if against(claim.rows)}
    checks = [(name, check) for name, claim in declared.claims().items() for check in claim.checks]
    seen = {check for checks, _ in WRONG.values() for check in checks}
    assert not [check for name, check in checks if name not in stored and check not in seen]


@pytest.mark.parametrize('wrong', only(['heads interleaved', 'M^T for M^-1'], WRONG))
def test_a_check_finds_what_is_wrong(wrong, monkeypatch):
    checks, (where, name, value) = WRONG[wrong]
    setter = monkeypatch.setitem if isinstance(where, dict) else monkeypatch.setattr
    setter(where, name, value)
    with jax.enable_x64(True):
        assert all(against(check()) for check in checks)


@pytest.mark.stored
def test_an_untuned_difference_speaks_by_the_ends_of_its_interval(committed, monkeypatch):
    """Unless a rule withholds the verdict of its baseline, or a trial diverged."""
    loaded = Results(committed).study('quickstart')
    arm = loaded.arms[1]
    remark = Remark(RemarkCode.OVER_TOLERANCE, blocks=True)
    bases = [arm, dataclasses.replace(arm, remarks=(remark,))]
    trials = (dataclasses.replace(arm.chosen[0], status='diverged'), *arm.chosen[1:])
    bases.append(dataclasses.replace(arm, verdict_trials=trials))
    for low, high, speaks in ((-2, -1, Speaks.FOR), (1, 2, Speaks.AGAINST), (-1, 1, Speaks.OPEN)):
        difference = dataclasses.replace(arm.difference, low=low, high=high)
        comparison = dataclasses.replace(arm.comparison, difference=difference)
        judged = dataclasses.replace(arm, comparison=comparison)
        pairs = [(judged, base) for base in bases]
        monkeypatch.setattr(measures, '_compared', lambda _, pairs=pairs: pairs)
        spoken = [row.speaks for row in measures.at_one_rate(loaded, 'merged/vo')]
        assert spoken == [speaks, Speaks.OPEN, Speaks.OPEN]
