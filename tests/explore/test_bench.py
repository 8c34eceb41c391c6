"""Symbols against numbers: every registered variant, at sizes that a reader can follow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.attention import SCORES, VALUES, Mask, oracle
from qkattn.attention.scores.qk import QK
from qkattn.errors import ConfigError, SpecError
from qkattn.explore.bench import Bench, dimension, exact, grid, kind, named, point, rank, ties
from qkattn.explore.interpreter import evaluate

sympy = pytest.importorskip('sympy', reason="pip install -e '.[explore]'")

VARIANTS = [f'{score}/vo' for score in SCORES] + [f'{VALUES[v].partner}/{v}' for v in VALUES]
# What has no matrices on symbols, and what needs several heads.
NOT_BILINEAR = {'nonlinear_query/vo'}
SEVERAL_HEADS = {'qk/gauge_fixed'}
NO_POWER_OF_TWO = {('qk/hadamard', 3)}


def bench_of(variant: str, dims: int = 2, heads: int = 1) -> Bench:
    return Bench(variant, 3, dims, heads)


def numbers(array: np.ndarray, at: dict) -> np.ndarray:
    """The array in float64 with the symbols' values in `at`."""
    at = {symbol: float(value) for symbol, value in at.items()}
    return np.array(sympy.lambdify(list(at), array.tolist())(*at.values()), float)


def values(symbols: np.ndarray, array: np.ndarray) -> dict:
    """Symbols with their values, where an entry is one."""
    pairs = zip(symbols.flat, np.ravel(array), strict=True)
    return {symbol: value for symbol, value in pairs if symbol.is_Symbol}


@pytest.mark.parametrize(
    ('dims', 'heads'),
    [(2, 2), *(pytest.param(*size, marks=pytest.mark.slow) for size in ((2, 1), (3, 1), (4, 2)))],
)
def test_symbols_become_the_numbers_of_the_layer(dims, heads):
    rng = np.random.default_rng(0)
    x_TD = rng.standard_normal((3, dims))
    refused, benches = set(), {}
    for variant in VARIANTS:
        try:
            benches[variant] = bench_of(variant, dims, heads)
        except ConfigError:
            refused.add(variant)
    expected = NOT_BILINEAR | (SEVERAL_HEADS if heads == 1 else set())
    assert refused == expected | {variant for variant, size in NO_POWER_OF_TWO if size == dims}

    arrays = {
        v: [rng.standard_normal(p.initial.shape) for p in b.parameters] for v, b in benches.items()
    }
    for variant, (matrices, out_TE) in computed(benches, arrays, x_TD).items():
        bench, at = benches[variant], {}
        for parameter, array in zip(bench.parameters, arrays[variant], strict=True):
            at |= values(parameter.symbols, array)
        for symbolic, numeric in zip(bench.AB, matrices, strict=True):
            np.testing.assert_allclose(numbers(symbolic, at), numeric, rtol=0, atol=1e-12)
        # The output of the whole layer, which computes queries, keys and values.
        a_NDE, b_NDE = (named(name, M_NDE) for name, M_NDE in zip('ab', bench.AB, strict=True))
        at = values(a_NDE, matrices[0]) | values(b_NDE, matrices[1]) | values(bench.x_TD, x_TD)
        s_NTS = float(bench.scale) * numbers(bench.scores(a_NDE), at)
        p_NTS = oracle.probabilities(s_NTS[None], np.ones((1, 3, 3), bool))[0]
        symbols_NTS = np.stack([grid('p', 3, 3, f'[{n}]') for n in range(len(p_NTS))])
        own_TE = numbers(bench.output(symbols_NTS, b_NDE), at | values(symbols_NTS, p_NTS))
        np.testing.assert_allclose(own_TE, out_TE, rtol=0, atol=1e-12)


def computed(benches, arrays, x_TD):
    """A and B, and the output for x, of the real layers of these variants in float64."""

    @jax.jit
    def run(leaves, x_BTD):
        layers = {
            v: jax.tree.unflatten(jax.tree.structure(b.layer), leaves[v])
            for v, b in benches.items()
        }
        return {v: (layer.matrix(), layer(x_BTD, Mask())[0]) for v, layer in layers.items()}

    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, run(arrays, jnp.asarray(x_TD)[None]))


def test_queries_and_keys_have_the_scores_of_the_matrix_as_polynomials():
    for score in SCORES:
        if f'{score}/vo' in NOT_BILINEAR:
            continue
        bench = bench_of(f'{score}/vo')
        tree = jax.tree.structure(bench.layer)
        symbols = [parameter.symbols for parameter in bench.parameters]

        def parts(x_BTD, *leaves, tree=tree):
            score = jax.tree.unflatten(tree, leaves).score
            return score.queries(x_BTD), score.keys(score.cached(x_BTD))

        q_BTNH, k_BSKH = evaluate(parts, bench.x_TD[None], *symbols, number=exact)
        s_NTS = np.einsum('tnh,snh->nts', q_BTNH[0], k_BSKH[0])
        difference = s_NTS - bench.scores(bench.AB[0])
        assert all(sympy.expand(entry) == 0 for entry in difference.flat), score


@pytest.mark.parametrize(
    ('variant', 'kinds'),
    [
        ('qk/vo', ('general', 'general')),
        ('shared_qk/vo', ('symmetric', 'general')),
        ('neither/o_is_v', ('identity', 'symmetric')),
        ('symmetric_skew(symmetric_rank=0)/no_vo', ('skew', 'identity')),
    ],
)
def test_kinds_of_matrices(variant, kinds):
    bench = bench_of(variant)
    assert tuple(kind(matrices[0]) for matrices in bench.AB) == kinds


def test_rank_is_that_of_the_factors():
    assert [rank(bench_of(f'low_rank(rank={r})/vo', 4).AB[0][0]) for r in (1, 2, 3)] == [1, 2, 3]


def test_equal_entries_share_a_name_and_opposite_ones_a_sign():
    x, y = sympy.symbols('x y')
    names = named('a', np.array([[[x * y, -x], [x, x * 0 + 2]]], object))
    assert [str(entry) for entry in names.flat] == ['a11', 'a12', '-a12', '2']


def test_scores_of_one_projection_are_tied():
    bench = bench_of('shared_qk/vo')
    assert ties(bench.scores(named('a', bench.AB[0]))) == [
        [(0, t, s), (0, s, t)] for t, s in ((0, 1), (0, 2), (1, 2))
    ]
    assert ties(bench_of('qk/vo').scores(named('a', bench_of('qk/vo').AB[0]))) == []


def test_dimensions_count_what_parameters_can_change():
    sizes = {'qk/vo': 8, 'shared_qk/vo': 7, 'neither/no_vo': 0, 'low_rank(rank=1)/vo': 7}
    assert {variant: dimension(*bench_of(variant).AB) for variant in sizes} == sizes


def test_constants_are_exact():
    assert [exact(x) for x in (0.5, -0.75, 2.0)] == [
        sympy.Rational(*r) for r in ((1, 2), (-3, 4), (2, 1))
    ]
    assert exact(3**-0.5) == 1 / sympy.sqrt(3) and exact(-(2**0.5)) == -sympy.sqrt(2)
    assert exact(0.123456789).is_Float


@pytest.mark.parametrize(
    ('function', 'name'),
    [
        (jnp.exp, 'exp'),
        (lambda x_TD: 1 / x_TD, 'div'),
        (lambda x_TD: x_TD**-2, 'integer_pow'),
        (lambda x_TD: jax.lax.fori_loop(0, 3, lambda _, power_TD: power_TD @ x_TD, x_TD), 'scan'),
    ],
)
def test_an_unknown_operation_is_named(function, name):
    with pytest.raises(SpecError, match=f'the operation {name} is not known for symbols'):
        evaluate(function, grid('x', 2, 2), number=exact)


def test_division_by_constants_and_powers():
    x_TD = grid('x', 2, 2)
    (out_TD,) = evaluate(lambda x_TD: x_TD**3 + jnp.square(x_TD / 3**0.5), x_TD, number=exact)
    assert (out_TD == x_TD**3 + x_TD**2 / 3).all()


class Exponential(QK):
    """A matrix that is no polynomial."""

    def matrix(self):
        return jnp.exp(super().matrix())


def test_a_class_with_an_unknown_operation_is_named():
    variant = f'{__name__}:Exponential/vo'
    with pytest.raises(ConfigError, match=f'^{variant}: the operation exp is not known'):
        _ = Bench(variant).AB


def test_the_same_point_every_time():
    x_TD = grid('x', 2, 2)
    assert point(x_TD) == point(x_TD) and len({*point(x_TD).values()}) == 4


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (('qk/vo', 9), 'tokens=9 must be from 2 to 4'),
        (('qk/vo', 2, 5), 'dims=5 must be from 2 to 4'),
        (('qk/vo', 2, 2, 3), 'heads=3 must be from 1 to 2'),
        (('shared_q/vo',), "unknown score 'shared_q', did you mean 'shared_qk'?"),
        (('qk',), 'must be written score/value'),
        (('nonlinear_query/vo',), 'nonlinear_query/vo has no matrices A and B'),
        (('qk/gauge_fixed',), 'leaves no free one'),
        (('qk/vo', 2, 3, 2), 'must be a multiple of num_heads=2'),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ConfigError, match='^[^\n]+$') as raised:
        Bench(*arguments)
    assert message in str(raised.value)
