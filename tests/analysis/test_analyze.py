"""Models of every kind and variant, against the slow reference of attention."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qkattn.analysis import (
    Analysis,
    Row,
    analyze,
    attention_patterns,
    circuit_matrices,
    means,
    next_token_batch,
    walk,
)
from qkattn.analysis.factors import params_of
from qkattn.analysis.patterns import diagonal_mass
from qkattn.analysis.watching import see
from qkattn.attention import Attention, AttentionSpec, Mask, oracle, registry
from qkattn.config import ModelConfig
from qkattn.convert.conversions import convert_model
from qkattn.errors import ConfigError
from qkattn.model import abstract_model, build, with_params
from tests.attention import examples, layers

TOKENS = np.random.default_rng(0).integers(0, 30, (2, 8))
SIZES = {'d_model': 16, 'num_heads': 2, 'num_layers': 2, 'context': 8, 'vocab_size': 30}


def make(**fields):
    return build(ModelConfig(**{**SIZES, **fields}), key=jax.random.key(0))


@pytest.mark.parametrize(
    ('score', 'options'),
    [
        ('merged', {}),
        ('query_free', {}),
        ('shared_qk(self_mask=True)', {}),
        ('qk', {'positions': 'alibi'}),
        ('qk', {'normalizer': 'sigmoid', 'score_scale': 0.5}),
        ('qk', {'logit_cap': 0.7, 'window': 3}),
        ('qk', {'biases': True}),
    ],
)
def test_a_pattern_is_that_of_the_slow_reference(score, options):
    layer = layers.make((score, 'vo'), **options)
    x_BTD, mask = layers.stream(), Mask(causal=True, window=layer.spec.window)
    got = see(layer, x_BTD, mask)
    scale = layer.score.scale * layer.spec.score_scale
    want = oracle.logits(np.asarray(layer.score.matrix()), x_BTD, x_BTD, scale=scale)
    if cap := layer.spec.logit_cap:
        want = cap * np.tanh(want / cap)
    if options.get('positions') == 'alibi':
        slopes = 2.0 ** (-8 * np.arange(1, layers.N + 1) / layers.N)
        distance = np.arange(layers.T)[:, None] - np.arange(layers.T)
        want = want - slopes[:, None, None] * np.abs(distance)
    mask_BTS = np.array(mask.dense(layers.T, layers.T))
    if layer.score.hides_self:
        mask_BTS &= ~np.eye(layers.T, dtype=bool) | (np.arange(layers.T) == 0)[:, None]
    np.testing.assert_array_equal(got.mask_BTS, mask_BTS)
    np.testing.assert_allclose(got.logits_BNTS, want * mask_BTS[:, None], atol=1e-4)
    normalizer = registry.find_normalizer(layer.spec.normalizer)
    want = oracle.probabilities(want, mask_BTS, normalizer)
    np.testing.assert_allclose(got.probabilities_BNTS, want, atol=1e-5)


def test_a_token_that_sees_others_has_no_mass_on_itself_where_it_is_hidden():
    layer = layers.make(('shared_qk(self_mask=True)', 'vo'))
    seen = see(layer, layers.stream(), Mask(causal=True))
    # The first token sees itself alone.
    np.testing.assert_allclose(diagonal_mass(seen), 1 / layers.T, rtol=1e-6)


@pytest.mark.parametrize('score', ['nonlinear_query', 'qk'])
@pytest.mark.parametrize('options', [{}, {'positions': 'rope', 'qk_norm': True}])
def test_the_mix_of_values_by_the_pattern_is_what_the_layer_returns(score, options):
    """Of scores and options without A[n], too."""
    layer = layers.make((score, 'vo'), **options)
    x_BTD, y_BSD = layers.stream(), layers.stream(length=5, seed=6)
    for y, mask in ((None, Mask(causal=True)), (y_BSD, Mask())):
        if options and y is not None:
            continue
        seen = see(layer, x_BTD, mask, y)
        memory = x_BTD if y is None else y
        B_NDE = np.asarray(layer.value.matrix(layer.score))
        want = oracle.mix(np.asarray(seen.probabilities_BNTS), B_NDE, memory)
        np.testing.assert_allclose(layer(x_BTD, mask, y_BSD=y), want, atol=1e-4)


@pytest.mark.parametrize(
    'fields',
    [
        pytest.param({}, marks=pytest.mark.slow),
        {'kind': 'encoder', 'norm_position': 'post', 'biases': True},
        {'kind': 'encoder_decoder', 'cross_variant': 'merged/vo', 'num_encoder_layers': 1},
        {'pattern': 'qk/vo,key_free/no_v', 'num_layers': 3, 'positions': 'rope'},
    ],
    ids=str,
)
def test_every_site_layer_and_head_is_measured(fields):
    model, batch = make(**fields), {'tokens_BT': TOKENS}
    config = model.config
    if config.kind == 'encoder_decoder':
        batch['source_BS'] = TOKENS[:, :6]
    elif config.kind == 'decoder':
        batch = next_token_batch(model, TOKENS)
    found = analyze(model, batch)
    L, sites = config.num_layers, {'attention'}
    if config.kind == 'encoder_decoder':
        sites = {'attention', 'cross_attention', 'encoder/attention'}
    for site in sites:
        depth = 1 if site.startswith('encoder') else L
        for of, quantity in (('A', 'effective_rank'), ('B', 'norm'), ('pattern', 'entropy')):
            assert found.values(quantity, of, site).shape == (depth, 2)
    assert found.missing == [] and len(found.spectra) == 2 * sum(
        1 if site.startswith('encoder') else L for site in sites
    )
    kinds = {(row.site, row.quantity) for row in found.rows}
    assert (('cross_attention', 'diagonal_mass') in kinds) is False
    assert (('attention', 'induction_score') in kinds) == (config.kind != 'encoder_decoder')
    assert any(q == 'gradient_norm' for _, q in kinds) == (config.kind == 'decoder')


def test_a_walk_layer_by_layer_gives_what_the_model_computes():
    model = make(kind='encoder_decoder', cross_variant='merged/vo', norm_position='post')
    inputs = {'tokens_BT': TOKENS, 'source_BS': TOKENS[:, :6]}
    got = jax.jit(lambda m, i: walk(m, i, lambda *_: None))(model, inputs)
    want = jax.jit(lambda m, i: m.stream(**i))(model, inputs)
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_numbers_of_a_layer_are_those_of_its_matrices():
    model = make(score_scale=0.5)
    found = analyze(model, induction=False)
    layer = model.layers()[1]
    w_q, w_k, w_v, w_o = (
        np.asarray(w, np.float64)
        for w in (
            *(layer.score.w_q_DNH[...], layer.score.w_k_DKH[...]),
            *(layer.value.w_v_DKH[...], layer.value.w_o_NHD[...]),
        )
    )
    A = 0.5 * 8**-0.5 * w_q[:, 1] @ w_k[:, 1].T
    s_D = np.linalg.svd(A, compute_uv=False)
    np.testing.assert_allclose(found.spectra['attention', 1, 'A'][1], s_D, atol=1e-5)
    assert found.values('norm', 'A')[1, 1] == pytest.approx(np.linalg.norm(A), rel=1e-5)
    B = w_v[:, 0] @ w_o[0]
    share = np.linalg.norm((B + B.T) / 2) ** 2 / np.linalg.norm(B) ** 2
    assert found.values('symmetric_share', 'B')[1, 0] == pytest.approx(share, rel=1e-4)
    norms = found.values('parameter_norm', 'score/w_q_DNH')
    np.testing.assert_allclose(norms[1], [np.linalg.norm(w_q)], rtol=1e-5)
    with pytest.raises(KeyError, match='no entropy'):
        found.values('entropy')


def test_a_score_that_is_not_bilinear_is_said_to_lack_a_matrix():
    found = analyze(make(score='nonlinear_query'), induction=False)
    assert found.missing == [('attention', 0, 'A'), ('attention', 1, 'A')]
    assert {place[2] for place in found.spectra} == {'B'}
    found = analyze(make(value='differential:Differential', num_layers=1), induction=False)
    assert found.missing == [('attention', 0, 'B')] and examples


def test_values_are_at_the_numbers_of_their_layers():
    rows = [Row('attention', 1, head, 'A', 'norm', head + 2.0) for head in range(2)]
    found = Analysis(rows, {}, [('attention', 0, 'A'), ('attention', 2, 'A')])
    nan = np.nan
    np.testing.assert_array_equal(found.values('norm', 'A'), [[nan, nan], [2, 3], [nan, nan]])


def test_drift_is_that_of_each_head_between_two_factorizations():
    reference, scaled = make(), make()
    scaled.blocks.attention.score.w_q_DNH[...] *= np.array([[1.0], [1.5]])
    config, params, _ = convert_model('merge', scaled.config, params_of(scaled))
    found = analyze(with_params(config, params), induction=False, reference=reference)
    np.testing.assert_allclose(found.values('drift', 'A'), [[0, 0.5]] * 2, atol=1e-5)
    np.testing.assert_array_equal(found.values('drift', 'B'), np.zeros((2, 2)))


def test_a_reference_has_the_same_layers_heads_and_width():
    with pytest.raises(ConfigError, match='attention 1 is a layer of one model only'):
        analyze(make(), reference=make(num_layers=1))
    with pytest.raises(ConfigError, match='attention 0: A.* is .4, 16, 16. in the reference'):
        analyze(make(), reference=make(num_heads=4))


def test_trials_under_vmap_have_the_numbers_that_each_has_alone():
    config = ModelConfig(**SIZES)
    models = [build(config, key=jax.random.key(seed)) for seed in range(2)]
    params = [nnx.to_pure_dict(nnx.state(model)) for model in models]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)

    def measured(params):
        model = with_params(config, params)
        return means(model), attention_patterns(model, {'tokens_BT': TOKENS})

    together = jax.jit(jax.vmap(measured))(stacked)
    for x in range(2):
        of_x = jax.tree.map(operator.itemgetter(x), together)
        alone = jax.jit(measured)(params[x])
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), of_x, alone)


@pytest.mark.parametrize('circuit', ['score', 'value'])
def test_every_registered_variant_is_measured(circuit):
    """Nothing is computed: shapes tell what there is."""
    scores = {f'{name}/vo': name for name in registry.SCORES}
    values = {f'{value.partner}/{name}': name for name, value in registry.VALUES.items()}
    for variant, name in (scores if circuit == 'score' else values).items():
        score, _, value = variant.partition('/')
        heads = 1 if 'full' in score else 2
        model = abstract_model(
            ModelConfig(**SIZES | {'num_heads': heads}, score=score, value=value)
        )
        found = jax.eval_shape(circuit_matrices, model)
        missing = {of for (_, _, of), matrix in found.items() if matrix is None}
        assert missing == ({'A'} if name == 'nonlinear_query' else set()), variant
        inputs = {'tokens_BT': TOKENS}
        seen = jax.eval_shape(lambda m, i=inputs: attention_patterns(m, i), model)
        assert [p.probabilities_BNTS.shape for p in seen.values()] == [(2, heads, 8, 8)] * 2, (
            variant
        )


@pytest.mark.parametrize(
    ('window', 'want'), [(None, np.mean([1 / (t + 1) for t in range(4, 8)])), (3, 1 / 3)]
)
def test_attention_that_is_equal_over_all_keys_has_its_induction_score(window, want):
    model = make(window=window)
    model.blocks.attention.score.w_q_DNH[...] *= 0
    found = analyze(model)
    np.testing.assert_allclose(found.values('induction_score', 'pattern'), want, rtol=1e-5)


def test_gradient_norms_are_those_of_the_loss():
    model = make(num_layers=3, pattern='qk/vo,qk/no_v')
    batch = next_token_batch(model, TOKENS)
    found = analyze(model, batch, induction=False)

    def loss(params):
        logits = with_params(model.config, params)(TOKENS)[:, :-1]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), TOKENS[:, 1:, None], -1)
        return -chosen.mean()

    grads = jax.jit(jax.grad(loss))(nnx.to_pure_dict(nnx.state(model)))
    norm = np.linalg.norm
    stacks = grads['blocks']
    want = [
        norm(stacks[f'stack_{layer % 2}']['attention']['score']['w_q_DNH'][layer // 2])
        for layer in range(3)
    ]
    got = found.values('gradient_norm', 'score/w_q_DNH')[:, 0]
    np.testing.assert_allclose(got, want, rtol=1e-4)
    got = found.values('gradient_norm', 'w_embedding_VD', 'model')
    np.testing.assert_allclose(got[0, 0], norm(grads['w_embedding_VD']), rtol=1e-4)
    # The sum of squares over all factors is that of the whole gradient.
    total = sum(row.value**2 for row in found.rows if row.quantity == 'gradient_norm')
    whole = sum(float((g**2).sum()) for g in jax.tree.leaves(grads))
    assert total == pytest.approx(whole, rel=1e-4)


def test_next_tokens_are_targets_of_decoders_only():
    batch = next_token_batch(make(), TOKENS)
    np.testing.assert_array_equal(batch['targets_BT'][:, :-1], TOKENS[:, 1:])
    assert batch['loss_weights_BT'].sum() == TOKENS[:, 1:].size
    assert next_token_batch(make(kind='encoder'), TOKENS).keys() == {'tokens_BT'}


def test_specs_of_watched_layers_stay_as_they_were():
    spec = AttentionSpec(d_model=16, num_heads=2, kernel='blockwise')
    layer = Attention(spec, key=jax.random.key(0))
    see(layer, jnp.ones((1, 3, 16)), Mask(causal=True))
    assert layer.spec == spec and layer.value.equation == 'W_V[n] W_O[n]'
