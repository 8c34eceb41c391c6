"""Scores that contain one another: copied parameters give the same logits, to float64 precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.attention import SCORES, Score, oracle
from tests.attention.layers import D, H, N, make, stream
from tests.attention.test_score_options import VARIANTS
from tests.lanes import thinned

P_DNH = np.eye(D).reshape(D, N, H)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def score_of(text: str, *, seed: int = 0, biases: bool = True, **options) -> Score:
    """A score in float64, moved off its initial parameters."""
    layer = make((text, 'vo'), seed=seed, biases=biases, **options)
    return jax.tree.map(lambda a: a.astype(jnp.float64), layer).score


def put(score: Score, **parameters) -> Score:
    """`score` with these parameters; the biases on keys and queries that are not named are 0."""
    for name, value in parameters.items():
        parameter = getattr(score, name)
        assert parameter.shape == value.shape, name
        parameter[...] = jnp.asarray(value)
    return score


def logits(score: Score) -> np.ndarray:
    """s_BNTS from what is cached, with the scale."""
    x_BTD, y_BSD = (stream(seed=s).astype(jnp.float64) for s in (5, 6))
    q_BTNH, k_BSKH = score.queries(x_BTD), score.keys(score.cached(y_BSD))
    k_BSNH = jnp.repeat(k_BSKH, N // k_BSKH.shape[2], axis=2)
    return np.asarray(score.scale * jnp.einsum('BTNH,BSNH->BNTS', q_BTNH, k_BSNH))


def assert_same(left: Score, right: Score) -> None:
    want = logits(right)
    np.testing.assert_allclose(logits(left), want, atol=1e-12 * np.abs(want).max())
    scaled = [score.scale * np.asarray(score.matrix()) for score in (left, right)]
    np.testing.assert_allclose(*scaled, atol=1e-12 * np.abs(scaled[1]).max())


@pytest.mark.parametrize('text', thinned([*SCORES, *VARIANTS], every=3))
def test_logits_are_those_of_the_matrix(text):
    """Before the softmax, which hides what is added to all keys alike."""
    score = score_of(text)
    x_BTD, y_BSD = (stream(seed=s) for s in (5, 6))
    if score.bilinear:
        want = oracle.logits(score.matrix(), x_BTD, y_BSD, scale=score.scale)
    else:
        want = score.scale * score.reference_logits(x_BTD, y_BSD)
    np.testing.assert_allclose(logits(score), want, atol=1e-12 * np.abs(want).max())


@pytest.mark.parametrize('num_kv_heads', [1, 4])
def test_low_rank_at_the_head_size_is_qk(num_kv_heads):
    qk = score_of('qk', num_kv_heads=num_kv_heads)
    same = put(
        score_of(f'low_rank(rank={H})', seed=9, num_kv_heads=num_kv_heads),
        w_q_DNR=qk.w_q_DNH[...],
        w_k_DKR=qk.w_k_DKH[...],
        b_q_NR=qk.b_q_NH[...],
        b_k_KR=qk.b_k_KH[...],
    )
    assert_same(same, qk)


@pytest.mark.parametrize(('rank', 'wide'), [(3, 'qk'), (H, 'full_size'), (1, 'low_rank(rank=5)')])
def test_zero_columns_make_a_thin_score_wide(rank, wide):
    thin, into = score_of(f'low_rank(rank={rank})'), score_of(wide, seed=9)
    letter = 'H' if wide == 'qk' else 'R'
    size = into.queries(jnp.zeros((1, 1, D))).shape[-1]

    def padded(a):
        return np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, size - rank)])

    rescale = (size / rank) ** 0.5
    put(
        into,
        **{
            f'w_q_DN{letter}': rescale * padded(thin.w_q_DNR[...]),
            f'w_k_DK{letter}': padded(thin.w_k_DKR[...]),
            f'b_q_N{letter}': rescale * padded(thin.b_q_NR[...]),
            f'b_k_K{letter}': padded(thin.b_k_KR[...]),
        },
    )
    assert_same(into, thin)


@pytest.mark.parametrize('num_kv_heads', [2, 4])
def test_merged_as_a_product_starts_as_qk(num_kv_heads):
    options = {'num_kv_heads': num_kv_heads, 'moved': False}
    merged, qk = (make((s, 'vo'), **options).score for s in ('merged(init="product")', 'qk'))
    want = qk.scale * qk.matrix()
    np.testing.assert_allclose(merged.scale * merged.matrix(), want, atol=1e-6)
    singular_ND = np.linalg.svd(merged.matrix(), compute_uv=False)
    assert (singular_ND[:, H:] < 1e-5).all() and (singular_ND[:, H - 1] > 1e-2).all()


@pytest.mark.parametrize('score', ['symmetric', 'pairwise'])
def test_qk_contains_tied_forms(score):
    tied = score_of(score)
    w_DNH, b_NH = tied.w_q_DNH[...], tied.b_q_NH[...]
    if score == 'symmetric':
        form_NHG = jnp.eye(H) * tied.g_sign_NH[...][:, :, None]
    else:
        form_NHG = tied.w_form_NHG[...]
    qk = put(
        score_of('qk', seed=9),
        w_q_DNH=jnp.einsum('DNH,NHG->DNG', w_DNH, form_NHG),
        b_q_NH=jnp.einsum('NH,NHG->NG', b_NH, form_NHG),
        w_k_DKH=w_DNH,
        b_k_KH=b_NH,
    )
    assert_same(qk, tied)


def test_symmetric_is_symmetric_and_not_definite():
    A_NDE = np.asarray(score_of('symmetric', biases=False).matrix())
    np.testing.assert_allclose(A_NDE, np.swapaxes(A_NDE, 1, 2), atol=1e-12)
    eigenvalues_ND = np.linalg.eigvalsh(A_NDE)
    assert (eigenvalues_ND[:, H // 2 - 1] < -0.1).all() and (eigenvalues_ND[:, -1] > 0.1).all()
    pairwise_NDE = np.asarray(score_of('pairwise', biases=False).matrix())
    assert np.abs(pairwise_NDE - np.swapaxes(pairwise_NDE, 1, 2)).max() > 0.1


def test_symmetric_with_positive_signs_is_shared_qk():
    shared = score_of('shared_qk')
    signed = put(
        score_of('symmetric', seed=9),
        w_q_DNH=shared.w_q_DNH[...],
        b_q_NH=shared.b_q_NH[...],
        g_sign_NH=np.ones((N, H)),
    )
    assert_same(signed, shared)


def test_every_qk_splits_into_symmetric_and_skew():
    qk = score_of('qk')
    split = score_of(f'symmetric_skew(symmetric_rank={2 * H}, skew_rank={H})', seed=9)
    root = (qk.scale / split.scale) ** 0.5
    q_DNH, k_DNH = root * qk.w_q_DNH[...], root * qk.w_k_DKH[...]
    q_NH, k_NH = root * qk.b_q_NH[...], root * qk.b_k_KH[...]

    def halves(q, k):  # q k^T + k q^T = ((q + k)(q + k)^T - (q - k)(q - k)^T) / 2
        return jnp.concatenate([q + k, q - k], axis=-1) / 2

    put(
        split,
        w_symmetric_DNR=halves(q_DNH, k_DNH),
        b_symmetric_NR=halves(q_NH, k_NH),
        g_sign_NR=np.tile(np.repeat([1.0, -1.0], H), (N, 1)),
        w_left_DNC=q_DNH / 2,
        b_left_NC=q_NH / 2,
        w_right_DNC=k_DNH,
        b_right_NC=k_NH,
    )
    assert_same(split, qk)


def test_the_two_parts_are_what_they_are_called():
    for ranks, sign in (((5, 0), 1), ((0, 3), -1)):
        text = f'symmetric_skew(symmetric_rank={ranks[0]}, skew_rank={ranks[1]})'
        A_NDE = np.asarray(score_of(text).matrix())
        np.testing.assert_allclose(A_NDE, sign * np.swapaxes(A_NDE, 1, 2), atol=1e-12)
        assert (np.linalg.matrix_rank(A_NDE) == ranks[0] + 2 * ranks[1]).all()


def test_identities_are_contained_in_learned_forms():
    zero = {'b_q_NH': np.zeros((N, H)), 'b_k_KH': np.zeros((N, H))}
    assert_same(put(score_of('qk'), w_q_DNH=P_DNH, w_k_DKH=P_DNH, **zero), score_of('neither'))
    eye_DNE = np.tile(np.eye(D)[:, None], (1, N, 1))
    merged = put(score_of('merged'), w_qk_DNE=eye_DNE, b_q_NE=np.zeros((N, D)))
    assert_same(merged, score_of('neither_full'))
    s_BNTS = logits(score_of('neither_full'))
    np.testing.assert_array_equal(s_BNTS, np.broadcast_to(s_BNTS[:, :1], s_BNTS.shape))


def test_query_free_full_is_merged_transposed():
    free = score_of('query_free_full', biases=False)
    w_DNE = jnp.transpose(free.w_k_DNE[...], (2, 1, 0))
    assert_same(put(score_of('merged', seed=9, biases=False), w_qk_DNE=w_DNE), free)


@pytest.mark.parametrize('which', ['q', 'k', 'both'])
def test_double_projections_fold(which):
    double = score_of(f'double(size=11, which={which!r})', num_kv_heads=2)
    q_DNH, k_DKH = double.folded()
    qk = put(
        score_of('qk', seed=9, num_kv_heads=2),
        w_q_DNH=q_DNH[:D],
        b_q_NH=q_DNH[D],
        w_k_DKH=k_DKH[:D],
        b_k_KH=k_DKH[D],
    )
    assert_same(qk, double)


def test_double_with_an_identity_is_qk():
    qk = score_of('qk')
    double = put(
        score_of('double', seed=9),
        w_q_outer_DR=np.eye(D),
        w_k_outer_DR=np.eye(D),
        b_q_outer_R=np.zeros(D),
        b_k_outer_R=np.zeros(D),
        w_q_RNH=qk.w_q_DNH[...],
        w_k_RKH=qk.w_k_DKH[...],
        b_q_NH=qk.b_q_NH[...],
        b_k_KH=qk.b_k_KH[...],
    )
    assert_same(double, qk)


def test_collaborative_heads_with_blocks_are_qk():
    qk = score_of('qk')
    mixing_NR = np.repeat(np.eye(N), H, axis=1)
    collaborative = score_of('collaborative', seed=9)
    assert collaborative.scale == qk.scale
    put(
        collaborative,
        w_q_DR=qk.w_q_DNH[...].reshape(D, -1),
        b_q_R=qk.b_q_NH[...].reshape(-1),
        w_k_DR=qk.w_k_DKH[...].reshape(D, -1),
        b_k_R=qk.b_k_KH[...].reshape(-1),
        w_mixing_NR=mixing_NR,
    )
    assert_same(collaborative, qk)


@pytest.mark.parametrize('num_kv_heads', [1, 2, 4])
def test_fixing_the_gauge_loses_nothing(num_kv_heads):
    qk = score_of('qk', num_kv_heads=num_kv_heads)
    fixed = score_of('gauge_fixed', seed=9, num_kv_heads=num_kv_heads)
    w_q_DNH, w_k_DKH = np.array(qk.w_q_DNH[...]), np.array(qk.w_k_DKH[...])
    b_q_NH, b_k_KH = np.array(qk.b_q_NH[...]), np.array(qk.b_k_KH[...])
    free_CKH = np.zeros((D - H, num_kv_heads, H))
    for k in range(num_kv_heads):
        block = w_k_DKH[k * H : (k + 1) * H, k].copy()
        rows = np.roll(w_k_DKH[:, k], -k * H, axis=0)
        free_CKH[:, k] = (rows @ np.linalg.inv(block))[H:]
        b_k_KH[k] = b_k_KH[k] @ np.linalg.inv(block)
        for n in range(k * N // num_kv_heads, (k + 1) * N // num_kv_heads):
            w_q_DNH[:, n] = w_q_DNH[:, n] @ block.T
            b_q_NH[n] = b_q_NH[n] @ block.T
    put(fixed, w_q_DNH=w_q_DNH, b_q_NH=b_q_NH, w_k_free_CKH=free_CKH, b_k_KH=b_k_KH)
    want = logits(qk)
    np.testing.assert_allclose(logits(fixed), want, atol=1e-9 * np.abs(want).max())  # cond(block)
    size = sum(leaf.size for leaf in jax.tree.leaves(qk)) - num_kv_heads * H**2
    assert sum(leaf.size for leaf in jax.tree.leaves(fixed)) == size


def test_the_rows_that_are_fixed_can_be_chosen():
    rows = ((5, 0, 31, 7, 9, 30, 2, 3), tuple(range(8)))
    fixed = score_of(f'gauge_fixed(rows={rows})', num_kv_heads=2)
    w_k_DKH = np.asarray(fixed.w_k_DKH())
    for k, of_head in enumerate(rows):
        np.testing.assert_array_equal(w_k_DKH[list(of_head), k], np.eye(H))
        free = [d % D for d in range(of_head[0], of_head[0] + D) if d % D not in of_head]
        np.testing.assert_array_equal(w_k_DKH[free, k], fixed.w_k_free_CKH[:, k])


def test_a_gauge_with_nothing_free_reads_the_stream():
    fixed = score_of('gauge_fixed', biases=False, num_heads=1, num_kv_heads=1, head_size=D)
    assert fixed.w_k_free_CKH is None
    y_BSD = stream().astype(jnp.float64)
    np.testing.assert_array_equal(fixed.cached(y_BSD)['k_BSKH'][:, :, 0], y_BSD)


def test_frozen_starts_as_qk():
    frozen, qk = (make((s, 'vo'), moved=False, num_kv_heads=2).score for s in ('frozen', 'qk'))
    np.testing.assert_array_equal(frozen.matrix(), qk.matrix())


@pytest.mark.parametrize('num_kv_heads', [1, 2, 4])
def test_a_latent_with_selectors_is_grouped_qk(num_kv_heads):
    qk, K = score_of('qk', num_kv_heads=num_kv_heads), num_kv_heads
    select_RNH = np.repeat(np.eye(K * H).reshape(K * H, K, H), N // K, axis=1)
    latent = put(
        score_of(f'latent(size={K * H})', seed=9),
        w_down_DR=qk.w_k_DKH[...].reshape(D, -1),
        b_down_R=qk.b_k_KH[...].reshape(-1),
        w_k_RNH=select_RNH,
        b_k_NH=np.zeros((N, H)),
        w_q_DNH=qk.w_q_DNH[...],
        b_q_NH=qk.b_q_NH[...],
    )
    assert_same(latent, qk)
    assert sum(a.size for a in latent.cached(stream()[:1, :1]).values()) == K * H


@pytest.mark.parametrize(
    ('text', 'positions'),
    [
        ('latent(size=6)', 'none'),
        ('latent(size=6, query_size=10)', 'none'),
        ('latent(size=6, query_size=10, rope_size=4)', 'rope'),
    ],
)
@pytest.mark.parametrize('biases', [False, True], ids=['plain', 'biases'])
def test_absorbed_queries_give_the_same_logits(text, positions, biases):
    score = score_of(text, positions=positions, biases=biases)
    x_BTD, y_BSD = (stream(seed=s).astype(jnp.float64) for s in (5, 6))
    cache = score.cached(y_BSD)
    q_BTNR, k_BSKR = score.absorbed_queries(x_BTD), score.absorbed_keys(cache)
    held = sum(a.shape[-1] for a in cache.values())
    assert k_BSKR.shape == (*y_BSD.shape[:2], 1, held) and q_BTNR.shape[-1] == held
    got = score.scale * jnp.einsum('BTNR,BSR->BNTS', q_BTNR, k_BSKR[:, :, 0])
    want = logits(score)
    if biases:  # b_K adds the same number to all logits of a query
        got, want = (s - s.mean(-1, keepdims=True) for s in (got, want))
    np.testing.assert_allclose(got, want, atol=1e-12 * np.abs(want).max())
