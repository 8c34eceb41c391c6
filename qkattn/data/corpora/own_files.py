"""The user's own files as a corpus: text, or parallel text with a file per language.

A line ends at '\\n' ('\\r\\n' counts as one end), and at no other character that Unicode calls a
line break. A file may be compressed, with '.gz' after its name.
"""

import codecs
import contextlib
import functools
import gzip
import hashlib
import logging
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, cast

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus import SPLITS, Corpus, cut_at_lines, parse_languages
from qkattn.errors import ConfigError
from qkattn.storage import buckets
from qkattn.storage.files import expanded, version_of

log = logging.getLogger(__name__)


def text(config: DataConfig) -> Corpus:
    """The corpus 'text': `config.path` is a file, or a directory with a file or folder per split.

    A file is cut at the ends of the lines that reach 90 % and 95 % of its bytes, and each part is
    one document; so is a split's file, and each file of a split's folder.

    Raises:
      ConfigError: for files that are missing, empty, damaged or not UTF-8.
    """
    path = _existing(config)
    files = {'file': {'file': path}}
    if path.is_dir():
        options = {split: (f'{split}.txt', f'{split}.txt.gz', split) for split in SPLITS}
        files = {
            split: _documents(file)
            for split, names in options.items()
            if (file := _one_of(path, names, required=split == 'train'))
        }
    named = [item for documents in files.values() for item in documents.items()]
    version = _version((name, _scan(file, config)[0]) for name, file in named)

    def documents(language: str | None) -> dict[str, Iterable[bytes]]:
        if path.is_dir():
            return {split: map(_whole, files[split].values()) for split in files}
        parts = cut_at_lines(_whole(path), (90, 95), repr(str(path)))
        return {split: [part] for split, part in zip(SPLITS, parts, strict=True)}

    return Corpus(
        name='text',
        version=version,
        splits=tuple(files) if path.is_dir() else SPLITS,
        documents=documents,
        names=(lambda split: list(files[split])) if path.is_dir() else None,
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
            f'{", ".join(f"{split}.{side}" for split in SPLITS[:2] for side in languages)}.'
        )
    files: dict[str, list[Path]] = {}
    sums: list[tuple[str, str]] = []
    for split in SPLITS:
        names = [f'{split}.{language}' for language in languages]
        pair = [_one_of(path, (name, f'{name}.gz'), required=split == 'train') for name in names]
        if not any(pair):
            continue
        if None in pair:
            raise ConfigError(
                f'data.path={config.path!r} holds {split!r} in one language only; '
                f'{names[pair.index(None)]} is missing.'
            )
        (source_sum, num_source), (target_sum, num_target) = (_scan(file, config) for file in pair)
        if num_source != num_target:
            raise ConfigError(
                f'Parallel text needs equal numbers of lines, but there are {num_source} in '
                f'{str(pair[0])!r} and {num_target} in {str(pair[1])!r}.'
            )
        files[split] = pair
        sums += zip(names, (source_sum, target_sum), strict=True)

    def documents(language: str | None) -> dict[str, Iterator[bytes]]:
        wanted = languages.index(str(language))
        return {split: _side(pair, wanted) for split, pair in files.items()}

    return Corpus(
        name='parallel-' + '-'.join(languages),
        version=_version(sums),
        languages=languages,
        splits=tuple(files),
        documents=documents,
    )


def _existing(config: DataConfig) -> Path:
    path = expanded(config.path)
    if not path.exists():
        raise ConfigError(f'data.path={config.path!r} does not exist; name your files.')
    return path


def _one_of(directory: Path, names: tuple[str, ...], *, required: bool) -> Path | None:
    """The file or folder of a split, which has one of these names."""
    existing = [directory / name for name in names if (directory / name).exists()]
    if len(existing) > 1:
        raise ConfigError(
            f'{str(directory)!r} holds both {existing[0].name} and {existing[1].name}; keep one of '
            'them.'
        )
    if not existing and required:
        raise ConfigError(
            f'data.path: {str(directory / names[0])!r} is missing; the directory must hold '
            f'{" or ".join(names)}.'
        )
    return existing[0] if existing else None


def _documents(path: Path) -> dict[str, Path]:
    """The file, or the text files of a folder, by the name of the document."""
    if path.name not in SPLITS:
        return {path.name.partition('.')[0]: path}
    if buckets.is_url(path):
        raise ConfigError(f'{str(path)!r} is a folder in a bucket; give its text as one file.')
    files = sorted(file for file in path.rglob('*') if file.name.endswith(('.txt', '.txt.gz')))
    if not files:
        raise ConfigError(f'{str(path)!r} holds no text files; name them *.txt or *.txt.gz.')
    return {file.relative_to(path.parent).as_posix(): file for file in files}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The uncompressed file; ConfigError where it cannot be read."""
    try:
        with path.open('rb') as file:
            yield cast(IO[bytes], gzip.GzipFile(fileobj=file)) if path.suffix == '.gz' else file
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(
            f'{str(path)!r} cannot be read ({error}); it must be a readable file'
            f'{" in gzip format" if path.suffix == ".gz" else ""}.'
        ) from error


def _version(sums: Iterable[tuple[str, str]]) -> str:
    lines = ''.join(f'{name} {sha256}\n' for name, sha256 in sums)
    return f'sha256-{hashlib.sha256(lines.encode()).hexdigest()[:16]}'


def _scan(path: Path, config: DataConfig) -> tuple[str, int]:
    """The sha256 of a file and the number of its lines; ConfigError if it is not text."""
    return _scan_version(path, config.tokenizer == 'bytes', version_of(path))


# A run opens its corpus more than once.
@functools.lru_cache
def _scan_version(path: Path, without_byte_0: bool, version: tuple[int, int]) -> tuple[str, int]:
    digest, number = hashlib.sha256(), 0
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            digest.update(line)
            try:
                line.decode()
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f'{str(path)!r}, line {number}, is not UTF-8 ({error.reason}); convert the '
                    'file.'
                ) from error
            if without_byte_0 and 0 in line:
                raise ConfigError(
                    f"{str(path)!r}, line {number}, holds byte 0, which data.tokenizer='bytes' "
                    'keeps for the ends of documents; remove it or choose another tokenizer.'
                )
    if not number:
        raise ConfigError(f'{str(path)!r} is empty; it must hold text.')
    return digest.hexdigest(), number


def _whole(path: Path) -> bytes:
    with _opened(path) as file:
        # The byte order mark that some editors put in front of UTF-8 is not text.
        return file.read().removeprefix(codecs.BOM_UTF8)


def _lines(path: Path) -> Iterator[bytes]:
    with _opened(path) as file:
        for number, line in enumerate(file):
            line = line.removeprefix(codecs.BOM_UTF8) if not number else line
            yield line.removesuffix(b'\n').removesuffix(b'\r')


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
