"""Symbols against numbers: every registered variant, at sizes that a reader can follow."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.explorer.bench import Bench
from experiments.explorer.symbolic import evaluate, generators, numbers
from experiments.explorer.worked import in_latex, number, worked
from qkattn.attention import SCORES, VALUES
from qkattn.attention.scores.qk import QK
from qkattn.errors import ConfigError
from tests.attention.examples import FOLDER_VARIANTS
from tests.refusals import refused

pytest.importorskip('sympy', reason="pip install -e '.[explore]'")

VARIANTS = [f'{score}/vo' for score in SCORES] + [f'{VALUES[v].partner}/{v}' for v in VALUES]
VARIANTS += ['/'.join(pair) for pair in FOLDER_VARIANTS]


@pytest.mark.parametrize(('dims', 'heads'), [(2, 2), (3, 1)])
def test_symbols_become_the_numbers_of_the_matrices(dims, heads):
    benches = {}
    refused_variants = set()
    for variant in VARIANTS:
        try:
            benches[variant] = Bench(variant, 3, dims, heads)
        except ConfigError:
            refused_variants.add(variant)
    expected = {'nonlinear_query/vo'}  # has no matrices
    if heads == 1:
        expected.add('qk/examples.gauge_fixed:GaugeFixedVO')
    if dims == 3:
        expected.add('qk/examples.hadamard:Hadamard')  # needs a power of two
    assert refused_variants == expected

    # Each variant's matrices on symbols, with numbers put in, are its matrices of these numbers.
    rng = np.random.default_rng(0)
    arrays = {}
    for variant, bench in benches.items():
        arrays[variant] = [rng.standard_normal(p.initial.shape) for p in bench.parameters]

    @jax.jit
    def matrices(arrays):
        return {v: benches[v].filled(leaves).matrix() for v, leaves in arrays.items()}

    with jax.enable_x64(True):
        results = jax.tree.map(np.asarray, matrices(arrays))
    for variant, expected in results.items():
        bench = benches[variant]
        ring, symbols = bench.symbols
        number_of = {}
        for symbols_of_parameter, array in zip(symbols, arrays[variant], strict=True):
            number_of.update(zip(symbols_of_parameter.flat, array.flat, strict=True))
        point = np.array([number_of[symbol] for symbol in ring.gens])
        for symbolic, numeric in zip(bench.AB, expected, strict=True):
            np.testing.assert_allclose(numbers(symbolic, point), numeric, rtol=0, atol=1e-12)


@pytest.fixture
def x_122():
    """The symbols x11, x12, x21 and x22 as a matrix of one head."""
    _, (x_122,) = generators({'x': (1, 2, 2)})
    return x_122


@pytest.mark.parametrize(
    ('function', 'name'), [(lambda x: 1 / x, 'div'), (lambda x: x**-2, 'integer_pow')]
)
def test_an_unknown_operation_is_named(function, name, x_122):
    with pytest.raises(ConfigError, match=rf'matrix\(\) uses {name}; symbols have sums'):
        evaluate(function, x_122)


def test_an_unknown_operation_of_a_variant_is_named(monkeypatch):
    matrix = QK.matrix
    monkeypatch.setattr(QK, 'matrix', lambda score: jnp.exp(matrix(score)))
    with pytest.raises(ConfigError, match=r'matrix\(\) uses exp; symbols'):
        _ = Bench('qk/vo').AB


def test_reversing_selecting_and_joining_move_symbols(x_122):
    # Row 0 of the reversed matrix, and row 0 of the matrix with 7 off its diagonal.
    def function(x_122):
        moved = jnp.concatenate([x_122[:, ::-1], jnp.where(jnp.eye(2) > 0, x_122, 7.0)])
        return moved[:, 0]

    x11, _ = x_122[0, 0]
    x21, x22 = x_122[0, 1]
    (moved_22,) = evaluate(function, x_122)
    assert moved_22.tolist() == [[x21, x22], [x11, 7]]


def test_powers_and_squares_of_symbols_are_evaluated(x_122):
    (out_122,) = evaluate(lambda x: x**3 + jnp.square(x / 2), x_122)
    x11, x12 = x_122[0, 0]
    assert out_122[0, 0].tolist() == [x11**3 + x11**2 / 4, x12**3 + x12**2 / 4]


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (('qk/vo', 9), 'tokens=9 must be from 2 to 4'),
        (('qk/vo', 2, 5), 'dims=5 must be from 2 to 4'),
        (('qk/vo', 2, 2, 3), 'heads=3 must be from 1 to 2'),
        (('nonlinear_query/vo',), 'nonlinear_query/vo has no matrices A and B'),
        (('shared_qk(self_mask=True)/vo',), 'a token does not attend to itself'),
        (('qk/vo', 2, 3, 2), 'must be a multiple of num_heads=2'),
    ],
)
def test_a_bench_of_wrong_sizes_or_without_matrices_is_refused(arguments, message):
    with refused(re.escape(message)):
        Bench(*arguments)


SOME_LINES = """\
shared_qk/no_vo: 2 tokens, d_model 2, 1 head
A[n] = W_Q[n] W_Q[n]^T
  W_Q: 2 x 2
  a12 = q11 q21 + q12 q22
  A = [a11, a12; a12, a22], rank 2
  s22 = a11 x21^2 + 2 a12 x21 x22 + a22 x22^2
p_ts = exp(sqrt(1/2) s_ts) / sum_u exp(sqrt(1/2) s_tu)
  B = [1, 0; 0, 1], rank 2
  out21 = p21 x11 + p22 x21
""".splitlines()


def test_text_has_the_equations_of_a_variant():
    plain = worked(Bench('shared_qk/no_vo')).splitlines()
    assert [line for line in plain if line in SOME_LINES] == SOME_LINES


def test_latex_has_the_equations_of_a_variant():
    text = worked(Bench('qk/vo', heads=2), latex=True)
    assert text.count(r'\begin{align*}') == text.count(r'\end{align*}') == 4
    for line in (
        r'  a_{2,21} &= q_{2,21} k_{2,11} \\',
        r'  W_{\mathrm{Q}}&: 2 \times 1,\ \text{in each head} \\',
        r'& a_{1,12} \\ a_{1,21} & a_{1,22} \end{pmatrix},\ \text{rank 1}',
        r'\exp(s[n]_{\mathrm{ts}}) / \sum_{\mathrm{u}} \exp(s[n]_{\mathrm{tu}})',
    ):
        assert line in text


def test_an_entry_that_is_minus_another_has_no_symbol_of_its_own():
    variant = 'examples.symmetric_skew:SymmetricSkew(symmetric_rank=0)/examples.hadamard:Hadamard'
    text = worked(Bench(variant), latex=True)
    assert r'\sqrt{1/2}' in text
    assert r'a_{21} &=' not in text
    assert r'0 & a_{12} \\ -a_{12} & 0' in text


def test_an_equation_is_translated_into_latex():
    expected = r'\operatorname{diag}(g)^{-1} W_{\mathrm{K}}[n]^{\top},\ \text{rank R}'
    assert in_latex('diag(g)^-1 W_K[n]^T, rank R') == expected


def test_numbers_are_fractions_or_roots_where_they_are_exact():
    texts = [number(value) for value in (0.5, 2.0, 3**-0.5, 0.123456789)]
    assert texts == ['1/2', '2', 'sqrt(1/3)', '0.123457']


@pytest.mark.parametrize(
    ('score', 'equation'),
    [
        ('qk', 'W_Q[n] W_K[n]^T'),
        ('double(which="q")', 'O_Q W_Q[n] W_K[n]^T'),
        ('double(which="k")', 'W_Q[n] (O_K W_K[n])^T'),
        (
            'examples.symmetric_skew:SymmetricSkew(symmetric_rank=0, skew_rank=1)',
            'U[n] V[n]^T - V[n] U[n]^T',
        ),
        ('shared_qk(temperature="learned")', 'g[n] W_Q[n] W_Q[n]^T'),
        ('latent(query_size=1)', 'W_DQ W_Q[n] W_K[n]^T W_D^T'),
    ],
)
def test_the_equation_is_that_of_the_options(score, equation):
    assert f'A[n] = {equation}\n' in worked(Bench(f'{score}/vo'))
