"""The trials of a run as one stack: what trains and evaluates them."""

import dataclasses
import functools
from collections.abc import Callable, Generator, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from qkattn import metrics
from qkattn.config import Config
from qkattn.config.calls import called
from qkattn.data import pipeline
from qkattn.data.tasks import repeats
from qkattn.data.tasks.rows import Batch, Rows
from qkattn.errors import ConfigError
from qkattn.model.transformer import cross_entropy
from qkattn.storage.records import described
from qkattn.train.program import Program, stack_program
from qkattn.train.sharding import fetch, local_rows, local_share, place_batch, place_rows
from qkattn.train.step import on_targets


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """X trials on one split; NaN for trials that diverged."""

    values: Mapping[str, np.ndarray | None]  # [X] by metric; None where it is not defined
    metrics: Mapping[str, metrics.Metric]  # those measured
    num_targets: int
    num_rows: int
    nats_RX: np.ndarray  # the loss summed over each evaluated row
    targets_R: np.ndarray


@dataclasses.dataclass
class Stack:
    """X trials on their mesh, in a `state` that changes, and the rows that they read."""

    config: Config
    program: Program
    rows: Rows
    state: dict

    def batches(self) -> Generator[Batch]:
        """What this process reads of the batches from the next step to the last; close it."""
        train, trials, step = self.config.train, self.config.trials.trials(), self.step
        held, rows = local_share(self.config, self.program.mesh)
        return pipeline.train_batches(
            self.rows,
            seeds=[trials[x]['seed'] for x in held],
            batch_size=train.batch_size,
            start_step=step,
            num_steps=train.num_steps - step,
            steps_per_read=train.steps_per_dispatch,
            part=rows,
        )

    def place(self, batch: Batch) -> dict[str, jax.Array]:
        """One of `batches` on the devices."""
        return place_batch(self.config, self.program.mesh, batch)

    def train(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Takes the steps of one dispatch; returns their metrics [C, X]."""
        self.state, measured = self.program.train(self.state, batch)
        return measured

    @property
    def step(self) -> int:
        return int(self.state['step'])

    @property
    def alive_X(self) -> np.ndarray:
        return fetch(self.state['trials']['alive'])

    def params(self, x: int) -> dict:
        """One trial's parameters, on one device of each process."""
        return jax.tree.map(lambda a: jnp.asarray(fetch(a[x])), self.state['trials']['params'])

    def evaluate(
        self, split: str, should_stop: Callable[[], bool] = lambda: False
    ) -> Evaluation | None:
        """Evaluates every trial; None if `should_stop`, called before every batch, was true."""
        size, part = self.config.train.batch_size, local_rows(self.config, self.program.mesh)
        most = self.config.data.eval_sequences
        batches = pipeline.eval_batches(self.rows, split, batch_size=size, max_rows=most, part=part)
        if (sums := self._sums(batches, should_stop)) is None:
            return None
        measured = metrics.named(self.config.train.metrics)
        values = metrics.values(sums, self.rows.bytes_per_token(split), measured)
        number_X = self._number_X()
        return Evaluation(
            values={name: None if v_X is None else number_X * v_X for name, v_X in values.items()},
            metrics=measured,
            num_targets=int(sums['weight'].sum(0)[0]),
            num_rows=int(sums['rows'].sum(0)[0]),
            nats_RX=number_X * sums['loss'],
            targets_R=sums['weight'][:, 0],
        )

    def induction(self) -> dict[str, np.ndarray] | None:
        """How the trials use what stands earlier in their context; None for rows without repeats.

        Random tokens are shown twice (Olsson et al. 2022, 'In-context learning and induction
        heads'); only a model that finds them again in its context does better on the second copy.
        """
        r_BH = repeats.sequences(self.rows)
        if r_BH is None:
            return None

        def total(copy: repeats.Copy) -> dict[str, np.ndarray]:
            size, part = self.config.train.batch_size, local_rows(self.config, self.program.mesh)
            context = self.config.model.context
            batches = repeats.batches(r_BH, context, copy, batch_size=size, part=part)
            return {name: sums_RX.sum(0) for name, sums_RX in self._sums(batches).items()}

        first, second, number_X = total('first'), total('second'), self._number_X()
        gain_X = first['loss'] / first['weight'] - second['loss'] / second['weight']
        return {
            'val_induction_gain': number_X * gain_X,
            'val_induction_accuracy': number_X * second['accuracy'] / second['weight'],
        }

    def _measure(self, measure: Callable[..., dict], batch: Batch) -> dict[str, jax.Array]:
        mesh = self.program.mesh
        run = stack_program(self.config, self.program.lifting, mesh, measure)
        return run(self.state['trials']['params'], place_rows(self.config, mesh, batch))

    def _sums(
        self, batches: Iterable[Batch], should_stop: Callable[[], bool] = lambda: False
    ) -> metrics.Sums | None:
        """`row_sums` of the R rows of all batches, [R, X, ...] in float64; None if stopped."""
        parts: list[dict] = []
        for batch in batches:
            if should_stop():
                return None
            parts.append(self._measure(row_sums, batch))
            # At most two batches ahead of the devices, so that a stop request is seen early.
            jax.block_until_ready(parts[-2:][0])
        whole = {name: np.concatenate([part[name] for part in parts], 1) for name in parts[0]}
        return {name: np.swapaxes(sums.astype(np.float64), 0, 1) for name, sums in whole.items()}

    def _number_X(self) -> np.ndarray:
        return np.where(self.alive_X, 1.0, np.nan)


def row_sums(config: Config, params: dict, batch: dict) -> dict[str, jax.Array]:
    """`metrics.row_sums` of one trial [B, ...], without dropout or label smoothing."""
    measured = metrics.named(config.train.metrics)
    of_targets = on_targets(config, params, batch, functools.partial(per_target, measured))
    return metrics.row_sums(of_targets, batch['loss_weights_BT'])


def per_target(
    measured: Mapping[str, metrics.Metric], logits_BTV: jax.Array, targets_BT: jax.Array
) -> dict[str, jax.Array]:
    """What metrics give of each target [B, T, ...], by name."""
    nats_BT = cross_entropy(logits_BTV, targets_BT)
    correct_BT = jnp.argmax(logits_BTV, -1) == targets_BT
    predictions = metrics.Predictions(logits_BTV, targets_BT, nats_BT, correct_BT)
    given = {name: metric.per_target for name, metric in measured.items() if metric.per_target}
    return {name: function(predictions) for name, function in given.items()}


def check_metrics(config: Config) -> None:
    """Raises ConfigError where `train.metrics` names what is no metric; nothing compiles."""
    if not config.train.metrics:
        return
    texts, (B, T, R, X) = ', '.join(config.train.metrics), (2, 3, 5, 7)
    measured = metrics.named(config.train.metrics)
    logits_BTV = jax.ShapeDtypeStruct((B, T, config.model.vocab_size), jnp.float32)
    targets_BT = jax.ShapeDtypeStruct((B, T), jnp.int32)
    measure = functools.partial(per_target, measured)
    given = called('train.metrics', texts, lambda: jax.eval_shape(measure, logits_BTV, targets_BT))
    sums = {name: np.ones((R, X)) for name in ('weight', 'rows')}
    for name, values in given.items():
        if (shape := getattr(values, 'shape', ()))[:2] != (B, T):
            raise ConfigError(
                f'per_target of metric {name!r} gives {shape} for targets of shape {(B, T)}; it '
                'must give an array [B, T] or [B, T, ...]'
            )
        sums[name] = np.ones((R, X, *shape[2:]))
    described(measured)
    for name, metric in metrics.outside(measured).items():
        if metric.value is None:
            raise ConfigError(f'metric {name!r} must have per_target, value or both')
        with np.errstate(all='ignore'):
            value_X = called('train.metrics', texts, functools.partial(metric.value, sums, 1.0))
        if value_X is not None and np.shape(value_X) != (X,):
            raise ConfigError(
                f'value of metric {name!r} gives {np.shape(value_X)} for sums of shape '
                f'{(R, X)}; it must give [X], a number for each trial, or None'
            )
