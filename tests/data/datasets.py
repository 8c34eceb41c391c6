"""Token datasets made of arrays, batches of their rows, and shards and texts on disk."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qkattn.data.shard_files import MAGIC, Shard
from qkattn.data.tasks.rows import Batch, Rows
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.data.tokens import SplitInfo, TokenDataset


class Arrays:
    """Arrays in the place of the files of shards."""

    mapped = True

    def __init__(self, arrays: dict[str, np.ndarray]):
        self.arrays = arrays

    def tokens(self, pieces):
        return [self.arrays[shard.file][low:high] for shard, low, high in pieces]


def token_dataset(
    name: str, tokenizer: Tokenizer, splits: dict[str, np.ndarray], bytes_per_token: int = 2
) -> TokenDataset:
    """A dataset of version '1'; the fingerprint of a split is made of the two names."""
    made = {}
    for split, tokens in splits.items():
        made[split] = SplitInfo(
            num_tokens=len(tokens),
            num_bytes=bytes_per_token * len(tokens),
            unigram_nats_per_token=float(np.log(max(len(tokens), 1))),
            fingerprint=name + split,
            shards=(Shard(file=split, num_tokens=len(tokens), dtype=str(tokens.dtype)),),
        )
    return TokenDataset(name, '1', tokenizer, Arrays(splits), made)


def read_rows(
    rows: Rows, split: str, numbers_B: Sequence[int], seed: int = 0, first_place: int = 0
) -> Batch:
    """Rows of a split, drawn at consecutive places of the endless sequence of a seed."""
    numbers_B = np.asarray(numbers_B)
    places_B = first_place + np.arange(len(numbers_B))
    draws_B2 = np.stack([np.full_like(places_B, seed), places_B], axis=1).astype(np.uint64)
    return rows.read(split, numbers_B, draws_B2)


def check_shapes(batch: Batch, num_rows: int, length: int) -> None:
    """Checks names, shapes and types of a batch in which tokens are predicted from tokens."""
    assert {name: (array.shape, array.dtype.name) for name, array in batch.items()} == {
        'tokens_BT': ((num_rows, length), 'int32'),
        'targets_BT': ((num_rows, length), 'int32'),
        'loss_weights_BT': ((num_rows, length), 'float32'),
    }


def write_bin(path: Path, ids, dtype: str | None = 'uint16') -> Path:
    """Writes ids as llm.c does; as nanoGPT does, without a header, where `dtype` is None."""
    header = np.zeros(256 if dtype else 0, '<i4')
    header[:3] = [*MAGIC[dtype], len(ids)] if dtype else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header.tobytes() + np.asarray(ids, dtype or 'uint16').tobytes())
    return path


def write_texts(directory: Path, count: int = 60) -> Path:
    """A folder per split with a document per file, of 10 to 200 bytes."""
    for split, number in (('train', count), ('validation', 20), ('test', 20)):
        (directory / split).mkdir(parents=True)
        for n in range(number):
            text = f'{split} {n}: ' + 'naïve words, ' * (1 + n * 7 % 13) + '\n'
            (directory / split / f'{n:03d}.txt').write_text(text, encoding='utf-8')
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    """The bytes of every file."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
