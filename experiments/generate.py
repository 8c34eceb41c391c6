"""Continues a text with a trained model.

python -m experiments.generate --source=runs/small --prompt='def main(' --num_tokens=100

The source is whatever experiments.convert reads. The tokenizer is that of the run's data, or of
--data where the source is weights alone.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
from absl import flags
from flax import nnx

from qkattn import cli, decode, pretrained, runlog
from qkattn.budget import abstract_model
from qkattn.config import Config, ConfigError, DataConfig, from_json
from qkattn.data import pipeline

SOURCE = flags.DEFINE_string('source', None, 'A training run, or weights.')
DATA = flags.DEFINE_string('data', DataConfig.name, 'Whose tokenizer to use for weights alone.')
TRIAL = flags.DEFINE_integer('trial', 0, 'Which trial of the run, in the order of its results.')
PROMPT = flags.DEFINE_string('prompt', None, 'Text to continue; without one a document begins.')
PROMPT_TOKENS = flags.DEFINE_string(
    'prompt_tokens', None, 'Token ids to continue, as in "12 7 301"; ids come out.'
)
PROMPT_FILE = flags.DEFINE_string('prompt_file', None, 'File with the text to continue.')
NUM_TOKENS = flags.DEFINE_integer('num_tokens', 64, 'Tokens to add.')
TEMPERATURE = flags.DEFINE_float('temperature', 1.0, 'Divides the logits; 0 is greedy.')
TOP_K = flags.DEFINE_integer('top_k', None, 'Draw from the k likeliest tokens only.')
TOP_P = flags.DEFINE_float('top_p', None, 'Draw from the likeliest tokens that make up p only.')
SEED = flags.DEFINE_integer('seed', 0, 'Of the draws.')


def main() -> None:
    if SOURCE.value is None:
        raise ConfigError('--source=DIRECTORY is required')
    config, params = pretrained.load_any(SOURCE.value, trial=TRIAL.value)
    dtype = jnp.dtype(config.compute_dtype)
    params = jax.tree.map(lambda p: jnp.asarray(p, dtype), params)
    model = nnx.merge(nnx.graphdef(abstract_model(config)), params)
    if PROMPT_TOKENS.value is not None:
        print(' '.join(map(str, continued(model, token_ids(), config.vocab_size))))
        return
    source = data_of(Path(SOURCE.value))
    tokenizer = pipeline.load(source.name, source.data_dir).tokenizer
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f'tokenizer {tokenizer.name} of {source.name} has {tokenizer.vocab_size} tokens and '
            f'the model {config.vocab_size}; give --prompt_tokens'
        )
    text = prompt()
    try:
        ids = tokenizer.encode(text).tolist() or [tokenizer.separator]
    except ValueError as error:
        raise ConfigError(f'the prompt cannot be encoded: {error}') from error
    added = continued(model, ids, tokenizer.vocab_size)
    # Together, because a character may begin in the prompt and end behind it.
    print(tokenizer.decode((ids if text else []) + added))


def continued(model: nnx.Module, ids: list[int], vocab_size: int) -> list[int]:
    """The tokens that follow `ids`, by the flags."""
    tokens_BT = decode.generate(
        model,
        [ids],
        NUM_TOKENS.value,
        key=jax.random.key(SEED.value),
        temperature=TEMPERATURE.value,
        top_k=TOP_K.value,
        top_p=TOP_P.value,
        vocab_size=vocab_size,
    )
    return tokens_BT[0].tolist()


def token_ids() -> list[int]:
    """--prompt_tokens as numbers."""
    try:
        return [int(word) for word in PROMPT_TOKENS.value.split()]
    except ValueError as error:
        raise ConfigError(
            f'--prompt_tokens={PROMPT_TOKENS.value!r} must be whole numbers'
        ) from error


def prompt() -> str:
    """The text of --prompt or --prompt_file; '' without either."""
    if PROMPT_FILE.value is None:
        return '' if PROMPT.value is None else PROMPT.value
    if PROMPT.value is not None:
        raise ConfigError('--prompt and --prompt_file exclude each other')
    try:
        return Path(PROMPT_FILE.value).read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'--prompt_file={PROMPT_FILE.value} cannot be read: {error}') from error


def data_of(source: Path) -> DataConfig:
    """The data that a run was trained on, or --data."""
    path = source / 'config.json'
    if not (source / 'checkpoints').is_dir() or not path.exists():
        return DataConfig(name=DATA.value)
    return from_json(Config, runlog.read_json(path)['config']).data


if __name__ == '__main__':
    cli.run(main)
