"""A zip archive is read member by member, once nothing about it can do harm."""

import io
import stat
import struct
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from qkattn.errors import ReportError
from qkattn.storage.archive import MAX_MEMBER, Archive, Member, is_clean, zip_bytes

PATH = Path('kept/logs.zip')
FILES = {'plan.jsonl': b'{}\n' * 100, 'runs/a/metrics.jsonl': b'{"step": 1}\n', 'runs/b/empty': b''}
# Where a field of a member's entry in the directory at the archive's end begins, and its form.
FLAGS = (8, '<H')
SIZE = (24, '<L')
FEW_BYTES = 2**20


def open_archive(content: bytes) -> Archive:
    return Archive(PATH, content)


def archive_of_member(
    name='a', content=b'text', method=zipfile.ZIP_DEFLATED, kind=stat.S_IFREG
) -> bytes:
    """An archive of one member, which may be one that this package does not make."""
    buffer = io.BytesIO()
    member = zipfile.ZipInfo(name)
    member.compress_type = method
    member.external_attr = kind << 16
    with zipfile.ZipFile(buffer, 'w') as file:
        file.writestr(member, content)
    return buffer.getvalue()


def with_field(content: bytes, field: tuple[int, str], value: int) -> bytes:
    """The archive with another value of a field of every member, as in with_field(a, FLAGS, 1)."""
    changed = bytearray(content)
    offset, form = field
    entry = content.find(b'PK\1\2')
    while entry >= 0:
        struct.pack_into(form, changed, entry + offset, value)
        entry = content.find(b'PK\1\2', entry + 1)
    return bytes(changed)


def archive_with_a_name_twice() -> bytes:
    """An archive that has a name twice."""
    return zip_bytes({'a': b'1', 'b': b'2'}).replace(b'b', b'a')


def with_flipped_bit(content: bytes, place: int) -> bytes:
    """The content with one bit changed in the byte at `place`."""
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def test_files_are_read_in_the_archive_as_in_a_directory():
    files = open_archive(zip_bytes(FILES))
    assert files.names == tuple(FILES)
    assert {name: files.read(name) for name in files.names} == FILES
    run = Member(files, 'runs/a')
    assert (run / 'metrics.jsonl').read_bytes() == FILES['runs/a/metrics.jsonl']
    assert (run / 'metrics.jsonl').exists()
    assert not run.is_file()
    assert str(run / 'metrics.jsonl') == 'kept/logs.zip, member runs/a/metrics.jsonl'
    with pytest.raises(FileNotFoundError, match='logs.zip, member runs/a/other'):
        (run / 'other').read_bytes()


def test_the_same_files_make_the_same_bytes(monkeypatch):
    # At another time, and on another system.
    monkeypatch.setattr('time.time', lambda: 2e9)
    monkeypatch.setattr('sys.platform', 'win32')
    assert zip_bytes(dict(FILES)) == zip_bytes(FILES)
    (member, *_) = zipfile.ZipFile(io.BytesIO(zip_bytes(FILES))).infolist()
    assert member.date_time == (1980, 1, 1, 0, 0, 0)
    assert member.create_system == 3
    assert stat.filemode(member.external_attr >> 16) == '-rw-r--r--'


def test_an_archive_of_another_program_is_read():
    stored = archive_of_member(method=zipfile.ZIP_STORED, kind=0)
    assert open_archive(stored).read('a') == b'text'


PATHS = ['/etc/passwd', '../a', 'a/../../b', 'a/./b', 'a//b', 'a\\b', 'a/', 'a\nb', '', '..']
PATHS += ['a' * 256, 'ä' * 255]


@pytest.mark.parametrize('name', PATHS)
def test_a_name_that_could_lead_elsewhere_is_refused(name):
    with pytest.raises(ReportError, match=r'logs.zip, member .* has a name that is no path below'):
        open_archive(archive_of_member(name))


def test_a_clean_name_has_any_letters():
    assert is_clean('runs/ä-d_model=8 [x]')


REFUSED = {
    'a NUL': (
        archive_of_member('a+b').replace(b'a+b', b'a\0b'),
        "'a.x00b' has a name that is no path",
    ),
    'a link': (archive_of_member(kind=stat.S_IFLNK), "'a' is a link, a directory or a device"),
    'a device': (archive_of_member(kind=stat.S_IFCHR), "'a' is a link, a directory or a device"),
    'a directory': (archive_of_member(kind=stat.S_IFDIR), "'a' is a link, a directory or a device"),
    'twice': (archive_with_a_name_twice(), "'a' is there twice"),
    'encrypted': (with_field(archive_of_member(), FLAGS, 1), "'a' is encrypted"),
    'lzma': (
        archive_of_member(method=zipfile.ZIP_LZMA),
        "'a' is compressed by method 14, not by def",
    ),
    'too large': (
        with_field(archive_of_member(), SIZE, MAX_MEMBER + 1),
        "'a' has 536,870,913 bytes, more",
    ),
    'too many': (
        with_field(zip_bytes({f'{n}': b'' for n in range(9)}), SIZE, MAX_MEMBER),
        'has members of 4,831,838,208 bytes, more than 4,294,967,296',
    ),
}


@pytest.mark.parametrize('name', REFUSED)
def test_a_member_that_is_no_plain_file_of_a_bounded_size_is_refused(name):
    content, message = REFUSED[name]
    with pytest.raises(
        ReportError, match=rf'^kept/logs.zip.* {message}.*; restore it from a copy$'
    ):
        open_archive(content)


def test_a_member_that_unpacks_to_more_than_it_declares_takes_no_memory():
    bomb = with_field(archive_of_member(content=bytes(100 * FEW_BYTES)), SIZE, 10)
    tracemalloc.start()
    with pytest.raises(ReportError, match='member a is damaged .*; restore it from a copy'):
        open_archive(bomb)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < FEW_BYTES


DAMAGED = {
    'nothing': b'',
    'text': b'text',
    'cut': zip_bytes(FILES)[:-30],
    'a bit of the text': with_flipped_bit(archive_of_member(method=zipfile.ZIP_STORED), 33),
    'a bit of the deflated text': with_flipped_bit(zip_bytes(FILES), 45),
    'more is declared': with_field(archive_of_member(), SIZE, 5),
    'less is declared': with_field(archive_of_member(), SIZE, 3),
    'nothing is declared': with_field(archive_of_member(), SIZE, 0),
}


@pytest.mark.parametrize('name', DAMAGED)
def test_a_damaged_archive_is_refused_in_one_sentence(name):
    with pytest.raises(
        ReportError, match=r'^kept/logs.zip.* is damaged .*; restore it from a copy$'
    ):
        open_archive(DAMAGED[name])
