"""Small attention layers, their inputs, and the slow reference that they are compared with.

Layers run operation by operation: their operations recur, a program of a whole layer does not.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qkattn.attention import Attention, AttentionSpec, oracle, registry, visible

D, N, H, T = 32, 4, 8, 7
SIZES = {'d_model': D, 'num_heads': N, 'num_kv_heads': N, 'head_size': H}


@functools.cache
def _initialized(spec: AttentionSpec, seed: int, x64: bool) -> tuple[list[jax.Array], Any]:
    return jax.tree.flatten(Attention(spec, key=jax.random.key(seed)))


def make(variant: Any, *, seed: int = 0, moved: bool = True, **options: Any) -> Attention:
    """A layer of a variant, as in make(('qk', 'vo'), biases=True).

    Where `moved`, noise is added to every parameter, since biases that are 0 would not be tested.
    """
    spec = AttentionSpec(score=variant[0], value=variant[1], **{**SIZES, **options})
    leaves, tree = _initialized(spec, seed, jax.config.jax_enable_x64)
    if moved and leaves:
        rng = np.random.default_rng(seed + 1)
        leaves = [jnp.asarray(np.asarray(a) + 0.1 * rng.standard_normal(a.shape)) for a in leaves]
    return jax.tree.unflatten(tree, leaves)


def wide(tree: Any) -> Any:
    """The same arrays in float64; only under jax.enable_x64."""
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), tree)


def letters(circuit: nnx.Module, spec: AttentionSpec) -> dict[str, int]:
    """The size of each letter in `parameter_count`, from the spec and the names of parameters.

    In 'w_q_DNH' the last part names the axes: a letter has one size throughout.
    """
    sizes = spec.letters
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(circuit))):
        name = path[-1].key
        for letter, size in zip(name.rsplit('_', 1)[1], leaf.shape, strict=True):
            assert sizes.setdefault(letter, size) == size, f'{name}: {letter} is {size} here'
    return sizes


def stream(length: int = T, seed: int = 5, d_model: int = D) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((2, length, d_model)))


def causal() -> jax.Array:
    return visible(T, T, causal=True)


def hide_self(score: Any, mask_BTS: Any) -> np.ndarray:
    """The mask with the diagonal hidden where the Score hides it and others are visible."""
    mask_BTS = np.asarray(mask_BTS)
    if not score.hides_self:
        return mask_BTS
    others_BTS = mask_BTS & ~np.eye(mask_BTS.shape[-1], dtype=bool)
    return np.where(others_BTS.any(-1, keepdims=True), others_BTS, mask_BTS)


def relative_bias(score: Any, T: int, S: int) -> np.ndarray | float:
    """b_NTS of a Score that has one, looked up pair by pair; else 0."""
    b_N1R = score.relative_bias(jnp.arange(1 - S, T)[None])
    if b_N1R is None:
        return 0.0
    b_NTS = np.zeros((len(b_N1R), T, S))
    for t, s in np.ndindex(T, S):
        b_NTS[:, t, s] = b_N1R[:, 0, t - s + S - 1]
    return b_NTS


def normed(z_BTNH: Any, gain_H: Any) -> np.ndarray:
    """RMSNorm over the last axis, with a gain."""
    z_BTNH = np.asarray(z_BTNH, np.float64)
    return z_BTNH / np.sqrt((z_BTNH**2).mean(-1, keepdims=True)) * np.asarray(gain_H[...])


def rotary_logits(
    q_BTNH: np.ndarray, k_BSKH: np.ndarray, *, scale: float, rope_size: int | None
) -> np.ndarray:
    """s_BNTS of queries and keys whose last `rope_size` channels are rotated by position.

    Pairs (h, h + H/2) are complex numbers; position t turns them by exp(i t / 10000^(2 h / H)),
    so that a pair contributes Re(q conj(k) exp(i (t - s) w)). Su et al. 2021, eq. 16.
    """
    q_BTNH = np.asarray(q_BTNH, np.float64)
    k_BSKH = np.asarray(k_BSKH, np.float64)
    B, T, N, H = q_BTNH.shape
    S = k_BSKH.shape[1]
    keep = 0 if rope_size is None else H - rope_size
    half = (H - keep) // 2
    s_BNTS = np.zeros((B, N, T, S))
    for b, n, t, s in np.ndindex(*s_BNTS.shape):
        q_H = q_BTNH[b, t, n]
        k_H = k_BSKH[b, s, n * k_BSKH.shape[2] // N]
        pairs = [z[keep : keep + half] + 1j * z[keep + half :] for z in (q_H, k_H)]
        turn = np.exp(1j * (t - s) * 10_000.0 ** (-np.arange(half) / half))
        plain = q_H[:keep] @ k_H[:keep]
        s_BNTS[b, n, t, s] = scale * (plain + (pairs[0] * pairs[1].conj() * turn).real.sum())
    return s_BNTS


def expected_logits(layer: Attention, x_BTD: Any, y_BSD: Any, *, cross: bool) -> np.ndarray:
    """Logits s_BNTS by the definition, with scale, cap and biases of positions.

    They come from A[n], or from queries and keys where QK norm or rotary positions act on these.
    """
    score = layer.score
    spec = layer.spec
    if spec.qk_norm or spec.positions == 'rope':
        q_BTNH = score.queries(x_BTD)
        k_BSKH = score.keys(score.cached(y_BSD))
        if spec.qk_norm:
            q_BTNH = normed(q_BTNH, layer.g_q_H)
            k_BSKH = normed(k_BSKH, layer.g_k_H)
        size = score.rope_size if spec.positions == 'rope' else 0
        s_BNTS = rotary_logits(q_BTNH, k_BSKH, scale=score.scale, rope_size=size)
    elif score.bilinear:
        s_BNTS = oracle.logits(score.matrix(), x_BTD, y_BSD, scale=score.scale)
    else:
        s_BNTS = score.scale * score.reference_logits(np.asarray(x_BTD), np.asarray(y_BSD))
    s_BNTS = spec.score_scale * s_BNTS
    if spec.logit_cap is not None:
        s_BNTS = spec.logit_cap * np.tanh(s_BNTS / spec.logit_cap)
    if spec.positions == 'alibi':
        for n, t, s in np.ndindex(*s_BNTS.shape[1:]):
            s_BNTS[:, n, t, s] -= 2 ** (-8 * (n + 1) / spec.num_heads) * abs(t - s)
    return s_BNTS + (0 if cross else relative_bias(score, *s_BNTS.shape[2:]))


def expected_probabilities(
    layer: Attention, x_BTD: Any, y_BSD: Any, mask_BTS: Any, *, cross: bool
) -> np.ndarray:
    """The attention probabilities of the layer, computed by the slow reference."""
    s_BNTS = expected_logits(layer, x_BTD, y_BSD, cross=cross)
    mask_BTS = mask_BTS if cross else hide_self(layer.score, mask_BTS)
    return oracle.probabilities(s_BNTS, mask_BTS, registry.find_normalizer(layer.spec.normalizer))


def expected(layer: Attention, x_BTD: Any, mask_BTS: Any, y_BSD: Any = None) -> np.ndarray:
    """out_BTD from A[n] and B[n], in cross-attention to y where it is given."""
    value = layer.value
    cross = y_BSD is not None
    y_BSD = y_BSD if cross else x_BTD
    p_BNTS = expected_probabilities(layer, x_BTD, y_BSD, mask_BTS, cross=cross)
    if not value.linear:
        x_BTD, y_BSD = (np.asarray(z, np.float64) for z in (x_BTD, y_BSD))
        return value.reference_output(p_BNTS, x_BTD, y_BSD, layer.score)
    b_o_D = getattr(value, 'b_o_D', None)
    b_o_D = None if b_o_D is None else np.asarray(b_o_D[...])
    return oracle.mix(p_BNTS, value.matrix(layer.score), y_BSD, b_o_D)


def error(got: Any, want: Any) -> float:
    """Largest difference relative to the largest element."""
    want = np.asarray(want, np.float64)
    return float(np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max())


def assert_close(got: Any, want: Any, tolerance: float, about: str) -> None:
    """Compares with a tolerance relative to the largest element."""
    got = np.asarray(got, np.float64)
    want = np.asarray(want, np.float64)
    assert got.shape == want.shape, f'{about}: shape {got.shape}, expected {want.shape}'
    atol = tolerance * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=atol, err_msg=about)


def assert_equals_oracle(layer: Attention, x_BTD: jax.Array, mask_BTS: jax.Array) -> None:
    """Self-attention and cross-attention, to 1e-5 in float32 and to 1e-12 in float64."""
    tolerance = {'float32': 1e-5, 'float64': 1e-12}[x_BTD.dtype.name]
    y_BSD = jnp.asarray(stream(5, seed=6, d_model=x_BTD.shape[-1]), x_BTD.dtype)
    all_BTS = visible(x_BTD.shape[1], 5, causal=False)
    for kind, mask, y in (('self', mask_BTS, None), ('cross', all_BTS, y_BSD)):
        out_BTD = layer(x_BTD, mask, y_BSD=y)
        assert out_BTD.dtype == x_BTD.dtype
        about = f'{kind}-attention of {layer.spec}'
        assert_close(out_BTD, expected(layer, x_BTD, mask, y), tolerance, about)


def assert_equals_oracle_in_float64(layer: Attention) -> None:
    with jax.enable_x64(True):
        layer, x_BTD = wide((layer, stream(d_model=layer.spec.d_model)))
        assert_equals_oracle(layer, x_BTD, causal())


def by_path(tree: Any) -> dict[str, np.ndarray]:
    """The parameters of a layer or a model by path, 'score.w_q_DNH'."""
    name = functools.partial(jax.tree_util.keystr, simple=True, separator='.')
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {name(path[:-1]): np.asarray(leaf) for path, leaf in leaves}


def initial_logit_std(score: str, value: str = 'no_v', *, num_seeds: int, **sizes: Any) -> float:
    """Standard deviation of the logits of independent unit-normal x and y, mean over seeds."""
    stds = []
    for seed in range(num_seeds):
        layer = make((score, value), seed=seed, moved=False, **sizes)
        circuit = layer.score
        x_BTD = stream(64, seed=seed + 50, d_model=sizes['d_model'])
        y_BSD = stream(64, seed=seed + 90, d_model=sizes['d_model'])
        q_BTNH = np.asarray(circuit.queries(x_BTD), np.float64)
        k_BSKH = np.asarray(circuit.keys(circuit.cached(y_BSD)), np.float64)
        if layer.spec.qk_norm:
            q_BTNH = normed(q_BTNH, layer.g_q_H)
            k_BSKH = normed(k_BSKH, layer.g_k_H)
        k_BSNH = np.repeat(k_BSKH, q_BTNH.shape[2] // k_BSKH.shape[2], axis=2)
        stds.append(circuit.scale * (q_BTNH.swapaxes(1, 2) @ k_BSNH.transpose(0, 2, 3, 1)).std())
    return float(np.mean(stds))


def assert_initial_logits_are_as_declared(score: str, **sizes: Any) -> None:
    """That their standard deviation is `Score.initial_logit_std`, 1 by default."""
    declared = make((score, 'no_v'), **sizes).score.initial_logit_std
    num_seeds = 6 if sizes['d_model'] == 64 else 2
    std = initial_logit_std(score, num_seeds=num_seeds, **sizes)
    assert 0.9 < std / declared < 1.1, (
        f'initial logits of {score} have the standard deviation {std:.2f}, not {declared:.2f}; '
        'choose another `scale`, or declare `initial_logit_std` if that is meant (docs/extend.md)'
    )
