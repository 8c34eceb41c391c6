"""The user's own files as a corpus: text, records of texts, or parallel text.

A line ends at '\\n' ('\\r\\n' counts as one end), and at no other character that Unicode calls a
line break.
"""

import codecs
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

from qkattn.config import DataConfig
from qkattn.data.corpora import records
from qkattn.data.corpora.corpus import SPLITS, Corpus, cut_at_lines, parse_languages, readable
from qkattn.data.corpora.split_files import files_by_split
from qkattn.errors import ConfigError
from qkattn.storage.files import as_path, read_whole, version_of

# Suffixes of text, plain or compressed.
TEXT = ('.txt', '.txt.gz', '.txt.zst')
# Suffixes of other files, which hold no plain text, or hold it inside of braces and quotes that a
# model would learn.
# fmt: off
NOT_TEXT = (
    '.arrow', '.avro', '.bin', '.bz2', '.csv', '.docx', '.epub', '.feather', '.gz', '.h5',
    '.hdf5', '.idx', '.json', '.lz4', '.npy', '.npz', '.orc', '.pdf', '.pickle', '.pkl', '.pt',
    '.pth', '.safetensors', '.sqlite', '.tar', '.tfrecord', '.tgz', '.tsv', '.xz', '.zip', '.zst',
)
# fmt: on


def text(config: DataConfig) -> Corpus:
    """The corpus 'text': `config.path` is a file or a directory of plain text or of records.

    A file of plain text is cut at the ends of the lines that reach 90 % and 95 % of its bytes, and
    each part is one document. In a directory a document is the file of a split, each file of a
    split's folder or, where no file or folder is named after a split, each file. The documents of
    records are the texts in their field `config.feature`.
    """
    path = as_path(config.path)
    if not path.is_dir() and records.is_records(path):
        return _text_of_records(config, {'train': [path]})
    if not path.is_dir():
        _refuse_feature(config)
        return _text_of_one_file(path)

    # By split: the files by the names of the documents.
    files: dict[str, dict[str, Path]] = {}
    empty_folders = []
    for split in SPLITS:
        files_of_split = _files_of_split(path, split)
        if files_of_split:
            files[split] = files_of_split
        elif (path / split).exists():
            empty_folders.append(path / split)
    if not files:
        files_of_records = files_by_split(path, tuple(records.SUFFIXES))
        if files_of_records:
            return _text_of_records(config, files_of_records)
        if not empty_folders:
            files['train'] = _text_files(path, path)
    if empty_folders:  # else a split is carved in the place of the user's
        raise ConfigError(f'data.path: {str(empty_folders[0])!r} holds no .txt file.')
    if not files.get('train'):
        raise ConfigError(
            f'data.path: {str(path)!r} holds neither train.txt nor train/*.txt, nor other files of '
            'text (.txt, .jsonl, .parquet)'
        )
    _refuse_feature(config)

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


def _refuse_feature(config: DataConfig) -> None:
    """Raises ConfigError where data.feature is set for plain text."""
    if config.feature is not None:
        raise ConfigError(
            f'data.feature={config.feature!r} has no effect on plain text; leave it at None.'
        )


def _text_of_records(config: DataConfig, files: dict[str, list[Path]]) -> Corpus:
    """The corpus of the texts in one field of the records of these files, by split."""
    field = config.feature or records.FIELD
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
    if path.suffix.lower() in NOT_TEXT and not path.name.lower().endswith(TEXT):
        raise ConfigError(
            f'data.path: {str(path)!r} is a {path.suffix} file, which is not read; give plain '
            'text in UTF-8, as in book.txt, or .jsonl or .parquet files of records'
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

    Empty where the directory has neither, or an empty folder; ConfigError where it has both.
    """
    candidates = [directory / f'{split}{suffix}' for suffix in TEXT]
    candidates.append(directory / split)
    existing = [path for path in candidates if path.exists()]
    if not existing:
        return {}
    if len(existing) > 1:
        names = f'{existing[-1].name} and {existing[0].name}'
        raise ConfigError(f'{str(directory)!r} holds both {names}; keep one.')
    if existing[0].name != split:
        return {split: existing[0]}
    return _text_files(existing[0], directory)


def _text_files(folder: Path, directory: Path) -> dict[str, Path]:
    """The text files below a folder by their paths in `directory`, which are names of documents."""
    with readable(repr(str(folder)), 'give its text as a file', NotImplementedError):  # in a bucket
        files = sorted(path for path in folder.rglob('*') if path.name.endswith(TEXT))
    return {file.relative_to(directory).as_posix(): file for file in files}


def _version(files: dict[str, Path]) -> str:
    """The version of a corpus: the sha256 of the names and contents of its files."""
    lines = ''
    for name, file in files.items():
        sha256, _ = _scan(file)
        lines += f'{name} {sha256}\n'
    return f'sha256-{hashlib.sha256(lines.encode()).hexdigest()[:16]}'


def _sha256(path: Path) -> str:
    """The sha256 of a file, which may be larger than the memory; ConfigError if it is empty."""
    with readable(f'data.path: {str(path)!r}', 'give a file'):
        return _sha256_of_version(path, version_of(path))


@functools.cache
def _sha256_of_version(path: Path, version: tuple[int, int]) -> str:
    size, _ = version
    if not size:
        raise ConfigError(f'data.path: {str(path)!r} is empty; it must hold text.')
    with records.opened(path) as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()  # type: ignore[arg-type]


def _scan(path: Path) -> tuple[str, int]:
    """The sha256 of a file and the number of its lines; ConfigError if it is not text."""
    with readable(f'data.path: {str(path)!r}', 'give a file of UTF-8', UnicodeDecodeError):
        return _scan_version(path, version_of(path))


# A run opens its corpus more than once; `version` changes with the file.
@functools.cache
def _scan_version(path: Path, version: tuple[int, int]) -> tuple[str, int]:
    content = _content(path)
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
    return _content(path).removeprefix(codecs.BOM_UTF8)


def _content(path: Path) -> bytes:
    """The bytes of a file, decompressed where it ends in '.gz' or '.zst'."""
    if not path.name.lower().endswith(TEXT[1:]):
        return read_whole(path, most=None)
    damaged = readable(f'data.path: {str(path)!r}', 'copy it again', *records.DAMAGED)
    with damaged, records.open_decompressed(path) as file:
        return file.read()
