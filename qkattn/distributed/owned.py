"""What only process 0 of a job has: the run directory, its metrics, the progress display."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from qkattn.distributed import agreement

T = TypeVar('T')


class _Nothing:
    """Answers every call, also of what it holds, by doing nothing."""

    def __getattr__(self, name: str) -> '_Nothing':
        return self

    def __call__(self, *_: Any, **__: Any) -> '_Nothing':
        return self

    def __enter__(self) -> '_Nothing':
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


def owned(make: Callable[[], T]) -> T:
    """What `make` makes in process 0; in every other process, an object that does nothing.

    For what is written or shown and returns nothing that the run depends on. All processes raise
    the error that `make` raises.
    """
    made: list[T] = []
    agreement.on_owner(lambda: made.append(make()))
    return made[0] if made else cast(T, _Nothing())


def owner_first(make: Callable[[], T]) -> T:
    """What `make` makes in each process; the others follow process 0, and find what it prepared.

    Returns once all have it: hosts without a common disk prepare their own. All processes raise the
    error that `make` raises in process 0.
    """
    made: list[T] = []
    agreement.on_owner(lambda: made.append(make()))
    value = made[0] if made else make()
    agreement.barrier('prepared', limit=agreement.OWNER_LIMIT)
    return value
