"""Zip archives, read from memory like a directory of files.

Archives are untrusted input. Opening an archive checks the name, type, size and checksum of each
member. The archive stays compressed in memory; a member is inflated when it is read.
"""

import dataclasses
import errno
import io
import os
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path

from qkattn.errors import ReportError, RunDirectoryError
from qkattn.storage.files import require_plain_name

# Maximum inflated size of a member in bytes. Bounds the memory that reading it takes.
MAX_MEMBER = 2**29
# Maximum inflated size of all members in bytes. Bounds the time that checking them takes.
MAX_TOTAL = 2**32

# Constant metadata of written members, so that the same files make the same archive.
_EPOCH = (1980, 1, 1, 0, 0, 0)
_REGULAR_FILE = stat.S_IFREG | 0o644
_UNIX = 3

# The upper 16 bits of a member's `external_attr` hold its Unix mode.
_MODE_SHIFT = 16
# Bit of a member's `flag_bits`.
_ENCRYPTED = 1

_ADVICE = 'restore it from a copy'


class Archive:
    """A zip archive in memory, fully checked when it is opened."""

    def __init__(self, path: Path, content: bytes):
        """Opens an archive and checks every member.

        Args:
            path: Path of the archive, used in error messages only.
            content: Bytes of the archive.

        Raises:
            ReportError: The archive is damaged or too large, or a member is not a plain file with a
                safe name.
        """
        self.path = path
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(content))
        except Exception as error:  # zipfile raises almost any exception for damaged bytes
            raise ReportError(f'{path} is damaged ({error}); {_ADVICE}') from error

        self._members: dict[str, zipfile.ZipInfo] = {}
        total_size = 0
        for member in self._zip.infolist():
            is_duplicate = member.filename in self._members
            problem = 'is there twice' if is_duplicate else _find_problem(member)
            if problem is not None:
                # Unlike `filename`, `orig_filename` is not cut at a null character.
                full_name = member.orig_filename
                raise ReportError(f'{path}, member {full_name!r} {problem}; {_ADVICE}')
            self._members[member.filename] = member
            total_size += member.file_size
        if total_size > MAX_TOTAL:
            raise ReportError(
                f'{path} has members of {total_size:,} bytes, more than {MAX_TOTAL:,}; {_ADVICE}'
            )

        # Reading a member compares its checksum.
        for name in self._members:
            self.read(name)

    def __contains__(self, name: str) -> bool:
        return name in self._members

    @property
    def names(self) -> tuple[str, ...]:
        """File names, in the order of the archive."""
        return tuple(self._members)

    def read(self, name: str) -> bytes:
        """Returns the content of a file.

        Raises:
            KeyError: The archive does not have the file.
            ReportError: The file is damaged.
        """
        member = self._members[name]
        declared_size = member.file_size
        try:
            with self._zip.open(member) as file:
                # The limit guards against members larger than declared. The extra byte reaches the
                # end of the member, where zipfile compares the checksum.
                content = file.read(declared_size + 1)
            if len(content) != declared_size:
                raise ValueError(f'it has {len(content):,} bytes, not {declared_size:,}')
        except Exception as error:  # zipfile raises almost any exception for damaged bytes
            raise ReportError(
                f'{self.path}, member {name} is damaged ({error}); {_ADVICE}'
            ) from error
        return content


@dataclasses.dataclass(frozen=True)
class Member:
    """A file or directory in an archive, with a few methods of `pathlib.Path`."""

    archive: Archive
    name: str

    def __truediv__(self, name: str) -> 'Member':
        return Member(self.archive, f'{self.name}/{name}')

    def __str__(self) -> str:
        return f'{self.archive.path}, member {self.name}'

    def exists(self) -> bool:
        return self.name in self.archive

    is_file = exists

    def read_bytes(self) -> bytes:
        """Returns the file's content; raises FileNotFoundError if the file does not exist."""
        if not self.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return self.archive.read(self.name)


def zip_bytes(files: Mapping[str, bytes]) -> bytes:
    """Packs {name: content} into a zip archive; equal files give equal bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, 'w') as archive:
        for name, content in files.items():
            # Metadata that would depend on the time or the machine is constant.
            member = zipfile.ZipInfo(name, date_time=_EPOCH)
            member.create_system = _UNIX
            member.external_attr = _REGULAR_FILE << _MODE_SHIFT  # the upper bits are the Unix mode
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, content, compresslevel=9)
    return buffer.getvalue()


def is_clean(name: str) -> bool:
    """Whether a relative path such as 'a/b.json' is safe to extract on any operating system.

    '../b' and '/b' are not.
    """
    for part in name.split('/'):
        # Windows treats a backslash as a slash.
        if '\\' in part or not part.isprintable():
            return False
        try:
            require_plain_name(part)
        except RunDirectoryError:  # such as '..' or an empty part
            return False
    return True


def _find_problem(member: zipfile.ZipInfo) -> str | None:
    """Returns why a member is refused, such as 'is encrypted'; None if it is accepted."""
    unix_mode = member.external_attr >> _MODE_SHIFT  # the upper bits
    file_type = stat.S_IFMT(unix_mode)  # 0 if the archive was not made on Unix
    if file_type not in (0, stat.S_IFREG):
        return 'is a link, a directory or a device, not a file'

    # zipfile cuts `filename`, but not `orig_filename`, at a null character.
    has_null_character = member.filename != member.orig_filename
    if has_null_character or not is_clean(member.filename):
        return 'has a name that is no path below the archive'

    if member.flag_bits & _ENCRYPTED:
        return 'is encrypted'
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return f'is compressed by method {member.compress_type}, not by deflate'
    if member.file_size > MAX_MEMBER:
        return f'has {member.file_size:,} bytes, more than {MAX_MEMBER:,}'
    return None
