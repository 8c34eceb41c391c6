"""Real processes for the tests that kill and signal them."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def start_python(source: str, *arguments: object) -> subprocess.Popen:
    """Starts a process that runs `source`; it says when it is ready by printing a line."""
    return subprocess.Popen(
        [sys.executable, '-c', textwrap.dedent(source), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'},
    )
