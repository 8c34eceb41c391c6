"""A dataset before it is tokenized: its texts and splits. Missing splits are carved from train."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from qkattn.config import DataConfig
from qkattn.errors import ConfigError

SPLITS = ('train', 'validation', 'test')
# The fraction of the documents of train that a carved split takes. If there are few documents, it
# is the fraction of the bytes of each.
CARVED_FRACTION = 0.1
# Changes whenever the same documents would be carved differently.
CARVING = 2
# No document has more than 1 / SHARES of the bytes of an evaluation split. With fewer documents
# than SHARES, this is impossible, and the documents are left whole.
SHARES = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """The texts of a dataset, not tokenized."""

    # Part of cache paths and of every result, as in 'multi30k-en-de'.
    name: str
    # Changes whenever the text may change.
    version: str
    # The source and the target language of parallel text; () for other text.
    languages: tuple[str, ...] = ()
    # 'train', and 'validation' and 'test' if the dataset has them.
    splits: tuple[str, ...]
    # `documents(language)` maps each split to its UTF-8 texts, in a fixed order; the language is
    # None for text that is not parallel. Document i of one language is a translation of document i
    # of the other. The call prepares the dataset if necessary.
    documents: Callable[[str | None], Mapping[str, Iterable[bytes]]]
    # `names(split)` returns the names of a split's documents, in order. None if they have no names.
    names: Callable[[str], list[str]] | None = None
    # The splits that were carved from train, and the fraction of train that each of them is.
    carved: Mapping[str, float] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def readable(name: str, advice: str, *errors: type[Exception]) -> Iterator[None]:
    """Turns an OSError, or one of `errors`, inside of a block into a ConfigError.

    The message says that `name` cannot be read, why, and ends with `advice`.
    """
    try:
        yield
    except ConfigError:
        raise
    except (OSError, *errors) as error:  # type: ignore[misc]
        reason = ' '.join(str(error).split()).rstrip('.')
        reason = f'{type(error).__name__}: {reason}'
        raise ConfigError(f'{name} cannot be read ({reason}); {advice}.') from error


def hash64(key: bytes) -> int:
    """Returns the first 64 bits of the sha256 of a key, as a whole number."""
    return int.from_bytes(hashlib.sha256(key).digest()[:8])


def split_of(key: str, train: int, validation: int) -> str:
    """Returns the split of a document, which follows from the hash of its key.

    `train` and `validation` are percentages; test is the rest.
    """
    # The hash is uniform in [0, 2**64), so this is uniform in 0 .. 99.
    percent = hash64(key.encode()) * 100 >> 64
    if percent < train:
        return 'train'
    if percent < train + validation:
        return 'validation'
    return 'test'


def carved(corpus: Corpus, test: bool) -> Corpus:
    """Returns a corpus with the missing validation and test splits carved from its train split.

    A missing validation split is always carved. A missing test split is carved if `test` is set, or
    if validation is missing as well.

    The tenth of the train documents with the smallest sha256 is the test split, the next tenth the
    validation split. The order of the documents does not matter. For parallel text, the hash is
    that of the text in the language that comes first in the alphabet. With fewer than SHARES
    documents, each document is cut instead, at the ends of the lines that reach 80 % and 90 % of
    its bytes.

    Raises ConfigError if there is no train split and, while documents are read, as `cut_at_lines`.
    """
    if 'train' not in corpus.splits:
        splits = ', '.join(corpus.splits) or 'none'
        raise ConfigError(f'{corpus.name} has no train split; its splits are {splits}.')
    missing = tuple(split for split in SPLITS[1:] if split not in corpus.splits)
    if not missing or (missing == ('test',) and not test):
        return corpus

    @functools.cache  # train may be large
    def split_of_document() -> np.ndarray | None:
        """The split of each document of train; None if every document is cut."""
        language = min(corpus.languages, default=None)
        texts = corpus.documents(language)['train']
        hashes = np.fromiter(map(hash64, texts), np.uint64)
        if len(hashes) < SHARES:
            return None
        # Equal documents have equal ranks, so they are in the same split.
        ranks = np.searchsorted(np.sort(hashes), hashes) / len(hashes)
        splits = np.full(len(hashes), 'train', dtype='U10')
        if 'validation' in missing:
            splits[(ranks >= CARVED_FRACTION) & (ranks < 2 * CARVED_FRACTION)] = 'validation'
        if 'test' in missing:
            splits[ranks < CARVED_FRACTION] = 'test'
        return splits

    def documents(language: str | None) -> dict[str, Iterable[bytes]]:
        """The documents by split, with those of train divided among train and missing splits."""
        texts = dict(corpus.documents(language))
        assigned = split_of_document()
        for part, split in enumerate(('train', *missing)):
            # Train is read again for each split, so that no split has to fit into memory.
            train = corpus.documents(language)['train']
            if assigned is not None:
                texts[split] = itertools.compress(train, assigned == split)
                continue
            # If only one split is missing, it is the last tenth of each document.
            percents = (80, 90) if len(missing) == 2 else (90,)
            cuts = (cut_at_lines(text, percents, corpus.name) for text in train)
            texts[split] = map(operator.itemgetter(part), cuts)
        return texts

    def names(split: str) -> list[str]:
        """The names of a split's documents. Documents that are cut keep their name in each part."""
        if split not in ('train', *missing):
            return corpus.names(split)
        train = corpus.names('train')
        assigned = split_of_document()
        if assigned is None:
            return train
        return list(itertools.compress(train, assigned == split))

    all_splits = {*corpus.splits, *missing}
    return dataclasses.replace(
        corpus,
        version='-'.join((corpus.version, f'carved{CARVING}', *missing)),
        splits=tuple(split for split in SPLITS if split in all_splits),
        documents=documents,
        names=names if corpus.names else None,
        carved=dict.fromkeys(missing, CARVED_FRACTION),
    )


def capped(corpus: Corpus) -> Corpus:
    """Returns a corpus whose evaluation documents are cut to at most 1 / SHARES of their split."""

    def cut(texts: Iterable[bytes], size: int) -> Iterator[bytes]:
        for text in texts:
            if len(text) > size:
                # A character that would be cut in two is left out.
                text = text[:size].decode(errors='ignore').encode()
            yield text

    def documents(language: str | None) -> dict[str, Iterable[bytes]]:
        """The documents by split, with those of validation and test cut."""
        texts = dict(corpus.documents(language))
        # The texts are read twice, so that no split has to fit into memory.
        texts_to_measure = corpus.documents(language)
        for split in corpus.splits[1:]:
            size = largest_size([len(text) for text in texts_to_measure[split]])
            if size is not None:
                texts[split] = cut(texts[split], size)
        return texts

    return dataclasses.replace(corpus, documents=documents)


def largest_size(sizes: Sequence[int]) -> int | None:
    """Returns the size c at which long documents are cut, so that none dominates a split.

    After the cut, the longest document has 1 / SHARES of all bytes. So c solves the equation
    SHARES * c = sum_i min(sizes[i], c). Returns None if no document is too long, or if fewer than
    SHARES documents have text; then the equation has no solution.
    """
    nonempty_sizes = [size for size in sizes if size > 0]
    longest_first = sorted(nonempty_sizes, reverse=True)
    # The bytes of the documents that are not cut.
    uncut_bytes = sum(longest_first)
    for num_cut, size in enumerate(longest_first[:SHARES]):
        # With the `num_cut` longest documents cut to c and all others whole, the equation is
        # (SHARES - num_cut) * c = uncut_bytes.
        if size * (SHARES - num_cut) <= uncut_bytes:
            if num_cut == 0:
                return None
            return uncut_bytes // (SHARES - num_cut)
        uncut_bytes -= size
    return None


def cut_at_lines(text: bytes, percents: Sequence[int], name: str) -> list[bytes]:
    """Cuts a text at the ends of the lines that reach these percentages of its bytes.

    Raises ConfigError, with the `name` of the corpus, if a part would be empty.
    """
    bounds = [0]
    for percent in percents:
        bounds.append(text.find(b'\n', len(text) * percent // 100) + 1)
    bounds.append(len(text))
    parts = []
    for start, end in itertools.pairwise(bounds):
        if end <= start:
            raise ConfigError(
                f'{name} has too few lines to be cut into splits; give more text, or a file '
                'for each split.'
            )
        parts.append(text[start:end])
    return parts


def parse_languages(config: DataConfig, spelled: Callable[[str], str] = str) -> tuple[str, str]:
    """Returns the source and the target of `config.languages`: ('en', 'de') for 'en-de'.

    `spelled` returns the usual spelling of a language code. Raises ConfigError unless there are two
    different languages.
    """
    if re.fullmatch(r'\w+-\w+', config.languages or '', re.ASCII):
        source, target = [spelled(code) for code in config.languages.split('-')]
        if source != target:
            return source, target
    raise ConfigError(f'data.languages={config.languages!r} must be two languages, as in en-de.')
