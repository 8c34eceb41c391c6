"""The tables beside that of the arms: parts, corpora, controls, scaling laws, forms, the ledger.

Each is declared once, as rows of text, and printed in every format.
"""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from qkattn.report import prose
from qkattn.report.columns import columns
from qkattn.report.equations import form
from qkattn.report.prose import (
    NONE,
    NOT_RECORDED,
    SPLITS,
    bracketed,
    clause,
    interval,
    p_value,
    si,
    words,
)
from qkattn.storage import ledger
from qkattn.study.arm_key import ArmKey
from qkattn.verdict import rules
from qkattn.verdict.arms import Arm
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study

# Text, '|' breaks it into two lines; and whether its column is aligned to the left.
Heading = tuple[str, bool]


class Sheet(NamedTuple):
    """A table as text; its title and the note under it are `name`'s in templates/sheets.j2."""

    name: str
    headings: Sequence[Heading]
    rows: Sequence[Sequence[str]]
    title: str
    note: str


def sheets(study: Study, found: Findings) -> list[Sheet]:
    """The tables that this study has, by the order in which they are printed."""
    made = {
        'parts': _parts(study, found),
        'overall': _overall(study, found),
        'controls': _controls(study, found),
        'yardsticks': yardsticks(study, found),
        'positions': _positions(study, found),
        'laws': _laws(study, found),
        'forms': _forms(study, found),
        'ledger': _ledger(study),
    }
    return [
        Sheet(name, *table, *prose.macro_sentences('sheets.j2', name, study, found=found))
        for name, table in made.items()
        if table[1]
    ]


def _places(study: Study) -> tuple[list[Heading], Any]:
    """The headings that identify an arm in this study, and its cells."""
    fields = [('size', study.sizes), ('corpus', study.corpora)]
    shown = [name for name, among in fields if len(among) > 1]

    def cells(row: Any) -> list[str]:
        name = prose.shown(study, row.key) if isinstance(row, Arm) else row.variant
        return [name, *(getattr(row, field) for field in shown if hasattr(row, field))]

    return [('variant', True), *((name, True) for name in shown)], cells


def _parts(study: Study, found: Findings) -> tuple[list[Heading], list[list[str]]]:
    """Removing and reinvesting, which add up to the difference, and the longer budget."""
    headings, cells = _places(study)
    by_arm = {parts.key: parts for parts in found.decomposition}
    longer = study.controls['longer']
    names = ['removing|equal shape - baseline', 'reinvesting|matched - equal shape']
    names += ['both|matched - baseline']
    names += [f'at {longer} x the steps|matched - baseline'] if longer else []
    rows = []
    for arm in found.arms if by_arm else ():
        if arm.is_baseline:
            continue
        names_of_parts = ['removing', 'reinvesting', *['longer'] * bool(longer)]
        parts = [getattr(by_arm.get(arm.key), name, None) for name in names_of_parts]
        parts.insert(2, arm.comparison)
        texts = [interval(part.difference) if part else NONE for part in parts]
        rows.append([*cells(arm), *texts])
    return [*headings, *((name, False) for name in names)], rows


def _overall(study: Study, found: Findings) -> tuple[list[Heading], list[list[str]]]:
    """The verdict on each variant over all corpora, beside that on each corpus."""
    several = len(study.sizes) > 1
    left = ['variant', *['size'] * several]
    names = [f'difference in {found.split} loss,|nats/token [95 % interval]']
    tests = ['p,|corrected', f'p of more than {study.margin:g},|corrected']
    headings = [(name, True) for name in left] + [(names[0], False), ('verdict', True)]
    headings += [(name, False) for name in tests] + [(name, True) for name in study.corpora]
    rows = []
    for overall in found.overall:
        difference = interval(overall.comparison.difference if overall.comparison else None)
        verdict, by_corpus = overall.verdict, {arm.corpus: arm.verdict for arm in overall.arms}
        row = [overall.variant, *[overall.size] * several, difference, verdict.decision.value]
        row += [p_value(verdict.p_holm), p_value(verdict.p_margin_holm)]
        rows.append([*row, *(by_corpus[corpus].decision.value for corpus in study.corpora)])
    return headings, rows


def _controls(study: Study, found: Findings) -> tuple[list[Heading], list[list[str]]]:
    of_study = [column for column in columns(study, found) if column.control]
    rows = [[column.print(arm) for column in of_study] for arm in found.controls]
    return [(column.heading, column.left) for column in of_study], rows


def yardsticks(study: Study, found: Findings) -> tuple[list[Heading], list[list[str]]]:
    """Each baseline beside what it has to beat."""
    names = ['trained|enough', 'tokens|seen', f'{SPLITS[found.split]}|loss', 'best counts|of these']
    names += ['their|loss', 'gain by|position', 'BLEU', 'worth of|sources']
    rows = []
    for standing in rules.standings(study, (*found.arms, *found.controls)):
        arm, yardstick, best = standing.arm, standing.yardstick, standing.best

        def recorded(
            value: float | None, spec: str, task: str, actual: Any = yardstick and yardstick.task
        ) -> str:
            return NONE if actual != task else NOT_RECORDED if value is None else f'{value:{spec}}'

        row = [arm.size, arm.corpus, 'no' if standing.remarks else 'yes']
        row.append(si(yardstick.seen) if yardstick else NOT_RECORDED)
        row.append(f'{arm.loss.mean:.3f}' if arm.loss else NONE)
        row += (best[0], f'{best[1]:.3f}') if best else (NONE, NONE)
        row.append(recorded(standing.gain, '.3f', 'language'))
        row.append(recorded(standing.bleu, '.1f', 'translation'))
        rows.append([*row, recorded(standing.sources, '.3f', 'translation')])
    return [('size', True), ('corpus', True), *((name, False) for name in names)], rows


def _positions(study: Study, found: Findings) -> tuple[list[Heading], list[list[str]]]:
    """The loss of each arm by position, mean over seeds, and with the sources of other pairs."""
    headings, cells = _places(study)
    measured = study.measured
    arms = [arm for arm in (*found.arms, *found.controls) if measured.get(arm.key)]
    trials = [trial for arm in arms for trial in measured[arm.key]]
    names = list(dict.fromkeys(name for trial in trials for name in trial.positions))
    rows = []
    for arm in arms:
        of_arm = measured[arm.key]
        by_name = [[trial.positions.get(name) for trial in of_arm] for name in names]
        by_name.append([trial.shuffled for trial in of_arm])
        means = [NONE if None in x else f'{statistics.fmean(x):.3f}' for x in by_name]
        rows.append([*cells(arm), words(arm.control or NONE), *means])
    headings = [*headings, ('control', True), *((name, False) for name in names)]
    return [*headings, ('sources|shuffled', False)], rows


def _laws(study: Study, found: Findings) -> tuple[list[Heading], list[list[str]]]:
    """The law of each variant, what one of its parameters is worth, or why there is none."""
    headings, cells = _places(study)
    left = [heading for heading in headings if heading[0] != 'size']  # a law is over sizes
    numbers = ('E,|nats/token', 'A', 'a', 'R²', 'baseline parameters|per parameter')
    rows = []
    for scaling in found.scaling:
        law, worth = scaling.fit, scaling.multiplier
        row = cells(scaling)
        if law.problem:
            row += [NONE] * 4
        else:
            row += [bracketed(law.E), bracketed(law.A, '.3g'), bracketed(law.a)]
            row.append(f'{law.r_squared:.3f}')
        row.append(NONE if worth is None or worth.problem else bracketed(worth))
        problems = [law.problem, worth.problem if worth else None]
        reasons = dict.fromkeys(clause(problem) for problem in problems if problem)
        rows.append([*row, '; '.join(reasons) or NONE])
    return [*left, *((name, False) for name in numbers), ('no number, because', True)], rows


def _forms(study: Study, found: Findings) -> tuple[list[Heading], list[list[str]]]:
    """The equations of each variant, with all options."""
    arms = {prose.shown(study, arm.key): arm for arm in found.arms}
    headings = [('variant', True), ('form', True), ('A[n]', True), ('B[n]', True)]
    rows = []
    for name, arm in arms.items():
        written = form(study.by_name[arm.example.run].config)
        rows.append([name, written.name, written.score or NONE, written.value or NONE])
    return headings, rows


def _ledger(study: Study) -> tuple[list[Heading], list[list[str]]]:
    headings = [('time, UTC', True), ('event', True), ('look', False), ('family', False)]
    entries = study.ledger.entries if study.ledger else ()
    rows = []
    for entry in entries:
        arms = [ArmKey(*ledger.arm_key(arm)) for arm in entry.get('arms', ())]
        (sentence,) = prose.macro_sentences('sheets.j2', 'entered', study, entry=entry, arms=arms)
        time = str(entry['time']).removesuffix('+00:00').replace('T', ' ')
        numbers = [str(entry[name]) if name in entry else NONE for name in ('look', 'family')]
        rows.append([time, words(entry['event']), *numbers, sentence])
    return [*headings, ('what', True)], rows
