"""A study goes on with a version of the package whose settings have fields more."""

import shutil
from pathlib import Path

import pytest

from tests.experiments import conftest

ROOT = Path(__file__).parents[2]
ADDED = {
    'model_config.py': ('ModelConfig', "lately: str = setting('as_before', 'Of scores.')"),
    'run_config.py': ('TrainConfig', "retries: int = setting(2, 'Of saves.', least=1)"),
    'study_config.py': ('Study', "correction: str = setting('holm', 'Of p values.')"),
}
FLAGS = ('--config=study.py', '--workdir=out', '--config.base.trials.seeds=(0,)')


@pytest.fixture
def later(tmp_path, monkeypatch):
    """A copy of the package with the fields added, which the next scripts run."""

    def use():
        root = tmp_path / 'later'
        for name in ('qkattn', 'experiments'):
            ignored = shutil.ignore_patterns('__pycache__', 'results')
            shutil.copytree(ROOT / name, root / name, ignore=ignored)
        for name, (cls, line) in ADDED.items():
            file = root / 'qkattn/config' / name
            head, found, tail = file.read_text().partition(f'class {cls}:\n')
            docstring, rest = tail.split('"""\n', 1) if tail.count('"""') else ('', tail)
            assert found
            file.write_text(f'{head}{found}{docstring}"""\n\n    {line}\n{rest}')
        monkeypatch.setattr(conftest, 'ROOT', root)

    return use


@pytest.mark.slow
def test_a_study_is_resumed_after_fields_were_added(script, later, tmp_path):
    first = script('ablate', *FLAGS)
    assert first.returncode == 0, first.stderr
    out = tmp_path / 'out'
    before = {path: path.read_bytes() for path in out.rglob('*.json*')}
    assert len(list(out.glob('runs/*/result.json'))) == 2
    later()
    again = script('ablate', *FLAGS)
    assert again.returncode == 0, again.stderr
    assert {path: path.read_bytes() for path in out.rglob('*.json*')} == before  # no run was opened
    other = script('ablate', *FLAGS, '--config.base.train.retries=3')
    assert other.returncode == 2 and 'base.train.retries: 2 -> 3\n' in other.stderr, other.stderr
    run = next(out.glob('runs/qk-vo*'))
    assert script('train', '--config=run.py', f'--workdir={run}').returncode == 2
    accepted = script('ablate', *FLAGS, '--config.base.train.retries=3', '--accept_changes')
    assert accepted.returncode == 0, accepted.stderr
    assert len(list(out.glob('runs/*/result.json'))) == 4
    assert '"changes": ["base.train.retries: 2 -> 3"]' in (out / 'ledger.jsonl').read_text()
    # The version without the field names it.
    conftest.ROOT = ROOT
    old = script('ablate', *FLAGS)
    assert old.returncode == 2
    assert 'plan.jsonl has an unknown field train.retries=3; use the newer version' in old.stderr
