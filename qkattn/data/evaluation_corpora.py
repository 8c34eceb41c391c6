"""Further corpora on which a language model is evaluated, as `data.evaluate` names them.

    NAME[:PATH][?FIELD=VALUE&...][@SPLIT]

The name is one of `data.name`, and a path follows those of 'text' and 'tokens'. Fields are settings
of the corpus, and the split is 'validation' by default. '@train' is a split of the run's own data.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from qkattn.config import Config, DataConfig
from qkattn.config.imports import NOT_MODULES
from qkattn.config.setting import check_section
from qkattn.data.cache import NotPrepared
from qkattn.data.corpora import corpus_registry
from qkattn.data.corpora.corpus import SPLITS
from qkattn.data.load import load_split, open_tokens
from qkattn.data.tasks.language import TextRows
from qkattn.data.tasks.rows import Rows
from qkattn.data.tasks.task_registry import task_of
from qkattn.data.tokenizers.tokenizer import IdTokenizer, Tokenizer
from qkattn.data.tokens import TokenDataset
from qkattn.errors import ConfigError
from qkattn.metrics import CORPORA

# The corpora after whose name a path may stand.
WITH_PATH = NOT_MODULES['evaluate']
# The settings of a corpus that an entry may have. The others are those of the run.
FIELDS = tuple(field for field in corpus_registry.SETTINGS if field != 'languages')


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of `data.evaluate`: a corpus by its settings, and one of its splits."""

    text: str  # as in data.evaluate
    data: DataConfig | None  # None for the data of the run itself
    split: str


@dataclasses.dataclass(frozen=True)
class EvaluationCorpus:
    """The rows of a split on which a run is evaluated, besides those of its own data."""

    name: str  # the entry of data.evaluate
    rows: TextRows
    split: str

    def identity(self) -> dict[str, Any]:
        """Identifies the rows in results and checkpoints; JSON."""
        # The rows describe all splits of their data. Keep what is about this split.
        identity = dict(self.rows.identity())
        identity['fingerprints'] = {self.split: identity['fingerprints'][self.split]}
        carved = identity.pop('carved', {})
        if self.split in carved:
            identity['carved'] = {self.split: carved[self.split]}
        return identity


def entries(config: Config) -> list[Entry]:
    """Returns the parsed entries of `data.evaluate`, without reading data.

    Raises ConfigError if an entry names no text or has an invalid setting, or if the run trains no
    model of text.
    """
    texts = config.data.evaluate
    if not texts:
        return []
    task = task_of(config)
    if not (isinstance(task, type) and issubclass(task, TextRows)):
        raise ConfigError(
            f'data.evaluate={texts} needs a model of text in one language, but model.kind='
            f'{config.model.kind!r} and data.name={config.data.name!r} is {task.data}'
        )
    parsed = []
    for text in texts:
        with _errors_naming_entry(text):
            parsed.append(_parse(text, config.data))
    return parsed


def _parse(text: str, run: DataConfig) -> Entry:
    """Parses an entry; `run` has the settings that all corpora of a run share.

    For example, 'text:/data/a?documents=blank_line@test' is the test split of
    DataConfig(name='text', path='/data/a', documents='blank_line').
    """
    # Take the split off the end. An '@' without the name of a split after it is part of the corpus.
    corpus, at, split = text.rpartition('@')
    has_split = bool(at) and split in SPLITS
    if not has_split:
        corpus = text
        split = 'validation'
    if not corpus:  # '@train', for example, is a split of the run's own data
        return Entry(text=text, data=None, split=split)

    # 'text:/data/a?documents=blank_line' -> 'text:/data/a', 'documents=blank_line'
    name, fields_text = re.fullmatch(r'(.*?)(?:\?(\w+=.*))?', corpus).groups()
    fields = _parse_fields(fields_text or '')
    # 'text:/data/a' -> 'text', '/data/a'. The colon of 'hf:OWNER/NAME' is part of the name.
    before_colon, colon, path = name.partition(':')
    has_path = bool(colon) and before_colon in WITH_PATH
    if has_path:
        if 'path' in fields:
            raise ConfigError('it has two paths')
        name = before_colon
        fields['path'] = path
    data = DataConfig(
        name=name,
        data_dir=run.data_dir,
        lowercase=run.lowercase,
        tokenizer=run.tokenizer,
        tokenizer_size=run.tokenizer_size,
        # The validation split is the same with and without a carved test split.
        carve_test=run.carve_test and split != 'validation',
        **fields,
    )
    check_section('data.', data)
    corpus_registry.check(data)
    return Entry(text=text, data=data, split=split)


def _parse_fields(text: str) -> dict[str, Any]:
    """Parses settings of a corpus: 'feature=content&documents=blank_line'."""
    fields: dict[str, Any] = {}
    for part in filter(None, text.split('&')):
        name, _, value = part.partition('=')
        if name not in FIELDS:
            raise ConfigError(f'{part!r} must be a setting of a corpus, one of {", ".join(FIELDS)}')
        if name in fields:
            raise ConfigError(f'it sets {name} twice')
        fields[name] = value
    return fields


def open_corpora(config: Config, rows: Rows) -> tuple[EvaluationCorpus, ...]:
    """Opens the corpora of `data.evaluate`, with the tokenizer of the run.

    `rows` are those of the run. Raises ConfigError if a corpus cannot be opened, lacks the split,
    is too short for a row, or has another tokenizer or ids that the model lacks.
    """
    corpora = []
    for entry in entries(config):
        assert isinstance(rows, TextRows)  # `entries` has checked the task
        with _errors_naming_entry(entry.text):
            dataset = rows.dataset
            if entry.data is not None:  # not the data of the run itself
                dataset = _open_split(entry.data, entry.split, rows.dataset.tokenizer)
                _require_known_ids(dataset, rows, config)
            further_rows = rows.on_dataset(dataset)
            further_rows.count(entry.split)  # raises for a split that is missing or too short
        corpora.append(EvaluationCorpus(entry.text, further_rows, entry.split))
    return tuple(corpora)


def _open_split(data: DataConfig, split: str, tokenizer: Tokenizer) -> TokenDataset:
    """Opens a corpus in the ids of a tokenizer. Of text, only the split is tokenized."""
    if data.name == 'tokens':
        return open_tokens(data)
    if isinstance(tokenizer, IdTokenizer):
        raise ConfigError(
            'text needs a vocabulary, which the tokens of the run have not; set data.tokenizer to '
            'the tokenizer.json that they were made with'
        )
    return load_split(data, split, tokenizer)


def _require_known_ids(dataset: TokenDataset, rows: TextRows, config: Config) -> None:
    """Raises ConfigError unless the model of the run can read the token ids of a dataset.

    The ids mean the same to both if the dataset has the tokenizer of the run. Datasets may also
    consist of ids whose tokenizer is unknown (IdTokenizer). If both do, their ids are taken to mean
    the same, and the model has to have the largest id of the dataset. For example, ids up to 999
    need a model with a vocabulary of at least 1000 ids.

    Args:
      dataset: the dataset on which the run is evaluated.
      rows: the data on which the run is trained.
      config: the configuration of the run.
    """
    tokenizer = dataset.tokenizer
    run_tokenizer = rows.dataset.tokenizer
    if tokenizer.name == run_tokenizer.name:
        return

    # The names differ. Those of unknown tokenizers do if they have different numbers of ids.
    are_both_unknown = isinstance(tokenizer, IdTokenizer) and isinstance(run_tokenizer, IdTokenizer)
    if not are_both_unknown:
        raise ConfigError(
            f'it has the tokenizer {tokenizer.name}, but the run has {run_tokenizer.name}; '
            'give tokens of the same tokenizer, or the text'
        )

    num_ids = config.model.vocab_size
    if config.model.kind == 'encoder':
        # An encoder takes the id after those of the run's data as its mask token, so it cannot be
        # the id of a token of the dataset.
        num_ids = rows.dataset.vocab_size
    if dataset.vocab_size > num_ids:
        raise ConfigError(
            f'it has the id {dataset.vocab_size - 1}, but the model has ids from 0 to '
            f'{num_ids - 1} (model.vocab_size={config.model.vocab_size})'
        )


def identity_with(rows: Rows, corpora: Sequence[EvaluationCorpus]) -> dict[str, Any]:
    """Identifies the data of a run, its further corpora included; JSON.

    Without further corpora, it is the identity of the rows.
    """
    identity = dict(rows.identity())
    if corpora:
        identity[CORPORA] = {corpus.name: corpus.identity() for corpus in corpora}
    return identity


@contextlib.contextmanager
def _errors_naming_entry(text: str) -> Iterator[None]:
    """Puts an entry of data.evaluate in front of the message of a ConfigError in the block."""
    try:
        yield
    except NotPrepared as missing:
        raise NotPrepared(f'data.evaluate={text!r}: {missing}') from missing
    except ConfigError as error:
        raise ConfigError(f'data.evaluate={text!r}: {error}') from error
