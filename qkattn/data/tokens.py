"""A tokenized corpus: one memory-mapped file of token ids per split, checked whenever it is opened.

On disk, `<data_dir>/tokens/<name>/<version>/<tokenizer>/<split>.bin` holds the ids of all documents
of a split, a separator after each; `<split>.json` beside it describes them, with their sha256.
"""

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qkattn.data.cache import DamagedCache, check_sha256, prepared_once, read_description
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.errors import ConfigError
from qkattn.storage.files import replacing, write_atomic

SPLITS = ('train', 'validation', 'test')

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """What a token file holds.

    Attributes:
      dataset, version, tokenizer, split: the source of the tokens.
      dtype: of one token id, in the byte order of the machine.
      num_documents: documents, each followed by a separator.
      document_names: of the documents of an evaluation split, where the corpus has names.
      num_tokens: token ids, separators included.
      num_bytes: bytes of text that the tokens stand for, one per separator.
      unigram_nats_per_token: entropy of the token frequencies of this split.
      fingerprint: sha256 of the file.

    num_documents, num_bytes and unigram_nats_per_token are None where nobody has counted.
    """

    dataset: str
    version: str
    tokenizer: str
    split: str
    dtype: str
    num_documents: int | None
    document_names: list[str] | None
    num_tokens: int
    num_bytes: int | None
    unigram_nats_per_token: float | None
    fingerprint: str


class TokenDataset:
    """Token ids of the splits of one corpus.

    Attributes:
      name: e.g. 'stdlib'.
      version: of the text, e.g. 'py3.11.7-1.0.0'.
      tokenizer: turns ids back into text and counts their bytes.
      vocab_size: ids are in [0, vocab_size).
      carved: the splits that were carved from train, and which part of it each is.
    """

    def __init__(
        self,
        name: str,
        version: str,
        tokenizer: Tokenizer,
        splits: Mapping[str, tuple[Any, SplitInfo]],
        carved: Mapping[str, float] | None = None,
    ):
        self.name = name
        self.version = version
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.carved = dict(carved or {})
        self._splits = dict(splits)

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits, 'train' first."""
        return tuple(self._splits)

    def _split(self, split: str) -> tuple[Any, SplitInfo]:
        if split not in self._splits:
            raise ConfigError(
                f'split={split!r} is not in dataset {self.name!r}; valid: '
                f'{", ".join(map(repr, self._splits))}.'
            )
        return self._splits[split]

    def split(self, split: str) -> Any:
        """Token ids of a split, one-dimensional and read-only: a memory map, or `ShardTokens`.

        Raises:
          ConfigError: for an unknown split.
        """
        return self._split(split)[0]

    def info(self, split: str) -> SplitInfo:
        """Counts and fingerprint of a split."""
        return self._split(split)[1]

    def windows(self, split: str, first_B: np.ndarray, size: int) -> np.ndarray:
        """Rows of `size` consecutive tokens from these positions on, int32 [B, size]."""
        positions_BT = np.asarray(first_B)[:, None] + np.arange(size)
        return np.asarray(self.split(split))[positions_BT].astype(np.int32)

    def document_ends(self, split: str) -> np.ndarray:
        """The position after each document's separator, ascending."""
        return np.flatnonzero(self.split(split) == self.tokenizer.separator) + 1

    def document_names(self, split: str) -> list[str]:
        """Names of a split's documents in order; their numbers where the corpus names none."""
        info = self.info(split)
        return info.document_names or [str(n) for n in range(len(self.document_ends(split)))]

    def identity(self) -> dict[str, Any]:
        """Identifies the data in results and checkpoints; JSON."""
        return {
            'name': self.name,
            'version': self.version,
            'tokenizer': self.tokenizer.name,
            'fingerprints': {
                split: info.fingerprint for split, (_, info) in sorted(self._splits.items())
            },
            **({'carved': self.carved} if self.carved else {}),
        }

    def unigram_nats(self, split: str) -> float | None:
        """Entropy of the token frequencies of a split, in nats per token."""
        return self.info(split).unigram_nats_per_token

    def bytes_per_token(self, split: str) -> float | None:
        """Bytes of text per token of a split, on average; None where ids have no text."""
        info = self.info(split)
        return info.num_bytes / info.num_tokens


def open_dataset(
    data_dir: Path,
    *,
    name: str,
    version: str,
    tokenizer: Tokenizer,
    documents: Callable[[], Mapping[str, Iterable[bytes]]],
    splits: tuple[str, ...] = SPLITS,
    names: Callable[[str], list[str]] | None = None,
    carved: Mapping[str, float] | None = None,
) -> TokenDataset:
    """Opens the token files under `data_dir` and writes them first where they are missing.

    A damaged file is logged as a warning and written again. Any number of processes may call this
    at the same time.

    Args:
      documents: yields the texts of each split in a fixed order; called only to write files.
      splits: those of SPLITS that the corpus has.
      names: the names of a split's documents; kept of evaluation splits.
      carved: as of `Corpus`.

    Raises:
      ConfigError: if files have to be written and `data_dir` cannot be; a document that the
        tokenizer cannot encode.
    """
    directory = data_dir / 'tokens' / name / version / tokenizer.name
    described = {
        'dataset': name,
        'version': version,
        'tokenizer': tokenizer.name,
        'dtype': str(np.min_scalar_type(tokenizer.vocab_size - 1)),
    }

    def opened() -> TokenDataset:
        files = {split: _open_split(directory, described | {'split': split}) for split in splits}
        return TokenDataset(name, version, tokenizer, files, carved)

    def write() -> None:
        log.info('Writing tokens of %s %s to %s', name, version, directory)
        for split, share in (carved or {}).items():
            log.info('%s has no %s split: %.0f %% of train are carved', name, split, 100 * share)
        texts = documents()
        for split in splits:
            named = names(split) if names is not None and split != 'train' else None
            _write_split(directory, described | {'split': split}, tokenizer, texts[split], named)

    return prepared_once(directory / 'lock', opened, write)


def _paths(directory: Path, split: str) -> tuple[Path, Path]:
    return directory / f'{split}.bin', directory / f'{split}.json'


def _write_split(
    directory: Path,
    described: dict[str, str],
    tokenizer: Tokenizer,
    texts: Iterable[bytes],
    names: list[str] | None,
) -> None:
    counts_V = np.zeros(tokenizer.vocab_size, np.int64)
    digest = hashlib.sha256()
    num_documents = num_bytes = 0
    tokens_path, info_path = _paths(directory, described['split'])
    with replacing(tokens_path) as path, path.open('wb') as file:
        for text in texts:
            try:
                encoded = tokenizer.encode(text)
            except ValueError as error:
                raise ConfigError(
                    f'document {num_documents + 1} of split {described["split"]!r} of '
                    f'{described["dataset"]} cannot be encoded: {error}'
                ) from error
            ids = np.append(encoded, tokenizer.separator).astype(described['dtype'])
            file.write(ids.tobytes())
            digest.update(ids.tobytes())
            counts_V += np.bincount(ids, minlength=tokenizer.vocab_size)
            num_bytes += tokenizer.num_bytes(ids)
            num_documents += 1
    num_tokens = int(counts_V.sum())
    info = SplitInfo(
        **described,
        num_documents=num_documents,
        document_names=names,
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        unigram_nats_per_token=entropy(counts_V),
        fingerprint=digest.hexdigest(),
    )
    # Last, because a description stands for a finished token file.
    write_atomic(info_path, json.dumps(dataclasses.asdict(info), indent=2) + '\n')


def entropy(counts_V: np.ndarray) -> float:
    """Entropy of the frequencies of ids, in nats per token."""
    frequencies = counts_V[counts_V > 0] / max(counts_V.sum(), 1)
    return -float(np.sum(frequencies * np.log(frequencies)))


def _open_split(directory: Path, described: dict[str, str]) -> tuple[np.ndarray, SplitInfo]:
    tokens_path, info_path = _paths(directory, described['split'])
    # os.path, because Path.exists raises where a directory may not be entered.
    if not os.path.exists(tokens_path) and not os.path.exists(info_path):
        raise FileNotFoundError(tokens_path)
    info = read_description(info_path, SplitInfo, described)
    if info.document_names is not None and len(info.document_names) != info.num_documents:
        raise DamagedCache(
            f'{str(info_path)!r} is damaged: it names {len(info.document_names)} of '
            f'{info.num_documents} documents.'
        )
    check_sha256(tokens_path, info.fingerprint)
    if not info.num_tokens:
        return np.zeros(0, info.dtype), info
    return np.memmap(tokens_path, info.dtype, mode='r', shape=(info.num_tokens,)), info
