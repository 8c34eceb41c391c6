"""Files of token shards: their layouts, and random access on a local disk or in a bucket.

A shard is a `.bin` file of little-endian token ids. Three layouts are read:

    llm.c, modded-nanogpt   256 int32 of header: 20240520, 1, number of tokens; then uint16
    llm.c for Llama 3       the same with 20240801, 7; then uint32
    nanoGPT                 no header; uint16

`qkattn prepare_data` writes the first two, and uses entries of the header that those programs leave
0: [3] documents, [4:6] bytes of text, an int64, [6:14] the sha256 of the tokens.
"""

import concurrent.futures
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from qkattn.config.calls import load_extra
from qkattn.errors import ConfigError
from qkattn.storage import buckets
from qkattn.storage.files import expanded

HEADER = 256
HEADER_BYTES = 4 * HEADER
# (magic, version) by dtype of the ids.
MAGIC = {'uint16': (20240520, 1), 'uint32': (20240801, 7)}
DTYPES = {magic: dtype for dtype, magic in MAGIC.items()}
# Multiple-choice questions of llm.c, which are no text.
EVALUATION_MAGIC = 20240522
# Ids that are read at a time where a split is read through.
BLOCK = 1 << 22
CONNECTIONS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """A file of tokens: `num_tokens` ids of `dtype`, `offset` bytes after its beginning."""

    file: str
    num_tokens: int
    dtype: str
    offset: int = HEADER_BYTES

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.offset + self.num_tokens * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """What the header of a shard says of its tokens; `num_bytes` of text, one per separator."""

    num_tokens: int
    num_documents: int
    num_bytes: int
    sha256: str


def header(dtype: str, counts: Counts) -> bytes:
    """The header of a shard.

    Raises:
      ConfigError: more tokens than a header can state.
    """
    if counts.num_tokens >= 2**31:
        raise ConfigError(
            f'a shard of {counts.num_tokens:,} tokens has no header, since documents are not cut; '
            'give documents of fewer than 2**31 tokens'
        )
    values = np.zeros(HEADER, '<i4')
    values[:4] = [*MAGIC[dtype], counts.num_tokens, counts.num_documents]
    values[4:6] = np.array([counts.num_bytes], '<i8').view('<i4')
    values[6:14] = np.frombuffer(bytes.fromhex(counts.sha256), '<i4')
    return values.tobytes()


def counts_of(head: bytes) -> Counts:
    """The counts in a header that `header` made."""
    values = np.frombuffer(head[:HEADER_BYTES], '<i4')
    return Counts(
        num_tokens=int(values[2]),
        num_documents=int(values[3]),
        num_bytes=int(values[4:6].view('<i8')[0]),
        sha256=values[6:14].tobytes().hex(),
    )


def shard_of(file: str, size: int, head: bytes, where: str) -> Shard:
    """The shard in a file of any of the layouts, from its size and its first bytes.

    Raises:
      ConfigError: a layout that is not known, a size that is not that of its header.
    """
    magic, version, num_tokens = np.frombuffer(head[:12].ljust(12, b'\0'), '<i4').tolist()
    path = f'{where}/{file}'
    if magic not in {known for known, _ in DTYPES} | {EVALUATION_MAGIC}:
        if size % 2 or not size:
            raise ConfigError(
                f'{path} is no shard of tokens: without a header its {size} bytes have to be '
                'uint16 ids, two bytes each'
            )
        return Shard(file=file, num_tokens=size // 2, dtype='uint16', offset=0)
    if (magic, version) not in DTYPES:
        raise ConfigError(
            f'{path} has a header {magic}, version {version}, which is not that of tokens; known '
            f'are {" and ".join(f"{m}, version {v}" for m, v in DTYPES)}'
        )
    if num_tokens < 1:
        raise ConfigError(f'{path} has a header of {num_tokens} tokens; remove it')
    shard = Shard(file=file, num_tokens=num_tokens, dtype=DTYPES[magic, version])
    check_size(shard, size, where)
    return shard


def check_size(shard: Shard, size: int | None, where: str, advice: str = 'fetch it again') -> None:
    """Raises ConfigError unless the file of a shard is there, `size` bytes long as it has to be."""
    if size is None:
        raise ConfigError(f'{where}/{shard.file} is missing; {advice}')
    if size != shard.size:
        raise ConfigError(
            f'{where}/{shard.file} is damaged: it has {size:,} bytes, but its {shard.num_tokens:,} '
            f'tokens take {shard.size:,}; {advice}'
        )


# A shard, and the first token and the one behind the last that are wanted of it.
Piece = tuple[Shard, int, int]


class Files(Protocol):
    """The files of one directory."""

    where: str

    def sizes(self) -> dict[str, int]:
        """Bytes by name."""

    def heads(self, names: Sequence[str], size: int) -> list[bytes]:
        """The first bytes of files, at most `size` of each."""

    def content(self, name: str) -> bytes:
        """A whole file."""

    def tokens(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        """The ids of each piece."""


def files_at(directory: str) -> Files:
    """The files of a directory, or below a URL such as gs://bucket/tokens.

    Raises:
      ConfigError: neither is there, or can be read; a package for the URL is not installed.
    """
    return _Bucket(directory) if '://' in directory else _Local(directory)


class _Local:
    """Memory-mapped; a file is opened when it is first read."""

    def __init__(self, directory: str):
        self._directory, self.where = expanded(directory), directory
        self._mapped: dict[str, np.ndarray] = {}

    def sizes(self) -> dict[str, int]:
        try:
            paths = sorted(self._directory.iterdir())
            return {path.name: path.stat().st_size for path in paths if path.is_file()}
        except OSError as error:
            raise ConfigError(
                f'data.path={self.where!r} cannot be read ({error.strerror}); it must be a '
                'directory of shards'
            ) from error

    def heads(self, names: Sequence[str], size: int) -> list[bytes]:
        try:
            heads = []
            for name in names:
                with (self._directory / name).open('rb') as file:
                    heads.append(file.read(size))
            return heads
        except OSError as error:
            raise ConfigError(f'{error.filename} cannot be read ({error.strerror})') from error

    def content(self, name: str) -> bytes:
        return self.heads([name], -1)[0]

    def tokens(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        return [self._map(shard)[low:high] for shard, low, high in pieces]

    def _map(self, shard: Shard) -> np.ndarray:
        if shard.file not in self._mapped:
            path, dtype = self._directory / shard.file, np.dtype(shard.dtype).newbyteorder('<')
            # A plain array: slices of a memmap take several times as long.
            self._mapped[shard.file] = np.asarray(
                np.memmap(path, dtype, 'r', shard.offset, (shard.num_tokens,))
            )
        return self._mapped[shard.file]


class _Bucket:
    """Range reads, those of one call at the same time, by the file system fsspec has for a URL."""

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
            raise ConfigError(
                f'data.path={self.where!r} cannot be read ({_reason(error)}); it must be a '
                'directory of shards that these credentials may list and read'
            ) from error
        files = [entry for entry in entries if entry['type'] == 'file']
        return {entry['name'].rpartition('/')[2]: entry['size'] for entry in files}

    def heads(self, names: Sequence[str], size: int) -> list[bytes]:
        with concurrent.futures.ThreadPoolExecutor(CONNECTIONS) as threads:
            return list(threads.map(lambda name: self._head(name, size), names))

    def _head(self, name: str, size: int) -> bytes:
        return self._fs.cat_file(self._path(name), 0, size)

    def content(self, name: str) -> bytes:
        return self._fs.cat_file(self._path(name))

    def tokens(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        widths = [np.dtype(shard.dtype).itemsize for shard, _, _ in pieces]
        ranges = list(zip(pieces, widths, strict=True))
        read = self._fs.cat_ranges(
            [self._path(shard.file) for shard, _, _ in pieces],
            [shard.offset + low * width for (shard, low, _), width in ranges],
            [shard.offset + high * width for (shard, _, high), width in ranges],
            on_error='raise',
        )
        dtypes = [np.dtype(shard.dtype).newbyteorder('<') for shard, _, _ in pieces]
        return [np.frombuffer(data, dtype) for data, dtype in zip(read, dtypes, strict=True)]

    def _path(self, name: str) -> str:
        return f'{self._root}/{name}'


def _reason(error: Exception) -> str:
    return f'{type(error).__name__}: {" ".join(str(error).split())}'[:300]


class ShardTokens:
    """The ids of a split that lie in shards, one after another, or a part of them.

    Nothing is read before it is asked for.
    """

    def __init__(
        self, files: Files, shards: Sequence[Shard], start: int = 0, stop: int | None = None
    ):
        """Args: start, stop: the part; default all."""
        self.files, self.shards = files, list(shards)
        self._ends = np.cumsum([shard.num_tokens for shard in self.shards], dtype=np.int64)
        self._start = start
        self._stop = int(self._ends[-1]) if stop is None and self.shards else stop or 0

    def __len__(self) -> int:
        return self._stop - self._start

    def part(self, start: int, stop: int) -> 'ShardTokens':
        """The ids in [start, stop)."""
        return ShardTokens(self.files, self.shards, self._start + start, self._start + stop)

    def windows(self, first_B: np.ndarray, size: int) -> np.ndarray:
        """Rows of `size` consecutive ids, int32 [B, size]; only they are read."""
        tokens_BT = np.empty((len(first_B), size), np.int32)
        pieces: list[Piece] = []
        places: list[tuple[int, int]] = []  # row and column of each piece
        low_B = np.asarray(first_B, np.int64) + self._start
        shard_B = np.searchsorted(self._ends, low_B, side='right')
        for row, (low, number) in enumerate(zip(low_B.tolist(), shard_B.tolist(), strict=True)):
            column = 0
            while column < size:
                shard = self.shards[number]
                at = low + column - int(self._ends[number]) + shard.num_tokens
                high = min(at + size - column, shard.num_tokens)
                pieces.append((shard, at, high))
                places.append((row, column))
                column += high - at
                number += 1
        for (row, column), ids in zip(places, self.files.tokens(pieces), strict=True):
            tokens_BT[row, column : column + len(ids)] = ids
        return tokens_BT

    def blocks(self) -> Iterator[np.ndarray]:
        """All ids in order, a few million at a time."""
        for low in range(0, len(self), BLOCK):
            yield self.windows(np.array([low]), min(BLOCK, len(self) - low))[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.windows(np.array([0]), len(self))[0].astype(dtype or np.int32)


def sha256_of_tokens(files: Files, shard: Shard) -> str:
    """The sha256 of the tokens of a shard, which are read a few million at a time."""
    digest = hashlib.sha256()
    for low in range(0, shard.num_tokens, BLOCK):
        piece = (shard, low, min(low + BLOCK, shard.num_tokens))
        digest.update(files.tokens([piece])[0].tobytes())
    return digest.hexdigest()
