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
    path = tmp_path / 'file'
    path.write_text('before')
    return path


def names(directory):
    return [path.name for path in directory.iterdir()]


@pytest.mark.parametrize('mask', [0o002, 0o077])
def test_a_replaced_file_has_the_mode_that_the_umask_gives(file, mask):
    file.with_name('file.tmp').touch(0o600)  # what a killed writer left
    with umask(mask), replacing(file) as temporary:
        temporary.unlink(missing_ok=True)
        temporary.touch(0o600)
        temporary.write_text('after')
    with umask(mask):
        below = write_atomic(file.parent / 'a' / 'b', 'ä')
    assert file.read_text() == 'after'
    assert below.read_bytes() == 'ä'.encode()
    assert [path.stat().st_mode & 0o777 for path in (file, below)] == [0o666 & ~mask] * 2
    assert write_atomic(below, b'\xff').read_bytes() == b'\xff'
    assert names(below.parent) == ['b']


@pytest.mark.parametrize('call', ['fsync', 'replace', 'block', 'library'])
@pytest.mark.parametrize('code', [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_failed_write_leaves_the_file_as_it_was(file, monkeypatch, call, code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    if call in ('fsync', 'replace'):
        monkeypatch.setattr(os, call, fail)
    message = f'^{file.parent} cannot be written: '
    with pytest.raises(DiskError, match=message), replacing(file) as temporary:
        temporary.write_text('after')
        if call == 'library':  # with errors of its own
            raise ValueError(f'UNKNOWN: cannot write [OS error {code}: {os.strerror(code)}]')
        if call == 'block':
            fail()
    assert file.read_text() == 'before'
    assert names(file.parent) == ['file']


def test_a_directory_in_the_place_of_a_file_is_left_alone(tmp_path):
    with pytest.raises(RunDirectoryError, match='is a directory where a file is expected'):
        write_atomic(tmp_path, 'x')


def test_an_error_that_has_nothing_to_do_with_the_disk_is_raised_unchanged(tmp_path):
    with pytest.raises(ValueError, match='^other$'), replacing(tmp_path / 'file'):
        raise ValueError('other')


@pytest.mark.parametrize('function', [check_directory, make_directory])
@pytest.mark.parametrize(
    ('path', 'message'),
    [
        ('s3://bucket/run', 's3://bucket/run is not a URL of the form gs://'),
        ('file/run', r'file/run cannot be used \(Not a directory\)'),
        ('/proc', 'workdir=/proc cannot be used'),
        ('x' * 256 + '/run', r'x/run cannot be used \(File name too long\)'),
        ('~not a user/run', 'run names no home directory; set HOME, or give a path without ~'),
    ],
    ids=range(5),
)
def test_a_directory_that_takes_no_files_is_refused(file, monkeypatch, function, path, message):
    monkeypatch.chdir(file.parent)
    with refused(message, RunDirectoryError):
        function(path)
    assert names(file.parent) == ['file']


def test_a_directory_is_checked_without_a_trace(tmp_path):
    assert check_directory(tmp_path / 'a' / 'run') == tmp_path / 'a' / 'run'
    assert names(tmp_path) == []


def test_a_directory_is_absolute_below_one_slash(tmp_path):
    doubled = '/' + str(tmp_path / 'a' / 'run')
    assert check_directory(doubled) == tmp_path / 'a' / 'run'
    assert make_directory(doubled) == tmp_path / 'a' / 'run'
    assert names(tmp_path / 'a' / 'run') == []


def test_the_home_directory_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    assert check_directory('~/run') == as_path('~/run') == tmp_path / 'run'


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
        *(
            (same, same)
            for same in ('--workdir=runs/a', '--workdir=gs://b/a', 'qk/vo,qk/no_o', '/')
        ),
    ],
)
def test_directories_of_the_machine_are_left_out_of_an_argument(
    tmp_path, monkeypatch, argument, expected
):
    (tmp_path / 'cwd').mkdir()
    monkeypatch.chdir(tmp_path / 'cwd')
    assert without_directories(argument.format(cwd=tmp_path / 'cwd')) == expected


@pytest.mark.parametrize(
    'name', ['', '.', '..', '/', '/etc', 'a/b', '../a', 'a/', 'a\0b', 'ä' * 128]
)
def test_a_name_of_a_file_from_elsewhere_is_one_component(tmp_path, name):
    for check in (
        require_plain_name,
        lambda name: join_without_links(tmp_path, name),
        lambda name: join_without_links(tmp_path, 'a', name),
    ):
        with refused(
            'is no name of a file or directory; valid is one component', RunDirectoryError
        ):
            check(name)


@pytest.mark.parametrize('name', ['a', 'a.b', '...', '-a', 'ä' * 127, 'a b', '~'])
def test_a_name_of_one_component_is_taken_as_it_is(tmp_path, name):
    assert require_plain_name(name) == name
    assert join_without_links(tmp_path, 'x', name) == tmp_path / 'x' / name


def test_a_run_of_a_study_is_one_directory_below_runs(tmp_path):
    assert run_path(tmp_path, 'runs/a-b') == tmp_path / 'runs/a-b'
