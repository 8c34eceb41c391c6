"""The trials of a run, trained and evaluated together."""

import dataclasses
import functools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from qkattn import metrics
from qkattn.config import Config
from qkattn.config.calls import call_with_config_errors
from qkattn.data import pipeline
from qkattn.data.evaluation_corpora import EvaluationCorpus
from qkattn.data.tasks.rows import Batch, Rows
from qkattn.data.tasks.task_registry import task_of
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.decode.translate import translate_ids
from qkattn.errors import ConfigError
from qkattn.model.transformer import cross_entropy, inference_model
from qkattn.storage.records import describe_outside_metrics
from qkattn.train.program import Program, stack_program
from qkattn.train.sharding import fetch, local_rows, local_share, place_batch, place_rows
from qkattn.train.step import measure_on_targets


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Measurements of X trials on the R rows of a split; NaN for trials that diverged."""

    # The value of each metric, [X]; None if it is not defined for these data.
    values: Mapping[str, np.ndarray | None]
    # The measured metrics by name.
    metrics: Mapping[str, metrics.Metric]
    num_targets: int
    # The number of rows that have targets.
    num_rows: int
    # The loss of each row, summed over its targets.
    nats_RX: np.ndarray
    # The number of targets in each row.
    targets_R: np.ndarray


@dataclasses.dataclass
class Stack:
    """The X trials of a run on a mesh, with the data to train and evaluate them."""

    config: Config
    program: Program
    rows: Rows
    # {'step': scalar, 'trials': states of trials, [X, ...]}; each call of `train` replaces it.
    state: dict
    # The corpora of data.evaluate.
    corpora: tuple[EvaluationCorpus, ...] = ()

    def batches(self) -> Generator[Batch]:
        """Yields this process's part of each remaining training batch.

        A thread reads ahead until the generator is closed.
        """
        train = self.config.train
        trials = self.config.trials.trials()
        next_step = self.step
        local_trials, local_rows_of_batch = local_share(self.config, self.program.mesh)
        return pipeline.train_batches(
            self.rows,
            seeds=[trials[x]['seed'] for x in local_trials],
            batch_size=train.batch_size,
            start_step=next_step,
            num_steps=train.num_steps - next_step,
            steps_per_read=train.steps_per_dispatch,
            part=local_rows_of_batch,
        )

    def place(self, batch: Batch) -> dict[str, jax.Array]:
        """Places a batch of `batches` on the devices, as part of the global batch."""
        return place_batch(self.config, self.program.mesh, batch)

    def train(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Takes the C steps of one dispatch; returns their metrics [C, X]."""
        self.state, step_metrics = self.program.train(self.state, batch)
        return step_metrics

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return int(self.state['step'])

    @property
    def alive_X(self) -> np.ndarray:
        """Whether the losses and gradients of each trial have all been finite."""
        return fetch(self.state['trials']['alive'])

    def params(self, x: int) -> dict:
        """Returns the parameters of trial x, on one device of each process."""
        params_X = self.state['trials']['params']
        return jax.tree.map(lambda array_X: jnp.asarray(fetch(array_X[x])), params_X)

    def evaluate(
        self, split: str, should_stop: Callable[[], bool] = lambda: False
    ) -> Evaluation | None:
        """Evaluates every trial on a split of the run's data.

        Returns None as soon as `should_stop`, called before every batch, returns True.
        """
        return self._evaluate(self.rows, split, should_stop)

    def evaluate_corpora(
        self, should_stop: Callable[[], bool] = lambda: False
    ) -> dict[str, Evaluation] | None:
        """Evaluates every trial on the corpora of data.evaluate.

        Returns:
            Evaluations by corpus, such as {'@train': ...}; None if `should_stop` returns True.
        """
        evaluations = {}
        for corpus in self.corpora:
            evaluation = self._evaluate(corpus.rows, corpus.split, should_stop)
            if evaluation is None:
                return None
            evaluations[corpus.name] = evaluation
        return evaluations

    def _evaluate(
        self, rows: Rows, split: str, should_stop: Callable[[], bool]
    ) -> Evaluation | None:
        """Evaluates every trial on a split of `rows`; None if `should_stop` returns True."""
        batches = pipeline.eval_batches(
            rows,
            split,
            batch_size=self.config.train.batch_size,
            max_rows=self.config.data.eval_sequences,
            part=local_rows(self.config, self.program.mesh),
        )
        sums = self._sums(batches, should_stop)
        if sums is None:
            return None

        evaluated = metrics.named(self.config.train.metrics)
        one_or_nan_X = self._one_or_nan_X()  # NaN for trials that diverged
        values: dict[str, np.ndarray | None] = {}
        values_of_all = metrics.values(sums, rows.bytes_per_token(split), evaluated)
        for name, value_X in values_of_all.items():
            values[name] = None if value_X is None else one_or_nan_X * value_X

        # All trials have the same targets, so take the counts of the first trial.
        targets_R = sums['weight'][:, 0]
        has_target_R = sums['rows'][:, 0]  # 1 for rows with targets, else 0
        return Evaluation(
            values=values,
            metrics=evaluated,
            num_targets=int(targets_R.sum()),
            num_rows=int(has_target_R.sum()),
            nats_RX=one_or_nan_X * sums['loss'],
            targets_R=targets_R,
        )

    def sums(self, read: Callable[..., Iterable[Batch]]) -> metrics.Sums:
        """Computes `row_sums` of R rows; returns arrays [R, X, ...].

        Args:
            read: Returns the batches of rows when called as read(batch_size=..., part=...).
        """
        part = local_rows(self.config, self.program.mesh)
        return self._sums(read(batch_size=self.config.train.batch_size, part=part))

    def translate(self, x: int, tokenizer: Tokenizer, sources: Sequence[np.ndarray]) -> list[str]:
        """Translates sources (token ids without separators) with the model of trial x."""
        model = inference_model(self.config.model, self.params(x))
        return translate_ids(model, tokenizer, sources, self.config.decode)

    def _measure(self, batch: Batch) -> dict[str, jax.Array]:
        """Computes `row_sums` of a batch for every trial; returns arrays [X, B, ...]."""
        mesh = self.program.mesh
        compute = stack_program(self.config, self.program.lifting, mesh, row_sums)
        return compute(self.state['trials']['params'], place_rows(self.config, mesh, batch))

    def _sums(
        self, batches: Iterable[Batch], should_stop: Callable[[], bool] = lambda: False
    ) -> metrics.Sums | None:
        """Computes `row_sums` of all rows in the batches, for every trial.

        Returns:
            float64 arrays [R, X, ...] by metric name, for R rows and X trials. None as soon as
            `should_stop`, called before every batch, returns True.
        """
        # For each batch of B rows, arrays [X, B, ...] by metric name.
        sums_of_batches: list[dict[str, jax.Array]] = []
        for batch in batches:
            if should_stop():
                return None
            sums_of_batches.append(self._measure(batch))
            # Wait for the devices to finish the previous batch, to notice a stop request soon.
            if len(sums_of_batches) >= 2:
                previous_sums = sums_of_batches[-2]
                jax.block_until_ready(previous_sums)

        sums = {}
        for name in sums_of_batches[0]:
            sums_XR = np.concatenate([arrays[name] for arrays in sums_of_batches], axis=1)
            sums_RX = np.swapaxes(sums_XR, 0, 1)
            sums[name] = sums_RX.astype(np.float64)
        return sums

    def _one_or_nan_X(self) -> np.ndarray:
        """Returns a factor for each trial: NaN if it diverged, and otherwise 1."""
        return np.where(self.alive_X, 1.0, np.nan)


def row_sums(config: Config, params: dict, batch: dict) -> dict[str, jax.Array]:
    """Sums each metric over the targets of each row; returns arrays [B, ...] by name.

    The loss is measured without dropout, label smoothing and z-loss.
    """
    evaluated = metrics.named(config.train.metrics)
    measured = measure_on_targets(config, params, batch, functools.partial(per_target, evaluated))
    return metrics.row_sums(measured, batch['loss_weights_BT'])


def per_target(
    evaluated: Mapping[str, metrics.Metric], logits_BTV: jax.Array, targets_BT: jax.Array
) -> dict[str, jax.Array]:
    """Measures each metric on each target; returns arrays [B, T, ...] by metric name."""
    nats_BT = cross_entropy(logits_BTV, targets_BT)
    correct_BT = jnp.argmax(logits_BTV, -1) == targets_BT
    predictions = metrics.Predictions(logits_BTV, targets_BT, nats_BT, correct_BT)
    return {
        name: metric.per_target(predictions)
        for name, metric in evaluated.items()
        if metric.per_target is not None
    }


def check_metrics(config: Config) -> None:
    """Raises ConfigError for a metric from outside the package that cannot be used.

    Checks the metrics that a task declares, and calls the functions of train.metrics with arrays of
    example shapes.
    """
    evaluated = metrics.named(config.train.metrics)
    if config.data.task is not None:
        _check_metrics_of_task(config, evaluated)
    if config.train.metrics:
        sums = _example_sums(config, evaluated)
        describe_outside_metrics(evaluated)  # raises if results cannot describe a metric
        _check_values(config, evaluated, sums)


def _check_metrics_of_task(config: Config, evaluated: Mapping[str, metrics.Metric]) -> None:
    """Raises ConfigError if a metric of the task is not valid, or has the name of another one."""
    of_run = metrics.outside(evaluated).values()
    of_task = task_of(config).metrics
    if not isinstance(of_task, tuple):
        raise ConfigError(
            f'metrics of data.task={config.data.task!r} must be a tuple of Metric, not '
            f'{of_task!r:.80}'
        )
    describe_outside_metrics(metrics.with_outside([*of_run, *of_task]))


def _example_sums(config: Config, evaluated: Mapping[str, metrics.Metric]) -> dict[str, np.ndarray]:
    """Returns arrays [R, X, ...] of ones, with the names and shapes of `metrics.Sums`.

    Raises:
        ConfigError: The `per_target` of a metric fails, or does not give an array [B, T, ...].
    """
    # All sizes differ, so that swapped axes are noticed.
    B, T, R, X = 2, 3, 5, 7
    logits_BTV = jax.ShapeDtypeStruct((B, T, config.model.vocab_size), jnp.float32)
    targets_BT = jax.ShapeDtypeStruct((B, T), jnp.int32)
    measured = call_with_config_errors(
        'train.metrics',
        ', '.join(config.train.metrics),
        lambda: jax.eval_shape(functools.partial(per_target, evaluated), logits_BTV, targets_BT),
    )

    sums = {'weight': np.ones((R, X)), 'rows': np.ones((R, X))}
    for name, array in measured.items():
        shape = getattr(array, 'shape', ())
        if shape[:2] != (B, T):
            raise ConfigError(
                f'per_target of metric {name!r} gives {shape} for targets of shape {(B, T)}; it '
                'must give an array [B, T] or [B, T, ...]'
            )
        sums[name] = np.ones((R, X, *shape[2:]))
    return sums


def _check_values(
    config: Config, evaluated: Mapping[str, metrics.Metric], sums: metrics.Sums
) -> None:
    """Raises ConfigError if the `value` of a metric fails, or does not map `sums` to [X]."""
    R, X = sums['weight'].shape
    for name, metric in metrics.outside(evaluated).items():
        if metric.value is None:
            raise ConfigError(f'metric {name!r} must have per_target, value or both')
        bytes_per_target = 1.0
        with np.errstate(all='ignore'):
            value_X = call_with_config_errors(
                'train.metrics',
                ', '.join(config.train.metrics),
                functools.partial(metric.value, sums, bytes_per_target),
            )
        if value_X is not None and np.shape(value_X) != (X,):
            raise ConfigError(
                f'value of metric {name!r} gives {np.shape(value_X)} for sums of shape '
                f'{(R, X)}; it must give [X], a number for each trial, or None'
            )
