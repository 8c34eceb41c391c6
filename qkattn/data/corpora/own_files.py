"""The user's own files as a corpus: text, or parallel text with a file per language.

A line ends at '\\n' ('\\r\\n' counts as one end), and at no other character that Unicode calls a
line break. A file may be compressed, with '.gz' after its name.
"""

import codecs
import functools
import gzip
import hashlib
import itertools
import logging
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple, cast

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus import Corpus, cut_at_lines, parse_languages
from qkattn.errors import ConfigError
from qkattn.storage import buckets
from qkattn.storage.files import expanded, version_of

SPLITS = ('train', 'validation', 'test')
BLOCK = 1 << 20

log = logging.getLogger(__name__)


class Scan(NamedTuple):
    """Result of reading a file through."""

    sha256: str
    num_lines: int


def text(config: DataConfig) -> Corpus:
    """The corpus 'text': `config.path` is a file, or a directory with a file or folder per split.

    A file is cut at the ends of the lines that reach 90 % and 95 % of its bytes, and each part is
    one document; so is a split's file, and each file of a split's folder.

    Raises:
      ConfigError: for files that are missing, empty, damaged or not UTF-8.
    """
    path = _existing(config)
    if path.is_dir():
        found = _split_files(path, '.txt', folders=True)
        paths = {split: _text_files(file) for split, file in found.items()}
        splits = tuple(paths)
    else:
        paths = {'file': {'file': path}}
        splits = SPLITS
    digest = hashlib.sha256()
    for files in paths.values():
        for name, file in files.items():
            digest.update(f'{name} {_scan(file, config).sha256}\n'.encode())

    def documents(language: str | None) -> dict[str, Iterable[bytes]]:
        if path.is_dir():
            return {
                split: itertools.chain.from_iterable(map(_whole, files.values()))
                for split, files in paths.items()
            }
        return {split: [part] for split, part in zip(SPLITS, _cut(path), strict=True)}

    return Corpus(
        name='text',
        version=f'sha256-{digest.hexdigest()[:16]}',
        languages=(),
        splits=splits,
        documents=documents,
        names=(lambda split: list(paths[split])) if path.is_dir() else None,
    )


def parallel(config: DataConfig) -> Corpus:
    """The corpus 'parallel': a directory with train.en, train.de, validation.en and so on.

    A line is a document. Pairs of blank lines are left out.

    Raises:
      ConfigError: for files that are missing, empty, damaged, not UTF-8 or of unequal numbers of
        lines; while documents are read, for a line that is blank in one language only.
    """
    languages = parse_languages(config)
    path = _existing(config)
    if not path.is_dir():
        raise ConfigError(
            f'data.path={config.path!r} is a file; parallel text is a directory with '
            f'{_names(languages)}.'
        )
    sides = [_split_files(path, f'.{language}') for language in languages]
    for split in SPLITS:
        present = [split in side for side in sides]
        if any(present) and not all(present):
            missing = languages[present.index(False)]
            raise ConfigError(
                f'data.path={config.path!r} holds {split!r} in one language only; '
                f'{split}.{missing} is missing.'
            )
    digest = hashlib.sha256()
    for split in sides[0]:
        files = [side[split] for side in sides]
        scans = [_scan(file, config) for file in files]
        if scans[0].num_lines != scans[1].num_lines:
            counts = ' and '.join(
                f'{scan.num_lines} in {str(file)!r}'
                for scan, file in zip(scans, files, strict=True)
            )
            raise ConfigError(
                f'Parallel text needs equal numbers of lines, but there are {counts}.'
            )
        for language, scan in zip(languages, scans, strict=True):
            digest.update(f'{split}.{language} {scan.sha256}\n'.encode())

    def documents(language: str | None) -> dict[str, Iterator[bytes]]:
        wanted = languages.index(str(language))
        return {split: _side([side[split] for side in sides], wanted) for split in sides[0]}

    return Corpus(
        name='parallel-' + '-'.join(languages),
        version=f'sha256-{digest.hexdigest()[:16]}',
        languages=languages,
        splits=tuple(sides[0]),
        documents=documents,
    )


def _names(languages: tuple[str, ...]) -> str:
    names = [f'{split}.{language}' for split in SPLITS[:2] for language in languages]
    return f'{", ".join(names[:-1])} and {names[-1]}'


def _existing(config: DataConfig) -> Path:
    path = expanded(config.path)
    if not path.exists():
        raise ConfigError(f'data.path={config.path!r} does not exist; name your files.')
    return path


def _split_files(directory: Path, suffix: str, *, folders: bool = False) -> dict[str, Path]:
    """The file of each split: train, and validation and test where there are any.

    Args:
      folders: whether a split may be a folder instead.
    """
    found = {}
    for split in SPLITS:
        candidates = [directory / f'{split}{suffix}', directory / f'{split}{suffix}.gz']
        candidates += [directory / split] if folders else []
        existing = [path for path in candidates if path.exists()]
        if len(existing) > 1:
            raise ConfigError(
                f'{str(directory)!r} holds both {existing[0].name} and {existing[1].name}; '
                'keep one of them.'
            )
        if existing:
            found[split] = existing[0]
        elif split == 'train':
            raise ConfigError(
                f'data.path: {str(candidates[0])!r} is missing; the directory must hold '
                f'{candidates[0].name} or {candidates[1].name}'
                f'{f", or a folder {split}" if folders else ""}.'
            )
    return found


def _text_files(path: Path) -> dict[str, Path]:
    """The file, or the text files of a folder, by the name of the document."""
    if path.name not in SPLITS:
        return {path.name.partition('.')[0]: path}
    if buckets.is_url(path):
        raise ConfigError(f'{str(path)!r} is a folder in a bucket; give its text as one file.')
    files = sorted(file for file in path.rglob('*') if file.name.endswith(('.txt', '.txt.gz')))
    if not files:
        raise ConfigError(f'{str(path)!r} holds no text files; name them *.txt or *.txt.gz.')
    return {file.relative_to(path.parent).as_posix(): file for file in files}


def _open(path: Path) -> IO[bytes]:
    file = path.open('rb')
    return cast(IO[bytes], gzip.open(file)) if path.suffix == '.gz' else file


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f'{str(path)!r} cannot be read ({error}); it must be a readable file'
        f'{" in gzip format" if path.suffix == ".gz" else ""}.'
    )


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with _open(path) as file:
            while block := file.read(BLOCK):
                yield block
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def _scan(path: Path, config: DataConfig) -> Scan:
    """Reads a file through; raises ConfigError if it is not text."""
    try:
        version = version_of(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    return _scan_blocks(path, config.tokenizer == 'bytes', version)


# A run opens its corpus more than once.
@functools.lru_cache
def _scan_blocks(path: Path, without_byte_0: bool, version: tuple[int, int]) -> Scan:
    digest = hashlib.sha256()
    decoder = codecs.getincrementaldecoder('utf-8')()
    num_ends = 0
    last = pending = b''
    for block in itertools.chain(_blocks(path), [b'']):
        try:
            decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            line = num_ends + (pending + block)[: error.start].count(b'\n') + 1
            raise ConfigError(
                f'{str(path)!r}, line {line}, is not UTF-8 ({error.reason}); convert the file.'
            ) from error
        pending = decoder.getstate()[0]
        if without_byte_0 and (position := block.find(0)) >= 0:
            line = num_ends + block[:position].count(b'\n') + 1
            raise ConfigError(
                f"{str(path)!r}, line {line}, holds byte 0, which data.tokenizer='bytes' keeps for "
                'the ends of documents; remove it or choose another tokenizer.'
            )
        digest.update(block)
        num_ends += block.count(b'\n')
        last = block or last
    if not last:
        raise ConfigError(f'{str(path)!r} is empty; it must hold text.')
    return Scan(digest.hexdigest(), num_ends + (not last.endswith(b'\n')))


def _whole(path: Path) -> Iterator[bytes]:
    # The byte order mark that some editors put in front of UTF-8 is not text.
    yield b''.join(_blocks(path)).removeprefix(codecs.BOM_UTF8)


def _cut(path: Path) -> list[bytes]:
    (data,) = _whole(path)
    return cut_at_lines(data, (90, 95), repr(str(path)))


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with _open(path) as file:
            for number, line in enumerate(file):
                line = line.removeprefix(codecs.BOM_UTF8) if not number else line
                yield line.removesuffix(b'\n').removesuffix(b'\r')
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def _side(paths: list[Path], wanted: int) -> Iterator[bytes]:
    """The lines of one language, without those that are blank in both."""
    num_blank = num_pairs = 0
    for number, pair in enumerate(zip(*map(_lines, paths), strict=True), start=1):
        filled = [bool(line.decode().strip()) for line in pair]
        if all(filled):
            num_pairs += 1
            yield pair[wanted]
        elif any(filled):
            raise ConfigError(
                f'{str(paths[filled.index(False)])!r}, line {number}, is blank, but its '
                f'translation in {str(paths[filled.index(True)])!r} is not; fill or remove both.'
            )
        else:
            num_blank += 1
    if not num_pairs:
        raise ConfigError(f'{str(paths[wanted])!r} holds blank lines only; it must hold text.')
    if num_blank and not wanted:
        log.info('Left out %d pairs of blank lines of %s', num_blank, paths[0].stem)
