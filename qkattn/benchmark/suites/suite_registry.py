"""The suites by name, and the collections that run several."""

from collections.abc import Callable

from qkattn.benchmark.session import Session
from qkattn.benchmark.suites import (
    decoding,
    depth,
    input,
    stacks,
    stall,
    startup,
    steps,
    study,
)

# A suite measures groups with Session.race and Session.record, at the sizes of Session.scale.
SUITES: dict[str, Callable[[Session], None]] = {
    'steps': steps.run,
    'stacks': stacks.run,
    'depth': depth.run,
    'decoding': decoding.run,
    'stall': stall.run,
    'input': input.run,
    'startup': startup.run,
    'study': study.run,
}
# Those that start commands as a user does, besides races.
COMMANDS = ('stall', 'input', 'startup', 'study')
# A collection runs its suites at the scale of its name.
COLLECTIONS: dict[str, tuple[str, ...]] = {
    'cpu': tuple(SUITES),
    'gpu': ('steps', 'stacks', 'depth', 'decoding', 'stall', 'input', 'startup'),
    'smoke': tuple(SUITES),
}
