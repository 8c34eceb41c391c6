"""Token datasets made of arrays, batches of their rows, and texts on disk."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkattn.data.corpora.corpus import Corpus
from qkattn.data.corpora.corpus_registry import CORPORA, Source
from qkattn.data.tasks.rows import Batch, Rows
from qkattn.data.tokens import SplitInfo, TokenDataset


def token_dataset(name: str, tokenizer: Any, splits: dict[str, Any], bytes_per_token: int = 2):
    """A dataset of version '1'; the fingerprint of split 'train' of dataset 'a' is 'atrain'."""
    infos = {
        split: SplitInfo(
            num_documents=np.count_nonzero(tokens == tokenizer.separator),
            num_tokens=len(tokens),
            num_bytes=bytes_per_token * len(tokens),
            unigram_nats_per_token=float(np.log(max(len(tokens), 1))),
            fingerprint=name + split,
        )
        for split, tokens in splits.items()
    }
    return TokenDataset(name, '1', tokenizer, infos, splits)


class Numbers:
    name = 'numbers'
    vocab_size = 65536
    separator = 0


def numbers(**sizes: int) -> TokenDataset:
    """A dataset in which a token tells its position: numbers(train=100, validation=20)."""
    splits = {split: np.arange(size, dtype=np.uint16) for split, size in sizes.items()}
    return token_dataset('numbers', Numbers(), splits)


def documents(corpus: Corpus, language: str | None = None) -> dict[str, list[bytes]]:
    return {split: list(texts) for split, texts in corpus.documents(language).items()}


def register(monkeypatch: pytest.MonkeyPatch, name: str, texts: dict[str, Iterable[bytes]]):
    """A corpus of these texts by split, each named by its number, as a dataset."""
    corpus = Corpus(
        name=name,
        version='1',
        splits=tuple(texts),
        documents=lambda _: texts,
        names=lambda split: [f'{split} {n}' for n, _ in enumerate(texts[split])],
    )
    monkeypatch.setitem(CORPORA, name, Source(lambda config: corpus))


def read_rows(rows: Rows, split: str, numbers_B: Sequence[int], seed=0, first_place=0) -> Batch:
    """Rows of a split, drawn at consecutive places of the endless sequence of a seed."""
    numbers_B = np.asarray(numbers_B)
    places_B = first_place + np.arange(len(numbers_B))
    draws_B2 = np.stack([np.full_like(places_B, seed), places_B], axis=1).astype(np.uint64)
    return rows.read(split, numbers_B, draws_B2)


def check_shapes(batch: Batch, num_rows: int, length: int) -> None:
    """Checks names, shapes and types of a batch in which tokens are predicted from tokens."""
    kinds = {'tokens_BT': 'int32', 'targets_BT': 'int32', 'loss_weights_BT': 'float32'}
    assert {name: array.dtype.name for name, array in batch.items()} == kinds
    assert {array.shape for array in batch.values()} == {(num_rows, length)}


def write_texts(directory: Path) -> Path:
    """A folder per split with a document per file, of 10 to 200 bytes."""
    for split, number in (('train', 60), ('validation', 20), ('test', 20)):
        (directory / split).mkdir(parents=True)
        for n in range(number):
            text = f'{split} {n}: ' + 'naïve words, ' * (1 + n * 7 % 13) + '\n'
            (directory / split / f'{n:03d}.txt').write_text(text, encoding='utf-8')
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    """The bytes of every file."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
