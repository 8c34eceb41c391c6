"""Further corpora on which a language model is evaluated, from entries of `data.evaluate`:

    NAME[:PATH][?FIELD=VALUE&...][@SPLIT]

NAME is a value of `data.name`. Only 'text' and 'tokens' take a path. FIELD is a setting of the
corpus. The default SPLIT is 'validation'. Without NAME, as in '@train', the entry is a split of the
run's own data.
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
from qkattn.data.corpora.corpus import SPLITS, is_lower_case
from qkattn.data.load import load_split, open_tokens
from qkattn.data.tasks.language import TextRows
from qkattn.data.tasks.rows import Rows
from qkattn.data.tasks.task_registry import task_of
from qkattn.data.tokenizers.tokenizer import IdTokenizer
from qkattn.data.tokens import TokenDataset
from qkattn.errors import ConfigError
from qkattn.metrics import CORPORA

# Corpora that take a path.
WITH_PATH = NOT_MODULES['evaluate']
# The settings that an entry may have.
FIELDS = tuple(field for field in corpus_registry.SETTINGS if field != 'languages')


@dataclasses.dataclass(frozen=True)
class Entry:
    """A parsed entry of `data.evaluate`."""

    text: str  # the entry itself
    data: DataConfig | None  # settings of the corpus; None for the run's own data
    split: str


@dataclasses.dataclass(frozen=True)
class EvaluationCorpus:
    """An opened entry of `data.evaluate`."""

    name: str  # the entry of data.evaluate
    rows: TextRows
    split: str

    def identity(self) -> dict[str, Any]:
        """Returns JSON that identifies the split in results and checkpoints."""
        split = self.split
        identity = dict(self.rows.identity())  # of all splits
        identity['fingerprints'] = {split: identity['fingerprints'][split]}
        # Splits that are cut off train have an entry, such as {'test': 0.1}.
        carved_fractions = identity.pop('carved', {})
        if split in carved_fractions:
            identity['carved'] = {split: carved_fractions[split]}
        return identity


def entries(config: Config) -> list[Entry]:
    """Parses `data.evaluate` without reading data.

    Raises:
        ConfigError: An entry is invalid, or the run does not train a model of text.
    """
    texts = config.data.evaluate
    if not texts:
        return []
    task = task_of(config)
    trains_on_text = isinstance(task, type) and issubclass(task, TextRows)
    if not trains_on_text:
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
    """Parses an entry of `data.evaluate`.

    For example, 'text:/data/a?documents=blank_line@test' is the test split of
    DataConfig(name='text', path='/data/a', documents='blank_line').

    Args:
        text: The entry.
        run: The data settings of the run, some of which all its corpora share.
    """
    before_at, at, after_at = text.rpartition('@')
    if at and after_at in SPLITS:
        corpus = before_at
        split = after_at
    else:  # an '@' may be part of a path
        corpus = text
        split = 'validation'
    if not corpus:  # the entry '@train', for example
        return Entry(text=text, data=None, split=split)

    name, fields = _parse_corpus(corpus)
    data = DataConfig(
        name=name,
        data_dir=run.data_dir,
        lowercase=run.lowercase,
        tokenizer=run.tokenizer,
        tokenizer_size=run.tokenizer_size,
        # Carving a test split changes train, but not validation.
        carve_test=run.carve_test and split != 'validation',
        **fields,
    )
    # Both raise ConfigError for invalid settings.
    check_section('data.', data)
    corpus_registry.check(data)
    return Entry(text=text, data=data, split=split)


def _parse_corpus(text: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and the settings of a corpus, from an entry without its split.

    For example, 'text:/data/a?documents=blank_line' gives the name 'text' and the settings
    {'documents': 'blank_line', 'path': '/data/a'}.
    """
    # A path may have a line break, which DOTALL lets a dot match.
    match = re.fullmatch(r'(.*?)(?:\?(\w+=.*))?', text, re.DOTALL)
    name_and_path, fields_text = match.groups()  # 'text:/data/a', 'documents=blank_line'
    fields = _parse_fields(fields_text or '')

    before_colon, colon, after_colon = name_and_path.partition(':')
    has_path = colon and before_colon in WITH_PATH
    if not has_path:  # the name 'hf:OWNER/NAME' has a colon, too
        return name_and_path, fields
    if 'path' in fields:
        raise ConfigError('it has two paths')
    fields['path'] = after_colon
    return before_colon, fields


def _parse_fields(text: str) -> dict[str, Any]:
    """Parses settings such as 'feature=content&documents=blank_line'."""
    fields: dict[str, Any] = {}
    for part in text.split('&'):
        if not part:
            continue
        name, _, value = part.partition('=')  # 'feature=content' -> 'feature', '=', 'content'
        if name not in FIELDS:
            raise ConfigError(f'{part!r} must be a setting of a corpus, one of {", ".join(FIELDS)}')
        if name in fields:
            raise ConfigError(f'it sets {name} twice')
        fields[name] = value
    return fields


def open_corpora(config: Config, rows: Rows) -> tuple[EvaluationCorpus, ...]:
    """Opens the corpora of `data.evaluate`, with the tokenizer of the run.

    Args:
        config: The configuration of the run.
        rows: The rows on which the run is trained.

    Raises:
        ConfigError: A corpus cannot be opened, lacks the split, or is too short for a row; or its
            token ids do not fit the model.
    """
    corpora = []
    for entry in entries(config):
        assert isinstance(rows, TextRows)  # `entries` has checked the task
        with _errors_naming_entry(entry.text):
            if entry.data is None:  # an entry such as '@train', of the run's own data
                dataset = rows.dataset
            else:
                dataset = _open_split(entry.data, entry.split, rows.dataset)
                _require_known_ids(dataset, rows, config)
            corpus_rows = rows.on_dataset(dataset)
            corpus_rows.count(entry.split)  # raises ConfigError for a missing or short split
        corpora.append(EvaluationCorpus(name=entry.text, rows=corpus_rows, split=entry.split))
    return tuple(corpora)


def _open_split(data: DataConfig, split: str, run_dataset: TokenDataset) -> TokenDataset:
    """Opens a corpus whose `split` is tokenized as the dataset of the run."""
    if data.name == 'tokens':
        return open_tokens(data)
    if isinstance(run_dataset.tokenizer, IdTokenizer):
        raise ConfigError(
            'text needs a vocabulary, which the tokens of the run have not; set data.tokenizer to '
            'the tokenizer.json that they were made with'
        )
    # The run may be on prepared tokens, whose version tells that their text is in lower case.
    if is_lower_case(run_dataset.version):
        data = dataclasses.replace(data, lowercase=True)
    return load_split(data, split, run_dataset.tokenizer)


def _require_known_ids(dataset: TokenDataset, rows: TextRows, config: Config) -> None:
    """Checks that the model of a run can read the token ids of a dataset.

    The tokenizers have to be the same. If both are unknown, they are assumed to be the same, and
    the ids only have to be in the model's vocabulary.

    Args:
        dataset: The dataset on which the run is evaluated.
        rows: The data on which the run is trained.
        config: The configuration of the run.

    Raises:
        ConfigError: The tokenizers differ, or the model lacks an id of the dataset.
    """
    tokenizer = dataset.tokenizer
    run_tokenizer = rows.dataset.tokenizer
    if tokenizer.name == run_tokenizer.name:
        return

    # An IdTokenizer stands for an unknown tokenizer, and has the vocabulary size in its name.
    are_both_unknown = isinstance(tokenizer, IdTokenizer) and isinstance(run_tokenizer, IdTokenizer)
    if not are_both_unknown:
        raise ConfigError(
            f'it has the tokenizer {tokenizer.name}, but the run has {run_tokenizer.name}; '
            'give tokens of the same tokenizer, or the text'
        )

    num_ids = config.model.vocab_size
    if config.model.kind == 'encoder':
        num_ids = rows.dataset.vocab_size  # the next id is the encoder's mask token
    if dataset.vocab_size > num_ids:
        raise ConfigError(
            f'it has the id {dataset.vocab_size - 1}, but the model has ids from 0 to '
            f'{num_ids - 1} (model.vocab_size={config.model.vocab_size})'
        )


def identity_with(rows: Rows, corpora: Sequence[EvaluationCorpus]) -> dict[str, Any]:
    """Returns JSON that identifies the data of a run.

    Further corpora on which it is evaluated are in the field 'evaluate', by name.
    """
    identity = dict(rows.identity())
    if corpora:
        identity[CORPORA] = {corpus.name: corpus.identity() for corpus in corpora}
    return identity


@contextlib.contextmanager
def _errors_naming_entry(text: str) -> Iterator[None]:
    """Prefixes the messages of ConfigErrors in the block with an entry of data.evaluate."""
    try:
        yield
    except NotPrepared as missing:
        raise NotPrepared(f'data.evaluate={text!r}: {missing}') from missing
    except ConfigError as error:
        raise ConfigError(f'data.evaluate={text!r}: {error}') from error
