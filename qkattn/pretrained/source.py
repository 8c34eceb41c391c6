"""Models by path: runs, exported parameters, published files."""

import contextlib
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
from qkattn.run.file_schemas import CONFIG
from qkattn.run.records import read_json
from qkattn.train import exported
from qkattn.train.checkpoint import Checkpoints


def load_any(
    source: str | os.PathLike[str], *, trial: int = 0, num_heads: int | None = None
) -> tuple[ModelConfig, dict]:
    """The config and parameters of the model at `source`, whose kind follows from its files.

    Args:
      source: a run directory or a directory of exported parameters; a directory or .safetensors
        file of a GPT-2 in the Hugging Face layout; a nanoGPT .pt checkpoint.
      trial: index of the trial of a run.
      num_heads: for published files without a config.

    Raises:
      ConfigError: `source` is none of these, or it is damaged or of another layout.
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
    """The model of `load_any`, with parameters in its compute dtype."""
    config, params = load_any(source, trial=trial)
    dtype = jnp.dtype(config.compute_dtype)
    return with_params(config, jax.tree.map(lambda p: jnp.asarray(p, dtype), params))


def settings_of(source: str | os.PathLike[str]) -> Config | None:
    """The config of the run at `source`; None if `source` is not a run directory."""
    path = Path(source) / 'config.json'
    if not (Path(source) / 'checkpoints').is_dir() or not path.exists():
        return None
    return from_json(Config, read_json(path, CONFIG)['config'])


def tokenizer_of_run(source: str | os.PathLike[str], config: Config) -> Tokenizer:
    """The tokenizer that the run at `source` was trained with.

    Raises:
      ConfigError: the data has changed since the run, and its vocabulary with it.
    """
    tokenizer = tokenizer_of(config.data)
    directory = Path(source).absolute() / 'checkpoints'
    with contextlib.closing(Checkpoints(directory, read_only=True)) as checkpoints:
        record = checkpoints.record()
    if record is not None:
        data = record['data']
        trained_with = data.get('source', data)['tokenizer']
        if tokenizer.name != trained_with:
            raise ConfigError(
                f'{source} was trained with the tokenizer {trained_with}, but its data has changed '
                f'since then and gives {tokenizer.name}; restore the data'
            )
    return tokenizer
