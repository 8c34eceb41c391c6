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
from orbax.checkpoint.checkpoint_managers import preservation_policy

from qkattn import __version__
from qkattn.config import DataConfig
from qkattn.config.paths import require_regular_tree
from qkattn.data.tokenizers.vocabulary import names_in
from qkattn.errors import CheckpointError, ReadError
from qkattn.jobs import agreement
from qkattn.storage import buckets
from qkattn.storage.files import (
    below,
    disk_errors,
    read_errors,
    read_whole,
    remove_tree,
    require_room,
    require_same,
)
from qkattn.storage.records import check, parse_file, parse_json, remove_checksum, with_checksum

T = TypeVar('T')
FORMAT = 2
SUMS = 'checksums'
TRASH = 'trash'
UNFINISHED = '*.orbax-checkpoint-tmp'
SET_ASIDE = '.damaged'
COMMITTED = 'commit_success.txt'  # the last object of a checkpoint in a bucket; no renaming there

log = logging.getLogger(__name__)
# Orbax warns of every directory that it is asked to read only.
logging.getLogger('absl').addFilter(lambda record: 'directory is read only' not in str(record.msg))


class Checkpoints:
    """The newest `keep` checkpoints of a run.

    `save` returns when the state is copied; a step exists once it is complete on disk. Training has
    waited for `stall_seconds`, over all starts.
    """

    def __init__(self, directory: Path, *, keep: int = 2, read_only: bool = False):
        """Opens `directory` (absolute); unless read only, clears its trash and unfinished saves."""
        self.directory = directory
        self.stall_seconds = 0.0
        self._read_only = read_only
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.LatestN(keep),
            todelete_subdir=None if read_only else TRASH,
            save_interval_steps=0 if read_only else 1,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
            enable_async_checkpointing=True,
            read_only=read_only,
        )
        self._on_owner(self._tidy)
        with disk_errors(directory):
            self._manager = ocp.CheckpointManager(directory, options=options)
            watched = agreement.owner() and not read_only and not buckets.is_url(directory)
            self._status = directory.stat() if watched else None  # on a disk, of its writer

    def save(self, step: int, state: dict, record: dict[str, Any]) -> None:
        """Saves under `step`, unless that is there; DiskError if this or the last save failed."""
        if step in self._manager.all_steps():
            return
        about = {'checkpoint_seconds': self.stall_seconds, 'format': FORMAT, 'version': __version__}
        self.wait()
        # Checked before: orbax logs a traceback per leaf, and is slow to fail without a directory.
        size = 2**20 + sum(leaf.nbytes for leaf in jax.tree.leaves(state))  # and a MiB for the rest
        self._on_owner(lambda: require_room(self.directory, size))
        with self._waiting():
            sums = checksums(state)  # computed while the state is copied
            items = ocp.args.Composite(
                state=ocp.args.StandardSave({**state, SUMS: sums}),
                record=ocp.args.JsonSave(with_checksum({**record, **about})),
            )
            self._manager.save(step, args=items)

    def wait(self) -> None:
        """Waits for the last save, and deletes what it supersedes; raises as `save`."""
        with self._waiting():
            self._manager.wait_until_finished()
            if self._status is not None:
                self._empty_trash()

    def _empty_trash(self) -> None:
        for path in below(self.directory, TRASH).glob('*'):
            remove_tree(path)

    def _remove(self, pattern: str) -> None:
        for path in self.directory.glob(pattern):
            remove_tree(path)

    def restore(self, target: dict) -> tuple[dict, dict[str, Any]] | None:
        """The newest sound checkpoint as (state, record), placed like `target`; None if none.

        Of a target {} it reads the record alone. Raises CheckpointError where every checkpoint is
        damaged, or a later version wrote the newest one; ReadError where the system fails to read
        one, which is neither passed over nor changed.
        """
        return next(self.sound(target), None)

    def sound(self, target: dict) -> Iterator[tuple[dict, dict[str, Any]]]:
        """All sound checkpoints, the newest first; as `restore`."""
        num_sound = num_damaged = 0
        steps = self._on_owner(lambda: sorted(self._manager.all_steps(), reverse=True))
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
            if self._read_only and not (self.directory / str(step)).exists():
                continue  # its writer has superseded it
            num_damaged += 1
            _name_damaged(step, damage)
        aside = self._on_owner(lambda: any(self.directory.glob(f'*{SET_ASIDE}')))
        if not num_sound and (num_damaged or aside):
            raise CheckpointError(
                f'every checkpoint in {self.directory} is damaged; restore one from a copy or use '
                'another workdir'
            )

    def _record_of(self, step: int) -> tuple[dict[str, Any] | None, str | None]:
        """(record, None), or (None, what is wrong with it)."""
        path = self.directory / str(step) / 'record/metadata'
        try:
            with read_errors(path):
                record = parse_json(read_whole(path))
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
        """(state, None), or (state, what is wrong with it in any of the processes).

        ReadError in all of them where one fails to read it.
        """
        names = leaf_names(target)
        placed = jax.tree.leaves(target)[0].sharding
        sharding = placed and _replicated(placed)
        sums = jax.ShapeDtypeStruct((len(names),), 'uint32', sharding=sharding)
        state = {}
        failure = None
        path = epath.Path(self.directory / str(step) / 'state')
        try:
            # Not by the manager, which waits for all processes, also for one whose files are bad.
            args = ocp.args.StandardRestore({**target, SUMS: sums})
            with read_errors(path):
                if not buckets.is_url(path):
                    require_regular_tree(path)
                state = ocp.StandardCheckpointHandler().restore(path, args=args)
        except Exception as error:  # orbax and tensorstore raise many kinds on damaged files
            failure = isinstance(error, ReadError), str(error)
        failures = [failure] if self._read_only else agreement.from_all(failure)
        texts: dict[bool, str] = {}
        for rank, (unread, text) in [(r, f) for r, f in enumerate(failures) if f]:
            texts.setdefault(unread, f'process {rank}: {text}' if len(failures) > 1 else text)
        if True in texts:
            raise ReadError(texts[True])
        if texts:
            return state, texts[False]
        differ = np.asarray(state.pop(SUMS)) != np.asarray(checksums(state))
        return state, f'checksum of {names[differ.argmax()]}' if differ.any() else None

    def discard_after(self, step: int) -> None:
        """Deletes the (damaged) steps beyond `step`, which training will write again."""
        for later in self._on_owner(lambda: sorted(self._manager.all_steps())):
            if later > step:
                self._manager.delete(later)
        # A step has to be free in the trash when it is superseded a second time.
        self._on_owner(self._empty_trash)
        self._on_owner(lambda: self._remove(f'*{SET_ASIDE}'))

    def _on_owner(self, call: Callable[[], T]) -> T:
        """The result of `call` in process 0, for all processes; if read only, in this one."""
        return call() if self._read_only else agreement.on_owner(call)

    def _tidy(self) -> None:
        """Sets aside checkpoints with damaged descriptions: orbax would open no other either."""
        if not self._read_only:
            remove_tree(below(self.directory, TRASH))
        for path in self.directory.glob('[0-9]*'):
            if not path.name.isdecimal():
                continue
            if buckets.is_url(path) and not (path / COMMITTED).exists():
                if not self._read_only:
                    remove_tree(path)
                continue
            try:
                parse_file(path / '_CHECKPOINT_METADATA', {})
                if (path / 'metrics').exists():  # of an earlier version; orbax reads it as well
                    parse_file(path / 'metrics/metrics', {})
            except ValueError as error:
                if self._read_only and not path.exists():
                    continue  # its writer has superseded it
                if self._read_only:
                    raise CheckpointError(
                        f'{path} is damaged ({error}); run the training command again, which goes '
                        'on from the checkpoint before'
                    ) from error
                _name_damaged(path.name, error)
                remove_tree(aside := path.with_name(path.name + SET_ASIDE))
                path.rename(aside)

    def close(self) -> None:
        """Waits for the last save; removes it if it could not be finished, and raises as `save`."""
        try:
            self.wait()
        finally:
            with self._waiting():
                self._manager.close()
            if agreement.owner() and not self._read_only:
                self._remove(TRASH)
                self._remove(UNFINISHED)

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


def recorded_tokenizers(run: Path, data: DataConfig) -> list[str]:
    """Names of the tokenizers of the data that a run has trained on; [] before a checkpoint.

    Only vocabularies of files depend on them; [] for other tokenizers, without reading anything.
    """
    if not data.tokenizer.endswith('.json'):
        return []
    for checkpoint in sorted((run / 'checkpoints').glob('*')):
        with contextlib.suppress(ValueError):  # a damaged one is named where it is restored
            record = parse_file(checkpoint / 'record/metadata', {'data': dict})
            return names_in(record['data'])
    return []


def _name_damaged(step: int | str, damage: object) -> None:
    reason = str(damage).partition('\n')[0]
    log.error('checkpoint %s is damaged (%s); trying the one before', step, reason)


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
    position = jnp.zeros(bits.shape, jnp.uint32)
    stride = 1
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
