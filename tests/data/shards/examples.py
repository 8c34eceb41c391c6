"""Shards in the layouts of nanoGPT and llm.c, and a text of many documents."""

from pathlib import Path

import fsspec
import numpy as np

from qkattn.storage import buckets

LAYOUTS = {'uint16': (20240520, 1), 'uint32': (20240801, 7)}


def write_bin(path: Path, ids, dtype: str | None = 'uint16') -> Path:
    """Writes ids as llm.c does; as nanoGPT does, without a header, where `dtype` is None."""
    header = np.zeros(256, '<i4')
    head = b''
    if dtype is not None:
        header[:3] = [*LAYOUTS[dtype], len(ids)]
        head = header.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + np.asarray(ids, dtype or 'uint16').astype(dtype or '<u2').tobytes())
    return path


def write_texts(directory: Path, count: int = 60) -> Path:
    """A folder per split with a document per file, of 10 to 200 bytes."""
    for split, number in (('train', count), ('validation', 20), ('test', 20)):
        (directory / split).mkdir(parents=True)
        for n in range(number):
            text = f'{split} {n}: ' + 'naïve words, ' * (1 + n * 7 % 13) + '\n'
            (directory / split / f'{n:03d}.txt').write_text(text, encoding='utf-8')
    return directory


def upload(path: Path, url: str) -> None:
    """Copies a file below a URL."""
    if url.startswith(buckets.SCHEME):
        buckets.upload(path, f'{url}/{path.name}')
        return
    with fsspec.open(f'{url}/{path.name}', 'wb') as file:
        file.write(path.read_bytes())


def contents(directory: Path) -> dict[str, bytes]:
    """The bytes of every file."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
