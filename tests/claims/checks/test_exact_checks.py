"""What every exact check finds, and that it finds otherwise where the mathematics is wrong."""

import dataclasses

import numpy as np
import pytest

from qkattn.attention import registry
from qkattn.attention.scores import identity, qk, symmetric
from qkattn.claims import catalogue
from qkattn.claims.checks import (
    double_projection,
    identity_queries,
    multiply_adds,
    one_matrix,
    parameter_counts,
    published_layouts,
    tied_scores,
    truncated_ranks,
    two_by_two,
    weight_decay,
)
from qkattn.claims.decided import Speaks
from qkattn.convert import circuits, whole_layer
from qkattn.convert.factors import Factors, extract_factors

FOR, AGAINST = Speaks.FOR, Speaks.AGAINST
TRUE = {'': FOR}
# `experiments.verify` runs all of them.
SLOW = {
    one_matrix.same_function,
    one_matrix.ranks,
    parameter_counts.heads_of_a_fixed_width,
    published_layouts.side_by_side,
    published_layouts.steps_of_training,
    identity_queries.single_head,
    truncated_ranks.least_error,
    tied_scores.dominant_diagonal,
    double_projection.folded,
    double_projection.reach,
    truncated_ranks.every_rank,
    two_by_two.free_in_each_variant,
    two_by_two.where_and_what,
    tied_scores.half_the_numbers,
    tied_scores.half_the_pattern,
    multiply_adds.where_they_cross,
}

# What each check says, by the values of its contexts.
FOUND = {
    one_matrix.same_function: {'nothing': FOR},
    one_matrix.ranks: {'nothing': FOR},
    one_matrix.what_stands_between: {'nothing': FOR, 'RoPE': AGAINST, 'QK-norm': AGAINST},
    parameter_counts.merged_against_factored: TRUE,
    parameter_counts.heads_of_a_fixed_width: TRUE,
    multiply_adds.counted_twice: TRUE,
    multiply_adds.where_they_cross: TRUE,
    published_layouts.side_by_side: TRUE,
    published_layouts.imports: TRUE,
    published_layouts.one_matrix_per_head: {'Adam, entry by entry': FOR},
    published_layouts.steps_of_training: {
        'Adam, entry by entry': FOR,
        'Muon, matrix by matrix': AGAINST,
    },
    identity_queries.single_head: {'single head': FOR},
    identity_queries.single_head_with_more: {
        'single head, biases': AGAINST,
        'single head, RoPE': AGAINST,
    },
    identity_queries.many_heads: {
        'many heads, all read X': AGAINST,
        'many heads, head n reads slice n of X': AGAINST,
    },
    truncated_ranks.every_rank: {'W_QK in factors of head size r': FOR},
    truncated_ranks.least_error: {'W_QK in factors of head size r': FOR},
    tied_scores.symmetry: {'symmetry': FOR},
    tied_scores.half_the_numbers: {'half of A': FOR},
    tied_scores.half_the_pattern: {
        'half of the pattern, T <= D': AGAINST,
        'half of the pattern, T > D': FOR,
        'half of the pattern, T <= D, causal mask': AGAINST,
        'half of the pattern, T > D, causal mask': FOR,
    },
    tied_scores.dominant_diagonal: {
        'diagonal the largest of its row, H < ln T': AGAINST,
        'diagonal the largest of its row, H > 2 ln T': FOR,
        'diagonal has the largest score of all': FOR,
        'diagonal above the sum of its row': AGAINST,
    },
    two_by_two.free_in_each_variant: TRUE,
    two_by_two.worked_by_hand: TRUE,
    two_by_two.gauge: TRUE,
    two_by_two.where_and_what: TRUE,
    two_by_two.one_way: TRUE,
    double_projection.folded: {'R >= D': FOR},
    double_projection.unfolded: {'R >= D': FOR},
    double_projection.reach: {'R >= D': FOR, 'R < D': AGAINST},
    weight_decay.least_penalty: {'in the loss': FOR},
    weight_decay.shrunk_spectra: {'in the loss': FOR, 'AdamW without gradient noise': AGAINST},
}


def said(check) -> dict[str, str]:
    """What a check says, by the values of its contexts, whatever the point of a curve."""
    found: dict[str, set[str]] = {}
    for row in check():
        if row.speaks != Speaks.BESIDE:
            found.setdefault(', '.join(row.context.values()), set()).add(row.speaks)
    return {context: AGAINST if AGAINST in words else FOR for context, words in found.items()}


def named(checks) -> list:
    marks = {True: pytest.mark.slow, False: ()}
    return [
        pytest.param(check, marks=marks[check in SLOW], id=f'{check.__module__}.{check.__name__}')
        for check in checks
    ]


@pytest.mark.parametrize('check', named(FOUND))
def test_what_it_finds(check):
    assert said(check) == FOUND[check]


@pytest.mark.slow
def test_the_diagonal_is_the_largest_as_often_as_expected():
    for row in tied_scores.dominant_diagonal():
        if row.expected != 1:
            assert abs(row.value - row.expected) <= row.tolerance, row


def test_every_check_of_a_claim_is_tested():
    for claim in catalogue.declared().values():
        assert {*claim.checks, *claim.premises} <= FOUND.keys(), claim.name


def test_every_check_is_seen_to_speak_against():
    both = {check for check, of in FOUND.items() if AGAINST in of.values()}
    assert {of[0] for of in WRONG.values()} | both == FOUND.keys()


def swapped(layer) -> Factors:
    """W_K in the place of W_Q: A[n] transposed."""
    right = extract_factors(layer)
    return dataclasses.replace(right, w_q_DNH=right.w_k_DKH, w_k_DKH=right.w_q_DNH)


def exchanged(factors) -> np.ndarray:
    """W_K W_Q^T in the place of W_Q W_K^T."""
    A_NEF = logit_matrices(factors)
    A_NEF[:, :-1, :-1] = A_NEF[:, :-1, :-1].swapaxes(1, 2)
    return A_NEF


def reordered(layer) -> Factors:
    """The W_Q of other heads."""
    right = extract_factors(layer)
    return dataclasses.replace(right, w_q_DNH=right.w_q_DNH[:, ::-1])


def smallest_first(A_NED, rank):
    """The factors of the smallest singular values."""
    left_NER, s_NR, right_NRD = (z[..., ::-1] for z in np.linalg.svd(A_NED, full_matrices=False))
    right_NRD = right_NRD[:, ::-1, ::-1]
    left_ENR = np.moveaxis(left_NER[..., :rank] * s_NR[:, None, :rank], 0, 1)
    rest = float(np.linalg.norm(s_NR[:, rank:]) / np.linalg.norm(A_NED))
    return left_ENR, np.moveaxis(right_NRD[:, :rank], -1, 0), rest


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


square_attention, load_gpt2 = published_layouts.square_attention, published_layouts.load_gpt2
imported, of_rank = published_layouts.imported, truncated_ranks.of_rank
softmax_input, logit_matrices = parameter_counts.softmax_input, Factors.logit_matrices


def from_matrix(layer, x_BTD):
    """x A x^T, whatever acts on queries and keys."""
    return np.einsum('BTD,NDE,BSE->BNTS', x_BTD, layer.score.matrix(), x_BTD)


def first_head(layer, x_BTD):
    """The scores of head 0 for all heads."""
    return softmax_input(layer, x_BTD)[:, :1].repeat(layer.spec.num_heads, axis=1)


def one_for_two(name, tensors):
    """The entries of W_K in the place of those of W_Q."""
    found = imported(name, tensors)
    return found | {'q': found['k']}


class Twice(qk.Double):
    """The queries of `double`, times 2."""

    def queries(self, x_BTD):
        return 2 * super().queries(x_BTD)


# By what is wrong: a check that finds it, and the object, attribute and value that make it so.
WRONG = {
    'W_QK is W_K W_Q^T': (one_matrix.same_function, Factors, 'logit_matrices', exchanged),
    'the rank exceeds H': (one_matrix.ranks, qk.QK, 'matrix', lambda self: np.eye(32)[None]),
    'RoPE left out': (one_matrix.what_stands_between, one_matrix, 'softmax_input', from_matrix),
    'W_QK is two matrices': (
        parameter_counts.merged_against_factored,
        registry.SCORES,
        'merged',
        qk.FullSize,
    ),
    'one pattern': (
        parameter_counts.heads_of_a_fixed_width,
        parameter_counts,
        'softmax_input',
        first_head,
    ),
    'no T^2 D': (multiply_adds.counted_twice, multiply_adds, 'merged', lambda T, D: T * D * D),
    'D and H exchanged': (
        multiply_adds.where_they_cross,
        multiply_adds,
        'crossover',
        lambda D, H: H * (2 * D - H) / (D - H),
    ),
    'heads interleaved': (
        published_layouts.side_by_side,
        published_layouts,
        'square_attention',
        interleaved,
    ),
    'rows for columns': (published_layouts.imports, published_layouts.IMPORTS, 'GPT-2', transposed),
    "W_K' is W_Q W_K^T": (
        identity_queries.single_head,
        identity_queries,
        'extract_factors',
        swapped,
    ),
    'Q = X is free in W_Q': (
        identity_queries.many_heads,
        identity_queries,
        'slices_DNH',
        lambda spec: np.eye(32)[:, None],
    ),
    'the smallest are kept': (
        truncated_ranks.least_error,
        circuits,
        'balanced_factors',
        smallest_first,
    ),
    'Q K^T for Q Q^T': (tied_scores.symmetry, registry.SCORES, 'shared_qk', qk.QK),
    'half of Q K^T': (
        tied_scores.half_the_numbers,
        registry.SCORES,
        'shared_qk',
        symmetric.Pairwise,
    ),
    'indefinite for Q Q^T': (
        tied_scores.dominant_diagonal,
        registry.SCORES,
        'shared_qk',
        symmetric.Symmetric,
    ),
    'W_Q = I for W_K = I': (
        two_by_two.worked_by_hand,
        registry.SCORES,
        'key_free',
        identity.QueryFree,
    ),
    'M^T for M^-1': (two_by_two.gauge, np.linalg, 'inv', np.transpose),
    'Q Q^T as free as Q K^T': (
        two_by_two.free_in_each_variant,
        registry.SCORES,
        'shared_qk',
        qk.QK,
    ),
    'Q Q^T is not tied': (two_by_two.where_and_what, registry.SCORES, 'shared_qk', qk.QK),
    'Q Q^T attends one way': (two_by_two.one_way, registry.SCORES, 'shared_qk', qk.QK),
    'rank r - 1 for r': (
        truncated_ranks.every_rank,
        truncated_ranks,
        'of_rank',
        lambda r: of_rank(max(1, r - 1)),
    ),
    'W_Q is W_K': (
        published_layouts.one_matrix_per_head,
        published_layouts,
        'imported',
        one_for_two,
    ),
    'twice the queries': (double_projection.unfolded, registry.SCORES, 'double', Twice),
    'heads in another order': (double_projection.folded, whole_layer, 'extract_factors', reordered),
    'half of the penalty': (
        weight_decay.least_penalty,
        weight_decay,
        'penalty',
        lambda m: (m[0] ** 2).sum() / 2,
    ),
}


@pytest.mark.parametrize(
    'wrong',
    [
        pytest.param(name, marks=pytest.mark.slow if of[0] in SLOW else ())
        for name, of in WRONG.items()
    ],
)
def test_a_check_finds_what_is_wrong(wrong, monkeypatch):
    check, where, name, value = WRONG[wrong]
    setter = monkeypatch.setitem if isinstance(where, dict) else monkeypatch.setattr
    setter(where, name, value)
    assert said(check) != FOUND[check]
