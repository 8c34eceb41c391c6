"""Only regular files are read: pipes, sockets, devices and too large files are refused."""

import os
import socket

import pytest

from qkattn.config.paths import (
    LARGEST,
    open_regular,
    read_regular,
    require_regular,
    require_regular_tree,
)
from qkattn.errors import UnsuitableFileError
from tests.processes import time_limit
from tests.refusals import refused


@pytest.fixture
def special_files(tmp_path):
    """Paths of files that are not regular, by kind."""
    pipe = tmp_path / 'pipe'
    os.mkfifo(pipe)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / 'socket'))
        yield {'pipe': pipe, 'socket': tmp_path / 'socket', 'device': '/dev/zero'}


@pytest.mark.parametrize('kind', ['pipe', 'socket', 'device'])
@pytest.mark.parametrize('read', [open_regular, read_regular, require_regular])
def test_only_a_regular_file_is_read(special_files, kind, read):
    path = special_files[kind]
    message = f'^it is a {kind} and no regular file$'
    with time_limit(10), refused(message, UnsuitableFileError):
        read(path)


def test_a_regular_file_is_read_also_through_a_link(tmp_path):
    file = tmp_path / 'file'
    file.write_bytes(b'content')
    link = tmp_path / 'link'
    link.symlink_to('file')

    assert read_regular(file) == b'content'
    assert read_regular(link) == b'content'


def test_a_directory_raises_the_usual_error(tmp_path):
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / 'file'
    with path.open('wb') as file:
        file.truncate(LARGEST + 1)  # a hole, which takes no space on the disk

    with refused('it has 4,294,967,297 bytes, and ', UnsuitableFileError):
        read_regular(path)


def test_a_tree_that_holds_a_pipe_is_refused(special_files, tmp_path):
    folder = tmp_path / 'tree' / 'folder'
    folder.mkdir(parents=True)
    (folder / 'file').touch()
    require_regular_tree(tmp_path / 'tree')

    (folder / 'link').symlink_to(special_files['pipe'])
    with refused('a pipe', UnsuitableFileError):
        require_regular_tree(tmp_path / 'tree')
