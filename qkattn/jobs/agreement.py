"""What the processes of a job decide together, through jax's key-value store, not its devices.

Every function is called by all processes, in the same order. With one process they cost nothing.
The store is that of jax.distributed.initialize, and has no public interface: what jax offers,
jax.experimental.multihost_utils, opens devices and runs programs on them.
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

# Seconds that processes wait for the last of them, longer than one compiles alone.
LIMIT = 600.0
# Seconds that processes wait for what process 0 does for all, such as to prepare data.
OWNER_LIMIT = 86_400.0
# Seconds by which process 0, which knows who is missing, gives up first.
_GRACE = 10.0
# Numbers of the calls of `from_all`, the same in all processes.
_numbers = itertools.count()
# Keys of earlier calls that process 0 has not deleted yet.
_published: list[str] = []


def owner() -> bool:
    """Whether this process is process 0, which owns the run directory."""
    return distributed.global_state.process_id == 0


def from_all(value: Any, *, limit: float = LIMIT) -> list[Any]:
    """The values that the processes have passed, by rank; each is JSON.

    ProcessError in all of them names those that have not called it `limit` seconds after process 0.
    """
    text = json.dumps(value)
    if client() is None:
        return [json.loads(text)]
    key = f'qkattn/agreed/{next(_numbers)}'
    rank = distributed.global_state.process_id
    if rank == 0:
        answer = _collect(key, value, limit)
    else:
        client().key_value_set(f'{key}/{rank}', text)
        # Process 0 waits from its own arrival, which may be that late.
        published = _get(f'{key}/all', 2 * limit + _GRACE)
        answer = {'missing': [0]} if published is None else json.loads(published)
    if answer['missing']:
        raise ProcessError(
            f'{named(answer["missing"])} did not arrive within {limit:g} s, while the others waited'
        )
    return answer['values']


def _collect(key: str, own_value: Any, limit: float) -> dict[str, Any]:
    """In process 0: publishes, and returns, the values of all and the ranks that are missing.

    Process RANK has set its value as {key}/RANK, and reads the answer as {key}/all.
    """
    deadline = time.monotonic() + limit
    values = [own_value]
    missing = []
    for rank in range(1, distributed.global_state.num_processes):
        text = _get(f'{key}/{rank}', deadline - time.monotonic())
        if text is None:
            missing.append(rank)
        else:
            values.append(json.loads(text))
    if not missing:  # all have read the answers of earlier calls
        for earlier in _published:
            client().key_value_delete(earlier)
        _published.clear()
    _published.append(key)
    text = json.dumps({'missing': missing, 'values': values})
    client().key_value_set(f'{key}/all', text)
    return json.loads(text)


def on_owner(call: Callable[[], Any]) -> Any:
    """What `call` returns in process 0, which must be JSON, for all; it is called there alone.

    Raises in all the error of qkattn that `call` raised in process 0; in the others ProcessError
    for any other error, or if process 0 was not done in OWNER_LIMIT seconds.
    """
    if not owner():
        answer = from_all(None, limit=OWNER_LIMIT)[0]
        if 'error' in answer:
            raise getattr(errors, answer['error'])(answer['text'])
        return answer['value']
    try:
        value = call()
    except Exception as error:
        name = _name_in_qkattn(error)
        text = str(error)
        if name is None:
            name = 'ProcessError'
            text = f'process 0 raised {type(error).__name__}: {error}'
        with contextlib.suppress(ProcessError):
            from_all({'error': name, 'text': text})
        raise
    return from_all({'value': value}, limit=OWNER_LIMIT)[0]['value']


def _name_in_qkattn(error: Exception) -> str | None:
    """The name of the class of qkattn.errors that an exception is of, perhaps by a subclass.

    None for an error of another kind.
    """
    for cls in type(error).__mro__:
        if cls in vars(errors).values():
            return cls.__name__
    return None


def any_process(flag: bool) -> bool:
    """Whether the flag is set in any process."""
    return any(from_all(bool(flag)))


def barrier(name: str, *, limit: float = LIMIT) -> None:
    """Returns once all are here; ProcessError if some are elsewhere, or late by `limit` seconds."""
    names = set(from_all(name, limit=limit))
    if len(names) > 1:
        raise ProcessError(f'the processes wait at different places: {", ".join(sorted(names))}')


def require_same(name: str, value: str) -> None:
    """Raises ConfigError, with the ranks, where processes differ in a value, such as a hash."""
    values = from_all(value)
    different = [rank for rank, other in enumerate(values) if other != values[0]]
    if different:
        raise ConfigError(
            f'{name} of {named(different)} differs from that of process 0 ({values[0]}): '
            f'{values[different[0]]}; start all processes with the same command, code and data'
        )


def owned(make: Callable[[], T]) -> T:
    """What `make` returns, in process 0; in the others, an object whose methods do nothing.

    What `make` raises, all raise.
    """
    objects: list[T] = []  # stays empty in the others
    on_owner(lambda: objects.append(make()))
    return objects[0] if objects else cast(T, _Nothing())


def owner_first(make: Callable[[], T]) -> T:
    """What `make` returns in this process; process 0 calls it first, and prepares for the others.

    Returns once all have called it, as hosts may have no common disk. What it raises in process 0,
    all raise.
    """
    value = owned(make)
    if isinstance(value, _Nothing):
        value = make()
    barrier('prepared', limit=OWNER_LIMIT)
    return value


def named(ranks: list[int]) -> str:
    """'process 1', or 'processes 1, 2'."""
    noun = 'process' if len(ranks) == 1 else 'processes'
    return f'{noun} {", ".join(map(str, ranks))}'


def client() -> Any:
    """jax's connection to the coordinator; None in a job of one process."""
    return distributed.global_state.client


class _Nothing:
    """Answers every call, also of its attributes, by doing nothing."""

    def __getattr__(self, name: str) -> '_Nothing':
        return self

    def __call__(self, *_: Any, **__: Any) -> '_Nothing':
        return self

    __enter__ = __call__

    def __exit__(self, *exc_info: object) -> None:
        pass


def _get(key: str, seconds: float) -> str | None:
    """The value of a key once it is set; None if it is not set in time."""
    try:
        return client().blocking_key_value_get(key, max(1, int(1000 * seconds)))
    except Exception as error:
        if 'DEADLINE_EXCEEDED' in str(error):
            return None
        raise
