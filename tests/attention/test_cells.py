"""Every cell of the grid against the two equations."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qkattn.attention import SCORES, VALUES, Attention, AttentionSpec, oracle, visible

D, N, H, T = 32, 4, 8, 7
CELLS = list(itertools.product(SCORES, VALUES))
GROUPED = [(s, v) for s, v in CELLS if SCORES[s].uses_kv_heads or VALUES[v].uses_kv_heads]


def make(score: str, value: str, *, seed: int = 0, **options) -> Attention:
    """A cell with every parameter moved off its initial value, so that zero biases count."""
    options = {'d_model': D, 'num_heads': N, 'num_kv_heads': N, 'head_size': H, **options}
    spec = AttentionSpec(score=score, value=value, **options)
    attention = Attention(spec, key=jax.random.key(seed))
    leaves, tree = jax.tree.flatten(attention)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves) or 1)
    moved = [a + 0.1 * jax.random.normal(k, a.shape) for a, k in zip(leaves, keys, strict=False)]
    return jax.tree.unflatten(tree, moved)


def streams(seed: int = 5, num_keys: int = T) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(seed))
    return jax.random.normal(keys[0], (2, T, D)), jax.random.normal(keys[1], (2, num_keys, D))


def reference(attention: Attention, x_BTD, y_BSD, mask_BTS) -> np.ndarray:
    return oracle.attention(
        np.asarray(attention.score.matrix()),
        np.asarray(attention.value.matrix(attention.score)),
        x_BTD,
        y_BSD,
        mask_BTS,
        scale=attention.score.scale,
    )


def relative_error(got, want) -> float:
    return float(np.abs(np.asarray(got) - want).max() / np.abs(want).max())


@pytest.mark.parametrize('biases', [False, True], ids=['plain', 'biases'])
@pytest.mark.parametrize(('score', 'value'), CELLS)
def test_cell_equals_the_oracle(score, value, biases):
    attention = make(score, value, biases=biases)
    x_BTD, _ = streams()
    valid_BS = jnp.arange(T)[None, :] < jnp.array([[T], [T - 2]])
    mask_BTS = visible(T, T, causal=True, valid_BS=valid_BS)
    want = reference(attention, x_BTD, x_BTD, mask_BTS)
    assert relative_error(attention(x_BTD, mask_BTS), want) < 1e-5


@pytest.mark.parametrize(('score', 'value'), CELLS)
def test_cell_equals_the_oracle_in_float64(score, value):
    with jax.enable_x64(True):
        attention = jax.tree.map(lambda a: a.astype(jnp.float64), make(score, value, biases=True))
        x_BTD, _ = streams()
        x_BTD = x_BTD.astype(jnp.float64)
        mask_BTS = visible(T, T, causal=True)
        got = attention(x_BTD, mask_BTS)
        assert got.dtype == jnp.float64
        assert relative_error(got, reference(attention, x_BTD, x_BTD, mask_BTS)) < 1e-12


@pytest.mark.parametrize(('score', 'value'), CELLS)
def test_cross_attention_equals_the_oracle(score, value):
    attention = make(score, value)
    x_BTD, y_BSD = streams(num_keys=5)
    mask_BTS = visible(T, 5, causal=False)
    want = reference(attention, x_BTD, y_BSD, mask_BTS)
    assert relative_error(attention(x_BTD, mask_BTS, y_BSD=y_BSD), want) < 1e-5


@pytest.mark.parametrize('num_kv_heads', [1, 2])
@pytest.mark.parametrize(('score', 'value'), GROUPED)
def test_grouped_heads_equal_the_oracle(score, value, num_kv_heads):
    attention = make(score, value, num_kv_heads=num_kv_heads, biases=True)
    x_BTD, _ = streams()
    mask_BTS = visible(T, T, causal=True)
    want = reference(attention, x_BTD, x_BTD, mask_BTS)
    assert relative_error(attention(x_BTD, mask_BTS), want) < 1e-5


@pytest.mark.parametrize(('score', 'value'), CELLS)
def test_no_position_depends_on_a_later_one(score, value):
    attention = make(score, value)
    x_BTD, _ = streams()

    def output_at(x_BTD, t):
        return attention(x_BTD, visible(T, T, causal=True))[:, t].sum()

    for t in (0, 3):
        gradient_BTD = jax.grad(output_at)(x_BTD, t)
        assert jnp.all(gradient_BTD[:, t + 1 :] == 0)
        assert jnp.abs(gradient_BTD[:, : t + 1]).max() > 0


@pytest.mark.parametrize(('score', 'value'), CELLS)
def test_padding_is_never_read(score, value):
    attention = make(score, value)
    x_BTD, _ = streams()
    valid_BS = jnp.arange(T)[None, :] < jnp.array([[T - 3], [T - 1]])
    mask_BTS = visible(T, T, causal=False, valid_BS=valid_BS)
    other_BTD = jnp.where(valid_BS[..., None], x_BTD, 100.0)
    rows = np.asarray(valid_BS)
    got, want = (np.asarray(attention(z, mask_BTS))[rows] for z in (other_BTD, x_BTD))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(('score', 'value'), CELLS)
def test_every_parameter_has_a_finite_gradient(score, value):
    attention = make(score, value, biases=True)
    x_BTD, _ = streams()

    def loss(attention):
        return jnp.square(attention(x_BTD, visible(T, T, causal=True))).sum()

    for path, gradient in jax.tree_util.tree_leaves_with_path(jax.grad(loss)(attention)):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(gradient).all(), name
        # A constant added to every key moves all logits of a query alike: softmax ignores it.
        if 'b_k' not in name:
            assert np.abs(gradient).max() > 0, name


@pytest.mark.parametrize(
    ('score', 'value', 'num_kv_heads'),
    [(*cell, N) for cell in CELLS] + [(*cell, k) for cell in GROUPED for k in (1, 2)],
)
def test_weights_equal_the_documented_formula(score, value, num_kv_heads):
    attention = make(score, value, num_kv_heads=num_kv_heads)
    sizes = {'D': D, 'N': N, 'K': num_kv_heads, 'H': H}
    for circuit, cls in ((attention.score, SCORES[score]), (attention.value, VALUES[value])):
        counted = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(circuit)))
        assert counted == eval(cls.weights, sizes), cls.weights


@pytest.mark.parametrize('d_model', [64, 256, 512])
@pytest.mark.parametrize('num_heads', [1, 4, 8])
@pytest.mark.parametrize('score', SCORES)
def test_initial_logits_have_unit_standard_deviation(score, num_heads, d_model):
    head_size = d_model // num_heads
    spec = AttentionSpec(
        score=score,
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=head_size,
    )
    stds, diagonals = [], []
    for seed in range(4):
        circuit = SCORES[score](spec, key=jax.random.key(seed))
        x_TD = jax.random.normal(jax.random.key(100 + seed), (128, d_model))
        s_NTS = circuit.scale * jnp.einsum('TD,NDE,SE->NTS', x_TD, circuit.matrix(), x_TD)
        stds.append(s_NTS[:, ~np.eye(128, dtype=bool)].std())
        diagonals.append(jnp.diagonal(s_NTS, axis1=1, axis2=2).mean())
    assert 0.9 < np.mean(stds) < 1.1
    expected = head_size**0.5 / (1 + head_size / d_model) ** 0.5 if score == 'shared_qk' else 0
    assert abs(np.mean(diagonals) - expected) < 0.1 * max(expected, 3)


def test_key_heads_are_read_in_place():
    memory = make('merged', 'vo').remember(streams()[0])
    assert {name: a.shape for name, a in memory.items()} == {
        'x_BSD': (2, T, D),
        'v_BSKH': (2, T, N, H),
    }


@pytest.mark.parametrize(
    ('score', 'value', 'floats'),
    [('qk', 'vo', 2 * D), ('key_free', 'no_v', D), ('merged', 'no_vo', D), ('qk', 'no_v', 2 * D)],
)
def test_the_memory_holds_the_stream_once(score, value, floats):
    memory = make(score, value).remember(jnp.zeros((1, 1, D)))
    assert sum(a.size for a in memory.values()) == floats
