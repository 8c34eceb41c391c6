"""Models in the layout of transformers: the logits of its equations, and what has no layout."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx, traverse_util
from safetensors.numpy import load_file
from tokenizers import Tokenizer as LibraryTokenizer

from qkattn.config import ModelConfig
from qkattn.convert import transformers_layout
from qkattn.convert.published import load_gpt2
from qkattn.data.tokenizers.subwords import BPETokenizer
from qkattn.data.tokenizers.tokenizer import ByteTokenizer, CharacterTokenizer
from qkattn.model import build, with_params
from tests.lanes import slow_except
from tests.refusals import refused

SIZES = {'d_model': 24, 'num_layers': 3, 'num_heads': 4, 'context': 12, 'vocab_size': 29}
GPT2 = ModelConfig(**SIZES)
LLAMA = ModelConfig(**SIZES, norm='rmsnorm', positions='rope', activation='swiglu')
TOKENS = np.random.default_rng(1).integers(0, SIZES['vocab_size'], (3, SIZES['context']))
# Changes of GPT2 and LLAMA to other settings that their layouts allow.
GPT2_VARIANTS = [
    {'biases': True},
    {'tied_embeddings': False, 'activation': 'gelu', 'score_scale': 0.7},
    {'attention_gain': False, 'activation': 'relu', 'd_ff': 40, 'window': 12},
]
LLAMA_VARIANTS = [
    {},
    {'num_kv_heads': 2, 'head_size': 8, 'tied_embeddings': False, 'score_scale': 1.5},
    {'biases': True, 'activation': 'geglu'},
    {'num_kv_heads': 1, 'attention_gain': False, 'activation': 'reglu'},
]


def random_params(config):
    """Parameters without symmetry: random biases, and gains that differ from 1."""
    rng = np.random.default_rng(0)
    params = nnx.to_pure_dict(nnx.state(build(config, key=jax.random.key(0))))
    flat = traverse_util.flatten_dict(params)
    for path, leaf in flat.items():
        noise = 0.3 * rng.standard_normal(leaf.shape)
        flat[path] = np.asarray(leaf + noise, np.float32)
    return traverse_util.unflatten_dict(flat)


def logits_of(config, params):
    compute_logits = jax.jit(lambda model: model(TOKENS))
    return np.asarray(compute_logits(with_params(config, params)))


def assert_close(logits, expected):
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


def rms_norm(x, gain, *, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain


def rotary(x_BTNH, *, theta):
    """Rotates channels h and h + H / 2 of position t by t * theta^(-2 h / H)."""
    _, T, _, H = x_BTNH.shape
    frequencies = theta ** (-2 * np.arange(H // 2) / H)
    angles = np.arange(T)[:, None, None] * frequencies
    cos = np.cos(angles)
    sin = np.sin(angles)
    left, right = np.split(x_BTNH, 2, axis=-1)
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def causal_attention(q_BTNH, k_BTKH, v_BTKH):
    """Softmax attention in which groups of query heads share one of K key heads."""
    _, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    k_BTNH = np.repeat(k_BTKH, N // K, axis=2)
    v_BTNH = np.repeat(v_BTKH, N // K, axis=2)
    logits_BNTS = np.einsum('btnh,bsnh->bnts', q_BTNH, k_BTNH) / np.sqrt(H)
    p_BNTS = np.exp(logits_BNTS) * np.tri(T)
    p_BNTS /= p_BNTS.sum(-1, keepdims=True)
    return np.einsum('bnts,bsnh->btnh', p_BNTS, v_BTNH)


def silu(x):
    return x / (1 + np.exp(-x))


def relu(x):
    return np.maximum(x, 0)


def gelu(x):
    return x * np.asarray(jax.scipy.stats.norm.cdf(x))


def llama_logits(directory):
    """The logits of a Llama for TOKENS in float64 numpy, from the files of transformers.

    There are N query heads of size H, which share K key and value heads.
    """
    settings = json.loads((directory / 'config.json').read_text())
    tensors = load_file(directory / 'model.safetensors')
    p = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    N = settings['num_attention_heads']
    K = settings['num_key_value_heads']
    H = settings['head_dim']
    B, T = TOKENS.shape
    activation = {'silu': silu, 'relu': relu, 'gelu': gelu}[settings['hidden_act']]

    def linear(x, name):
        return x @ p[f'{name}.weight'].T + p.get(f'{name}.bias', 0)

    def norm(x, name):
        return rms_norm(x, p[f'{name}.weight'], eps=settings['rms_norm_eps'])

    x = p['model.embed_tokens.weight'][TOKENS]
    for layer in range(settings['num_hidden_layers']):
        # Attention with rotary positions.
        attention = f'model.layers.{layer}.self_attn'
        y = norm(x, f'model.layers.{layer}.input_layernorm')
        q = linear(y, f'{attention}.q_proj').reshape(B, T, N, H)
        k = linear(y, f'{attention}.k_proj').reshape(B, T, K, H)
        v = linear(y, f'{attention}.v_proj').reshape(B, T, K, H)
        q = rotary(q, theta=settings['rope_theta'])
        k = rotary(k, theta=settings['rope_theta'])
        heads = causal_attention(q, k, v).reshape(B, T, N * H)
        x = x + linear(heads, f'{attention}.o_proj')

        # A gated MLP.
        mlp = f'model.layers.{layer}.mlp'
        y = norm(x, f'model.layers.{layer}.post_attention_layernorm')
        gate = activation(linear(y, f'{mlp}.gate_proj'))
        up = linear(y, f'{mlp}.up_proj')
        x = x + linear(gate * up, f'{mlp}.down_proj')

    # A tied model uses its embedding as the output matrix.
    w_output_VD = p.get('lm_head.weight', p['model.embed_tokens.weight'])
    return norm(x, 'model.norm') @ w_output_VD.T


@pytest.mark.parametrize('changes', slow_except(GPT2_VARIANTS[:1], GPT2_VARIANTS), ids=str)
def test_a_written_gpt2_is_read_with_equal_logits(tmp_path, changes):
    """A model is saved in the layout of transformers, and then read by `load_gpt2`."""
    config = dataclasses.replace(GPT2, **changes)
    params = random_params(config)

    layout = transformers_layout.save(tmp_path, config, params)
    read_config, read_params = load_gpt2(tmp_path)

    assert layout.name == 'GPT-2'
    assert read_config.activation == config.activation
    assert read_config.tied_embeddings == config.tied_embeddings
    # Other settings may differ: the file of a model without biases has biases of 0.
    assert_close(logits_of(read_config, read_params), logits_of(config, params))


@pytest.mark.parametrize('changes', slow_except(LLAMA_VARIANTS[1:2], LLAMA_VARIANTS), ids=str)
def test_a_llama_has_the_logits_of_the_equations(tmp_path, changes):
    config = dataclasses.replace(LLAMA, **changes)
    params = random_params(config)

    layout = transformers_layout.save(tmp_path, config, params)

    assert layout.name == 'Llama'
    assert_close(logits_of(config, params), llama_logits(tmp_path))


GPT2_CASES = [pytest.param(GPT2, fields, 'GPT2', id=f'GPT2-{fields}') for fields in GPT2_VARIANTS]
LLAMA_CASES = [
    pytest.param(LLAMA, fields, 'Llama', id=f'Llama-{fields}') for fields in LLAMA_VARIANTS[:3]
]


@pytest.mark.parametrize(('config', 'changes', 'architecture'), GPT2_CASES + LLAMA_CASES)
def test_transformers_computes_the_same_logits(tmp_path, config, changes, architecture):
    """The package transformers loads a saved model as its own GPT-2 or Llama."""
    transformers = pytest.importorskip('transformers', reason='pip install transformers torch')
    torch = pytest.importorskip('torch', reason='pip install torch')
    config = dataclasses.replace(config, **changes)
    params = random_params(config)
    transformers_layout.save(tmp_path, config, params)

    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, local_files_only=True
    )
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(TOKENS)).logits.numpy()

    # The class is, for example, GPT2LMHeadModel.
    assert type(model).__name__.startswith(architecture)
    # The file has all parameters of the model, and no other.
    assert not loading['missing_keys']
    assert not loading['unexpected_keys']
    assert_close(logits, logits_of(config, params))


@pytest.mark.parametrize(
    ('config', 'changes', 'message'),
    [
        (
            GPT2,
            {'kind': 'encoder'},
            "model.kind='encoder' has no place in the layout of transformers",
        ),
        (GPT2, {'pattern': 'qk/vo,qk/no_v'}, "model.pattern='qk/vo,qk/no_v' has no place"),
        (
            GPT2,
            {'score': 'shared_qk'},
            "model.score='shared_qk' .* score='qk'; --apply=to_standard",
        ),
        (LLAMA, {'value': 'no_v'}, "model.value='no_v' has no place .* a Llama has value='vo'"),
        (GPT2, {'normalizer': 'sigmoid'}, "normalizer='sigmoid' has no place"),
        (GPT2, {'positions': 'alibi'}, "positions='alibi' .* positions='learned' or 'rope'"),
        (GPT2, {'norm': 'rmsnorm'}, "norm='rmsnorm' has no place .* a GPT-2 has norm='layernorm'"),
        (LLAMA, {'norm': 'layernorm'}, "norm='layernorm' .* a Llama has norm='rmsnorm'"),
        (GPT2, {'norm_position': 'post'}, "norm_position='post' has no place"),
        (LLAMA, {'activation': 'gelu'}, "activation='gelu' .* activation='swiglu' or 'geglu'"),
        (GPT2, {'num_kv_heads': 2}, 'num_kv_heads=2 has no place .* --apply=gqa_to_mha'),
        (GPT2, {'head_size': 8}, 'head_size=8 has no place .* head_size=None or 6'),
        (LLAMA, {'qk_norm': True}, 'qk_norm=True has no place'),
        (LLAMA, {'logit_cap': 30.0}, 'logit_cap=30.0 has no place'),
        (LLAMA, {'window': 4}, 'window=4 has no place'),
        (LLAMA, {'scale_embeddings': True}, 'scale_embeddings=True has no place'),
        (LLAMA, {'d_model': 22, 'head_size': 6}, 'd_model=22 must be a multiple of num_heads=4'),
    ],
)
def test_a_setting_that_transformers_lacks_is_refused(tmp_path, config, changes, message):
    config = dataclasses.replace(config, **changes)

    with refused(message):
        transformers_layout.save(tmp_path / 'out', config, {})

    assert not (tmp_path / 'out').exists()


TEXT = 'Zoë said: "naïve café"\n\t— 1 < 2; \x00é\r\n'
TEXT_WITHOUT_NUL = TEXT.replace('\0', '')
# The Z is an unknown character.
CHARACTERS = ''.join(sorted(set(TEXT) - {'Z'}))
# Sub-words end at '\n', so ' \n' and '\r\n' are learned, although other text follows them.
LINES = 'a \nb\r\nc'
TOKENIZERS_AND_TEXTS = [
    pytest.param(ByteTokenizer(), TEXT_WITHOUT_NUL, id='bytes'),
    pytest.param(CharacterTokenizer(CHARACTERS), TEXT, id='characters'),
    pytest.param(BPETokenizer.train([TEXT.encode()] * 20, 275), TEXT_WITHOUT_NUL, id='subwords'),
    pytest.param(BPETokenizer.train([LINES.encode()] * 20, 259), LINES, id='subwords of lines'),
]


@pytest.mark.parametrize(('tokenizer', 'text'), TOKENIZERS_AND_TEXTS)
def test_a_tokenizer_json_gives_the_same_ids(tmp_path, tokenizer, text):
    """A tokenizer is saved with the model, in the format of the package tokenizers."""
    config = dataclasses.replace(GPT2, vocab_size=tokenizer.vocab_size)
    ids = tokenizer.encode(text).tolist()

    transformers_layout.save(tmp_path, config, random_params(config), tokenizer)

    library_tokenizer = LibraryTokenizer.from_file(str(tmp_path / 'tokenizer.json'))
    assert library_tokenizer.encode(text, add_special_tokens=False).ids == ids
    # The tokenizer of characters does not know the 'Z' of the text, so it cannot decode it.
    if not isinstance(tokenizer, CharacterTokenizer):
        assert library_tokenizer.decode(ids, skip_special_tokens=False) == text

    # transformers calls the separator of documents `eos`, the end of a sequence.
    settings = json.loads((tmp_path / 'config.json').read_text())
    assert settings['eos_token_id'] == tokenizer.separator


@pytest.mark.parametrize(('tokenizer', 'text'), TOKENIZERS_AND_TEXTS)
def test_transformers_reads_the_tokenizer(tmp_path, tokenizer, text):
    transformers = pytest.importorskip('transformers', reason='pip install transformers torch')
    config = dataclasses.replace(GPT2, vocab_size=tokenizer.vocab_size)
    ids = tokenizer.encode(text).tolist()

    transformers_layout.save(tmp_path, config, random_params(config), tokenizer)

    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert loaded(text, add_special_tokens=False)['input_ids'] == ids


def test_a_tokenizer_of_another_form_is_left_out(tmp_path):
    class ReversedTokenizer(ByteTokenizer):
        def encode(self, text):
            return super().encode(text)[::-1]

    transformers_layout.save(tmp_path, GPT2, random_params(GPT2), ReversedTokenizer())

    files = {path.name for path in tmp_path.iterdir()}
    assert files == {'config.json', 'model.safetensors'}
