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

# d_model, heads, layers, MLP width, context, vocabulary
D, N, L, F, T, V = 16, 2, 3, 48, 10, 29
TOKENS = np.random.default_rng(1).integers(0, V, (3, T))
SIZES = {'n_layer': L, 'n_head': N, 'n_embd': D, 'vocab_size': V}
DESCRIPTION = SIZES | {'model_type': 'gpt2', 'n_inner': F, 'n_positions': T}
ARGUMENTS = SIZES | {'block_size': T, 'dropout': 0.1, 'bias': True}


def make_tensors(*, biases=True, mlp_width=F):
    """Random float32 tensors of a small GPT-2, by their names in the files of Hugging Face.

    D is d_model, L is the number of layers, V is the size of the vocabulary, T is the context. The
    gains of the norms are near 1.
    """
    # Token embeddings, position embeddings, and the final norm.
    shapes = {'wte': (V, D), 'wpe': (T, D), 'ln_f': (D,)}
    for layer in range(L):
        shapes[f'h.{layer}.ln_1'] = (D,)
        shapes[f'h.{layer}.attn.c_attn'] = (D, 3 * D)  # queries, keys and values
        shapes[f'h.{layer}.attn.c_proj'] = (D, D)
        shapes[f'h.{layer}.ln_2'] = (D,)
        shapes[f'h.{layer}.mlp.c_fc'] = (D, mlp_width)
        shapes[f'h.{layer}.mlp.c_proj'] = (mlp_width, D)

    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in shapes.items():
        mean = 1 if 'ln_' in name else 0
        is_embedding = name in ('wte', 'wpe')
        tensors[f'{name}.weight'] = np.float32(mean + 0.3 * rng.standard_normal(shape))
        if biases and not is_embedding:
            tensors[f'{name}.bias'] = np.float32(0.3 * rng.standard_normal(shape[-1]))
    return tensors


def gelu(x, *, exact):
    if exact:
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def causal_attention(q_BTH, k_BTH, v_BTH):
    H = q_BTH.shape[-1]
    logits_BTS = q_BTH @ k_BTH.swapaxes(-1, -2) / math.sqrt(H)
    p_BTS = np.exp(logits_BTS) * np.tri(T)
    p_BTS /= p_BTS.sum(-1, keepdims=True)
    return p_BTS @ v_BTH


def gpt2_logits(tensors, *, exact_gelu=False):
    """The logits of a GPT-2 (Radford et al. 2019) for TOKENS, in float64 numpy.

    Args:
        tensors: The tensors of `make_tensors`. A model without 'lm_head.weight' is tied: its
            output matrix is the embedding.
        exact_gelu: True for the GELU with erf, and False for its approximation with tanh.
    """
    p = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}

    def linear(x, name):
        return x @ p[f'{name}.weight'] + p.get(f'{name}.bias', 0)

    def norm(x, name):
        centered = x - x.mean(-1, keepdims=True)
        normed = centered / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return normed * p[f'{name}.weight'] + p.get(f'{name}.bias', 0)

    x_BTD = p['wte.weight'][TOKENS] + p['wpe.weight']
    for layer in range(L):
        block = f'h.{layer}'

        # Attention: each of the N heads has its own slice of q, k and v.
        normed_BTD = norm(x_BTD, f'{block}.ln_1')
        qkv = linear(normed_BTD, f'{block}.attn.c_attn')
        q, k, v = np.split(qkv, 3, axis=-1)
        outputs = []
        for head in range(N):
            q_BTH = np.split(q, N, axis=-1)[head]
            k_BTH = np.split(k, N, axis=-1)[head]
            v_BTH = np.split(v, N, axis=-1)[head]
            outputs.append(causal_attention(q_BTH, k_BTH, v_BTH))
        attention_BTD = np.concatenate(outputs, axis=-1)
        x_BTD = x_BTD + linear(attention_BTD, f'{block}.attn.c_proj')

        # MLP.
        normed_BTD = norm(x_BTD, f'{block}.ln_2')
        h_BTF = linear(normed_BTD, f'{block}.mlp.c_fc')
        x_BTD = x_BTD + linear(gelu(h_BTF, exact=exact_gelu), f'{block}.mlp.c_proj')

    w_output_VD = p.get('lm_head.weight', p['wte.weight'])
    return norm(x_BTD, 'ln_f') @ w_output_VD.T


def write_gpt2(directory, tensors, **settings):
    """Writes a GPT-2 in the Hugging Face layout. `settings` change its config.json."""
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / 'model.safetensors')
    (directory / 'config.json').write_text(json.dumps(DESCRIPTION | settings))
    return directory


def causal_mask(dtype):
    return np.tril(np.ones((1, 1, T, T), dtype))


def as_nanogpt(tensors, prefix='_orig_mod.'):
    """The same model as nanoGPT saves it, which differs from a GPT-2 file in four ways.

    Each name has a prefix. The default '_orig_mod.' is the prefix that torch.compile adds. The
    weights of linear layers are transposed. The embedding is saved twice, because it is also the
    output matrix. The causal mask of layer 0 is saved as 'attn.bias', although it is no parameter.
    """
    nanogpt = {f'{prefix}lm_head.weight': tensors['wte.weight']}
    for name, tensor in tensors.items():
        # The linear layers are c_attn, c_proj and c_fc.
        is_linear_weight = '.c_' in name and name.endswith('weight')
        if is_linear_weight:
            tensor = tensor.T.copy()
        nanogpt[f'{prefix}transformer.{name}'] = tensor
    nanogpt[f'{prefix}transformer.h.0.attn.bias'] = causal_mask(np.float32)
    return nanogpt


def assert_logits(config, params, expected_logits):
    model = with_params(config, params)
    logits = jax.jit(lambda model: model(TOKENS))(model)
    largest = np.abs(expected_logits).max()
    np.testing.assert_allclose(logits, expected_logits, atol=1e-5 * largest)


@pytest.mark.parametrize('tied', [True, False])
def test_a_gpt2_has_the_logits_of_the_equations(tmp_path, tied):
    """A tied model uses its embedding as the output matrix. An untied one has `lm_head.weight`."""
    tensors = make_tensors()
    if not tied:
        head_VD = np.random.default_rng(2).normal(size=(V, D))
        tensors['lm_head.weight'] = head_VD.astype(np.float32)
    # Published names may have a prefix. A causal mask may be saved, which is no parameter.
    published = {f'transformer.{name}': tensor for name, tensor in tensors.items()}
    published['transformer.h.0.attn.bias'] = causal_mask(np.uint8)
    write_gpt2(tmp_path, published, tie_word_embeddings=tied)

    config, params = load_gpt2(tmp_path)

    # These are the sizes of the tensors of `make_tensors`.
    assert config == ModelConfig(
        d_model=D,
        num_heads=N,
        num_layers=L,
        d_ff=F,
        context=T,
        vocab_size=V,
        biases=True,
        tied_embeddings=tied,
    )
    assert_logits(config, params, gpt2_logits(tensors))


def test_a_gpt2_may_have_the_exact_gelu(tmp_path):
    tensors = make_tensors()
    write_gpt2(tmp_path, tensors, activation_function='gelu')

    config, params = load_gpt2(tmp_path)

    assert config.activation == 'gelu'
    assert_logits(config, params, gpt2_logits(tensors, exact_gelu=True))


@pytest.mark.parametrize(
    ('prefix', 'biases'),
    [
        pytest.param('_orig_mod.', False, id='torch.compile'),
        pytest.param('module.', True, id='DataParallel'),
    ],
)
def test_a_nanogpt_has_the_logits_of_the_equations(prefix, biases):
    """A nanoGPT is a GPT-2 with exact GELU, other names of tensors and transposed weights."""
    tensors = make_tensors(biases=biases, mlp_width=4 * D)
    nanogpt_tensors = as_nanogpt(tensors, prefix)

    config, params = load_nanogpt(nanogpt_tensors, num_heads=N)

    # The config is derived from the names and shapes of the tensors.
    assert config.biases == biases
    assert config.tied_embeddings
    assert config.num_layers == L

    assert_logits(config, params, gpt2_logits(tensors, exact_gelu=True))
    # The approximation of GELU with tanh gives other logits.
    with pytest.raises(AssertionError):
        assert_logits(config, params, gpt2_logits(tensors, exact_gelu=False))


def assert_same_parameters(params, expected_params):
    jax.tree.map(np.testing.assert_array_equal, params, expected_params)


def test_tensors_and_files_give_the_same_parameters(tmp_path):
    """The same model is loaded from dictionaries and files, in the GPT-2 and nanoGPT layouts."""
    tensors = make_tensors(mlp_width=4 * D)
    nanogpt_tensors = as_nanogpt(tensors)
    gpt2_file = tmp_path / 'gpt2.safetensors'
    nanogpt_file = tmp_path / 'nano.safetensors'
    save_file(tensors, gpt2_file)
    save_file(nanogpt_tensors, nanogpt_file)
    _, expected_params = load_gpt2(tensors, num_heads=N)

    for load, source in (
        (load_gpt2, gpt2_file),
        (load_nanogpt, nanogpt_tensors),
        (load_nanogpt, nanogpt_file),
    ):
        # The shapes of the tensors do not tell the number of heads.
        with pytest.raises(ConfigError, match='--num_heads=N of convert .* is required'):
            load(source)

        _, params = load(source, num_heads=N)
        assert_same_parameters(params, expected_params)


def test_a_nanogpt_checkpoint_has_its_sizes_in_model_args():
    tensors = make_tensors(mlp_width=4 * D)
    gpt2_config, gpt2_params = load_gpt2(tensors, num_heads=N)

    config, params = load_nanogpt(
        {'model': as_nanogpt(tensors), 'model_args': ARGUMENTS, 'iter_num': 7}
    )

    # nanoGPT has the exact GELU, and a GPT-2 by default its approximation with tanh.
    assert config == dataclasses.replace(gpt2_config, activation='gelu')
    assert_same_parameters(params, gpt2_params)


def test_a_gpt2_in_two_files_is_read_by_its_index(tmp_path):
    """The index model.safetensors.index.json names the file of each tensor."""
    tensors = make_tensors(mlp_width=4 * D)
    names = sorted(tensors)
    weight_map = {}
    for file, names_in_file in (('a.safetensors', names[::2]), ('b.safetensors', names[1::2])):
        tensors_in_file = {name: tensors[name] for name in names_in_file}
        save_file(tensors_in_file, tmp_path / file)
        weight_map |= dict.fromkeys(names_in_file, file)
    index = tmp_path / 'model.safetensors.index.json'
    index.write_text(json.dumps({'weight_map': weight_map}))
    # n_inner is the width of the MLP. None means 4 * n_embd.
    description = DESCRIPTION | {'n_inner': None}
    (tmp_path / 'config.json').write_text(json.dumps(description))

    _, params = load_gpt2(tmp_path)

    _, expected_params = load_gpt2(tensors, num_heads=N)
    assert_same_parameters(params, expected_params)


def test_a_torch_checkpoint_is_read(tmp_path):
    torch = pytest.importorskip('torch', reason='torch is optional; only .pt files need it')
    tensors = as_nanogpt(make_tensors(mlp_width=4 * D))
    bfloat16_tensors = {}
    for name, tensor in tensors.items():
        bfloat16_tensors[name] = torch.from_numpy(tensor.copy()).bfloat16()
    # nanoGPT saves the sizes of a model as 'model_args'.
    checkpoint = {'model': bfloat16_tensors, 'model_args': ARGUMENTS}
    torch.save(checkpoint, tmp_path / 'ckpt.pt')

    _, params = load_nanogpt(tmp_path / 'ckpt.pt')

    # lm_head.weight is also the embedding. float32 represents its bfloat16 numbers exactly.
    expected_VD = bfloat16_tensors['_orig_mod.lm_head.weight'].float().numpy()
    np.testing.assert_array_equal(params['w_embedding_VD'], expected_VD)


def zeros(shape, dtype=np.float32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ('name', 'tensor', 'message'),
    [
        ('h.0.x', zeros((8,)), "'h.0.x' does not belong to a GPT-2 with"),
        ('h.1.attn.c_attn.weight', zeros((48, 16)), r'c_attn.* \(48, 16\), not \(16, 48\)'),
        ('wte.weight', zeros((V, D), np.float64), "'wte.weight' is of float64"),
        ('wpe.weight', np.full((T, D), np.nan, np.float32), "'wpe.weight' has values that are"),
        ('lm_head.weight', zeros((V, D)), "'lm_head.weight' differs from 'wte.weight'"),
        ('transformer.ln_f.bias', zeros((D,)), "'ln_f.bias' occurs twice"),
        # Files have layers 0 to 2. With a much later layer, layer 3 is the first missing one.
        ('h.99999999999.ln_1.weight', zeros((D,)), "'h.3.ln_1.weight' is missing"),
    ],
)
def test_a_gpt2_with_a_wrong_tensor_is_refused(tmp_path, name, tensor, message):
    tensors = make_tensors()
    tensors[name] = tensor
    write_gpt2(tmp_path, tensors)

    with refused(message):
        load_gpt2(tmp_path)


def test_a_gpt2_without_one_of_its_tensors_is_refused(tmp_path):
    tensors = make_tensors()
    del tensors['wpe.weight']
    write_gpt2(tmp_path, tensors)

    with refused("tensor 'wpe.weight' is missing"):
        load_gpt2(tmp_path)


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'n_layer': 4}, 'n_layer=4 .* num_layers=3'),
        # None means 4 * n_embd = 64.
        ({'n_inner': None}, 'n_inner=64 .* mlp_width=48'),
        ({'n_head': 3}, 'd_model=16 must be a multiple of num_heads=3'),
        ({'n_head': 0}, 'num_heads=0 must be at least 1'),
        ({'n_head': [2]}, r'num_heads=\[2\] must be of type int'),
        ({'n_embd': None, 'n_inner': None}, 'n_embd=None does not fit .* d_model=16'),
        ({'activation_function': 'silu'}, "activation_function='silu' is not supported, only 'ge"),
        ({'model_type': 'gptj'}, "model_type='gptj'"),
    ],
)
def test_a_gpt2_with_a_wrong_config_json_is_refused(tmp_path, settings, message):
    write_gpt2(tmp_path, make_tensors(), **settings)

    with refused(message):
        load_gpt2(tmp_path)


def test_a_directory_without_a_readable_config_json_is_refused(tmp_path):
    config_file = tmp_path / 'config.json'

    # The directory is empty.
    with refused(r'config\.json cannot be read'):
        load_gpt2(tmp_path)

    # The file holds a JSON list, and not an object.
    write_gpt2(tmp_path, make_tensors())
    config_file.write_text('[]')
    with refused(r'config\.json cannot be read'):
        load_gpt2(tmp_path)


def test_a_config_json_without_the_number_of_heads_is_refused(tmp_path):
    write_gpt2(tmp_path, make_tensors())
    (tmp_path / 'config.json').write_text('{"n_inner": null}')

    # The shapes of the tensors do not tell the number of heads.
    with refused('n_head'):
        load_gpt2(tmp_path)


def test_a_number_of_heads_that_contradicts_config_json_is_refused(tmp_path):
    write_gpt2(tmp_path, make_tensors())

    with refused('n_head=2 .* num_heads=4'):
        load_gpt2(tmp_path, num_heads=4)


def test_a_truncated_safetensors_file_is_refused(tmp_path):
    write_gpt2(tmp_path, make_tensors())
    weights = tmp_path / 'model.safetensors'
    weights.write_bytes(weights.read_bytes()[:1000])

    with refused(r'model\.safetensors cannot be read as safetensors'):
        load_gpt2(tmp_path)


def test_narrow_floats_are_widened_exactly(tmp_path):
    tensors = {}
    for name, tensor in make_tensors().items():
        tensors[name] = tensor.astype(ml_dtypes.bfloat16)
    write_gpt2(tmp_path, tensors)

    _, params = load_gpt2(tmp_path)

    expected_VD = tensors['wte.weight'].astype(np.float32)
    np.testing.assert_array_equal(params['w_embedding_VD'], expected_VD)


@pytest.mark.parametrize(
    ('wrong_argument', 'message'),
    [
        ({'block_size': 11}, 'block_size=11 .* context=10'),
        ({'use_rmsnorm': True}, 'use_rmsnorm=True is not an argument of nanoGPT'),
    ],
)
def test_a_wrong_argument_of_nanogpt_is_named(wrong_argument, message):
    tensors = as_nanogpt(make_tensors(mlp_width=4 * D))
    checkpoint = {'model': tensors, 'model_args': ARGUMENTS | wrong_argument}

    with refused(message):
        load_nanogpt(checkpoint)


@pytest.mark.parametrize(
    'weight_map',
    [
        None,
        ['a.safetensors'],
        {'wte.weight': 3},
        {'wte.weight': '/etc/passwd'},
        {'wte.weight': '../other/model.safetensors'},
    ],
    ids=str,
)
def test_an_index_must_name_files_beside_it(weight_map, tmp_path):
    index = tmp_path / 'model.safetensors.index.json'
    index.write_text(json.dumps({'weight_map': weight_map}))
    (tmp_path / 'config.json').write_text(json.dumps(DESCRIPTION))

    with refused(r'index\.json: weight_map=.* must name a \.safetensors file'):
        load_gpt2(tmp_path)


@pytest.fixture
def fake_torch(monkeypatch):
    """A mock that is imported as torch."""
    torch = Mock()
    monkeypatch.setitem(sys.modules, 'torch', torch)
    return torch


def test_a_torch_file_with_wrong_content_is_refused(fake_torch, tmp_path):
    """The file must hold {'model': tensors by name, 'model_args': sizes}, or tensors by name."""
    tensors = as_nanogpt(make_tensors(mlp_width=4 * D))
    path = tmp_path / 'ckpt.pt'
    path.touch()

    # `fake_torch` replaces torch. Its `load` returns the content as if read from the file.
    for content, message in (
        ({'model': tensors, 'model_args': [1, 2]}, r'model_args=\[1, 2\] must be a dictionary'),
        ({'model': [1], 'model_args': ARGUMENTS}, "'model': a list is not a tensor by name"),
        ({'model': tensors | {'iter_num': 3}}, "'iter_num': a int is not a tensor by name"),
        ({3: tensors['_orig_mod.lm_head.weight']}, '3: a ndarray is not a tensor by name'),
        ([1], 'a list is not a dictionary of tensors'),
    ):
        fake_torch.load.return_value = content
        with refused(message):
            load_nanogpt(path)


def test_a_file_that_torch_cannot_load_is_refused(fake_torch, tmp_path):
    path = tmp_path / 'ckpt.pt'
    path.touch()
    fake_torch.load.side_effect = KeyError

    with refused('ckpt.pt cannot be read as a torch checkpoint: KeyError'):
        load_nanogpt(path)


def test_a_torch_checkpoint_needs_torch(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, 'torch', None)
    path = tmp_path / 'ckpt.pt'
    path.touch()

    with refused(r'ckpt\.pt can only be read with torch'):
        load_nanogpt(path)


# A small file may claim to hold much more. It is refused before memory is allocated.


def test_a_safetensors_header_beyond_its_file_is_refused(tmp_path):
    """The header claims 10^12 numbers, and the file has 4 bytes of data."""
    tensor = {'dtype': 'F32', 'shape': [10**9, 10**3], 'data_offsets': [0, 4]}
    header = json.dumps({'wte.weight': tensor}).encode()
    # A safetensors file is the size of its header in 8 bytes, the header, and the data.
    header_size = len(header).to_bytes(8, 'little')
    one_float = bytes(4)
    file = tmp_path / 'a.safetensors'
    file.write_bytes(header_size + header + one_float)

    with refused('a.safetensors cannot be read as safetensors'):
        load_gpt2(file, num_heads=2)


def test_a_torch_file_that_unpacks_to_much_more_is_refused(fake_torch, tmp_path):
    # A torch file is a zip archive.
    file = tmp_path / 'a.pt'
    with zipfile.ZipFile(file, 'w', zipfile.ZIP_DEFLATED) as archive:
        archive.writestr('a/data/0', bytes(1_000_000))

    with refused('a.pt cannot be read as a torch checkpoint: it unpacks to 1,000,000 bytes, more'):
        load_nanogpt(file, num_heads=2)

    assert not fake_torch.load.called


def test_a_torch_tensor_that_repeats_one_stored_number_is_refused(fake_torch, tmp_path):
    """Strides of 0 let a tensor of 10^12 elements store a single float of 4 bytes.

    The tensor is refused before its elements are copied. `fake_torch` is a mock of torch.
    """
    tensor = Mock(dtype='torch.float32', shape=(10**6, 10**6))
    tensor.numel.return_value = 10**12
    tensor.element_size.return_value = 4
    tensor.untyped_storage.return_value.nbytes.return_value = 4
    fake_torch.load.return_value = {'wte.weight': tensor}
    file = tmp_path / 'b.pt'
    file.touch()

    with refused("'wte.weight' has shape .1000000, 1000000., but fewer stored numbers"):
        load_nanogpt(file, num_heads=2)

    # Copying a torch tensor to numpy begins with `detach`.
    assert not tensor.detach.called
