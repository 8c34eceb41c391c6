"""Checkpoints of a run. Orbax writes them; this module adds checksums of the arrays.

checkpoints/N/state/   orbax: the arrays, and their `checksums`
checkpoints/N/record/  JSON: time, data and config hash of the run; format, version and crc32

The checksum of an array with the bit patterns b_0 ... b_(M-1), in row-major order, is
sum_i h(b_i xor h(i)) mod 2^32. Here h is the finalizer of MurmurHash3, a permutation. The checksum
detects every change of one element, and misses any other change with probability 2^-32. A sum of
integers is exact in any order, so the checksum does not depend on the mesh or the processes.
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
# The directory beside the checkpoints into which orbax moves checkpoints before it deletes them.
TRASH = 'trash'
# Directories of saves that were not completed.
UNFINISHED = '*.orbax-checkpoint-tmp'
# The end of the name of a checkpoint that orbax cannot open, as in 8.damaged; see `_tidy`.
SET_ASIDE = '.damaged'
# The object that orbax writes last to a bucket, where it cannot rename a finished checkpoint.
COMMITTED = 'commit_success.txt'
# The most bytes that a checkpoint has besides its arrays.
_SIZE_OF_RECORD = 2**20

log = logging.getLogger(__name__)
# Orbax warns of every directory that it opens with read_only=True.
logging.getLogger('absl').addFilter(lambda record: 'directory is read only' not in str(record.msg))


class Checkpoints:
    """The newest `keep` checkpoints of a run.

    `save` returns when the state is copied, and writes it in the background. A checkpoint is listed
    only once it is complete on disk. `stall_seconds` is the time for which training has waited for
    checkpoints, over all starts of the run.
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
          directory: an absolute path.
          keep: how many of the newest checkpoints stay.
          read_only: if True, nothing is written or deleted. If False, opening deletes the trash,
            which holds replaced checkpoints, and saves that were not completed.
          config_hash: the hash of the run's settings. It is stored with each checkpoint. Reading a
            checkpoint with another hash raises an error. With None, hashes are not compared.
        """
        self.directory = directory
        self.stall_seconds = 0.0
        self._read_only = read_only
        self._config_hash = config_hash
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.LatestN(keep),
            todelete_subdir=None if read_only else TRASH,
            save_interval_steps=0 if read_only else 1,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
            enable_async_checkpointing=True,
            read_only=read_only,
        )
        self._call_in_process_0(self._tidy)
        # The identity of the directory (its device and inode), known in process 0 on a disk. It
        # shows later whether another directory has taken the place of this one.
        self._status: os.stat_result | None = None
        with disk_errors(directory):
            self._manager = ocp.CheckpointManager(directory, options=options)
            if agreement.is_process_0() and not read_only and not buckets.is_url(directory):
                self._status = directory.stat()

    def save(self, step: int, state: dict, record: dict[str, Any]) -> None:
        """Saves the state of a step with its record, unless that step is saved already.

        The record is JSON: what a resumed run needs besides the arrays. Files are written in the
        background, so an error may come one save late. Raises DiskError if this save or the one
        before failed.
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
        self.wait()  # the save before may still be writing

        # On a full disk, orbax would log a traceback for every array. Without a directory, it would
        # take long to fail. So space and directory are checked first.
        num_bytes = _SIZE_OF_RECORD + sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        self._call_in_process_0(lambda: require_room(self.directory, num_bytes))

        with self._count_stall_seconds():
            array_checksums = checksums(state)  # JAX computes them while orbax copies the state
            items = ocp.args.Composite(
                state=ocp.args.StandardSave({**state, CHECKSUMS: array_checksums}),
                record=ocp.args.JsonSave(with_checksum(stored_record)),
            )
            self._manager.save(step, args=items)

    def wait(self) -> None:
        """Waits for the last save and deletes the checkpoints that it replaces; see `save`."""
        with self._count_stall_seconds():
            self._manager.wait_until_finished()
            if self._status is not None:
                _remove_all(join_without_links(self.directory, TRASH), '*')

    def restore(self, target: dict) -> tuple[dict, dict[str, Any]] | None:
        """Reads the newest checkpoint that is not damaged; None if there is no checkpoint.

        Returns (state, record): the arrays, and the JSON that `save` stored with them. The state is
        placed on devices like `target`. If that is {}, only the record is read.

        Raises:
          CheckpointError: every checkpoint is damaged, or the newest one was written by a later
            version or by a run with other settings.
          ReadError: the system fails to read a checkpoint. It may be sound, so it is not skipped.
        """
        return next(self.read_undamaged(target), None)

    def read_undamaged(self, target: dict) -> Iterator[tuple[dict, dict[str, Any]]]:
        """Yields (state, record) of each checkpoint that is not damaged, the newest first.

        A damaged checkpoint is logged and skipped. If all are damaged, CheckpointError is raised at
        the end. `target` and the other errors are as in `restore`.
        """
        num_undamaged = 0
        num_damaged = 0
        steps = self._call_in_process_0(lambda: sorted(self._manager.all_steps(), reverse=True))
        for step in steps:
            # `damage` says what is damaged. It is None if nothing is.
            state: dict = {}
            record, damage = self._call_in_process_0(functools.partial(self._read_record, step))
            if target and damage is None:
                state, damage = self._read_state(step, target)

            if damage is None:
                self.stall_seconds = record.get('checkpoint_seconds', 0.0)
                num_undamaged += 1
                yield state, record
            elif self._read_only and not (self.directory / str(step)).exists():
                # The run that is read goes on. It has saved a newer checkpoint, and deleted this
                # one in the meantime.
                pass
            else:
                num_damaged += 1
                _log_damage(step, damage)

        # `_tidy` has renamed checkpoints that orbax cannot open. They count as damaged, too.
        is_any_set_aside = self._call_in_process_0(
            lambda: any(self.directory.glob(f'*{SET_ASIDE}'))
        )
        if num_undamaged == 0 and (num_damaged > 0 or is_any_set_aside):
            raise CheckpointError(
                f'every checkpoint in {self.directory} is damaged; restore one from a copy or use '
                'another workdir'
            )

    def _read_record(self, step: int) -> tuple[dict[str, Any] | None, str | None]:
        """Reads the record of a checkpoint: (record, None), or (None, what is damaged).

        Raises CheckpointError if a later version or a run with other settings wrote it.
        """
        checkpoint = self.directory / str(step)
        path = checkpoint / 'record/metadata'
        try:
            with read_errors(path):
                record = parse_json(read_whole(path))
            check(record, {'format': int, 'version': str})  # fields that every format has
            remove_checksum(record)
            # A later format may have other fields. `_require_of_this_run` raises an error for it.
            if record['format'] <= FORMAT:
                check(record, {'data': dict, 'train_seconds': float})
        except (OSError, ValueError) as error:
            return None, f'record/metadata: {error}'
        self._require_of_this_run(checkpoint, record)
        return record, None

    def _require_of_this_run(self, checkpoint: Path, record: dict[str, Any]) -> None:
        """Raises CheckpointError if a later version, or a run with other settings, wrote `record`.

        `checkpoint` is the directory of the checkpoint, for the message.
        """
        if record['format'] > FORMAT:
            raise CheckpointError(
                f'{checkpoint} has format {record["format"]} of qkattn {record["version"]}, but '
                f'this is qkattn {__version__}, which reads format {FORMAT}; use qkattn '
                f'{record["version"]} or later, or another workdir'
            )
        # Earlier versions stored no hash. Their checkpoints count as those of this run.
        stored_hash = record.get('config_hash', self._config_hash)
        if self._config_hash is not None and stored_hash != self._config_hash:
            raise CheckpointError(
                f'{checkpoint} is of a run with another configuration (config_hash '
                f'{stored_hash!r}, not {self._config_hash!r}); restore the checkpoints of this run '
                'from a copy, or use another workdir'
            )

    def _read_state(self, step: int, target: dict) -> tuple[dict, str | None]:
        """Reads the state of a checkpoint: (state, None), or (state, what is damaged).

        The processes of a job agree: if a checkpoint is damaged in one, it is damaged in all. If
        the system fails to read it in one process, all raise ReadError.
        """
        state, error = self._read_arrays(step, target)
        damage = self._error_in_any_process(error)
        if damage is not None:
            return state, damage

        # Compare the stored checksums with those of the arrays that were read.
        stored_checksums = np.asarray(state.pop(CHECKSUMS))
        is_different = stored_checksums != np.asarray(checksums(state))
        if is_different.any():
            first = is_different.argmax()
            return state, f'checksum of {leaf_names(target)[first]}'
        return state, None

    def _error_in_any_process(self, error: Exception | None) -> str | None:
        """Returns the text of the first error in reading a checkpoint; None if there is none.

        Each process of a job passes its own error or None, and all get the same answer, such as
        'process 1: ...'. If the checkpoints are read only, a process asks only itself.

        Raises ReadError if one of the errors is a ReadError.
        """
        answer = {
            'error': None if error is None else str(error),
            'is_unread': isinstance(error, ReadError),
        }
        answers = [answer] if self._read_only else agreement.gather_from_processes(answer)
        first_error: str | None = None
        for rank, answer in enumerate(answers):
            text = answer['error']
            if text is None:
                continue
            if len(answers) > 1:
                text = f'process {rank}: {text}'
            if answer['is_unread']:
                raise ReadError(text)
            if first_error is None:
                first_error = text
        return first_error

    def _read_arrays(self, step: int, target: dict) -> tuple[dict, Exception | None]:
        """Reads the arrays of a checkpoint: (arrays, None), or ({}, the error).

        The arrays are placed like those of `target`. With them come their stored checksums, as the
        entry CHECKSUMS.
        """
        leaves = jax.tree.leaves(target)
        # One checksum for each leaf, with a copy of all of them on every device.
        array_checksums = jax.ShapeDtypeStruct(
            (len(leaves),), 'uint32', sharding=_replicated(leaves[0].sharding)
        )
        path = epath.Path(self.directory / str(step) / 'state')
        # Orbax's CheckpointManager is not used here: it would wait for all processes, even for one
        # that fails on damaged files.
        try:
            args = ocp.args.StandardRestore({**target, CHECKSUMS: array_checksums})
            with read_errors(path):
                if not buckets.is_url(path):
                    require_regular_tree(path)
                return ocp.StandardCheckpointHandler().restore(path, args=args), None
        except Exception as error:  # orbax and tensorstore raise many types for damaged files
            return {}, error

    def discard_after(self, step: int) -> None:
        """Deletes the checkpoints after `step`, and those that `_tidy` has renamed.

        A run that has resumed at `step` calls this. It has skipped the checkpoints after `step`,
        because they are damaged. Training reaches their steps again and saves them again.
        """
        steps = self._call_in_process_0(lambda: sorted(self._manager.all_steps()))
        for later_step in steps:
            if later_step > step:
                self._manager.delete(later_step)

        def remove_damaged() -> None:
            # `delete` has moved checkpoint 8, for example, to trash/8. Training will save step 8
            # again. When orbax deletes that one, it fails if there is still a trash/8.
            _remove_all(join_without_links(self.directory, TRASH), '*')
            _remove_all(self.directory, f'*{SET_ASIDE}')

        self._call_in_process_0(remove_damaged)

    def _call_in_process_0(self, call: Callable[[], T]) -> T:
        """Calls `call` in process 0, and returns its result in all processes.

        If the checkpoints are read only, every process calls it for itself.
        """
        return call() if self._read_only else agreement.call_in_process_0(call)

    def _tidy(self) -> None:
        """Prepares the directory, so that orbax can open it.

        A checkpoint whose description is damaged is renamed, as 8 to 8.damaged: with it in the
        directory, orbax could not open any other checkpoint. The trash is deleted, and so are
        checkpoints in a bucket that were not completed.

        If the checkpoints are read only, nothing changes, and a damaged description raises
        CheckpointError.
        """
        if not self._read_only:
            remove_tree(join_without_links(self.directory, TRASH))
        for path in self.directory.glob('[0-9]*'):
            if not path.name.isdecimal():
                continue  # such as 8.damaged
            is_incomplete = buckets.is_url(path) and not (path / COMMITTED).exists()
            if is_incomplete:
                if not self._read_only:
                    remove_tree(path)
                continue
            error = _error_in_description(path)
            if error is not None:
                self._set_aside(path, error)

    def _set_aside(self, path: Path, error: ValueError) -> None:
        """Renames a checkpoint with a damaged description, as 8 to 8.damaged.

        Raises CheckpointError instead if the checkpoints are read only.
        """
        if not self._read_only:
            _log_damage(path.name, error)
            renamed = path.with_name(path.name + SET_ASIDE)
            remove_tree(renamed)
            path.rename(renamed)
        elif path.exists():  # otherwise the run has deleted it in the meantime
            raise CheckpointError(
                f'{path} is damaged ({error}); run the training command again, which goes '
                'on from the checkpoint before'
            ) from error

    def close(self) -> None:
        """Waits for the last save, and closes the directory.

        Deletes the trash, which holds replaced checkpoints, and the files of a save that failed.
        Raises DiskError if the last save failed.
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
        """Adds the seconds of a `with` block, in which orbax is called, to `stall_seconds`.

        Orbax raises errors of many types. If the directory is gone, or another one has taken its
        place, the block raises DiskError instead of them.
        """
        start = time.perf_counter()
        with disk_errors(self.directory):
            try:
                yield
            except Exception:
                # `require_same` raises DiskError if this is no longer the directory of `__init__`.
                if self._status is not None:
                    require_same(self.directory, self._status)
                raise
            finally:
                self.stall_seconds += time.perf_counter() - start


def recorded_tokenizers(run: Path, data: DataConfig) -> list[str]:
    """Returns the names of a run's tokenizers, which its checkpoints record; [] without any.

    A resumed run passes them to `use_recorded_tokenizers`, because one tokenizer.json can give two
    tokenizers, and the name tells which one the run has. For any other tokenizer this returns []
    and reads nothing.
    """
    if not data.tokenizer.endswith('.json'):
        return []
    for checkpoint in sorted((run / 'checkpoints').glob('*')):
        try:
            record = parse_file(checkpoint / 'record/metadata', {'data': dict})
        except ValueError:
            continue  # the record is damaged, as restoring the checkpoint will report
        return names_in(record['data'])
    return []


def _error_in_description(checkpoint: Path) -> ValueError | None:
    """Returns the error of parsing orbax's description of a checkpoint; None if it is valid."""
    try:
        parse_file(checkpoint / '_CHECKPOINT_METADATA', {})
        # Earlier versions wrote this file, which orbax also reads.
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
    """Logs that a checkpoint is damaged, with the first line of what is damaged."""
    first_line = str(damage).partition('\n')[0]
    log.error('checkpoint %s is damaged (%s); trying the one before', step, first_line)


def checksums(tree: Any) -> jax.Array:
    """Computes the `checksum` of each leaf, uint32 [leaves], in the order of `leaf_names`.

    All leaves are on one mesh or one device. Each device gets a copy of the result.
    """
    leaves = jax.tree.leaves(tree)
    return _checksum_program(_replicated(leaves[0].sharding))(leaves)


def leaf_names(tree: Any) -> list[str]:
    """Returns the paths of the leaves of a tree, such as 'trials/params/w_embedding_VD'."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator='/') for path, _ in leaves]


def _replicated(sharding: Sharding | None) -> Sharding | None:
    """Returns the sharding that places a copy on each device of the mesh of `sharding`.

    Returns `sharding` itself if it has no mesh.
    """
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding


@functools.cache
def _checksum_program(sharding: Sharding | None) -> Callable[[list[jax.Array]], jax.Array]:
    """Returns a compiled function from a list of arrays to their checksums.

    Its result has the given sharding.
    """

    def stacked_checksums(arrays: list[jax.Array]) -> jax.Array:
        return jnp.stack([checksum(array) for array in arrays])

    return jax.jit(stacked_checksums, out_shardings=sharding)


def checksum(array: jax.Array) -> jax.Array:
    """Computes a checksum of the bits of an array, uint32 [].

    It is sum_i h(b_i xor h(i)) mod 2^32. Here b_i is the bit pattern of element i in row-major
    order, and h is `_mixed`. With i mixed in, the sum changes if two elements trade places. It does
    not change with the way in which devices share the array. An element of eight bytes counts as
    two elements of four.
    """
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    num_bits = 8 * min(array.dtype.itemsize, 4)
    bits = array.view(f'uint{num_bits}').astype(jnp.uint32)
    # The number i of each element: [[0, 1, 2], [3, 4, 5]] for an array [2, 3].
    position = jnp.zeros(bits.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(bits.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        position += index * np.uint32(stride % 2**32)
        stride *= bits.shape[axis]
    return _mixed(bits ^ _mixed(position)).sum(dtype=jnp.uint32)


def _mixed(h: jax.Array) -> jax.Array:
    """The finalizer of MurmurHash3 (Appleby 2011), which permutes the numbers of 32 bits."""
    h ^= h >> 16
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> 13
    h *= np.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
