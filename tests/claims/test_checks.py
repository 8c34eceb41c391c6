"""Exact checks find what claims.json holds, and otherwise where the mathematics is wrong."""

import numpy as np
import pytest

from qkattn.attention import registry
from qkattn.attention.scores import identity, qk
from qkattn.claims import declared
from qkattn.claims.checks import counts, free_numbers, rewrites, spectra
from qkattn.claims.checks import published_layouts as layouts
from qkattn.claims.claim import Speaks, exact
from qkattn.claims.export import read_claims
from tests.claims.conftest import CLAIMS
from tests.lanes import only

CHECKS = {check: name for name, claim in declared.claims().items() for check in claim.checks}
# `experiments.verify` runs all of them.
FAST = (
    rewrites.what_stands_between,
    rewrites.queries_of_many_heads,
    counts.merged_against_factored,
    counts.multiply_adds,
    layouts.imports,
    layouts.one_matrix_per_head,
    free_numbers.symmetry,
    free_numbers.worked_by_hand,
    free_numbers.gauge,
    free_numbers.one_way,
    spectra.least_penalty,
    spectra.shrunk_spectra,
)


def key(row):
    return row.quantity, tuple(row.context.items())


STORED = {
    (claim.name, *key(row)): row.speaks for claim in read_claims(CLAIMS) for row in claim.rows
}


def differing(check):
    """The rows of a check that speak otherwise than those of claims.json."""
    return [
        row
        for row in check()
        if (row.speaks == Speaks.AGAINST)
        != (STORED.get((CHECKS[check], *key(row))) == Speaks.AGAINST)
    ]


@pytest.mark.parametrize('check', only(FAST, CHECKS))
def test_a_check_finds_what_is_stored(check):
    assert not differing(check)
    for row in check() if check is free_numbers.dominant_diagonal else ():
        assert row.expected == 1 or abs(row.value - row.expected) <= row.tolerance


def test_an_exact_row_speaks_by_its_tolerance():
    assert exact('rank', 3, 3, D=4, head_size=2).context == {'D': '4', 'head_size': '2'}
    spoken = [exact('error', value, 0, 1e-3).speaks for value in (1e-3, 2e-3, -2e-3)]
    assert spoken == [Speaks.FOR, Speaks.AGAINST, Speaks.AGAINST]


def test_every_check_is_seen_to_speak_against():
    """By what is stored of its claim, or by a mistake below."""
    against = {name for (name, *_), speaks in STORED.items() if speaks == Speaks.AGAINST}
    stored = {check for check, name in CHECKS.items() if name in against}
    assert {check for check, *_ in WRONG.values()} | stored == CHECKS.keys()


def interleaved(x_TD, square, num_heads):
    """Head n takes every N-th column in place of D / N in a row."""
    order = np.arange(x_TD.shape[1]).reshape(-1, num_heads).T.ravel()
    mixed = {name: w[:, order] if name != 'o' else w for name, w in square.items()}
    return square_attention(x_TD, mixed, num_heads)


def transposed(tensors, num_heads):
    """Rows of c_attn in the place of its columns."""
    name = 'h.0.attn.c_attn.weight'
    parts = [part.T for part in np.split(tensors[name], 3, axis=1)]
    return load_gpt2(tensors | {name: np.concatenate(parts, axis=1)}, num_heads=num_heads)


def first_head(layer, x_BTD):
    """The scores of head 0 for all heads."""
    s_BNTS = np.einsum('BTD,NDE,BSE->BNTS', x_BTD, layer.score.matrix(), x_BTD)
    return s_BNTS[:, :1].repeat(layer.spec.num_heads, axis=1)


square_attention, load_gpt2 = layouts.square_attention, layouts.load_gpt2
crossover, SCORES, SHARED = counts.crossover, registry.SCORES, 'shared_qk'
# By what is wrong: a check that finds it, and the object, attribute and value that make it so.
WRONG = {
    'W_QK is two matrices': (counts.merged_against_factored, SCORES, 'merged', qk.FullSize),
    'one pattern': (counts.heads_of_a_fixed_width, counts, 'softmax_input', first_head),
    'no T^2 D': (counts.multiply_adds, counts, 'merged', lambda T, D: T * D * D),
    'D for H': (counts.where_they_cross, counts, 'crossover', lambda D, H: crossover(H, D)),
    'heads interleaved': (layouts.side_by_side, layouts, 'square_attention', interleaved),
    'rows for columns': (layouts.imports, layouts.IMPORTS, 'GPT-2', transposed),
    'W_Q = I for W_K = I': (free_numbers.worked_by_hand, SCORES, 'key_free', identity.QueryFree),
    'M^T for M^-1': (free_numbers.gauge, np.linalg, 'inv', np.transpose),
    'Q Q^T as free as Q K^T': (free_numbers.free_in_each_variant, SCORES, SHARED, qk.QK),
    'Q Q^T is not tied': (free_numbers.where_and_what, SCORES, SHARED, qk.QK),
    'Q Q^T attends one way': (free_numbers.one_way, SCORES, SHARED, qk.QK),
}
QUICK = [name for name, (check, *_) in WRONG.items() if check in FAST]


@pytest.mark.parametrize('wrong', only(QUICK, WRONG))
def test_a_check_finds_what_is_wrong(wrong, monkeypatch):
    check, where, name, value = WRONG[wrong]
    setter = monkeypatch.setitem if isinstance(where, dict) else monkeypatch.setattr
    setter(where, name, value)
    assert differing(check)
