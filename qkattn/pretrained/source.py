"""Models from wherever they are: runs, weights directories, published files."""

import os
from pathlib import Path

from qkattn import weights
from qkattn.config import ConfigError, ModelConfig
from qkattn.pretrained.gpt2 import load_gpt2
from qkattn.pretrained.nanogpt import load_nanogpt


def load_any(
    source: str | os.PathLike[str], *, trial: int = 0, num_heads: int | None = None
) -> tuple[ModelConfig, dict]:
    """Settings and parameters of a model, its kind told by what lies at `source`.

    Args:
      source: a run directory or a weights directory; a directory or .safetensors file of GPT-2
        weights in the Hugging Face layout; a nanoGPT .pt checkpoint.
      trial: which trial of a run.
      num_heads: for weights that come without settings.

    Raises:
      ConfigError: nothing of these kinds, or the file is damaged or of another layout.
    """
    path = Path(source)
    if not path.exists():
        raise ConfigError(f'{path} does not exist')
    if path.suffix == '.pt':
        return load_nanogpt(path, num_heads=num_heads)
    if path.is_file() or (not (path / weights.ABOUT).exists() and any(path.glob('*.safetensors*'))):
        return load_gpt2(path, num_heads=num_heads)
    return weights.load(path, trial)
