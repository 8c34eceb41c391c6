"""Paths in flags and settings: a single parser reads all of them, and expands ~."""

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
# Settings with names from which paths are made. Their bounds say `path`.
NAMES = {'name', 'languages', 'task', 'corpora', 'repeats'}


def flags_of(script: Path) -> dict[str, str]:
    """Maps each flag that a script defines to the function that defines the flag.

    For example, flags.DEFINE_bool('list', ...) and cli.define_path('out', ...) give
    {'list': 'DEFINE_bool', 'out': 'define_path'}. The script is parsed, but not run.
    """
    functions = {}
    syntax_tree = ast.parse(script.read_text())
    for node in ast.walk(syntax_tree):
        # A call of an attribute of a module, such as cli.define_path(...).
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            function = node.func.attr
            if function.startswith(('DEFINE_', 'define_path')):
                flag = node.args[0].value  # the first argument is the flag's name
                functions[flag] = function
    return functions


FLAGS = {name: flags_of(path) for name, path in shipped('experiments').items()}  # by script
SHARED = flags_of(Path(cli.__file__))  # flags of several scripts
PATH_FLAGS = [
    (script, flag)
    for script, flags in FLAGS.items()
    for flag, function in flags.items()
    if function.startswith('define_path')
]


def test_every_flag_of_text_is_a_path_or_known_to_be_none():
    text_functions = ('DEFINE_string', 'DEFINE_list', 'DEFINE_multi_string')
    text_flags = set()
    for flags in (*FLAGS.values(), SHARED):
        for flag, function in flags.items():
            if function in text_functions:
                text_flags.add(flag)

    assert text_flags == NOT_PATHS
    assert len(PATH_FLAGS) > 15


@pytest.mark.parametrize(('script', 'flag'), PATH_FLAGS)
def test_a_tilde_is_expanded_in_every_path_flag(refusal, script, flag):
    """The user 'not a user' does not exist, so the error shows that ~ is expanded."""
    sentence = refusal(script, f'--{flag}=~not a user/a')
    assert 'names no home directory' in sentence


def test_a_tilde_is_expanded_at_the_start_of_a_path(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))

    assert PathParser().parse('~/a') == f'{tmp_path}/a'
    assert PathsParser().parse('~/a,b') == [f'{tmp_path}/a', 'b']
    for unchanged in ('', 'gs://a/~b', './a'):
        assert PathParser().parse(unchanged) == unchanged


@pytest.mark.parametrize('script', ['train', 'ablate', 'prepare_data'])
def test_a_config_may_be_below_the_home_directory(refusal, tmp_path, monkeypatch, script):
    monkeypatch.setenv('HOME', str(tmp_path))
    (tmp_path / 'own.py').write_text('1 / 0')

    # The error shows that the file was found and run.
    assert 'ZeroDivisionError' in refusal(script, '--config=~/own.py')


@pytest.mark.parametrize('file', ['pipe', '/dev/zero', '~/pipe'])
def test_a_config_is_a_regular_file(refusal, tmp_path, monkeypatch, file):
    monkeypatch.setenv('HOME', str(tmp_path))
    os.mkfifo(tmp_path / 'pipe')
    with time_limit(60):
        assert 'no regular file' in refusal('train', f'--config={file}')


def flag(value):
    """Stands for a flag of absl."""
    return Mock(value=value)


@pytest.mark.parametrize('file', ['pipe', '/dev/zero'])
def test_a_text_file_is_a_regular_file(tmp_path, monkeypatch, file):
    monkeypatch.chdir(tmp_path)
    os.mkfifo('pipe')
    text_flag = flag(None)
    file_flag = flag(file)
    with time_limit(10), refused('cannot be read: it is a (pipe|device) and no regular file'):
        text_or_file_content(text_flag, file_flag)


def test_text_may_come_from_a_pipe_that_the_shell_opened():
    """For --file=<(command), the shell opens a pipe.

    The byte order mark and the carriage return are dropped.
    """
    read_descriptor, write_descriptor = os.pipe()
    with os.fdopen(read_descriptor):
        with os.fdopen(write_descriptor, 'wb') as file:
            file.write(b'\xef\xbb\xbfone\r\ntwo\n')
        text_flag = flag(None)
        file_flag = flag(f'/dev/fd/{read_descriptor}')
        assert text_or_file_content(text_flag, file_flag) == 'one\ntwo\n'


def read_downloaded(path):
    config = DataConfig(manual_dir=path, data_dir='data')
    fetch_file('multi30k', f'{CAPTIONS}/train.de.gz', config)


def read_evaluation_corpus(path):
    config = Config(data=DataConfig(evaluate=(f'text:{path}',)))
    (entry,) = entries(config)
    text(entry.data)


# For each path setting, a function that reads the path. If the path is absent, its error names it.
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


def path_settings(config_class):
    """Full names of the settings whose bounds say `path`, such as 'data.path'."""
    return {name for name, field in settings(config_class).items() if field.bounds.path}


def test_every_setting_that_is_a_path_is_in_the_table():
    paths = set()
    for name in path_settings(Config) | path_settings(Study):
        last_part = name.rpartition('.')[2]
        if last_part not in NAMES:
            paths.add(name.removeprefix('base.'))

    # 'data.path of tokens' is another reader of 'data.path'.
    settings_in_table = {key.removesuffix(' of tokens') for key in READERS}
    assert paths == settings_in_table


@pytest.mark.parametrize('read', READERS.values(), ids=READERS)
def test_a_tilde_in_a_setting_is_the_home_directory(tmp_path, monkeypatch, read):
    home = tmp_path / 'home'
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('HOME', str(home))
    with refused(str(home / 'absent')):
        read('~/absent')
