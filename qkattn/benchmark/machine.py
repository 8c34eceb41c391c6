"""The machine and the code of a benchmark."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from qkattn.run.cores import cpu, usable
from qkattn.run.provenance import RECORDED_VERSIONS, git_state

VERSIONS = (*RECORDED_VERSIONS, 'torch')


def facts() -> dict[str, Any]:
    """CPU, cores, memory, devices, versions and commit: what a result depends on."""
    commit = git_state(Path(__file__).resolve().parents[1])
    return {
        'cpu': cpu(),
        'cores': len(usable()),
        'memory_bytes': os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'),
        'accelerators': accelerators(),
        'platform': platform.platform(),
        'python': platform.python_version(),
        'versions': {name: _version(name) for name in VERSIONS},
        'git': commit,
    }


def load() -> float:
    """Processes that ran or waited for a core, on average over the last minute."""
    return round(os.getloadavg()[0], 2)


def accelerators() -> list[str]:
    """The NVIDIA GPUs by name; initializing jax here would take their memory."""
    command = ['nvidia-smi', '--query-gpu=name', '--format=csv,noheader']
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(
            '\n'
        )[:-1]
    except (OSError, subprocess.CalledProcessError):
        return []


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
