"""A model by itself: settings and parameters in a directory, without optimizer state or data.

    directory/model.safetensors   parameters by path, e.g. blocks.attention.score.w_q_DNH
    directory/qkattn.json         {"model": fields of ModelConfig, "origin": where it came from}

Conversions and imports write such directories; `train.init_from` starts a run from one.
"""

import logging
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import traverse_util

from qkattn.config import Config, ModelConfig, from_json, to_json
from qkattn.errors import ConfigError
from qkattn.model.cost import abstract_params
from qkattn.run.files import replacing
from qkattn.run.records import read_json, write_json

WEIGHTS, ABOUT = 'model.safetensors', 'qkattn.json'

log = logging.getLogger(__name__)


def save(
    directory: str | os.PathLike, model: ModelConfig, params: dict, *, origin: dict[str, Any]
) -> Path:
    """Writes the directory, which must not hold weights yet.

    Raises:
      ConfigError: there are weights already.
    """
    path = Path(directory).absolute()
    if (path / WEIGHTS).exists() or (path / ABOUT).exists():
        raise ConfigError(f'{path} already holds weights; give another directory')
    path.mkdir(parents=True, exist_ok=True)
    flat = traverse_util.flatten_dict(params, sep='.')
    flat = {name: np.ascontiguousarray(leaf) for name, leaf in flat.items()}
    with replacing(path / WEIGHTS) as part:
        safetensors.numpy.save_file(flat, part)
    write_json(path / ABOUT, {'model': to_json(model), 'origin': origin})
    return path


def load(path: str | os.PathLike, trial: int = 0) -> tuple[ModelConfig, dict]:
    """Settings and parameters (float32 numpy) of a weights directory, or of one trial of a run.

    Raises:
      ConfigError: nothing of the kind at `path`, no such trial, or parameters that are not those
        of the settings.
    """
    path = Path(path).absolute()
    if (path / ABOUT).exists():
        model, params = _load_directory(path)
    elif (path / 'config.json').exists() and (path / 'checkpoints').exists():
        model, params = _load_run(path, trial)
    else:
        raise ConfigError(
            f'{path} holds neither weights ({ABOUT}) nor a run with checkpoints (config.json)'
        )
    check(model, params, str(path))
    return model, params


def check(model: ModelConfig, params: dict, where: str) -> None:
    """Raises ConfigError where `params` are not the parameters of `model`."""
    wanted = traverse_util.flatten_dict(abstract_params(model), sep='.')
    found = traverse_util.flatten_dict(params, sep='.')
    if different := sorted(wanted.keys() ^ found.keys()):
        side = 'lacks' if different[0] in wanted else 'has no place for'
        raise ConfigError(f'{where}: the model {side} parameter {different[0]}')
    for name, leaf in wanted.items():
        if leaf.shape != found[name].shape:
            raise ConfigError(f'{where}: {name} is {found[name].shape}, not {leaf.shape}')


def _load_directory(path: Path) -> tuple[ModelConfig, dict]:
    model = from_json(ModelConfig, read_json(path / ABOUT)['model'], 'model.')
    try:
        flat = safetensors.numpy.load_file(path / WEIGHTS)
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f'{path / WEIGHTS} cannot be read: {error}') from error
    return model, traverse_util.unflatten_dict(flat, sep='.')


def _load_run(path: Path, trial: int) -> tuple[ModelConfig, dict]:
    from qkattn.train import checkpoint, step

    config = from_json(Config, read_json(path / 'config.json')['config'])
    trials = len(config.trials.trials())
    if not 0 <= trial < trials:
        raise ConfigError(f'trial={trial} must be in [0, {trials}), the trials of {path}')
    target = jax.eval_shape(lambda: step.init_stack(config, jnp.zeros(trials, jnp.uint32)))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), target)
    checkpoints = checkpoint.Checkpoints(path / 'checkpoints', read_only=True)
    try:
        found = checkpoints.restore(target)
    finally:
        checkpoints.close()
    if found is None:
        raise ConfigError(f'{path} has no checkpoint yet')
    if not found[0]['trials']['alive'][trial]:
        log.warning('trial %d of %s diverged; these are its last finite weights', trial, path)
    params = jax.tree.map(lambda a: np.asarray(a[trial]), found[0]['trials']['params'])
    return config.model, params
