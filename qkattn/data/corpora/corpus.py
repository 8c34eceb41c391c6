"""A dataset before it is tokenized: its texts and splits. Missing splits are carved from train."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from qkattn.config import DataConfig
from qkattn.errors import ConfigError

SPLITS = ('train', 'validation', 'test')
# The fraction of the documents of train that a carved split takes. With fewer than SHARES
# documents, it is the fraction of the bytes of each document.
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
def explain_read_errors(name: str, advice: str, *errors: type[Exception]) -> Iterator[None]:
    """Turns an OSError, or one of `errors`, inside of a block into a ConfigError.

    The message is `<name> cannot be read (<reason>); <advice>.` If `name` is that of a file that
    does not exist, it is `<name> does not exist; <advice>.`
    """
    try:
        yield
    except ConfigError:
        raise
    except (OSError, *errors) as error:  # type: ignore[misc]
        if isinstance(error, FileNotFoundError) and name.strip("'").endswith(str(error.filename)):
            raise ConfigError(f'{name} does not exist; {advice}.') from error
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
    percent = hash64(key.encode()) * 100 // 2**64
    if percent < train:
        return 'train'
    if percent < train + validation:
        return 'validation'
    return 'test'


def carve_missing_splits(corpus: Corpus, test: bool) -> Corpus:
    """Returns a corpus with the missing validation and test splits carved from its train split.

    A missing validation split is always carved. A missing test split is carved if `test` is set, or
    if validation is missing as well. How it is done depends on the number of documents of train:

    - With SHARES documents or more, test gets the tenth of them with the smallest sha256, and
      validation gets the next tenth. So the order of the documents does not matter.
    - With fewer documents, each one is cut at ends of lines. Train gets the first part of every
      document, and each missing split gets about a tenth of its bytes after that.

    Both sides of parallel text are divided alike.

    Raises ConfigError if there is no train split. Reading the documents also raises ConfigError if
    a document that has to be cut has too few lines.
    """
    if 'train' not in corpus.splits:
        splits = ', '.join(corpus.splits) or 'none'
        raise ConfigError(f'{corpus.name} has no train split; its splits are {splits}.')
    missing = tuple(split for split in SPLITS[1:] if split not in corpus.splits)
    if not missing or (missing == ('test',) and not test):
        return corpus

    carving = _Carving(corpus, missing)
    all_splits = {*corpus.splits, *missing}
    return dataclasses.replace(
        corpus,
        version='-'.join((corpus.version, f'carved{CARVING}', *missing)),
        splits=tuple(split for split in SPLITS if split in all_splits),
        documents=carving.documents,
        names=carving.names if corpus.names else None,
        carved=dict.fromkeys(missing, CARVED_FRACTION),
    )


@dataclasses.dataclass(frozen=True)
class _Carving:
    """Divides train documents among train and missing splits; see `carve_missing_splits`."""

    corpus: Corpus
    missing: tuple[str, ...]  # 'validation', 'test' or both, in this order

    @functools.cached_property  # train may be large
    def split_of_document(self) -> np.ndarray | None:
        """The name of the split of each train document; None if every document is cut instead."""
        # Parallel text is hashed in one language only, the first in the alphabet. So a sentence and
        # its translation are in the same split, whichever of the two is the source.
        language = min(self.corpus.languages, default=None)
        texts = self.corpus.documents(language)['train']
        hashes = np.fromiter(map(hash64, texts), np.uint64)
        if len(hashes) < SHARES:
            return None

        # The rank of a document is the fraction of all documents whose hashes are smaller. Equal
        # documents have equal ranks, so they are in one split.
        num_smaller = np.searchsorted(np.sort(hashes), hashes)
        ranks = num_smaller / len(hashes)
        is_first_tenth = ranks < CARVED_FRACTION
        is_second_tenth = ~is_first_tenth & (ranks < 2 * CARVED_FRACTION)
        splits = np.full(len(hashes), 'train', dtype='U10')
        if 'validation' in self.missing:
            splits[is_second_tenth] = 'validation'
        if 'test' in self.missing:
            splits[is_first_tenth] = 'test'
        return splits

    def documents(self, language: str | None) -> dict[str, Iterable[bytes]]:
        """Returns the documents of every split, in one language of parallel text."""
        texts = dict(self.corpus.documents(language))
        for split in ('train', *self.missing):
            # Train is read again for each split, so that no split has to fit into memory.
            train = self.corpus.documents(language)['train']
            if self.split_of_document is None:  # each split gets a part of every document
                texts[split] = self._parts(train, split)
            else:  # each split gets whole documents
                is_in_split = self.split_of_document == split
                texts[split] = itertools.compress(train, is_in_split)
        return texts

    def _parts(self, train: Iterable[bytes], split: str) -> Iterator[bytes]:
        """Cuts each train document and yields the part of it that belongs to a split."""
        part_of_split = ('train', *self.missing).index(split)
        # Each missing split is a tenth: documents are cut at 90 %, or at 80 % and 90 %.
        percents = (80, 90) if len(self.missing) == 2 else (90,)
        for text in train:
            parts = cut_at_lines(text, percents, self.corpus.name)
            yield parts[part_of_split]

    def names(self, split: str) -> list[str]:
        """Returns the names of a split's documents. Each part of a document has its name."""
        if split not in ('train', *self.missing):
            return self.corpus.names(split)
        train = self.corpus.names('train')
        if self.split_of_document is None:
            return train
        return list(itertools.compress(train, self.split_of_document == split))


def cap_documents(corpus: Corpus) -> Corpus:
    """Returns a corpus in which no document dominates an evaluation.

    Long documents of validation and test are cut, so that none has more than 1 / SHARES of the
    bytes of its split. A split of fewer than SHARES documents stays whole, and so does train.
    """

    def documents(language: str | None) -> dict[str, Iterable[bytes]]:
        """Returns the documents by split, with long ones of validation and test cut."""
        texts = dict(corpus.documents(language))
        # The texts are read once to measure them and once to cut them, so that no split has to fit
        # into memory.
        texts_to_measure = corpus.documents(language)
        evaluation_splits = corpus.splits[1:]  # the first one is train
        for split in evaluation_splits:
            sizes = [len(text) for text in texts_to_measure[split]]
            limit = largest_size(sizes)  # None if no document is too long
            if limit is not None:
                texts[split] = _cut_to(limit, texts[split])
        return texts

    return dataclasses.replace(corpus, documents=documents)


def _cut_to(limit: int, texts: Iterable[bytes]) -> Iterator[bytes]:
    """Yields texts, the long ones cut to `limit` bytes."""
    for text in texts:
        if len(text) > limit:
            # A character that would be cut in two is left out.
            text = text[:limit].decode(errors='ignore').encode()
        yield text


def largest_size(sizes: Sequence[int]) -> int | None:
    """Returns the size c to which documents are cut so that none dominates a split.

    After the cut, a document of c bytes is 1 / SHARES of all bytes. So c solves the equation
    SHARES * c = sum_i min(sizes[i], c).

    For example, one document of 1000 bytes and 30 documents of 10 bytes each give 15, because
    20 * 15 = 15 + 300, up to rounding.

    Returns None if no document is too long. Also returns None if fewer than SHARES documents have
    text, because then the equation has no solution.
    """
    nonempty_sizes = [size for size in sizes if size > 0]
    longest_first = sorted(nonempty_sizes, reverse=True)

    # Suppose that the `num_cut` longest documents are cut, and the others are whole. Then the
    # equation is SHARES * c = num_cut * c + whole_bytes, so that c = whole_bytes / num_shares. This
    # is the solution if the longest whole document has c or fewer bytes.
    whole_bytes = sum(longest_first)
    for num_cut, longest_whole in enumerate(longest_first[:SHARES]):
        num_shares = SHARES - num_cut
        if longest_whole * num_shares <= whole_bytes:
            if num_cut == 0:
                return None
            return whole_bytes // num_shares
        whole_bytes -= longest_whole
    return None


def cut_at_lines(text: bytes, percents: Sequence[int], name: str) -> list[bytes]:
    """Cuts a text into parts at ends of lines.

    `percents` say how much of the text comes before each cut: (80, 90) gives parts of about 80 %,
    10 % and 10 % of its bytes. A cut moves to the end of the line that it falls into.

    Raises ConfigError, with the `name` of the corpus, if a part would be empty.
    """
    bounds = [0]
    for percent in percents:
        position = len(text) * percent // 100
        newline = text.find(b'\n', position)  # -1 if no newline follows; the bound is then 0
        bounds.append(newline + 1)
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


def parse_languages(config: DataConfig, normalize: Callable[[str], str] = str) -> tuple[str, str]:
    """Returns the source and the target of `config.languages`: ('en', 'de') for 'en-de'.

    `normalize` returns the usual spelling of a language code, such as 'en' for 'EN'; by default,
    codes stay as they are. Raises ConfigError unless there are two different languages.
    """
    if re.fullmatch(r'\w+-\w+', config.languages or '', re.ASCII):
        source, target = [normalize(code) for code in config.languages.split('-')]
        if source != target:
            return source, target
    raise ConfigError(f'data.languages={config.languages!r} must be two languages, as in en-de.')
