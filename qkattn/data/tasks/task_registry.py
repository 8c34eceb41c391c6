"""The registry of tasks, and functions that open the task of a configuration."""

import functools
import itertools
import numbers
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from qkattn.config import Config, DataConfig
from qkattn.config.calls import call_with_config_errors, resolve
from qkattn.data.corpora import corpus_registry
from qkattn.data.corpora.corpus import SPLITS
from qkattn.data.pipeline import eval_batches, eval_rows, train_batch
from qkattn.data.tasks import probe_tasks
from qkattn.data.tasks.language import DocumentRows, LanguageRows, MaskedRows
from qkattn.data.tasks.rows import ArrayShapes, Batch, DataForm, Rows, Yardsticks, are_whole
from qkattn.data.tasks.translation import TranslationRows
from qkattn.data.tokenizers import vocabulary
from qkattn.errors import ConfigError
from qkattn.metrics import PREFIXES

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
# The least number of rows of a split that are read to see whether a task from outside has targets.
ROWS_CHECKED = 64


def batches(config: Config, split: str = 'train', *, seed: int = 0) -> Iterator[Batch]:
    """Returns the batches that a run reads, arrays [batch_size, length] by name.

    Args:
        config: The configuration of the run.
        split: 'train' for endless training batches; 'validation' or 'test' for one evaluation.
        seed: The seed of the trial that is trained.

    Raises:
        ConfigError: The rows cannot be opened or do not fit the model, or the split is unknown.
    """
    rows = rows_of(config)
    batch_size = config.train.batch_size
    if split == 'train':
        steps = itertools.count()
        return (train_batch(rows, seed=seed, step=step, batch_size=batch_size) for step in steps)
    max_rows = config.data.eval_sequences
    return eval_batches(rows, split, batch_size=batch_size, max_rows=max_rows)


def task_of(config: Config) -> type[Rows]:
    """Returns the task class of a configuration, without reading data.

    Raises:
        ConfigError: No task fits the model and the data.
    """
    task, _ = _task_and_options(config)
    return task


def rows_of(config: Config) -> Rows:
    """Opens the training and evaluation rows of a configuration.

    Raises:
        ConfigError: The rows cannot be opened or do not fit the model.
    """
    task, options = _task_and_options(config)
    open_rows = functools.partial(_open_rows, config, task, options)
    field_and_value = _field_from_outside(config.data)  # such as ('data.task', 'my_file:MyTask')
    if field_and_value is None:
        return open_rows()

    field, value = field_and_value
    # Segments tell which tokens belong to the same document.
    has_segments = 'segments_BT' in task.array_shapes(config.model)
    needs_segments = field == 'data.task' and not config.data.cross_documents
    if needs_segments and not has_segments:
        raise ConfigError(
            f'data.cross_documents=False has no effect on data.task={value!r}, whose rows have no '
            'segments_BT; leave it at True'
        )

    # Exceptions in the user's code become ConfigErrors that name the field.
    rows = call_with_config_errors(field, value, open_rows)
    _check_splits(rows, field, value)
    _check_arrays(config, rows, field, value)
    _check_targets(config, rows, field, value)
    return rows


def yardsticks_of(config: Config, rows: Rows) -> Yardsticks:
    """Measures what a trained baseline has to beat on a task, such as n-gram losses.

    Raises ConfigError if a task from outside the package fails or returns invalid yardsticks.
    """
    task = config.data.task
    if task is None or not _is_import_path(task):
        return rows.yardsticks(config)
    # Exceptions in the user's code become ConfigErrors that name the task.
    measured = call_with_config_errors('data.task', task, lambda: rows.yardsticks(config))
    if not isinstance(measured, Yardsticks):
        raise ConfigError(
            f'yardsticks of data.task={task!r} must return Yardsticks, not {measured!r:.80}'
        )
    evaluation_splits = rows.splits[1:]  # without 'train'
    # Losses are keyed by the prefix of their split: 'val' or 'test'.
    valid_prefixes = [PREFIXES[split] for split in evaluation_splits]
    for prefix, losses in measured.losses.items():
        if prefix not in valid_prefixes:
            raise ConfigError(
                f'yardsticks of data.task={task!r} have losses of {prefix!r}; the prefixes of '
                f'splits are {", ".join(valid_prefixes)}'
            )
        for name, loss in losses.items():
            is_finite_number = isinstance(loss, numbers.Real) and np.isfinite(loss)
            if not is_finite_number:
                raise ConfigError(
                    f'yardsticks of data.task={task!r} have the loss {name!r} of {loss} in '
                    f'{prefix!r}; it must be a finite number'
                )
    return measured


def has_yardsticks_from_outside(config: Config, rows: Rows) -> bool:
    """Whether a class from outside the package defines the method `yardsticks` of the rows."""
    task = config.data.task
    if task is None or not _is_import_path(task):
        return False
    return not type(rows).yardsticks.__module__.startswith('qkattn.')


def _is_import_path(name: str) -> bool:
    """Whether a name is from outside the package, such as 'my_file:MyTask'."""
    return ':' in name


def _field_from_outside(data: DataConfig) -> tuple[str, str] | None:
    """Returns the field that names a task or a probe from outside, and its value.

    For example, ('data.task', 'my_tasks:Sorting'). Returns None if neither is from outside.
    """
    if data.task is not None and _is_import_path(data.task):
        return 'data.task', data.task
    if _is_import_path(data.name) and probe_tasks.is_probe(data.name):
        return 'data.name', data.name
    return None


def _open_rows(config: Config, task: type[Rows], options: Mapping[str, Any]) -> Rows:
    """Opens the rows of a task and checks the sizes of their vocabulary and splits."""
    rows = task.open(config, **options)
    if rows.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f'model.vocab_size={config.model.vocab_size} must be at least {rows.vocab_size} '
            f'for data.name={config.data.name!r}.'
        )
    for split in rows.splits:
        rows.count(split)  # raises ConfigError if the split is too short
    return rows


def _check_splits(rows: Rows, field: str, value: str) -> None:
    """Raises ConfigError if the rows have no validation split, or another one than SPLITS.

    The message names the field that names the task or probe, and its value.
    """
    valid_splits = (SPLITS[:2], SPLITS)  # without or with 'test'
    is_sequence = isinstance(rows.splits, tuple | list)
    if not is_sequence or tuple(rows.splits) not in valid_splits:
        raise ConfigError(
            f'splits={rows.splits!r} of {field}={value!r} must be one of '
            f'{", ".join(map(repr, valid_splits))}'
        )


def _check_arrays(config: Config, rows: Rows, field: str, value: str) -> None:
    """Raises ConfigError if a row has wrong arrays or ids outside the vocabulary, in any split.

    The message names the field that names the task or probe, and its value.
    """
    task = f'{field}={value!r}'
    row_0 = np.zeros(1, int)
    draws_B2 = np.zeros((1, 2), np.uint64)  # the random seed of the row
    for split in rows.splits:
        read = functools.partial(rows.read, split, row_0, draws_B2)
        batch = call_with_config_errors(field, value, read)
        _check_shapes_and_types(batch, rows.array_shapes(config.model), split, task)
        for name in ('tokens_BT', 'targets_BT'):
            ids = np.asarray(batch[name])
            if ids.min() < 0 or ids.max() >= rows.vocab_size:
                raise ConfigError(
                    f'{name} of {task} holds ids from {ids.min()} to {ids.max()} in split '
                    f'{split!r}; they must be at least 0 and below vocab_size={rows.vocab_size}'
                )


def _check_shapes_and_types(batch: Batch, array_shapes: ArrayShapes, split: str, task: str) -> None:
    """Raises ConfigError if the arrays of one row are not those that a task declares.

    Args:
        batch: The arrays of the row, by name.
        array_shapes: The declared length and dtype of each array.
        split: The split of the row, for the message.
        task: The field that names the task or probe, with its value, for the message.
    """
    expected_shapes = {name: (1, length) for name, (length, _) in array_shapes.items()}
    shapes = {name: np.shape(array) for name, array in batch.items()}
    if shapes != expected_shapes:
        raise ConfigError(
            f'read of {task} gives {_shapes_text(shapes)} for one row of split {split!r}; it must '
            f'give {_shapes_text(expected_shapes)}'
        )
    for name, (_, dtype) in array_shapes.items():
        must_be_whole = np.dtype(dtype).kind == 'i'
        if must_be_whole and not are_whole(batch[name]):
            raise ConfigError(
                f'{name} of {task} holds {np.asarray(batch[name]).dtype}; it must be of an integer '
                'type'
            )


def _check_targets(config: Config, rows: Rows, field: str, value: str) -> None:
    """Raises ConfigError if rows of a split have no targets, or invalid loss weights.

    Without targets, a loss is NaN. The message names the field that names the task or probe, and
    its value.
    """
    # A few rows may have no target by chance, so read many, evenly spaced.
    num_rows = max(config.train.batch_size, ROWS_CHECKED)
    for split in rows.splits:
        row_B = eval_rows(rows, split, max_rows=num_rows)
        # The random seed of a row is (0, row), as in an evaluation.
        draws_B2 = np.stack([np.zeros_like(row_B), row_B], axis=1).astype(np.uint64)
        read = functools.partial(rows.read, split, row_B, draws_B2)
        batch = call_with_config_errors(field, value, read)
        loss_weights_BT = np.asarray(batch['loss_weights_BT'])
        are_valid = np.isfinite(loss_weights_BT).all() and loss_weights_BT.min() >= 0
        if not are_valid:
            raise ConfigError(
                f'loss_weights_BT of {field}={value!r} are from {loss_weights_BT.min()} to '
                f'{loss_weights_BT.max()} in split {split!r}; they must be finite and at least 0'
            )
        if not loss_weights_BT.any():
            raise ConfigError(
                f'loss_weights_BT of {field}={value!r} are 0 in {len(row_B)} rows of split '
                f'{split!r}, so nothing is predicted; they must be above 0 where the loss counts'
            )


def _shapes_text(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Formats array shapes: 'tokens_BT (1, 64), targets_BT (1, 64)'."""
    return ', '.join(f'{name} {shape}' for name, shape in shapes.items())


def _task_and_options(config: Config) -> tuple[type[Rows], dict[str, Any]]:
    """Returns the task class of a configuration, and the options of its method `open`."""
    options: dict[str, Any] = {}
    if config.data.task is None:
        task = _default_task(config)
    else:
        task, options = _named_task(config)
    # DocumentRows are LanguageRows in which tokens attend only to their own document.
    if task is LanguageRows and not config.data.cross_documents:
        task = DocumentRows
    return task, options


def _default_task(config: Config) -> type[Rows]:
    """Returns the task in TASKS that fits the kind of model and the form of data."""
    form = _data_form(config.data)
    kind = config.model.kind
    tasks_by_form = {task.data: task for task in TASKS.values() if task.kind == kind}
    if form not in tasks_by_form:
        needed = ' or '.join(tasks_by_form)
        raise ConfigError(
            f'data.name={config.data.name!r} is {form}, but model.kind={kind!r} needs {needed}.'
        )
    return tasks_by_form[form]


def _named_task(config: Config) -> tuple[type[Rows], dict[str, Any]]:
    """Returns the task that data.task names, and its options.

    For example, 'my_file:MyRows(size=9)' gives (MyRows, {'size': 9}).
    """
    form = _data_form(config.data)
    kind = config.model.kind

    def is_task(imported: Any) -> bool:
        return all(hasattr(imported, attribute) for attribute in INTERFACE)

    task, options = resolve(
        config.data.task,
        TASKS,
        'data.task',
        needs=f'a class with the attributes of qkattn.data.tasks.rows.Rows: {", ".join(INTERFACE)}',
        is_valid=is_task,
        call=lambda task: task.open,  # the method that takes the options
    )
    if (task.kind, task.data) != (kind, form):
        raise ConfigError(
            f'data.task={config.data.task!r} trains model.kind={task.kind!r} on {task.data}, '
            f'but model.kind={kind!r} and data.name={config.data.name!r} is {form}.'
        )
    return task, options


def _data_form(data: DataConfig) -> DataForm:
    """Returns the form of a dataset, such as 'text in one language'."""
    if probe_tasks.is_probe(data.name):
        _, probe = probe_tasks.find(data.name)
        return 'a causal probe' if probe.causal else 'a labelling probe'
    corpus_registry.check(data, probe_tasks.PROBES)
    vocabulary.check(data.tokenizer)
    return 'a translation set' if data.languages else 'text in one language'
