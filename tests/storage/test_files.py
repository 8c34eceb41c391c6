"""Atomic writes and directories, on real files and with writers that fail or are killed."""

import errno
import os

import pytest

from qkattn.errors import DiskError, RunDirectoryError
from qkattn.storage.files import (
    as_path,
    check_directory,
    join_without_links,
    make_directory,
    replacing,
    require_plain_name,
    run_path,
    without_directories,
    write_atomic,
)
from tests.processes import umask
from tests.refusals import refused


@pytest.fixture
def file(tmp_path):
    """The only file in its directory, with the text 'before'."""
    path = tmp_path / 'file'
    path.write_text('before')
    return path


def names(directory):
    return [path.name for path in directory.iterdir()]


def permissions(path):
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize('mask', [0o002, 0o077])
def test_a_replaced_file_has_the_mode_of_the_umask(file, mask):
    """`replacing` gives a temporary file, which replaces `file` at the end of the block.

    The umask is the set of permissions that new files do not get.
    """
    # A killed writer has left its temporary file behind.
    leftover = file.with_name('file.tmp')
    leftover.touch(0o600)

    # A library in the block replaces the temporary file by a file for its owner only (0o600).
    with umask(mask), replacing(file) as temporary:
        temporary.unlink(missing_ok=True)
        temporary.touch(0o600)
        temporary.write_text('after')

    # With 0o666, every user may read and write. The mask takes permissions away.
    assert file.read_text() == 'after'
    assert permissions(file) == 0o666 & ~mask


@pytest.mark.parametrize('mask', [0o002, 0o077])
def test_a_written_file_has_the_mode_of_the_umask(tmp_path, mask):
    with umask(mask):
        path = write_atomic(tmp_path / 'a' / 'b', 'ä')

    assert path.read_bytes() == 'ä'.encode()
    assert permissions(path) == 0o666 & ~mask


def test_a_written_file_is_replaced_without_a_trace(tmp_path):
    write_atomic(tmp_path / 'a' / 'b', 'ä')

    path = write_atomic(tmp_path / 'a' / 'b', b'\xff')

    assert path.read_bytes() == b'\xff'
    assert names(path.parent) == ['b']


# System errors of a disk that cannot be written.
WRITE_ERRORS = [
    pytest.param(errno.ENOSPC, id='full disk'),
    pytest.param(errno.EDQUOT, id='used up quota'),
    pytest.param(errno.EROFS, id='read-only disk'),
]


@pytest.mark.parametrize('system_call', ['fsync', 'replace'])
@pytest.mark.parametrize('code', WRITE_ERRORS)
def test_a_failed_write_leaves_the_file_as_it_was(file, monkeypatch, system_call, code):
    """At the end of the block, `replacing` calls os.fsync and os.replace. One call fails."""

    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, system_call, fail)

    message = f'^{file.parent} cannot be written: '
    with pytest.raises(DiskError, match=message), replacing(file) as temporary:
        temporary.write_text('after')

    # The fixture wrote 'before'. The temporary file is removed.
    assert file.read_text() == 'before'
    assert names(file.parent) == ['file']


@pytest.mark.parametrize('is_wrapped', [False, True], ids=['system error', 'error of a library'])
@pytest.mark.parametrize('code', WRITE_ERRORS)
def test_a_block_that_cannot_write_leaves_the_file_as_it_was(file, is_wrapped, code):
    """The block raises a system error, or a library's error that contains the system's message."""
    message_of_system = os.strerror(code)
    if is_wrapped:
        error = ValueError(f'UNKNOWN: cannot write [OS error {code}: {message_of_system}]')
    else:
        error = OSError(code, message_of_system)

    message = f'^{file.parent} cannot be written: '
    with pytest.raises(DiskError, match=message), replacing(file) as temporary:
        temporary.write_text('after')
        raise error

    # The fixture wrote 'before'. The temporary file is removed.
    assert file.read_text() == 'before'
    assert names(file.parent) == ['file']


def test_a_directory_is_not_replaced_by_a_file(tmp_path):
    with pytest.raises(RunDirectoryError, match='is a directory where a file is expected'):
        write_atomic(tmp_path, 'x')


def test_an_error_unrelated_to_the_disk_is_raised_unchanged(tmp_path):
    with pytest.raises(ValueError, match='^other$'), replacing(tmp_path / 'file'):
        raise ValueError('other')


@pytest.mark.parametrize('function', [check_directory, make_directory])
@pytest.mark.parametrize(
    ('path', 'message'),
    [
        pytest.param(
            's3://bucket/run',
            's3://bucket/run is not a URL of the form gs://',
            id='another kind of bucket',
        ),
        pytest.param('file/run', r'file/run cannot be used \(Not a directory\)', id='below a file'),
        pytest.param('/proc', 'workdir=/proc cannot be used', id='read-only'),
        pytest.param(
            'x' * 256 + '/run', r'x/run cannot be used \(File name too long\)', id='long name'
        ),
        pytest.param(
            '~not a user/run',
            'run names no home directory; set HOME, or give a path without ~',
            id='unknown user',
        ),
    ],
)
def test_an_unusable_directory_is_refused(file, monkeypatch, function, path, message):
    monkeypatch.chdir(file.parent)

    with refused(message, RunDirectoryError):
        function(path)

    assert names(file.parent) == ['file']


def test_a_directory_is_checked_without_a_trace(tmp_path):
    directory = tmp_path / 'a' / 'run'
    assert check_directory(directory) == directory
    assert names(tmp_path) == []


def test_a_doubled_slash_at_the_start_of_a_path_becomes_one(tmp_path):
    directory = tmp_path / 'a' / 'run'
    doubled = f'/{directory}'

    assert check_directory(doubled) == directory
    assert make_directory(doubled) == directory
    assert names(directory) == []


def test_the_home_directory_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    assert check_directory('~/run') == tmp_path / 'run'
    assert as_path('~/run') == tmp_path / 'run'


@pytest.mark.parametrize(
    ('argument', 'expected'),
    [
        ('--workdir={cwd}/runs/a', '--workdir=runs/a'),
        ('--workdir={cwd}', '--workdir=.'),
        ('--workdir=/home/ann/My Studies/a/', '--workdir=a'),
        ('--workdir={cwd}/../a', '--workdir=a'),
        ('/home/ann/ablate.py', 'ablate.py'),
        ('--config=/home/ann/study.py:cpu', '--config=study.py:cpu'),
        ('--config.base.data.path=/a/b.txt,/c/d.txt', '--config.base.data.path=b.txt,d.txt'),
        ('--sinks=wandb(dir="/home/ann/w", project="x")', '--sinks=wandb(dir="w", project="x")'),
    ],
)
def test_absolute_paths_in_an_argument_are_shortened(tmp_path, monkeypatch, argument, expected):
    """A path below the working directory becomes relative. Any other path becomes its last part."""
    working_directory = tmp_path / 'cwd'
    working_directory.mkdir()
    monkeypatch.chdir(working_directory)

    argument = argument.format(cwd=working_directory)

    assert without_directories(argument) == expected


@pytest.mark.parametrize(
    'argument', ['--workdir=runs/a', '--workdir=gs://b/a', 'qk/vo,qk/no_o', '/']
)
def test_an_argument_without_absolute_paths_is_kept(tmp_path, monkeypatch, argument):
    monkeypatch.chdir(tmp_path)
    assert without_directories(argument) == argument


@pytest.mark.parametrize(
    'name',
    [
        '',
        '.',
        '..',
        '/',
        '/etc',
        'a/b',
        '../a',
        'a/',
        'a\0b',
        pytest.param('ä' * 128, id='256 bytes'),
    ],
)
def test_an_invalid_file_name_is_refused(tmp_path, name):
    message = 'is no name of a file or directory; valid is one component'
    with refused(message, RunDirectoryError):
        require_plain_name(name)
    with refused(message, RunDirectoryError):
        join_without_links(tmp_path, name)
    with refused(message, RunDirectoryError):
        join_without_links(tmp_path, 'a', name)


@pytest.mark.parametrize(
    'name', ['a', 'a.b', '...', '-a', pytest.param('ä' * 127, id='254 bytes'), 'a b', '~']
)
def test_a_valid_file_name_is_kept(tmp_path, name):
    assert require_plain_name(name) == name
    assert join_without_links(tmp_path, 'x', name) == tmp_path / 'x' / name


def test_a_run_of_a_study_is_one_directory_below_runs(tmp_path):
    assert run_path(tmp_path, 'runs/a-b') == tmp_path / 'runs/a-b'
