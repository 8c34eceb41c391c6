"""Leases in a bucket: one object each, which changes by the generation that it replaces."""

import contextlib
import dataclasses
from pathlib import Path

from qkattn.run import buckets
from qkattn.run.buckets import seconds
from qkattn.run.heartbeats import Holder, Lease, content_of, holder_of, process
from qkattn.run.signals import WHOLE


def acquire(path: Path, expiry: float) -> Lease | Holder:
    """Acquires the lease that is the object `path`, or returns who holds it."""
    content = content_of(expiry)
    while True:
        try:
            found = buckets.read(path)
        except FileNotFoundError:
            found = None
        if found and (holder := _holder(path, found, expiry)):
            return holder
        created = seconds()
        # If another process was faster, who holds it is looked up again.
        with contextlib.suppress(FileExistsError), WHOLE:
            generation = buckets.write(path, content, found.generation if found else 0)
            return Lease(_Object(path, content, generation), expiry, created)


def holders(directory: Path, expiry: float) -> dict[str, Holder]:
    """The holder of each lease below `directory` that is held, by name."""
    found: dict[str, Holder] = {}
    for path in sorted(directory.iterdir()):
        with contextlib.suppress(FileNotFoundError):
            if holder := _holder(path, buckets.read(path), expiry):
                found[path.name] = holder
    return found


def _holder(path: Path, found: buckets.Object, expiry: float) -> Holder | None:
    """The holder of a lease; None if it expired, or was a process of this machine that is gone."""
    holder = holder_of(found.content, buckets.now(path) - found.updated, expiry)
    if holder is None or is_alive(holder) is False:
        return None
    return dataclasses.replace(holder, generation=found.generation)


def is_alive(holder: Holder) -> bool | None:
    """Whether the holder is a live process of this machine; None for another machine's."""
    here, there = process(), holder.process
    if not here or not isinstance(there, str) or here.split()[:2] != there.split()[:2]:
        return None
    return process(int(there.split()[2])) == there


@dataclasses.dataclass
class _Object:
    """A lease in a bucket."""

    path: Path
    content: bytes
    generation: int

    def renew(self) -> bool:
        try:
            self.generation = buckets.write(self.path, self.content, self.generation)
        except FileExistsError:
            return False
        return True

    def free(self) -> None:
        buckets.delete(self.path, self.generation)
