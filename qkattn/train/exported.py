"""Exported parameters: a model by itself, which conversions write and `train.init_from` reads.

directory/model.safetensors   parameters by path, e.g. blocks.attention.score.w_q_DNH
directory/qkattn.json         {"model": fields of ModelConfig, "origin": where it came from,
                               "parameters_crc32": checksum of each parameter's bytes,
                               "parameters_sha256": their `fingerprint`}
"""

import contextlib
import hashlib
import itertools
import logging
import os
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import traverse_util

from qkattn.config import Config, ModelConfig, from_json, to_json
from qkattn.config.imports import require_named
from qkattn.errors import ConfigError
from qkattn.model.cost import abstract_params
from qkattn.storage.files import absolute, local_copy, replacing
from qkattn.storage.records import CONFIG, read_json, write_json
from qkattn.train.checkpoint import Checkpoints
from qkattn.train.step import init_stack

PARAMETERS = 'model.safetensors'
ABOUT = 'qkattn.json'

log = logging.getLogger(__name__)


def save(
    directory: str | os.PathLike, model: ModelConfig, params: dict, *, origin: dict[str, Any]
) -> Path:
    """Writes a model to `directory`; raises ConfigError where that already holds one."""
    path = absolute(directory)
    if (path / PARAMETERS).exists() or (path / ABOUT).exists():
        raise ConfigError(f'{path} already holds parameters; give another directory')
    path.mkdir(parents=True, exist_ok=True)
    flat = traverse_util.flatten_dict(params, sep='.')
    flat = {name: np.ascontiguousarray(leaf) for name, leaf in flat.items()}
    with replacing(path / PARAMETERS) as part:
        safetensors.numpy.save_file(flat, part)
    sums = {'parameters_crc32': _crc32s(flat), 'parameters_sha256': fingerprint(params)}
    write_json(path / ABOUT, {'model': to_json(model), 'origin': origin, **sums})
    return path


def load(
    path: str | os.PathLike,
    imports: Collection[str] = (),
    remedy: str = 'if you trust it, give --imports={} (imports= in Python)',
) -> tuple[ModelConfig, dict]:
    """Settings and parameters (float32, numpy) of an export, or of the first trial of a run.

    An import path in the description of an export has to be one of `imports`; else ConfigError,
    which ends with the `remedy`.
    """
    path = absolute(path)
    if (path / ABOUT).exists():
        about = read_json(path / ABOUT, {'model': dict})
        require_named(about['model'], imports, path / ABOUT, remedy)
        model = from_json(ModelConfig, about['model'], 'model.')
        try:
            with local_copy(path / PARAMETERS) as file:
                flat = safetensors.numpy.load_file(file)
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise ConfigError(f'{path / PARAMETERS} cannot be read: {error}') from error
        sums = _crc32s(flat)
        if about.get('parameters_crc32', sums) != sums:
            advice = 'restore it from a copy or export the model again'
            raise ConfigError(f'{path / PARAMETERS} is damaged (see {ABOUT}); {advice}')
        params = traverse_util.unflatten_dict(flat, sep='.')
    elif is_run(path):
        config, _, stack = load_stack(path)
        if not stack['alive'][0]:
            log.warning('the first trial of %s diverged', path)
        model = config.model
        params = jax.tree.map(lambda a: np.asarray(a[0]), stack['params'])
    elif (path / 'study.json').exists():
        runs = sorted((path / 'runs').glob('*'))
        which = f'; give one of its runs, e.g. {runs[0]}' if runs else ' without runs yet'
        raise ConfigError(f'{path} is a study{which}')
    else:
        needed = f'exported parameters ({ABOUT}) nor a run with checkpoints (config.json)'
        raise ConfigError(f'{path} holds neither {needed}')
    check(model, params, str(path))
    return model, params


def origin(path: Path) -> dict[str, Any]:
    """Where exported parameters came from; {} for a source of another kind."""
    about = path / ABOUT
    return read_json(about, {'origin': dict})['origin'] if about.exists() else {}


def is_run(path: Path) -> bool:
    """Whether a directory holds a run with checkpoints."""
    return (path / 'config.json').exists() and (path / 'checkpoints').is_dir()


def check(model: ModelConfig, params: dict, where: str) -> None:
    """Raises ConfigError where names or shapes of `params` are not those of `model`."""
    expected = traverse_util.flatten_dict(abstract_params(model), sep='.')
    actual = traverse_util.flatten_dict(params, sep='.')
    if different := sorted(expected.keys() ^ actual.keys()):
        side = 'lacks' if different[0] in expected else 'has no place for'
        raise ConfigError(f'{where}: the model {side} parameter {different[0]}')
    for name, leaf in expected.items():
        if leaf.shape != actual[name].shape:
            raise ConfigError(f'{where}: {name} is {actual[name].shape}, not {leaf.shape}')


def fingerprint(params: dict) -> str:
    """The sha256 of names, types, shapes and bytes, in the order of names."""
    digest = hashlib.sha256()
    for name, leaf in sorted(traverse_util.flatten_dict(params, sep='.').items()):
        array = np.asarray(leaf)
        digest.update(f'{name} {array.dtype} {array.shape}\n'.encode() + array.tobytes())
    return digest.hexdigest()


def _crc32s(flat: dict[str, np.ndarray]) -> dict[str, int]:
    return {name: zlib.crc32(leaf.tobytes()) for name, leaf in sorted(flat.items())}


def load_stack(path: Path, average: int = 1) -> tuple[Config, int, dict]:
    """Settings, step and trials (as in `train.step`, stacked) of a run's newest checkpoint.

    The parameters are the mean of the newest `average` checkpoints (Vaswani et al. 2017, section
    6.1); ConfigError if there are fewer without a gap.
    """
    config = from_json(Config, read_json(path / 'config.json', CONFIG)['config'])
    seeds = jnp.zeros(len(config.trials.trials()), jnp.uint32)
    target = jax.eval_shape(lambda: init_stack(config, seeds))
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    target = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), target)
    with contextlib.closing(Checkpoints(path / 'checkpoints', read_only=True)) as checkpoints:
        states = [state for state, _ in itertools.islice(checkpoints.sound(target), average)]
    if not states:
        raise ConfigError(f'{path} has no checkpoint yet')
    # in checkpoint_every
    steps = [int(state['step']) for state in states]
    span = average - 1
    if len(states) < average or steps[0] - steps[-1] > span * config.train.checkpoint_every:
        raise ConfigError(
            f'average={average} needs that many in a row, but the newest sound checkpoints of '
            f'{path} are of steps {steps}; train.keep={config.train.keep} there sets how many stay'
        )
    newest = states[0]['trials']
    params = jax.tree.map(
        lambda *leaves: sum(leaves) / average, *(state['trials']['params'] for state in states)
    )
    return config, steps[0], {**newest, 'params': params}
