"""Every task that there is; `rows_of` opens the one that a configuration trains on."""

from typing import Any

from qkattn.config import Config, DataConfig
from qkattn.config.calls import resolve
from qkattn.data.corpora import corpus_registry
from qkattn.data.tasks import probe_tasks
from qkattn.data.tasks.language import LanguageRows, MaskedRows
from qkattn.data.tasks.rows import DataForm, Rows
from qkattn.data.tasks.translation import TranslationRows
from qkattn.data.tokenizers import vocabulary
from qkattn.errors import ConfigError

TASKS: dict[str, type[Rows]] = {
    'language': LanguageRows,
    'masked': MaskedRows,
    'translation': TranslationRows,
    'causal_probe': probe_tasks.CausalProbeRows,
    'labelling_probe': probe_tasks.LabellingProbeRows,
}
INTERFACE = ('kind', 'data', *(name for name in vars(Rows) if not name.startswith('_')))


def task_of(config: Config) -> type[Rows]:
    """The task for this kind of model and form of data, which is not read; else ConfigError."""
    return _task(config)[0]


def rows_of(config: Config) -> Rows:
    """Opens the rows that the configured model trains on; ConfigError if they do not fit it."""
    task, options = _task(config)
    rows = task.open(config, **options)
    if rows.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f'model.vocab_size={config.model.vocab_size} must be at least {rows.vocab_size} for '
            f'data.name={config.data.name!r}.'
        )
    for split in rows.splits:
        rows.count(split)  # Raises for a split that is too short.
    return rows


def _task(config: Config) -> tuple[type[Rows], dict[str, Any]]:
    form = _form(config.data)
    kind = config.model.kind
    name = config.data.name
    if config.data.task is not None:
        task, options = resolve(
            config.data.task,
            TASKS,
            'data.task',
            needs='a class with the attributes of qkattn.data.tasks.rows.Rows',
            fits=lambda task: all(hasattr(task, attribute) for attribute in INTERFACE),
            call=lambda task: task.open,
        )
        if (task.kind, task.data) != (kind, form):
            raise ConfigError(
                f'data.task={config.data.task!r} trains model.kind={task.kind!r} on {task.data}, '
                f'but model.kind={kind!r} and data.name={name!r} is {form}.'
            )
        return task, options
    tasks = {task.data: task for task in TASKS.values() if task.kind == kind}
    if form not in tasks:
        raise ConfigError(
            f'data.name={name!r} is {form}, but model.kind={kind!r} needs {" or ".join(tasks)}.'
        )
    return tasks[form], {}


def _form(data: DataConfig) -> DataForm:
    if probe_tasks.is_probe(data.name):
        _, probe = probe_tasks.find(data.name)
        return 'a causal probe' if probe.causal else 'a labelling probe'
    corpus_registry.check(data, probe_tasks.PROBES)
    vocabulary.check(data.tokenizer)
    return 'a translation set' if data.languages else 'text in one language'
