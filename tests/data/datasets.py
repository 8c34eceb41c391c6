"""Token datasets made of arrays, and batches of their rows."""

from collections.abc import Sequence

import numpy as np

from qkattn.data.tasks.rows import Batch, Rows
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.data.tokens import SplitInfo, TokenDataset


def token_dataset(
    name: str, tokenizer: Tokenizer, splits: dict[str, np.ndarray], bytes_per_token: int = 2
) -> TokenDataset:
    """A dataset of version '1'; the fingerprint of a split is made of the two names."""
    described = {}
    for split, tokens in splits.items():
        info = SplitInfo(
            dataset=name,
            version='1',
            tokenizer=tokenizer.name,
            split=split,
            dtype=str(tokens.dtype),
            num_documents=1,
            document_names=None,
            num_tokens=len(tokens),
            num_bytes=bytes_per_token * len(tokens),
            unigram_nats_per_token=float(np.log(max(len(tokens), 1))),
            fingerprint=name + split,
        )
        described[split] = (tokens, info)
    return TokenDataset(name, '1', tokenizer, described)


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
