"""Validation and test splits carved from train, for corpora that come without them."""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from qkattn.data.corpora.corpus import SHARES, Corpus, cut_at_lines
from qkattn.errors import ConfigError

# Of train: of its documents, or of the bytes of each where they are few.
SHARE = 0.1


def carved(corpus: Corpus, test: bool) -> Corpus:
    """The corpus with a validation split, and then a test split too; with `test` always with both.

    A tenth of the documents of train with the smallest sha256 is the test split, the next tenth the
    validation split. The hash is of a document's name, else of its text, for parallel text of the
    language that comes first in the alphabet; the order of the documents does not matter. Of fewer
    than 20 documents each is cut at the ends of the lines that reach 80 % and 90 % of its bytes.

    Raises:
      ConfigError: while documents are read, too few sentence pairs, or a text without enough lines.
    """
    missing = tuple(split for split in ('validation', 'test') if split not in corpus.splits)
    if 'train' not in corpus.splits:
        raise ConfigError(
            f'{corpus.name} has no train split, only {", ".join(map(repr, corpus.splits))}.'
        )
    if not missing or (missing == ('test',) and not test):
        return corpus
    # Read once: train may be large.
    placed = functools.cache(lambda: _places(corpus))

    def documents(language: str | None) -> dict[str, Iterable[bytes]]:
        own = dict(corpus.documents(language))
        places = placed()
        if places is not None:
            for split in ('train', *missing):
                texts = corpus.documents(language)['train']
                own[split] = _chosen(texts, places, split, missing)
            return own
        if corpus.languages:
            raise ConfigError(
                f'{corpus.name} has no {missing[0]} split, and fewer than {SHARES} sentence pairs '
                'to carve one from; give it one.'
            )
        for number, split in enumerate(('train', *missing)):
            own[split] = _parts(corpus, number, len(missing))
        return own

    def names(split: str) -> list[str]:
        if split not in missing and split != 'train':
            return corpus.names(split)
        places, known = placed(), corpus.names('train')
        return known if places is None else list(_chosen(known, places, split, missing))

    return dataclasses.replace(
        corpus,
        version='-'.join((corpus.version, 'carved', *missing)),
        splits=tuple(s for s in ('train', 'validation', 'test') if s in (*corpus.splits, *missing)),
        documents=documents,
        names=names if corpus.names else None,
        carved=dict.fromkeys(missing, SHARE),
    )


def _places(corpus: Corpus) -> np.ndarray | None:
    """The rank of each document of train by its hash, in [0, 1); None for few documents."""
    keys: Iterable[bytes]
    if corpus.names:
        keys = (name.encode() for name in corpus.names('train'))
    else:
        keys = corpus.documents(min(corpus.languages, default=None))['train']
    digests = (hashlib.sha256(key).digest() for key in keys)
    hashes = np.fromiter((int.from_bytes(digest[:8]) for digest in digests), np.uint64)
    if len(hashes) < SHARES:
        return None
    # Documents that are equal have one rank, so that none is in two splits.
    return np.searchsorted(np.sort(hashes), hashes) / len(hashes)


def _chosen(documents: Iterable, places: np.ndarray, split: str, missing: tuple) -> Iterator:
    bounds = {'test': (0, SHARE), 'validation': (SHARE, 2 * SHARE)}
    taken = [(places >= low) & (places < high) for low, high in map(bounds.get, missing)]
    chosen = taken[missing.index(split)] if split in missing else ~np.any(taken, axis=0)
    return itertools.compress(documents, chosen)


def _parts(corpus: Corpus, number: int, count: int) -> Iterator[bytes]:
    for text in corpus.documents(None)['train']:
        shares = [round(100 * (1 - SHARE * (count - i))) for i in range(count)]
        yield cut_at_lines(text, shares, corpus.name)[number]
