"""Paths of flags and settings: all by one parser, which expands ~."""

import ast
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from qkattn.config import Config, DataConfig, Study
from qkattn.config.setting import settings
from qkattn.data.cache import data_root, local_directory
from qkattn.data.corpora.downloads import CAPTIONS, fetch_file
from qkattn.data.corpora.own_files import text
from qkattn.data.evaluation_corpora import entries
from qkattn.data.tokenizers.subwords import FileTokenizer
from qkattn.errors import ConfigError
from qkattn.jobs import cli
from qkattn.jobs.cli import PathParser, PathsParser, shipped, text_or_file_content
from qkattn.train import exported
from tests.processes import time_limit
from tests.refusals import refused

# Flags of text that name no file and no directory.
NOT_PATHS = {
    'accept',
    'apply',
    'claims',
    'data',
    'imports',
    'plots',
    'prompt',
    'prompt_tokens',
    'score',
    'suite',
    'tasks',
    'text',
    'tokens',
    'variant',
    'variants',
    'why',
    'workers',
}
# Settings with the bounds of a path that are names, of which paths are made.
NAMES = {'name', 'languages', 'task', 'corpora', 'repeats'}


def flags_of(script: Path) -> dict[str, str]:
    """The flags that a script defines, each with its function, as in {'out': 'define_path'}."""
    functions = {}
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            function = node.func.attr
            if function.startswith(('DEFINE_', 'define_path')):
                functions[node.args[0].value] = function
    return functions


# By script; those that several scripts share are defined in the module of command lines.
FLAGS = {name: flags_of(path) for name, path in shipped('experiments').items()}
SHARED = flags_of(Path(cli.__file__))
PATH_FLAGS = [
    (script, flag)
    for script, flags in FLAGS.items()
    for flag, function in flags.items()
    if function.startswith('define_path')
]


def test_every_flag_of_text_is_a_path_or_known_to_be_none():
    texts = ('DEFINE_string', 'DEFINE_list', 'DEFINE_multi_string')
    every_flag = [*FLAGS.values(), SHARED]
    names = {name for flags in every_flag for name, kind in flags.items() if kind in texts}
    assert names == NOT_PATHS
    assert len(PATH_FLAGS) > 15


@pytest.mark.parametrize(('script', 'flag'), PATH_FLAGS)
def test_the_home_directory_may_be_written_as_a_tilde(refusal, script, flag):
    """The home of a user who does not exist is refused by the function that expands ~."""
    assert 'names no home directory' in refusal(script, f'--{flag}=~not a user/a')


def test_a_tilde_is_expanded_in_each_path(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    assert PathParser().parse('~/a') == f'{tmp_path}/a'
    assert PathsParser().parse('~/a,b') == [f'{tmp_path}/a', 'b']
    assert [PathParser().parse(path) for path in ('', 'gs://a/~b', './a')] == [
        '',
        'gs://a/~b',
        './a',
    ]


@pytest.mark.parametrize('script', ['train', 'ablate', 'prepare_data'])
def test_a_config_may_be_below_the_home_directory(refusal, tmp_path, monkeypatch, script):
    monkeypatch.setenv('HOME', str(tmp_path))
    (tmp_path / 'own.py').write_text('1 / 0')
    assert 'ZeroDivisionError' in refusal(script, '--config=~/own.py')


@pytest.mark.parametrize('file', ['pipe', '/dev/zero', '~/pipe'])
def test_a_config_is_a_regular_file(refusal, tmp_path, monkeypatch, file):
    monkeypatch.setenv('HOME', str(tmp_path))
    os.mkfifo(tmp_path / 'pipe')
    with time_limit(60):
        assert 'no regular file' in refusal('train', f'--config={file}')


def flag(value):
    return Mock(value=value)


@pytest.mark.parametrize('file', ['pipe', '/dev/zero'])
def test_sentences_are_read_of_a_regular_file(tmp_path, monkeypatch, file):
    monkeypatch.chdir(tmp_path)
    os.mkfifo('pipe')
    with time_limit(10), refused('cannot be read: it is a (pipe|device) and no regular file'):
        text_or_file_content(flag(None), flag(file))


def test_sentences_may_come_from_a_pipe_that_the_shell_has_opened():
    """As in --file=<(command). A byte order mark and carriage returns are dropped."""
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, 'wb') as file:
        file.write(b'\xef\xbb\xbfone\r\ntwo\n')
        file.close()
        assert text_or_file_content(flag(None), flag(f'/dev/fd/{reading}')) == 'one\ntwo\n'


def read_downloaded(path):
    config = DataConfig(manual_dir=path, data_dir='data')
    fetch_file('multi30k', f'{CAPTIONS}/train.de.gz', config)


def read_evaluation_corpus(path):
    config = Config(data=DataConfig(evaluate=(f'text:{path}',)))
    (entry,) = entries(config)
    text(entry.data)


# For each setting that is a path, what reads it and names the path where there is nothing.
READERS = {
    'data.data_dir': lambda path: raise_path(data_root(path)),
    'data.evaluate': read_evaluation_corpus,
    'data.manual_dir': read_downloaded,
    'data.path': lambda path: text(DataConfig(name='text', path=path)),
    'data.path of tokens': lambda path: raise_path(local_directory(path, 'data.path')),
    'data.tokenizer': FileTokenizer.open,
    'train.init_from': exported.load,
}


def raise_path(path):
    raise ConfigError(str(path))


def path_settings(kind):
    return {name for name, field in settings(kind).items() if field.bounds.path}


def test_every_setting_that_is_a_path_is_in_the_table():
    names = {name.removeprefix('base.') for kind in (Config, Study) for name in path_settings(kind)}
    paths = {name for name in names if name.rpartition('.')[2] not in NAMES}
    assert paths == {name.partition(' ')[0] for name in READERS}


@pytest.mark.parametrize('read', READERS.values(), ids=READERS)
def test_a_tilde_in_a_setting_is_the_home_directory(tmp_path, monkeypatch, read):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    with refused(str(tmp_path / 'home/absent')):
        read('~/absent')
