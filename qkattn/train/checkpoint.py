"""Checkpoints of a run, written by orbax, with checksums of the arrays.

checkpoints/N/state/   orbax: the arrays of step N, and their `checksums`
checkpoints/N/record/  JSON: time, data and config hash of the run; format, version and crc32

A checksum detects every change of one element, and misses any other change with probability 2^-32.
It does not depend on the mesh or the number of processes, because sums of integers are exact in any
order.
"""

import contextlib
import functools
import logging
import os
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
    disk_errors,
    join_without_links,
    read_errors,
    read_whole,
    remove_tree,
    require_room,
    require_same,
)
from qkattn.storage.records import check, parse_file, parse_json, remove_checksum, with_checksum

T = TypeVar('T')

# The format of the checkpoints that this version writes. It also reads all earlier formats.
FORMAT = 2
# The entry of a stored state that holds the checksums of its arrays.
CHECKSUMS = 'checksums'
# The subdirectory to which orbax moves checkpoints before it deletes them.
TRASH = 'trash'
# Directories of incomplete saves.
UNFINISHED = '*.orbax-checkpoint-tmp'
# The suffix of a checkpoint that orbax cannot open, as in 8.damaged.
SET_ASIDE = '.damaged'
# In a bucket, orbax writes this object when a checkpoint is complete.
COMMITTED = 'commit_success.txt'
# The largest size of a checkpoint without its arrays, in bytes.
_SIZE_OF_RECORD = 2**20

log = logging.getLogger(__name__)
# Orbax warns of every directory that it opens with read_only=True.
logging.getLogger('absl').addFilter(lambda record: 'directory is read only' not in str(record.msg))


class Checkpoints:
    """The newest `keep` checkpoints of a run, saved in the background.

    Attributes:
        directory: The directory of the checkpoints.
        stall_seconds: How long training has waited for checkpoints, over all starts of the run.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 2,
        read_only: bool = False,
        config_hash: str | None = None,
    ):
        """Opens a directory of checkpoints.

        Args:
            directory: An absolute path.
            keep: The number of newest checkpoints to keep.
            read_only: If True, nothing is written or deleted. If False, opening deletes replaced
                checkpoints and incomplete saves.
            config_hash: The hash of the run's settings, stored with each checkpoint. Reading a
                checkpoint with another hash raises an error. None skips this check.
        """
        self.directory = directory
        self.stall_seconds = 0.0
        self._read_only = read_only
        self._config_hash = config_hash
        # With read_only, orbax warns of every other option that would write.
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.LatestN(keep),
            todelete_subdir=None if read_only else TRASH,
            save_interval_steps=0 if read_only else 1,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
            enable_async_checkpointing=True,
            read_only=read_only,
        )
        self._call_in_process_0(self._tidy)  # deletes or renames what orbax cannot open
        # Set where this object writes to a disk, to notice if the directory is replaced.
        self._directory_stat: os.stat_result | None = None
        with disk_errors(directory):
            self._manager = ocp.CheckpointManager(directory, options=options)
            if agreement.is_process_0() and not read_only and not buckets.is_url(directory):
                self._directory_stat = directory.stat()

    def save(self, step: int, state: dict, record: dict[str, Any]) -> None:
        """Saves a checkpoint in the background; does nothing if `step` is saved already.

        Args:
            step: The number of completed steps.
            state: The arrays, a nested dict.
            record: JSON to store with the arrays.

        Raises:
            DiskError: This save or the previous one failed.
        """
        if step in self._manager.all_steps():
            return
        stored_record = {
            **record,
            'checkpoint_seconds': self.stall_seconds,
            'format': FORMAT,
            'version': __version__,
        }
        if self._config_hash is not None:
            stored_record['config_hash'] = self._config_hash
        self.wait()  # the previous save may still be writing

        # Check the disk first: orbax fails slowly, with a traceback for every array.
        num_bytes = _SIZE_OF_RECORD + sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        self._call_in_process_0(lambda: require_room(self.directory, num_bytes))

        with self._count_stall_seconds():
            array_checksums = checksums(state)
            items = ocp.args.Composite(
                state=ocp.args.StandardSave({**state, CHECKSUMS: array_checksums}),
                record=ocp.args.JsonSave(with_checksum(stored_record)),
            )
            self._manager.save(step, args=items)

    def wait(self) -> None:
        """Waits for the last save and deletes the checkpoints that it replaces.

        Raises:
            DiskError: The last save failed.
        """
        with self._count_stall_seconds():
            self._manager.wait_until_finished()
            writes_to_disk = self._directory_stat is not None
            if writes_to_disk:
                # Orbax moves replaced checkpoints to this directory.
                _remove_all(join_without_links(self.directory, TRASH), '*')

    def restore(self, target: dict) -> tuple[dict, dict[str, Any]] | None:
        """Reads the newest checkpoint that is not damaged.

        Args:
            target: The shapes, dtypes and shardings of the state to read. {} reads only the record.

        Returns:
            (state, record) as passed to `save`; None if there is no checkpoint.

        Raises:
            CheckpointError: Every checkpoint is damaged, or the newest one was written by a later
                version or by a run with other settings.
            ReadError: The system failed to read a checkpoint, which may be undamaged.
        """
        return next(self.read_undamaged(target), None)

    def read_undamaged(self, target: dict) -> Iterator[tuple[dict, dict[str, Any]]]:
        """Yields (state, record) of each undamaged checkpoint, newest first.

        Logs and skips damaged checkpoints. `target` and errors are as in `restore`.
        """
        num_undamaged = 0
        num_damaged = 0
        steps = self._call_in_process_0(lambda: sorted(self._manager.all_steps(), reverse=True))
        for step in steps:
            state: dict = {}
            # `damage` is a message; None if the checkpoint is undamaged.
            record, damage = self._call_in_process_0(functools.partial(self._read_record, step))
            if target and damage is None:
                state, damage = self._read_state(step, target)

            if damage is None:
                self.stall_seconds = record.get('checkpoint_seconds', 0.0)
                num_undamaged += 1
                yield state, record
                continue
            # A run that is still training may have replaced this checkpoint meanwhile.
            is_replaced = self._read_only and not (self.directory / str(step)).exists()
            if not is_replaced:
                num_damaged += 1
                _log_damage(step, damage)

        # Damaged checkpoints that were renamed, such as 8.damaged, are not in `steps`.
        is_any_renamed = self._call_in_process_0(lambda: any(self.directory.glob(f'*{SET_ASIDE}')))
        if num_undamaged == 0 and (num_damaged > 0 or is_any_renamed):
            raise CheckpointError(
                f'every checkpoint in {self.directory} is damaged; restore one from a copy or use '
                'another workdir'
            )

    def _read_record(self, step: int) -> tuple[dict[str, Any] | None, str | None]:
        """Reads the record of a checkpoint.

        Returns:
            (record, None), or (None, message) if the record is damaged.

        Raises:
            CheckpointError: The record is from a later version or a run with other settings.
        """
        checkpoint = self.directory / str(step)
        path = checkpoint / 'record/metadata'
        try:
            with read_errors(path):
                record = parse_json(read_whole(path))
            check(record, {'format': int, 'version': str})
            remove_checksum(record)  # raises ValueError if it does not match the record
            if record['format'] <= FORMAT:  # a later format may lack these fields
                check(record, {'data': dict, 'train_seconds': float})
        except (OSError, ValueError) as error:
            return None, f'record/metadata: {error}'
        self._require_of_this_run(checkpoint, record)
        return record, None

    def _require_of_this_run(self, checkpoint: Path, record: dict[str, Any]) -> None:
        """Raises CheckpointError if a later version, or a run with other settings, wrote `record`.

        `checkpoint` is the path of the checkpoint.
        """
        if record['format'] > FORMAT:
            raise CheckpointError(
                f'{checkpoint} has format {record["format"]} of qkattn {record["version"]}, but '
                f'this is qkattn {__version__}, which reads format {FORMAT}; use qkattn '
                f'{record["version"]} or later, or another workdir'
            )
        if self._config_hash is None or 'config_hash' not in record:
            return  # earlier versions stored no hash
        stored_hash = record['config_hash']
        if stored_hash != self._config_hash:
            raise CheckpointError(
                f'{checkpoint} is of a run with another configuration (config_hash '
                f'{stored_hash!r}, not {self._config_hash!r}); restore the checkpoints of this run '
                'from a copy, or use another workdir'
            )

    def _read_state(self, step: int, target: dict) -> tuple[dict, str | None]:
        """Reads the state of a checkpoint and compares its checksums.

        All processes of a job get the same message, or all raise the same error.

        Returns:
            (state, None), or (state, message) if the checkpoint is damaged.

        Raises:
            ReadError: The system failed to read the checkpoint in one of the processes.
        """
        state, error = self._read_arrays(step, target)
        damage = self._error_in_any_process(error)
        if damage is not None:
            return state, damage

        stored_checksums = np.asarray(state.pop(CHECKSUMS))
        is_different = stored_checksums != np.asarray(checksums(state))
        if is_different.any():
            index_of_first = is_different.argmax()
            return state, f'checksum of {leaf_names(target)[index_of_first]}'
        return state, None

    def _error_in_any_process(self, error: Exception | None) -> str | None:
        """Returns the message of the first error in any process, such as 'process 1: ...'.

        Returns None if no process has an error. With `read_only`, only this process counts.

        Args:
            error: The error of this process in reading a checkpoint; None if it has none.

        Raises:
            ReadError: One of the errors is a ReadError.
        """
        own_report = {
            'message': None if error is None else str(error),
            'is_read_error': isinstance(error, ReadError),
        }
        reports = [own_report] if self._read_only else agreement.gather_from_processes(own_report)
        first_message: str | None = None
        for rank, report in enumerate(reports):
            message = report['message']
            if message is None:
                continue
            if len(reports) > 1:
                message = f'process {rank}: {message}'
            if report['is_read_error']:
                raise ReadError(message)
            if first_message is None:
                first_message = message
        return first_message

    def _read_arrays(self, step: int, target: dict) -> tuple[dict, Exception | None]:
        """Reads the arrays of a checkpoint and their stored checksums, the entry CHECKSUMS.

        The arrays get the shardings of `target`.

        Returns:
            (arrays, None), or ({}, error) if reading fails.
        """
        leaves = jax.tree.leaves(target)
        array_checksums = jax.ShapeDtypeStruct(
            shape=(len(leaves),), dtype='uint32', sharding=_replicated(leaves[0].sharding)
        )
        path = epath.Path(self.directory / str(step) / 'state')
        # Orbax's CheckpointManager would wait for all processes, even for one that has failed.
        try:
            args = ocp.args.StandardRestore({**target, CHECKSUMS: array_checksums})
            with read_errors(path):
                if not buckets.is_url(path):
                    require_regular_tree(path)
                return ocp.StandardCheckpointHandler().restore(path, args=args), None
        except Exception as error:  # orbax and tensorstore raise many types for damaged files
            return {}, error

    def discard_after(self, step: int) -> None:
        """Deletes the checkpoints after `step`, and all damaged ones that opening has renamed."""
        steps = self._call_in_process_0(lambda: sorted(self._manager.all_steps()))
        for saved_step in steps:
            if saved_step > step:
                self._manager.delete(saved_step)

        def remove_leftovers() -> None:
            # Orbax has moved checkpoint 8, for example, to trash/8. If step 8 is saved again, orbax
            # can delete it only if trash/8 is gone.
            _remove_all(join_without_links(self.directory, TRASH), '*')
            _remove_all(self.directory, f'*{SET_ASIDE}')  # such as 8.damaged

        self._call_in_process_0(remove_leftovers)

    def _call_in_process_0(self, call: Callable[[], T]) -> T:
        """Returns the result of `call` in process 0; with `read_only`, calls it in each process."""
        return call() if self._read_only else agreement.call_in_process_0(call)

    def _tidy(self) -> None:
        """Deletes or renames what keeps orbax from opening the directory.

        Deletes the trash and, in a bucket, incomplete checkpoints. Renames checkpoints with damaged
        metadata. With `read_only`, nothing changes.

        Raises:
            CheckpointError: Metadata are damaged, and the checkpoints are read only.
        """
        if not self._read_only:
            remove_tree(join_without_links(self.directory, TRASH))
        for path in self.directory.glob('[0-9]*'):
            if not path.name.isdecimal():
                continue  # such as 8.damaged
            # In a bucket, orbax writes the object COMMITTED last.
            is_incomplete = buckets.is_url(path) and not (path / COMMITTED).exists()
            if is_incomplete:
                if not self._read_only:
                    remove_tree(path)
                continue
            error = _error_in_metadata(path)
            if error is not None:
                self._set_aside(path, error)

    def _set_aside(self, path: Path, error: ValueError) -> None:
        """Renames a checkpoint with damaged metadata, for example 8 to 8.damaged.

        Raises:
            CheckpointError: The checkpoints are read only, so nothing can be renamed.
        """
        if not self._read_only:
            _log_damage(path.name, error)
            renamed = path.with_name(path.name + SET_ASIDE)
            remove_tree(renamed)
            path.rename(renamed)
        elif path.exists():  # the run may have deleted it meanwhile
            raise CheckpointError(
                f'{path} is damaged ({error}); move it away, or, if the run is not finished, run '
                'the training command again, which goes on from the checkpoint before'
            ) from error

    def close(self) -> None:
        """Waits for the last save, closes the manager, and deletes replaced checkpoints.

        Raises:
            DiskError: The last save failed.
        """
        try:
            self.wait()
        finally:
            with self._count_stall_seconds():
                self._manager.close()
            if agreement.is_process_0() and not self._read_only:
                _remove_all(self.directory, TRASH)
                _remove_all(self.directory, UNFINISHED)

    @contextlib.contextmanager
    def _count_stall_seconds(self) -> Iterator[None]:
        """Adds the seconds of a `with` block to `stall_seconds`.

        Raises:
            DiskError: The block failed because the directory is gone or was replaced.
        """
        start = time.perf_counter()
        with disk_errors(self.directory):
            try:
                yield
            except Exception:
                if self._directory_stat is not None:
                    # Raises DiskError if another directory has taken the place of this one.
                    require_same(self.directory, self._directory_stat)
                raise
            finally:
                self.stall_seconds += time.perf_counter() - start


def recorded_tokenizers(run: Path, data: DataConfig) -> list[str]:
    """Returns the tokenizer names that a run's checkpoints record, if it uses a tokenizer.json.

    Returns [] for other tokenizers, and if no checkpoint can be read.
    """
    # A tokenizer.json can be opened with either of two separators. The name tells which.
    if not data.tokenizer.endswith('.json'):
        return []
    for checkpoint in sorted((run / 'checkpoints').glob('*')):
        try:
            record = parse_file(checkpoint / 'record/metadata', {'data': dict})
        except ValueError:
            continue  # a damaged record is reported when the checkpoint is restored
        return names_in(record['data'])
    return []


def _error_in_metadata(checkpoint: Path) -> ValueError | None:
    """Returns the error of parsing orbax's metadata of a checkpoint; None if they are valid."""
    try:
        parse_file(checkpoint / '_CHECKPOINT_METADATA', {})
        # Only earlier versions wrote this file, but orbax still reads it.
        if (checkpoint / 'metrics').exists():
            parse_file(checkpoint / 'metrics/metrics', {})
    except ValueError as error:
        return error
    return None


def _remove_all(directory: Path, pattern: str) -> None:
    """Deletes the entries of a directory whose name matches a pattern such as '*.damaged'."""
    for path in directory.glob(pattern):
        remove_tree(path)


def _log_damage(step: int | str, damage: object) -> None:
    """Logs that a checkpoint is damaged, with the first line of the message `damage`."""
    first_line = str(damage).partition('\n')[0]
    log.error('checkpoint %s is damaged (%s); trying the one before', step, first_line)


def checksums(tree: Any) -> jax.Array:
    """Computes the `checksum` of each leaf, uint32 [leaves], in the order of `leaf_names`.

    All leaves must be on the same mesh or device. The result is replicated.
    """
    leaves = jax.tree.leaves(tree)
    return _checksum_program(_replicated(leaves[0].sharding))(leaves)


def leaf_names(tree: Any) -> list[str]:
    """Returns the path of each leaf of a pytree, such as 'trials/params/w_embedding_VD'."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator='/') for path, _ in leaves]


def _replicated(sharding: Sharding | None) -> Sharding | None:
    """Returns the replicated sharding on the same mesh; `sharding` itself if it has no mesh."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding


@functools.cache
def _checksum_program(sharding: Sharding | None) -> Callable[[list[jax.Array]], jax.Array]:
    """Returns a jitted function that computes the checksums of arrays, with this sharding."""

    def stacked_checksums(arrays: list[jax.Array]) -> jax.Array:
        return jnp.stack([checksum(array) for array in arrays])

    return jax.jit(stacked_checksums, out_shardings=sharding)


def checksum(array: jax.Array) -> jax.Array:
    """Computes a checksum of the bits of an array, uint32 [].

    It is the sum of hash(bits ^ hash(position)) over all elements, modulo 2^32. An element of 8
    bytes counts as two elements. The checksum does not depend on the sharding.
    """
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    num_bits = 8 * min(array.dtype.itemsize, 4)  # an element of 8 bytes is split into two
    bits = array.view(f'uint{num_bits}').astype(jnp.uint32)
    # The row-major position of each element: [[0, 1, 2], [3, 4, 5]] for shape [2, 3].
    position = jnp.zeros(bits.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(bits.ndim)):
        index_in_axis = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        position += index_in_axis * np.uint32(stride % 2**32)
        stride *= bits.shape[axis]
    return _hash(bits ^ _hash(position)).sum(dtype=jnp.uint32)


def _hash(h: jax.Array) -> jax.Array:
    """Permutes the 32-bit integers: the finalizer of MurmurHash3 (Appleby 2011)."""
    h ^= h >> 16
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> 13
    h *= np.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
