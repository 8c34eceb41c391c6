"""A dataset before tokenization: its texts and splits. Missing splits are carved from train."""

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
# The fraction of train that a carved split takes.
CARVED_FRACTION = 0.1
# The version of the carving. It changes when the same documents would be carved differently.
CARVING = 2
# A part of the version of a text in lower case.
LOWER_CASE = '-lower'
# A document has at most 1 / SHARES of the bytes of an evaluation split. This takes at least SHARES
# documents.
SHARES = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """The texts of a dataset before tokenization."""

    # Names the data in cache paths and results, as in 'multi30k-en-de'.
    name: str
    # Changes whenever the text may change.
    version: str
    # (source, target) for parallel text, as in ('en', 'de'); otherwise ().
    languages: tuple[str, ...] = ()
    # 'train', and 'validation' and 'test' if the dataset has them.
    splits: tuple[str, ...]
    # `documents(language)` returns the UTF-8 documents of each split, in a fixed order. The
    # language is None unless the text is parallel. Document i is the translation of document i in
    # the other language. The call may download the dataset.
    documents: Callable[[str | None], Mapping[str, Iterable[bytes]]]
    # `names(split)` returns the names of the split's documents, in order. None without names.
    names: Callable[[str], list[str]] | None = None
    # The fraction of train that each carved split takes, as in {'validation': 0.1}.
    carved: Mapping[str, float] = dataclasses.field(default_factory=dict)


def is_lower_case(version: str) -> bool:
    """Whether `data.lowercase` made a text, by its version such as '1.0.0-lower-carved2-test'."""
    return f'{LOWER_CASE}-' in f'{version}-'


@contextlib.contextmanager
def explain_read_errors(name: str, advice: str, *errors: type[Exception]) -> Iterator[None]:
    """Context manager that turns an OSError or one of `errors` into a ConfigError.

    The message is `<name> cannot be read (<reason>); <advice>.`, or `<name> does not exist;
    <advice>.` if `name` is a missing file.
    """
    try:
        yield
    except ConfigError:
        raise
    except (OSError, *errors) as error:  # type: ignore[misc]
        if isinstance(error, FileNotFoundError):
            # `name` ends in the path of the file, which may be quoted.
            file_in_name_is_missing = name.strip("'").endswith(str(error.filename))
            if file_in_name_is_missing:
                raise ConfigError(f'{name} does not exist; {advice}.') from error
        text_in_one_line = ' '.join(str(error).split()).rstrip('.')
        reason = f'{type(error).__name__}: {text_in_one_line}'
        raise ConfigError(f'{name} cannot be read ({reason}); {advice}.') from error


def hash64(key: bytes) -> int:
    """Returns the first 64 bits of the key's sha256 as an integer."""
    return int.from_bytes(hashlib.sha256(key).digest()[:8])


def split_of(key: str, train: int, validation: int) -> str:
    """Assigns a document to a split by the hash of its key.

    Args:
        key: Identifies the document.
        train: The percentage of documents in train.
        validation: The percentage of documents in validation. All other documents are in test.
    """
    # The hash is below 2**64, so the percentage is in 0 .. 99.
    percent = hash64(key.encode()) * 100 // 2**64
    if percent < train:
        return 'train'
    if percent < train + validation:
        return 'validation'
    return 'test'


def carve_missing_splits(corpus: Corpus, test: bool) -> Corpus:
    """Returns a corpus whose missing validation and test splits are carved from train.

    The carving depends on the number of train documents:

    - With SHARES documents or more, test gets the tenth of the documents with the smallest sha256,
      and validation gets the next tenth.
    - With fewer documents, each document is cut at line ends. Train gets the first part, and each
      missing split gets about a tenth of the bytes.

    Args:
        corpus: The corpus. Both languages of parallel text are divided alike.
        test: Whether a missing test split is carved even if there is a validation split.

    Raises:
        ConfigError: There is no train split. When documents are read, also if a document has too
            few lines to be cut.
    """
    if 'train' not in corpus.splits:
        splits = ', '.join(corpus.splits) or 'none'
        raise ConfigError(f'{corpus.name} has no train split; its splits are {splits}.')
    missing = tuple(split for split in ('validation', 'test') if split not in corpus.splits)
    only_test_is_missing = missing == ('test',)
    if only_test_is_missing and not test:
        return corpus
    if not missing:
        return corpus

    carving = _Carving(corpus, missing)
    splits_after_carving = {*corpus.splits, *missing}
    return dataclasses.replace(
        corpus,
        # Such as '1.0.0-carved2-validation-test'.
        version='-'.join((corpus.version, f'carved{CARVING}', *missing)),
        splits=tuple(split for split in SPLITS if split in splits_after_carving),
        documents=carving.documents,
        names=carving.names if corpus.names else None,
        carved=dict.fromkeys(missing, CARVED_FRACTION),
    )


@dataclasses.dataclass(frozen=True)
class _Carving:
    """Divides train documents among train and the missing splits."""

    corpus: Corpus
    missing: tuple[str, ...]  # 'validation', 'test' or both, in this order

    @functools.cached_property  # train may be large
    def split_of_document(self) -> np.ndarray | None:
        """The split of each train document; None if there are fewer than SHARES documents."""
        # Only one language of parallel text is hashed, so translations are in the same split. It
        # is the first in the alphabet, whether source or target.
        language = min(self.corpus.languages, default=None)
        documents = self.corpus.documents(language)['train']
        hashes = np.fromiter(map(hash64, documents), np.uint64)
        if len(hashes) < SHARES:
            return None

        # Equal documents have equal ranks, so they are in the same split.
        num_smaller_hashes = np.searchsorted(np.sort(hashes), hashes)
        ranks = num_smaller_hashes / len(hashes)  # from 0 to 1
        in_first_tenth = ranks < CARVED_FRACTION
        in_second_tenth = ~in_first_tenth & (ranks < 2 * CARVED_FRACTION)
        splits = np.full(len(hashes), 'train', dtype='U10')
        if 'validation' in self.missing:
            splits[in_second_tenth] = 'validation'
        if 'test' in self.missing:
            splits[in_first_tenth] = 'test'
        return splits

    def documents(self, language: str | None) -> dict[str, Iterable[bytes]]:
        """Returns the documents of every split."""
        documents_of_split = dict(self.corpus.documents(language))
        for split in ('train', *self.missing):
            # Train is read again for each split, so that no split has to fit into memory.
            train_documents = self.corpus.documents(language)['train']
            if self.split_of_document is None:
                documents_of_split[split] = self._parts_in_split(train_documents, split)
            else:
                is_in_split = self.split_of_document == split
                documents_of_split[split] = itertools.compress(train_documents, is_in_split)
        return documents_of_split

    def _parts_in_split(self, documents: Iterable[bytes], split: str) -> Iterator[bytes]:
        """Cuts each document into one part per split and yields the part for `split`."""
        splits = ('train', *self.missing)
        part_index = splits.index(split)
        # Each missing split gets a tenth.
        cut_percents = (80, 90) if len(self.missing) == 2 else (90,)
        for document in documents:
            parts = cut_at_lines(document, cut_percents, self.corpus.name)
            yield parts[part_index]

    def names(self, split: str) -> list[str]:
        """Returns the document names of a split. Each part of a cut document keeps its name."""
        if split not in ('train', *self.missing):
            return self.corpus.names(split)
        train_names = self.corpus.names('train')
        if self.split_of_document is None:
            return train_names
        is_in_split = self.split_of_document == split
        return list(itertools.compress(train_names, is_in_split))


def cap_documents(corpus: Corpus) -> Corpus:
    """Returns a corpus whose long validation and test documents are cut.

    Each document has at most 1 / SHARES of the bytes of its split, so that none dominates an
    evaluation. Splits with fewer than SHARES documents are not changed.
    """

    def documents(language: str | None) -> dict[str, Iterable[bytes]]:
        documents_of_split = dict(corpus.documents(language))
        # Documents are read twice, so that no split has to fit into memory.
        documents_to_measure = corpus.documents(language)
        evaluation_splits = corpus.splits[1:]  # all but train
        for split in evaluation_splits:
            sizes = [len(document) for document in documents_to_measure[split]]
            limit = largest_size(sizes)  # None if no document is too long
            if limit is not None:
                documents_of_split[split] = _cut_to(limit, documents_of_split[split])
        return documents_of_split

    return dataclasses.replace(corpus, documents=documents)


def _cut_to(limit: int, texts: Iterable[bytes]) -> Iterator[bytes]:
    """Yields each text, cut to at most `limit` bytes."""
    for text in texts:
        if len(text) > limit:
            # `ignore` drops a character that would be cut in two.
            text = text[:limit].decode(errors='ignore').encode()
        yield text


def largest_size(sizes: Sequence[int]) -> int | None:
    """Returns the size c to which long documents must be cut so that none dominates a split.

    A document of c bytes is 1 / SHARES of all bytes after the cut:

        SHARES * c = sum_i min(sizes[i], c)

    For example, sizes of 1000 and 30 times 10 give c = 15: 20 * 15 = 15 + 30 * 10, up to rounding.

    Args:
        sizes: The sizes of the documents in bytes.

    Returns:
        The size in bytes, rounded down. None if no document is too long, or if there is no solution
        because fewer than SHARES documents have text.
    """
    nonempty_sizes = [size for size in sizes if size > 0]
    longest_first = sorted(nonempty_sizes, reverse=True)

    # If the `num_cut` longest documents are cut, the equation above is
    #   SHARES * c = num_cut * c + whole_bytes.
    # Its solution c is valid if no whole document is longer.
    whole_bytes = sum(longest_first)
    for num_cut, longest_whole in enumerate(longest_first[:SHARES]):
        num_shares = SHARES - num_cut
        if longest_whole * num_shares <= whole_bytes:
            c = whole_bytes // num_shares
            return c if num_cut > 0 else None
        whole_bytes -= longest_whole
    return None


def cut_at_lines(text: bytes, percents: Sequence[int], name: str) -> list[bytes]:
    """Cuts a text into parts at line ends.

    Args:
        text: The text.
        percents: The percentage of the text before each cut. For example, (80, 90) gives parts of
            about 80 %, 10 % and 10 %. Each cut is moved to the end of its line.
        name: The name of the corpus, for the error.

    Raises:
        ConfigError: A part would be empty.
    """
    bounds = [0]
    for percent in percents:
        position = len(text) * percent // 100
        newline = text.find(b'\n', position)  # -1 without a newline, which is refused below
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
    """Splits `config.languages` into source and target: 'en-de' gives ('en', 'de').

    Args:
        config: The settings.
        normalize: Returns the standard spelling of a language code, such as 'en' for 'EN'.

    Raises:
        ConfigError: `config.languages` is not two different languages.
    """
    are_two_words = re.fullmatch(r'\w+-\w+', config.languages or '', re.ASCII)
    if are_two_words:
        source_code, target_code = config.languages.split('-')
        source = normalize(source_code)
        target = normalize(target_code)
        if source != target:
            return source, target
    raise ConfigError(f'data.languages={config.languages!r} must be two languages, as in en-de.')
