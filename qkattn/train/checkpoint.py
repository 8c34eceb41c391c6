"""Checkpoints that are whole or absent: orbax, plus the checksums that it does not keep.

checkpoints/N/state/   orbax: the arrays, and their `checksums`
checkpoints/N/record/  JSON: step, time and data of the run; format, version and crc32

The checksum of an array with the bit patterns b_0 ... b_(M-1), in row-major order, is
sum_i h(b_i xor h(i)) mod 2^32, h the finalizer of MurmurHash3, a permutation. It misses no change
of one element, and others with probability 2^-32. Integers add up exactly in any order: it does not
depend on mesh or processes.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from qkattn import __version__
from qkattn.errors import CheckpointError
from qkattn.jobs import agreement
from qkattn.storage import buckets
from qkattn.storage.files import disk_errors, remove_tree, require_room, require_same
from qkattn.storage.records import check, parse_json, remove_checksum, with_checksum

T = TypeVar('T')
FORMAT = 2
SUMS = 'checksums'
UNFINISHED = '.orbax-checkpoint-tmp'  # behind the name of what is being written or deleted
COMMITTED = 'commit_success.txt'  # the last object of a checkpoint in a bucket; no renaming there

log = logging.getLogger(__name__)


class Checkpoints:
    """The newest `keep` checkpoints of a run.

    `save` returns when the state is copied; a step exists once it is complete on disk. Training has
    waited for `stall_seconds`, over all starts.
    """

    def __init__(self, directory: Path, *, keep: int = 2, read_only: bool = False):
        """Opens `directory` (absolute); unless read only, removes what is not finished."""
        self.directory, self.stall_seconds, self._read_only = directory, 0.0, read_only
        self._keep, self._status = keep, None
        self._checkpointer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        with disk_errors(directory):
            self._on_owner(self._tidy)
            if agreement.owner() and not read_only and not buckets.is_url(directory):
                self._status = directory.stat()  # of the directory that this process writes

    def steps(self) -> list[int]:
        """The steps that are complete, the newest first; the same in all processes."""
        return self._on_owner(self._steps)

    def _steps(self) -> list[int]:
        paths = (path for path in self.directory.glob('[0-9]*') if path.name.isdecimal())
        complete = (p for p in paths if not buckets.is_url(p) or (p / COMMITTED).exists())
        return sorted((int(path.name) for path in complete), reverse=True)

    def save(self, step: int, state: dict, record: dict[str, Any]) -> None:
        """Saves under `step`, unless that is there; DiskError if this or the last save failed."""
        about = {'checkpoint_seconds': self.stall_seconds, 'format': FORMAT, 'version': __version__}
        self.wait()
        if step in self.steps():
            return
        # Checked before: orbax logs a traceback per leaf, and is slow to fail without a directory.
        size = 2**20 + sum(leaf.nbytes for leaf in jax.tree.leaves(state))  # and a MiB for the rest
        self._on_owner(lambda: require_room(self.directory, size))
        with self._waiting():
            sums = checksums(state)  # computed while the state is copied
            items = ocp.args.Composite(
                state=ocp.args.StandardSave({**state, SUMS: sums}),
                record=ocp.args.JsonSave(with_checksum({**record, **about})),
            )
            self._checkpointer.save(epath.Path(self.directory / str(step)), args=items)

    def wait(self) -> None:
        """Waits for the last save, and deletes what it supersedes; raises as `save`."""
        with self._waiting():
            self._checkpointer.wait_until_finished()
            superseded = self._steps()[self._keep :] if agreement.owner() else []
            for step in () if self._read_only else superseded:
                self._delete(step)

    def _delete(self, step: int) -> None:
        """Deletes a checkpoint; no part of it is left under its name."""
        path = self.directory / str(step)
        if buckets.is_url(path):
            (path / COMMITTED).unlink()
        else:
            path = path.rename(path.with_name(path.name + UNFINISHED))
        remove_tree(path)

    def restore(self, target: dict) -> tuple[dict, dict[str, Any]] | None:
        """The newest sound checkpoint as (state, record), placed like `target`; None if none.

        Of a target {} it reads the record alone. Raises CheckpointError where every checkpoint is
        damaged, or a later version wrote the newest one.
        """
        return next(self.sound(target), None)

    def sound(self, target: dict) -> Iterator[tuple[dict, dict[str, Any]]]:
        """All sound checkpoints, the newest first; as `restore`."""
        num_sound, steps = 0, self.steps()
        for step in steps:
            state: dict = {}
            record, damage = self._on_owner(functools.partial(self._record_of, step))
            if target and damage is None:
                state, damage = self._state_of(step, target)
            if damage is None:
                self.stall_seconds = record.get('checkpoint_seconds', 0.0)
                num_sound += 1
                yield state, record
                continue
            reason = str(damage).partition('\n')[0]
            log.error('checkpoint %s is damaged (%s); trying the one before', step, reason)
        if steps and not num_sound:
            raise CheckpointError(
                f'every checkpoint in {self.directory} is damaged; restore one from a copy or use '
                'another workdir'
            )

    def _record_of(self, step: int) -> tuple[dict[str, Any] | None, str | None]:
        """(record, None), or (None, what is wrong with it)."""
        path = self.directory / str(step) / 'record/metadata'
        try:
            record = parse_json(path.read_bytes())
            check(record, {'format': int, 'version': str})
            remove_checksum(record)
            if record['format'] > FORMAT:
                raise CheckpointError(
                    f'{path.parents[1]} has format {record["format"]} of qkattn '
                    f'{record["version"]}, but this is qkattn {__version__}, which reads format '
                    f'{FORMAT}; use qkattn {record["version"]} or later, or another workdir'
                )
            check(record, {'data': dict, 'train_seconds': float})
        except (OSError, ValueError) as error:
            return None, f'record/metadata: {error}'
        return record, None

    def _state_of(self, step: int, target: dict) -> tuple[dict, str | None]:
        """(state, None), or (state, what is wrong with it in any of the processes)."""
        names, placed = leaf_names(target), jax.tree.leaves(target)[0].sharding
        sharding = placed and _replicated(placed)
        sums = jax.ShapeDtypeStruct((len(names),), 'uint32', sharding=sharding)
        state, damage = {}, None
        try:
            # Not by the manager, which waits for all processes, also for one whose files are bad.
            path = epath.Path(self.directory / str(step) / 'state')
            args = ocp.args.StandardRestore({**target, SUMS: sums})
            state = ocp.StandardCheckpointHandler().restore(path, args=args)
        except Exception as error:  # orbax and tensorstore raise many kinds on damaged files
            damage = str(error)
        damages = [damage] if self._read_only else agreement.from_all(damage)
        for rank, damage in enumerate(damages):
            if damage is not None:
                return state, f'process {rank}: {damage}' if len(damages) > 1 else damage
        differ = np.asarray(state.pop(SUMS)) != np.asarray(checksums(state))
        return state, f'checksum of {names[differ.argmax()]}' if differ.any() else None

    def discard_after(self, step: int) -> None:
        """Deletes the (damaged) steps beyond `step`, which training will write again."""

        def discard() -> None:
            for later in self._steps():
                if later > step:
                    self._delete(later)

        self._on_owner(discard)

    def _on_owner(self, call: Callable[[], T]) -> T:
        """The result of `call` in process 0, for all processes; if read only, in this one."""
        return call() if self._read_only else agreement.on_owner(call)

    def _tidy(self) -> None:
        """Makes the directory, and removes what a killed process was writing or deleting."""
        if self._read_only:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        complete = {str(step) for step in self._steps()}
        for path in self.directory.glob('[0-9]*'):
            if UNFINISHED in path.name or (path.name.isdecimal() and path.name not in complete):
                remove_tree(path)

    def close(self) -> None:
        """Waits for the last save; removes it if it could not be finished, and raises as `save`."""
        try:
            self.wait()
        finally:
            with self._waiting():
                self._checkpointer.close()
            if agreement.owner() and not self._read_only:
                for path in self.directory.glob(f'*{UNFINISHED}*'):
                    remove_tree(path)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Times calls of orbax, which raise errors of any kind where the directory is gone."""
        start = time.perf_counter()
        with disk_errors(self.directory):
            try:
                yield
            except Exception:
                if self._status is not None:
                    require_same(self.directory, self._status)
                raise
            finally:
                self.stall_seconds += time.perf_counter() - start


def checksums(tree: Any) -> jax.Array:
    """Those of arrays on one mesh or device, uint32 [leaves], in the order of `leaf_names`."""
    leaves = jax.tree.leaves(tree)
    return _program(_replicated(leaves[0].sharding))(leaves)


def leaf_names(tree: Any) -> list[str]:
    """The paths of the leaves of a tree, as in 'trials/params/w_embedding_VD'."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator='/') for path, _ in leaves]


def _replicated(placed: Sharding) -> Sharding:
    return NamedSharding(placed.mesh, PartitionSpec()) if hasattr(placed, 'mesh') else placed


@functools.cache
def _program(placed: Sharding) -> Callable[[list[jax.Array]], jax.Array]:
    return jax.jit(lambda leaves: jnp.stack([checksum(a) for a in leaves]), out_shardings=placed)


def checksum(a: jax.Array) -> jax.Array:
    """The checksum of one array, uint32 []."""
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a = jax.random.key_data(a)
    bits = a.view(f'uint{8 * min(a.dtype.itemsize, 4)}').astype(jnp.uint32)
    position, stride = jnp.zeros(bits.shape, jnp.uint32), 1
    for axis in reversed(range(bits.ndim)):
        along = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        position += along * np.uint32(stride % 2**32)
        stride *= bits.shape[axis]
    return _mixed(bits ^ _mixed(position)).sum(dtype=jnp.uint32)


def _mixed(h: jax.Array) -> jax.Array:
    """The finalizer of MurmurHash3 (Appleby 2011)."""
    h ^= h >> 16
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> 13
    h *= np.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
