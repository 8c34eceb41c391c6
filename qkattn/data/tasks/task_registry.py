"""Every task that there is; `rows_of` opens the one that a configuration trains on."""

from qkattn.config import Config, DataConfig
from qkattn.data.corpora import corpus_registry
from qkattn.data.tasks import probes
from qkattn.data.tasks.language import LanguageRows
from qkattn.data.tasks.masked import MaskedRows
from qkattn.data.tasks.rows import DataForm, Rows
from qkattn.data.tasks.translation import TranslationRows
from qkattn.errors import ConfigError

TASKS: tuple[type[Rows], ...] = (
    LanguageRows,
    MaskedRows,
    TranslationRows,
    probes.CausalProbeRows,
    probes.LabellingProbeRows,
)


def task_of(config: Config) -> type[Rows]:
    """The task that trains this kind of model on this form of data; reads no data.

    Raises:
      ConfigError: an unknown dataset or setting of it; data of no use to this kind of model.
    """
    form, kind = _form(config.data), config.model.kind
    tasks = [task for task in TASKS if task.kind == kind]
    for task in tasks:
        if task.data == form:
            return task
    raise ConfigError(
        f'data.name={config.data.name!r} is {form}, but model.kind={kind!r} needs '
        f'{" or ".join(task.data for task in tasks)}.'
    )


def rows_of(config: Config) -> Rows:
    """Opens the rows that the configured model trains on.

    Raises:
      ConfigError: as `task_of`; data that cannot be opened or does not fit the model; a vocabulary
        that is larger than the model's; a split that is too short.
    """
    rows = task_of(config).open(config)
    if rows.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f'model.vocab_size={config.model.vocab_size} is too small for data.name='
            f'{config.data.name!r}, whose rows hold {rows.vocab_size} different ids; set it to at '
            f'least {rows.vocab_size}.'
        )
    for split in rows.splits:
        rows.count(split)  # Raises for a split that is too short.
    return rows


def _form(data: DataConfig) -> DataForm:
    if probes.is_probe(data.name):
        _, probe = probes.find(data.name)
        return 'a causal probe' if probe.causal else 'a labelling probe'
    corpus_registry.check(data)
    return 'a translation set' if data.languages else 'text in one language'
