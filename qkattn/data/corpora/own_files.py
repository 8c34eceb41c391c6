"""Corpora from the user's own files: plain text, records with a text field, or parallel text.

A line ends with '\\n' or '\\r\\n', not with Unicode's other line breaks.
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
from qkattn.data.corpora.split_files import WORDS, files_by_split, split_at_end
from qkattn.errors import ConfigError
from qkattn.storage.files import as_path, read_whole, version_of

# Suffixes of plain text.
TEXT = ('.txt', '.txt.gz', '.txt.zst')
# Suffixes of files that are not plain text. Some, such as .json, hold text with markup that a model
# would learn.
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
    - A directory can have a file or a folder per split. The file train.txt or my.train.txt is one
      document. In a folder train/, each text file is one document.
    - In any other directory, each text file is one document of the train split.
    - In JSON lines and Parquet files, each record is one document. `config.feature` names the field
      with the text.

    Raises:
        ConfigError: There is no text, or the files of a split are ambiguous.
    """
    path = as_path(config.path)
    if path.is_dir():
        return _text_of_directory(config, path)
    with explain_read_errors(f'data.path: {str(path)!r}', 'give a file or a directory of text'):
        path.stat()
    if records.is_records(path):
        return _text_of_records(config, {'train': [path]})
    _refuse_feature(config)  # plain text has no fields
    return _text_of_one_file(path)


def _text_of_directory(config: DataConfig, directory: Path) -> Corpus:
    """Makes a corpus from plain-text files or record files in a directory; see `text`."""
    # First choice: plain text named after a split, such as train.txt, ptb.valid.txt or test/a.txt.
    files, empty_folders = _text_files_by_split(directory)

    # Second choice: records, such as train.jsonl.
    if not files:
        record_files = files_by_split(directory, tuple(records.SUFFIXES))
        if record_files:
            return _text_of_records(config, record_files)

    # Third choice: all plain text, as the train split.
    if not files and not empty_folders:
        files['train'] = _text_files(directory, directory)

    # Probably the user forgot the files of this split.
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


def _text_files_by_split(directory: Path) -> tuple[dict[str, dict[str, Path]], list[Path]]:
    """Finds the plain-text files and folders that are named after a split.

    Returns:
        The file of each document by split and document name, as in
        {'train': {'train/a.txt': Path(...)}}, and the folders of splits that hold no text.
    """
    files = {}
    empty_folders = []
    names_read = []  # of files and folders in the directory
    for split, path in _paths_of_splits(directory).items():
        if _is_text(path):
            _require_lower_suffix(path)
            files_of_split = {split: path}
        else:
            files_of_split = _text_files(path, directory)
        if files_of_split:
            files[split] = files_of_split
            names_read.append(path.name)
        else:
            empty_folders.append(path)
    if files:
        _refuse_unread_records(directory, names_read)
        _refuse_unread_text(directory, names_read)
    return files, empty_folders


def _refuse_unread_records(directory: Path, names_read: list[str]) -> None:
    """Raises ConfigError for records of a split beside plain text, such as validation.jsonl.

    Args:
        directory: The user's directory.
        names_read: The files and folders in it that are read as plain text of a split.
    """
    first_name = min(names_read)
    for path in sorted(directory.iterdir()):
        split = split_at_end(path.name, tuple(records.SUFFIXES))
        if split is not None:
            raise ConfigError(
                f'data.path: {str(path)!r} is not read beside {first_name}; give its text as '
                f'{split}.txt or in a folder {split}, or move it'
            )


def _refuse_unread_text(directory: Path, names_read: list[str]) -> None:
    """Raises ConfigError if my.test.txt is read as the test split, but notes.txt is not read.

    The title my.test may end with 'test' by chance. Then the user wants both files as train text.
    In contrast, test.txt beside notes.txt is certainly the test split.

    Args:
        directory: The user's directory.
        names_read: The files and folders in it that are read as plain text of a split.
    """
    titles = []
    for name in sorted(names_read):
        first_word, _, _ = name.lower().partition('.')  # 'my.test.txt' -> 'my'
        if first_word not in WORDS:  # the words for splits, such as 'test' and 'valid'
            titles.append(name)
    if not titles:
        return
    for path_in_directory, file in _text_files(directory, directory).items():
        file_or_folder, _, _ = path_in_directory.partition('/')  # 'notes/a.txt' -> 'notes'
        if file_or_folder not in names_read:
            raise ConfigError(
                f'data.path: {str(file)!r} names no split, but {titles[0]!r} ends with one; '
                'rename one of them, or move it'
            )


def _refuse_feature(config: DataConfig) -> None:
    """Raises ConfigError if `config.feature` is set, because plain text has no fields."""
    if config.feature is not None:
        raise ConfigError(
            f'data.feature={config.feature!r} has no effect on plain text; leave it at None.'
        )


def _text_of_records(config: DataConfig, files: dict[str, list[Path]]) -> Corpus:
    """Makes a corpus from the record files of each split. Each record is a document."""
    field = config.feature or records.FIELD

    # The version identifies the field and the contents of all files.
    lines = f'feature {field}\n'
    for split, paths in files.items():
        for path in paths:
            lines += f'{split} {path.name} {_sha256(path)}\n'
    version = _version_of_lines(lines)

    def read_texts(split: str) -> Iterator[bytes]:
        for path in files[split]:
            yield from records.texts(path, field)

    return Corpus(
        name='text',
        version=version,
        splits=tuple(files),
        documents=lambda language: {split: read_texts(split) for split in files},
    )


def _text_of_one_file(path: Path) -> Corpus:
    """Makes a corpus from a plain-text file: 90 % train, 5 % validation and 5 % test.

    Raises ConfigError if the suffix is not one of plain text.
    """
    # Text includes .txt.gz, but no other .gz files.
    if path.suffix.lower() in NOT_TEXT and not _is_text(path):
        raise ConfigError(
            f'data.path: {str(path)!r} is a {path.suffix} file, which is not read; give plain '
            'text in UTF-8, as in book.txt, or .jsonl or .parquet files of records'
        )

    def documents(language: str | None) -> dict[str, list[bytes]]:
        train, validation, test = cut_at_lines(
            _read_text(path), percents=(90, 95), name=repr(str(path))
        )
        return {'train': [train], 'validation': [validation], 'test': [test]}

    return Corpus(name='text', version=_version({'file': path}), splits=SPLITS, documents=documents)


def parallel(config: DataConfig) -> Corpus:
    """Opens the corpus 'parallel': a directory with files such as train.en and train.de.

    Each line is a document. Line i of train.de is the translation of line i of train.en. Lines that
    are blank in one of the languages are left out.

    Raises:
        ConfigError: The two files of a split have different numbers of lines.
    """
    languages = parse_languages(config)
    directory = as_path(config.path)
    # The source file and the target file of each split.
    files_of_split: dict[str, list[Path]] = {}
    for split in SPLITS:
        files = [directory / f'{split}.{language}' for language in languages]
        # Only train is required. Below, a missing file raises ConfigError when it is read.
        if split == 'train' or any(file.exists() for file in files):
            files_of_split[split] = files

    file_of_name = {}
    for files in files_of_split.values():
        for file in files:
            file_of_name[file.name] = file
    version = _version(file_of_name)

    for source, target in files_of_split.values():
        _require_equal_lines(source, target)

    def documents(language: str | None) -> dict[str, Iterator[bytes]]:
        file_index = languages.index(str(language))
        return {split: _aligned_lines(files, file_index) for split, files in files_of_split.items()}

    return Corpus(
        name='-'.join(('parallel', *languages)),
        version=version,
        languages=languages,
        splits=tuple(files_of_split),
        documents=documents,
    )


def _require_equal_lines(source: Path, target: Path) -> None:
    """Raises ConfigError if two parallel files have different numbers of lines."""
    source_lines = _scan(source).num_lines
    target_lines = _scan(target).num_lines
    if source_lines != target_lines:
        raise ConfigError(
            f'{str(source)!r} and {str(target)!r} must have equal numbers of lines, not '
            f'{source_lines} and {target_lines}.'
        )


def _aligned_lines(files: list[Path], file_index: int) -> Iterator[bytes]:
    """Yields the lines of one of two parallel files.

    Lines that are blank in either file are left out.
    """
    lines_of_files = [_read_text(file).removesuffix(b'\n').split(b'\n') for file in files]
    for aligned_lines in zip(*lines_of_files, strict=True):
        any_is_blank = any(not line.decode().strip() for line in aligned_lines)
        if not any_is_blank:
            yield aligned_lines[file_index].removesuffix(b'\r')


def _paths_of_splits(directory: Path) -> dict[str, Path]:
    """Returns the plain-text file or the folder of each split, in the order of SPLITS.

    Raises ConfigError if a split has several of them.
    """
    path_of_split: dict[str, Path] = {}
    for path in sorted(directory.iterdir()):
        split = _split_of_path(path)
        if split is None:
            continue
        if split in path_of_split:
            names = f'{path_of_split[split].name} and {path.name}'
            raise ConfigError(f'{str(directory)!r} holds both {names}; keep one.')
        path_of_split[split] = path
    return {split: path_of_split[split] for split in SPLITS if split in path_of_split}


def _split_of_path(path: Path) -> str | None:
    """Returns the split of a plain-text file or folder in the user's directory, or None.

    The name of a file is a word for a split or ends with one, as in 'valid.txt' and
    'ptb.valid.txt'. The name of a folder is such a word.
    """
    name = path.name.lower()
    if _is_text(path):
        return split_at_end(name, TEXT)
    if name in SPLITS:
        return name
    # A folder such as dev/ may hold other files than text.
    if name in WORDS and path.is_dir() and _text_files(path, path):
        return WORDS[name]  # 'dev' -> 'validation'
    return None


def _is_text(path: Path) -> bool:
    """Whether a file has the suffix of plain text, in lower or upper case."""
    return path.name.lower().endswith(TEXT)


def _require_lower_suffix(path: Path) -> None:
    """Raises ConfigError if the suffix of a plain-text file is in upper case."""
    if not path.name.endswith(TEXT):
        raise ConfigError(
            f'data.path: {str(path)!r} is not read; write its suffix in lower case, or move it'
        )


def _text_files(folder: Path, directory: Path) -> dict[str, Path]:
    """Returns the plain-text files below a folder, by path in `directory`: 'train/a.txt'."""
    # `rglob` raises NotImplementedError for a folder in a bucket.
    with explain_read_errors(repr(str(folder)), 'give its text as a file', NotImplementedError):
        files = sorted(path for path in folder.rglob('*') if _is_text(path))
    for file in files:
        _require_lower_suffix(file)
    return {file.relative_to(directory).as_posix(): file for file in files}


def _version(files: dict[str, Path]) -> str:
    """Returns the version of a corpus, which identifies the names and contents of its files."""
    lines = ''
    for name, file in files.items():
        lines += f'{name} {_scan(file).sha256}\n'
    return _version_of_lines(lines)


def _version_of_lines(lines: str) -> str:
    return f'sha256-{hashlib.sha256(lines.encode()).hexdigest()[:16]}'


def _sha256(path: Path) -> str:
    """Returns the sha256 of a file of any size.

    Raises ConfigError if the file is empty or cannot be read.
    """
    with explain_read_errors(f'data.path: {str(path)!r}', 'give a file'):
        return _sha256_of_version(path, version_of(path))


@functools.cache
def _sha256_of_version(path: Path, version: tuple[int, int]) -> str:
    """Returns the sha256 of a file, cached by its version (size, modification time)."""
    size, _ = version
    if size == 0:
        raise ConfigError(f'data.path: {str(path)!r} is empty; it must hold text.')
    with records.open_binary(path) as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()  # type: ignore[arg-type]


class _Scan(NamedTuple):
    """The digest and the number of lines of a text file."""

    sha256: str
    num_lines: int


def _scan(path: Path) -> _Scan:
    """Scans a text file. Raises ConfigError if it is empty or not UTF-8 text."""
    name = f'data.path: {str(path)!r}'
    with explain_read_errors(name, 'give a file of UTF-8', UnicodeDecodeError):
        return _scan_version(path, version_of(path))


@functools.cache
def _scan_version(path: Path, version: tuple[int, int]) -> _Scan:
    """Scans a text file; `version` (size, modification time) is only a key of the cache."""
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
    """Reads the UTF-8 text of a file, without a byte order mark."""
    return _read_bytes(path).removeprefix(codecs.BOM_UTF8)


def _read_bytes(path: Path) -> bytes:
    """Reads a file, and decompresses '.txt.gz' and '.txt.zst'."""
    is_compressed_text = path.name.lower().endswith(('.txt.gz', '.txt.zst'))
    if not is_compressed_text:
        return read_whole(path, most=None)  # of any size
    name = f'data.path: {str(path)!r}'
    with (
        explain_read_errors(name, 'copy it again', *records.DAMAGED),
        records.open_decompressed(path) as file,
    ):
        return file.read()
