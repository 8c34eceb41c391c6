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

TRASH, UNFINISHED = 'trash', '*.orbax-checkpoint-tmp'
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
        steps = self.steps()
        for step in reversed(steps):
            try:
                found = self._manager.restore(
                    step,
                    args=ocp.args.Composite(
                        state=ocp.args.StandardRestore(target), record=ocp.args.JsonRestore()
                    ),
                )
            except Exception as error:  # orbax and tensorstore raise many kinds on damaged files
                log.error('checkpoint %d is damaged (%s); trying the one before', step, error)
                continue
            sums = checksums(found.state)
            damaged = [name for name, crc in sums.items() if found.record['crc32'][name] != crc]
            if not damaged:
                return found.state, found.record
            log.error(
                'checkpoint %d is damaged (checksum of %s); trying the one before', step, damaged[0]
            )
        if steps:
            raise CheckpointError(
                f'every checkpoint in {self.directory} (steps {steps}) is damaged; '
                'restore one from a copy or use another workdir'
            )
        return None

    def record(self) -> dict[str, Any] | None:
        """The JSON record of the newest checkpoint, without its state; None if there is none."""
        steps = self.steps()
        if not steps:
            return None
        return self._manager.restore(
            steps[-1], args=ocp.args.Composite(record=ocp.args.JsonRestore())
        ).record

    def discard_after(self, step: int) -> None:
        """Deletes the (damaged) steps beyond `step`, which training will write again."""
        for later in [s for s in self.steps() if s > step]:
            self._manager.delete(later)

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


def checksums(state: dict) -> dict[str, int]:
    """crc32 of every leaf by path, but for leaves that are spread over several processes."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path, simple=True, separator='/'): zlib.crc32(
            np.ascontiguousarray(leaf).tobytes()
        )
        for path, leaf in leaves
        if leaf.is_fully_addressable
    }


def _rank(metrics: dict[str, Any]) -> float:
    """Diverged runs rank last; NaN would rank best."""
    return math.inf if metrics['val_loss'] is None else metrics['val_loss']
