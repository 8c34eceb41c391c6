"""What the README shows is what the project does."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qkattn import catalogue, study
from qkattn.config import ConfigError, Study, from_config_dict
from qkattn.validate import validate

ROOT = Path(__file__).parents[1]
README = (ROOT / 'README.md').read_text()


def between(begin: str, end: str) -> str:
    assert README.count(begin) == 1, begin
    return README.split(begin)[1].split(end)[0].strip()


def test_the_tables_are_generated():
    assert between(catalogue.BEGIN, catalogue.END) == catalogue.markdown().strip()


@pytest.fixture
def example(tmp_path, monkeypatch):
    code = between('<!-- example: signed_diagonal.py -->\n```python', '```')
    (tmp_path / 'signed_diagonal.py').write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield 'signed_diagonal:SignedDiagonal'
    sys.modules.pop('signed_diagonal', None)


def test_the_example_takes_part_in_a_study(example):
    (cell,) = study.expand(Study(variants=(f'{example}/vo',)))
    assert abs(cell.match.residual) <= 1e-3


def test_the_example_keeps_the_contract(example, tmp_path):
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', 'tests/attention/test_contract.py']
        + ['-p', 'no:cacheprovider', f'--cell={example}/vo'],
        cwd=ROOT,
        env={**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), str(tmp_path)])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    assert 'contract suite: 1 cells run' in done.stdout


def test_every_path_and_module_that_it_names_exists():
    for path in re.findall(r'`((?:qkattn|experiments|configs|tests|launch)/[\w./]*)`', README):
        assert (ROOT / path).exists(), path
    for module in re.findall(r'-m (experiments\.\w+)', README):
        assert importlib.util.find_spec(module), module
    for image in re.findall(r'!\[[^]]*\]\(([^)]+)\)', README):
        assert (ROOT / image).exists(), image


@pytest.mark.parametrize('path', sorted((ROOT / 'configs').glob('*.py')), ids=lambda p: p.stem)
def test_every_config_is_valid(path):
    namespace: dict = {}
    exec(compile(path.read_text(), path, 'exec'), namespace)
    config = from_config_dict(namespace['get_config']())
    try:
        study.expand(config) if isinstance(config, Study) else validate(config)
    except ConfigError as error:
        pytest.fail(str(error))
    assert namespace['__doc__']
