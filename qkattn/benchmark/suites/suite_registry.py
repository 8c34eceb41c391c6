"""The suites by name, and the collections that run several."""

from collections.abc import Callable

from qkattn.benchmark.session import Session
from qkattn.benchmark.suites import steps

# A suite measures groups with Session.race and Session.record, at the sizes of Session.scale.
SUITES: dict[str, Callable[[Session], None]] = {
    'steps': steps.run,
}
# A collection runs its suites at the scale of its name.
COLLECTIONS: dict[str, tuple[str, ...]] = {
    'cpu': ('steps',),
    'gpu': ('steps',),
    'smoke': ('steps',),
}
