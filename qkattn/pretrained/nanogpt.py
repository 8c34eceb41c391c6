"""GPT-2's layout with matrices of torch.nn.Linear, as nanoGPT and its descendants save it."""

import dataclasses
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qkattn.config import ModelConfig
from qkattn.errors import LayoutError
from qkattn.pretrained.files import cleaned, read_safetensors
from qkattn.pretrained.layout import config_of, to_params

# nn.Linear keeps [outputs, inputs].
TRANSPOSED = ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')
# nanoGPT's arguments as fields of ModelConfig; dropout belongs to training.
ARGUMENTS = {
    'block_size': 'context',
    'vocab_size': 'vocab_size',
    'n_layer': 'num_layers',
    'n_head': 'num_heads',
    'n_embd': 'd_model',
    'bias': 'biases',
}


def load_nanogpt(
    source: str | os.PathLike[str] | Mapping[str, Any], *, num_heads: int | None = None
) -> tuple[ModelConfig, dict]:
    """Reads nanoGPT weights as a model config and the parameters of its Decoder, in float32.

    Models with and without biases, padded vocabularies, tied or untied output matrices. The
    config has the exact GELU, which is what nanoGPT's MLP applies (`nn.GELU()`).

    Args:
      source: a checkpoint .pt (needs torch, and loads tensors and plain values only), a
        .safetensors file, or a dictionary: of arrays by name, or a whole checkpoint with 'model'
        and 'model_args'. Arrays may be numpy, jax or torch.
      num_heads: N, required where there are no 'model_args', since no tensor shows it.

    Raises:
      LayoutError: the weights are not of this layout, or torch is needed and missing.
    """
    if isinstance(source, Mapping):
        loaded = source
    else:
        path = Path(source)
        loaded = read_safetensors(path) if path.suffix == '.safetensors' else _read_torch(path)
    arguments = None
    if 'model' in loaded and isinstance(loaded['model'], Mapping):
        arguments = loaded.get('model_args')
        loaded = loaded['model']
    if arguments is not None and num_heads is None:
        num_heads = arguments['n_head']
    if num_heads is None:
        raise LayoutError("num_heads is required: there are no 'model_args' with the weights")
    tensors = {
        name: np.ascontiguousarray(tensor.T) if name.endswith(TRANSPOSED) else tensor
        for name, tensor in cleaned(loaded).items()
    }
    config = config_of(tensors, num_heads=num_heads)
    _check_arguments(arguments, config)
    return dataclasses.replace(config, activation='gelu'), to_params(config, tensors)


def _check_arguments(arguments: Mapping[str, Any] | None, config: ModelConfig) -> None:
    """What a checkpoint says about itself must be what its tensors show."""
    for name, value in ({} if arguments is None else arguments).items():
        if name == 'dropout':
            continue
        if name not in ARGUMENTS:
            raise LayoutError(f'model_args: {name}={value!r} is not an argument of nanoGPT')
        found = getattr(config, ARGUMENTS[name])
        if found != value:
            raise LayoutError(
                f'model_args: {name}={value!r} does not fit the tensors, which have {found!r}'
            )


def _read_torch(path: Path) -> dict[str, Any]:
    try:
        import torch
    except ImportError as error:
        raise LayoutError(
            f'{path.name} needs torch to be read: install torch, or save the weights as '
            'safetensors or as a dictionary of numpy arrays'
        ) from error
    try:
        return torch.load(path, map_location='cpu', weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0]
        raise LayoutError(f'{path} cannot be read as a torch checkpoint: {reason}') from error
