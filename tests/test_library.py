"""`import qkattn` in a program of one's own."""

import subprocess
import sys
from pathlib import Path

import pytest

import qkattn

SOURCE = Path(qkattn.__file__)


def test_every_name_is_exported_and_listed():
    for name in qkattn.__all__:
        assert callable(getattr(qkattn, name)) and name in dir(qkattn)
        assert not (SOURCE.parent / name).exists(), 'the name of a package'
    with pytest.raises(AttributeError, match="'qkattn' has no attribute 'biuld'"):
        _ = qkattn.biuld


def test_importing_the_package_imports_nothing_heavy():
    program = 'import sys, qkattn; dir(qkattn); sys.exit(bool({"jax", "numpy"} & {*sys.modules}))'
    assert subprocess.run([sys.executable, '-c', program], cwd=SOURCE.parents[1]).returncode == 0
