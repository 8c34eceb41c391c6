"""Files that grow at their end, on a file system and in a bucket."""

import contextlib
import io
import os
from pathlib import Path

from qkattn.errors import Lost
from qkattn.run import buckets


class Appended(io.FileIO):
    """A file that grows; `sync` puts it on the disk."""

    def __init__(self, path: Path):
        super().__init__(path, 'ab')

    def sync(self) -> None:
        os.fsync(self.fileno())


class AppendedObject(io.BytesIO):
    """An object that grows in memory; `sync` uploads it whole.

    Raises:
      Lost: by `sync`, if another process has written the object.
    """

    def __init__(self, path: Path):
        self._path = path
        self._synced: bytes | None = None
        self._generation = 0
        with contextlib.suppress(FileNotFoundError):
            self._synced, self._generation, _ = buckets.read(path)
        super().__init__(self._synced or b'')
        self.seek(0, os.SEEK_END)
        self.sync()

    def sync(self) -> None:
        content = self.getvalue()
        if content == self._synced:
            return
        try:
            self._generation = buckets.write(self._path, content, self._generation)
        except FileExistsError as error:
            raise Lost(f'{self._path} was taken over: {error}') from error
        self._synced = content


def appended(path: Path) -> Appended | AppendedObject:
    """Opens `path` to grow, or creates it."""
    return AppendedObject(path) if buckets.is_url(path) else Appended(path)
