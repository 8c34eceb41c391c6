"""Files of token shards: their layouts, and random access on a local disk or in a bucket.

A shard is a `.bin` file of little-endian token ids. These layouts are read:

    llm.c, modded-nanogpt   256 int32 of header: 20240520, 1, number of tokens; then uint16
    llm.c for Llama 3       the same with 20240801, 7; then uint32
    cache of qkattn         the same with 20240520, 8; then uint8, where no id is above 255
    nanoGPT                 no header; uint16

The first three are written, with header entries that other programs leave 0: [3] documents, [4:6]
bytes of text, an int64, [6:14] sha256 of the tokens, [14] the upper half of the number of tokens.
"""

import bisect
import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from qkattn.config.calls import load_extra
from qkattn.errors import ConfigError
from qkattn.storage import buckets
from qkattn.storage.files import expanded

HEADER, HEADER_BYTES = struct.Struct('<iiIIq32sI'), 1024
# (magic, version) by dtype of the ids.
MAGIC = {'uint8': (20240520, 8), 'uint16': (20240520, 1), 'uint32': (20240801, 7)}
DTYPES = {magic: dtype for dtype, magic in MAGIC.items()}
# Ids that are read at a time where a split is read through.
BLOCK = 1 << 22
CONNECTIONS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """A file of tokens, `offset` bytes after its beginning; 0 and '' for what it does not state.

    `num_bytes` is of text, one per separator; `sha256` is of the tokens.
    """

    num_tokens: int
    num_documents: int = 0
    num_bytes: int = 0
    sha256: str = ''
    file: str
    dtype: str
    offset: int = HEADER_BYTES

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.offset + self.num_tokens * np.dtype(self.dtype).itemsize

    def problem(self, size: int | None, where: str) -> str | None:
        """What is wrong with a file of `size` bytes, None if it is absent, as this shard."""
        if size is None:
            return f'{where}/{self.file} is missing'
        if size != self.size:
            return (
                f'{where}/{self.file} is damaged: it has {size:,} bytes, but its '
                f'{self.num_tokens:,} tokens take {self.size:,}'
            )
        return None

    def header(self) -> bytes:
        """The first bytes of the file."""
        high, low = divmod(self.num_tokens, 2**32)
        counts = (low, self.num_documents, self.num_bytes, bytes.fromhex(self.sha256), high)
        return HEADER.pack(*MAGIC[self.dtype], *counts).ljust(HEADER_BYTES, b'\0')


def shard_of(file: str, size: int, head: bytes, where: str) -> Shard:
    """The shard in a file of any of the layouts, from its size and its first bytes.

    Raises:
      ConfigError: a layout that is not known, a size that is not that of its header.
    """
    values = HEADER.unpack(head[: HEADER.size].ljust(HEADER.size, b'\0'))
    magic, version, low, num_documents, num_bytes, sha256, high = values
    if magic not in (20240520, 20240801, 20240522):  # the last is of questions, which are no text
        if size % 2 or not size:
            raise ConfigError(
                f'{where}/{file} is no shard of tokens: without a header its {size} bytes have to '
                'be uint16 ids, two bytes each'
            )
        return Shard(file=file, num_tokens=size // 2, dtype='uint16', offset=0)
    if (magic, version) not in DTYPES:
        raise ConfigError(
            f'{where}/{file} has a header {magic}, version {version}, which is not that of tokens; '
            f'known are {" and ".join(f"{m}, version {v}" for m, v in DTYPES)}'
        )
    shard = Shard(
        num_tokens=2**32 * high + low,
        num_documents=num_documents,
        num_bytes=num_bytes,
        sha256=sha256.hex(),
        file=file,
        dtype=DTYPES[magic, version],
    )
    if shard.num_tokens < 1:
        raise ConfigError(f'{where}/{file} has a header of 0 tokens; remove it')
    if problem := shard.problem(size, where):
        raise ConfigError(f'{problem}; fetch it again')
    return shard


# A shard, and the first token and the one behind the last that are wanted of it.
Piece = tuple[Shard, int, int]


class _Local:
    """The files of a directory, memory-mapped; a file is opened when it is first read."""

    mapped = True

    def __init__(self, directory: str):
        self._directory, self.where = expanded(directory), directory
        self._mapped = functools.cache(self._map)

    def sizes(self) -> dict[str, int]:
        """Bytes by name."""
        try:
            paths = sorted(self._directory.iterdir())
            return {path.name: path.stat().st_size for path in paths if path.is_file()}
        except OSError as error:
            raise ConfigError(
                f'data.path={self.where!r} cannot be read ({error.strerror}); it must be a '
                'directory of shards'
            ) from error

    def read(self, names: Sequence[str], size: int | None = None) -> list[bytes]:
        """The first `size` bytes of each file, or all."""
        contents = []
        for path in (self._directory / name for name in names):
            try:
                with path.open('rb') as file:
                    contents.append(file.read(size))
            except OSError as error:
                raise ConfigError(f'{path} cannot be read ({error.strerror})') from error
        return contents

    def tokens(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        """The ids of each piece."""
        return [self._mapped(shard)[low:high] for shard, low, high in pieces]

    def _map(self, shard: Shard) -> np.ndarray:
        path, dtype = self._directory / shard.file, np.dtype(shard.dtype).newbyteorder('<')
        # A plain array: slices of a memmap take several times as long.
        return np.asarray(np.memmap(path, dtype, 'r', shard.offset, (shard.num_tokens,)))


class _Bucket:
    """The files below a URL, read by ranges, those of one call at the same time."""

    mapped = False

    def __init__(self, url: str):
        self.where = url.rstrip('/')
        if self.where.startswith(buckets.SCHEME):
            buckets.to_path(self.where)  # the bucket is there, and libraries know of an emulator
        fsspec = load_extra('fsspec', buckets.EXTRA)
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.where)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f'data.path={self.where!r} needs a package that is not installed ({error}); '
                f"gs:// needs pip install -e '.[{buckets.EXTRA}]'"
            ) from error

    def sizes(self) -> dict[str, int]:
        try:
            entries = self._fs.ls(self._root, detail=True)
        except Exception as error:  # file systems raise many kinds
            reason = f'{type(error).__name__}: {" ".join(str(error).split())}'[:300]
            raise ConfigError(
                f'data.path={self.where!r} cannot be read ({reason}); it must be a directory of '
                'shards that these credentials may list and read'
            ) from error
        files = [entry for entry in entries if entry['type'] == 'file']
        return {entry['name'].rpartition('/')[2]: entry['size'] for entry in files}

    def read(self, names: Sequence[str], size: int | None = None) -> list[bytes]:
        paths, limits = map(self._path, names), () if size is None else (0, size)
        with concurrent.futures.ThreadPoolExecutor(CONNECTIONS) as threads:
            return list(threads.map(lambda path: self._fs.cat_file(path, *limits), paths))

    def tokens(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        dtypes = [np.dtype(shard.dtype).newbyteorder('<') for shard, _, _ in pieces]
        ranges = [*zip(pieces, (dtype.itemsize for dtype in dtypes), strict=True)]
        contents = self._fs.cat_ranges(
            [self._path(shard.file) for shard, _, _ in pieces],
            [shard.offset + low * width for (shard, low, _), width in ranges],
            [shard.offset + high * width for (shard, _, high), width in ranges],
            on_error='raise',
        )
        return [np.frombuffer(data, dtype) for data, dtype in zip(contents, dtypes, strict=True)]

    def _path(self, name: str) -> str:
        return f'{self._root}/{name}'


Files = _Local | _Bucket


def files_at(directory: str) -> Files:
    """The files of a directory, or below a URL such as gs://bucket/tokens.

    Raises:
      ConfigError: neither is there, or can be read; a package for the URL is not installed.
    """
    return _Bucket(directory) if '://' in directory else _Local(directory)


class ShardTokens:
    """The ids of a split, which lie in shards one after another; only those asked for are read.

    `np.asarray` of ids in one local shard is a memory map.
    """

    def __init__(self, files: Files, shards: Sequence[Shard]):
        self.files, self.shards = files, tuple(shards)
        self._ends = [*itertools.accumulate(shard.num_tokens for shard in self.shards)]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def part(self, start: int, stop: int) -> tuple[Shard, ...]:
        """The parts of shards that hold the ids in [start, stop)."""
        parts = []
        for shard, low, high in self._pieces(start, stop - start):
            offset = shard.offset + low * np.dtype(shard.dtype).itemsize
            parts.append(dataclasses.replace(shard, offset=offset, num_tokens=high - low))
        return tuple(parts)

    def windows(self, first_B: np.ndarray, size: int) -> np.ndarray:
        """Rows of `size` consecutive ids from these positions on, int32 [B, size]."""
        if self.files.mapped and len(self.shards) == 1:  # faster than a slice for each row
            return np.asarray(self)[first_B[:, None] + np.arange(size)].astype(np.int32)
        pieces = [piece for first in first_B.tolist() for piece in self._pieces(first, size)]
        return self._read(pieces).astype(np.int32).reshape(len(first_B), size)

    def blocks(self) -> Iterator[np.ndarray]:
        """All ids in order, a few million at a time."""
        for low in range(0, len(self), BLOCK):
            yield self._read(self._pieces(low, min(BLOCK, len(self) - low)))

    def sha256(self) -> str:
        """The sha256 of all ids."""
        digest = hashlib.sha256()
        for ids in self.blocks():
            digest.update(ids.tobytes())
        return digest.hexdigest()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        ids = self._read(self._pieces(0, len(self)))
        return ids if dtype is None else ids.astype(dtype)

    def _pieces(self, first: int, size: int) -> list[Piece]:
        """Where `size` ids from `first` on lie."""
        pieces, position, stop = [], first, first + size
        number = bisect.bisect(self._ends, first)
        while position < stop:
            shard, end = self.shards[number], self._ends[number]
            begin = end - shard.num_tokens
            pieces.append((shard, position - begin, min(stop, end) - begin))
            position, number = end, number + 1
        return pieces

    def _read(self, pieces: list[Piece]) -> np.ndarray:
        ids = self.files.tokens(pieces)
        return ids[0] if len(ids) == 1 else np.concatenate([np.zeros(0, np.uint8), *ids])
