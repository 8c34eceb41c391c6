"""Checkpoints that are whole or absent: orbax, plus the checksums it does not keep.

    checkpoints/N/state/   orbax: the arrays, and `checksums`, the sums of `train.checksums`
    checkpoints/N/record/  JSON: step, time and data of the run; format, version and crc32

Format 1 has no field `format`, and the crc32 of every array in the field `crc32` of its record.
"""

import contextlib
import logging
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import preservation_policy

from qkattn import __version__
from qkattn.errors import CheckpointError
from qkattn.run.files import disk_errors, require_room
from qkattn.run.json_schema import check
from qkattn.run.records import parse_file, parse_json, remove_checksum, with_checksum
from qkattn.train import checksums

FORMAT = 2
SUMS = 'checksums'
TRASH, UNFINISHED = 'trash', '*.orbax-checkpoint-tmp'
SET_ASIDE = '.damaged'
# What is read of a checkpoint besides its state.
DESCRIPTIONS = {'_CHECKPOINT_METADATA': {}, 'metrics/metrics': {'val_loss': float | None}}
RECORD = {'data': dict, 'train_seconds': float}
OVERHEAD = 2**20  # bytes of a checkpoint besides its state, at most

log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of a run: the newest two and the one with the best validation loss.

    Saving is asynchronous: `save` returns when the state is copied, and a step exists once it is
    complete on disk. Every array has a checksum that `restore` checks, because a flipped bit in
    its data would otherwise load without a word.

    Attributes:
      stall_seconds: time that training has waited in `save` and `close`, over all starts.
    """

    def __init__(self, directory: Path, *, read_only: bool = False):
        """Opens `directory` (absolute); unless read only, clears its trash and unfinished saves."""
        self.directory = directory
        self.stall_seconds = 0.0
        self._read_only = read_only
        if not read_only:
            shutil.rmtree(directory / TRASH, ignore_errors=True)
        newest = preservation_policy.LatestN(2)
        best = preservation_policy.BestN(get_metric_fn=_rank, reverse=True, n=1)
        options = ocp.CheckpointManagerOptions(
            best_fn=_rank,
            best_mode='min',
            preservation_policy=preservation_policy.AnyPreservationPolicy([newest, best]),
            todelete_subdir=None if read_only else TRASH,
            save_interval_steps=0 if read_only else 1,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
            enable_async_checkpointing=True,
            read_only=read_only,
        )
        self._check_descriptions()
        with disk_errors(directory):
            self._manager = ocp.CheckpointManager(directory, options=options)

    def steps(self) -> list[int]:
        """The steps that are complete, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: dict, record: dict[str, Any], val_loss: float) -> None:
        """Saves `state` and the JSON `record` under `step`, unless that step is there already.

        Raises:
          DiskError: this save or the one before could not be written.
        """
        if step in self.steps():
            return
        # Found out before, since orbax logs a traceback for every leaf that it cannot write.
        require_room(self.directory, OVERHEAD + sum(leaf.nbytes for leaf in jax.tree.leaves(state)))
        about = {'checkpoint_seconds': self.stall_seconds, 'format': FORMAT, 'version': __version__}
        with self._waiting(), disk_errors(self.directory):
            # The sums are computed while the state is copied.
            sums = checksums.sums(state)
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave({**state, SUMS: sums}),
                    record=ocp.args.JsonSave(with_checksum({**record, **about})),
                ),
                metrics={'val_loss': val_loss if math.isfinite(val_loss) else None},
            )

    def restore(self, target: dict) -> tuple[dict, dict[str, Any]] | None:
        """The newest sound checkpoint as (state, record), placed like `target`; None if none.

        Args:
          target: ShapeDtypeStructs with the shardings of the current mesh.

        Raises:
          CheckpointError: there are checkpoints, and every one of them is damaged, or a later
            version wrote the newest one.
        """
        if (found := self._newest(target)) is None:
            return None
        self.stall_seconds = found[1].get('checkpoint_seconds', 0.0)
        return found

    def record(self) -> dict[str, Any] | None:
        """The record of the newest sound checkpoint, without its state; raises as `restore`."""
        found = self._newest()
        return None if found is None else found[1]

    def _newest(self, target: dict | None = None) -> tuple[dict, dict[str, Any]] | None:
        """State (empty without a target) and record of the newest checkpoint that is sound."""
        steps = self.steps()
        for step in reversed(steps):
            try:
                record = self._record_of(step)
                state = {} if target is None else self._state_of(step, target, record)
                return state, record
            except _Damage as damage:
                _name_damaged(step, damage)
        if steps or self._set_aside():
            raise CheckpointError(
                f'every checkpoint in {self.directory} is damaged; restore one from a copy or use '
                'another workdir'
            )
        return None

    def _record_of(self, step: int) -> dict[str, Any]:
        path = self.directory / str(step) / 'record/metadata'
        try:
            record = parse_json(path.read_bytes())
            check(record, {})
            if 'format' in record:
                remove_checksum(record)
                check(record, {'format': int, 'version': str})
            else:
                check(record, {'crc32': dict})
        except (OSError, ValueError) as error:
            raise _Damage(f'record/metadata: {error}') from error
        if record.get('format', 1) > FORMAT:
            raise CheckpointError(
                f'{path.parents[1]} has format {record["format"]} of qkattn {record["version"]}, '
                f'but this is qkattn {__version__}, which reads formats up to {FORMAT}; use qkattn '
                f'{record["version"]} or later, or another workdir'
            )
        return record

    def _state_of(self, step: int, target: dict, record: dict[str, Any]) -> dict:
        names, summed = checksums.names(target), 'format' in record
        placed = jax.tree.leaves(target)[0].sharding
        sums = jax.ShapeDtypeStruct(
            (len(names),), 'uint32', sharding=placed and checksums.replicated(placed)
        )
        try:
            args = ocp.args.StandardRestore({**target, SUMS: sums} if summed else target)
            path = epath.Path(self.directory / str(step) / 'state')
            state = ocp.StandardCheckpointHandler().restore(path, args=args)
        except Exception as error:  # orbax and tensorstore raise many kinds on damaged files
            raise _Damage(str(error)) from error
        if summed:
            wanted = np.asarray(state.pop(SUMS)).tolist()
            found = np.asarray(checksums.sums(state)).tolist()
        else:
            found = list(checksums.crc32s(state).values())
            wanted = [record['crc32'].get(name) for name in names]
        for name, want, have in zip(names, wanted, found, strict=True):
            if want != have:
                raise _Damage(f'checksum of {name}')
        return state

    def discard_after(self, step: int) -> None:
        """Deletes the (damaged) steps beyond `step`, which training will write again."""
        for later in [s for s in self.steps() if s > step]:
            self._manager.delete(later)
        for path in self._set_aside():
            shutil.rmtree(path)

    def _set_aside(self) -> list[Path]:
        return list(self.directory.glob(f'*{SET_ASIDE}'))

    def _check_descriptions(self) -> None:
        """Sets checkpoints aside whose description is damaged, with which orbax opens none."""
        for path in self.directory.glob('[0-9]*'):
            if not path.name.isdecimal():
                continue
            try:
                for name, schema in DESCRIPTIONS.items():
                    parse_file(path / name, schema)
            except ValueError as error:
                if self._read_only:
                    raise CheckpointError(
                        f'{path} is damaged ({error}); run the training command again, which goes '
                        'on from the checkpoint before'
                    ) from error
                _name_damaged(path.name, error)
                path.rename(path.with_name(path.name + SET_ASIDE))

    def close(self) -> None:
        """Waits for the last save; a save that could not be finished is removed.

        Raises:
          DiskError: the last save could not be written.
        """
        try:
            with self._waiting(), disk_errors(self.directory):
                self._manager.wait_until_finished()
        finally:
            with disk_errors(self.directory):
                self._manager.close()
            if not self._read_only:
                for left in (self.directory / TRASH, *self.directory.glob(UNFINISHED)):
                    shutil.rmtree(left, ignore_errors=True)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.stall_seconds += time.perf_counter() - start


class _Damage(Exception):
    """A checkpoint that cannot be restored; says why."""


def _name_damaged(step: int | str, error: Exception) -> None:
    reason = (str(error).splitlines() or [''])[0]
    log.error('checkpoint %s is damaged (%s); trying the one before', step, reason)


def _rank(metrics: dict[str, Any]) -> float:
    """Diverged runs rank last; NaN would rank best."""
    return math.inf if metrics['val_loss'] is None else metrics['val_loss']
