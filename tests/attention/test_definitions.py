"""A[n] and B[n] of the variants with matrices, from their parameters as the papers define them."""

import numpy as np
import scipy.linalg
from flax import nnx

from tests.attention.layers import D, H, N, error, make

GAIN = 0.5  # a residual gain other than 1, which `subspace` applies as its step size
P_DNH = np.eye(D).reshape(D, N, H)
EYE_D1D = np.eye(D)[:, None]
EYE_DND = np.repeat(EYE_D1D, N, axis=1)
HADAMARD_NHD = (scipy.linalg.hadamard(D) / D**0.5).reshape(N, H, D)


def parameters_by_name(circuit):
    """The parameters by their names without the axes: w_q_DNH is 'w_q'."""
    parameters = {}
    for name, attribute in vars(circuit).items():
        if isinstance(attribute, nnx.Param):
            name_without_axes = name.rpartition('_')[0]
            parameters[name_without_axes] = np.asarray(attribute[...])
    return parameters


def for_every_query_head(w_DKH):
    """A matrix of K key heads, each repeated for the query heads that share it."""
    num_key_heads = w_DKH.shape[1]
    return np.repeat(w_DKH, N // num_key_heads, axis=1)


def as_output_matrix(w_DKH):
    """W_O [N, H, D], the transpose of an inward matrix."""
    return np.moveaxis(for_every_query_head(w_DKH), 0, -1)


def product(w_DR, w_RNH):
    return np.einsum('DR,RNH->DNH', w_DR, w_RNH)


def gauge_fixed(free_CKH):
    """In head k, rows k H to (k + 1) H are the identity, and free rows follow."""
    heads = [np.concatenate([np.eye(H), free_CH]) for free_CH in np.moveaxis(free_CKH, 1, 0)]
    return np.stack([np.roll(w_DH, k * H, axis=0) for k, w_DH in enumerate(heads)], axis=1)


def gauge_fixed_rows(free_NHC):
    """Head n has its identity in columns n H to (n + 1) H, among its free columns."""
    free = [np.split(free_HC, [n * H], axis=1) for n, free_HC in enumerate(free_NHC)]
    return np.stack([np.concatenate([a, np.eye(H), b], axis=1) for a, b in free])


def qk(s):
    return s['w_q'], s['w_k']


def vo(_, v):
    return v['w_v'], v['w_o']


# A Score gives W_Q and W_K from its parameters s. A Value gives W_V and W_O from s and its own v.
SCORES = {
    'qk': qk,
    'merged': lambda s: (s['w_qk'], EYE_D1D),
    'shared_qk': lambda s: (s['w_q'], s['w_q']),
    'symmetric': lambda s: (s['w_q'] * s['g_sign'], s['w_q']),
    'pairwise': lambda s: (np.einsum('DNH,NHG->DNG', s['w_q'], s['w_form']), s['w_q']),
    'examples.symmetric_skew:SymmetricSkew(symmetric_rank=5, skew_rank=3)': lambda s: (
        np.concatenate([s['w_symmetric'] * s['g_sign'], s['w_left'], -s['w_right']], axis=-1),
        np.concatenate([s['w_symmetric'], s['w_right'], s['w_left']], axis=-1),
    ),
    'query_free': lambda s: (P_DNH, s['w_k']),
    'key_free': lambda s: (s['w_q'], P_DNH),
    'neither': lambda s: (P_DNH, P_DNH),
    'query_free_full': lambda s: (EYE_DND, s['w_k']),
    'neither_full': lambda s: (EYE_DND, EYE_D1D),
    'low_rank(rank=3)': qk,
    'full_size': qk,
    'examples.gauge_fixed:GaugeFixedQK': lambda s: (s['w_q'], gauge_fixed(s['w_k_free'])),
    'double(size=11)': lambda s: (
        product(s['w_q_outer'], s['w_q']),
        product(s['w_k_outer'], s['w_k']),
    ),
    'double(size=11, which="k")': lambda s: (s['w_q'], product(s['w_k_outer'], s['w_k'])),
    'examples.collaborative:Collaborative(size=9)': lambda s: (
        np.einsum('DR,NR->DNR', s['w_q'], s['w_mixing']),
        s['w_k'][:, None],
    ),
    'latent(size=6)': lambda s: (s['w_q'], product(s['w_down'], s['w_k'])),
    'latent(size=6, query_size=10)': lambda s: (
        product(s['w_q_down'], s['w_q']),
        product(s['w_down'], s['w_k']),
    ),
}
VALUES = {
    'vo': vo,
    'no_v': lambda s, v: (P_DNH, v['w_o']),
    'no_o': lambda s, v: (v['w_v'], as_output_matrix(P_DNH)),
    'no_vo': lambda s, v: (P_DNH, as_output_matrix(P_DNH)),
    'merged_vo': lambda s, v: (EYE_D1D, v['w_ov']),
    'low_rank(rank=3)': vo,
    'examples.identity_start:OutputFromIdentity': vo,
    'examples.gauge_fixed:GaugeFixedVO': lambda s, v: (v['w_v'], gauge_fixed_rows(v['w_o'])),
    'double(size=5)': lambda s, v: (product(v['w_v_outer'], v['w_v']), v['w_o']),
    'examples.hadamard:Hadamard': lambda s, v: (v['w_v'], HADAMARD_NHD * v['g_o']),
    'k_is_v': lambda s, v: (s['w_k'], v['w_o']),
    'q_is_v': lambda s, v: (s['w_q'], v['w_o']),
    'v_is_k_transposed': lambda s, v: (s['w_k'].reshape(D, D).T.reshape(D, N, H), v['w_o']),
    'o_is_v': lambda s, v: (v['w_v'], as_output_matrix(v['w_v'])),
    'o_is_k': lambda s, v: (v['w_v'], as_output_matrix(s['w_k'])),
    'o_is_q': lambda s, v: (v['w_v'], as_output_matrix(s['w_q'])),
    'subspace': lambda s, v: (s['w_k'], GAIN * as_output_matrix(s['w_k'])),
    'latent': lambda s, v: (product(s['w_down'], v['w_up_v']), v['w_o']),
}


# The pair of a Score and a Value, and the number of key heads.
CASES = [
    *(('qk', value, N) for value in VALUES if value != 'latent'),
    ('latent(size=6)', 'latent', N),
    *((score, 'vo', N) for score in SCORES),
    ('qk', 'k_is_v', 2),
    ('qk', 'vo', 2),
]


def test_matrices_are_those_of_the_definition():
    """Each variant has the matrices A[n] and B[n] of head n that its paper defines.

    A Score gives logits by A[n] = W_Q[n] W_K[n]^T. A Value gives outputs by B[n] = W_V[n] W_O[n].
    SCORES and VALUES compute these four matrices from the parameters of a variant.
    """
    for score, value, num_kv_heads in CASES:
        layer = make((score, value), residual_gain=GAIN, num_kv_heads=num_kv_heads)
        A_NDE, B_NDE = layer.matrix()

        score_parameters = parameters_by_name(layer.score)
        value_parameters = parameters_by_name(layer.value)
        w_q_DNH, w_k_DKH = SCORES[score](score_parameters)
        w_k_DNH = for_every_query_head(w_k_DKH)
        expected_A_NDE = np.einsum('DNH,ENH->NDE', w_q_DNH, w_k_DNH)
        assert error(A_NDE, expected_A_NDE) < 1e-5, score

        # A Value may use parameters of the Score, as in k_is_v.
        w_v_DKH, w_o_NHD = VALUES[value](score_parameters, value_parameters)
        w_v_DNH = for_every_query_head(w_v_DKH)
        expected_B_NDE = np.einsum('DNH,NHE->NDE', w_v_DNH, w_o_NHD)
        assert error(B_NDE, expected_B_NDE) < 1e-5, value
