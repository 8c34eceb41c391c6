"""GPT-2 and nanoGPT files: the logits of the published equations, and files that do not fit."""

import dataclasses
import json
import math
import sys
import zipfile
from unittest.mock import Mock

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from qkattn.config import ModelConfig
from qkattn.convert.published import load_gpt2, load_nanogpt
from qkattn.errors import ConfigError
from qkattn.model import with_params
from tests.refusals import refused

D, N, L, F, T, V = 16, 2, 3, 48, 10, 29
TOKENS = np.random.default_rng(1).integers(0, V, (3, T))
SIZES = {'n_layer': L, 'n_head': N, 'n_embd': D, 'vocab_size': V}
DESCRIPTION = SIZES | {'model_type': 'gpt2', 'n_inner': F, 'n_positions': T}
ARGUMENTS = SIZES | {'block_size': T, 'dropout': 0.1, 'bias': True}


def make_tensors(*, biases=True, width=F):
    """Random GPT-2 tensors under their published names; gains near 1, nothing symmetrical."""
    rng = np.random.default_rng(0)
    tensors = {}
    shapes = {'wte': (V, D), 'wpe': (T, D), 'ln_f': (D,)}
    parts = {'ln_1': (D,), 'attn.c_attn': (D, 3 * D), 'attn.c_proj': (D, D)}
    parts |= {'ln_2': (D,), 'mlp.c_fc': (D, width), 'mlp.c_proj': (width, D)}
    shapes |= {f'h.{i}.{name}': shape for i in range(L) for name, shape in parts.items()}
    for name, shape in shapes.items():
        gain = 'ln_' in name
        tensors[f'{name}.weight'] = np.float32(gain + 0.3 * rng.standard_normal(shape))
        if biases and name not in ('wte', 'wpe'):
            tensors[f'{name}.bias'] = np.float32(0.3 * rng.standard_normal(shape[-1]))
    return tensors


def forward(tensors, *, exact_gelu=False):
    """Logits of Radford et al. 2019 in float64 numpy; biases that are absent are zero."""
    p = {name: np.asarray(t, np.float64) for name, t in tensors.items()}

    def affine(x, name):
        return x @ p[f'{name}.weight'] + p.get(f'{name}.bias', 0)

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * p[f'{name}.weight'] + p.get(f'{name}.bias', 0)

    def gelu(x):
        erf = np.vectorize(math.erf)(x / math.sqrt(2))
        tanh = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
        return 0.5 * x * (1 + (erf if exact_gelu else tanh))

    def attend(q, k, v):
        p_BTS = np.exp(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])) * np.tri(T)
        return p_BTS / p_BTS.sum(-1, keepdims=True) @ v

    x_BTD = p['wte.weight'][TOKENS] + p['wpe.weight']
    for h in (f'h.{i}' for i in range(L)):
        qkv = np.split(affine(norm(x_BTD, f'{h}.ln_1'), f'{h}.attn.c_attn'), 3, -1)
        heads = zip(*(np.split(a, N, -1) for a in qkv), strict=True)
        o_BTD = np.concatenate([attend(*head) for head in heads], -1)
        x_BTD = x_BTD + affine(o_BTD, f'{h}.attn.c_proj')
        hidden = gelu(affine(norm(x_BTD, f'{h}.ln_2'), f'{h}.mlp.c_fc'))
        x_BTD = x_BTD + affine(hidden, f'{h}.mlp.c_proj')
    return norm(x_BTD, 'ln_f') @ p.get('lm_head.weight', p['wte.weight']).T


def write_gpt2(directory, tensors, **described):
    """A GPT-2 in the Hugging Face layout."""
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / 'model.safetensors')
    (directory / 'config.json').write_text(json.dumps(DESCRIPTION | described))
    return directory


def as_nanogpt(tensors, prefix='_orig_mod.'):
    """The tensors as nanoGPT names them under torch.compile.

    Linear layers are transposed, the embedding has a second name, and layer 0 has its causal mask.
    """
    named = {f'{prefix}lm_head.weight': tensors['wte.weight']}
    for name, tensor in tensors.items():
        turned = '.c_' in name and name.endswith('weight')
        named[f'{prefix}transformer.{name}'] = tensor.T.copy() if turned else tensor
    named[f'{prefix}transformer.h.0.attn.bias'] = np.tril(np.ones((1, 1, T, T), np.float32))
    return named


def assert_logits(loaded, expected):
    logits = jax.jit(lambda model: model(TOKENS))(with_params(*loaded))
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize('tied', [True, False])
def test_a_gpt2_has_the_logits_of_the_equations(tmp_path, tied):
    tensors = make_tensors()
    head = np.random.default_rng(2).normal(size=(V, D)).astype(np.float32)
    tensors |= {} if tied else {'lm_head.weight': head}
    named = {f'transformer.{name}': t for name, t in tensors.items()}
    # A mask, which published files hold and which is no parameter.
    named['transformer.h.0.attn.bias'] = np.tril(np.ones((1, 1, T, T), np.uint8))
    loaded = load_gpt2(write_gpt2(tmp_path, named, tie_word_embeddings=tied))
    sizes = {'d_model': D, 'num_heads': N, 'num_layers': L, 'd_ff': F, 'context': T}
    assert loaded[0] == ModelConfig(**sizes, vocab_size=V, biases=True, tied_embeddings=tied)
    assert_logits(loaded, forward(tensors))


def test_a_gpt2_may_have_the_exact_gelu(tmp_path):
    tensors = make_tensors()
    loaded = load_gpt2(write_gpt2(tmp_path, tensors, activation_function='gelu'))
    assert loaded[0].activation == 'gelu'
    assert_logits(loaded, forward(tensors, exact_gelu=True))


@pytest.mark.parametrize(('prefix', 'biases'), [('_orig_mod.', False), ('module.', True)])
def test_a_nanogpt_has_the_logits_of_the_equations(prefix, biases):
    tensors = make_tensors(biases=biases, width=4 * D)
    loaded = load_nanogpt(as_nanogpt(tensors, prefix), num_heads=N)
    assert (loaded[0].biases, loaded[0].tied_embeddings, loaded[0].num_layers) == (biases, True, L)
    assert_logits(loaded, forward(tensors, exact_gelu=True))
    with pytest.raises(AssertionError):  # the two forms of GELU are told apart
        assert_logits(loaded, forward(tensors))


def test_tensors_files_and_shards_give_the_same_model(tmp_path):
    tensors = make_tensors(width=4 * D)
    named = as_nanogpt(tensors)
    expected = load_gpt2(tensors, num_heads=N)

    def assert_same_parameters(loaded):
        jax.tree.map(np.testing.assert_array_equal, loaded[1], expected[1])

    gpt2 = tmp_path / 'gpt2.safetensors'
    nanogpt = tmp_path / 'nano.safetensors'
    save_file(tensors, gpt2)
    save_file(named, nanogpt)
    for load, source in ((load_gpt2, gpt2), (load_nanogpt, named), (load_nanogpt, nanogpt)):
        with pytest.raises(ConfigError, match='--num_heads=N of convert .* is required'):
            load(source)
        assert_same_parameters(load(source, num_heads=N))

    # A checkpoint of nanoGPT has the sizes in model_args, and the exact GELU.
    checkpoint = load_nanogpt({'model': named, 'model_args': ARGUMENTS, 'iter_num': 7})
    assert_same_parameters(checkpoint)
    assert checkpoint[0] == dataclasses.replace(expected[0], activation='gelu')

    # A GPT-2 in two files, with an index that says which tensor is in which.
    parts = {name: f'part-{i % 2}.safetensors' for i, name in enumerate(sorted(tensors))}
    for file in set(parts.values()):
        save_file({n: t for n, t in tensors.items() if parts[n] == file}, tmp_path / file)
    index = tmp_path / 'model.safetensors.index.json'
    index.write_text(json.dumps({'weight_map': parts}))
    (tmp_path / 'config.json').write_text(json.dumps(DESCRIPTION | {'n_inner': None}))
    assert_same_parameters(load_gpt2(tmp_path))


def test_a_torch_checkpoint_is_read(tmp_path):
    torch = pytest.importorskip('torch', reason='torch is optional; only .pt files need it')
    named = as_nanogpt(make_tensors(width=4 * D))
    narrow = {n: torch.from_numpy(t.copy()).bfloat16() for n, t in named.items()}
    torch.save({'model': narrow, 'model_args': ARGUMENTS}, tmp_path / 'ckpt.pt')
    embedding = load_nanogpt(tmp_path / 'ckpt.pt')[1]['w_embedding_VD']
    np.testing.assert_array_equal(embedding, narrow['_orig_mod.lm_head.weight'].float().numpy())


INDEX_OF_A_FILE_ELSEWHERE = {'wte.weight': '../other/model.safetensors'}


def add_tensor(name, shape, dtype=np.float32):
    """A damage that sets a tensor to zeros of this shape."""
    return lambda tensors: tensors.update({name: np.zeros(shape, dtype)})


def test_a_gpt2_with_a_wrong_tensor_or_config_is_refused(tmp_path):
    # A damage is a function that changes the tensors, or fields of config.json.
    for damage, message in (
        (lambda tensors: tensors.pop('wpe.weight'), "tensor 'wpe.weight' is missing"),
        (add_tensor('h.0.x', (8,)), "'h.0.x' does not belong to a GPT-2 with"),
        (add_tensor('h.1.attn.c_attn.weight', (48, 16)), r'c_attn.* \(48, 16\), not \(16, 48\)'),
        (add_tensor('wte.weight', (V, D), np.float64), "'wte.weight' is of float64"),
        (lambda tensors: tensors['wpe.weight'].fill(np.nan), "'wpe.weight' has values that are"),
        (add_tensor('lm_head.weight', (V, D)), "'lm_head.weight' differs from 'wte.weight'"),
        (add_tensor('transformer.ln_f.bias', (D,)), "'ln_f.bias' occurs twice"),
        ({'n_layer': 4}, 'n_layer=4 .* num_layers=3'),
        ({'n_inner': None}, 'n_inner=64 .* mlp_width=48'),
        ({'n_head': 3}, 'd_model=16 must be a multiple of num_heads=3'),
        ({'n_head': 0}, 'num_heads=0 must be at least 1'),
        ({'n_head': [2]}, r'num_heads=\[2\] must be of type int'),
        ({'n_embd': None, 'n_inner': None}, 'n_embd=None does not fit .* d_model=16'),
        (add_tensor('h.99999999999.ln_1.weight', (D,)), "'h.3.ln_1.weight' is missing"),
        ({'activation_function': 'silu'}, "activation_function='silu' is not supported, only 'ge"),
        ({'model_type': 'gptj'}, "model_type='gptj'"),
    ):
        tensors = make_tensors()
        fields = {}
        if callable(damage):
            damage(tensors)
        else:
            fields = damage
        with refused(message):
            load_gpt2(write_gpt2(tmp_path, tensors, **fields))


def check_refused(message, source, load=load_gpt2, **options):
    with refused(message):
        load(source, **options)


def test_a_directory_without_a_readable_config_and_tensors_is_refused(tmp_path):
    check_refused(r'config\.json cannot be read', tmp_path)
    for text, message in (('[]', r'config\.json cannot be read'), ('{"n_inner": null}', 'n_head')):
        (tmp_path / 'config.json').write_text(text)
        save_file(make_tensors(), tmp_path / 'model.safetensors')
        check_refused(message, tmp_path)
    weights = write_gpt2(tmp_path, make_tensors()) / 'model.safetensors'
    check_refused('n_head=2 .* num_heads=4', tmp_path, num_heads=4)
    weights.write_bytes(weights.read_bytes()[:1000])
    check_refused(r'model\.safetensors cannot be read as safetensors', tmp_path)


def test_narrow_floats_are_widened_exactly(tmp_path):
    narrow = {name: t.astype(ml_dtypes.bfloat16) for name, t in make_tensors().items()}
    embedding_VD = load_gpt2(write_gpt2(tmp_path, narrow))[1]['w_embedding_VD']
    np.testing.assert_array_equal(embedding_VD, narrow['wte.weight'].astype(np.float32))


@pytest.mark.parametrize(
    ('wrong', 'message'),
    [
        ({'block_size': 11}, 'block_size=11 .* context=10'),
        ({'use_rmsnorm': True}, 'use_rmsnorm=True is not an argument of nanoGPT'),
    ],
)
def test_a_wrong_argument_of_nanogpt_is_named(wrong, message):
    named = as_nanogpt(make_tensors(width=4 * D))
    check_refused(message, {'model': named, 'model_args': ARGUMENTS | wrong}, load_nanogpt)


@pytest.mark.parametrize(
    'files',
    [
        None,
        ['a.safetensors'],
        {'wte.weight': 3},
        {'wte.weight': '/etc/passwd'},
        INDEX_OF_A_FILE_ELSEWHERE,
    ],
    ids=str,
)
def test_an_index_names_files_beside_it(files, tmp_path):
    index = tmp_path / 'model.safetensors.index.json'
    index.write_text(json.dumps({'weight_map': files}))
    (tmp_path / 'config.json').write_text(json.dumps(DESCRIPTION))
    check_refused(r'index\.json: weight_map=.* must name a \.safetensors file', tmp_path)


def test_a_wrong_torch_checkpoint_is_named(monkeypatch, tmp_path):
    named = as_nanogpt(make_tensors(width=4 * D))
    torch = Mock()
    path = tmp_path / 'ckpt.pt'
    monkeypatch.setitem(sys.modules, 'torch', torch)
    path.touch()
    # What torch loads from the file, and what the refusal says.
    for content, message in (
        ({'model': named, 'model_args': [1, 2]}, r'model_args=\[1, 2\] must be a dictionary'),
        ({'model': [1], 'model_args': ARGUMENTS}, "'model': a list is not a tensor by name"),
        ({'model': named | {'iter_num': 3}}, "'iter_num': a int is not a tensor by name"),
        ({3: named['_orig_mod.lm_head.weight']}, '3: a ndarray is not a tensor by name'),
        ([1], 'a list is not a dictionary of tensors'),
    ):
        torch.load.return_value = content
        check_refused(message, path, load_nanogpt)
    # torch cannot load the file.
    torch.load.side_effect = KeyError
    message = 'ckpt.pt cannot be read as a torch checkpoint: KeyError'
    check_refused(message, path, load_nanogpt)


def test_a_torch_checkpoint_needs_torch(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, 'torch', None)
    (tmp_path / 'ckpt.pt').touch()
    message = r'ckpt\.pt can only be read with torch'
    check_refused(message, tmp_path / 'ckpt.pt', load_nanogpt)


def test_sizes_in_weights_are_compared_with_their_file(tmp_path, monkeypatch):
    """A small file that claims to hold much more is refused before memory is taken for it."""
    # The header of a safetensors file with 4 bytes of data claims 10^12 numbers.
    header = {'wte.weight': {'dtype': 'F32', 'shape': [10**9, 10**3], 'data_offsets': [0, 4]}}
    text = json.dumps(header).encode()
    (tmp_path / 'a.safetensors').write_bytes(len(text).to_bytes(8, 'little') + text + bytes(4))
    with refused('a.safetensors cannot be read as safetensors'):
        load_gpt2(tmp_path / 'a.safetensors', num_heads=2)

    # A torch checkpoint, a zip file, is compressed to much less than it unpacks to.
    torch = Mock()
    monkeypatch.setitem(sys.modules, 'torch', torch)
    with zipfile.ZipFile(tmp_path / 'a.pt', 'w', zipfile.ZIP_DEFLATED) as archive:
        archive.writestr('a/data/0', bytes(10**6))
    with refused('a.pt cannot be read as a torch checkpoint: it unpacks to 1,000,000 bytes, more'):
        load_nanogpt(tmp_path / 'a.pt', num_heads=2)
    assert not torch.load.called

    # A tensor repeats its only stored number 10^12 times, with strides of 0.
    spread = Mock(dtype='torch.float32', shape=(10**6, 10**6))
    spread.numel.return_value = 10**12
    spread.element_size.return_value = 4
    spread.untyped_storage.return_value.nbytes.return_value = 4
    (tmp_path / 'b.pt').touch()
    torch.load.return_value = {'wte.weight': spread}
    with refused("'wte.weight' has shape .1000000, 1000000., but fewer stored numbers"):
        load_nanogpt(tmp_path / 'b.pt', num_heads=2)
    assert not spread.detach.called
