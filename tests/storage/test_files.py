"""Atomic writes, locks and directories, on real files and with writers that fail or are killed."""

import errno
import os
import pwd
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from qkattn.errors import ConfigError, DiskError, RunDirectoryError
from qkattn.storage.files import (
    check_directory,
    disk_errors,
    drop_echoes,
    expanded,
    make_directory,
    replacing,
    write_atomic,
)
from qkattn.storage.leases import locked
from tests.processes import start_python, umask


@pytest.fixture
def file(tmp_path):
    path = tmp_path / 'file'
    path.write_text('before')
    return path


def names(directory):
    return [path.name for path in directory.iterdir()]


def test_write_atomic_replaces_text_and_bytes_with_the_mode_that_the_umask_gives(file):
    with umask(0o027):
        assert write_atomic(file, 'ä') == file
    assert file.read_bytes() == 'ä'.encode()
    assert file.stat().st_mode & 0o777 == 0o640
    below = file.parent / 'a' / 'b'
    assert write_atomic(below, b'\xff').read_bytes() == b'\xff' and names(below.parent) == ['b']


@pytest.mark.parametrize('mask', [0o002, 0o077])
def test_a_file_of_a_library_has_the_mode_that_the_umask_gives(file, mask):
    file.with_name('file.tmp').touch(0o600)  # what a killed writer left
    with umask(mask), replacing(file) as temporary:
        temporary.unlink(missing_ok=True)
        temporary.touch(0o600)
        temporary.write_text('after')
    assert file.read_text() == 'after'
    assert file.stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize('call', ['fsync', 'replace', 'block'])
def test_a_failed_write_leaves_the_file_as_it_was(file, monkeypatch, call):
    def fail(*_):
        raise OSError(28, 'No space left on device')

    if call != 'block':
        monkeypatch.setattr(os, call, fail)
    with (
        pytest.raises(DiskError, match=f'{file.parent} cannot be written: the disk is full'),
        replacing(file) as temporary,
    ):
        temporary.write_text('after')
        if call == 'block':
            fail()
    assert file.read_text() == 'before' and names(file.parent) == ['file']


@pytest.mark.parametrize('code', [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
@pytest.mark.parametrize('function', ['lock', 'make_directory', 'write_atomic', 'replacing'])
def test_a_disk_that_takes_nothing_is_named(tmp_path, monkeypatch, function, code):
    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    with pytest.raises(DiskError, match=f'^{tmp_path} cannot be written: '):
        if function == 'replacing':  # by a library with errors of its own
            with replacing(tmp_path / 'file'):
                raise ValueError(f'UNKNOWN: cannot write [OS error {code}: {os.strerror(code)}]')
        monkeypatch.setattr(Path, 'mkdir', fail)
        if function == 'lock':
            locked(tmp_path / 'new/lock').__enter__()
        elif function == 'make_directory':
            make_directory(tmp_path / 'new')
        write_atomic(tmp_path / 'new/file', 'x')
    assert names(tmp_path) == []


def test_a_directory_in_the_place_of_a_file_is_left_alone_and_another_error_as_it_is(tmp_path):
    with pytest.raises(RunDirectoryError, match='is a directory in the place of a file'):
        write_atomic(tmp_path, 'x')
    with pytest.raises(ValueError, match='^other$'), replacing(tmp_path / 'file'):
        raise ValueError('other')


def test_what_a_killed_writer_leaves_is_overwritten(file):
    source = """
        import os, signal, sys
        from qkattn.storage.files import replacing
        with replacing(sys.argv[1]) as temporary:
            temporary.write_text('half of it')
            os.kill(os.getpid(), signal.SIGKILL)
    """
    process = start_python(source, file)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert file.read_text() == 'before' and len(names(file.parent)) == 2
    with replacing(file) as temporary:
        temporary.write_text('after')
    assert file.read_text() == 'after' and names(file.parent) == ['file']


@pytest.mark.parametrize('function', [check_directory, make_directory])
@pytest.mark.parametrize(
    ('path', 'message'),
    [
        ('s3://bucket/run', 's3://bucket/run is a URL of another kind than gs://'),
        ('file/run', r'file/run cannot be used \(Not a directory\)'),
        ('/proc/run', 'workdir=/proc/run cannot be used'),
        ('/proc', 'workdir=/proc cannot be used'),
        ('x' * 256 + '/run', r'x/run cannot be used \(File name too long\)'),
        # Under LC_ALL=C, a name in UTF-8 is decoded in the same way.
        (os.fsdecode(b'r\xff'), r"r\\udcff' is not UTF-8 .*; give a directory"),
    ],
    ids=range(6),
)
def test_a_directory_that_takes_no_files_is_one_sentence(
    file, monkeypatch, function, path, message
):
    monkeypatch.chdir(file.parent)
    with pytest.raises(RunDirectoryError, match=message) as refusal:
        function(path)
    assert '\n' not in str(refusal.value) and names(file.parent) == ['file']


def test_a_directory_is_checked_without_a_trace_and_made_absolute(tmp_path):
    doubled = '/' + str(tmp_path / 'a' / 'run')
    assert check_directory(doubled) == tmp_path / 'a' / 'run' and names(tmp_path) == []
    assert make_directory(doubled) == tmp_path / 'a' / 'run'
    assert names(tmp_path / 'a' / 'run') == []


def test_a_directory_that_is_gone_is_named(tmp_path):
    with (
        pytest.raises(DiskError, match=f'^{tmp_path}/a is gone: .*; put it back and run the same'),
        disk_errors(tmp_path / 'a/b'),
    ):
        (tmp_path / 'a/b/c').touch()
    with pytest.raises(FileNotFoundError), disk_errors(tmp_path):
        (tmp_path / 'c').stat()


def test_what_tensorstore_repeats_of_an_error_is_not_printed(monkeypatch):
    printed = []
    monkeypatch.setattr(sys, 'unraisablehook', lambda args: printed.append(str(args.exc_value)))
    drop_echoes.__wrapped__()
    for owner, text in ((None, 'Event loop is closed'), (None, 'x'), ([], 'Event loop is closed')):
        sys.unraisablehook(SimpleNamespace(object=owner, exc_value=RuntimeError(text)))
    assert printed == ['x', 'Event loop is closed']


def test_an_empty_home_counts_as_unset(monkeypatch):
    monkeypatch.setenv('HOME', '/somewhere')
    assert expanded('~/x') == Path('/somewhere/x')
    monkeypatch.setenv('HOME', '')
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert expanded('~/x') == Path(home, 'x') and 'HOME' not in os.environ

    def nobody(number):
        raise KeyError(number)

    monkeypatch.setattr(pwd, 'getpwuid', nobody)
    with pytest.raises(ConfigError, match='^~/x has no meaning without a home directory; set HOME'):
        expanded('~/x')
