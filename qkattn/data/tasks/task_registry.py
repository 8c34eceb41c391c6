"""Every task that there is; `rows_of` opens the one that a configuration trains on."""

from typing import Any

from qkattn.config import Config, DataConfig
from qkattn.config.calls import resolve
from qkattn.data.corpora import corpus_registry
from qkattn.data.tasks import probes
from qkattn.data.tasks.language import LanguageRows
from qkattn.data.tasks.masked import MaskedRows
from qkattn.data.tasks.rows import DataForm, Rows
from qkattn.data.tasks.translation import TranslationRows
from qkattn.data.tokenizers import vocabulary
from qkattn.errors import ConfigError

TASKS: dict[str, type[Rows]] = {
    'language': LanguageRows,
    'masked': MaskedRows,
    'translation': TranslationRows,
    'causal_probe': probes.CausalProbeRows,
    'labelling_probe': probes.LabellingProbeRows,
}
INTERFACE = ('kind', 'data', *(name for name in vars(Rows) if not name.startswith('_')))


def task_of(config: Config) -> type[Rows]:
    """The task that trains this kind of model on this form of data; reads no data.

    Raises:
      ConfigError: an unknown dataset, tokenizer or task, or setting of it; data of no use to this
        kind of model, or to data.task.
    """
    return _task(config)[0]


def _task(config: Config) -> tuple[type[Rows], dict[str, Any]]:
    """The task and its options."""
    form, kind, named = _form(config.data), config.model.kind, config.data.task
    if not probes.is_probe(config.data.name):
        vocabulary.check(config.data.tokenizer)
    if named is not None:
        task, options = resolve(
            named,
            TASKS,
            'data.task',
            needs='a class with the attributes of qkattn.data.tasks.rows.Rows',
            fits=lambda found: all(hasattr(found, name) for name in INTERFACE),
            call=lambda found: found.open,
        )
        if (task.kind, task.data) != (kind, form):
            raise ConfigError(
                f'data.task={named!r} trains model.kind={task.kind!r} on {task.data}, but '
                f'model.kind={kind!r} and data.name={config.data.name!r} is {form}.'
            )
        return task, options
    tasks = [task for task in TASKS.values() if task.kind == kind]
    for task in tasks:
        if task.data == form:
            return task, {}
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
    task, options = _task(config)
    rows = task.open(config, **options)
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
