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
# Changes of GPT2 and LLAMA, each with settings that their layouts have beside the default ones.
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
    return np.asarray(jax.jit(lambda model: model(TOKENS))(with_params(config, params)))


def assert_close(logits, expected):
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


def llama_logits(directory):
    """The logits of a Llama in the layout of transformers, in float64 numpy."""
    description = json.loads((directory / 'config.json').read_text())
    p = {
        name: tensor.astype(np.float64)
        for name, tensor in load_file(directory / 'model.safetensors').items()
    }
    N = description['num_attention_heads']
    K = description['num_key_value_heads']
    H = description['head_dim']
    B, T = TOKENS.shape

    def linear(x, name):
        return x @ p[f'{name}.weight'].T + p.get(f'{name}.bias', 0)

    def norm(x, name):
        return (
            x
            / np.sqrt((x**2).mean(-1, keepdims=True) + description['rms_norm_eps'])
            * p[f'{name}.weight']
        )

    def rotate(x_BTNH):
        angle_TH = np.arange(T)[:, None] * description['rope_theta'] ** (-np.arange(0, H, 2) / H)
        angle_T1H = np.concatenate([angle_TH, angle_TH], -1)[:, None]
        left, right = np.split(x_BTNH, 2, -1)
        return x_BTNH * np.cos(angle_T1H) + np.concatenate([-right, left], -1) * np.sin(angle_T1H)

    def gate(x):
        if description['hidden_act'] == 'silu':
            return x / (1 + np.exp(-x))
        if description['hidden_act'] == 'relu':
            return np.maximum(x, 0)
        return np.asarray(jax.scipy.stats.norm.cdf(x)) * x

    x = p['model.embed_tokens.weight'][TOKENS]
    for layer in range(description['num_hidden_layers']):
        name = f'model.layers.{layer}'
        y = norm(x, f'{name}.input_layernorm')
        q = rotate(linear(y, f'{name}.self_attn.q_proj').reshape(B, T, N, H))
        k = rotate(linear(y, f'{name}.self_attn.k_proj').reshape(B, T, K, H))
        v = linear(y, f'{name}.self_attn.v_proj').reshape(B, T, K, H)
        k, v = (np.repeat(array, N // K, axis=2) for array in (k, v))
        weights = np.exp(np.einsum('btnh,bsnh->bnts', q, k) / np.sqrt(H)) * np.tri(T)
        weights /= weights.sum(-1, keepdims=True)
        heads = np.einsum('bnts,bsnh->btnh', weights, v).reshape(B, T, N * H)
        x = x + linear(heads, f'{name}.self_attn.o_proj')
        y = norm(x, f'{name}.post_attention_layernorm')
        hidden = gate(linear(y, f'{name}.mlp.gate_proj')) * linear(y, f'{name}.mlp.up_proj')
        x = x + linear(hidden, f'{name}.mlp.down_proj')
    output = p.get('lm_head.weight', p['model.embed_tokens.weight'])
    return norm(x, 'model.norm') @ output.T


@pytest.mark.parametrize('changes', slow_except(GPT2_VARIANTS[:1], GPT2_VARIANTS), ids=str)
def test_a_written_gpt2_is_read_with_equal_logits(tmp_path, changes):
    config = dataclasses.replace(GPT2, **changes)
    params = random_params(config)
    layout = transformers_layout.save(tmp_path, config, params)
    assert layout.name == 'GPT-2'
    read_config, read_params = load_gpt2(tmp_path)
    assert read_config.activation == config.activation
    assert read_config.tied_embeddings == config.tied_embeddings
    assert_close(logits_of(read_config, read_params), logits_of(config, params))


@pytest.mark.parametrize('changes', slow_except(LLAMA_VARIANTS[1:2], LLAMA_VARIANTS), ids=str)
def test_a_llama_has_the_logits_of_the_equations(tmp_path, changes):
    config = dataclasses.replace(LLAMA, **changes)
    params = random_params(config)
    layout = transformers_layout.save(tmp_path, config, params)
    assert layout.name == 'Llama'
    assert_close(logits_of(config, params), llama_logits(tmp_path))


@pytest.mark.parametrize(('config', 'architecture'), [(GPT2, 'GPT2'), (LLAMA, 'Llama')])
@pytest.mark.parametrize('number', range(3))
def test_transformers_computes_the_same_logits(tmp_path, config, architecture, number):
    transformers = pytest.importorskip('transformers', reason='pip install transformers torch')
    torch = pytest.importorskip('torch', reason='pip install torch')
    changes = (GPT2_VARIANTS if config is GPT2 else LLAMA_VARIANTS)[number]
    config = dataclasses.replace(config, **changes)
    params = random_params(config)
    transformers_layout.save(tmp_path, config, params)

    # transformers reads every tensor that we wrote, and misses none.
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, local_files_only=True
    )
    assert type(model).__name__.startswith(architecture)
    assert not loading['missing_keys']
    assert not loading['unexpected_keys']
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(TOKENS)).logits.numpy()
    assert_close(logits, logits_of(config, params))


@pytest.mark.parametrize(
    ('config', 'changes', 'message'),
    [
        (GPT2, {'kind': 'encoder'}, "model.kind='encoder' has no place in the layout of transf"),
        (GPT2, {'pattern': 'qk/vo,qk/no_v'}, "model.pattern='qk/vo,qk/no_v' has no place"),
        (GPT2, {'score': 'shared_qk'}, "model.score='shared_qk' .* score='qk'; --apply=to_stand"),
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
def test_a_setting_that_the_layout_of_transformers_lacks_is_named(
    tmp_path, config, changes, message
):
    config = dataclasses.replace(config, **changes)
    with refused(message):
        transformers_layout.save(tmp_path / 'out', config, {})
    assert not (tmp_path / 'out').exists()


TEXT = 'Zoë said: "naïve café"\n\t— 1 < 2; \x00é\r\n'
TOKENIZERS = {
    'bytes': (ByteTokenizer(), TEXT.replace('\0', '')),
    'characters': (CharacterTokenizer(''.join(sorted({*TEXT} - {'Z'}))), TEXT),
    'subwords': (BPETokenizer.train([TEXT.encode()] * 20, 275), TEXT.replace('\0', '')),
}


@pytest.mark.parametrize('name', TOKENIZERS)
def test_a_tokenizer_json_gives_the_same_ids(tmp_path, name):
    tokenizer, text = TOKENIZERS[name]
    config = dataclasses.replace(GPT2, vocab_size=tokenizer.vocab_size)
    transformers_layout.save(tmp_path, config, random_params(config), tokenizer)
    ids = tokenizer.encode(text).tolist()
    library = LibraryTokenizer.from_file(str(tmp_path / 'tokenizer.json'))
    assert library.encode(text, add_special_tokens=False).ids == ids
    if name != 'characters':  # whose unknown character is a token without text
        assert library.decode(ids, skip_special_tokens=False) == text
    description = json.loads((tmp_path / 'config.json').read_text())
    assert description['eos_token_id'] == tokenizer.separator


@pytest.mark.parametrize('name', TOKENIZERS)
def test_transformers_reads_the_tokenizer(tmp_path, name):
    transformers = pytest.importorskip('transformers', reason='pip install transformers torch')
    tokenizer, text = TOKENIZERS[name]
    config = dataclasses.replace(GPT2, vocab_size=tokenizer.vocab_size)
    transformers_layout.save(tmp_path, config, random_params(config), tokenizer)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    ids = tokenizer.encode(text).tolist()
    assert loaded(text, add_special_tokens=False)['input_ids'] == ids


def test_a_tokenizer_of_another_form_is_left_out(tmp_path):
    class Reversed(ByteTokenizer):
        def encode(self, text):
            return super().encode(text)[::-1]

    transformers_layout.save(tmp_path, GPT2, random_params(GPT2), Reversed())
    assert {path.name for path in tmp_path.iterdir()} == {'config.json', 'model.safetensors'}
