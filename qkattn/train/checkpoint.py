"""Checkpoints that are whole or absent: orbax, plus the checksums it does not keep."""

import logging
import math
import shutil
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from qkattn.errors import CheckpointError
from qkattn.run.files import disk_errors, require_room
from qkattn.run.json_schema import check
from qkattn.run.records import parse_file

TRASH, UNFINISHED = 'trash', '*.orbax-checkpoint-tmp'
SET_ASIDE = '.damaged'
# What is read of a checkpoint besides its state.
DESCRIPTIONS = {'_CHECKPOINT_METADATA': {}, 'metrics/metrics': {'val_loss': float | None}}
RECORD = {'data': dict, 'train_seconds': float, 'crc32': dict}
OVERHEAD = 2**20  # bytes of a checkpoint besides its state, at most

log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of a run: the newest two and the one with the best validation loss.

    Saving is asynchronous: `save` returns when the state is copied, and a step exists once it is
    complete on disk. Every leaf carries a crc32 that `restore` checks, because a flipped bit in
    array data would otherwise load without a word.
    """

    def __init__(self, directory: Path, *, read_only: bool = False):
        """Opens `directory` (absolute); unless read only, clears its trash and unfinished saves."""
        self.directory = directory
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
        with disk_errors(self.directory):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    record=ocp.args.JsonSave({**record, 'crc32': checksums(state)}),
                ),
                metrics={'val_loss': val_loss if math.isfinite(val_loss) else None},
            )

    def restore(self, target: dict) -> tuple[dict, dict[str, Any]] | None:
        """The newest sound checkpoint as (state, record), placed like `target`; None if none.

        Args:
          target: ShapeDtypeStructs with the shardings of the current mesh.

        Raises:
          CheckpointError: there are checkpoints, and every one of them is damaged.
        """
        found = self._newest(state=ocp.args.StandardRestore(target))
        return None if found is None else (found.state, found.record)

    def record(self) -> dict[str, Any] | None:
        """The record of the newest sound checkpoint, without its state; raises as `restore`."""
        found = self._newest()
        return None if found is None else found.record

    def _newest(self, **items: Any) -> Any:
        """The record and these items of the newest checkpoint where none of them is damaged."""
        steps = self.steps()
        for step in reversed(steps):
            try:
                args = ocp.args.Composite(record=ocp.args.JsonRestore(), **items)
                found = self._manager.restore(step, args=args)
                check(found.record, RECORD)
                for name, crc in checksums(found.state).items() if items else ():
                    if found.record['crc32'].get(name) != crc:
                        raise ValueError(f'checksum of {name}')
                return found
            except Exception as error:  # orbax and tensorstore raise many kinds on damaged files
                _name_damaged(step, error)
        if steps or self._set_aside():
            raise CheckpointError(
                f'every checkpoint in {self.directory} is damaged; restore one from a copy or use '
                'another workdir'
            )
        return None

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
            with disk_errors(self.directory):
                self._manager.wait_until_finished()
        finally:
            with disk_errors(self.directory):
                self._manager.close()
            if not self._read_only:
                for left in (self.directory / TRASH, *self.directory.glob(UNFINISHED)):
                    shutil.rmtree(left, ignore_errors=True)


def _name_damaged(step: int | str, error: Exception) -> None:
    reason = (str(error).splitlines() or [''])[0]
    log.error('checkpoint %s is damaged (%s); trying the one before', step, reason)


def checksums(state: dict) -> dict[str, int]:
    """crc32 of every array by path, but for those that are spread over several processes."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path, simple=True, separator='/'): zlib.crc32(
            np.ascontiguousarray(leaf).tobytes()
        )
        for path, leaf in leaves
        if getattr(leaf, 'is_fully_addressable', True)  # numpy arrays lie here as a whole
    }


def _rank(metrics: dict[str, Any]) -> float:
    """Diverged runs rank last; NaN would rank best."""
    return math.inf if metrics['val_loss'] is None else metrics['val_loss']
