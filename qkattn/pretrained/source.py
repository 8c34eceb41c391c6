"""Models from wherever they are: runs, weights directories, published files."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp

from qkattn.config import Config, ModelConfig, from_json
from qkattn.data.load import tokenizer_of
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.errors import ConfigError
from qkattn.model import with_params
from qkattn.model.transformer import Transformer
from qkattn.pretrained.gpt2 import load_gpt2
from qkattn.pretrained.nanogpt import load_nanogpt
from qkattn.run.records import read_json
from qkattn.train import exported


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
    if path.is_file() or (
        not (path / exported.ABOUT).exists() and any(path.glob('*.safetensors*'))
    ):
        return load_gpt2(path, num_heads=num_heads)
    return exported.load(path, trial)


def load_model(source: str | os.PathLike[str], *, trial: int = 0) -> Transformer:
    """The model of `load_any`, ready to compute in its own dtype."""
    config, params = load_any(source, trial=trial)
    dtype = jnp.dtype(config.compute_dtype)
    return with_params(config, jax.tree.map(lambda p: jnp.asarray(p, dtype), params))


def settings_of(source: str | os.PathLike[str]) -> Config | None:
    """The settings of the run that lies at `source`; None where weights alone do."""
    path = Path(source) / 'config.json'
    if not (Path(source) / 'checkpoints').is_dir() or not path.exists():
        return None
    return from_json(Config, read_json(path)['config'])


def tokenizer_of_run(source: str | os.PathLike[str], config: Config) -> Tokenizer:
    """The tokenizer that the run at `source` was trained with.

    Raises:
      ConfigError: the data has changed since, and with it the vocabulary that it gives.
    """
    from qkattn.train.checkpoint import Checkpoints

    tokenizer = tokenizer_of(config.data)
    checkpoints = Checkpoints(Path(source).absolute() / 'checkpoints', read_only=True)
    try:
        record = checkpoints.record()
    finally:
        checkpoints.close()
    if record is not None:
        data = record['data']
        trained_with = data.get('source', data)['tokenizer']
        if tokenizer.name != trained_with:
            raise ConfigError(
                f'{source} was trained with the tokenizer {trained_with}, but its data, which has '
                f'changed since, gives {tokenizer.name}; put the data back as it was'
            )
    return tokenizer
