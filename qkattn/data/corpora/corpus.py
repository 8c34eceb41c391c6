"""A dataset before it is tokenized: its texts, and splits that are carved from its train split."""

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
# Fraction of the documents of train that a carved split takes, or of the bytes of each if few.
CARVED_FRACTION = 0.1
CARVING = 2  # changes whenever the same documents would be carved differently
# No document is more than a twentieth of the bytes of an evaluation split; splits of fewer
# documents, where that is impossible, are left whole.
SHARES = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Texts of a dataset, not tokenized."""

    name: str  # part of cache paths and of every result, e.g. 'multi30k-en-de'
    version: str  # changes whenever the text can
    languages: tuple[str, ...] = ()  # () for text; source and target for parallel text
    splits: tuple[str, ...]  # 'train', and 'validation' and 'test' where there are any
    # `documents(language)` maps each split to its UTF-8 texts in a fixed order, document i of one
    # language translating document i of the other; None for text. Prepares the dataset if need be.
    documents: Callable[[str | None], Mapping[str, Iterable[bytes]]]
    # `names(split)` names the split's documents, in their order; None where they have none.
    names: Callable[[str], list[str]] | None = None
    # The splits that were carved from train, and which fraction of it each is.
    carved: Mapping[str, float] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def readable(name: str, advice: str, *errors: type[Exception]) -> Iterator[None]:
    """Raises a ConfigError in place of an OSError, or one of `errors`, while `name` is read."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, *errors) as error:  # type: ignore[misc]
        reason = ' '.join(str(error).split()).rstrip('.')
        reason = f'{type(error).__name__}: {reason}'
        raise ConfigError(f'{name} cannot be read ({reason}); {advice}.') from error


def hash64(key: bytes) -> int:
    """The first 64 bits of the sha256, a whole number."""
    return int.from_bytes(hashlib.sha256(key).digest()[:8])


def split_of(key: str, train: int, validation: int) -> str:
    """The split of a document by the hash of its key; `train` and `validation` are percentages."""
    percent = hash64(key.encode()) * 100 >> 64
    if percent < train:
        return 'train'
    if percent < train + validation:
        return 'validation'
    return 'test'


def carved(corpus: Corpus, test: bool) -> Corpus:
    """The corpus with a validation split, and with a test split if `test` or if it had neither.

    A tenth of the documents of train with the smallest sha256 is the test split, the next tenth the
    validation split. The hash is of a document's text, for parallel text of the language that comes
    first in the alphabet; the order of the documents does not matter. Of fewer than 20 documents
    each is cut at the ends of the lines that reach 80 % and 90 % of its bytes.
    ConfigError without a train split and, while documents are read, as `cut_at_lines`.
    """
    if 'train' not in corpus.splits:
        splits = ', '.join(corpus.splits) or 'none'
        raise ConfigError(f'{corpus.name} has no train split; its splits are {splits}.')
    missing = tuple(split for split in SPLITS[1:] if split not in corpus.splits)
    if not missing or (missing == ('test',) and not test):
        return corpus

    @functools.cache  # train may be large
    def split_of_document() -> np.ndarray | None:
        """The split of each document of train; None where each document is cut."""
        texts = corpus.documents(min(corpus.languages, default=None))['train']
        hashes = np.fromiter(map(hash64, texts), np.uint64)
        if len(hashes) < SHARES:
            return None
        # Equal documents have one rank, so that none is in two splits.
        ranks = np.searchsorted(np.sort(hashes), hashes) / len(hashes)
        splits = np.full(len(hashes), 'train', dtype='U10')
        if 'validation' in missing:
            splits[(ranks >= CARVED_FRACTION) & (ranks < 2 * CARVED_FRACTION)] = 'validation'
        if 'test' in missing:
            splits[ranks < CARVED_FRACTION] = 'test'
        return splits

    def documents(language: str | None) -> dict[str, Iterable[bytes]]:
        texts = dict(corpus.documents(language))
        assigned = split_of_document()
        for part, split in enumerate(('train', *missing)):
            # Read again for each split, so that none has to fit into memory.
            train = corpus.documents(language)['train']
            if assigned is not None:
                texts[split] = itertools.compress(train, assigned == split)
                continue
            # One missing split is the last tenth of each document.
            percents = (80, 90) if len(missing) == 2 else (90,)
            cuts = (cut_at_lines(text, percents, corpus.name) for text in train)
            texts[split] = map(operator.itemgetter(part), cuts)
        return texts

    def names(split: str) -> list[str]:
        if split not in ('train', *missing):
            return corpus.names(split)
        train = corpus.names('train')
        assigned = split_of_document()
        if assigned is None:
            return train
        return list(itertools.compress(train, assigned == split))

    return dataclasses.replace(
        corpus,
        version='-'.join((corpus.version, f'carved{CARVING}', *missing)),
        splits=tuple(split for split in SPLITS if split in (*corpus.splits, *missing)),
        documents=documents,
        names=names if corpus.names else None,
        carved=dict.fromkeys(missing, CARVED_FRACTION),
    )


def capped(corpus: Corpus) -> Corpus:
    """The corpus with its evaluation documents cut to at most 1 / SHARES of their split."""

    def cut(texts: Iterable[bytes], size: int) -> Iterator[bytes]:
        for text in texts:
            if len(text) > size:
                # A character that would be cut in two is left out.
                text = text[:size].decode(errors='ignore').encode()
            yield text

    def documents(language: str | None) -> dict[str, Iterable[bytes]]:
        texts = dict(corpus.documents(language))
        # Read twice, so that no split has to fit into memory.
        texts_to_measure = corpus.documents(language)
        for split in corpus.splits[1:]:
            size = largest_size([len(text) for text in texts_to_measure[split]])
            if size is not None:
                texts[split] = cut(texts[split], size)
        return texts

    return dataclasses.replace(corpus, documents=documents)


def largest_size(sizes: Sequence[int]) -> int | None:
    """The size c to cut documents of these sizes to, so that none is more than a twentieth of all.

    It solves SHARES * c = sum_i min(sizes[i], c). None where nothing has to be cut, and for
    fewer than SHARES documents with text, which cannot be so small.
    """
    longest_first = sorted(filter(None, sizes), reverse=True)
    uncut_bytes = sum(longest_first)
    for num_cut, size in enumerate(longest_first[:SHARES]):
        # With the `num_cut` longest documents cut to c and all others whole, the equation is
        # (SHARES - num_cut) * c = uncut_bytes.
        if size * (SHARES - num_cut) <= uncut_bytes:
            return uncut_bytes // (SHARES - num_cut) if num_cut else None
        uncut_bytes -= size
    return None


def cut_at_lines(text: bytes, percents: Sequence[int], name: str) -> list[bytes]:
    """The text cut at the ends of the lines that reach these percentages of its bytes.

    ConfigError where a part would be empty; `name` is that of the corpus.
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
    """Source and target of `config.languages`: ('en', 'de') for 'en-de'.

    `spelled` gives the usual spelling of a code. ConfigError unless they are two languages.
    """
    if re.fullmatch(r'\w+-\w+', config.languages or '', re.ASCII):
        source, target = [spelled(code) for code in config.languages.split('-')]
        if source != target:
            return source, target
    raise ConfigError(f'data.languages={config.languages!r} must be two languages, as in en-de.')
