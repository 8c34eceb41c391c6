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
# Fields of a member in the central directory of a zip file: the offset and the struct format.
FLAGS = (8, '<H')
SIZE = (24, '<L')
MIB = 2**20


def open_archive(content: bytes) -> Archive:
    return Archive(PATH, content)


def archive_of_member(
    name='a', content=b'text', method=zipfile.ZIP_DEFLATED, kind=stat.S_IFREG
) -> bytes:
    """Returns the bytes of a zip file with one member, by default a file with 4 bytes.

    Args:
        name: Name of the member.
        content: Content of the member.
        method: How the content is compressed.
        kind: File type of the member, a constant of `stat`.
    """
    member = zipfile.ZipInfo(name)
    member.compress_type = method
    member.external_attr = kind << 16  # a Unix mode is in the upper 16 bits
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, 'w') as file:
        file.writestr(member, content)
    return buffer.getvalue()


def with_field(content: bytes, field: tuple[int, str], value: int) -> bytes:
    """Sets a field of all members in a zip file, for example FLAGS or SIZE."""
    offset, form = field
    changed = bytearray(content)
    signature = b'PK\1\2'  # starts each entry of the central directory
    entry = content.find(signature)
    while entry >= 0:
        struct.pack_into(form, changed, entry + offset, value)
        entry = content.find(signature, entry + 1)
    return bytes(changed)


def archive_with_a_name_twice() -> bytes:
    content = zip_bytes({'a': b'1', 'b': b'2'})
    return content.replace(b'b', b'a')


def archive_with_a_nul() -> bytes:
    content = archive_of_member('a+b')
    return content.replace(b'a+b', b'a\0b')


def archive_of_nine_huge_members() -> bytes:
    empty_files = {str(number): b'' for number in range(9)}
    return with_field(zip_bytes(empty_files), SIZE, MAX_MEMBER)


def with_flipped_bit(content: bytes, place: int) -> bytes:
    """The content with one bit changed in the byte at `place`."""
    changed = bytearray(content)
    changed[place] ^= 1
    return bytes(changed)


def test_files_in_an_archive_are_read_by_name():
    files = open_archive(zip_bytes(FILES))

    assert files.names == tuple(FILES)
    for name, content in FILES.items():
        assert files.read(name) == content


def test_a_member_of_an_archive_is_read_like_a_path():
    run = Member(open_archive(zip_bytes(FILES)), 'runs/a')
    metrics = run / 'metrics.jsonl'

    assert metrics.read_bytes() == FILES['runs/a/metrics.jsonl']
    assert metrics.exists()
    assert str(metrics) == 'kept/logs.zip, member runs/a/metrics.jsonl'
    assert not run.is_file()
    with pytest.raises(FileNotFoundError, match='logs.zip, member runs/a/other'):
        (run / 'other').read_bytes()


def test_the_same_files_make_the_same_bytes(monkeypatch):
    before = zip_bytes(FILES)

    monkeypatch.setattr('time.time', lambda: 2e9)
    monkeypatch.setattr('sys.platform', 'win32')

    assert zip_bytes(dict(FILES)) == before


def test_members_have_a_fixed_date_system_and_mode(monkeypatch):
    monkeypatch.setattr('time.time', lambda: 2e9)
    monkeypatch.setattr('sys.platform', 'win32')
    content = zip_bytes(FILES)

    member = zipfile.ZipFile(io.BytesIO(content)).infolist()[0]

    assert member.date_time == (1980, 1, 1, 0, 0, 0)
    assert member.create_system == 3  # Unix
    assert stat.filemode(member.external_attr >> 16) == '-rw-r--r--'


def test_an_archive_of_another_program_is_read():
    # Other programs may store members uncompressed and without a file type.
    content = archive_of_member(content=b'text', method=zipfile.ZIP_STORED, kind=0)
    assert open_archive(content).read('a') == b'text'


@pytest.mark.parametrize(
    'name',
    [
        '/etc/passwd',
        '../a',
        'a/../../b',
        'a/./b',
        'a//b',
        'a\\b',
        'a/',
        'a\nb',
        '',
        '..',
        pytest.param('a' * 256, id='256 letters'),
        pytest.param('ä' * 255, id='510 bytes'),
    ],
)
def test_a_name_that_could_lead_elsewhere_is_refused(name):
    content = archive_of_member(name)
    with pytest.raises(ReportError, match=r'logs.zip, member .* has a name that is no path below'):
        open_archive(content)


def test_a_clean_name_has_any_letters():
    assert is_clean('runs/ä-d_model=8 [x]')


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        pytest.param(archive_with_a_nul(), "'a.x00b' has a name that is no path", id='NUL'),
        pytest.param(
            archive_of_member(kind=stat.S_IFLNK),
            "'a' is a link, a directory or a device",
            id='link',
        ),
        pytest.param(
            archive_of_member(kind=stat.S_IFCHR),
            "'a' is a link, a directory or a device",
            id='device',
        ),
        pytest.param(
            archive_of_member(kind=stat.S_IFDIR),
            "'a' is a link, a directory or a device",
            id='directory',
        ),
        pytest.param(archive_with_a_name_twice(), "'a' is there twice", id='name twice'),
        pytest.param(with_field(archive_of_member(), FLAGS, 1), "'a' is encrypted", id='encrypted'),
        pytest.param(
            archive_of_member(method=zipfile.ZIP_LZMA),
            "'a' is compressed by method 14, not by deflate",
            id='LZMA',
        ),
        pytest.param(
            with_field(archive_of_member(), SIZE, MAX_MEMBER + 1),
            "'a' has 536,870,913 bytes, more than",
            id='member too large',
        ),
        pytest.param(
            archive_of_nine_huge_members(),
            'has members of 4,831,838,208 bytes, more than 4,294,967,296',
            id='archive too large',
        ),
    ],
)
def test_a_member_that_is_no_plain_file_of_bounded_size_is_refused(content, message):
    sentence = rf'^kept/logs.zip.* {message}.*; restore it from a copy$'
    with pytest.raises(ReportError, match=sentence):
        open_archive(content)


def test_a_member_that_unpacks_to_more_than_it_declares_takes_no_memory():
    """A zip bomb is a small archive that unpacks to much more than it declares."""
    # The member `a` unpacks to 100 MiB of zeros, but declares 10 bytes.
    bomb = archive_of_member(content=bytes(100 * MIB))
    bomb = with_field(bomb, SIZE, 10)

    # Opening the archive unpacks each member to check it, but stops after the declared size.
    tracemalloc.start()
    with pytest.raises(ReportError, match='member a is damaged .*; restore it from a copy'):
        open_archive(bomb)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak_bytes < MIB


@pytest.mark.parametrize(
    'content',
    [
        pytest.param(b'', id='empty'),
        pytest.param(b'text', id='text'),
        pytest.param(zip_bytes(FILES)[:-30], id='last 30 bytes cut off'),
        pytest.param(
            with_flipped_bit(archive_of_member(method=zipfile.ZIP_STORED), 33),
            id='bit of stored text flipped',
        ),
        pytest.param(with_flipped_bit(zip_bytes(FILES), 45), id='bit of deflated text flipped'),
        # The content really has 4 bytes.
        pytest.param(with_field(archive_of_member(), SIZE, 5), id='5 bytes declared'),
        pytest.param(with_field(archive_of_member(), SIZE, 3), id='3 bytes declared'),
        pytest.param(with_field(archive_of_member(), SIZE, 0), id='0 bytes declared'),
    ],
)
def test_a_damaged_archive_is_refused_in_one_sentence(content):
    sentence = r'^kept/logs.zip.* is damaged .*; restore it from a copy$'
    with pytest.raises(ReportError, match=sentence):
        open_archive(content)
