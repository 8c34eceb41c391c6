"""Collective operations of a job's processes: gather, barrier, and calls in process 0.

All processes must call these functions in the same order. In a job of one process, the functions
return at once.

They use the key-value store of jax.distributed.initialize, which has no public interface. The
public jax.experimental.multihost_utils would open devices and run programs on them.
"""

import contextlib
import itertools
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from jax._src import distributed

from qkattn import errors
from qkattn.errors import ConfigError, ProcessError

T = TypeVar('T')

# The default timeout in seconds. A process may compile alone for that long.
LIMIT = 600.0
# The timeout in seconds while process 0 works for all processes, for example prepares data.
OWNER_LIMIT = 86_400.0
# Process 0 times out this many seconds before the other processes, and can name missing ranks.
_GRACE = 10.0
# Numbers the calls of `gather_from_processes`. A call has the same number in all processes.
_call_numbers = itertools.count()
# Keys of earlier calls that process 0 has not deleted yet.
_published_keys: list[str] = []


def is_process_0() -> bool:
    """Whether this process is process 0, which owns the run directory."""
    return distributed.global_state.process_id == 0


def gather_from_processes(value: Any, *, limit: float = LIMIT) -> list[Any]:
    """Gathers a JSON value from every process.

    Args:
        value: The value of this process.
        limit: The timeout in seconds.

    Returns:
        The values of all processes, by rank.

    Raises:
        ProcessError: A process has not called this function in time. The message names its rank.
    """
    text = json.dumps(value)
    if client() is None:  # a job of one process
        return [json.loads(text)]

    call_number = next(_call_numbers)  # the same in all processes
    key = f'qkattn/agreed/{call_number}'
    rank = distributed.global_state.process_id
    if rank == 0:
        answer = _collect(key, value, limit)
    else:
        client().key_value_set(f'{key}/{rank}', text)
        answer = {'missing': [0]}  # after a timeout
        # Process 0 may arrive `limit` seconds later than this process, and wait `limit` seconds.
        answer_text = _wait_for_key(f'{key}/all', 2 * limit + _GRACE)
        if answer_text is not None:
            answer = json.loads(answer_text)

    missing_ranks = answer['missing']
    if missing_ranks:
        raise ProcessError(
            f'{describe_ranks(missing_ranks)} did not arrive within {limit:g} s, '
            'while the others waited'
        )
    return answer['values']


def _collect(key: str, own_value: Any, limit: float) -> dict[str, Any]:
    """Gathers the values of all processes in process 0, and publishes the answer.

    For the key 'qkattn/agreed/5', process 1 has set 'qkattn/agreed/5/1' to its value. The answer is
    published as 'qkattn/agreed/5/all'.

    Args:
        key: Identifies the call of `gather_from_processes`.
        own_value: The value of process 0.
        limit: The timeout in seconds.

    Returns:
        The answer: {'missing': ranks without a value, 'values': values by rank}.
    """
    deadline = time.monotonic() + limit
    values = [own_value]
    missing_ranks = []
    for rank in range(1, distributed.global_state.num_processes):
        seconds_left = deadline - time.monotonic()
        text = _wait_for_key(f'{key}/{rank}', seconds_left)
        if text is None:
            missing_ranks.append(rank)
        else:
            values.append(json.loads(text))

    # A process that has sent a value has already read all earlier answers.
    if not missing_ranks:
        for earlier_key in _published_keys:
            client().key_value_delete(earlier_key)
        _published_keys.clear()

    answer_text = json.dumps({'missing': missing_ranks, 'values': values})
    _published_keys.append(key)
    client().key_value_set(f'{key}/all', answer_text)
    return json.loads(answer_text)  # decoded, as in the other processes


def call_in_process_0(call: Callable[[], Any]) -> Any:
    """Calls `call` in process 0 only, and returns its JSON result in all processes.

    Raises:
        Exception: The error of `call`, in process 0. The other processes raise the same error if it
            is one of qkattn.errors, else a ProcessError.
        ProcessError: Process 0 takes longer than OWNER_LIMIT seconds.
    """
    if not is_process_0():
        messages = gather_from_processes(None, limit=OWNER_LIMIT)
        message = messages[0]  # of process 0: {'value': ...} or {'error': class, 'text': ...}
        if 'error' in message:
            error_class = getattr(errors, message['error'])
            raise error_class(message['text'])
        return message['value']

    try:
        value = call()
    except Exception as error:
        class_name = _name_in_qkattn(error)
        text = str(error)
        if class_name is None:
            class_name = 'ProcessError'
            text = f'process 0 raised {type(error).__name__}: {error}'
        # A ProcessError about a missing process would hide the error of `call`, raised below.
        with contextlib.suppress(ProcessError):
            gather_from_processes({'error': class_name, 'text': text})
        raise
    messages = gather_from_processes({'value': value}, limit=OWNER_LIMIT)
    return messages[0]['value']  # a JSON value, as in the other processes


def _name_in_qkattn(error: Exception) -> str | None:
    """Returns the name of the exception's most specific class in qkattn.errors, or None."""
    for cls in type(error).__mro__:  # from the most specific class to `object`
        if cls in vars(errors).values():
            return cls.__name__
    return None


def any_process(flag: bool) -> bool:
    """Whether the flag is set in any process."""
    return any(gather_from_processes(bool(flag)))


def barrier(name: str, *, limit: float = LIMIT) -> None:
    """Waits until all processes have called `barrier` with the same name.

    Args:
        name: Identifies the barrier in error messages.
        limit: The timeout in seconds.

    Raises:
        ProcessError: A process waits at another barrier, or does not come in time.
    """
    names = set(gather_from_processes(name, limit=limit))
    if len(names) > 1:
        raise ProcessError(f'the processes wait at different places: {", ".join(sorted(names))}')


def require_same(name: str, value: str) -> None:
    """Requires that all processes pass the same value.

    Args:
        name: What the value is, for the error message.
        value: The value of this process.

    Raises:
        ConfigError: The values differ. The message names the ranks that differ from process 0.
    """
    values = gather_from_processes(value)
    expected = values[0]
    different_ranks = [rank for rank, actual in enumerate(values) if actual != expected]
    if different_ranks:
        first_difference = values[different_ranks[0]]
        raise ConfigError(
            f'{name} of {describe_ranks(different_ranks)} differs from that of process 0 '
            f'({expected}): {first_difference}; '
            'start all processes with the same command, code and data'
        )


def make_in_process_0(make: Callable[[], T]) -> T:
    """Calls `make` in process 0; the other processes get an object whose methods do nothing.

    An error of `make` is raised in all processes, as in `call_in_process_0`.
    """
    results: list[T] = []  # stays empty in the other processes
    call_in_process_0(lambda: results.append(make()))
    return results[0] if results else cast(T, _Nothing())


def run_in_process_0_first(make: Callable[[], T]) -> T:
    """Calls `make` in process 0, then in all other processes, and returns its result in each.

    For example, `make` opens a dataset, and prepares the dataset if it is not on disk. Process 0
    prepares it, and processes with the same disk only open it. An error of `make` in process 0 is
    raised in all processes.
    """
    value = make_in_process_0(make)  # also makes the other processes wait
    if not is_process_0():
        value = make()
    barrier('prepared', limit=OWNER_LIMIT)
    return value


def describe_ranks(ranks: list[int]) -> str:
    """Returns the ranks in words: 'process 1' or 'processes 1, 2'."""
    noun = 'process' if len(ranks) == 1 else 'processes'
    return f'{noun} {", ".join(map(str, ranks))}'


def client() -> Any:
    """jax's connection to the coordinator; None in a job of one process."""
    return distributed.global_state.client


class _Nothing:
    """An object whose attributes, and results of calls, are the object itself."""

    def __getattr__(self, name: str) -> '_Nothing':
        return self

    def __call__(self, *_: Any, **__: Any) -> '_Nothing':
        return self

    __enter__ = __call__

    def __exit__(self, *exc_info: object) -> None:
        pass


def _wait_for_key(key: str, seconds: float) -> str | None:
    """Waits for a key, and returns its value; None after a timeout of `seconds`."""
    milliseconds = max(1, int(1000 * seconds))
    try:
        return client().blocking_key_value_get(key, milliseconds)
    except Exception as error:
        is_timeout = 'DEADLINE_EXCEEDED' in str(error)
        if is_timeout:
            return None
        raise
