"""Sorts the user's files into splits by their names."""

import re
from collections.abc import Sequence
from pathlib import Path

from qkattn.data.corpora.corpus import SPLITS, explain_read_errors
from qkattn.errors import ConfigError

# Splits by word in a file or folder name.
WORDS = {
    'train': 'train',
    'training': 'train',
    'validation': 'validation',
    'valid': 'validation',
    'val': 'validation',
    'dev': 'validation',
    'test': 'test',
}


def files_by_split(directory: Path, suffixes: Sequence[str]) -> dict[str, list[Path]]:
    """Sorts the files below a directory into splits by their names.

    For example, 'val.bin', 'val/0.bin' and 'fineweb_val_000000.bin' are in validation. If no file
    names a split, all files are in train.

    Args:
        directory: The directory, which is searched recursively.
        suffixes: The suffixes of the files.

    Returns:
        The sorted files of each split that has files, in the order of SPLITS.

    Raises:
        ConfigError: Only some files name a split, a file names two splits, or train has no file.
    """
    files_of_split: dict[str, list[Path]] = {}
    files_without_split = []
    for path in _files_below(directory, suffixes):
        split = _split_of_name(path, directory)
        if split is None:
            files_without_split.append(path)
        else:
            files_of_split.setdefault(split, []).append(path)

    if files_without_split and not files_of_split:
        return {'train': files_without_split}
    if files_without_split:
        raise ConfigError(
            f'data.path: {files_without_split[0]} names no split, but other files there do; name '
            'it like train.bin, val_000.bin or test/000.bin, or move it'
        )
    if files_of_split and 'train' not in files_of_split:
        raise ConfigError(f'data.path: {str(directory)!r} has no file of the split train')
    return {split: files_of_split[split] for split in SPLITS if split in files_of_split}


def split_at_end(name: str, suffixes: Sequence[str]) -> str | None:
    """Returns the split that a file name ends with before one of the suffixes, or None.

    For example, 'train.txt', 'ptb.train.txt' and 'ptb-train.txt' end with train.
    """
    if name.startswith('.'):  # such as '._train.txt', which macOS writes beside 'train.txt'
        return None
    for suffix in suffixes:
        if name.lower().endswith(suffix):
            stem = name.lower().removesuffix(suffix)
            last_word = re.split('[._-]', stem)[-1]
            return WORDS.get(last_word)
    return None


def _files_below(directory: Path, suffixes: Sequence[str]) -> list[Path]:
    """Returns the sorted files below a directory with one of the suffixes."""
    name = f'data.path: {str(directory)!r}'
    files = []
    # `rglob` raises NotImplementedError for a directory in a bucket.
    with explain_read_errors(name, 'give a local or mounted directory', NotImplementedError):
        for path in sorted(directory.rglob('*')):
            if path.name.lower().endswith(tuple(suffixes)) and path.is_file():
                files.append(path)
    return files


def _split_of_name(path: Path, directory: Path) -> str | None:
    """Returns the split that is named in a file's path below `directory`, or None.

    Raises ConfigError if the path names several splits.
    """
    relative_path = path.relative_to(directory).as_posix().lower()
    words = re.split('[^a-z]+', relative_path)  # 'val/part_0.bin' -> ['val', 'part', 'bin']
    splits = sorted({WORDS[word] for word in words if word in WORDS})
    if len(splits) > 1:
        raise ConfigError(f'data.path: {path} names the splits {" and ".join(splits)}; rename it')
    return splits[0] if splits else None
