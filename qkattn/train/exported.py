"""Exports: the settings and parameters of a model, without a run.

directory/model.safetensors   parameters by path, e.g. blocks.attention.score.w_q_DNH
directory/qkattn.json         {"model": fields of ModelConfig, "origin": where it came from,
                               "parameters_crc32": checksum of each parameter's bytes,
                               "parameters_sha256": hash of all parameters}
"""

import contextlib
import hashlib
import itertools
import logging
import os
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import traverse_util

from qkattn.config import Config, ModelConfig, fingerprint, from_json, to_json
from qkattn.config.imports import require_named
from qkattn.errors import ConfigError
from qkattn.model.cost import abstract_params
from qkattn.storage.files import absolute, local_copy, replacing
from qkattn.storage.records import CONFIG, read_json, write_json
from qkattn.train.checkpoint import Checkpoints
from qkattn.train.step import init_stack

# Files of an export.
PARAMETERS = 'model.safetensors'
ABOUT = 'qkattn.json'

log = logging.getLogger(__name__)


def save(
    directory: str | os.PathLike, model: ModelConfig, params: dict, *, origin: dict[str, Any]
) -> Path:
    """Writes a model's parameters and settings to `directory`; returns its absolute path.

    Args:
        directory: A directory without an export; created if it does not exist.
        model: The settings of the model.
        params: The parameters of the model, a nested dict.
        origin: Where the parameters came from, as JSON.

    Raises:
        ConfigError: The directory already holds an export.
    """
    path = absolute(directory)
    if (path / PARAMETERS).exists() or (path / ABOUT).exists():
        raise ConfigError(f'{path} already holds parameters; give another directory')
    path.mkdir(parents=True, exist_ok=True)
    # Names are paths, such as 'blocks.attention.score.w_q_DNH'.
    leaf_by_name = traverse_util.flatten_dict(params, sep='.')
    param_by_name = {name: np.ascontiguousarray(leaf) for name, leaf in leaf_by_name.items()}
    # The temporary file becomes the file of parameters once it is complete.
    with replacing(path / PARAMETERS) as temporary_file:
        safetensors.numpy.save_file(param_by_name, temporary_file)
    about = {
        'model': to_json(model),
        'origin': origin,
        'parameters_crc32': _crc32s(param_by_name),
        'parameters_sha256': parameters_sha256(params),
    }
    write_json(path / ABOUT, about)
    return path


def load(
    path: str | os.PathLike,
    imports: Collection[str] = (),
    remedy: str = 'if you trust it, give --imports={} (imports= in Python)',
) -> tuple[ModelConfig, dict]:
    """Loads the settings and parameters (float32, numpy) of a model.

    Args:
        path: The directory of an export, or of a run, whose first trial is loaded.
        imports: Import paths that an export may name. Loading runs their code, so list only trusted
            ones.
        remedy: The end of the error message for other import paths; tells the user what to do.

    Raises:
        ConfigError: The directory is neither an export nor a run, is damaged, has parameters that
            do not fit the model, or names an import path that is not in `imports`.
    """
    path = absolute(path)
    is_export = (path / ABOUT).exists()
    if not is_export and not is_run(path):
        raise ConfigError(_why_nothing_to_load(path))

    if is_export:
        about = read_json(path / ABOUT, {'model': dict})
        require_named(about['model'], imports, path / ABOUT, remedy)
        model = from_json(ModelConfig, about['model'], 'model.')
        params = _read_parameters(path / PARAMETERS, about)
    else:
        config, _, trials = load_stack(path)  # the arrays of X trials
        if not trials['alive'][0]:
            log.warning('the first trial of %s diverged', path)
        model = config.model
        params = jax.tree.map(lambda leaf_X: np.asarray(leaf_X[0]), trials['params'])
    check(model, params, str(path))
    return model, params


def _why_nothing_to_load(path: Path) -> str:
    """Returns an error message for a path that is neither an export nor a run."""
    if not (path / 'study.json').exists():
        return (
            f'{path} holds neither exported parameters ({ABOUT}) nor a run with checkpoints '
            '(config.json)'
        )
    runs = sorted((path / 'runs').glob('*'))
    if not runs:
        return f'{path} is a study without runs yet'
    return f'{path} is a study; give one of its runs, e.g. {runs[0]}'


def _read_parameters(path: Path, about: dict[str, Any]) -> dict:
    """Reads the parameters of an export as a nested dict.

    Args:
        path: The safetensors file.
        about: The content of qkattn.json.

    Raises:
        ConfigError: The file cannot be read, or differs from the checksums in `about`.
    """
    try:
        with local_copy(path) as file:
            param_by_name = safetensors.numpy.load_file(file)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ConfigError(f'{path} cannot be read: {error}') from error

    has_checksums = 'parameters_crc32' in about  # earlier versions wrote none
    if has_checksums and _crc32s(param_by_name) != about['parameters_crc32']:
        raise ConfigError(
            f'{path} is damaged (see {ABOUT}); restore it from a copy or export the model again'
        )
    return traverse_util.unflatten_dict(param_by_name, sep='.')


def origin(path: Path) -> dict[str, Any]:
    """Returns where the parameters of an export came from; {} if `path` is not an export."""
    about = path / ABOUT
    if not about.exists():
        return {}
    return read_json(about, {'origin': dict})['origin']


def is_run(path: Path) -> bool:
    """Whether a directory holds a run with checkpoints."""
    return (path / 'config.json').exists() and (path / 'checkpoints').is_dir()


def check(model: ModelConfig, params: dict, where: str) -> None:
    """Raises ConfigError if names or shapes of `params` do not fit the model.

    `where` says where `params` are from, for the message.
    """
    # Names are paths, such as 'blocks.mlp.w_in_DF'.
    expected = traverse_util.flatten_dict(abstract_params(model), sep='.')
    actual = traverse_util.flatten_dict(params, sep='.')
    for name in sorted(expected.keys() | actual.keys()):
        if name not in actual:
            raise ConfigError(f'{where}: the model lacks parameter {name}')
        if name not in expected:
            raise ConfigError(f'{where}: the model has no place for parameter {name}')
    for name, leaf in expected.items():
        if leaf.shape != actual[name].shape:
            raise ConfigError(f'{where}: {name} is {actual[name].shape}, not {leaf.shape}')


def parameters_sha256(params: dict) -> str:
    """Returns the sha256 of the names, types, shapes and bytes of all parameters."""
    digest = hashlib.sha256()
    param_by_name = traverse_util.flatten_dict(params, sep='.')
    for name in sorted(param_by_name):
        array = np.asarray(param_by_name[name])
        digest.update(f'{name} {array.dtype} {array.shape}\n'.encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _crc32s(param_by_name: dict[str, np.ndarray]) -> dict[str, int]:
    """Returns the CRC-32 of the bytes of each parameter, by name."""
    return {name: zlib.crc32(leaf.tobytes()) for name, leaf in sorted(param_by_name.items())}


def load_stack(path: Path, average: int = 1) -> tuple[Config, int, dict]:
    """Loads the newest checkpoint of a run, or averages the newest checkpoints.

    Args:
        path: The run directory.
        average: The number of checkpoints whose parameters are averaged (Vaswani et al. 2017,
            section 6.1).

    Returns:
        config: The settings of the run.
        step: The step of the newest checkpoint.
        trials: {'params': ..., 'opt_state': ..., 'alive': ...}, with leaves [X, ...] for the X
            trials of the run. All but 'params' are from the newest checkpoint.

    Raises:
        ConfigError: There are fewer than `average` checkpoints, or there is a gap between them.
        CheckpointError: All checkpoints are damaged, or the newest one is of another run.
    """
    config = from_json(Config, read_json(path / 'config.json', CONFIG)['config'])
    states = _newest_states(path, config, average)  # newest first
    if not states:
        raise ConfigError(f'{path} has no checkpoint yet')
    steps = [int(state['step']) for state in states]
    _require_in_a_row(steps, average, config, path)

    def mean(*arrays: Any) -> Any:
        return sum(arrays) / average

    newest_trials = states[0]['trials']
    params_of_states = [state['trials']['params'] for state in states]
    params = jax.tree.map(mean, *params_of_states)
    return config, steps[0], {**newest_trials, 'params': params}


def _require_in_a_row(steps: Sequence[int], average: int, config: Config, path: Path) -> None:
    """Raises ConfigError if a run lacks one of the newest `average` checkpoints.

    Args:
        steps: The steps of the checkpoints that could be read, newest first.
        average: The number of checkpoints to average.
        config: The settings of the run.
        path: The run directory, for the message.
    """
    # Consecutive checkpoints are at most checkpoint_every steps apart.
    distances = [newer - older for newer, older in itertools.pairwise(steps)]
    has_gap = any(distance > config.train.checkpoint_every for distance in distances)
    has_too_few = len(steps) < average
    if has_too_few or has_gap:
        raise ConfigError(
            f'average={average} needs that many in a row, but the newest sound checkpoints of '
            f'{path} are of steps {steps}; train.keep={config.train.keep} there sets how many stay'
        )


def _newest_states(path: Path, config: Config, count: int) -> list[dict]:
    """Reads the newest `count` undamaged checkpoints of a run onto one device, newest first.

    Returns fewer states if there are fewer checkpoints.
    """
    one_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    # Only the shapes of the state are computed, so any seeds will do.
    seeds_X = jnp.zeros(len(config.trials.trials()), jnp.uint32)
    shapes = jax.eval_shape(lambda: init_stack(config, seeds_X))
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one_device), shapes
    )
    checkpoints = Checkpoints(path / 'checkpoints', read_only=True, config_hash=fingerprint(config))
    with contextlib.closing(checkpoints):
        newest = itertools.islice(checkpoints.read_undamaged(target), count)
        return [state for state, _ in newest]
