"""Which files of the user's are which split, by the words in their names."""

import re
from collections.abc import Sequence
from pathlib import Path

from qkattn.data.corpora.corpus import SPLITS, readable
from qkattn.errors import ConfigError

# The words for the splits in names of files and folders.
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
    """The files below a directory that end in one of `suffixes`, by split, in order of their names.

    'fineweb_val_000000.bin', 'val.bin' and 'val/0.bin' are of the validation split. Files of which
    none names a split are all of 'train'. ConfigError where only some do, or one names two.
    """
    files = []
    with readable(
        f'data.path: {str(directory)!r}', 'give a local or mounted directory', NotImplementedError
    ):
        for path in sorted(directory.rglob('*')):
            if path.name.lower().endswith(tuple(suffixes)) and path.is_file():
                files.append(path)
    files_of_split: dict[str, list[Path]] = {}
    without_split = []
    for path in files:
        name = path.relative_to(directory).as_posix().lower()
        words = re.split('[^a-z]+', name)
        splits = {WORDS[word] for word in words if word in WORDS}
        if len(splits) > 1:
            raise ConfigError(
                f'data.path: {path} names the splits {" and ".join(sorted(splits))}; rename it'
            )
        if splits:
            files_of_split.setdefault(splits.pop(), []).append(path)
        else:
            without_split.append(path)
    if not files_of_split and without_split:
        return {'train': without_split}
    if without_split:
        raise ConfigError(
            f'data.path: {without_split[0]} names no split, but other files there do; name it like '
            'train.bin, val_000.bin or test/000.bin, or move it'
        )
    if files_of_split and 'train' not in files_of_split:
        raise ConfigError(f'data.path: {str(directory)!r} has no file of the split train')
    return {split: files_of_split[split] for split in SPLITS if split in files_of_split}
