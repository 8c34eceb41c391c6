"""Models of every kind: the numbers of a slow reference, padding, packed rows, layers, kernels."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qkattn.config import ModelConfig
from qkattn.errors import ConfigError
from qkattn.model import Decoder, Encoder, EncoderDecoder, abstract_model, build
from tests.attention import examples  # noqa: F401, classes that the settings name
from tests.lanes import slow_except
from tests.model import slow_transformer as slow

SIZES = {'d_model': 16, 'num_layers': 2, 'num_heads': 2, 'd_ff': 24, 'vocab_size': 13}
BOTH = {'kind': 'encoder_decoder', 'num_encoder_layers': 1, 'context': 10, 'source_context': 12}
TOKENS = np.random.default_rng(0).integers(0, 13, (2, 7))
logits_of = jax.jit(lambda model, *args, **options: model(*args, **options))
# Three pairs in a row: tokens, their segments, the tokens of each pair, the length of the row.
SIDES = [
    ('source_BS', 'source_segments_BS', (4, 1, 5), 12),
    ('tokens_BT', 'segments_BT', (5, 1, 3), 10),
]
SELF = 'shared_qk(self_mask=True)'


def config_of(**fields) -> ModelConfig:
    return ModelConfig(**SIZES | {'context': 7, 'scan_unroll': 1} | fields)


def make_model(**fields) -> Decoder | Encoder | EncoderDecoder:
    """A model whose embeddings are large enough that every token matters."""
    model = build(config_of(**fields), key=jax.random.key(0))
    model.w_embedding_VD[...] *= 4
    return model


def packed_row() -> dict[str, np.ndarray]:
    """All pairs in one row, and padding behind them."""
    rng = np.random.default_rng(0)
    batch = {}
    for tokens, segments, sizes, length in SIDES:
        numbers = np.repeat([1, 2, 3], sizes)
        batch[segments] = np.pad(numbers, (0, length - len(numbers)))[None]
        batch[tokens] = rng.integers(0, 13, (1, length))
    return batch


SCALED = {'norm_position': 'post', 'scale_embeddings': True}
ODD = {'d_model': 9, 'head_size': 8}  # fewer channels than positions
FIELDS = [
    {'norm_position': 'pre', 'activation': 'gelu', 'positions': 'learned', 'kernel': 'blockwise'},
    SCALED | ODD | {'activation': 'relu', 'positions': 'sinusoidal', 'biases': True},
    SCALED | {'norm': 'rmsnorm', 'tied_embeddings': False},
    {'norm_position': 'pre', 'activation': 'swiglu', 'positions': 'sinusoidal', 'biases': True},
    {'positions': 'sinusoidal', 'init': 'nanogpt', 'init_embedding': 2.0},
    {'score': 'merged', 'value': 'no_v', 'biases': True, 'positions': 'none'},
    {'score': 'query_free', 'attention_gain': False},
    {'score': 't5_bias:T5Bias', 'value': 'differential:Differential', 'normalizer': 'sigmoid'},
    {'value': 'gated:Gated', 'normalizer': 'entmax15', 'biases': True, 'activation': 'geglu'},
]
UNSHARED = {'shared_embeddings': False, 'tied_embeddings': False, 'norm_position': 'post'}
UNSHARED |= {'kernel': 'blockwise'}
FIELDS_OF_ENCODER_DECODERS = [
    *FIELDS[:2],
    UNSHARED | {'encoder_variant': 'merged/no_vo', 'cross_variant': 'key_free/no_v'},
    {'norm': 'rmsnorm', 'biases': True, 'shared_embeddings': False, 'positions': 'none'},
    {'score': 'shared_qk', 'attention_gain': False},
    {'positions': 'rope'},
    {'positions': 'alibi', 'score': SELF, 'value': 'k_is_v', 'norm_position': 'post'},
    {'positions': 'learned', 'cross_variant': f'{SELF}/vo', 'encoder_variant': 'latent/latent'},
]
# Of five layers, two are left after the only whole iteration.
VARIANTS = 'qk/vo', 'low_rank(rank=3)/no_v', 'merged/differential:Differential'
PATTERN = {'pattern': ','.join(VARIANTS), 'num_layers': 5}
SCANS = [{}, {'scan_unroll': None}, {'scan_unroll': 3, 'remat': 'dots'}]
CASES = [(k, f) for i, f in enumerate(FIELDS) for k in ('encoder', 'decoder')[:: (-1) ** i]]
CASES += [('encoder_decoder', fields) for fields in FIELDS_OF_ENCODER_DECODERS]
CASES += [('decoder', PATTERN | scan) for scan in SCANS]
QUICK = [CASES[0], CASES[4], CASES[18], CASES[-1]]


@pytest.mark.parametrize(('kind', 'fields'), slow_except(QUICK, CASES), ids=str)
def test_logits_are_those_of_the_slow_reference(kind, fields):
    # Pairs are packed, several in a row; texts are one in each row, with padding behind.
    if kind == 'encoder_decoder':
        fields = BOTH | fields
        inputs = packed_row()
        batch = packed_row()
    else:
        valid_BT = np.arange(7) < np.array([[7], [4]])
        inputs = {'tokens_BT': TOKENS, 'valid_BT': valid_BT}
        batch = {'tokens_BT': TOKENS, 'segments_BT': valid_BT.astype(int)}
    model = slow.with_noise(make_model(**{'kind': kind} | fields))

    # With noise, since gains of 1 and biases of 0 would hide mistakes.
    used_BT = batch['segments_BT'] > 0
    want = slow.forward(model, **batch)
    got = logits_of(model, **inputs)
    np.testing.assert_allclose(got[used_BT], want[used_BT], atol=2e-5 * np.abs(want).max())

    # The logits vary; constants would agree in any model.
    assert np.std(want[used_BT]) > 0.1
    assert model.final_norm is None or model.config.norm_position == 'pre'


@pytest.mark.parametrize('kind', ['encoder', 'decoder'])
def test_padding_is_never_read_wherever_it_stands(kind):
    model = make_model(kind=kind)
    valid_BT = np.ones((2, 7), bool)
    valid_BT[0, 5:] = valid_BT[1, :2] = False
    want = logits_of(model, TOKENS, valid_BT=valid_BT)
    # With other tokens in the places of padding.
    got = logits_of(model, np.where(valid_BT, TOKENS, 3), valid_BT=valid_BT)
    np.testing.assert_array_equal(got[valid_BT], want[valid_BT])
    assert np.isfinite(got).all()
    # The first row alone, without its padding at the end.
    shorter = logits_of(model, TOKENS[:1, :5])
    np.testing.assert_allclose(want[:1, :5], shorter, atol=1e-5)
    # Without the mask, padding would be read.
    assert np.abs(logits_of(model, TOKENS) - want)[valid_BT].max() > 1e-3


KERNELS = ['einsum', 'blockwise']
POSITIONS = ['learned', 'sinusoidal', 'rope', 'alibi']
KERNELS_AND_POSITIONS = [*itertools.product(KERNELS, POSITIONS)]
QUICK_KERNELS = [('einsum', 'learned'), ('blockwise', 'rope')]


@pytest.mark.parametrize(('kernel', 'positions'), slow_except(QUICK_KERNELS, KERNELS_AND_POSITIONS))
def test_documents_of_a_row_are_as_if_each_stood_alone(kernel, positions):
    model = make_model(kernel=kernel, positions=positions, window=4)
    segments_BT = np.array([[1, 1, 1, 1, 1, 2, 2], [2, 3, 3, 3, 4, 4, 4]])
    got = logits_of(model, TOKENS, segments_BT=segments_BT)
    for row, segments_T in enumerate(segments_BT):
        for number in np.unique(segments_T):
            is_document_T = segments_T == number
            alone = logits_of(model, TOKENS[row : row + 1, is_document_T])[0]
            np.testing.assert_allclose(got[row, is_document_T], alone, atol=1e-5)
    # Without the segments, later documents would read earlier ones.
    assert np.abs(got - logits_of(model, TOKENS))[segments_BT > 1].max() > 1e-2


def test_a_window_reaches_both_ways():
    model = make_model(kind='encoder', window=2, num_layers=1)
    other = TOKENS.copy()
    other[:, 3] = (other[:, 3] + 1) % 11
    moved_BT = np.abs(logits_of(model, other) - logits_of(model, TOKENS)).max(-1) > 1e-6
    assert moved_BT.tolist() == [[False, False, True, True, True, False, False]] * 2


def test_more_tokens_than_there_is_room_for_are_refused():
    refusal = '8 tokens do not fit into model.{}=7'
    for kind in ('decoder', 'encoder'):
        with pytest.raises(ValueError, match=refusal.format('context')):
            make_model(kind=kind)(jnp.zeros((1, 8), int))
    both = make_model(kind='encoder_decoder', source_context=7)
    for tokens, source, field in ((8, 7, 'context'), (7, 8, 'source_context')):
        with pytest.raises(ValueError, match=refusal.format(field)):
            both(jnp.zeros((1, tokens), int), source_BS=jnp.zeros((1, source), int))


def test_a_setting_out_of_its_bounds_is_refused_by_name():
    fields = {'positions': 'rotary', 'norm': 'layer_norm', 'norm_position': 'Pre', 'dropout': 1.5}
    for field, value in (fields | {'activation': 'silu', 'kind': 'gpt'}).items():
        for construct in (build, Decoder):
            with pytest.raises(ConfigError, match=f'^model.{field}={value!r} must be'):
                construct(config_of(**{field: value}), key=jax.random.key(0))
    with pytest.raises(ConfigError, match="^model.kind='decoder' must be 'encoder' in Encoder"):
        Encoder(config_of(), key=jax.random.key(0))


def test_rematerialization_halves_the_memory_of_a_compiled_gradient():
    def temporaries(**fields):
        model = abstract_model(config_of(num_layers=4, context=64, scan_unroll=None, **fields))
        gradients = jax.jit(jax.grad(lambda model, tokens_BT: model(tokens_BT).sum()))
        compiled = gradients.lower(model, jax.ShapeDtypeStruct((16, 64), int)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(remat='full') < temporaries() / 2


def test_dropout_is_off_without_a_key():
    np.testing.assert_array_equal(
        logits_of(make_model(dropout=0.5), TOKENS), logits_of(make_model(), TOKENS)
    )


def test_dropout_acts_on_embeddings():
    model = make_model(dropout=0.5)
    model.blocks.attention.value.w_o_NHD[...] *= 0
    model.blocks.mlp.w_out_FD[...] *= 0
    first = logits_of(model, TOKENS, dropout_key=jax.random.key(0))
    second = logits_of(model, TOKENS, dropout_key=jax.random.key(1))
    assert np.abs(first - second).max() > 1e-2


def test_dropout_acts_on_both_sides_of_an_encoder_decoder():
    model = make_model(**BOTH, dropout=0.5, num_layers=1)
    batch = packed_row()
    key = jax.random.key(0)
    plain = logits_of(model, **batch)
    first = logits_of(model, **batch, dropout_key=key)
    second = logits_of(model, **batch, dropout_key=jax.random.key(1))
    assert np.abs(first - plain).max() > 0.1
    assert np.abs(first - second).max() > 0.1

    # The encoder alone.
    encoded = model.encode(batch['source_BS'])
    encoded_with_dropout = model.encode(batch['source_BS'], dropout_key=key)
    assert np.abs(encoded - encoded_with_dropout).max() > 0.1


def test_no_two_parts_have_correlated_initial_values():
    model = make_model(
        **BOTH | {'shared_embeddings': False, 'num_encoder_layers': 2, 'context': 12}
    )
    stacks = model.blocks, model.encoder.blocks
    attentions = [model.blocks.cross_attention, *(stack.attention for stack in stacks)]
    # Parameters of equal shape, which would be equal if they were drawn from one key.
    families = [
        [w[i] for a in attentions for w in (a.score.w_q_DNH, a.score.w_k_DKH) for i in range(2)],
        [stack.mlp.w_in_DF[i] for stack in stacks for i in range(2)],
        [model.w_embedding_VD[...], model.encoder.w_embedding_VD[...]],
        [model.w_position_TD[...], model.encoder.w_position_TD[...]],
    ]
    for family in families:
        correlations = np.corrcoef([np.ravel(a) for a in family])
        assert np.abs(np.triu(correlations, 1)).max() < 0.5


def test_logits_in_bfloat16_are_summed_in_float32():
    model = jax.tree.map(lambda p: p.astype(jnp.bfloat16), make_model(num_layers=1))
    x_BTD = jax.random.normal(jax.random.key(1), (2, 4, 16)).astype(jnp.bfloat16)
    w_VD = model.w_embedding_VD[...].astype(jnp.float32)
    assert model.logits(x_BTD).dtype == jnp.float32
    expected_BTV = x_BTD.astype(jnp.float32) @ w_VD.T
    np.testing.assert_allclose(model.logits(x_BTD), expected_BTV, rtol=0, atol=2e-5)


def test_the_layers_of_a_model_compute_what_its_blocks_compute():
    model = build(config_of(num_layers=3), rngs=nnx.Rngs(0))
    x_BTD = model.embed(TOKENS)
    layers = model.layers()
    assert len(layers) == 3
    for index, layer in enumerate(layers):
        block = jax.tree.map(lambda stacked, index=index: stacked[index], model.blocks)
        x_BTD = block.run_branches([layer], x_BTD)
        A_NDE, B_NDE = layer.matrix()
        assert A_NDE.shape == B_NDE.shape == (2, 16, 16)
    np.testing.assert_allclose(model.logits(model.normed(x_BTD)), model(TOKENS), atol=1e-5)


@pytest.mark.parametrize('kind', ['no_kind', ['decoder'], None])
def test_an_unknown_kind_is_refused(kind):
    with pytest.raises(ConfigError, match='^model.kind=.* must be '):
        build(ModelConfig(kind=kind), key=jax.random.key(0))


def test_an_abstract_model_has_the_shapes_of_a_model():
    config = config_of(score='merged(init="product")', value='low_rank')
    abstract = abstract_model(config)
    model = build(config, key=jax.random.key(0))
    assert jax.tree.structure(abstract) == jax.tree.structure(model)
    shapes = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(abstract)]
    assert shapes == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(model)]


def test_a_model_is_drawn_after_an_abstract_one():
    """The zeros of the abstract model are not left behind."""
    config = config_of()
    abstract_model(config)
    assert build(config, key=jax.random.key(0)).w_embedding_VD[...].std() > 0
