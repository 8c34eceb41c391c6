"""The user's own files as a corpus: text, or parallel text with a file per language.

A line ends at '\\n' ('\\r\\n' counts as one end), and at no other character that Unicode calls a
line break.
"""

import codecs
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus import SPLITS, Corpus, cut_at_lines, parse_languages, readable
from qkattn.errors import ConfigError
from qkattn.storage.files import as_path, read_whole, version_of

# Suffixes of files that hold no plain text, or hold it inside of records, whose braces and quotes a
# model would learn.
# fmt: off
NOT_TEXT = (
    '.arrow', '.avro', '.bin', '.bz2', '.csv', '.docx', '.epub', '.feather', '.gz', '.h5',
    '.hdf5', '.idx', '.json', '.jsonl', '.lz4', '.ndjson', '.npy', '.npz', '.orc', '.parquet',
    '.pdf', '.pickle', '.pkl', '.pt', '.pth', '.safetensors', '.sqlite', '.tar', '.tfrecord',
    '.tgz', '.tsv', '.xz', '.zip', '.zst',
)
# fmt: on


def text(config: DataConfig) -> Corpus:
    """The corpus 'text': `config.path` is a file, or a directory with a file or folder per split.

    A file is cut at the ends of the lines that reach 90 % and 95 % of its bytes, and each part is
    one document; so is a split's file, and each file of a split's folder.
    """
    path = as_path(config.path)
    if not path.is_dir():
        return _text_of_one_file(path)

    # By split: the files by the names of the documents.
    files: dict[str, dict[str, Path]] = {}
    for split in SPLITS:
        files_of_split = _files_of_split(path, split)
        if files_of_split:
            files[split] = files_of_split
    if 'train' not in files:
        raise ConfigError(f'data.path: {str(path)!r} holds neither train.txt nor train/*.txt')

    def documents(language: str | None) -> dict[str, Iterator[bytes]]:
        return {split: map(_read, files[split].values()) for split in files}

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


def _text_of_one_file(path: Path) -> Corpus:
    if path.suffix.lower() in NOT_TEXT:
        raise ConfigError(
            f'data.path: {str(path)!r} is a {path.suffix} file, which is not read; give plain '
            'text in UTF-8, as in book.txt'
        )

    def documents(language: str | None) -> dict[str, list[bytes]]:
        parts = cut_at_lines(_read(path), (90, 95), repr(str(path)))
        return {split: [part] for split, part in zip(SPLITS, parts, strict=True)}

    return Corpus(name='text', version=_version({'file': path}), splits=SPLITS, documents=documents)


def parallel(config: DataConfig) -> Corpus:
    """The corpus 'parallel': a directory with train.en, train.de, validation.en and so on.

    A line is a document. Pairs of which a side is blank are left out.
    """
    languages = parse_languages(config)
    path = as_path(config.path)
    # By split: the files of source and target.
    files: dict[str, list[Path]] = {}
    for split in SPLITS:
        pair = [path / f'{split}.{language}' for language in languages]
        if split == 'train' or any(file.exists() for file in pair):
            files[split] = pair
    all_files = {file.name: file for pair in files.values() for file in pair}
    version = _version(all_files)
    for source, target in files.values():
        _, source_lines = _scan(source)
        _, target_lines = _scan(target)
        if source_lines != target_lines:
            raise ConfigError(
                f'{str(source)!r} and {str(target)!r} must have equal numbers of lines, not '
                f'{source_lines} and {target_lines}.'
            )

    def documents(language: str | None) -> dict[str, Iterator[bytes]]:
        side = languages.index(str(language))
        return {split: _lines_of_side(pair, side) for split, pair in files.items()}

    return Corpus(
        name='-'.join(('parallel', *languages)),
        version=version,
        languages=languages,
        splits=tuple(files),
        documents=documents,
    )


def _lines_of_side(pair: list[Path], side: int) -> Iterator[bytes]:
    """The lines of one file of a pair, without those that are blank in either of them."""
    sides = [_read(file).removesuffix(b'\n').split(b'\n') for file in pair]
    for lines in zip(*sides, strict=True):
        is_blank = any(not line.decode().strip() for line in lines)
        if not is_blank:
            yield lines[side].removesuffix(b'\r')


def _files_of_split(directory: Path, split: str) -> dict[str, Path]:
    """The file of a split, or the text files of its folder, by the name of the document.

    Empty where the directory has neither; ConfigError where it has both, or an empty folder.
    """
    file = directory / f'{split}.txt'
    folder = directory / split
    if not folder.exists():
        return {split: file} if file.exists() else {}
    if file.exists():
        raise ConfigError(f'{str(directory)!r} holds both {split} and {file.name}; keep one.')
    with readable(repr(str(folder)), 'give its text as a file', NotImplementedError):  # in a bucket
        files = sorted(folder.rglob('*.txt'))
    if not files:  # else a split is carved in the place of the user's
        raise ConfigError(f'data.path: {str(folder)!r} holds no .txt file.')
    return {file.relative_to(directory).as_posix(): file for file in files}


def _version(files: dict[str, Path]) -> str:
    """The version of a corpus: the sha256 of the names and contents of its files."""
    lines = ''
    for name, file in files.items():
        sha256, _ = _scan(file)
        lines += f'{name} {sha256}\n'
    return f'sha256-{hashlib.sha256(lines.encode()).hexdigest()[:16]}'


def _scan(path: Path) -> tuple[str, int]:
    """The sha256 of a file and the number of its lines; ConfigError if it is not text."""
    with readable(f'data.path: {str(path)!r}', 'give a file of UTF-8', UnicodeDecodeError):
        return _scan_version(path, version_of(path))


# A run opens its corpus more than once; `version` changes with the file.
@functools.cache
def _scan_version(path: Path, version: tuple[int, int]) -> tuple[str, int]:
    content = read_whole(path, most=None)
    content.decode()  # raises where it is not UTF-8
    if not content:
        raise ConfigError(f'data.path: {str(path)!r} is empty; it must hold text.')
    position = content.find(0)
    if position >= 0:
        raise ConfigError(
            f'data.path: {str(path)!r} holds byte 0 at byte {position}, so it is not text; give '
            'plain text in UTF-8, as in book.txt'
        )
    num_lines = content.removesuffix(b'\n').count(b'\n') + 1
    return hashlib.sha256(content).hexdigest(), num_lines


def _read(path: Path) -> bytes:
    # The byte order mark that some editors put in front of UTF-8 is not text.
    return read_whole(path, most=None).removeprefix(codecs.BOM_UTF8)
