"""GPT-2's layout with transposed matrices, as saved by nanoGPT and its descendants."""

import dataclasses
import importlib
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qkattn.config import ModelConfig
from qkattn.errors import LayoutError
from qkattn.pretrained.layout import config_of, to_params
from qkattn.pretrained.tensors import normalized, read_safetensors
from qkattn.storage.files import as_path, local_copy

# torch.nn.Linear stores [outputs, inputs].
TRANSPOSED = ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')
# nanoGPT's arguments and the fields of ModelConfig; dropout is not part of a trained model.
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
    """Reads a nanoGPT as a model config and the float32 parameters of its Decoder.

    Models may have biases or none, a padded vocabulary, a tied or an untied output matrix. The
    config has the exact GELU of nanoGPT's MLP (`nn.GELU()`).

    Args:
      source: a checkpoint .pt (requires torch, and loads tensors and plain values only), a
        .safetensors file, or a dictionary: of arrays by name, or a whole checkpoint with 'model'
        and 'model_args'. Arrays may be numpy, jax or torch.
      num_heads: N, required without 'model_args', since the shapes do not determine it.

    Raises:
      LayoutError: the tensors are not of this layout, or torch is required and missing.
    """
    loaded = source if isinstance(source, Mapping) else _read(as_path(source))
    arguments = None
    if 'model' in loaded and isinstance(loaded['model'], Mapping):
        arguments = loaded.get('model_args')
        loaded = loaded['model']
    if arguments is not None and num_heads is None:
        num_heads = arguments['n_head']
    if num_heads is None:
        raise LayoutError("num_heads is required: there are no 'model_args' beside the tensors")
    tensors = {
        name: np.ascontiguousarray(tensor.T) if name.endswith(TRANSPOSED) else tensor
        for name, tensor in normalized(loaded).items()
    }
    config = config_of(tensors, num_heads=num_heads)
    _check_arguments(arguments, config)
    return dataclasses.replace(config, activation='gelu'), to_params(config, tensors)


def _check_arguments(arguments: Mapping[str, Any] | None, config: ModelConfig) -> None:
    """Requires the arguments in a checkpoint to agree with its tensors."""
    for name, value in ({} if arguments is None else arguments).items():
        if name == 'dropout':
            continue
        if name not in ARGUMENTS:
            raise LayoutError(f'model_args: {name}={value!r} is not an argument of nanoGPT')
        actual = getattr(config, ARGUMENTS[name])
        if actual != value:
            raise LayoutError(
                f'model_args: {name}={value!r} does not fit the tensors, which have {actual!r}'
            )


def _read(path: Path) -> Mapping[str, Any]:
    return read_safetensors(path) if path.suffix == '.safetensors' else _read_torch(path)


def _read_torch(path: Path) -> dict[str, Any]:
    try:
        torch = importlib.import_module('torch')  # optional, and slow to import
    except ImportError as error:
        raise LayoutError(
            f'{path.name} can only be read with torch: install torch, or save the tensors as '
            'safetensors or as a dictionary of numpy arrays'
        ) from error
    try:
        with local_copy(path) as file:
            return torch.load(file, map_location='cpu', weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0]
        raise LayoutError(f'{path} cannot be read as a torch checkpoint: {reason}') from error
