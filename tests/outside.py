"""The modules of docs/outside.md, as files that can be imported."""

import re
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / 'docs' / 'outside.md'
BLOCK = re.compile(r'^```python\n# (\w+)\.py\n(.*?)^```$', re.MULTILINE | re.DOTALL)
MODULES = dict(BLOCK.findall(PAGE.read_text('utf-8')))


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """Puts the modules into a directory on the path; returns it."""
    for name, source in MODULES.items():
        (tmp_path / f'{name}.py').write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


def chosen(metafunc: pytest.Metafunc, kind: str, names: list[str]) -> None:
    """Runs a test that asks for `kind` on the names given on the command line, or on `names`."""
    if kind in metafunc.fixturenames:
        metafunc.parametrize(kind, metafunc.config.getoption(f'--{kind}') or names)
