"""The training loop: one run of X trials, from its directory to its results, resumable anywhere."""

import dataclasses
import logging
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qkattn import budget, runlog, weights
from qkattn.config import Config, ConfigError, fingerprint, to_json, validate
from qkattn.data import pipeline as data
from qkattn.data.tokens import TokenDataset
from qkattn.train import program as programs
from qkattn.train import sharding
from qkattn.train.checkpoint import CheckpointError, Checkpoints
from qkattn.train.program import Program

# Trial outcomes in a result.
FINISHED, DIVERGED = 'finished', 'diverged'

log = logging.getLogger(__name__)


class Stopped(Exception):
    """Training stopped on request, with a checkpoint saved; the same command goes on from it."""


@dataclasses.dataclass
class _Clock:
    """Seconds spent in training proper, over all starts of the run."""

    seconds: float
    tokens: int = 0
    here: float = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        self.seconds += seconds
        self.here += seconds
        self.tokens += tokens

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.here if self.here else None


def train(
    config: Config,
    workdir: str | Path,
    *,
    command: list[str] | None = None,
    description: str = 'train',
    cells_left: int | None = None,
) -> list[dict[str, Any]]:
    """Trains the stack of trials to its end and returns one result per trial, in trial order.

    A finished run returns its results at once; an unfinished one goes on from its newest sound
    checkpoint, bitwise as if it had never stopped (same devices, same versions).

    Raises:
      ConfigError: a setting that cannot work, or a workdir of another configuration or in use.
      CheckpointError: the checkpoints are damaged, or belong to other data.
      Stopped: SIGTERM or Ctrl-C came; the state is saved.
    """
    validate(config)
    runlog.require_local(workdir)
    sharding.require_devices(config.mesh)
    dataset = data.load(config.data.name, config.data.data_dir)
    if dataset.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f'model.vocab_size={config.model.vocab_size} is too small for dataset {dataset.name}, '
            f'whose tokenizer {dataset.tokenizer.name} has {dataset.vocab_size} tokens'
        )
    for split in ('train', 'validation', 'test'):
        data.num_windows(dataset, split, config.model.context)  # refuses a split that is too short

    if jax.process_count() > 1:
        raise ConfigError(f'a run is one process, but this job has {jax.process_count()}')

    opened = runlog.RunDirectory.open(workdir, to_json(config), fingerprint(config), command)
    with opened as directory, runlog.StopRequest() as stop:
        result_path = directory.path / 'result.json'
        if result_path.exists():
            return runlog.read_json(result_path)
        results = _Run(config, dataset, directory, stop, description, cells_left).run()
        runlog.write_json(result_path, results)
        return results


class _Run:
    """The live objects of one start of a run."""

    def __init__(
        self,
        config: Config,
        dataset: TokenDataset,
        directory: runlog.RunDirectory,
        stop: runlog.StopRequest,
        description: str,
        cells_left: int | None,
    ):
        self.config, self.dataset, self.directory, self.stop = config, dataset, directory, stop
        self.trials = config.trials.trials()
        self.program = self._build()
        self.checkpoints = Checkpoints(directory.path / 'checkpoints')
        self.description, self.cells_left = description, cells_left
        train = config.train
        self.tokens_per_step = len(self.trials) * train.batch_size * config.model.context

    def _build(self) -> Program:
        """Compiles; the lifting is chosen once per run, since the last bits depend on it."""
        params = None
        if self.config.train.init_from is not None:
            _, params = weights.load(self.config.train.init_from)
            weights.check(self.config.model, params, self.config.train.init_from)
        path = self.directory.path / 'lifting.json'
        if path.exists():
            return programs.build(self.config, runlog.read_json(path)['lifting'], params)
        program = programs.build(self.config, params=params)
        measured = {'lifting': program.lifting, 'seconds_per_step': program.measured}
        runlog.write_json(path, measured)
        return program

    def run(self) -> list[dict[str, Any]]:
        try:
            return self._run()
        finally:
            self.checkpoints.close()

    def _run(self) -> list[dict[str, Any]]:
        config, program, train = self.config, self.program, self.config.train
        state, step, clock = self._restore()
        self.directory.metrics.rewind(step, every=train.log_every)
        rows = programs.local_rows(config, program.mesh)
        batches = data.TrainBatches(
            self.dataset,
            seeds=[trial['seed'] for trial in self.trials],
            batch_size=train.batch_size,
            length=config.model.context,
            start_step=step,
            num_steps=train.num_steps - step,
            steps_per_read=train.steps_per_dispatch,
            rows=rows,
        )
        progress = runlog.Progress(
            train.num_steps,
            self.description,
            start_step=step,
            tokens_per_step=self.tokens_per_step,
            cells_left=self.cells_left,
        )
        val_loss, held = math.inf, None
        with batches, progress:
            started, since = time.perf_counter(), step
            for tokens_CXBT1 in batches:
                tokens = programs.place_tokens(config, program.mesh, tokens_CXBT1, rows)
                state, measured = program.train(state, tokens)
                # Metrics are fetched one dispatch late, so that the device never waits for them.
                held = self._record(held)
                step += train.steps_per_dispatch
                progress.update(step, measured['loss'][-1])
                if step % train.log_every == 0:
                    held = step, measured
                evaluating = step % train.eval_every == 0
                stopping = self.stop.requested and step < train.num_steps
                saving = stopping or step % train.checkpoint_every == 0 or step == train.num_steps
                if not (evaluating or saving):
                    continue
                held = self._record(held)
                jax.block_until_ready(state)
                clock.add(time.perf_counter() - started, (step - since) * self.tokens_per_step)
                if evaluating:
                    losses_X = self._evaluate(state, 'validation')
                    self.directory.metrics.append(self._eval_record(step, losses_X))
                    val_loss = float(np.mean(losses_X))
                if saving:
                    self._save(step, state, val_loss, clock)
                if stopping:
                    raise Stopped(f'stopped at step {step} of {train.num_steps}, state saved')
                started, since = time.perf_counter(), step
        return self._results(state, clock)

    def _record(self, held: tuple[int, dict[str, jax.Array]] | None) -> None:
        """Writes the metrics of a dispatch: means over its steps, for each trial."""
        if held is None:
            return
        step, measured = held
        means = {name: np.asarray(v_CX, np.float64).mean(0) for name, v_CX in measured.items()}
        self.directory.metrics.append({'kind': 'train', 'step': step, **means})

    def _restore(self) -> tuple[dict, int, _Clock]:
        found = self.checkpoints.restore(self.program.abstract_state)
        if found is None:
            return self.program.init(), 0, _Clock(0.0)
        state, record = found
        if record['data'] != self.dataset.identity():
            raise CheckpointError(
                f'{self.directory.path} was trained on {record["data"]}, but the dataset is '
                f'{self.dataset.identity()}; use the interpreter and data that it began with, '
                'or another workdir'
            )
        step = int(state['step'])
        self.checkpoints.discard_after(step)
        log.info('resuming at step %d', step)
        return state, step, _Clock(record['train_seconds'])

    def _save(self, step: int, state: dict, val_loss: float, clock: _Clock) -> None:
        # The metrics reach the disk before the checkpoint does: a resumed file has no gap.
        self.directory.metrics.flush()
        record = {'data': self.dataset.identity(), 'train_seconds': clock.seconds}
        self.checkpoints.save(step, state, record, val_loss)

    def _evaluate(self, state: dict, split: str) -> np.ndarray:
        """Mean loss over the split for each trial, in nats per token."""
        settings = {
            'length': self.config.model.context,
            'max_sequences': self.config.data.eval_sequences,
        }
        batch_size = self.config.train.batch_size
        sums = [
            self.program.evaluate(state, programs.place_everywhere(self.program.mesh, batch))
            for batch in data.eval_batches(self.dataset, split, batch_size=batch_size, **settings)
        ]
        total_X = np.sum([np.asarray(s, np.float64) for s in sums], axis=0)
        losses_X = total_X / data.eval_tokens(self.dataset, split, **settings)
        return np.where(np.asarray(state['trials']['alive']), losses_X, np.nan)

    def _provenance(self) -> dict[str, Any]:
        """What made the numbers; who and where stays in provenance.json."""
        start = runlog.read_json(self.directory.path / 'provenance.json')['starts'][-1]
        return {name: start[name] for name in ('git', 'python', 'versions', 'devices')}

    def _eval_record(self, step: int, losses_X: np.ndarray) -> dict[str, Any]:
        return {
            'kind': 'eval',
            'step': step,
            'val_loss': losses_X,
            'val_bits_per_byte': [self.dataset.bits_per_byte('validation', x) for x in losses_X],
        }

    def _results(self, state: dict, clock: _Clock) -> list[dict[str, Any]]:
        config, model = self.config, self.config.model
        common = {
            'num_steps': config.train.num_steps,
            'num_tokens': config.train.num_steps * config.train.batch_size * model.context,
            'weights': budget.count(model),
            'config': {
                'd_model': model.d_model,
                'd_ff': model.mlp_width,
                'num_layers': model.num_layers,
                'num_heads': model.num_heads,
                'num_kv_heads': model.attention.num_kv_heads,
                'head_size': model.attention.head_size,
            },
            'config_hash': fingerprint(config),
            'flops_per_token': budget.flops_per_token(model),
            'cache_floats_per_token': budget.cache_floats_per_token(model),
            'train_seconds': clock.seconds,
            'compile_seconds': self.program.compile_seconds,
            'tokens_per_second': clock.tokens_per_second,
            'lifting': self.program.lifting,
            'data': {
                **self.dataset.identity(),
                'unigram_bits_per_byte': self.dataset.unigram_bits_per_byte('validation'),
            },
            'eval_tokens': data.eval_tokens(
                self.dataset,
                'validation',
                length=model.context,
                max_sequences=config.data.eval_sequences,
            ),
            'provenance': self._provenance(),
        }
        losses = {name: self._evaluate(state, name) for name in ('validation', 'test')}
        results = []
        for x, trial in enumerate(self.trials):
            alive = bool(np.asarray(state['trials']['alive'])[x])
            result = {'trial': trial, 'status': FINISHED if alive else DIVERGED, **common}
            for split, short in (('validation', 'val'), ('test', 'test')):
                loss = float(losses[split][x])
                result[f'{short}_loss'] = loss
                result[f'{short}_bits_per_byte'] = self.dataset.bits_per_byte(split, loss)
            results.append(result)
        return runlog.to_jsonable(results)
