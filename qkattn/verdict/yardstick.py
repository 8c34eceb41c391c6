"""What yardsticks.json holds of a study (see `qkattn.study.yardsticks`)."""

import dataclasses
import statistics
from collections.abc import Mapping
from pathlib import Path

from qkattn.storage import ledger
from qkattn.storage.records import ARM_KEY, check, parse_file, read
from qkattn.study.place import Place


@dataclasses.dataclass(frozen=True)
class Measured:
    """A trial of a verdict run, measured from its checkpoint; nats/token on the last split.

    Attributes:
      positions: loss by position, '1', '2', '3', '4', '5-8', ...; None where no target is.
      early, late: at position 4, and over the last half of the context; None where that is short.
      shuffled: the loss with the sources of other pairs; None unless the task is a translation.
    """

    seed: int
    loss: float
    positions: Mapping[str, float | None]
    early: float | None
    late: float | None
    shuffled: float | None


@dataclasses.dataclass(frozen=True)
class Yardstick:
    """What the models of one size, corpus and length of training have to beat.

    Attributes:
      run: the baseline's run whose data it was counted on.
      task: 'language', 'masked', 'translation' or 'probe'.
      seen: tokens that the models of the group are trained on.
      tokens: those of them that were counted; None where nothing was.
      losses: nats/token by split ('val', 'test') and name; empty for a translation.
    """

    run: str
    task: str
    seen: int
    tokens: int | None
    losses: Mapping[str, Mapping[str, float]]

    def best(self, split: str) -> tuple[str, float] | None:
        """The name and the loss of the lowest on a split; None where nothing was counted."""
        return min(self.losses.get(split, {}).items(), key=lambda item: item[1], default=None)


@dataclasses.dataclass(frozen=True)
class Yardsticks:
    """Of a study: by (size, corpus, whether trained longer), and by arm what was measured of it."""

    groups: Mapping[tuple[str, str, bool], Yardstick]
    measured: Mapping[Place, tuple[Measured, ...]]

    def gain(self, place: Place) -> float | None:
        """How much the loss falls from position 4 to the last half; None if not recorded."""
        falls = [of.early - of.late for of in self.measured.get(place, ()) if of.early and of.late]
        return statistics.fmean(falls) if falls else None

    def sources(self, place: Place) -> float | None:
        """How much the loss rises where sources are shuffled; None if not recorded."""
        rises = [of.shuffled - of.loss for of in self.measured.get(place, ()) if of.shuffled]
        return statistics.fmean(rises) if rises else None


def read_yardsticks(directory: Path, problems: list[str]) -> Yardsticks | None:
    """The yardsticks of a study; None if they are not recorded, or damaged, which is a problem."""
    path = directory / ledger.YARDSTICKS
    if not path.exists():
        return None
    try:
        record = parse_file(path, {'groups': tuple[dict, ...], 'runs': tuple[dict, ...]})
        groups: dict[tuple[str, str, bool], Yardstick] = {}
        measured: dict[Place, tuple[Measured, ...]] = {}
        for of in record['groups']:
            check(of, {'size': str, 'corpus': str, 'longer': bool})
            groups[of['size'], of['corpus'], of['longer']] = read(Yardstick, of)
        for of in record['runs']:
            check(of, ARM_KEY | {'trials': tuple[dict, ...] | None})
            place = Place(*(of[name] for name in ARM_KEY))
            trials = tuple(read(Measured, trial) for trial in of['trials'] or ())
            measured[place] = measured.get(place, ()) + trials
    except (OSError, ValueError) as error:
        problems.append(f'{ledger.YARDSTICKS} is damaged: {error}.')
        return None
    return Yardsticks(groups, measured)
