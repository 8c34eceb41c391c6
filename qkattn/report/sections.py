"""Tables of the page: results, scaling, parameters, costs, hygiene, what is missing."""

from collections.abc import Sequence
from html import escape

from qkattn.report import elements
from qkattn.report.columns import columns_of
from qkattn.report.figures.style import HUES
from qkattn.report.numbers import NONE, si
from qkattn.report.sentences import progress, reason, remark_text, scaling_problem
from qkattn.stats.scaling import Interval
from qkattn.verdict.arms import Arm
from qkattn.verdict.findings import Findings, Scaling
from qkattn.verdict.load import Study


def table_html(found: Findings) -> str:
    """The summary table; the first column stays in sight when it scrolls."""
    columns = columns_of(found)
    head = ''.join(elements.heading(c.heading[0], c.left, c.heading[1]) for c in columns)
    left = [index for index, column in enumerate(columns[1:]) if column.left]
    body = [
        elements.row(
            columns[0].text(arm),
            [column.text(arm) for column in columns[1:]],
            left,
            'baseline' if arm.is_baseline else '',
        )
        for arm in found.arms
    ]
    return elements.table(head, body)


def verdicts_html(found: Findings) -> str:
    """Every verdict with its reason, which is too long for the summary table."""
    judged = [arm for arm in found.arms if arm.verdict is not None]
    head = ''.join(elements.heading(name, left=True) for name in ('arm', 'size', 'verdict', 'why'))
    body = [
        elements.row(
            arm.variant, [arm.size, arm.verdict.decision.value, reason(arm.verdict)], (0, 1, 2)
        )
        for arm in judged
    ]
    return elements.table(head, body, kind='reasons') if judged else ''


def scaling_html(found: Findings) -> str:
    """The law and the multiplier of every arm, or the sentence why there is no number."""
    head = elements.heading('arm', left=True)
    head += ''.join(map(elements.heading, ('E, nats', 'A', 'a', 'R²', 'one weight is worth')))
    head += elements.heading('no number, because', left=True)
    return elements.table(head, [_scaling(scaling) for scaling in found.scaling], kind='reasons')


def _scaling(scaling: Scaling) -> str:
    law, worth = scaling.fit, scaling.multiplier
    fitted = [NONE] * 4
    if not law.problem:
        fitted = [
            _interval(law.E),
            _interval(law.A, '.3g'),
            _interval(law.a),
            f'{law.r_squared:.3f}',
        ]
    number = NONE
    if worth and not worth.problem:
        number = _interval(Interval(worth.value, worth.low, worth.high))
    problems = [law.problem, worth.problem if worth else None]
    why = '; '.join(dict.fromkeys(scaling_problem(problem) for problem in problems if problem))
    return elements.row(scaling.variant, [*fitted, number, why], (5,))


def _interval(number: Interval, digits: str = '.3f') -> str:
    return f'{number.value:{digits}} [{number.low:{digits}}, {number.high:{digits}}]'


def parameters_html(rows: Sequence[Arm]) -> str:
    """Parameters of each row by group: counts and a bar, to one scale at each size."""
    groups = list(dict.fromkeys(g for row in rows for g in row.example.parameters if g != 'total'))
    largest = {
        size: max(r.example.parameters['total'] for r in rows if r.size == size)
        for size in dict.fromkeys(row.size for row in rows)
    }
    legend = ''.join(
        f'<span><i class="group-{i % len(HUES)}"></i>{escape(group)}</span>'
        for i, group in enumerate(groups)
    )
    head = ''.join(f'<th scope="col">{escape(group)}</th>' for group in (*groups, 'total'))
    body = []
    for row in rows:
        parameters = row.example.parameters
        bars = ''.join(
            f'<i class="group-{i % len(HUES)}" '
            f'style="width:{100 * parameters[group] / largest[row.size]:.2f}%"></i>'
            for i, group in enumerate(groups)
            if group in parameters
        )
        counts = ''.join(
            f'<td>{parameters[group]:,}</td>' if group in parameters else '<td>-</td>'
            for group in (*groups, 'total')
        )
        body.append(
            f'<tr>{elements.name_html(row.variant)}'
            f'<td class="left">{escape(row.size)}</td>{counts}'
            f'<td><div class="bar">{bars}</div></td></tr>'
        )
    names = [f'<th scope="col" class="left">{name}</th>' for name in ('variant', 'size', 'share')]
    head = f'{names[0]}{names[1]}{head}{names[2]}'
    return f'<p class="legend">{legend}</p>' + elements.table(head, body)


def costs_html(rows: Sequence[Arm]) -> str:
    """FLOPs and cache of each row, and how many times the baseline's at the same size."""
    baselines = {row.size: row.example for row in rows if row.is_baseline}
    head = ''.join(elements.heading(name, left=True) for name in ('variant', 'size'))
    head += elements.heading('FLOPs/token', small='forward pass')
    head += elements.heading('x baseline')
    head += elements.heading('cache floats/token') + elements.heading('x baseline')
    body = []
    for row in rows:
        texts = [row.size]
        for field in ('flops_per_token', 'cache_floats_per_token'):
            own = getattr(row.example, field)
            reference = getattr(baselines.get(row.size), field, None)
            texts += [si(own), f'{own / reference:.2f}' if own is not None and reference else NONE]
        body.append(elements.row(row.variant, texts, (0,), 'baseline' if row.is_baseline else ''))
    return elements.table(head, body)


def hygiene_html(found: Findings) -> str:
    """All remarks, those that stand in the way of a verdict marked by a word."""
    if not found.remarks:
        return '<p>No remark.</p>'
    body = ''.join(
        f'<li class="blocks"><strong>blocks a verdict:</strong> {escape(remark_text(remark))}</li>'
        if remark.blocks
        else f'<li>{escape(remark_text(remark))}</li>'
        for remark in found.remarks
    )
    return f'<ul class="notes">{body}</ul>'


def missing_html(study: Study) -> str:
    """The arms and runs without results, and how far each has come."""
    if not study.missing:
        return f'<p>None: all {len(study.runs)} runs have results.</p>'
    head = ''.join(
        elements.heading(name, left=True) for name in ('run', 'variant', 'size', 'state')
    )
    body = [
        elements.row(
            run.name or 'not planned yet', [run.variant, run.size, progress(run)], (0, 1, 2)
        )
        for run in study.missing
    ]
    return elements.table(head, body)
