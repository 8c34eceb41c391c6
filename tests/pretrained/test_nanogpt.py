"""nanoGPT weights: transposed matrices, wrappers' prefixes, models without biases."""

import dataclasses
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from qkattn.errors import LayoutError
from qkattn.pretrained import load_gpt2, load_nanogpt

from .reference import TOKENS, D, L, N, T, V, exact_gelu, forward, make_tensors
from .test_gpt2 import assert_close, logits

ARGUMENTS = {
    'n_layer': L,
    'n_head': N,
    'n_embd': D,
    'block_size': T,
    'vocab_size': V,
    'dropout': 0.1,
    'bias': True,
}


def as_nanogpt(tensors, prefix='_orig_mod.'):
    """As torch.compile'd nanoGPT names and turns them, with its tied second name and masks."""
    named = {f'{prefix}lm_head.weight': tensors['wte.weight']}
    for name, tensor in tensors.items():
        turned = '.c_' in name and name.endswith('weight')
        named[f'{prefix}transformer.{name}'] = tensor.T.copy() if turned else tensor
    named[f'{prefix}transformer.h.0.attn.bias'] = np.tril(np.ones((1, 1, T, T), np.float32))
    return named


@pytest.mark.parametrize(
    ('prefix', 'biases'), [('', True), ('_orig_mod.', False), ('module.', True)]
)
def test_logits_are_those_of_the_equations(prefix, biases):
    tensors = make_tensors(biases=biases, width=4 * D)
    config, params = load_nanogpt(as_nanogpt(tensors, prefix), num_heads=N)
    assert (config.biases, config.tied_embeddings, config.num_layers) == (biases, True, L)
    want = forward(tensors, TOKENS, gelu=exact_gelu)
    assert_close(logits(config, params), want)
    tanh = np.abs(forward(tensors, TOKENS) - want).max() / np.abs(want).max()
    assert tanh > 5e-5  # the two forms of GELU are told apart


def test_a_file_a_checkpoint_and_gpt2_names_hold_the_same(tmp_path):
    tensors = make_tensors(width=4 * D)
    want = load_gpt2(tensors, num_heads=N)
    save_file(as_nanogpt(tensors), tmp_path / 'w.safetensors')
    checkpoint = {'model': as_nanogpt(tensors), 'model_args': ARGUMENTS, 'iter_num': 7}
    for config, params in (
        load_nanogpt(tmp_path / 'w.safetensors', num_heads=N),
        load_nanogpt(checkpoint),
    ):
        assert config == dataclasses.replace(want[0], activation='gelu')
        jax.tree.map(np.testing.assert_array_equal, params, want[1])


def test_a_torch_checkpoint_is_read(tmp_path):
    torch = pytest.importorskip('torch', reason='torch is optional; only .pt files need it')
    tensors = make_tensors(width=4 * D)
    narrow = {n: torch.from_numpy(t.copy()).bfloat16() for n, t in as_nanogpt(tensors).items()}
    checkpoint = {'model': narrow, 'model_args': ARGUMENTS, 'best_val_loss': torch.tensor(1.0)}
    torch.save(checkpoint, tmp_path / 'ckpt.pt')
    config, params = load_nanogpt(tmp_path / 'ckpt.pt')
    assert config.num_heads == N
    want = torch.from_numpy(tensors['wte.weight']).bfloat16().float().numpy()
    np.testing.assert_array_equal(params['w_embedding_VD'], want)
    (tmp_path / 'broken.pt').write_bytes(b'no checkpoint')
    with pytest.raises(LayoutError, match=r'broken\.pt cannot be read as a torch checkpoint'):
        load_nanogpt(tmp_path / 'broken.pt')
    with pytest.raises(LayoutError, match=r'absent\.pt cannot be read'):
        load_nanogpt(tmp_path / 'absent.pt')


def test_what_does_not_fit_is_named(monkeypatch, tmp_path):
    def refused(message, source, **options):
        with pytest.raises(LayoutError, match=message):
            load_nanogpt(source, **options)

    tensors = make_tensors(width=4 * D)
    named = as_nanogpt(tensors)
    refused('num_heads is required', named)
    transposed = r'c_attn\.weight.* \(48, 16\), not \(16, 48\); load_gpt2'
    refused(transposed, tensors, num_heads=N)
    for wrong, message in (
        ({'block_size': 11}, 'block_size=11 does not fit the tensors, which have 10'),
        ({'use_rmsnorm': True}, 'use_rmsnorm=True is not an argument of nanoGPT'),
    ):
        refused(message, {'model': named, 'model_args': ARGUMENTS | wrong})
    monkeypatch.setitem(sys.modules, 'torch', None)
    refused(r'ckpt\.pt can only be read with torch', tmp_path / 'ckpt.pt')
