"""A benchmark under way: what it measures, and what it has written of it."""

import copy
import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qkattn.benchmark import machine
from qkattn.benchmark.measurement import Group, Measurement, group_from_json
from qkattn.benchmark.plot import draw
from qkattn.benchmark.race import Contestant, race
from qkattn.benchmark.shape import GPT2, MEDIUM, RECIPE, TINY, Shape
from qkattn.benchmark.summary import csv_table, page
from qkattn.errors import ReportError
from qkattn.run.cores import usable
from qkattn.run.files import write_atomic
from qkattn.run.records import parse_json
from qkattn.run.signals import WHOLE

SCHEMA = 1
FILE, PAGE, TABLE = 'benchmark.json', 'table.md', 'table.csv'

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is measured.

    Attributes:
      name: of the scale.
      shapes: at which training is compared with peers.
      variants: at which variants are compared with each other, at all `widths`.
      widths, contexts, dtypes: of variants and of the standard one.
      grid: whether variants are compared at every width, context and dtype, otherwise at the
        context and dtype of `variants`.
      only: the variants that are compared; () is all.
      rounds: of a race.
      seconds: of a contestant in a round, at least.
    """

    name: str
    shapes: tuple[Shape, ...]
    variants: Shape
    widths: tuple[int, ...]
    contexts: tuple[int, ...]
    dtypes: tuple[str, ...]
    grid: bool = False
    only: tuple[str, ...] = ()
    rounds: int = 7
    seconds: float = 0.5


SCALES = {
    'cpu': Scale(
        name='cpu',
        shapes=(RECIPE, MEDIUM),
        variants=RECIPE,
        widths=(128,),
        contexts=(64, 256, 1024),
        dtypes=('float32', 'bfloat16'),
    ),
    'gpu': Scale(
        name='gpu',
        shapes=(GPT2,),
        variants=dataclasses.replace(GPT2, layers=4, vocabulary=8192),
        widths=(768,),
        contexts=(1024, 4096),
        dtypes=('bfloat16', 'float32'),
        seconds=1.0,
    ),
    'smoke': Scale(
        name='smoke',
        shapes=(TINY,),
        variants=TINY,
        widths=(16,),
        contexts=(),  # its rows are those of other groups
        dtypes=('float32',),
        only=('qk/vo', 'qk/no_v'),
        rounds=2,
        seconds=0.0,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line chooses.

    Attributes:
      scale: with its widths, contexts and dtypes as they were asked for.
      peers: names of the other implementations that are installed and wanted.
      cores: numbers of cores, on each of which a suite that compares cores is run.
      again: whether groups that are in the directory are measured again.
    """

    scale: Scale
    peers: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()
    again: bool = False


class Session:
    """Measures groups and writes them down, one by one; what it finds in its directory it keeps.

    Attributes:
      options: what the command line chose.
      groups: those measured so far.
    """

    def __init__(self, directory: Path, options: Options):
        self.directory, self.options = directory, options
        self.suite = ''
        self.facts, self.load = machine.facts(), machine.load()
        self.groups: list[Group] = []
        self._kept = {} if options.again else self._found()

    def of(self, suite: str) -> 'Session':
        """The same session, which measures groups of this suite."""
        own = copy.copy(self)
        own.suite = suite
        return own

    @property
    def scale(self) -> Scale:
        return self.options.scale

    @property
    def cores(self) -> tuple[int, ...]:
        """Numbers of cores to compare: by default one and all; beside an accelerator all."""
        most = len(usable())
        if self.scale.name == 'smoke':
            default = {1}
        else:
            default = {most} if machine.accelerators() else {1, most}
        return self.options.cores or tuple(sorted(default))

    def race(
        self,
        title: str,
        contestants: Sequence[Contestant],
        *,
        reference: str = '',
        x: str = '',
        rounds: int | None = None,
        seconds: float | None = None,
    ) -> Group:
        """A group of contestants, timed in turns; see Group for `reference` and `x`."""

        def rows() -> list[Measurement]:
            own = [self._sharing(contestant) for contestant in contestants]
            return race(
                own,
                rounds=self.scale.rounds if rounds is None else rounds,
                seconds=self.scale.seconds if seconds is None else seconds,
            )

        return self.record(title, rows, reference=reference, x=x)

    def record(
        self,
        title: str,
        rows: Callable[[], Sequence[Measurement]],
        *,
        reference: str = '',
        x: str = '',
    ) -> Group:
        """A group whose rows are measured in another way than a race."""
        group = Group(self.suite, title, [], reference, x)
        if group.name in self._kept:
            log.info('%s: measured before', group.name)
            group = self._kept[group.name]
        else:
            log.info('%s', group.name)
            group = dataclasses.replace(group, rows=list(rows()))
        with WHOLE:
            self.groups.append(group)
            self._write()
        return group

    def _sharing(self, contestant: Contestant) -> Contestant:
        """The smallest scale starts one process for all that use jax."""
        if self.scale.name != 'smoke' or contestant.work == 'torch' or contestant.environment:
            return contestant
        return dataclasses.replace(contestant, process='jax')

    def _write(self) -> None:
        later = [kept for name, kept in self._kept.items() if name not in self._names()]
        document = {
            'schema': SCHEMA,
            'machine': self.facts,
            'load': {'start': self.load, 'end': machine.load()},
            'groups': [dataclasses.asdict(group) for group in [*self.groups, *later]],
        }
        write_atomic(self.directory / FILE, json.dumps(document, indent=1) + '\n')
        for name, content in derived(document).items():
            write_atomic(self.directory / name, content)

    def _names(self) -> set[str]:
        return {group.name for group in self.groups}

    def _found(self) -> dict[str, Group]:
        """The groups in the directory, where the same code measured them on the same machine."""
        try:
            document = read(self.directory)
        except FileNotFoundError:
            return {}
        own, other = (
            {**facts, 'git': facts['git']['commit']} for facts in (self.facts, document['machine'])
        )
        if own != other:
            differing = ', '.join(name for name in own if own[name] != other.get(name))
            log.info('%s has measurements of another %s: replaced', self.directory, differing)
            return {}
        return {group.name: group for group in groups_of(document)}


def read(directory: Path) -> dict[str, Any]:
    """The document that a session wrote into its directory.

    Raises:
      FileNotFoundError: there is none.
      ReportError: a file that is damaged, or of another schema.
    """
    path = Path(directory) / FILE
    text = path.read_text('utf-8')
    try:
        document = parse_json(text)
        groups_of(document)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ReportError(f'{path} is not a benchmark: {error!r}; measure it again') from error
    if document['schema'] != SCHEMA:
        raise ReportError(f'{path} has schema {document["schema"]}; this version reads {SCHEMA}')
    return document


def groups_of(document: dict[str, Any]) -> list[Group]:
    return [group_from_json(values) for values in document['groups']]


def derived(document: dict[str, Any]) -> dict[str, str]:
    """The files beside the document that are made of it, drawings apart, by name."""
    groups = groups_of(document)
    return {PAGE: page(document, groups), TABLE: csv_table(groups)}


def finish(directory: Path) -> list[str]:
    """Writes the tables and figures of what a directory has measured; the names of its files."""
    document = read(directory)
    made: dict[str, str | bytes] = {**derived(document), **draw(groups_of(document))}
    for name, content in made.items():
        write_atomic(directory / name, content)
    return [FILE, *made]


def check(directory: Path) -> int:
    """How many measurements the tables of a directory are made of; raises where they are not.

    Raises:
      ReportError: a table is not what the measurements give.
    """
    document = read(directory)
    for name, expected in derived(document).items():
        if (directory / name).read_text('utf-8') != expected:
            raise ReportError(f'{directory / name} is not what {FILE} gives; write it again')
    return sum(len(row.rounds) for group in groups_of(document) for row in group.rows)
