"""From settings to data: the corpus, its tokenizer, its token files, and the rows of a task."""

import itertools
from collections.abc import Iterable
from pathlib import Path

from qkattn.config import Config, DataConfig
from qkattn.data.cache import data_root
from qkattn.data.corpora.corpus import Corpus, find
from qkattn.data.tasks import probes
from qkattn.data.tasks.masked import MaskedRows
from qkattn.data.tasks.pairs import PairDataset, TranslationRows
from qkattn.data.tasks.rows import LanguageRows, Rows
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.data.tokenizers.vocabulary import open_tokenizer
from qkattn.data.tokens import TokenDataset, open_dataset
from qkattn.errors import ConfigError

TASKS = {
    'decoder': 'a language model of text, or a causal probe',
    'encoder': 'a masked language model of text, or a labelling probe',
    'encoder_decoder': 'translation of a set with data.languages',
}


# What text has and a probe has not.
PROBE_FIELDS = ('manual_dir', 'path', 'languages', 'feature', 'lowercase', 'tokenizer')


def load(config: DataConfig) -> TokenDataset | PairDataset:
    """Opens the dataset, preparing it under its data directory the first time.

    Raises:
      ConfigError: a dataset that is unknown, cannot be had, or cannot be tokenised as asked.
    """
    return _open(config, find(config))


def _open(config: DataConfig, corpus: Corpus) -> TokenDataset | PairDataset:
    root = data_root(config.data_dir)
    tokenizer = _tokenizer(config, corpus, root)
    sides = [_tokens(corpus, tokenizer, root, language) for language in corpus.languages or (None,)]
    return PairDataset(*sides) if corpus.languages else sides[0]


def tokenizer_of(config: DataConfig) -> Tokenizer:
    """The dataset's tokenizer, learned from its training split the first time."""
    return _tokenizer(config, find(config), data_root(config.data_dir))


def task_of(config: Config) -> type[Rows]:
    """The class of the rows that `rows_of` returns, known without any data."""
    if probes.is_probe(config.data.name):
        return probes.ProbeRows
    by_kind = {
        'decoder': LanguageRows,
        'encoder': MaskedRows,
        'encoder_decoder': TranslationRows,
    }
    return by_kind[config.model.kind]


def rows_of(config: Config) -> Rows:
    """The rows that the configured model trains on: its kind says which task that is.

    Raises:
      ConfigError: as `load`; data that is of no use to this kind of model; a vocabulary that the
        model does not have room for; a split that is too short.
    """
    data, model = config.data, config.model
    rows = _rows(config)
    if rows.vocab_size > model.vocab_size:
        how = '' if probes.is_probe(data.name) else f' with data.tokenizer={data.tokenizer!r}'
        mask = ', the mask included' if isinstance(rows, MaskedRows) else ''
        raise ConfigError(
            f'model.vocab_size={model.vocab_size} is too small for dataset {data.name!r}{how}, '
            f'which has {rows.vocab_size} ids{mask}'
        )
    for split in rows.splits:
        rows.count(split)  # refuses a split that is too short
    return rows


def _rows(config: Config) -> Rows:
    data, model = config.data, config.model

    def unfit(what: str) -> ConfigError:
        return ConfigError(
            f'data.name={data.name!r} is {what}, but model.kind={model.kind!r} needs '
            f'{TASKS[model.kind]}'
        )

    if probes.is_probe(data.name):
        _require_defaults(data, PROBE_FIELDS)
        rows = probes.find(data.name)
        if model.kind != ('decoder' if rows.causal else 'encoder'):
            raise unfit('a causal probe' if rows.causal else 'a labelling probe')
        if rows.length != model.context:
            raise ConfigError(
                f'model.context={model.context} must equal the length of the rows of '
                f'{data.name!r}, {rows.length}'
            )
        return rows
    corpus = find(data)
    if (model.kind == 'encoder_decoder') != bool(corpus.languages):
        raise unfit('a translation set' if corpus.languages else 'text in one language')
    dataset = _open(data, corpus)
    if model.kind == 'encoder_decoder':
        return TranslationRows(
            dataset, model.encoder.context, model.context, drop_long=data.drop_long
        )
    if model.kind == 'encoder':
        return MaskedRows(dataset, model.context, data.mask_rate)
    return LanguageRows(dataset, model.context, shift=data.shift_windows)


def _require_defaults(data: DataConfig, fields: tuple[str, ...]) -> None:
    """Raises ConfigError for a setting that would stand in a record without having an effect."""
    for field in fields:
        value, default = getattr(data, field), getattr(DataConfig, field)
        if value != default:
            raise ConfigError(
                f'data.{field}={value!r} means nothing to data.name={data.name!r}; leave it '
                f'{default!r}.'
            )


def _tokenizer(config: DataConfig, corpus: Corpus, root: Path) -> Tokenizer:
    def training_texts() -> Iterable[bytes]:
        languages = corpus.languages or (None,)
        return itertools.chain.from_iterable(corpus.documents(x)['train'] for x in languages)

    return open_tokenizer(
        root,
        kind=config.tokenizer,
        size=config.tokenizer_size,
        name=corpus.name,
        version=corpus.version,
        texts=training_texts,
    )


def _tokens(corpus: Corpus, tokenizer: Tokenizer, root: Path, language: str | None) -> TokenDataset:
    return open_dataset(
        root,
        name=corpus.name if language is None else f'{corpus.name}/{language}',
        version=corpus.version,
        tokenizer=tokenizer,
        documents=lambda: corpus.documents(language),
        splits=corpus.splits,
    )
