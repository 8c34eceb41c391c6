"""What is measured of matrices, patterns and models, against values by hand and the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.analysis import Analysis, analyze, matrices, patterns
from qkattn.analysis.analyze import Row
from qkattn.analysis.patterns import Pattern, pattern_of, walk
from qkattn.attention import Mask
from qkattn.config import ModelConfig
from qkattn.convert.conversions import converted
from qkattn.errors import ConfigError
from qkattn.model import build
from tests.attention import examples, layers  # noqa: F401, the class Differential
from tests.lanes import slow_except

# Matrices

# Symmetric part [[1, 2], [2, -2]] of energy 13, skew part [[0, 1], [-1, 0]] of energy 2.
SPLIT = np.array([[1.0, 3.0], [1.0, -2.0]])
DIAGONAL = np.diag([3.0, 1.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ('quantity', 'matrix', 'expected'),
    [
        ('norm', SPLIT, 15**0.5),
        ('symmetric_share', SPLIT, 13 / 15),
        ('symmetric_share', SPLIT - SPLIT.T, 0),
        # The shares of singular values are 3/4 and 1/4, whose entropy is ln(4 / 3^(3/4)).
        ('effective_rank', DIAGONAL, 4 / 3**0.75),
        ('effective_rank', np.ones((4, 4)), 1),
        ('singular_values', np.diag([1.0, -4, 2]), [4, 2, 1]),
    ],
)
def test_a_quantity_of_a_matrix_has_the_value_worked_out_by_hand(quantity, matrix, expected):
    measure = getattr(matrices, quantity)
    one_matrix_NDE = jnp.asarray(matrix, jnp.float32)[None]
    np.testing.assert_allclose(measure(one_matrix_NDE), [expected], atol=1e-6)


def excess_of_norms(a_DD, axis):
    """The sum of max(0, norm - bound), where bound = mean + 2 standard deviations of the norms."""
    norms = np.linalg.norm(a_DD, axis=axis)
    bound = norms.mean() + 2 * norms.std(ddof=1)
    return np.maximum(norms - bound, 0).sum()


def test_directionality_counts_what_exceeds_two_deviations():
    """The directionality of a matrix is (c - r) / (c + r).

    With bound = mean + 2 standard deviations of the norms,

        c = sum of max(0, norm - bound) over columns,
        r = sum of max(0, norm - bound) over rows.
    """
    # One column has norm 8, and nine have norm 1. No row norm is above its bound, so r = 0.
    large_column_DD = np.eye(10)
    large_column_DD[:, 3] = 8 / 10**0.5
    # This matrix has a large column and a large row.
    mixed_DD = large_column_DD.copy()
    mixed_DD[7] += 1
    c = excess_of_norms(mixed_DD, axis=0)
    r = excess_of_norms(mixed_DD, axis=1)

    cases = [
        (large_column_DD, 1),
        (large_column_DD.T, -1),
        (np.eye(10), 0),  # no norm is large
        (np.zeros((10, 10)), np.nan),  # a zero matrix has no direction
        (mixed_DD, (c - r) / (c + r)),
    ]
    all_NDD = np.stack([matrix_DD for matrix_DD, _ in cases])
    expected_N = [expected for _, expected in cases]

    directionality_N = matrices.directionality(jnp.asarray(all_NDD, jnp.float32))
    np.testing.assert_allclose(directionality_N, expected_N, atol=1e-5)


def test_drift_is_relative_to_the_reference():
    reference = jnp.array([[3.0, 0.0], [0.0, 4.0]])
    other = jnp.array([[3.0, 1.0], [0.0, 4.0]])
    assert float(matrices.drift(reference, other)) == pytest.approx(0.2)
    assert float(matrices.drift(other, reference)) == pytest.approx(1 / 26**0.5)


@pytest.mark.parametrize('quantity', matrices.MATRIX_QUANTITIES)
def test_a_factor_on_a_matrix_changes_its_norm_alone(quantity):
    measure = matrices.MATRIX_QUANTITIES[quantity]
    a = np.random.default_rng(0).standard_normal((5, 5))
    plain = float(measure(jnp.asarray(a, jnp.float32)))
    scaled = float(measure(jnp.asarray(7 * a, jnp.float32)))
    expected = 7 * plain if quantity == 'norm' else plain
    np.testing.assert_allclose(scaled, expected, rtol=2e-4)


@pytest.mark.parametrize('quantity', matrices.MATRIX_QUANTITIES)
def test_a_zero_matrix_has_a_norm_alone(quantity):
    measure = matrices.MATRIX_QUANTITIES[quantity]
    measured = float(measure(jnp.zeros((5, 5))))
    if quantity == 'norm':
        assert measured == 0
    else:
        assert np.isnan(measured)


# Patterns

CAUSAL = np.tri(4, dtype=bool)[None]
# The probabilities of two heads. EQUAL attends to all visible keys alike, and PREVIOUS to the
# previous token.
EQUAL = np.tril(np.ones((4, 4))) / np.arange(1, 5)[:, None]
PREVIOUS = np.eye(4)[[0, 0, 1, 2]]


def pattern(*heads, logits=None, mask=CAUSAL):
    """A pattern of one row, from the probabilities of each head. By default, all logits are 0."""
    p_BNTS = jnp.asarray(np.stack(heads)[None], jnp.float32)
    s_BNTS = jnp.zeros_like(p_BNTS) if logits is None else jnp.asarray(logits, jnp.float32)
    return Pattern(s_BNTS, p_BNTS, jnp.asarray(mask))


HEADS = pattern(EQUAL, PREVIOUS)
# The last of four tokens is padding.
PADDED = CAUSAL & [True, True, True, False] & np.array([[True], [True], [True], [False]])
# Tokens a b a b: position 2 attends to 1, position 3 to 2.
REPEATS = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0.75, 0.25, 0], [0, 0, 0.5, 0]])


@pytest.mark.parametrize(
    ('quantity', 'measured', 'expected'),
    [
        pytest.param('entropy', HEADS, [np.log([1, 2, 3, 4]).mean(), 0], id='entropy'),
        # Probabilities of sigmoid attention need not sum to 1. They are divided by their sum.
        pytest.param(
            'entropy', pattern(0.5 * EQUAL), [np.log([1, 2, 3, 4]).mean()], id='entropy, sum not 1'
        ),
        pytest.param(
            'entropy',
            pattern(EQUAL * PADDED[0], mask=PADDED),
            [np.log([1, 2, 3]).mean()],
            id='entropy, padded',
        ),
        pytest.param(
            'diagonal_mass', HEADS, [(1 + 1 / 2 + 1 / 3 + 1 / 4) / 4, 1 / 4], id='diagonal'
        ),
        pytest.param(
            'diagonal_mass',
            pattern(PREVIOUS, mask=np.tri(4, k=-1, dtype=bool)[None]),
            [0],
            id='hidden diagonal',
        ),
        # The first token has no previous one.
        pytest.param(
            'previous_token_mass', HEADS, [(1 / 2 + 1 / 3 + 1 / 4) / 3, 1], id='previous token'
        ),
        pytest.param(
            'previous_token_mass',
            pattern(EQUAL * PADDED[0], mask=PADDED),
            [(1 / 2 + 1 / 3) / 2],
            id='previous token, padded',
        ),
        pytest.param(
            'previous_token_mass',
            pattern(np.eye(4), mask=np.eye(4, dtype=bool)[None]),
            [np.nan],
            id='hidden previous token',
        ),
    ],
)
def test_a_quantity_of_patterns_has_the_value_worked_out_by_hand(quantity, measured, expected):
    measure = getattr(patterns, quantity)
    np.testing.assert_allclose(measure(measured), expected, atol=1e-6)


def test_the_induction_score_is_the_mass_after_the_previous_occurrence():
    """For the tokens a b a b, queries 2 and 3 count, with the keys 1 and 2.

    Query 2 is the token a, which occurred before at position 0. The key after it is 1.
    """
    score_N = patterns.induction_score(pattern(REPEATS, EQUAL), 2)
    np.testing.assert_allclose(score_N, [(0.75 + 0.5) / 2, (1 / 3 + 1 / 4) / 2], rtol=1e-6)


@pytest.mark.parametrize('shift', [0, 5])
def test_the_size_of_logits_ignores_what_softmax_ignores(shift):
    """The deviation of logits ignores a shift of all logits, and ignores hidden keys.

    The largest logit ignores hidden keys, but not the shift.
    """
    # Row t has the logits of query t. The causal mask shows it the first t + 1 keys.
    logits_TS = np.array([[0, 9, 9], [1, 3, 9], [10, 10, 16]], float)
    causal_TS = np.tri(3, dtype=bool)
    measured = pattern(
        np.zeros((3, 3)),  # probabilities, which the two functions do not read
        logits=logits_TS[None, None] + shift,
        mask=causal_TS[None],
    )

    # The visible logits of the queries are [0], [1, 3] and [10, 10, 16].
    variances_T = [0, 1, 8]
    deviation_of_head = float(patterns.logit_deviation(measured)[0])
    assert deviation_of_head == pytest.approx(np.mean(variances_T) ** 0.5)

    largest_logit_of_head = float(patterns.largest_logit(measured)[0])
    assert largest_logit_of_head == 16 + shift


# The Score and options of the layer.
PATTERNS = [
    ('nonlinear_query', {}),
    ('shared_qk(self_mask=True)', {}),
    ('qk', {'positions': 'alibi', 'logit_cap': 0.7, 'window': 3, 'kernel': 'blockwise'}),
    ('qk', {'normalizer': 'sigmoid', 'score_scale': 0.5}),
]


@pytest.mark.parametrize(('score', 'options'), slow_except(PATTERNS[1:3], PATTERNS))
@pytest.mark.parametrize('cross', [False, True], ids=['self-attention', 'cross-attention'])
def test_the_pattern_is_that_of_the_slow_reference(score, options, cross):
    """`pattern_of` gives the logits, probabilities and mask of an attention layer.

    The helpers `layers.expected_...` compute the same by the definitions. Queries are made from x.
    Keys are made from y in cross-attention, and from x in self-attention.
    """
    layer = layers.make((score, 'vo'), **options)
    spec_before = layer.spec
    value_before = layer.value
    x_BTD = layers.stream()
    y_BSD = layers.stream(length=5, seed=6) if cross else None
    mask = Mask(causal=not cross, window=layer.spec.window)

    measured = pattern_of(layer, x_BTD, mask, y_BSD)

    # `pattern_of` does not change the layer.
    assert layer.spec is spec_before
    assert layer.value is value_before

    keys_BSD = y_BSD if cross else x_BTD
    _, _, T, S = measured.logits_BNTS.shape
    mask_BTS = np.asarray(mask.dense(T, S))
    p_BNTS = layers.expected_probabilities(layer, x_BTD, keys_BSD, mask_BTS, cross=cross)
    np.testing.assert_allclose(measured.probabilities_BNTS, p_BNTS, atol=1e-5)

    # In self-attention, a Score with self_mask=True hides each token from itself.
    if not cross:
        mask_BTS = layers.hide_self(layer.score, mask_BTS)
    np.testing.assert_array_equal(measured.mask_BTS, mask_BTS)

    # Logits of hidden keys are 0.
    s_BNTS = layers.expected_logits(layer, x_BTD, keys_BSD, cross=cross) * mask_BTS[:, None]
    np.testing.assert_allclose(measured.logits_BNTS, s_BNTS, atol=1e-4)


def test_a_walk_layer_by_layer_gives_what_the_model_computes():
    """`walk` computes what `model.stream` does, and calls a function at every attention layer."""
    num_layers = 2  # in the encoder, and again in the decoder
    model = make(
        kind='encoder_decoder',
        cross_variant='merged/vo',
        norm_position='post',
        num_layers=num_layers,
    )
    tokens = np.arange(16).reshape(2, 8)
    inputs = {'tokens_BT': tokens, 'source_BS': tokens[:, :6]}
    visited = []

    def visit(site, layer, *_):
        visited.append((site, layer))

    @jax.jit
    def walk_compiled(model, inputs):
        return walk(model, inputs, visit)

    @jax.jit
    def stream_compiled(model, inputs):
        return model.stream(**inputs)

    walked = walk_compiled(model, inputs)
    expected = stream_compiled(model, inputs)
    np.testing.assert_allclose(walked, expected, atol=2e-5)

    # The encoder comes first. Each layer of the decoder has self-attention and cross-attention.
    assert visited[:2] == [('encoder/attention', 0), ('encoder/attention', 1)]
    assert len(visited) == num_layers + 2 * num_layers


# Models

TOKENS = np.random.default_rng(0).integers(0, 30, (2, 8))
SIZES = {'d_model': 16, 'num_heads': 2, 'num_layers': 2, 'context': 8, 'vocab_size': 30}
BOTH = {'kind': 'encoder_decoder', 'cross_variant': 'merged/vo', 'num_encoder_layers': 1}
PATTERN = {'pattern': 'qk/vo,key_free/no_v', 'num_layers': 3, 'positions': 'rope'}


def make(**fields):
    return build(ModelConfig(**{**SIZES, **fields}), key=jax.random.key(0))


# Fields of a model, and the number of layers at each of its sites.
DEPTHS_OF_SITES = [
    (BOTH, {'attention': 2, 'cross_attention': 2, 'encoder/attention': 1}),
    (PATTERN, {'attention': 3}),
    ({'kind': 'encoder', 'norm_position': 'post', 'biases': True}, {'attention': 2}),
]


@pytest.mark.parametrize(
    ('fields', 'depths'), slow_except(DEPTHS_OF_SITES[1:2], DEPTHS_OF_SITES), ids=str
)
def test_every_head_of_every_site_is_measured(fields, depths):
    """An analysis has a value for each layer and head of each site, such as 'cross_attention'.

    The depth of a site is its number of layers. The matrix A of a head gives its logits, and B
    gives its output.
    """
    num_heads = 2
    has_source = fields.get('kind') == 'encoder_decoder'
    inputs = {'tokens_BT': TOKENS}
    if has_source:
        inputs['source_BS'] = TOKENS[:, :6]

    analysis = analyze(make(num_heads=num_heads, **fields), inputs)

    for site, depth in depths.items():
        shape = (depth, num_heads)
        assert analysis.values('effective_rank', 'A', site).shape == shape
        assert analysis.values('norm', 'B', site).shape == shape
        assert analysis.values('entropy', 'pattern', site).shape == shape
    assert analysis.missing == []

    # Each layer has two spectra of singular values, of A and of B.
    num_layers = sum(depths.values())
    assert len(analysis.spectra) == 2 * num_layers

    # Cross-attention has no diagonal, because queries and keys belong to two sequences.
    measured = {(row.site, row.quantity) for row in analysis.rows}
    assert ('cross_attention', 'diagonal_mass') not in measured
    # An encoder-decoder has no induction score, which needs sequences with repeated tokens.
    has_induction_score = ('attention', 'induction_score') in measured
    assert has_induction_score == (not has_source)


def test_numbers_of_a_layer_are_those_of_its_matrices():
    """The analysis measures the matrices A = scale W_Q W_K^T and B = W_V W_O of each head.

    A gives the logits of the head, and B gives its output.
    """
    model = make(score_scale=0.5)
    analysis = analyze(model, induction=False)
    layer = model.layers()[1]
    w_q_DNH = np.asarray(layer.score.w_q_DNH[...], np.float64)
    w_k_DKH = np.asarray(layer.score.w_k_DKH[...], np.float64)
    w_v_DKH = np.asarray(layer.value.w_v_DKH[...], np.float64)
    w_o_NHD = np.asarray(layer.value.w_o_NHD[...])

    # For A of head 1, the scale is score_scale / sqrt(H). Heads have H channels.
    H = w_q_DNH.shape[-1]
    A_DE = 0.5 * H**-0.5 * w_q_DNH[:, 1] @ w_k_DKH[:, 1].T
    singular_values_D = np.linalg.svd(A_DE, compute_uv=False)
    spectra_ND = analysis.spectra['attention', 1, 'A']
    np.testing.assert_allclose(spectra_ND[1], singular_values_D, atol=1e-5)
    norms_of_A_LN = analysis.values('norm', 'A')
    assert norms_of_A_LN[1, 1] == pytest.approx(np.linalg.norm(A_DE), rel=1e-5)

    # B of head 0.
    B_DE = w_v_DKH[:, 0] @ w_o_NHD[0]
    norms_of_B_LN = analysis.values('norm', 'B')
    assert norms_of_B_LN[1, 0] == pytest.approx(np.linalg.norm(B_DE), rel=1e-4)


def test_values_that_were_not_measured_or_are_of_several_subjects_are_refused():
    norm_of_A = Row('attention', layer=0, head=0, subject='A', quantity='norm', value=2.0)
    norm_of_B = Row('attention', layer=0, head=0, subject='B', quantity='norm', value=3.0)
    analysis = Analysis([norm_of_A, norm_of_B], spectra={}, missing=[])

    with pytest.raises(KeyError, match='no entropy was measured at attention'):
        analysis.values('entropy')
    with pytest.raises(KeyError, match='norm is of A and of B; give the subject'):
        analysis.values('norm')


def test_a_circuit_without_a_matrix_is_listed_as_missing():
    model = make(score='nonlinear_query', value='differential:Differential', num_layers=1)
    analysis = analyze(model, induction=False)
    assert analysis.missing == [('attention', 0, 'A'), ('attention', 0, 'B')]


def test_a_layer_that_was_not_measured_has_the_value_nan():
    """Layer 1 has a row, layer 2 is listed as missing, and layer 0 is in neither list."""
    row = Row('attention', 1, 0, 'A', 'norm', 2.0)
    analysis = Analysis([row], {}, [('attention', 2, 'A')])
    np.testing.assert_array_equal(analysis.values('norm', 'A'), [[np.nan], [2], [np.nan]])


def test_drift_is_measured_by_head_between_models_of_different_factorizations():
    """Drift is |A - A_reference| / |A_reference|, for each layer and head.

    In the reference, A is a product W_Q W_K^T. In the merged model, A is a single matrix.
    """
    scaled = make()
    # In both layers, W_Q of head 1 is multiplied by 1.5.
    factors_N1 = np.array([[1.0], [1.5]])
    scaled.blocks.attention.score.w_q_DNH[...] *= factors_N1
    merged = converted(scaled, 'merge')

    analysis = analyze(merged, induction=False, reference=make())

    drifts_of_A_LN = analysis.values('drift', 'A')
    np.testing.assert_allclose(drifts_of_A_LN, [[0, 0.5], [0, 0.5]], atol=1e-5)
    # B = W_V W_O has not changed.
    drifts_of_B_LN = analysis.values('drift', 'B')
    np.testing.assert_array_equal(drifts_of_B_LN, np.zeros((2, 2)))


def test_a_gain_that_is_folded_into_matrices_shows_as_drift():
    """A gain of 2 acts on both sides of A, so A becomes 4 A. It acts on one side of B: 2 B."""
    model = make()
    model.blocks.attention_norm.g_D[...] *= 2
    folded = converted(model, 'fold_gains', 'merge')
    analysis = analyze(folded, induction=False, reference=model)
    np.testing.assert_allclose(analysis.values('drift', 'A'), 4 - 1, rtol=1e-5)
    np.testing.assert_allclose(analysis.values('drift', 'B'), 2 - 1, rtol=1e-5)


def test_a_reference_of_another_shape_is_refused():
    with pytest.raises(ConfigError, match='attention 1 is a layer of one model only'):
        analyze(make(), reference=make(num_layers=1))
    with pytest.raises(ConfigError, match='attention 0: A.* is .4, 16, 16. in the reference'):
        analyze(make(), reference=make(num_heads=4))


@pytest.mark.parametrize(
    ('window', 'expected'),
    [(None, np.mean([1 / 5, 1 / 6, 1 / 7, 1 / 8])), (3, 1 / 3)],
)
def test_attention_that_is_equal_over_all_keys_has_its_induction_score(window, expected):
    """With equal logits, each of the S keys that a query sees has the probability 1 / S.

    The score is a mean over the second half of a sequence. Without a window, these are the
    positions 4 to 7, which see 5 to 8 keys. With a window of 3, they see 3 keys each.
    """
    model = make(window=window)
    model.blocks.attention.score.w_q_DNH[...] *= 0  # all logits are equal
    score_LN = analyze(model).values('induction_score', 'pattern')
    np.testing.assert_allclose(score_LN, expected, rtol=1e-5)
