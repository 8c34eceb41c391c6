"""What the processes of a job decide together.

All processes call these functions, in the same order. With one process they cost nothing. They use
the key-value store that jax.distributed.initialize starts, which has no public interface. The
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

# Seconds for which processes wait for the last of them. A process may compile alone for that long.
LIMIT = 600.0
# Seconds for which processes wait while process 0 works for all, for example prepares data.
OWNER_LIMIT = 86_400.0
# Process 0 gives up this many seconds before the others, because it knows who is missing.
_GRACE = 10.0
# Counts the calls of `gather_from_processes`. All processes count alike, so a number identifies a
# call.
_numbers = itertools.count()
# The keys of earlier calls whose values process 0 has not deleted yet.
_published: list[str] = []


def is_process_0() -> bool:
    """Whether this process is process 0, which owns the run directory."""
    return distributed.global_state.process_id == 0


def gather_from_processes(value: Any, *, limit: float = LIMIT) -> list[Any]:
    """Gathers a value, which must be JSON, from every process; returns all values, by rank.

    All processes call this. Process 0 waits `limit` seconds for the values of the others. If one is
    still missing then, ProcessError names its rank, in every process that has called.
    """
    text = json.dumps(value)
    if client() is None:  # a job of one process
        return [json.loads(text)]

    # Process 0 collects the values and publishes the answer. The others send theirs and wait.
    key = f'qkattn/agreed/{next(_numbers)}'
    rank = distributed.global_state.process_id
    if rank == 0:
        answer = _collect(key, value, limit)
    else:
        client().key_value_set(f'{key}/{rank}', text)
        # Process 0 may call this `limit` seconds later than this process, and then wait `limit`
        # seconds for the others. Without an answer, it is process 0 that is missing.
        answer_text = _wait_for_key(f'{key}/all', 2 * limit + _GRACE)
        answer = {'missing': [0]} if answer_text is None else json.loads(answer_text)

    missing_ranks = answer['missing']
    if missing_ranks:
        raise ProcessError(
            f'{describe_ranks(missing_ranks)} did not arrive within {limit:g} s, '
            'while the others waited'
        )
    return answer['values']


def _collect(key: str, own_value: Any, limit: float) -> dict[str, Any]:
    """Collects the values of all processes and publishes them; only process 0 calls it.

    For the key 'qkattn/agreed/5', process 1 publishes its value as 'qkattn/agreed/5/1', and waits
    for the answer, 'qkattn/agreed/5/all'.

    Args:
      key: identifies the call of `gather_from_processes`.
      own_value: the value of process 0.
      limit: the seconds for which process 0 waits for the values of the others.

    Returns:
      The answer: {'missing': ranks without a value, 'values': the values by rank}.
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

    # A process sends a value for this key only after it has read the answers to earlier keys. So
    # once all have sent one, nobody needs those answers, and they are deleted.
    if not missing_ranks:
        for earlier_key in _published:
            client().key_value_delete(earlier_key)
        _published.clear()

    _published.append(key)
    answer = json.dumps({'missing': missing_ranks, 'values': values})
    client().key_value_set(f'{key}/all', answer)
    return json.loads(answer)  # exactly what the other processes get


def call_in_process_0(call: Callable[[], Any]) -> Any:
    """Calls `call` in process 0 only; returns its result, which must be JSON, in all processes.

    If `call` raises an error of qkattn.errors, all processes raise it. If it raises another error,
    process 0 raises this error and the others raise ProcessError. The others also raise
    ProcessError if process 0 takes more than OWNER_LIMIT seconds.
    """
    # All processes exchange a message. That of process 0 is {'value': RESULT}, or
    # {'error': CLASS, 'text': MESSAGE} after an error. The others send None.
    if not is_process_0():
        message = gather_from_processes(None, limit=OWNER_LIMIT)[0]
        if 'error' in message:
            error_class = getattr(errors, message['error'])
            raise error_class(message['text'])
        return message['value']

    try:
        value = call()
    except Exception as error:
        name = _name_in_qkattn(error)
        text = str(error)
        if name is None:
            name = 'ProcessError'
            text = f'process 0 raised {type(error).__name__}: {error}'
        # `gather_from_processes` raises ProcessError if a process is missing. It would hide the
        # error of `call`.
        with contextlib.suppress(ProcessError):
            gather_from_processes({'error': name, 'text': text})
        raise
    message = gather_from_processes({'value': value}, limit=OWNER_LIMIT)[0]
    return message['value']


def _name_in_qkattn(error: Exception) -> str | None:
    """Returns the name of the class in qkattn.errors that an exception is an instance of.

    If there are several, it is the most specific one. None for other exceptions.
    """
    for cls in type(error).__mro__:
        if cls in vars(errors).values():
            return cls.__name__
    return None


def any_process(flag: bool) -> bool:
    """Whether the flag is set in any process."""
    return any(gather_from_processes(bool(flag)))


def barrier(name: str, *, limit: float = LIMIT) -> None:
    """Waits until all processes have called `barrier` with this name.

    Raises ProcessError if a process waits at another barrier, or does not come within `limit`
    seconds.
    """
    names = set(gather_from_processes(name, limit=limit))
    if len(names) > 1:
        raise ProcessError(f'the processes wait at different places: {", ".join(sorted(names))}')


def require_same(name: str, value: str) -> None:
    """Raises ConfigError, with the ranks, unless all processes pass the same value.

    `name` says what the value is, for the error.
    """
    values = gather_from_processes(value)
    expected = values[0]
    different_ranks = [rank for rank, other in enumerate(values) if other != expected]
    if different_ranks:
        first_difference = values[different_ranks[0]]
        raise ConfigError(
            f'{name} of {describe_ranks(different_ranks)} differs from that of process 0 '
            f'({expected}): {first_difference}; '
            'start all processes with the same command, code and data'
        )


def make_in_process_0(make: Callable[[], T]) -> T:
    """Calls `make` in process 0, and returns its result there.

    The other processes get an object whose methods do nothing. If `make` raises, all raise as
    `call_in_process_0` does.
    """
    objects: list[T] = []  # stays empty in the other processes
    call_in_process_0(lambda: objects.append(make()))
    return objects[0] if objects else cast(T, _Nothing())


def run_in_process_0_first(make: Callable[[], T]) -> T:
    """Calls `make` in process 0, then in the others, and returns its result in each.

    For example, `make` opens data, and prepares them first if they are not on disk. Process 0
    prepares them. Processes with the same disk then find them there, and those with another disk
    prepare them again. Returns once all are done. If `make` raises in process 0, all raise.
    """
    value = make_in_process_0(make)  # also makes the others wait for process 0
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
    """An object whose attributes are all itself, and which does nothing when it is called."""

    def __getattr__(self, name: str) -> '_Nothing':
        return self

    def __call__(self, *_: Any, **__: Any) -> '_Nothing':
        return self

    __enter__ = __call__

    def __exit__(self, *exc_info: object) -> None:
        pass


def _wait_for_key(key: str, seconds: float) -> str | None:
    """Waits until a key is set, and returns its value; None if it is not set in time."""
    milliseconds = max(1, int(1000 * seconds))
    try:
        return client().blocking_key_value_get(key, milliseconds)
    except Exception as error:
        if 'DEADLINE_EXCEEDED' in str(error):
            return None
        raise
