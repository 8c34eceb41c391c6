"""Token datasets made of arrays."""

import numpy as np

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
            num_tokens=len(tokens),
            num_bytes=bytes_per_token * len(tokens),
            unigram_nats_per_token=float(np.log(max(len(tokens), 1))),
            fingerprint=name + split,
        )
        described[split] = (tokens, info)
    return TokenDataset(name, '1', tokenizer, described)
