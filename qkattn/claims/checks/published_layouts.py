"""Square matrices of published implementations and the D x H matrices of heads in them (A4, D3)."""

from collections.abc import Iterator

import jax
import numpy as np
import optax
from flax import nnx

from qkattn.attention import Attention, oracle
from qkattn.claims.checks.small_layers import (
    D,
    H,
    N,
    Options,
    T,
    count,
    float64,
    layer,
    output,
    same,
    stream,
)
from qkattn.claims.claim import Row, exact
from qkattn.config import ModelConfig
from qkattn.convert.published import TRANSPOSED, load_gpt2, load_nanogpt, shapes

CONFIG = ModelConfig(d_model=D, num_layers=1, num_heads=N, context=T, vocab_size=16)
ENTRIES: Options = {'optimizer': 'Adam, entry by entry'}
MATRICES: Options = {'optimizer': 'Muon, matrix by matrix'}
IMPORTS = {'GPT-2': load_gpt2, 'nanoGPT': load_nanogpt}
Square = dict[str, np.ndarray]  # D x D matrices q, k, v and o


def square_attention(x_TD: np.ndarray, square: Square, num_heads: int) -> np.ndarray:
    """Causal attention as implementations with D x D matrices write it."""
    T, D = x_TD.shape
    q, k, v = ((x_TD @ square[name]).reshape(T, num_heads, -1).transpose(1, 0, 2) for name in 'qkv')
    s = q @ k.transpose(0, 2, 1) / np.sqrt(D // num_heads)
    s = np.where(np.tri(T, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    o = (p / p.sum(-1, keepdims=True)) @ v
    return o.transpose(1, 0, 2).reshape(T, D) @ square['o']


def published() -> tuple[dict[str, np.ndarray], Square]:
    """Random tensors of a GPT-2 of one layer, and the square matrices in them."""
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(size=shape).astype(np.float32) / shape[0] ** 0.5
        for name, shape in shapes(CONFIG).items()
    }
    parts = np.split(tensors['h.0.attn.c_attn.weight'], 3, axis=1)
    return tensors, dict(zip('qkvo', [*parts, tensors['h.0.attn.c_proj.weight']], strict=True))


def imported(name: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """W_Q, W_K, W_V (D, N, H) and W_O (N, H, D), read as GPT-2 or, transposed, as nanoGPT."""
    if name == 'nanoGPT':
        tensors = {k: v.T if k.endswith(TRANSPOSED) else v for k, v in tensors.items()}
    attention = IMPORTS[name](tensors, num_heads=N)[1]['blocks']['attention']
    score, value = attention['score'], attention['value']
    heads = score['w_q_DNH'], score['w_k_DKH'], value['w_v_DKH'], value['w_o_NHD']
    return {name: np.asarray(w[0]) for name, w in zip('qkvo', heads, strict=True)}


def sliced(square: Square) -> dict[str, np.ndarray]:
    """The matrices of heads as slices of the square ones, in the shapes of `imported`."""
    return {n: w.reshape((N, H, D) if n == 'o' else (D, N, H)) for n, w in square.items()}


def in_heads(square: Square) -> Attention:
    """The layer in float64 whose heads are slices of the square matrices."""
    attention, heads = layer(), sliced(square)
    attention.score.w_q_DNH[...], attention.score.w_k_DKH[...] = heads['q'], heads['k']
    attention.value.w_v_DKH[...], attention.value.w_o_NHD[...] = heads['v'], heads['o']
    return attention


@float64
def side_by_side() -> Iterator[Row]:
    """Square matrices against N rectangular ones: the function, by the oracle, and the count."""
    square, x_BTD = published()[1], np.asarray(stream())
    squared_BTD = [square_attention(x_TD, square, N) for x_TD in x_BTD]
    attention, mask_BTS = in_heads(square), np.tri(T, dtype=bool)[None]
    A_NDE, B_NDE = map(np.asarray, attention.matrix())
    oracle_BTD = oracle.attention(A_NDE, B_NDE, x_BTD, x_BTD, mask_BTS, scale=attention.score.scale)
    quantity, out_BTD = 'change of the output, D x D against N of D x H', output(attention, x_BTD)
    yield same(f'{quantity}, by A[n] and B[n]', oracle_BTD, squared_BTD)
    yield same(f'{quantity}, by the layer', out_BTD, squared_BTD)
    yield exact('parameters of the rectangular matrices', count('qk/vo'), 4 * D * D)


def imports() -> Iterator[Row]:
    """Heads that are read from published layouts against slices of the square matrices."""
    tensors, square = published()
    for name in IMPORTS:
        heads, expected = imported(name, tensors), sliced(square)
        apart = max(np.abs(heads[which] - expected[which]).max() for which in 'qkvo')
        yield exact(f'W_Q[n], W_K[n], W_V[n], W_O[n] of {name} less slices', apart, 0)
        counted = sum(w.size for w in heads.values())
        yield exact(f'parameters of attention in {name}', counted, 4 * D * D)


@float64
def one_matrix_per_head() -> Iterator[Row]:
    """No published layout has a projection that heads share: every number belongs to one head."""
    tensors, numbers = published()[0], np.arange(3 * D * D, dtype=np.float32)
    for name in IMPORTS:
        numbered = imported(name, tensors | {'h.0.attn.c_attn.weight': numbers.reshape(D, -1)})
        places = np.concatenate([numbered[which].ravel() for which in 'qkv'])
        quantity = f'numbers of c_attn that are not in exactly one head, {name}'
        yield exact(quantity, int((np.sort(places) != numbers).sum()), 0, **ENTRIES)
    flax = nnx.MultiHeadAttention(N, D, use_bias=False, decode=False, rngs=nnx.Rngs(0))
    square = {
        name: np.asarray(getattr(flax, which).kernel[...], np.float64).reshape(D, D)
        for name, which in zip('qkvo', ('query', 'key', 'value', 'out'), strict=True)
    }
    flax, x_BTD = jax.tree.map(lambda a: a.astype(np.float64) if a.ndim > 1 else a, flax), stream()
    outputs = flax(x_BTD, mask=np.tri(T, dtype=bool)), output(in_heads(square), x_BTD)
    yield same('change of the output, heads of flax.nnx', *outputs, tolerance=1e-6, **ENTRIES)


@float64
def steps_of_training() -> Iterator[Row]:
    """Three steps of an optimizer on W_Q as one D x D matrix, and as N matrices of D x H."""
    for optimizer, context in ((optax.adam(0.1), ENTRIES), (optax.contrib.muon(0.1), MATRICES)):
        square = after_steps(optimizer, {0: slice(None)})[0]
        heads = after_steps(optimizer, {n: slice(n * H, (n + 1) * H) for n in range(N)})
        joined = np.concatenate([*heads.values()], axis=1)
        yield same('change of W_Q by training heads in one matrix', joined, square, **context)


def after_steps(optimizer: optax.GradientTransformation, columns: dict[int, slice]) -> dict:
    """Those columns of one W_Q, each as a matrix of its own, after three steps with gradients."""
    w_SDD = np.random.default_rng(1).normal(size=(4, D, D))
    params = {name: w_SDD[0][:, which] for name, which in columns.items()}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for gradient_DD in w_SDD[1:]:
        gradients = {name: gradient_DD[:, which] for name, which in columns.items()}
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params
