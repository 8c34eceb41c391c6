"""Symbols against numbers: every registered variant, at sizes that a reader can follow."""

import functools
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

# Every registered score and value once, then the pairs of the folder examples/.
VARIANTS = [f'{score}/vo' for score in SCORES]
VARIANTS += [f'{value_class.partner}/{value}' for value, value_class in VALUES.items()]
VARIANTS += [f'{score}/{value}' for score, value in FOLDER_VARIANTS]
VARIANTS += ['/'.join(pair) for pair in FOLDER_VARIANTS]


@functools.cache
def benches_of_variants(dims, heads):
    """Returns the bench of each variant, and the variants without a bench at these sizes."""
    benches = {}
    refused_variants = set()
    for variant in VARIANTS:
        try:
            benches[variant] = Bench(variant, tokens=3, dims=dims, heads=heads)
        except ConfigError:
            refused_variants.add(variant)
    return benches, refused_variants


def point_of(bench, arrays):
    """The value of each symbol of a bench, if the bench's parameters have the values `arrays`."""
    ring, symbols = bench.symbols
    value_of = {}
    for symbols_of_parameter, array in zip(symbols, arrays, strict=True):
        for symbol, value in zip(symbols_of_parameter.flat, array.flat, strict=True):
            value_of[symbol] = value
    return np.array([value_of[symbol] for symbol in ring.gens])


@pytest.mark.parametrize(('dims', 'heads'), [(2, 2), (3, 1)])
def test_some_variants_have_no_bench(dims, heads):
    """A bench writes the matrices of a variant in symbols. A few variants are refused."""
    _, refused_variants = benches_of_variants(dims, heads)

    expected_refusals = {'nonlinear_query/vo'}  # has no matrices
    if heads == 1:
        expected_refusals.add('qk/examples.gauge_fixed:GaugeFixedVO')  # needs narrower heads
    if dims == 3:
        expected_refusals.add('qk/examples.hadamard:Hadamard')  # needs a power of two
    assert refused_variants == expected_refusals


def numeric_matrices_of(benches, arrays):
    """The matrices A and B that the attention layer of each variant computes, in float64.

    `arrays` has the values of each variant's parameters.
    """

    # One call compiles all variants together.
    @jax.jit
    def matrices_of_layers(arrays):
        matrices = {}
        for variant, parameters in arrays.items():
            layer = benches[variant].filled(parameters)
            matrices[variant] = layer.matrix()
        return matrices

    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, matrices_of_layers(arrays))


@pytest.mark.parametrize(('dims', 'heads'), [(2, 2), (3, 1)])
def test_symbolic_matrices_agree_with_numeric_ones(dims, heads):
    """At random parameters, symbolic matrices have the same values as the layer's numeric ones.

    The matrix A gives the logits of a head, and B gives the output of a head. The symbolic entries
    are polynomials in the entries of the parameters, such as W_Q and W_K.
    """
    benches, _ = benches_of_variants(dims, heads)
    rng = np.random.default_rng(0)
    arrays = {}
    for variant, bench in benches.items():
        arrays[variant] = [rng.standard_normal(p.initial.shape) for p in bench.parameters]

    numeric_matrices = numeric_matrices_of(benches, arrays)

    for variant, bench in benches.items():
        # `point` has a value for each symbol. `bench.AB` is the pair of symbolic matrices.
        point = point_of(bench, arrays[variant])
        for symbolic, numeric in zip(bench.AB, numeric_matrices[variant], strict=True):
            evaluated = numbers(symbolic, point)
            np.testing.assert_allclose(evaluated, numeric, rtol=0, atol=1e-12)


@pytest.fixture
def x_122():
    """The 2 x 2 matrix of the symbols x11 to x22, with a leading axis for one head."""
    _, arrays = generators({'x': (1, 2, 2)})
    return arrays[0]


@pytest.mark.parametrize(
    ('function', 'name'),
    [
        pytest.param(lambda x: 1 / x, 'div', id='division'),
        pytest.param(lambda x: x**-2, 'integer_pow', id='negative power'),
    ],
)
def test_an_unknown_operation_is_named(function, name, x_122):
    with pytest.raises(ConfigError, match=rf'matrix\(\) uses {name}; symbols have sums'):
        evaluate(function, x_122)


def test_an_unknown_operation_of_a_variant_is_named(monkeypatch):
    bilinear_matrix = QK.matrix

    def exponential_matrix(score):
        return jnp.exp(bilinear_matrix(score))

    monkeypatch.setattr(QK, 'matrix', exponential_matrix)
    bench = Bench('qk/vo')
    with pytest.raises(ConfigError, match=r'matrix\(\) uses exp; symbols'):
        _ = bench.AB


def test_symbols_are_reversed_selected_and_joined(x_122):
    """`evaluate` applies a JAX function to symbols instead of numbers.

    `x_122` has one 2 x 2 matrix of symbols, with the rows (x11, x12) and (x21, x22).
    """

    def first_rows(x_122):
        reversed_rows = x_122[:, ::-1]
        diagonal_alone = jnp.where(jnp.eye(2) > 0, x_122, 7.0)
        both_matrices = jnp.concatenate([reversed_rows, diagonal_alone])
        return both_matrices[:, 0]

    # `evaluate` returns a list of results. `first_rows` has one result.
    (rows_22,) = evaluate(first_rows, x_122)

    x11, _ = x_122[0, 0]
    x21, x22 = x_122[0, 1]
    # Reversing the rows puts (x21, x22) first. In the other matrix, 7 replaces x12.
    assert rows_22.tolist() == [[x21, x22], [x11, 7]]


def test_powers_and_squares_of_symbols_are_evaluated(x_122):
    (out_122,) = evaluate(lambda x: x**3 + jnp.square(x / 2), x_122)

    x11, x12 = x_122[0, 0]
    first_row = out_122[0, 0]
    assert first_row.tolist() == [x11**3 + x11**2 / 4, x12**3 + x12**2 / 4]


@pytest.mark.parametrize(
    ('variant', 'sizes', 'message'),
    [
        ('qk/vo', {'tokens': 9}, 'tokens=9 must be from 2 to 4'),
        ('qk/vo', {'dims': 5}, 'dims=5 must be from 2 to 4'),
        ('qk/vo', {'dims': 2, 'heads': 3}, 'heads=3 must be from 1 to 2'),
        ('nonlinear_query/vo', {}, 'nonlinear_query/vo has no matrices A and B'),
        ('shared_qk(self_mask=True)/vo', {}, 'a token does not attend to itself'),
        ('qk/vo', {'dims': 3, 'heads': 2}, 'must be a multiple of num_heads=2'),
    ],
)
def test_a_bench_of_wrong_sizes_or_without_matrices_is_refused(variant, sizes, message):
    with refused(re.escape(message)):
        Bench(variant, **sizes)


SOME_LINES = [
    'shared_qk/no_vo: 2 tokens, d_model 2, 1 head',
    'A[n] = W_Q[n] W_Q[n]^T',
    '  W_Q: 2 x 2',
    '  a12 = q11 q21 + q12 q22',
    '  A = [a11, a12; a12, a22], rank 2',
    '  s22 = a11 x21^2 + 2 a12 x21 x22 + a22 x22^2',
    'p_ts = exp(sqrt(1/2) s_ts) / sum_u exp(sqrt(1/2) s_tu)',
    '  B = [1, 0; 0, 1], rank 2',
    '  out21 = p21 x11 + p22 x21',
]


def test_text_has_the_equations_of_a_variant():
    lines = worked(Bench('shared_qk/no_vo')).splitlines()

    # Each of these lines occurs once, in this order.
    lines_among_these = [line for line in lines if line in SOME_LINES]
    assert lines_among_these == SOME_LINES


def test_latex_has_the_equations_of_a_variant():
    """`worked` writes the equations of an attention layer in LaTeX.

    The layer has 2 tokens, 2 dimensions and 2 heads. Each head is 2 / 2 = 1 wide, so W_Q is 2 x 1.
    In LaTeX, '&' aligns equations or separates entries of a row, and two backslashes end a line.
    """
    text = worked(Bench('qk/vo', heads=2), latex=True)

    # There are four blocks of equations: A, the scores, B and the output.
    assert text.count(r'\begin{align*}') == 4
    assert text.count(r'\end{align*}') == 4

    # W_Q: 2 x 1, in each head.
    shape_of_W_Q = r'  W_{\mathrm{Q}}&: 2 \times 1,\ \text{in each head} \\'
    assert shape_of_W_Q in text

    # A[n] = W_Q[n] W_K[n]^T. The index 2,21 means head 2, row 2, column 1. This entry of A is row 2
    # of W_Q times row 1 of W_K.
    entry_of_A = r'  a_{2,21} &= q_{2,21} k_{2,11} \\'
    assert entry_of_A in text

    # The matrix A[1] has two rows of two entries. W_Q[1] is a column and W_K[1]^T is a row, so A[1]
    # has rank 1.
    end_of_first_row = r'& a_{1,12} \\ '
    second_row_and_rank = r'a_{1,21} & a_{1,22} \end{pmatrix},\ \text{rank 1}'
    assert f'{end_of_first_row}{second_row_and_rank}' in text

    # p_ts = exp(scale * s_ts) / sum_u exp(scale * s_tu). A head is 1 wide, so the scale is 1 and is
    # not written.
    numerator = r'\exp(s[n]_{\mathrm{ts}})'
    denominator = r'\sum_{\mathrm{u}} \exp(s[n]_{\mathrm{tu}})'
    assert f'{numerator} / {denominator}' in text


def test_an_entry_that_is_minus_another_has_no_symbol_of_its_own():
    skew = 'examples.symmetric_skew:SymmetricSkew(symmetric_rank=0)'
    hadamard = 'examples.hadamard:Hadamard'

    text = worked(Bench(f'{skew}/{hadamard}'), latex=True)

    assert r'\sqrt{1/2}' in text
    assert r'a_{21} &=' not in text
    assert r'0 & a_{12} \\ -a_{12} & 0' in text


def test_an_equation_is_translated_into_latex():
    expected = r'\operatorname{diag}(g)^{-1} W_{\mathrm{K}}[n]^{\top},\ \text{rank R}'
    assert in_latex('diag(g)^-1 W_K[n]^T, rank R') == expected


def test_a_name_of_two_words_has_one_index_in_latex():
    # In LaTeX, '_' would begin an index of the index.
    assert in_latex('W_q_outer: 2 x 2') == r'W_{\mathrm{q\ outer}}: 2 \times 2'


def test_a_gain_of_one_number_is_a_vector_of_size_1():
    bench = Bench('shared_qk(temperature="learned")/vo', heads=2)

    assert '  g_temperature: 1, in each head\n' in worked(bench)
    # With heads of size 1, a11 is the gain of the head times the square of its weight.
    a11_of_head_2 = r'  a_{2,11} &= q_{2,11}^{2} \mathrm{temperature}_{2,1} \\'
    assert a11_of_head_2 in worked(bench, latex=True)


def test_exact_numbers_are_fractions_or_roots():
    assert number(0.5) == '1/2'
    assert number(2.0) == '2'
    assert number(3**-0.5) == 'sqrt(1/3)'
    assert number(0.123456789) == '0.123457'
    assert number(1e-7) == '1e-07'  # and not the root of 0, which is within 1e-12 of 1e-14


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
def test_the_equation_depends_on_the_options_of_a_score(score, equation):
    assert f'A[n] = {equation}\n' in worked(Bench(f'{score}/vo'))
