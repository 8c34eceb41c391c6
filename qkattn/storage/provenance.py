"""Provenance of results: code, versions, devices, command line."""

import datetime
import importlib.metadata
import os
import platform
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

RECORDED_VERSIONS = (
    'jax',
    'jaxlib',
    'flax',
    'optax',
    'orbax-checkpoint',
    'tensorflow-datasets',
    'grain',
    'numpy',
)


def describe_start(
    command: list[str] | None, imported: Mapping[str, str | None] | None = None
) -> dict[str, Any]:
    """Describes this process as it starts; asks jax for its devices.

    Args:
      command: the command line; None: not recorded.
      imported: the sha256 of the source file of each import path in the config.

    Returns:
      JSON-compatible fields; an installed version that cannot be found is None.
    """
    device = jax.devices()[0]
    return {
        'started': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
        'command': command,
        'working_directory': os.getcwd(),
        'hostname': socket.gethostname(),
        'process': os.getpid(),
        'git': git_state(Path(__file__).resolve().parent),
        'python': platform.python_version(),
        'platform': platform.platform(),
        'imported': dict(imported or {}),
        'versions': {name: _version(name) for name in RECORDED_VERSIONS},
        'devices': {
            'platform': device.platform,
            'kind': device.device_kind,
            'count': jax.device_count(),
            'processes': jax.process_count(),
        },
    }


def git_state(directory: Path) -> dict[str, Any]:
    """Returns the checkout that the package in `directory` belongs to.

    Returns:
      {'commit': full hash, 'dirty': whether files differ from it or are untracked}; without such a
      checkout {'commit': None, 'dirty': None, 'reason': why}. A package installed into an
      environment inside another repository's checkout does not belong to it.
    """
    try:
        _git(directory, 'ls-files', '--error-unmatch', '__init__.py')
        commit = _git(directory, 'rev-parse', 'HEAD').strip()
        dirty = bool(_git(directory, 'status', '--porcelain'))
    except subprocess.CalledProcessError as error:
        return {'commit': None, 'dirty': None, 'reason': error.stderr.strip()}
    except (OSError, subprocess.TimeoutExpired) as error:
        return {'commit': None, 'dirty': None, 'reason': str(error)}
    return {'commit': commit, 'dirty': dirty}


def _git(directory: Path, *arguments: str) -> str:
    # Variables like GIT_DIR, which git sets for its hooks, would name another repository.
    environment = {k: v for k, v in os.environ.items() if not k.startswith('GIT_')}
    environment['GIT_OPTIONAL_LOCKS'] = '0'
    return subprocess.run(
        ['git', '-C', str(directory), *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
        env=environment,
    ).stdout


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
