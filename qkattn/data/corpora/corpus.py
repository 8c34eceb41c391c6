"""What a dataset is before it is tokenized."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from qkattn.config import DataConfig
from qkattn.errors import ConfigError

# Names under which sources have the splits of a corpus.
SPLITS = {'train': ('train',), 'validation': ('validation', 'dev', 'valid'), 'test': ('test',)}
# No document is more than a twentieth of the bytes of an evaluation split.
SHARES = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Texts of a dataset, not tokenized.

    Attributes:
      name: part of cache paths and of every result, e.g. 'multi30k-en-de'.
      version: changes whenever the text can.
      languages: () for text; source and target for parallel text.
      splits: 'train', and 'validation' and 'test' where there are any.
      documents: `documents(language)` maps each split to its UTF-8 texts in a fixed order; language
        is None for text. Document i of the one language translates document i of the other.
        Prepares the dataset where that has not been done.
      names: `names(split)` names the split's documents, in their order; None where they have none.
      carved: the splits that were carved from train, and which part of it each is.
    """

    name: str
    version: str
    languages: tuple[str, ...] = ()
    splits: tuple[str, ...]
    documents: Callable[[str | None], Mapping[str, Iterable[bytes]]]
    names: Callable[[str], list[str]] | None = None
    carved: Mapping[str, float] = dataclasses.field(default_factory=dict)


def capped(corpus: Corpus) -> Corpus:
    """The corpus with its evaluation documents cut to at most 1 / SHARES of their split."""

    def documents(language: str | None) -> dict[str, Iterable[bytes]]:
        texts: dict[str, Iterable[bytes]] = dict(corpus.documents(language))
        # Read twice, so that no split has to fit into memory.
        again = corpus.documents(language)
        for split in corpus.splits[1:]:
            texts[split] = _cut(texts[split], largest_size([len(text) for text in again[split]]))
        return texts

    return dataclasses.replace(corpus, documents=documents)


def largest_size(sizes: Sequence[int]) -> int | None:
    """The size to cut documents to, so that none is more than 1 / SHARES of what is left.

    It solves SHARES * c = sum_i min(sizes[i], c). None where nothing has to be cut, and for fewer
    than SHARES documents, which cannot all be so small a part.
    """
    ordered = sorted(sizes, reverse=True)
    rest = sum(ordered)
    for cut, size in enumerate(ordered[:SHARES]):
        # With the `cut` longest documents cut, and all others whole.
        if size * (SHARES - cut) <= rest:
            return rest // (SHARES - cut) if cut else None
        rest -= size
    return None


def _cut(texts: Iterable[bytes], size: int | None) -> Iterator[bytes]:
    for text in texts:
        # A character that would be cut in two is left out.
        whole = size is None or len(text) <= size
        yield text if whole else text[:size].decode(errors='ignore').encode()


def cut_at_lines(text: bytes, percents: Sequence[int], name: str) -> list[bytes]:
    """The text cut at the ends of the lines that reach these percentages of its bytes.

    Raises:
      ConfigError: a part would be empty.
    """
    ends = [text.find(b'\n', len(text) * percent // 100) + 1 for percent in percents]
    bounds = [0, *ends, len(text)]
    if any(high <= low for low, high in itertools.pairwise(bounds)):
        raise ConfigError(
            f'{name} is too small to be cut at line ends into train, validation and test '
            f'({len(text)} bytes); give more text, or a split of its own for each.'
        )
    return [text[low:high] for low, high in itertools.pairwise(bounds)]


def find_splits(available: Iterable[str], where: str) -> dict[str, str]:
    """The names of a source's splits by those of a corpus; ConfigError without a train split."""
    available = list(available)
    found = {
        split: next(name for name in names if name in available)
        for split, names in SPLITS.items()
        if set(names) & set(available)
    }
    if 'train' not in found:
        raise ConfigError(
            f'{where} has no train split, only {", ".join(map(repr, available))}; choose a set '
            'that has one.'
        )
    return found


def parse_languages(config: DataConfig) -> tuple[str, str]:
    """Source and target of `config.languages`: 'en-de' -> ('en', 'de').

    Raises:
      ConfigError: unless they are two different names of letters, digits and underscores.
    """
    languages = config.languages or ''
    parts = languages.split('-')
    if len(parts) != 2 or not all(re.fullmatch(r'[A-Za-z0-9_]+', part) for part in parts):
        raise ConfigError(
            f'data.languages={config.languages!r} is not a pair; write source and target with a '
            "hyphen between, as in 'en-de'."
        )
    if parts[0] == parts[1]:
        raise ConfigError(
            f'data.languages={config.languages!r} names one language twice; source and target must '
            'differ.'
        )
    return parts[0], parts[1]
