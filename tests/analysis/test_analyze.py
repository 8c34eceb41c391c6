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


def test_a_quantity_of_a_matrix_has_the_value_worked_out_by_hand():
    for quantity, matrix, expected in (
        ('norm', SPLIT, 15**0.5),
        ('symmetric_share', SPLIT, 13 / 15),
        ('symmetric_share', SPLIT - SPLIT.T, 0),
        # p = (3/4, 1/4): exp(H) = 4 / 3^(3/4).
        ('effective_rank', DIAGONAL, 4 / 3**0.75),
        ('effective_rank', np.ones((4, 4)), 1),
        ('singular_values', np.diag([1.0, -4, 2]), [4, 2, 1]),
    ):
        actual = getattr(matrices, quantity)(jnp.asarray(matrix, jnp.float32)[None])
        np.testing.assert_allclose(actual, [expected], atol=1e-6, err_msg=quantity)


def test_directionality_counts_what_exceeds_two_deviations():
    """Columns count for it, rows against it, each by what its norm exceeds two deviations.

    The first matrix has nine columns of norm 1 and one of norm 8, whose rows have equal norms; the
    last has a large row as well, which is worked out here.
    """
    a_DD = np.eye(10)
    a_DD[:, 3] = 8 / 10**0.5
    mixed_DD = a_DD + np.eye(10)[7][:, None]
    norms = [np.linalg.norm(mixed_DD, axis=axis) for axis in (0, 1)]
    c, r = (np.maximum(n - n.mean() - 2 * n.std(ddof=1), 0).sum() for n in norms)
    all_NDD = jnp.asarray(np.stack([a_DD, a_DD.T, np.eye(10), 0 * a_DD, mixed_DD]), jnp.float32)
    expected = [1, -1, 0, np.nan, (c - r) / (c + r)]
    np.testing.assert_allclose(matrices.directionality(all_NDD), expected, atol=1e-5)


def test_drift_is_relative_to_the_reference():
    reference = jnp.array([[3.0, 0.0], [0.0, 4.0]])
    other = jnp.array([[3.0, 1.0], [0.0, 4.0]])
    assert float(matrices.drift(reference, other)) == pytest.approx(0.2)
    assert float(matrices.drift(other, reference)) == pytest.approx(1 / 26**0.5)


def test_a_factor_on_a_matrix_changes_its_norm_alone():
    a = np.random.default_rng(0).standard_normal((5, 5))
    for name, function in matrices.MATRIX_QUANTITIES.items():
        one, scaled = (float(function(jnp.asarray(f * a, jnp.float32))) for f in (1, 7))
        np.testing.assert_allclose(scaled, one * (7 if name == 'norm' else 1), 2e-4, err_msg=name)


def test_a_zero_matrix_has_a_norm_alone():
    for name, function in matrices.MATRIX_QUANTITIES.items():
        zero = float(function(jnp.zeros((5, 5))))
        assert zero == 0 if name == 'norm' else np.isnan(zero)


# Patterns

CAUSAL = np.tri(4, dtype=bool)[None]
# One row, two heads: equal attention to all visible keys; all to the previous token.
EQUAL = np.tril(np.ones((4, 4))) / np.arange(1, 5)[:, None]
PREVIOUS = np.eye(4)[[0, 0, 1, 2]]


def pattern(*heads, logits=None, mask=CAUSAL):
    p_BNTS = jnp.asarray(np.stack(heads)[None], jnp.float32)
    s_BNTS = jnp.zeros_like(p_BNTS) if logits is None else jnp.asarray(logits, jnp.float32)
    return Pattern(s_BNTS, p_BNTS, jnp.asarray(mask))


HEADS = pattern(EQUAL, PREVIOUS)
PADDED = CAUSAL & [True, True, True, False] & np.array([[True], [True], [True], [False]])
# Tokens a b a b: position 2 attends to 1, position 3 to 2.
REPEATS = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0.75, 0.25, 0], [0, 0, 0.5, 0]])


def test_a_quantity_of_patterns_has_the_value_worked_out_by_hand():
    for quantity, measured, expected in (
        ('entropy', HEADS, [np.log([1, 2, 3, 4]).mean(), 0]),
        # Probabilities that do not sum to 1, as of sigmoid attention, are divided by their sum.
        ('entropy', pattern(0.5 * EQUAL), [np.log([1, 2, 3, 4]).mean()]),
        ('entropy', pattern(EQUAL * PADDED[0], mask=PADDED), [np.log([1, 2, 3]).mean()]),
        ('diagonal_mass', HEADS, [(1 + 1 / 2 + 1 / 3 + 1 / 4) / 4, 1 / 4]),
        ('diagonal_mass', pattern(PREVIOUS, mask=np.tri(4, k=-1, dtype=bool)[None]), [0]),
        # The first token has no previous one.
        ('previous_token_mass', HEADS, [(1 / 2 + 1 / 3 + 1 / 4) / 3, 1]),
        ('previous_token_mass', pattern(EQUAL * PADDED[0], mask=PADDED), [(1 / 2 + 1 / 3) / 2]),
        ('previous_token_mass', pattern(np.eye(4), mask=np.eye(4, dtype=bool)[None]), [np.nan]),
    ):
        actual = getattr(patterns, quantity)(measured)
        np.testing.assert_allclose(actual, expected, atol=1e-6, err_msg=quantity)


def test_the_induction_score_is_the_mass_after_the_previous_occurrence():
    score = patterns.induction_score(pattern(REPEATS, EQUAL), 2)
    np.testing.assert_allclose(score, [(0.75 + 0.5) / 2, (1 / 3 + 1 / 4) / 2], rtol=1e-6)


def test_the_size_of_logits_ignores_what_softmax_ignores():
    logits = np.array([[0, 9, 9], [1, 3, 9], [10, 10, 16]], float)[None, None]
    for shift in (0, 5):  # variances 0, 1 and 8
        mask = np.tri(3, dtype=bool)[None]
        one = pattern(np.zeros((3, 3)), logits=logits + shift, mask=mask)
        assert float(patterns.logit_deviation(one)[0]) == pytest.approx(3**0.5)
        assert float(patterns.largest_logit(one)[0]) == 16 + shift


PATTERNS = [
    ('nonlinear_query', {}),
    ('shared_qk(self_mask=True)', {}),
    ('qk', {'positions': 'alibi', 'logit_cap': 0.7, 'window': 3, 'kernel': 'blockwise'}),
    ('qk', {'normalizer': 'sigmoid', 'score_scale': 0.5}),
]


@pytest.mark.parametrize(('score', 'options'), slow_except(PATTERNS[1:3], PATTERNS))
def test_the_pattern_is_that_of_the_slow_reference(score, options):
    layer = layers.make((score, 'vo'), **options)
    x_BTD = layers.stream()
    spec = layer.spec
    value = layer.value
    # Self-attention, then cross-attention to another sequence.
    for y_BSD in (None, layers.stream(length=5, seed=6)):
        cross = y_BSD is not None
        read_BSD = x_BTD if y_BSD is None else y_BSD
        mask = Mask(causal=not cross, window=spec.window)
        measured = pattern_of(layer, x_BTD, mask, y_BSD)
        assert layer.spec is spec
        assert layer.value is value

        # The probabilities, the mask, and the logits where the mask admits them.
        mask_BTS = np.asarray(mask.dense(*measured.logits_BNTS.shape[2:]))
        p_BNTS = layers.expected_probabilities(layer, x_BTD, read_BSD, mask_BTS, cross=cross)
        np.testing.assert_allclose(measured.probabilities_BNTS, p_BNTS, atol=1e-5)
        mask_BTS = mask_BTS if cross else layers.hide_self(layer.score, mask_BTS)
        np.testing.assert_array_equal(measured.mask_BTS, mask_BTS)
        s_BNTS = layers.expected_logits(layer, x_BTD, read_BSD, cross=cross) * mask_BTS[:, None]
        np.testing.assert_allclose(measured.logits_BNTS, s_BNTS, atol=1e-4)


def test_a_walk_layer_by_layer_gives_what_the_model_computes():
    model = make(kind='encoder_decoder', cross_variant='merged/vo', norm_position='post')
    tokens = np.arange(16).reshape(2, 8)
    inputs = {'tokens_BT': tokens, 'source_BS': tokens[:, :6]}
    sites = []
    # `walk` calls a function at each attention layer, with its site and its depth.
    walked = jax.jit(lambda m, i: walk(m, i, lambda *at: sites.append(at[:2])))(model, inputs)
    expected = jax.jit(lambda m, i: m.stream(**i))(model, inputs)
    np.testing.assert_allclose(walked, expected, atol=2e-5)
    assert sites[:2] == [('encoder/attention', 0), ('encoder/attention', 1)]
    assert len(sites) == 6


# Models

TOKENS = np.random.default_rng(0).integers(0, 30, (2, 8))
SIZES = {'d_model': 16, 'num_heads': 2, 'num_layers': 2, 'context': 8, 'vocab_size': 30}
BOTH = {'kind': 'encoder_decoder', 'cross_variant': 'merged/vo', 'num_encoder_layers': 1}
PATTERN = {'pattern': 'qk/vo,key_free/no_v', 'num_layers': 3, 'positions': 'rope'}


def make(**fields):
    return build(ModelConfig(**{**SIZES, **fields}), key=jax.random.key(0))


DEPTHS_OF_SITES = [
    (BOTH, {'attention': 2, 'cross_attention': 2, 'encoder/attention': 1}),
    (PATTERN, {'attention': 3}),
    ({'kind': 'encoder', 'norm_position': 'post', 'biases': True}, {'attention': 2}),
]


@pytest.mark.parametrize(
    ('fields', 'depths'), slow_except(DEPTHS_OF_SITES[1:2], DEPTHS_OF_SITES), ids=str
)
def test_every_head_of_every_site_is_measured(fields, depths):
    model = make(**fields)
    source = {'source_BS': TOKENS[:, :6]} if fields is BOTH else {}
    analysis = analyze(model, {'tokens_BT': TOKENS} | source)
    # At each site, both heads of each of its `depth` layers.
    for site, depth in depths.items():
        for part, quantity in (('A', 'effective_rank'), ('B', 'norm'), ('pattern', 'entropy')):
            assert analysis.values(quantity, part, site).shape == (depth, 2)
    assert analysis.missing == []
    assert len(analysis.spectra) == 2 * sum(depths.values())

    # What has no meaning across sequences is not measured there.
    kinds = {(row.site, row.quantity) for row in analysis.rows}
    assert ('cross_attention', 'diagonal_mass') not in kinds
    assert (('attention', 'induction_score') in kinds) == (fields is not BOTH)


def test_numbers_of_a_layer_are_those_of_its_matrices():
    model = make(score_scale=0.5)
    analysis = analyze(model, induction=False)
    score = model.layers()[1].score
    value = model.layers()[1].value

    # A of layer 1, head 1, from the weights.
    w_q, w_k = (np.asarray(w[...], np.float64) for w in (score.w_q_DNH, score.w_k_DKH))
    A = 0.5 * 8**-0.5 * w_q[:, 1] @ w_k[:, 1].T
    s_D = np.linalg.svd(A, compute_uv=False)
    np.testing.assert_allclose(analysis.spectra['attention', 1, 'A'][1], s_D, atol=1e-5)
    assert analysis.values('norm', 'A')[1, 1] == pytest.approx(np.linalg.norm(A), rel=1e-5)

    # B of layer 1, head 0, whose key-value head is the first.
    B = np.asarray(value.w_v_DKH[...], np.float64)[:, 0] @ value.w_o_NHD[...][0]
    assert analysis.values('norm', 'B')[1, 0] == pytest.approx(np.linalg.norm(B), rel=1e-4)

    # What was not measured, or is ambiguous, is named.
    with pytest.raises(KeyError, match='no entropy was measured at attention'):
        analysis.values('entropy')
    with pytest.raises(KeyError, match='norm is of A and of B; give the subject'):
        analysis.values('norm')


def test_a_circuit_without_a_matrix_is_listed_as_missing():
    model = make(score='nonlinear_query', value='differential:Differential', num_layers=1)
    missing = [('attention', 0, 'A'), ('attention', 0, 'B')]
    assert analyze(model, induction=False).missing == missing
    analysis = Analysis([Row('attention', 1, 0, 'A', 'norm', 2.0)], {}, [('attention', 2, 'A')])
    np.testing.assert_array_equal(analysis.values('norm', 'A'), [[np.nan], [2], [np.nan]])


def test_drift_is_measured_by_head_between_models_of_different_factorizations():
    reference = make()
    scaled = make()
    scaled.blocks.attention.score.w_q_DNH[...] *= np.array([[1.0], [1.5]])
    analysis = analyze(converted(scaled, 'merge'), induction=False, reference=reference)
    np.testing.assert_allclose(analysis.values('drift', 'A'), [[0, 0.5]] * 2, atol=1e-5)
    np.testing.assert_array_equal(analysis.values('drift', 'B'), np.zeros((2, 2)))
    scaled = make()  # gains act before A and B, and what is folded into them shows as drift
    scaled.blocks.attention_norm.g_D[...] *= 2
    analysis = analyze(converted(scaled, 'fold_gains', 'merge'), induction=False, reference=scaled)
    for circuit, drift in (('A', 3), ('B', 1)):
        np.testing.assert_allclose(analysis.values('drift', circuit), drift, rtol=1e-5)
    with pytest.raises(ConfigError, match='attention 1 is a layer of one model only'):
        analyze(make(), reference=make(num_layers=1))
    with pytest.raises(ConfigError, match='attention 0: A.* is .4, 16, 16. in the reference'):
        analyze(make(), reference=make(num_heads=4))


def test_attention_that_is_equal_over_all_keys_has_its_induction_score():
    for window, expected in ((None, np.mean([1 / (t + 1) for t in range(4, 8)])), (3, 1 / 3)):
        model = make(window=window)
        model.blocks.attention.score.w_q_DNH[...] *= 0
        score_LN = analyze(model).values('induction_score', 'pattern')
        np.testing.assert_allclose(score_LN, expected, rtol=1e-5)
