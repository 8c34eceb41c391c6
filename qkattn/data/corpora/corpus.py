"""What a dataset is before it is tokenised."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping

from qkattn.config import DataConfig
from qkattn.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Texts of a dataset, not tokenised.

    Attributes:
      name: part of cache paths and of every result, e.g. 'multi30k-en-de'.
      version: changes whenever the text can.
      languages: () for text; source and target for parallel text.
      splits: 'train', 'validation' and, where there is one, 'test'.
      documents: `documents(language)` maps each split to its UTF-8 texts in a fixed order; language
        is None for text. Document i of the one language translates document i of the other.
        Prepares the dataset where that has not been done.
    """

    name: str
    version: str
    languages: tuple[str, ...]
    splits: tuple[str, ...]
    documents: Callable[[str | None], Mapping[str, Iterable[bytes]]]


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
