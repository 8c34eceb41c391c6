"""Models of every kind and variant: rows and means, against numpy and the oracle of attention."""

import jax
import numpy as np
import pytest

from qkattn.analysis import Analysis, analyze
from qkattn.analysis.analyze import Row
from qkattn.config import ModelConfig
from qkattn.convert.conversions import converted
from qkattn.errors import ConfigError
from qkattn.model import build
from tests.attention import examples  # noqa: F401, the class Differential
from tests.lanes import only

TOKENS = np.random.default_rng(0).integers(0, 30, (2, 8))
SIZES = {'d_model': 16, 'num_heads': 2, 'num_layers': 2, 'context': 8, 'vocab_size': 30}
BOTH = {'kind': 'encoder_decoder', 'cross_variant': 'merged/vo', 'num_encoder_layers': 1}
PATTERN = {'pattern': 'qk/vo,key_free/no_v', 'num_layers': 3, 'positions': 'rope'}


def make(**fields):
    return build(ModelConfig(**{**SIZES, **fields}), key=jax.random.key(0))


MEASURED = [
    (BOTH, {'attention': 2, 'cross_attention': 2, 'encoder/attention': 1}),
    (PATTERN, {'attention': 3}),
    ({'kind': 'encoder', 'norm_position': 'post', 'biases': True}, {'attention': 2}),
]


@pytest.mark.parametrize(('fields', 'depths'), only(MEASURED[:2], MEASURED), ids=str)
def test_every_site_layer_and_head_is_measured(fields, depths):
    model = make(**fields)
    source = {'source_BS': TOKENS[:, :6]} if fields is BOTH else {}
    analysis = analyze(model, {'tokens_BT': TOKENS} | source)
    for site, depth in depths.items():
        for part, quantity in (('A', 'effective_rank'), ('B', 'norm'), ('pattern', 'entropy')):
            assert analysis.values(quantity, part, site).shape == (depth, 2)
    assert analysis.missing == [] and len(analysis.spectra) == 2 * sum(depths.values())
    kinds = {(row.site, row.quantity) for row in analysis.rows}
    assert ('cross_attention', 'diagonal_mass') not in kinds
    assert (('attention', 'induction_score') in kinds) == (fields is not BOTH)


def test_numbers_of_a_layer_are_those_of_its_matrices():
    model = make(score_scale=0.5)
    analysis = analyze(model, induction=False)
    score, value = model.layers()[1].score, model.layers()[1].value
    w_q, w_k = (np.asarray(w[...], np.float64) for w in (score.w_q_DNH, score.w_k_DKH))
    A = 0.5 * 8**-0.5 * w_q[:, 1] @ w_k[:, 1].T
    s_D = np.linalg.svd(A, compute_uv=False)
    np.testing.assert_allclose(analysis.spectra['attention', 1, 'A'][1], s_D, atol=1e-5)
    assert analysis.values('norm', 'A')[1, 1] == pytest.approx(np.linalg.norm(A), rel=1e-5)
    B = np.asarray(value.w_v_DKH[...], np.float64)[:, 0] @ value.w_o_NHD[...][0]
    assert analysis.values('norm', 'B')[1, 0] == pytest.approx(np.linalg.norm(B), rel=1e-4)
    with pytest.raises(KeyError, match='no entropy'):
        analysis.values('entropy')


def test_a_circuit_without_a_matrix_is_missing():
    model = make(score='nonlinear_query', value='differential:Differential', num_layers=1)
    missing = [('attention', 0, 'A'), ('attention', 0, 'B')]
    assert analyze(model, induction=False).missing == missing
    analysis = Analysis([Row('attention', 1, 0, 'A', 'norm', 2.0)], {}, [('attention', 2, 'A')])
    np.testing.assert_array_equal(analysis.values('norm', 'A'), [[np.nan], [2], [np.nan]])


def test_drift_is_that_of_each_head_between_two_factorizations():
    reference, scaled = make(), make()
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
