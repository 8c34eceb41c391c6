"""GPT-2 as stored by Hugging Face: model.safetensors and config.json.

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
from qkattn.pretrained.layout import HEAD, config_of, to_params, to_tensors
from qkattn.pretrained.tensors import find_safetensors, normalized, read_json, read_safetensors
from qkattn.storage.files import as_path, replacing, write_atomic

# The defaults of transformers for what config.json leaves out, as the published files often do.
DEFAULTS: dict[str, Any] = {
    'model_type': 'gpt2',
    'activation_function': 'gelu_new',
    'layer_norm_epsilon': 1e-5,
    'scale_attn_weights': True,
    'scale_attn_by_inverse_layer_idx': False,
    'add_cross_attention': False,
    'n_inner': None,
    'tie_word_embeddings': True,
}
# The only values at which GPT-2 is the Decoder; 'gelu_pytorch_tanh' is the same function.
SUPPORTED: dict[str, tuple[Any, ...]] = {
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
    """Reads a GPT-2 as a model config and the float32 parameters of its Decoder.

    Names may start with `transformer.`; saved attention masks are ignored; float16 and bfloat16
    are widened. Dropout is not part of a trained model and is 0 in the config.

    Args:
      source: a directory with model.safetensors (or its index) and config.json, a .safetensors
        file, beside which config.json is read where there is one, or a dictionary of numpy, jax
        or torch arrays by name.
      num_heads: N, required without a config.json, since the shapes do not determine it.

    Raises:
      LayoutError: the tensors or the config.json are not those of a GPT-2.
    """
    described = None
    named: Mapping[str, Any]
    if isinstance(source, Mapping):
        named = source
    else:
        path = as_path(source)
        if not path.exists():
            raise LayoutError(f'{path} does not exist')
        if path.is_dir():
            described, path = read_json(path / 'config.json'), find_safetensors(path)
        elif (path.parent / 'config.json').exists():
            described = read_json(path.parent / 'config.json')
        named = read_safetensors(path)
    tensors = normalized(named)
    if described is None:
        if num_heads is None:
            raise LayoutError('num_heads is required: there is no config.json beside the tensors')
        config = config_of(tensors, num_heads=num_heads)
    else:
        config = _described_config(described, tensors, num_heads)
    return config, to_params(config, tensors)


def _described_config(
    described: Mapping[str, Any], tensors: Mapping[str, np.ndarray], num_heads: int | None
) -> ModelConfig:
    """The config of the tensors, which has to agree with config.json."""
    described = DEFAULTS | dict(described)
    for name, accepted in SUPPORTED.items():
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
    actual = _description(config)
    if described['n_inner'] is None:
        described['n_inner'] = 4 * described['n_embd']
    for name in ('n_embd', 'n_layer', 'n_positions', 'n_inner', 'vocab_size'):
        if described[name] != actual[name]:
            raise LayoutError(
                f'config.json: {name}={described[name]} does not fit the tensors, which have '
                f'{actual[name]}'
            )
    return config


def save_gpt2(config: ModelConfig, params: dict, directory: str | os.PathLike[str]) -> Path:
    """Writes model.safetensors and config.json, which Hugging Face transformers loads as GPT-2.

    Exact in float32. A model without biases is written with zero biases, which the layout requires,
    so that it has biases when it is read again.

    Returns:
      The directory, which is created if missing.

    Raises:
      LayoutError: GPT-2's layout cannot hold a setting, or `params` are not those of `config`.
    """
    tensors = to_tensors(config, params)
    named = {name if name == HEAD else f'transformer.{name}': t for name, t in tensors.items()}
    directory = as_path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with replacing(directory / 'model.safetensors') as path:
        save_file(named, path, metadata={'format': 'pt'})
    described = json.dumps(_description(config), indent=2, sort_keys=True)
    write_atomic(directory / 'config.json', described + '\n')
    return directory


def _description(config: ModelConfig) -> dict[str, Any]:
    """The contents of config.json."""
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
    # The default of transformers is id 50256, the end of text of the published GPT-2.
    if config.vocab_size <= 50256:
        described |= {'bos_token_id': None, 'eos_token_id': None}
    return described
