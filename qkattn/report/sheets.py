"""Further tables: parts, controls, yardsticks, scaling laws, forms, the ledger.

Each is declared once, as rows of text, and printed in every format.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from qkattn.report import prose
from qkattn.report.columns import CONTROL, PARTS, Heading, Table, parts_of, printed
from qkattn.report.prose import NONE, NOT_RECORDED, clause, interval, si, words
from qkattn.stats.scaling import Interval
from qkattn.storage import ledger
from qkattn.study.arm_key import ArmKey
from qkattn.verdict import rules
from qkattn.verdict.arms import Arm
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study

Row = dict[str, str]  # cells by heading


class Sheet(NamedTuple):
    """A table as text; its title and the note under it are `name`'s in templates/sheets.j2."""

    name: str
    headings: Sequence[Heading]
    rows: Sequence[Sequence[str]]
    title: str
    note: str


def sheets(study: Study, findings: Findings) -> list[Sheet]:
    """The tables of a study, in the order in which they are printed."""
    made = {
        'parts': _table(_parts(study, findings)),
        'controls': printed(CONTROL, study, findings, findings.controls),
        'yardsticks': yardsticks(study, findings),
        'laws': _table(_laws(study, findings), ['no number, because']),
        'forms': _table(_forms(study, findings), ['form', 'A[n]', 'B[n]']),
        'ledger': _table(_ledger(study), ['event', 'details']),
    }
    return [
        Sheet(name, *table, *prose.macro('sheets.j2', name, {'study': study}, findings=findings))
        for name, table in made.items()
        if table[1]
    ]


_LEFT = {'variant', 'size', 'corpus', 'control', 'verdict', 'time, UTC'}


def _table(rows: Iterator[Row], left: Collection[str] = ()) -> Table:
    listed = list(rows)
    names = list(listed[0]) if listed else []
    headings = [(name, name in _LEFT or name in left) for name in names]
    return headings, [list(row.values()) for row in listed]


def _place(study: Study, row: Any) -> Row:
    """The cells that identify an arm, or a variant over sizes or corpora, in this study."""
    place = {'variant': prose.shown(row.key, study) if isinstance(row, Arm) else row.variant}
    for name, among in (('size', study.sizes), ('corpus', study.corpora)):
        if len(among) > 1 and hasattr(row, name):
            place[name] = getattr(row, name)
    return place


def _parts(study: Study, findings: Findings) -> Iterator[Row]:
    """Removing and reinvesting, which add up to the difference, and the longer budget."""
    removing, reinvesting, longer = (parts_of(findings, name) for name in PARTS)
    for arm in findings.arms:
        if findings.decomposition and not arm.is_baseline:
            differences = {
                'removing|equal shape - baseline': removing.get(arm.key),
                'reinvesting|matched - equal shape': reinvesting.get(arm.key),
                'both|matched - baseline': arm.difference,
            }
            if times := study.controls['longer']:
                heading = f'at {times} x the steps|matched - baseline'
                differences[heading] = longer.get(arm.key)
            yield _place(study, arm) | {name: interval(d) for name, d in differences.items()}


def yardsticks(study: Study, findings: Findings) -> Table:
    """Each baseline with the yardsticks that it has to beat."""
    rows = []
    for standing in rules.standings(study, (*findings.arms, *findings.controls)):
        arm, yardstick, best = standing.arm, standing.yardstick, standing.best
        row = {
            'size': arm.size,
            'corpus': arm.corpus,
            'trained|enough': 'no' if standing.remarks else 'yes',
            'tokens|seen': si(yardstick.seen) if yardstick else NOT_RECORDED,
            f'{prose.SPLITS[findings.split]}|loss': f'{arm.loss.mean:.3f}' if arm.loss else NONE,
            'best counts|of these': best[0] if best else NONE,
            'their|loss': f'{best[1]:.3f}' if best else NONE,
        }
        for name, value, spec, task in (
            ('gain by|position', standing.gain, '.3f', 'language'),
            ('BLEU', standing.bleu, '.1f', 'translation'),
            ('worth of|sources', standing.sources, '.3f', 'translation'),
        ):
            measured = NOT_RECORDED if value is None else f'{value:{spec}}'
            row[name] = measured if yardstick and yardstick.task == task else NONE
        rows.append(row)
    return _table(iter(rows))


def _laws(study: Study, findings: Findings) -> Iterator[Row]:
    """The law of each variant and the worth of its parameters, or why there is none."""
    for scaling in findings.scaling:
        law, worth = scaling.law, scaling.worth
        yield _place(study, scaling) | {
            'E,|nats/token': _bounded(law.E) if scaling.has_law else NONE,
            'A': f'{law.A:.3g}' if scaling.has_law else NONE,
            'a': _bounded(law.a) if scaling.has_law else NONE,
            'R²': f'{law.r_squared:.3f}' if scaling.has_law else NONE,
            'baseline parameters|per parameter': _bounded(worth) if scaling.has_worth else NONE,
            'no number, because': '; '.join(map(clause, scaling.problems)) or NONE,
        }


def _bounded(number: Interval) -> str:
    """'0.300 [0.281, 0.319]'."""
    return f'{number.value:.3f} [{number.low:.3f}, {number.high:.3f}]'


def _forms(study: Study, findings: Findings) -> Iterator[Row]:
    """The equations of each variant, with all options."""
    for name, arm in {prose.shown(arm.key, study): arm for arm in findings.arms}.items():
        form, score, value = prose.form(study.by_name[arm.example.run].config)
        yield {'variant': name, 'form': form, 'A[n]': score, 'B[n]': value}


def _ledger(study: Study) -> Iterator[Row]:
    for entry in study.ledger.entries if study.ledger else ():
        arms = [ArmKey(*ledger.arm_key(arm)) for arm in entry.get('arms', ())]
        (details,) = prose.macro('sheets.j2', 'entered', {'study': study}, entry=entry, arms=arms)
        yield {
            'time, UTC': str(entry['time']).removesuffix('+00:00').replace('T', ' '),
            'event': words(entry['event']),
            'look': str(entry.get('look', NONE)),
            'family': str(entry.get('family', NONE)),
            'details': details,
        }
