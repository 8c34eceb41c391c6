"""GPT-2 weights: the same logits as the published equations and as Hugging Face's model."""

import json
import logging

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from qkattn.config import ModelConfig
from qkattn.errors import LayoutError
from qkattn.model import with_params
from qkattn.model.cost import abstract_params
from qkattn.pretrained import load_gpt2, save_gpt2
from tests import damages

from .reference import TOKENS, D, F, L, N, T, V, forward, make_tensors

DESCRIPTION = {
    'model_type': 'gpt2',
    'n_embd': D,
    'n_head': N,
    'n_inner': F,
    'n_layer': L,
    'n_positions': T,
    'vocab_size': V,
}
HF_REASON = 'transformers is optional; the numpy reference covers the same equations'


_logits = jax.jit(lambda model, tokens_BT: model(tokens_BT))


def logits(config, params):
    return np.asarray(_logits(with_params(config, params), TOKENS))


def assert_close(actual, want):
    assert np.std(want) > 1
    np.testing.assert_allclose(actual, want, atol=1e-5 * np.abs(want).max())


def make_params(config):
    """Random everywhere, so that no bias, gain or tie can be lost unnoticed."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda a: 0.3 * rng.standard_normal(a.shape, np.float32), abstract_params(config)
    )


def make_config(**fields):
    sizes = {'d_model': D, 'num_heads': N, 'num_layers': L, 'd_ff': F}
    return ModelConfig(**{**sizes, 'context': T, 'vocab_size': V, 'biases': True, **fields})


def write(directory, tensors, **described):
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / 'model.safetensors')
    (directory / 'config.json').write_text(json.dumps(DESCRIPTION | described))
    return directory


def test_logits_are_those_of_the_published_equations(tmp_path):
    tensors = make_tensors()
    named = {f'transformer.{name}': t for name, t in tensors.items()}
    named['transformer.h.0.attn.bias'] = np.tril(np.ones((1, 1, T, T), np.uint8))
    named['transformer.h.0.attn.masked_bias'] = np.float32([-1e4])
    config, params = load_gpt2(write(tmp_path, named))
    assert config == make_config()
    assert_close(logits(config, params), forward(tensors, TOKENS))


def test_a_dictionary_and_a_lone_file_need_the_number_of_heads(tmp_path):
    tensors = make_tensors()
    save_file(tensors, tmp_path / 'w.safetensors')
    for source in (tensors, tmp_path / 'w.safetensors'):
        with pytest.raises(LayoutError, match='num_heads is required'):
            load_gpt2(source)
        actual = logits(*load_gpt2(source, num_heads=4))
        assert_close(actual, forward(tensors, TOKENS, num_heads=4))


def test_several_files_are_one_model(tmp_path):
    tensors = make_tensors()
    parts = {name: f'part-{i % 2}.safetensors' for i, name in enumerate(sorted(tensors))}
    for file in ('part-0.safetensors', 'part-1.safetensors'):
        save_file({n: t for n, t in tensors.items() if parts[n] == file}, tmp_path / file)
    index = tmp_path / 'model.safetensors.index.json'
    index.write_text(json.dumps({'weight_map': parts}))
    (tmp_path / 'config.json').write_text(json.dumps(DESCRIPTION))
    want = load_gpt2(tensors, num_heads=N)[1]
    jax.tree.map(np.testing.assert_array_equal, load_gpt2(tmp_path)[1], want)


@pytest.mark.parametrize('dtype', [np.float16, ml_dtypes.bfloat16])
def test_narrow_floats_are_widened_exactly_and_logged(caplog, tmp_path, dtype):
    narrow = {name: t.astype(dtype) for name, t in make_tensors().items()}
    with caplog.at_level(logging.INFO):
        config, params = load_gpt2(write(tmp_path, narrow))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(params['w_embedding_VD'], narrow['wte.weight'].astype(np.float32))
    assert f'{np.dtype(dtype).name} tensors are widened to float32' in caplog.text


@pytest.mark.parametrize('tied', [True, False])
def test_export_then_import_gives_every_number_back(tmp_path, tied):
    config = make_config(tied_embeddings=tied)
    params = make_params(config)
    first, second = tmp_path / 'first', tmp_path / 'second'
    loaded, again = load_gpt2(save_gpt2(config, params, first))
    assert loaded == config
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    save_gpt2(loaded, again, second)
    for file in ('model.safetensors', 'config.json'):
        assert (first / file).read_bytes() == (second / file).read_bytes()


def test_tensors_are_written_under_their_published_names(tmp_path):
    save_gpt2(*load_gpt2(make_tensors(), num_heads=N), tmp_path)
    want = {f'transformer.{name}': tensor for name, tensor in make_tensors().items()}
    written = load_file(tmp_path / 'model.safetensors')
    assert written.keys() == want.keys()
    jax.tree.map(np.testing.assert_array_equal, written, want)


def test_a_model_without_biases_is_exported_with_zeros(tmp_path):
    config = make_config(biases=False)
    params = make_params(config)
    loaded, again = load_gpt2(save_gpt2(config, params, tmp_path))
    assert loaded == make_config()
    np.testing.assert_array_equal(logits(loaded, again), logits(config, params))


@pytest.mark.parametrize('tied', [True, False])
def test_hugging_face_agrees_both_ways(tmp_path, tied):
    transformers = pytest.importorskip('transformers', reason=HF_REASON)
    torch = pytest.importorskip('torch', reason=HF_REASON)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            **DESCRIPTION, bos_token_id=None, eos_token_id=None, tie_word_embeddings=tied
        )
    ).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))

    def their_logits(model):
        with torch.no_grad():
            return model(torch.from_numpy(TOKENS)).logits.numpy()

    theirs.save_pretrained(tmp_path / 'theirs')
    config, params = load_gpt2(tmp_path / 'theirs')
    assert config == make_config(tied_embeddings=tied)
    want = their_logits(theirs)
    assert np.std(want) > 0.1
    np.testing.assert_allclose(logits(config, params), want, atol=1e-5)

    save_gpt2(config, params, tmp_path / 'ours')
    files = [tmp_path / where / 'model.safetensors' for where in ('theirs', 'ours')]
    assert files[0].read_bytes() == files[1].read_bytes()
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / 'ours').eval()
    np.testing.assert_array_equal(their_logits(again), want)

    from_dict = load_gpt2(theirs.state_dict(), num_heads=N)
    assert from_dict[0] == config
    jax.tree.map(np.testing.assert_array_equal, from_dict[1], params)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'score': 'merged'}, "model.score='merged'"),
        ({'value': 'no_v'}, "model.value='no_v'"),
        ({'num_kv_heads': 1}, 'model.num_kv_heads=1'),
        ({'head_size': 4}, 'model.head_size=4'),
        ({'norm': 'rmsnorm'}, "model.norm='rmsnorm'"),
        ({'positions': 'none'}, "model.positions='none'"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused_before_writing(tmp_path, fields, message):
    config = make_config(**fields)
    with pytest.raises(LayoutError, match=message):
        save_gpt2(config, make_params(config), tmp_path / 'out')
    assert not (tmp_path / 'out').exists()


def test_parameters_of_another_config_are_refused(tmp_path):
    config = make_config()
    stack = jax.tree.map(lambda p: p[None], make_params(config))
    with pytest.raises(LayoutError, match=r"'w_embedding_VD' has shape \(1, 29, 16\)|shape \(1, "):
        save_gpt2(config, stack, tmp_path)
    with pytest.raises(LayoutError, match="parameter 'w_output_DV' is missing"):
        save_gpt2(make_config(tied_embeddings=False), make_params(config), tmp_path)


def remove(name):
    return lambda tensors: tensors.pop(name)


def put(name, shape, dtype=np.float32):
    return lambda tensors: tensors.update({name: np.zeros(shape, dtype)})


@pytest.mark.parametrize(
    ('damage', 'message'),
    [
        (remove('wpe.weight'), "tensor 'wpe.weight' is missing"),
        (remove('h.1.ln_2.bias'), "tensor 'h.1.ln_2.bias' is missing"),
        (remove('ln_f.bias'), "'h.0.attn.c_attn.bias' has no place in a GPT-2 without biases"),
        (put('h.2.attn.q_norm.weight', (8,)), "'h.2.attn.q_norm.weight' has no place"),
        (put('h.1.attn.c_attn.weight', (48, 16)), r'c_attn.weight.* \(48, 16\), not \(16, 48\)'),
        (put('wte.weight', (V, D), np.float64), "'wte.weight' is of float64"),
        (put('lm_head.weight', (V, D)), "'lm_head.weight' differs from 'wte.weight'"),
        (put('transformer.ln_f.bias', (D,)), "'ln_f.bias' occurs twice"),
        (put('h.3.ln_1.weight', (D,)), "tensor 'h.3.ln_1.bias' is missing"),
        ({'n_layer': 4}, 'n_layer=4 does not fit the tensors, which have 3'),
        ({'n_inner': None}, 'n_inner=64 does not fit the tensors, which have 48'),
        ({'vocab_size': 30}, 'vocab_size=30'),
        ({'n_head': 3}, 'd_model=16 must be a multiple of num_heads=3'),
        ({'activation_function': 'gelu'}, "activation_function='gelu' is not supported"),
        ({'layer_norm_epsilon': 1e-6}, 'layer_norm_epsilon=1e-06 is not supported'),
        ({'scale_attn_weights': False}, 'scale_attn_weights=False'),
        ({'scale_attn_by_inverse_layer_idx': True}, 'scale_attn_by_inverse_layer_idx=True'),
        ({'model_type': 'gptj'}, "model_type='gptj'"),
        ({'tie_word_embeddings': False}, "tensor 'lm_head.weight' is missing"),
    ],
)
def test_a_wrong_tensor_or_description_is_named(tmp_path, damage, message):
    tensors, described = make_tensors(), damage
    if callable(damage):
        damage(tensors)
        described = {}
    with pytest.raises(LayoutError, match=message):
        load_gpt2(write(tmp_path, tensors, **described))


def test_files_that_cannot_be_read_are_named(tmp_path):
    def refused(message, source=tmp_path, **options):
        with pytest.raises(LayoutError, match=message):
            load_gpt2(source, **options)

    refused('nowhere does not exist', tmp_path / 'nowhere')
    refused(r'config\.json cannot be read')
    (tmp_path / 'config.json').write_text(damages.NESTED)
    refused(r'config\.json cannot be read: it is nested too deeply')
    (tmp_path / 'config.json').unlink()
    write(tmp_path, make_tensors())
    refused('num_heads=4 contradicts n_head=2', num_heads=4)
    weights = tmp_path / 'model.safetensors'
    weights.write_bytes(weights.read_bytes()[:1000])
    refused(r'model\.safetensors cannot be read as safetensors')
    weights.unlink()
    refused(r'neither model\.safetensors nor')
