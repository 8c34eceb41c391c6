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
    """A small layer of a variant, as in make(('qk', 'vo'), biases=True).

    By default it has 4 query heads, 4 key heads and 8 channels a head. The stream has 32 channels.

    Args:
        variant: The names of the Score, which gives logits, and of the Value, which gives outputs.
        seed: The seed of the initial values.
        moved: Whether to add noise to every parameter, so that biases are not 0.
        options: Fields of `AttentionSpec`.
    """
    score, value = variant
    spec = AttentionSpec(score=score, value=value, **{**SIZES, **options})
    leaves, tree = _initialized(spec, seed, jax.config.jax_enable_x64)
    if moved and leaves:
        rng = np.random.default_rng(seed + 1)
        leaves = [
            jnp.asarray(np.asarray(leaf) + 0.1 * rng.standard_normal(leaf.shape)) for leaf in leaves
        ]
    return jax.tree.unflatten(tree, leaves)


def in_float64(tree: Any) -> Any:
    """The same arrays in float64. It works only inside of jax.enable_x64."""
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), tree)


def letters(circuit: nnx.Module, spec: AttentionSpec) -> dict[str, int]:
    """The size of each axis letter of a circuit, which is a Score or a Value.

    The name of a parameter ends with the letters of its axes: w_q_DNH has D, N and H. A letter must
    have the same size in the spec and in all parameters.
    """
    sizes = spec.letters
    parameters = nnx.to_pure_dict(nnx.state(circuit))
    for path, parameter in jax.tree_util.tree_leaves_with_path(parameters):
        name = path[-1].key
        axes = name.split('_')[-1]
        for letter, size in zip(axes, parameter.shape, strict=True):
            known_size = sizes.setdefault(letter, size)
            assert size == known_size, f'{name}: {letter} is {size} here'
    return sizes


def stream(length: int = T, seed: int = 5, d_model: int = D) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((2, length, d_model)))


def causal() -> jax.Array:
    return visible(T, T, causal=True)


def hide_self(score: Any, mask_BTS: Any) -> np.ndarray:
    """The mask of a Score: true where query t may attend to key s.

    With `hides_self`, a token does not see itself unless it would see nothing.
    """
    mask_BTS = np.asarray(mask_BTS)
    if not score.hides_self:
        return mask_BTS
    is_other_TS = ~np.eye(mask_BTS.shape[-1], dtype=bool)
    others_BTS = mask_BTS & is_other_TS
    sees_others_BT1 = others_BTS.any(-1, keepdims=True)
    return np.where(sees_others_BT1, others_BTS, mask_BTS)


def relative_bias(score: Any, T: int, S: int) -> np.ndarray | float:
    """The biases b_NTS that a Score adds to logits, or 0 if it adds none.

    A bias depends on the distance t - s of query t and key s.
    """
    distances_1R = jnp.arange(1 - S, T)[None]  # all t - s, in ascending order
    b_N1R = score.relative_bias(distances_1R)
    if b_N1R is None:
        return 0.0
    b_NTS = np.zeros((len(b_N1R), T, S))
    for t, s in np.ndindex(T, S):
        distance = t - s
        index = distance + S - 1  # 0 for the least distance, 1 - S
        b_NTS[:, t, s] = b_N1R[:, 0, index]
    return b_NTS


def normed(z_BTNH: Any, gain_H: Any) -> np.ndarray:
    """RMSNorm over the last axis, with a gain."""
    z_BTNH = np.asarray(z_BTNH, np.float64)
    return z_BTNH / np.sqrt((z_BTNH**2).mean(-1, keepdims=True)) * np.asarray(gain_H[...])


def rotary_logits(
    q_BTNH: np.ndarray, k_BSKH: np.ndarray, *, scale: float, rope_size: int | None
) -> np.ndarray:
    """Logits s_BNTS of N query heads and K key heads with rotary positions (Su et al. 2021).

    The last `rope_size` channels of a head are rotated, or all channels if `rope_size` is None. Of
    the rotated channels, c and c + half form a complex number. Each pair adds
    Re(q conj(k) exp(i (t - s) w_c)), where w_c = 10000^(-c / half).
    """
    q_BTNH = np.asarray(q_BTNH, np.float64)
    k_BSKH = np.asarray(k_BSKH, np.float64)
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    num_plain = 0 if rope_size is None else H - rope_size  # channels that are not rotated
    half = (H - num_plain) // 2
    frequencies = 10_000.0 ** (-np.arange(half) / half)

    def complex_pairs(z_H):
        """The rotated channels of a head as complex numbers."""
        real = z_H[num_plain : num_plain + half]
        imaginary = z_H[num_plain + half :]
        return real + 1j * imaginary

    s_BNTS = np.zeros((B, N, T, S))
    for b, n, t, s in np.ndindex(*s_BNTS.shape):
        q_H = q_BTNH[b, t, n]
        key_head = n * K // N  # the key head that query head n shares
        k_H = k_BSKH[b, s, key_head]
        turns = np.exp(1j * (t - s) * frequencies)
        rotated = (complex_pairs(q_H) * complex_pairs(k_H).conj() * turns).real.sum()
        plain = q_H[:num_plain] @ k_H[:num_plain]
        s_BNTS[b, n, t, s] = scale * (plain + rotated)
    return s_BNTS


def expected_logits(layer: Attention, x_BTD: Any, y_BSD: Any, *, cross: bool) -> np.ndarray:
    """Logits s_BNTS of queries from x and keys from y, by the definition of the layer.

    The layer applies its scale, cap and position biases. In cross-attention, the Score itself
    adds no biases.
    """
    score = layer.score
    spec = layer.spec
    if spec.qk_norm or spec.positions == 'rope':
        # QK norm and rotary positions act on queries and keys, so the matrix A[n] is not enough.
        q_BTNH = score.queries(x_BTD)
        k_BSKH = score.keys(score.cached(y_BSD))
        if spec.qk_norm:
            q_BTNH = normed(q_BTNH, layer.g_q_H)
            k_BSKH = normed(k_BSKH, layer.g_k_H)
        rope_size = score.rope_size if spec.positions == 'rope' else 0
        s_BNTS = rotary_logits(q_BTNH, k_BSKH, scale=score.scale, rope_size=rope_size)
    elif score.bilinear:
        # Logits are x A[n] y^T, with a matrix A[n] for each head.
        s_BNTS = oracle.logits(score.matrix(), x_BTD, y_BSD, scale=score.scale)
    else:
        s_BNTS = score.scale * score.reference_logits(np.asarray(x_BTD), np.asarray(y_BSD))

    # What the layer does to the logits of any Score.
    s_BNTS = spec.score_scale * s_BNTS
    if spec.logit_cap is not None:
        s_BNTS = spec.logit_cap * np.tanh(s_BNTS / spec.logit_cap)
    _, N, T, S = s_BNTS.shape
    if spec.positions == 'alibi':
        # ALiBi lowers the logits of distant keys, by a slope of each head.
        for n, t, s in np.ndindex(N, T, S):
            slope = 2 ** (-8 * (n + 1) / N)
            s_BNTS[:, n, t, s] -= slope * abs(t - s)
    if cross:
        return s_BNTS
    return s_BNTS + relative_bias(score, T, S)


def expected_probabilities(
    layer: Attention, x_BTD: Any, y_BSD: Any, mask_BTS: Any, *, cross: bool
) -> np.ndarray:
    """The attention probabilities p_BNTS of the layer, computed by the slow reference."""
    s_BNTS = expected_logits(layer, x_BTD, y_BSD, cross=cross)
    if not cross:
        mask_BTS = hide_self(layer.score, mask_BTS)
    normalizer = registry.find_normalizer(layer.spec.normalizer)
    return oracle.probabilities(s_BNTS, mask_BTS, normalizer)


def expected(layer: Attention, x_BTD: Any, mask_BTS: Any, y_BSD: Any = None) -> np.ndarray:
    """The output of the layer by the slow reference, in float64 numpy.

    Queries come from x. Keys and values come from y_BSD if it is given, otherwise from x.
    """
    cross = y_BSD is not None
    if not cross:
        y_BSD = x_BTD
    p_BNTS = expected_probabilities(layer, x_BTD, y_BSD, mask_BTS, cross=cross)

    value = layer.value
    if not value.linear:
        # A Value that is not linear has its own slow form.
        x_BTD = np.asarray(x_BTD, np.float64)
        y_BSD = np.asarray(y_BSD, np.float64)
        return value.reference_output(p_BNTS, x_BTD, y_BSD, layer.score)

    # Each head n adds p[n] y B[n]. Some Values also have an output bias.
    b_o_D = getattr(value, 'b_o_D', None)
    if b_o_D is not None:
        b_o_D = np.asarray(b_o_D[...])
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
    """Compares the outputs of a layer with the slow reference in numpy, the oracle.

    Self-attention uses the mask. Cross-attention sees all of five other tokens. The tolerance
    depends on the type of x.
    """
    dtype = x_BTD.dtype
    tolerance = {'float32': 1e-5, 'float64': 1e-12}[dtype.name]
    _, T, D = x_BTD.shape
    y_BSD = jnp.asarray(stream(5, seed=6, d_model=D), dtype)
    every_key_BTS = visible(T, 5, causal=False)

    self_BTD = layer(x_BTD, mask_BTS)
    assert self_BTD.dtype == dtype
    want_BTD = expected(layer, x_BTD, mask_BTS)
    assert_close(self_BTD, want_BTD, tolerance, f'self-attention of {layer.spec}')

    cross_BTD = layer(x_BTD, every_key_BTS, y_BSD=y_BSD)
    assert cross_BTD.dtype == dtype
    want_BTD = expected(layer, x_BTD, every_key_BTS, y_BSD)
    assert_close(cross_BTD, want_BTD, tolerance, f'cross-attention of {layer.spec}')


def assert_equals_oracle_in_float64(layer: Attention) -> None:
    with jax.enable_x64(True):
        layer, x_BTD = in_float64((layer, stream(d_model=layer.spec.d_model)))
        assert_equals_oracle(layer, x_BTD, causal())


def by_path(tree: Any) -> dict[str, np.ndarray]:
    """The parameters of a layer or a model by path, 'score.w_q_DNH'."""
    parameters = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path_of_parameter = path[:-1]  # without '.value'
        name = jax.tree_util.keystr(path_of_parameter, simple=True, separator='.')
        parameters[name] = np.asarray(leaf)
    return parameters


def initial_logit_std(score: str, value: str = 'no_v', *, num_seeds: int, **sizes: Any) -> float:
    """The standard deviation of initial logits for unit-normal x and y, mean over seeds.

    Args:
        score: The name of the Score.
        value: The name of the Value, which does not change the logits.
        num_seeds: The number of seeds, each with its own parameters and inputs.
        sizes: Fields of `AttentionSpec`, including `d_model`.
    """
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

        # Several query heads may share a key head.
        queries_per_key = q_BTNH.shape[2] // k_BSKH.shape[2]
        k_BSNH = np.repeat(k_BSKH, queries_per_key, axis=2)
        s_BNTS = circuit.scale * np.einsum('BTNH,BSNH->BNTS', q_BTNH, k_BSNH, optimize=True)
        stds.append(s_BNTS.std())
    return float(np.mean(stds))


def assert_initial_logits_are_as_declared(score: str, **sizes: Any) -> None:
    """Checks that initial logits have the standard deviation `Score.initial_logit_std`."""
    declared = make((score, 'no_v'), **sizes).score.initial_logit_std
    num_seeds = 6 if sizes['d_model'] == 64 else 2
    std = initial_logit_std(score, num_seeds=num_seeds, **sizes)
    assert 0.9 < std / declared < 1.1, (
        f'initial logits of {score} have the standard deviation {std:.2f}, not {declared:.2f}; '
        'choose another `scale`, or declare `initial_logit_std` if that is meant (docs/extend.md)'
    )
