"""GPT-2 as Hugging Face stores it: model.safetensors and config.json.

The Decoder with score 'qk', value 'vo', layer norm and learned positions is GPT-2: pre-norm,
tanh GELU (`gelu_new`), scale H^-0.5, norm epsilon 1e-5. Radford et al. 2019.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from qkattn.config import ModelConfig
from qkattn.errors import LayoutError
from qkattn.pretrained.files import cleaned, find_safetensors, read_json, read_safetensors
from qkattn.pretrained.layout import HEAD, config_of, to_params, to_tensors
from qkattn.run.files import replacing, write_atomic

# What transformers assumes where config.json is silent, as the published files often are.
DEFAULTS = {
    'model_type': 'gpt2',
    'activation_function': 'gelu_new',
    'layer_norm_epsilon': 1e-5,
    'scale_attn_weights': True,
    'scale_attn_by_inverse_layer_idx': False,
    'add_cross_attention': False,
    'n_inner': None,
    'tie_word_embeddings': True,
}
# The values with which that model is the Decoder; 'gelu_pytorch_tanh' is the same function.
ONLY = {
    'model_type': ('gpt2',),
    'activation_function': ('gelu_new', 'gelu_pytorch_tanh'),
    'layer_norm_epsilon': (1e-5,),
    'scale_attn_weights': (True,),
    'scale_attn_by_inverse_layer_idx': (False,),
    'add_cross_attention': (False,),
}


def load_gpt2(
    source: str | os.PathLike[str] | Mapping[str, Any], *, num_heads: int | None = None
) -> tuple[ModelConfig, dict]:
    """Reads GPT-2 weights as a model config and the parameters of its Decoder, in float32.

    Names may start with `transformer.`; saved attention masks are passed over; float16 and
    bfloat16 are widened. Dropout belongs to training, not to weights, and is 0 in the config.

    Args:
      source: a directory with model.safetensors (or its index) and config.json, a .safetensors
        file, beside which config.json is read where there is one, or a dictionary of numpy, jax
        or torch arrays by name.
      num_heads: N, required where there is no config.json, since no tensor shows it.

    Raises:
      LayoutError: the weights or their config.json are not a GPT-2; it names what is not.
    """
    described = None
    if isinstance(source, Mapping):
        named = source
    else:
        path = Path(source)
        if not path.exists():
            raise LayoutError(f'{path} does not exist')
        if path.is_dir():
            described, path = read_json(path / 'config.json'), find_safetensors(path)
        elif (path.parent / 'config.json').exists():
            described = read_json(path.parent / 'config.json')
        named = read_safetensors(path)
    tensors = cleaned(named)
    if described is None:
        if num_heads is None:
            raise LayoutError('num_heads is required: there is no config.json beside the weights')
        config = config_of(tensors, num_heads=num_heads)
    else:
        config = _described_config(described, tensors, num_heads)
    return config, to_params(config, tensors)


def _described_config(
    described: Mapping[str, Any], tensors: Mapping[str, np.ndarray], num_heads: int | None
) -> ModelConfig:
    """The config that config.json and the tensors agree on."""
    described = DEFAULTS | dict(described)
    for name, accepted in ONLY.items():
        if described[name] not in accepted:
            raise LayoutError(
                f'config.json: {name}={described[name]!r} is not supported, only {accepted[0]!r}'
            )
    for name in ('n_embd', 'n_head', 'n_layer', 'n_positions', 'vocab_size'):
        if name not in described:
            raise LayoutError(f'config.json: {name} is missing')
    if num_heads not in (None, described['n_head']):
        raise LayoutError(
            f'num_heads={num_heads} contradicts n_head={described["n_head"]} in config.json'
        )
    tied = described['tie_word_embeddings']
    config = config_of(tensors, num_heads=described['n_head'], tied=tied)
    found = _description(config)
    if described['n_inner'] is None:
        described['n_inner'] = 4 * described['n_embd']
    for name in ('n_embd', 'n_layer', 'n_positions', 'n_inner', 'vocab_size'):
        if described[name] != found[name]:
            raise LayoutError(
                f'config.json: {name}={described[name]} does not fit the tensors, which have '
                f'{found[name]}'
            )
    return config


def save_gpt2(config: ModelConfig, params: dict, directory: str | os.PathLike[str]) -> Path:
    """Writes model.safetensors and config.json, which Hugging Face transformers loads as GPT-2.

    Exact in float32. A model without biases is written with biases of zero, since that layout
    knows no other; loaded again, it has biases.

    Returns:
      The directory, created where it is missing.

    Raises:
      LayoutError: GPT-2's layout has no place for a setting, or `params` are not of `config`.
    """
    tensors = to_tensors(config, params)
    named = {name if name == HEAD else f'transformer.{name}': t for name, t in tensors.items()}
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with replacing(directory / 'model.safetensors') as path:
        save_file(named, path, metadata={'format': 'pt'})
    described = json.dumps(_description(config), indent=2, sort_keys=True)
    write_atomic(directory / 'config.json', described + '\n')
    return directory


def _description(config: ModelConfig) -> dict[str, Any]:
    """The config as transformers writes it."""
    described = DEFAULTS | {
        'architectures': ['GPT2LMHeadModel'],
        'n_embd': config.d_model,
        'n_head': config.num_heads,
        'n_inner': config.mlp_width,
        'n_layer': config.num_layers,
        'n_positions': config.context,
        'vocab_size': config.vocab_size,
        'tie_word_embeddings': config.tied_embeddings,
        **dict.fromkeys(('attn_pdrop', 'embd_pdrop', 'resid_pdrop'), config.dropout),
    }
    # Where none is given, transformers takes id 50256, the end of text of the published GPT-2.
    if config.vocab_size <= 50256:
        described |= {'bos_token_id': None, 'eos_token_id': None}
    return described
