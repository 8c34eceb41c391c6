"""Continues a text with a trained model.

python -m experiments.generate --workdir=runs/small --prompt='def main(' --num_tokens=100
"""

import fcntl
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import flags
from flax import nnx

from qkattn import cli, decode, records
from qkattn.config import Config, ConfigError, from_json
from qkattn.data import pipeline
from qkattn.model import Decoder
from qkattn.train.checkpoint import Checkpoints
from qkattn.train.step import graph_of, init_stack

WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of a training run.')
TRIAL = flags.DEFINE_integer('trial', 0, 'Which trial of the run, in the order of its results.')
PROMPT = flags.DEFINE_string('prompt', None, 'Text to continue; without one a document begins.')
PROMPT_FILE = flags.DEFINE_string('prompt_file', None, 'File with the text to continue.')
NUM_TOKENS = flags.DEFINE_integer('num_tokens', 64, 'Tokens to add.')
TEMPERATURE = flags.DEFINE_float('temperature', 1.0, 'Divides the logits; 0 is greedy.')
TOP_K = flags.DEFINE_integer('top_k', None, 'Draw from the k likeliest tokens only.')
TOP_P = flags.DEFINE_float('top_p', None, 'Draw from the likeliest tokens that make up p only.')
SEED = flags.DEFINE_integer('seed', 0, 'Of the draws.')

log = logging.getLogger('qkattn.generate')


def main() -> None:
    if WORKDIR.value is None:
        raise ConfigError('--workdir=DIRECTORY is required')
    config, model = restore(Path(WORKDIR.value).absolute(), TRIAL.value)
    tokenizer = pipeline.load(config.data.name, config.data.data_dir).tokenizer
    text = prompt()
    try:
        ids = tokenizer.encode(text).tolist() or [tokenizer.separator]
    except ValueError as error:
        raise ConfigError(f'the prompt cannot be encoded: {error}') from error
    tokens_BT = decode.generate(
        model,
        [ids],
        NUM_TOKENS.value,
        key=jax.random.key(SEED.value),
        temperature=TEMPERATURE.value,
        top_k=TOP_K.value,
        top_p=TOP_P.value,
        vocab_size=tokenizer.vocab_size,
    )
    # Together, because a character may begin in the prompt and end behind it.
    ids = ids if text else []
    print(tokenizer.decode(ids + tokens_BT[0].tolist()))


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


def restore(workdir: Path, trial: int) -> tuple[Config, Decoder]:
    """The run's config and one trial's model, from the newest sound checkpoint, on one device.

    Raises:
      ConfigError: no run is there, it is being trained, or it has no such trial.
      CheckpointError: its checkpoints are damaged.
    """
    path = workdir / 'config.json'
    if not path.exists() or not (workdir / 'checkpoints').is_dir():
        raise ConfigError(f'--workdir={workdir} holds no training run with checkpoints')
    config = from_json(Config, records.read_json(path)['config'])
    trials = config.trials.trials()
    if not 0 <= trial < len(trials):
        raise ConfigError(f'--trial={trial} must be from 0 to {len(trials) - 1}')
    seeds = jnp.array([t['seed'] for t in trials], jnp.uint32)
    one_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=one_device),
        jax.eval_shape(lambda: init_stack(config, seeds)),
    )
    with open(workdir / 'lock', 'a') as lock:
        try:
            # Opening checkpoints clears unfinished saves, which must not be those of a live run.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f'--workdir={workdir} is being trained; wait or stop it') from error
        checkpoints = Checkpoints(workdir / 'checkpoints')
        try:
            found = checkpoints.restore(target)
        finally:
            checkpoints.close()
    if found is None:
        raise ConfigError(f'--workdir={workdir} has no checkpoint yet')
    state = jax.tree.map(lambda a: a[trial], found[0]['trials'])
    named = ', '.join(f'{name}={value}' for name, value in trials[trial].items())
    log.info('step %d, trial %d: %s', int(found[0]['step']), trial, named)
    if not state['alive']:
        log.warning('trial %d diverged; these are its last finite weights', trial)
    dtype = jnp.dtype(config.model.compute_dtype)
    params = jax.tree.map(lambda p: p.astype(dtype), state['params'])
    return config, nnx.merge(graph_of(config), params)


if __name__ == '__main__':
    cli.run(main)
