"""Named tensors from files or dictionaries, as float32 numpy arrays under GPT-2's names."""

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
from qkattn.storage.files import local_copy
from qkattn.storage.records import parse_json

# Prefixes of torch.compile, of DataParallel, and of the Hugging Face model with a head.
PREFIXES = ('_orig_mod.', 'module.', 'transformer.')
# Causal masks that older versions saved among the parameters.
MASKS = re.compile(r'h\.\d+\.attn\.(bias|masked_bias)')

log = logging.getLogger(__name__)


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a .safetensors file, or of the files that a .index.json lists.

    Raises:
      LayoutError: the file cannot be read.
    """
    if path.suffix == '.json':
        parts = sorted(set(read_json(path)['weight_map'].values()))
        return {n: t for part in parts for n, t in read_safetensors(path.parent / part).items()}
    try:
        with local_copy(path) as file:
            return load_file(file)
    except (OSError, safetensors.SafetensorError) as error:
        raise LayoutError(f'{path} cannot be read as safetensors: {error}') from error


def read_json(path: Path) -> dict[str, Any]:
    """The contents of a JSON file; LayoutError where it cannot be read."""
    try:
        return parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise LayoutError(f'{path} cannot be read: {error}') from error


def find_safetensors(directory: Path) -> Path:
    """The file with the tensors of a model directory, or the index of several files."""
    names = ('model.safetensors', 'model.safetensors.index.json')
    for name in names:
        if (directory / name).exists():
            return directory / name
    raise LayoutError(f'{directory} holds neither {names[0]} nor {names[1]}')


def normalized(named: Mapping[str, Any]) -> Tensors:
    """The tensors in float32, under GPT-2's names without prefixes; saved masks are left out.

    Raises:
      LayoutError: two tensors of one name, or one that does not hold 32- or 16-bit floats.
    """
    tensors: Tensors = {}
    narrow: set[str] = set()
    for original, value in named.items():
        name = original
        while prefix := next((p for p in PREFIXES if name.startswith(p)), None):
            name = name.removeprefix(prefix)
        if MASKS.fullmatch(name):
            continue
        if name in tensors:
            raise LayoutError(f'tensor {name!r} occurs twice, the second time as {original!r}')
        array, dtype = _to_numpy(value)
        if dtype not in ('float32', 'float16', 'bfloat16'):
            raise LayoutError(
                f'tensor {original!r} is of {dtype}; supported are float32, float16 and bfloat16'
            )
        if dtype != 'float32':
            narrow.add(dtype)
        tensors[name] = array.astype(np.float32)
    for dtype in sorted(narrow):
        log.info('%s tensors are widened to float32', dtype)
    return tensors


def _to_numpy(value: Any) -> tuple[np.ndarray, str]:
    """An array or a torch tensor as a numpy array, and its original dtype."""
    if not hasattr(value, 'detach'):
        array = np.asarray(value)
        return array, array.dtype.name
    dtype = str(value.dtype).removeprefix('torch.')
    value = value.detach().cpu()
    if dtype == 'bfloat16':  # not a dtype of numpy; float32 represents it exactly
        value = value.float()
    return value.numpy(), dtype
