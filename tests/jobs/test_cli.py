"""The command line as a user would type it again."""

import sys

import pytest

from qkattn.jobs import cli


@pytest.mark.parametrize(
    ('typed', 'want'),
    [
        (['python3', '-m', 'experiments.train'], ['python', '-m', 'experiments.train']),
        (['/bin/python3', '/bin/qkattn', 'train'], ['qkattn', 'train']),
    ],
)
def test_the_command_is_the_one_that_was_typed(monkeypatch, typed, want):
    monkeypatch.setattr(sys, 'orig_argv', [*typed, '--workdir=w'])
    monkeypatch.setattr(sys, 'argv', ['changed by the start', '--workdir=w'])
    assert cli.command('train') == [*want, '--workdir=w']
