"""The registry of tasks; `rows_of` opens the task that a configuration trains on."""

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from qkattn.config import Config, DataConfig
from qkattn.config.calls import call_with_config_errors, resolve
from qkattn.data.corpora import corpus_registry
from qkattn.data.pipeline import eval_batches, train_batch
from qkattn.data.tasks import probe_tasks
from qkattn.data.tasks.language import DocumentRows, LanguageRows, MaskedRows
from qkattn.data.tasks.rows import Batch, DataForm, Rows
from qkattn.data.tasks.translation import TranslationRows
from qkattn.data.tokenizers import vocabulary
from qkattn.errors import ConfigError

# The tasks of the package, by the value of data.task.
TASKS: dict[str, type[Rows]] = {
    'language': LanguageRows,
    'masked': MaskedRows,
    'translation': TranslationRows,
    'causal_probe': probe_tasks.CausalProbeRows,
    'labelling_probe': probe_tasks.LabellingProbeRows,
}
# The attributes that a task from outside has to have.
INTERFACE = ('kind', 'data', *(name for name in vars(Rows) if not name.startswith('_')))


def batches(config: Config, split: str = 'train', *, seed: int = 0) -> Iterator[Batch]:
    """Returns the batches that a run with this configuration reads, arrays [batch_size, length].

    For 'train' these are the batches of a trial with this seed, without end. For 'validation' and
    'test' these are the batches of one evaluation of data.eval_sequences rows. Raises ConfigError
    as `rows_of`, `train_batch` and `eval_batches` do.
    """
    rows = rows_of(config)
    size = config.train.batch_size
    if split == 'train':
        steps = itertools.count()
        return (train_batch(rows, seed=seed, step=step, batch_size=size) for step in steps)
    return eval_batches(rows, split, batch_size=size, max_rows=config.data.eval_sequences)


def task_of(config: Config) -> type[Rows]:
    """Returns the class of the task of a configuration, without reading its data.

    Raises ConfigError if no task fits the model and the data.
    """
    task, _ = _task_and_options(config)
    return task


def rows_of(config: Config) -> Rows:
    """Opens the training and evaluation rows of a configuration.

    Raises:
      ConfigError: the rows cannot be opened or do not fit the model.
    """
    task, options = _task_and_options(config)
    name = config.data.task
    # A user's class is given by its import path, as in 'my_tasks:Sorting'.
    is_from_outside = name is not None and ':' in name
    if not is_from_outside:
        return _open_rows(config, task, options)

    # Exceptions in the user's code become ConfigErrors that name data.task.
    open_rows = functools.partial(_open_rows, config, task, options)
    rows = call_with_config_errors('data.task', name, open_rows)
    _check_arrays(config, rows)
    return rows


def _open_rows(config: Config, task: type[Rows], options: Mapping[str, Any]) -> Rows:
    """Opens the rows of a task.

    Raises ConfigError if the model has fewer ids than the rows, or if a split is too short.
    """
    rows = task.open(config, **options)
    if rows.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f'model.vocab_size={config.model.vocab_size} must be at least {rows.vocab_size} '
            f'for data.name={config.data.name!r}.'
        )
    for split in rows.splits:
        rows.count(split)  # raises ConfigError for a split that is too short
    return rows


def _check_arrays(config: Config, rows: Rows) -> None:
    """Reads the first row of each split of a task from outside the package.

    Raises ConfigError if `read` fails, or gives other arrays than `array_shapes` describes.
    """
    name = str(config.data.task)
    shapes = {}
    for array_name, (length, _) in rows.array_shapes(config.model).items():
        shapes[array_name] = (1, length)
    first_row_B = np.zeros(1, int)
    draws_B2 = np.zeros((1, 2), np.uint64)
    for split in rows.splits:
        read = functools.partial(rows.read, split, first_row_B, draws_B2)
        batch = call_with_config_errors('data.task', name, read)
        shapes_read = {array_name: np.shape(array) for array_name, array in batch.items()}
        if shapes_read != shapes:
            raise ConfigError(
                f'read of data.task={name!r} gives {_shapes_text(shapes_read)} for one row of '
                f'split {split!r}; it must give {_shapes_text(shapes)}'
            )


def _shapes_text(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Returns names of arrays with their shapes: 'tokens_BT (1, 64), targets_BT (1, 64)'."""
    return ', '.join(f'{name} {shape}' for name, shape in shapes.items())


def _task_and_options(config: Config) -> tuple[type[Rows], dict[str, Any]]:
    """Returns the class of the task of a configuration, and the options of its method `open`.

    If data.task is set, it names the task and its options. Otherwise the task of TASKS is taken
    that trains this model.kind on data of this form. Raises ConfigError if no task fits the model
    and the data.
    """
    options: dict[str, Any] = {}
    if config.data.task is None:
        task = _default_task(config)
    else:
        task, options = _named_task(config)
    # Windows of text in which tokens attend to their own document only are another class.
    if task is LanguageRows and not config.data.cross_documents:
        task = DocumentRows
    return task, options


def _default_task(config: Config) -> type[Rows]:
    """Returns the task of TASKS for the kind of model and the form of the data.

    Raises ConfigError if there is none: a translation set, for example, needs an encoder-decoder.
    """
    form = _data_form(config.data)
    kind = config.model.kind
    task_of_form = {task.data: task for task in TASKS.values() if task.kind == kind}
    if form not in task_of_form:
        needed = ' or '.join(task_of_form)
        raise ConfigError(
            f'data.name={config.data.name!r} is {form}, but model.kind={kind!r} needs {needed}.'
        )
    return task_of_form[form]


def _named_task(config: Config) -> tuple[type[Rows], dict[str, Any]]:
    """Returns the task that data.task names, and the options that follow the name.

    For example, 'my_file:MyRows(size=9)' gives (MyRows, {'size': 9}). Raises ConfigError if there
    is no such task, or if it does not fit the model or the data.
    """
    form = _data_form(config.data)
    kind = config.model.kind

    def is_task(target: Any) -> bool:
        return all(hasattr(target, attribute) for attribute in INTERFACE)

    def function_with_options(task: Any) -> Any:
        """Returns the method of a task that takes the options, as keyword-only parameters."""
        return task.open

    task, options = resolve(
        config.data.task,
        TASKS,
        'data.task',
        needs='a class with the attributes of qkattn.data.tasks.rows.Rows',
        is_valid=is_task,
        call=function_with_options,
    )
    if (task.kind, task.data) != (kind, form):
        raise ConfigError(
            f'data.task={config.data.task!r} trains model.kind={task.kind!r} on {task.data}, '
            f'but model.kind={kind!r} and data.name={config.data.name!r} is {form}.'
        )
    return task, options


def _data_form(data: DataConfig) -> DataForm:
    """Returns the form of the data that data.name names, such as 'text in one language'.

    Raises ConfigError if the name is unknown.
    """
    if probe_tasks.is_probe(data.name):
        _, probe = probe_tasks.find(data.name)
        return 'a causal probe' if probe.causal else 'a labelling probe'
    corpus_registry.check(data, probe_tasks.PROBES)
    vocabulary.check(data.tokenizer)
    return 'a translation set' if data.languages else 'text in one language'
