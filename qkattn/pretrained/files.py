"""Named tensors from files or dictionaries, under one set of names and as float32."""

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import load_file

from qkattn.errors import LayoutError
from qkattn.pretrained.layout import Tensors

# What wrappers put in front: torch.compile, DataParallel, and the Hugging Face model with a head.
PREFIXES = ('_orig_mod.', 'module.', 'transformer.')
# Causal masks that older versions saved with the weights.
MASKS = re.compile(r'h\.\d+\.attn\.(bias|masked_bias)')

log = logging.getLogger(__name__)


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a .safetensors file, or of all the files that a .index.json lists.

    Raises:
      LayoutError: the file cannot be read.
    """
    if path.suffix == '.json':
        parts = sorted(set(read_json(path)['weight_map'].values()))
        return {n: t for part in parts for n, t in read_safetensors(path.parent / part).items()}
    try:
        return load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise LayoutError(f'{path} cannot be read as safetensors: {error}') from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file; LayoutError where it cannot be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LayoutError(f'{path} cannot be read: {error}') from error


def find_safetensors(directory: Path) -> Path:
    """The weights in a model directory: one file, or the index of several."""
    names = ('model.safetensors', 'model.safetensors.index.json')
    for name in names:
        if (directory / name).exists():
            return directory / name
    raise LayoutError(f'{directory} holds neither {names[0]} nor {names[1]}')


def cleaned(named: Mapping[str, Any]) -> Tensors:
    """GPT-2's own names without wrappers' prefixes and masks; float32 numpy arrays.

    Raises:
      LayoutError: two tensors with one name, or one that is not of 32 or 16 bit floats.
    """
    tensors, upcast = {}, {}
    for original, value in named.items():
        name = original
        while prefix := next((p for p in PREFIXES if name.startswith(p)), None):
            name = name.removeprefix(prefix)
        if MASKS.fullmatch(name):
            continue
        if name in tensors:
            raise LayoutError(f'tensor {name!r} is there twice, the second time as {original!r}')
        array, dtype = _numpy(value)
        if dtype not in ('float32', 'float16', 'bfloat16'):
            raise LayoutError(
                f'tensor {original!r} is of {dtype}; readable are float32, float16 and bfloat16'
            )
        if dtype != 'float32':
            upcast[dtype] = name
        tensors[name] = array.astype(np.float32)
    for dtype in upcast:
        log.info('weights in %s are widened to float32', dtype)
    return tensors


def _numpy(value: Any) -> tuple[np.ndarray, str]:
    """An array or a torch tensor as numpy, and the dtype it had."""
    if not hasattr(value, 'detach'):
        array = np.asarray(value)
        return array, array.dtype.name
    dtype = str(value.dtype).removeprefix('torch.')
    value = value.detach().cpu()
    if dtype == 'bfloat16':  # numpy has no such dtype, and float32 holds each of its numbers
        value = value.float()
    return value.numpy(), dtype
