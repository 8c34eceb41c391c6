"""`import qkattn`, and the command: what it lists, what it runs, what it refuses."""

import sys
from pathlib import Path

import pytest

import qkattn
from qkattn.__main__ import main
from tests.experiments.conftest import ROOT, exit_code


def test_every_name_of_the_package_is_exported_and_listed():
    for name in qkattn.__all__:
        assert callable(getattr(qkattn, name)) and name in dir(qkattn)
        assert not Path(qkattn.__file__).with_name(name).exists(), 'the name of a package'
    with pytest.raises(AttributeError, match="'qkattn' has no attribute 'biuld'"):
        _ = qkattn.biuld


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """command('train', '--flag=1', ...) -> exit code and output, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', sys.path[:])

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, 'argv', ['/bin/qkattn', *arguments])
        code = exit_code(main)
        return code, ''.join(capsys.readouterr())

    return run


def test_help_names_every_script_and_every_config(command):
    code, text = command('--help')
    assert code == 0 and command() == (code, text)
    assert all(len(line) <= 80 for line in text.splitlines())
    listed = ' '.join(text.split())
    for path in (*ROOT.glob('experiments/[a-z]*.py'), *ROOT.glob('configs/**/[a-z]*.py')):
        name = path.relative_to(ROOT).with_suffix('').as_posix().partition('/')[2]
        assert f' {name} {path.read_text().splitlines()[0].strip(chr(34))}' in listed


def test_commands_run_or_are_refused_in_one_line(command, tmp_path):
    # An import path names a file of the working directory.
    (tmp_path / 'mine.py').write_text('from qkattn.attention.scores.qk import QK as Mine')
    small = ('train', '--config=small')
    for arguments, code, words in (
        (['--version'], 0, qkattn.__version__),
        (['trian'], 2, "unknown command 'trian'; known are ablate, analyze, "),
        (small, 2, '--workdir=DIRECTORY is required'),
        (['train', '--config=smal', '--workdir=w'], 2, 'come with qkattn are char_lm_cpu, '),
        ([*small, '--workdir=w', '--config.model.score=mine:Miss'], 2, "mine has no 'Miss'"),
    ):
        ended, text = command(*arguments)
        assert ended == code and words in text and text.count('\n') == 1
    assert not (tmp_path / 'w').exists()
