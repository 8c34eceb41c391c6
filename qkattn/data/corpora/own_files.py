"""Corpora of the user's own files: plain text, records with a field of text, or parallel text.

A line ends with '\\n' or '\\r\\n'. Other characters that Unicode calls line breaks end no line.
"""

import codecs
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from qkattn.config import DataConfig
from qkattn.data.corpora import records
from qkattn.data.corpora.corpus import (
    SPLITS,
    Corpus,
    cut_at_lines,
    explain_read_errors,
    parse_languages,
)
from qkattn.data.corpora.split_files import files_by_split
from qkattn.errors import ConfigError
from qkattn.storage.files import as_path, read_whole, version_of

# Suffixes of text, plain or compressed.
TEXT = ('.txt', '.txt.gz', '.txt.zst')
# Suffixes of files that hold no plain text. Some do hold text, but inside of braces and quotes that
# a model would learn.
# fmt: off
NOT_TEXT = (
    '.arrow', '.avro', '.bin', '.bz2', '.csv', '.docx', '.epub', '.feather', '.gz', '.h5',
    '.hdf5', '.idx', '.json', '.lz4', '.npy', '.npz', '.orc', '.pdf', '.pickle', '.pkl', '.pt',
    '.pth', '.safetensors', '.sqlite', '.tar', '.tfrecord', '.tgz', '.tsv', '.xz', '.zip', '.zst',
)
# fmt: on


def text(config: DataConfig) -> Corpus:
    """Opens the corpus 'text': the file or directory at `config.path`.

    The splits and documents depend on the files:

    - A plain-text file is cut at line ends into 90 % train, 5 % validation and 5 % test. Each
      split is one document.
    - A directory can have a file or a folder per split. The file train.txt is one document. In a
      folder train/, each text file is one document.
    - In any other directory, each text file is one document of the train split.
    - In JSON lines and Parquet files, each record is one document. `config.feature` names the field
      with the text.

    Raises:
      ConfigError: there is no text, or the files of a split are ambiguous.
    """
    path = as_path(config.path)
    if path.is_dir():
        return _text_of_directory(config, path)
    if records.is_records(path):
        return _text_of_records(config, {'train': [path]})
    _refuse_feature(config)  # plain text has no fields
    return _text_of_one_file(path)


def _text_of_directory(config: DataConfig, directory: Path) -> Corpus:
    """Makes a corpus from the files in a directory; see `text`."""
    # files[split][name of the document] is the path of the document.
    files: dict[str, dict[str, Path]] = {}
    # First choice: plain text that is named after a split, such as train.txt or validation/a.txt.
    empty_folders = []
    for split in SPLITS:
        files_of_split = _files_of_split(directory, split)
        if files_of_split:
            files[split] = files_of_split
        elif (directory / split).exists():
            empty_folders.append(directory / split)

    # Second choice: files of records, such as train.jsonl.
    if not files:
        files_of_records = files_by_split(directory, tuple(records.SUFFIXES))
        if files_of_records:
            return _text_of_records(config, files_of_records)

    # Third choice: all plain text, as the train split.
    if not files and not empty_folders:
        files['train'] = _text_files(directory, directory)

    # A split is carved from train if it has no files. If there is an empty folder for it, the user
    # has probably forgotten the files.
    if empty_folders:
        raise ConfigError(f'data.path: {str(empty_folders[0])!r} holds no .txt file.')
    if not files.get('train'):
        raise ConfigError(
            f'data.path: {str(directory)!r} holds neither train.txt nor train/*.txt, nor other '
            'files of text (.txt, .jsonl, .parquet)'
        )
    _refuse_feature(config)

    def documents(language: str | None) -> dict[str, Iterator[bytes]]:
        return {split: map(_read_text, files[split].values()) for split in files}

    all_files: dict[str, Path] = {}
    for files_of_split in files.values():
        all_files.update(files_of_split)
    return Corpus(
        name='text',
        version=_version(all_files),
        splits=tuple(files),
        documents=documents,
        names=lambda split: list(files[split]),
    )


def _refuse_feature(config: DataConfig) -> None:
    """Raises ConfigError if data.feature is set, for plain text."""
    if config.feature is not None:
        raise ConfigError(
            f'data.feature={config.feature!r} has no effect on plain text; leave it at None.'
        )


def _text_of_records(config: DataConfig, files: dict[str, list[Path]]) -> Corpus:
    """Makes a corpus from files of records. Each record is a document.

    Args:
      config: the settings; `feature` names the field that holds the text.
      files: the files of each split.
    """
    field = config.feature or records.FIELD

    # The version of the corpus is a digest of the field and of all files.
    lines = f'feature {field}\n'
    for split, paths in files.items():
        for path in paths:
            lines += f'{split} {path.name} {_sha256(path)}\n'

    def read(split: str) -> Iterator[bytes]:
        for path in files[split]:
            yield from records.texts(path, field)

    return Corpus(
        name='text',
        version=f'sha256-{hashlib.sha256(lines.encode()).hexdigest()[:16]}',
        splits=tuple(files),
        documents=lambda language: {split: read(split) for split in files},
    )


def _text_of_one_file(path: Path) -> Corpus:
    """Makes a corpus from a file of plain text: 90 % are train, 5 % validation, 5 % test.

    Raises ConfigError for a suffix of other files.
    """
    # 'a.gz' is no text, but 'a.txt.gz' is.
    is_text = path.name.lower().endswith(TEXT)
    if path.suffix.lower() in NOT_TEXT and not is_text:
        raise ConfigError(
            f'data.path: {str(path)!r} is a {path.suffix} file, which is not read; give plain '
            'text in UTF-8, as in book.txt, or .jsonl or .parquet files of records'
        )

    def documents(language: str | None) -> dict[str, list[bytes]]:
        parts = cut_at_lines(_read_text(path), (90, 95), repr(str(path)))
        return {split: [part] for split, part in zip(SPLITS, parts, strict=True)}

    return Corpus(name='text', version=_version({'file': path}), splits=SPLITS, documents=documents)


def parallel(config: DataConfig) -> Corpus:
    """Opens the corpus 'parallel': a directory with train.en, train.de, validation.en and so on.

    Line i of train.de translates line i of train.en. Each line is a document. A pair of lines is
    left out if one of them is blank. Raises ConfigError if the files of a split have different
    numbers of lines.
    """
    languages = parse_languages(config)
    directory = as_path(config.path)
    # The files of source and target, by split.
    pairs: dict[str, list[Path]] = {}
    for split in SPLITS:
        pair = [directory / f'{split}.{language}' for language in languages]
        if split == 'train' or any(file.exists() for file in pair):
            pairs[split] = pair

    all_files = {}
    for pair in pairs.values():
        for file in pair:
            all_files[file.name] = file
    version = _version(all_files)

    for source, target in pairs.values():
        source_lines = _scan(source).num_lines
        target_lines = _scan(target).num_lines
        if source_lines != target_lines:
            raise ConfigError(
                f'{str(source)!r} and {str(target)!r} must have equal numbers of lines, not '
                f'{source_lines} and {target_lines}.'
            )

    def documents(language: str | None) -> dict[str, Iterator[bytes]]:
        side = languages.index(str(language))
        return {split: _lines_of_side(pair, side) for split, pair in pairs.items()}

    return Corpus(
        name='-'.join(('parallel', *languages)),
        version=version,
        languages=languages,
        splits=tuple(pairs),
        documents=documents,
    )


def _lines_of_side(pair: list[Path], side: int) -> Iterator[bytes]:
    """Yields the lines of one file of a pair. Lines that are blank in either file are left out.

    `side` is 0 for the source and 1 for the target.
    """
    lines_of_files = [_read_text(file).removesuffix(b'\n').split(b'\n') for file in pair]
    for lines in zip(*lines_of_files, strict=True):
        is_blank = any(not line.decode().strip() for line in lines)
        if not is_blank:
            yield lines[side].removesuffix(b'\r')


def _files_of_split(directory: Path, split: str) -> dict[str, Path]:
    """Returns the text files of a split, by the names of their documents.

    - A file train.txt is one document: {'train': directory / 'train.txt'}.
    - Each text file in a folder train is a document: {'train/a.txt': directory / 'train/a.txt'}.

    Returns {} if there is no such file and no such folder, or if the folder holds no text. Raises
    ConfigError if there is both a file and a folder, or more than one file.
    """
    candidates = [directory / f'{split}{suffix}' for suffix in TEXT]
    candidates.append(directory / split)  # the folder
    existing = [path for path in candidates if path.exists()]
    if not existing:
        return {}
    if len(existing) > 1:
        names = f'{existing[-1].name} and {existing[0].name}'
        raise ConfigError(f'{str(directory)!r} holds both {names}; keep one.')

    (path,) = existing
    is_folder = path.name == split
    if is_folder:
        return _text_files(path, directory)
    return {split: path}


def _text_files(folder: Path, directory: Path) -> dict[str, Path]:
    """Returns the text files below a folder, by the names of their documents.

    The name of a document is the path of its file in `directory`, such as 'train/a.txt'.
    """
    # A folder in a bucket raises NotImplementedError.
    with explain_read_errors(repr(str(folder)), 'give its text as a file', NotImplementedError):
        files = sorted(path for path in folder.rglob('*') if path.name.endswith(TEXT))
    return {file.relative_to(directory).as_posix(): file for file in files}


def _version(files: dict[str, Path]) -> str:
    """Returns the version of a corpus: a digest of the names and contents of its files."""
    lines = ''
    for name, file in files.items():
        lines += f'{name} {_scan(file).sha256}\n'
    return f'sha256-{hashlib.sha256(lines.encode()).hexdigest()[:16]}'


def _sha256(path: Path) -> str:
    """Returns the sha256 of a file, which may be larger than the memory.

    Raises ConfigError if the file is empty or cannot be read.
    """
    with explain_read_errors(f'data.path: {str(path)!r}', 'give a file'):
        return _sha256_of_version(path, version_of(path))


@functools.cache
def _sha256_of_version(path: Path, version: tuple[int, int]) -> str:
    """Reads a file once, as `_sha256` does, however often a run opens its corpus.

    `version` is the size of the file and the time of its last change. A file that has changed is
    read again.
    """
    size, _ = version
    if not size:
        raise ConfigError(f'data.path: {str(path)!r} is empty; it must hold text.')
    with records.open_binary(path) as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()  # type: ignore[arg-type]


class _Scan(NamedTuple):
    """What one reading of a text file tells."""

    sha256: str
    num_lines: int


def _scan(path: Path) -> _Scan:
    """Reads a text file once. Raises ConfigError if it is empty, or not text in UTF-8."""
    with explain_read_errors(
        f'data.path: {str(path)!r}', 'give a file of UTF-8', UnicodeDecodeError
    ):
        return _scan_version(path, version_of(path))


@functools.cache
def _scan_version(path: Path, version: tuple[int, int]) -> _Scan:
    """Reads a text file once, as `_scan` does, however often a run opens its corpus.

    `version` is the size of the file and the time of its last change. It only serves the cache: a
    file that has changed is read again.
    """
    content = _read_bytes(path)
    content.decode()  # raises UnicodeDecodeError if it is not UTF-8
    if not content:
        raise ConfigError(f'data.path: {str(path)!r} is empty; it must hold text.')
    zero_position = content.find(0)
    if zero_position >= 0:
        raise ConfigError(
            f'data.path: {str(path)!r} holds byte 0 at byte {zero_position}, so it is not text; '
            'give plain text in UTF-8, as in book.txt'
        )
    num_lines = content.removesuffix(b'\n').count(b'\n') + 1
    return _Scan(hashlib.sha256(content).hexdigest(), num_lines)


def _read_text(path: Path) -> bytes:
    """Reads the text of a file, in UTF-8."""
    # The byte order mark that some editors put in front of UTF-8 is not text.
    return _read_bytes(path).removeprefix(codecs.BOM_UTF8)


def _read_bytes(path: Path) -> bytes:
    """Reads the bytes of a file, and decompresses them if it ends in '.gz' or '.zst'."""
    if not path.name.lower().endswith(TEXT[1:]):
        return read_whole(path, most=None)
    damaged = explain_read_errors(f'data.path: {str(path)!r}', 'copy it again', *records.DAMAGED)
    with damaged, records.open_decompressed(path) as file:
        return file.read()
