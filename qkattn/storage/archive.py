"""Zip archives that are read like a directory of files, without unpacking them to a disk.

An archive may come from anybody. So it is checked before any of it is used: the names and types of
its members (the files in it), their sizes before memory is allocated, and their checksums. The
archive stays compressed in memory, and a member is inflated when it is read.
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

# Largest size of a member in bytes, inflated. A member is inflated into memory as a whole.
MAX_MEMBER = 2**29
# Largest size of all members together in bytes. The check inflates each of them once, so this
# bounds its time.
MAX_TOTAL = 2**32

# The date, mode and system of every member that is written. They are constant, so that the same
# files make the same archive.
_EPOCH = (1980, 1, 1, 0, 0, 0)
_REGULAR_FILE = stat.S_IFREG | 0o644
_UNIX = 3

# The upper 16 bits of a member's attributes hold its mode, as on Unix.
_MODE_SHIFT = 16
# The bit of a member's flags that is set if the member is encrypted.
_ENCRYPTED = 1

_ADVICE = 'restore it from a copy'


class Archive:
    """The files of a zip archive, by name."""

    def __init__(self, path: Path, content: bytes):
        """Opens the archive, and checks all of it.

        Args:
          path: the path of the archive, for errors.
          content: the bytes of the archive.

        Raises ReportError if the archive is damaged, if its members are too large, or if a member
        is not a plain file with a path below the archive.
        """
        self.path = path
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(content))
        except Exception as error:  # damaged bytes raise almost anything in zipfile
            raise ReportError(f'{path} is damaged ({error}); {_ADVICE}') from error

        self._members: dict[str, zipfile.ZipInfo] = {}
        total_size = 0
        for member in self._zip.infolist():
            problem = _problem(member)
            if member.filename in self._members:
                problem = 'is there twice'
            if problem is not None:
                name = member.orig_filename  # also what follows a null character
                raise ReportError(f'{path}, member {name!r} {problem}; {_ADVICE}')
            self._members[member.filename] = member
            total_size += member.file_size
        if total_size > MAX_TOTAL:
            raise ReportError(
                f'{path} has members of {total_size:,} bytes, more than {MAX_TOTAL:,}; {_ADVICE}'
            )

        # Read every member once: zipfile then compares its checksum.
        for name in self._members:
            self.read(name)

    def __contains__(self, name: str) -> bool:
        return name in self._members

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all files, in the order of the archive."""
        return tuple(self._members)

    def read(self, name: str) -> bytes:
        """Returns the content of a file.

        Raises KeyError if the archive does not have the file, ReportError if the file is damaged.
        """
        member = self._members[name]
        declared_size = member.file_size
        try:
            with self._zip.open(member) as file:
                # A member may inflate to more bytes than it declares, so the read has a limit. One
                # byte more than declared is read, because zipfile compares the checksum only when
                # the end of the member is reached.
                content = file.read(declared_size + 1)
            if len(content) != declared_size:
                raise ValueError(f'it has {len(content):,} bytes, not {declared_size:,}')
        except Exception as error:  # damaged bytes raise almost anything in zipfile
            raise ReportError(
                f'{self.path}, member {name} is damaged ({error}); {_ADVICE}'
            ) from error
        return content


@dataclasses.dataclass(frozen=True)
class Member:
    """A file or a directory in an archive, with the methods of a path that readers use."""

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
        """Returns the content; raises FileNotFoundError if there is no such file."""
        if not self.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return self.archive.read(self.name)


def zip_bytes(files: Mapping[str, bytes]) -> bytes:
    """Returns the bytes of a zip archive of {name: content}.

    The same files make the same bytes: every member has the same date, mode and system.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, 'w') as archive:
        for name, content in files.items():
            member = zipfile.ZipInfo(name, date_time=_EPOCH)
            member.compress_type = zipfile.ZIP_DEFLATED
            member.create_system = _UNIX
            member.external_attr = _REGULAR_FILE << _MODE_SHIFT
            archive.writestr(member, content, compresslevel=9)
    return buffer.getvalue()


def is_clean(name: str) -> bool:
    """Whether a relative path stays below its directory on every file system.

    `name` has slashes between its parts.
    """
    for part in name.split('/'):
        # Windows treats a backslash as a slash. Characters that do not print could hide the name.
        if '\\' in part or not part.isprintable():
            return False
        try:
            require_plain_name(part)
        except RunDirectoryError:
            return False
    return True


def _problem(member: zipfile.ZipInfo) -> str | None:
    """Returns why a member is refused, as the end of a sentence; None if it is a plain file."""
    # The type is in the upper bits of the attributes.
    file_type = stat.S_IFMT(member.external_attr >> _MODE_SHIFT)
    if file_type not in (0, stat.S_IFREG):  # the type is 0 if the archive was not made on Unix
        return 'is a link, a directory or a device, not a file'
    # zipfile cuts `filename` at a null character. `orig_filename` is the whole name.
    was_cut = member.filename != member.orig_filename
    if was_cut or not is_clean(member.filename):
        return 'has a name that is no path below the archive'
    if member.flag_bits & _ENCRYPTED:
        return 'is encrypted'
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return f'is compressed by method {member.compress_type}, not by deflate'
    if member.file_size > MAX_MEMBER:
        return f'has {member.file_size:,} bytes, more than {MAX_MEMBER:,}'
    return None
