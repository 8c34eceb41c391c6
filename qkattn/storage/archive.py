"""Zip archives that are read where they lie, as a directory of files.

An archive may come from anybody. So all of it is checked before any of it is used: the names and
kinds of its members, their sizes before memory is taken for them, and their checksums. It is kept
in memory as it is compressed, and a member is inflated when it is read; nothing is written.
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
from qkattn.storage.files import component

# Largest size of a member in bytes. A member is inflated at once.
MAX_MEMBER = 2**29
# Largest size of all members together in bytes. The check inflates all of them once, one after
# another, so this bounds its time.
MAX_TOTAL = 2**32

# Every member that is written has this date, this mode and this system, so that the same files make
# the same archive.
_EPOCH = (1980, 1, 1, 0, 0, 0)
_REGULAR_FILE = stat.S_IFREG | 0o644
_UNIX = 3

# A zip file keeps the mode of Unix in the upper 16 bits of a member's attributes.
_MODE_SHIFT = 16
# The bit of a member's flags that says that it is encrypted.
_ENCRYPTED = 1

_ADVICE = 'restore it from a copy'


class Archive:
    """The files of a zip archive, by name."""

    def __init__(self, path: Path, content: bytes):
        """Checks all of the archive; `path` names it in errors, of which each is one sentence.

        Raises ReportError where the archive is damaged or has a member that is no plain file,
        whose name could lead elsewhere, or that is larger than MAX_MEMBER.
        """
        self.path = path
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(content))
        except Exception as error:  # damaged bytes raise almost anything in zipfile
            raise ReportError(f'{path} is damaged ({error}); {_ADVICE}') from error
        self._members: dict[str, zipfile.ZipInfo] = {}
        total = 0
        for member in self._zip.infolist():
            problem = _problem(member)
            if member.filename in self._members:
                problem = 'is there twice'
            if problem is not None:
                name = member.orig_filename
                raise ReportError(f'{path}, member {name!r} {problem}; {_ADVICE}')
            self._members[member.filename] = member
            total += member.file_size
        if total > MAX_TOTAL:
            raise ReportError(
                f'{path} has members of {total:,} bytes, more than {MAX_TOTAL:,}; {_ADVICE}'
            )
        for name in self._members:
            self.read(name)  # compares its checksum

    def __contains__(self, name: str) -> bool:
        return name in self._members

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all files, in the order of the archive."""
        return tuple(self._members)

    def read(self, name: str) -> bytes:
        """The content of a file; KeyError without it, ReportError where it is damaged."""
        member = self._members[name]
        try:
            with self._zip.open(member) as file:
                # read() without a size would inflate whatever the member has, however little it
                # declares. One byte more than it declares makes zipfile reach the end of the
                # member, where it compares the checksum.
                content = file.read(member.file_size + 1)
            if len(content) != member.file_size:
                raise ValueError(f'it has {len(content):,} bytes, not {member.file_size:,}')
        except Exception as error:  # damaged bytes raise almost anything in zipfile
            raise ReportError(
                f'{self.path}, member {name} is damaged ({error}); {_ADVICE}'
            ) from error
        return content


@dataclasses.dataclass(frozen=True)
class Member:
    """A file of an archive, or a directory of files, with what readers use of a path."""

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
        """The content; FileNotFoundError without such a file."""
        if not self.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return self.archive.read(self.name)


def zipped(files: Mapping[str, bytes]) -> bytes:
    """A zip archive of files in their order; the same files make the same bytes."""
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
    """Whether a relative path with slashes leads below its directory on every file system."""
    for part in name.split('/'):
        # Windows takes a backslash for a slash; characters that do not print hide what is named.
        if '\\' in part or not part.isprintable():
            return False
        try:
            component(part)
        except RunDirectoryError:
            return False
    return True


def _problem(member: zipfile.ZipInfo) -> str | None:
    """Why a member is not taken, as the end of a sentence; None for a plain file."""
    file_type = stat.S_IFMT(member.external_attr >> _MODE_SHIFT)
    if file_type not in (0, stat.S_IFREG):  # 0 in archives that were not made on Unix
        return 'is a link, a directory or a device, not a file'
    # zipfile ends a name at a null character, and keeps the whole one as `orig_filename`.
    if member.filename != member.orig_filename or not is_clean(member.filename):
        return 'has a name that is no path below the archive'
    if member.flag_bits & _ENCRYPTED:
        return 'is encrypted'
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return f'is compressed by method {member.compress_type}, not by deflate'
    if member.file_size > MAX_MEMBER:
        return f'has {member.file_size:,} bytes, more than {MAX_MEMBER:,}'
    return None
