"""Models of every kind: the numbers of a slow reference, padding, packed rows, layers, kernels."""

import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qkattn.config import ModelConfig
from qkattn.errors import ConfigError
from qkattn.model import Decoder, Encoder, EncoderDecoder, abstract_model, build
from qkattn.model.transformer import inference_model
from tests.attention import examples  # noqa: F401, classes that the settings name
from tests.lanes import slow_except
from tests.model import slow_transformer as slow

SIZES = {'d_model': 16, 'num_layers': 2, 'num_heads': 2, 'd_ff': 24, 'vocab_size': 13}
BOTH = {'kind': 'encoder_decoder', 'num_encoder_layers': 1, 'context': 10, 'source_context': 12}
TOKENS = np.random.default_rng(0).integers(0, 13, (2, 7))
logits_of = jax.jit(lambda model, *args, **options: model(*args, **options))
# Names of two arrays, the tokens of each of three pairs, and the length of the packed row.
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
    """One row with three pairs of source and target, followed by padding."""
    rng = np.random.default_rng(0)
    batch = {}
    for tokens, segments, tokens_of_pairs, length in SIDES:
        segments_T = np.repeat([1, 2, 3], tokens_of_pairs)
        num_padding = length - len(segments_T)
        batch[segments] = np.pad(segments_T, (0, num_padding))[None]
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
    """A model has the same logits as a plain numpy transformer with the same parameters.

    Logits at padding are not compared.
    """
    if kind == 'encoder_decoder':
        # A row packs several pairs of source and target. Segments number the pairs.
        fields = BOTH | fields
        inputs = packed_row()
        reference_inputs = packed_row()
    else:
        # Each row is one text: 7 tokens, and 4 tokens followed by padding.
        valid_BT = np.arange(7) < np.array([[7], [4]])
        inputs = {'tokens_BT': TOKENS, 'valid_BT': valid_BT}
        reference_inputs = {'tokens_BT': TOKENS, 'segments_BT': valid_BT.astype(int)}
    # All parameters get noise, since gains of 1 and biases of 0 would hide mistakes.
    model = slow.with_noise(make_model(**{'kind': kind} | fields))

    got_BTV = logits_of(model, **inputs)
    want_BTV = slow.forward(model, **reference_inputs)
    is_token_BT = reference_inputs['segments_BT'] > 0  # 0 is padding
    atol = 2e-5 * np.abs(want_BTV).max()
    np.testing.assert_allclose(got_BTV[is_token_BT], want_BTV[is_token_BT], atol=atol)

    # Constant logits would agree in any model, so logits must vary.
    assert np.std(want_BTV[is_token_BT]) > 0.1

    # Only models that norm the input of each branch ('pre') have a final norm.
    assert model.final_norm is None or model.config.norm_position == 'pre'


@pytest.mark.parametrize('kind', ['encoder', 'decoder'])
def test_padding_is_never_read_wherever_it_stands(kind):
    """The logits of tokens do not depend on padding, before or after the tokens."""
    model = make_model(kind=kind)
    # Padding is at the end of the first row, and at the start of the second.
    valid_BT = np.ones((2, 7), bool)
    valid_BT[0, 5:] = False
    valid_BT[1, :2] = False
    want = logits_of(model, TOKENS, valid_BT=valid_BT)

    # Other padding tokens change nothing.
    other_padding = np.where(valid_BT, TOKENS, 3)
    got = logits_of(model, other_padding, valid_BT=valid_BT)
    np.testing.assert_array_equal(got[valid_BT], want[valid_BT])
    assert np.isfinite(got).all()

    # Without its padding at the end, the first row has the same logits.
    shorter = logits_of(model, TOKENS[:1, :5])
    np.testing.assert_allclose(want[:1, :5], shorter, atol=1e-5)

    # Without the mask, padding changes the logits.
    unmasked = logits_of(model, TOKENS)
    assert np.abs(unmasked - want)[valid_BT].max() > 1e-3


KERNELS = ['einsum', 'blockwise']
POSITIONS = ['learned', 'sinusoidal', 'rope', 'alibi']
KERNELS_AND_POSITIONS = [*itertools.product(KERNELS, POSITIONS)]
QUICK_KERNELS = [('einsum', 'learned'), ('blockwise', 'rope')]


@pytest.mark.parametrize(('kernel', 'positions'), slow_except(QUICK_KERNELS, KERNELS_AND_POSITIONS))
def test_documents_of_a_row_are_as_if_each_stood_alone(kernel, positions):
    """A document in a packed row has the same logits as in a separate row.

    Segments number the documents of a row. A document attends only to itself, and its positions
    start from 0.
    """
    model = make_model(kernel=kernel, positions=positions, window=4)
    segments_BT = np.array([[1, 1, 1, 1, 1, 2, 2], [2, 3, 3, 3, 4, 4, 4]])
    got = logits_of(model, TOKENS, segments_BT=segments_BT)
    for row, segments_T in enumerate(segments_BT):
        for segment in np.unique(segments_T):
            is_document_T = segments_T == segment
            document_1T = TOKENS[row, is_document_T][None]
            alone = logits_of(model, document_1T)[0]
            np.testing.assert_allclose(got[row, is_document_T], alone, atol=1e-5)

    # Without segments, later documents attend to earlier ones, so their logits differ.
    unsegmented = logits_of(model, TOKENS)
    is_later_BT = segments_BT > 1
    assert np.abs(got - unsegmented)[is_later_BT].max() > 1e-2


def test_a_window_reaches_both_ways():
    model = make_model(kind='encoder', window=2, num_layers=1)
    changed = TOKENS.copy()
    changed[:, 3] = (changed[:, 3] + 1) % 11
    difference_BTV = logits_of(model, changed) - logits_of(model, TOKENS)
    is_affected_BT = np.abs(difference_BTV).max(-1) > 1e-6
    for is_affected_T in is_affected_BT:
        assert np.flatnonzero(is_affected_T).tolist() == [2, 3, 4]


@pytest.mark.parametrize('kind', ['decoder', 'encoder'])
def test_more_tokens_than_the_context_are_refused(kind):
    model = make_model(kind=kind)
    with pytest.raises(ValueError, match='8 tokens do not fit into model.context=7'):
        model(jnp.zeros((1, 8), int))


def test_more_tokens_than_a_context_of_an_encoder_decoder_are_refused():
    model = make_model(kind='encoder_decoder', source_context=7)
    short = jnp.zeros((1, 7), int)
    long = jnp.zeros((1, 8), int)
    with pytest.raises(ValueError, match='8 tokens do not fit into model.context=7'):
        model(long, source_BS=short)
    with pytest.raises(ValueError, match='8 tokens do not fit into model.source_context=7'):
        model(short, source_BS=long)


@pytest.mark.parametrize('construct', [build, Decoder])
@pytest.mark.parametrize(
    ('field', 'value'),
    [
        ('positions', 'rotary'),
        ('norm', 'layer_norm'),
        ('norm_position', 'Pre'),
        ('dropout', 1.5),
        ('activation', 'silu'),
        ('kind', 'gpt'),
    ],
)
def test_a_setting_out_of_its_bounds_is_refused_by_name(construct, field, value):
    with pytest.raises(ConfigError, match=f'^model.{field}={value!r} must be'):
        construct(config_of(**{field: value}), key=jax.random.key(0))


def test_an_encoder_refuses_the_settings_of_a_decoder():
    with pytest.raises(ConfigError, match="^model.kind='decoder' must be 'encoder' in Encoder"):
        Encoder(config_of(), key=jax.random.key(0))


def test_rematerialization_halves_the_memory_of_a_compiled_gradient():
    def temporary_bytes(**fields):
        model = abstract_model(config_of(num_layers=4, context=64, scan_unroll=None, **fields))
        tokens_BT = jax.ShapeDtypeStruct((16, 64), int)
        gradients = jax.jit(jax.grad(lambda model, tokens_BT: model(tokens_BT).sum()))
        compiled = gradients.lower(model, tokens_BT).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(remat='full') < temporary_bytes() / 2


def test_dropout_is_off_without_a_key():
    with_dropout = make_model(dropout=0.5)
    without_dropout = make_model()
    np.testing.assert_array_equal(
        logits_of(with_dropout, TOKENS), logits_of(without_dropout, TOKENS)
    )


def test_dropout_acts_on_embeddings():
    model = make_model(dropout=0.5)
    # Both branches give 0, so the stream has only the embeddings.
    model.blocks.attention.value.w_o_NHD[...] *= 0
    model.blocks.mlp.w_out_FD[...] *= 0
    first = logits_of(model, TOKENS, dropout_key=jax.random.key(0))
    second = logits_of(model, TOKENS, dropout_key=jax.random.key(1))
    assert np.abs(first - second).max() > 1e-2


def test_dropout_acts_on_both_sides_of_an_encoder_decoder():
    """A dropout key changes both the encoder's output and the decoder's logits."""
    model = make_model(**BOTH, dropout=0.5, num_layers=1)
    batch = packed_row()
    key = jax.random.key(0)

    # Dropout changes the logits of the whole model, and two keys give different logits.
    plain = logits_of(model, **batch)
    first = logits_of(model, **batch, dropout_key=key)
    second = logits_of(model, **batch, dropout_key=jax.random.key(1))
    assert np.abs(first - plain).max() > 0.1
    assert np.abs(first - second).max() > 0.1

    # Dropout changes the output of the encoder.
    encoded = model.encode(batch['source_BS'])
    encoded_with_dropout = model.encode(batch['source_BS'], dropout_key=key)
    assert np.abs(encoded - encoded_with_dropout).max() > 0.1


def test_no_two_parts_have_correlated_initial_values():
    """Each part of a model draws its initial values from its own random key.

    With the same key, two parameters of one shape would be equal.
    """
    # An encoder and a decoder of two layers each, whose parameters have equal shapes.
    fields = {'shared_embeddings': False, 'num_encoder_layers': 2, 'context': 12}
    decoder = make_model(**{**BOTH, **fields})
    encoder = decoder.encoder
    attentions = [
        decoder.blocks.cross_attention,
        decoder.blocks.attention,
        encoder.blocks.attention,
    ]

    # The parameters of a family have one shape. The first axis of block parameters is the layer.
    queries_and_keys = []
    for attention in attentions:
        queries_and_keys += [*attention.score.w_q_DNH[...], *attention.score.w_k_DKH[...]]
    families = [
        queries_and_keys,
        [*decoder.blocks.mlp.w_in_DF[...], *encoder.blocks.mlp.w_in_DF[...]],
        [decoder.w_embedding_VD[...], encoder.w_embedding_VD[...]],
        [decoder.w_position_TD[...], encoder.w_position_TD[...]],
    ]
    for family in families:
        correlations = np.corrcoef([np.ravel(parameter) for parameter in family])
        between_two = np.triu(correlations, 1)  # each pair once
        assert np.abs(between_two).max() < 0.5


def test_logits_in_bfloat16_are_summed_in_float32():
    model = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), make_model(num_layers=1))
    x_BTD = jax.random.normal(jax.random.key(1), (2, 4, 16)).astype(jnp.bfloat16)
    got_BTV = model.logits(x_BTD)

    w_VD = model.w_embedding_VD[...].astype(jnp.float32)
    expected_BTV = x_BTD.astype(jnp.float32) @ w_VD.T
    assert got_BTV.dtype == jnp.float32
    np.testing.assert_allclose(got_BTV, expected_BTV, rtol=0, atol=2e-5)


@pytest.mark.parametrize('kernel', ['splash', 'dot_product'])
def test_a_model_for_inference_needs_no_library_kernel(kernel):
    """A run may name a kernel for the devices, lengths and dtype of its training.

    This row of 5 tokens with padding, on a CPU, has no kernel of a library.
    """
    config = config_of(kernel=kernel)
    model = make_model()
    params = nnx.to_pure_dict(nnx.state(model))
    inputs = {'tokens_BT': TOKENS[:, :5], 'valid_BT': np.arange(5)[None] < 4}
    got_BTV = logits_of(inference_model(config, params), **inputs)
    assert np.array_equal(got_BTV, logits_of(model, **inputs))


def test_a_model_for_inference_has_parameters_in_the_compute_dtype():
    params = nnx.to_pure_dict(nnx.state(make_model()))
    model = inference_model(config_of(compute_dtype='bfloat16'), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype('bfloat16')}


def test_the_layers_of_a_model_compute_what_its_blocks_compute():
    """`model.layers()` returns the attention of each layer as a separate `Attention`.

    These layers give the logits of the model if each runs in its block.
    """
    model = build(config_of(num_layers=3), rngs=nnx.Rngs(0))
    layers = model.layers()
    assert len(layers) == 3

    x_BTD = model.embed(TOKENS)
    for index, layer in enumerate(layers):
        # A gives logits, and B gives outputs: 2 heads, 16 channels of the stream.
        A_NDE, B_NDE = layer.matrix()
        assert A_NDE.shape == (2, 16, 16)
        assert B_NDE.shape == (2, 16, 16)

        # The first axis of all block parameters is the layer.
        block = jax.tree.map(operator.itemgetter(index), model.blocks)
        x_BTD = block.add_branch(layer, block.attention_norm, x_BTD)
        x_BTD = block.add_mlp(x_BTD)
    logits_BTV = model.logits(model.normed(x_BTD))
    np.testing.assert_allclose(logits_BTV, model(TOKENS), atol=1e-5)


@pytest.mark.parametrize('kind', ['no_kind', ['decoder'], None])
def test_an_unknown_kind_is_refused(kind):
    with pytest.raises(ConfigError, match='^model.kind=.* must be '):
        build(ModelConfig(kind=kind), key=jax.random.key(0))


def test_an_abstract_model_has_the_shapes_of_a_model():
    config = config_of(score='merged(init="product")', value='low_rank')
    abstract = abstract_model(config)
    model = build(config, key=jax.random.key(0))
    assert jax.tree.structure(abstract) == jax.tree.structure(model)
    abstract_leaves = jax.tree.leaves(abstract)
    for abstract_leaf, leaf in zip(abstract_leaves, jax.tree.leaves(model), strict=True):
        assert abstract_leaf.shape == leaf.shape
        assert abstract_leaf.dtype == leaf.dtype


def test_a_model_is_drawn_after_an_abstract_one():
    """The zeros of the abstract model are not left behind."""
    config = config_of()
    abstract_model(config)
    assert build(config, key=jax.random.key(0)).w_embedding_VD[...].std() > 0
