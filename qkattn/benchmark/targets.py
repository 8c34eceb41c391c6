"""The targets of the benchmark: a ratio of interest for each, as data, and what was measured."""

import dataclasses
import fnmatch
from collections.abc import Iterable, Iterator
from typing import Literal

from qkattn.benchmark.measurement import Group, Measurement

# Names of rows that targets compare.
NO_AXIS, ONE_RUN = 'no axis of trials', 'one run'
SHALLOW = '4 layers'
WHOLE = 'start to first step'
OWN = 'qkattn'
ONE_PROCESS, ONE_CORE, WORKERS = 'one process', 'one process on one core', '--workers=auto'
BEST = 'the better of one process and a worker on each core'
TRAINING = 'training'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A bound on one number of the rows of a suite; where several rows have it, on the worst.

    Attributes:
      text: what the number is.
      sense, limit: its bound.
      suite, group, row: where it is read; the latter two are patterns, as '*'.
      of: 'seconds' of a step, a field of extra, or a quotient of them, as 'seconds/flops'.
      over: name of a row of the same group, by whose number it is divided; '' is none.
      where: the kind of machine that it is a target on; '' is any.
    """

    text: str
    sense: Literal['at most', 'at least'] = 'at most'
    limit: float
    suite: str
    group: str = '*'
    row: str = '*'
    of: str = 'seconds'
    over: str = ''
    where: Literal['', 'cpu', 'gpu'] = ''

    def measured(self, groups: Iterable[Group]) -> float | None:
        """The worst number; None where no row has it."""
        worst = max if self.sense == 'at most' else min
        return worst(self._numbers(groups), default=None)

    def _numbers(self, groups: Iterable[Group]) -> Iterator[float]:
        for group in groups:
            if group.suite != self.suite or not fnmatch.fnmatch(group.title, self.group):
                continue
            over = next((row for row in group.rows if row.name == self.over), None)
            if self.over and over is None:
                continue
            for row in group.rows:
                if row is not over and fnmatch.fnmatch(row.name, self.row):
                    number = _quotient(row, self.of) if over is None else self._ratio(row, over)
                    if number is not None:
                        yield number

    def _ratio(self, row: Measurement, over: Measurement) -> float | None:
        if self.of == 'seconds':  # round by round, so that drift of the machine cancels
            return row.ratios(over).median
        own, other = _quotient(row, self.of), _quotient(over, self.of)
        return None if own is None or not other else own / other

    def line(self, groups: Iterable[Group]) -> str | None:
        """The target, what was measured and whether that meets it; None where it was not."""
        if (number := self.measured(groups)) is None:
            return None
        missed = number / self.limit - 1 if self.sense == 'at most' else 1 - number / self.limit
        reached = 'met' if missed <= 0 else f'missed by {missed:.1%}'
        return f'{self.text}: {number:.3g}, {self.sense} {self.limit:g}: {reached}'


def lines(groups: Iterable[Group], on_gpu: bool) -> list[str]:
    """A line for each target of this kind of machine that `groups` have measured."""
    groups, here = list(groups), 'gpu' if on_gpu else 'cpu'
    wanted = [target for target in TARGETS if target.where in ('', here)]
    return [line for target in wanted if (line := target.line(groups)) is not None]


def _quotient(row: Measurement, of: str) -> float | None:
    """'seconds', a field of extra, or a quotient of them; None where one is missing."""
    numbers = [row.median if name == 'seconds' else row.extra.get(name) for name in of.split('/')]
    if any(number is None for number in numbers):
        return None
    first, *others = (float(number) for number in numbers)
    for other in others:
        first /= other
    return first


TARGETS = (
    Target(
        text="a training step over torch.compile's",
        limit=1.1,
        suite='steps',
        row=OWN,
        over='torch.compile',
        where='cpu',
    ),
    Target(
        text="a training step over torch.compile's",
        limit=1 / 1.1,
        suite='steps',
        row=OWN,
        over='torch.compile',
        where='gpu',
    ),
    Target(
        text='a training step over that of functional JAX',
        limit=1.03,
        suite='steps',
        row=OWN,
        over='functional JAX',
    ),
    Target(
        text='model-FLOPs utilisation of a training step',
        sense='at least',
        limit=0.45,
        suite='steps',
        row=OWN,
        of='flops/seconds/peak_flops',
        where='gpu',
    ),
    Target(
        text="a variant's step over qk/vo's, divided by the ratio of their FLOPs",
        limit=1.15,
        suite='steps',
        group='variants*',
        of='seconds/flops',
        over='qk/vo',
        where='cpu',
    ),
    Target(
        text="a variant's step over qk/vo's, divided by the ratio of their FLOPs",
        limit=1.2,
        suite='steps',
        group='variants*',
        of='seconds/flops',
        over='qk/vo',
        where='gpu',
    ),
    Target(
        text='one trial through the axis of trials over one without it',
        limit=1.02,
        suite='stacks',
        group='*one core',
        row=ONE_RUN,
        over=NO_AXIS,
    ),
    Target(
        text='a stack of 8 trials over 8 runs one after another',
        limit=0.25,
        suite='stacks',
        group='*trial',
        row='vmap, 8 trials',
        over=ONE_RUN,
        where='gpu',
    ),
    Target(
        text='tracing and compilation of 48 layers over those of 4',
        limit=1.3,
        suite='depth',
        group='*compilation',
        row='48 layers',
        over=SHALLOW,
    ),
    Target(
        text='temporaries per token of the blockwise kernel at context 4096 over those at 1024',
        limit=1.1,
        suite='depth',
        row='blockwise, context 4096',
        of='temporary_bytes/tokens',
        over='blockwise, context 1024',
    ),
    Target(
        text='bytes of a real cache over those predicted',
        limit=1,
        suite='decoding',
        of='cache_bytes/predicted_cache_bytes',
    ),
    Target(
        text='checkpoint stall over training',
        limit=0.01,
        suite='stall',
        row='checkpoint stall',
        over=TRAINING,
    ),
    *(
        Target(text=f'{row} over training', limit=limit, suite='input', row=row, over=TRAINING)
        for row, limit in {'input wait': 0.01, 'host gap': 0.01, 'logging': 0.005}.items()
    ),
    Target(
        text='seconds from the start to the first step with a warm compilation cache',
        limit=5,
        suite='startup',
        group='*warm*',
        row=WHOLE,
    ),
    *(
        Target(
            text=f'a study of 8 runs by --workers=auto over {what}',
            limit=limit,
            suite='study',
            row=WORKERS,
            over=over,
            where='cpu',
        )
        for what, limit, over in (
            ('the same in one process', 0.55, ONE_PROCESS),
            # As slow as one process that has two cores, where threads bring nothing.
            ('the same in one process on one core', 0.55, ONE_CORE),
            (BEST, 1.05, BEST),
        )
    ),
)
