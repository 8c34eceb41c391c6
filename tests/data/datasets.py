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
    """A tokenized dataset of version '1', made of arrays instead of files.

    Args:
        name: The name of the dataset. The fingerprint of a split is this name followed by the
            name of the split. In a real dataset, it is a hash of the tokens.
        tokenizer: The tokenizer. Each separator in the tokens ends a document.
        splits: The tokens of each split.
        bytes_per_token: The number of bytes of text that each token counts as.
    """
    infos = {}
    for split, tokens in splits.items():
        infos[split] = SplitInfo(
            num_documents=np.count_nonzero(tokens == tokenizer.separator),
            num_tokens=len(tokens),
            num_bytes=bytes_per_token * len(tokens),
            # The entropy of tokens that are all different.
            unigram_nats_per_token=float(np.log(max(len(tokens), 1))),
            fingerprint=name + split,
        )
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
    """Registers a dataset of version '1' under a name, for the setting data.name.

    `texts` has the documents of each split. Their names are 'train 0', 'train 1' and so on.
    """

    def document_names(split):
        return [f'{split} {index}' for index, _ in enumerate(texts[split])]

    corpus = Corpus(
        name=name,
        version='1',
        splits=tuple(texts),
        documents=lambda language: texts,
        names=document_names,
    )
    monkeypatch.setitem(CORPORA, name, Source(lambda config: corpus))


def read_rows(rows: Rows, split: str, numbers_B: Sequence[int], seed=0, first_place=0) -> Batch:
    """Reads B rows of a split by their numbers.

    The random seed of row b is the pair (seed, first_place + b).
    """
    numbers_B = np.asarray(numbers_B)
    places_B = first_place + np.arange(len(numbers_B))
    seeds_B = np.full_like(places_B, seed)
    draws_B2 = np.stack([seeds_B, places_B], axis=1).astype(np.uint64)
    return rows.read(split, numbers_B, draws_B2)


def check_shapes(batch: Batch, num_rows: int, length: int) -> None:
    """Checks names, shapes and dtypes of the arrays of a batch."""
    expected_dtypes = {'tokens_BT': 'int32', 'targets_BT': 'int32', 'loss_weights_BT': 'float32'}
    assert batch.keys() == expected_dtypes.keys()
    for name, array in batch.items():
        assert array.dtype.name == expected_dtypes[name]
        assert array.shape == (num_rows, length)


def write_texts(directory: Path) -> Path:
    """Writes a folder for each split, with one document per file, and returns the directory.

    Train has 60 documents of about 20 to 200 bytes. Validation and test have 20 each.
    """
    num_documents = {'train': 60, 'validation': 20, 'test': 20}
    for split, count in num_documents.items():
        folder = directory / split
        folder.mkdir(parents=True)
        for number in range(count):
            num_repeats = 1 + number * 7 % 13  # 1 to 13, mixed
            text = f'{split} {number}: ' + num_repeats * 'naïve words, ' + '\n'
            (folder / f'{number:03d}.txt').write_text(text, encoding='utf-8')
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    """The bytes of every file."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
