"""The notes under the summary table."""

from collections.abc import Sequence

from qkattn.report.load import Study
from qkattn.report.measures import scores, shown
from qkattn.report.summary import Row


def notes(study: Study, rows: Sequence[Row]) -> tuple[str, ...]:
    """Sentences under the table: what the numbers are, and what they do not show."""
    said = []
    if study.baseline is not None:
        said.append(
            f'Difference: val loss minus that of {study.baseline} at the same size, paired by '
            'seed, in nats/token; above zero is worse than the baseline.'
        )
        said += [
            f'No difference at {size}: the baseline {study.baseline} has no finished trial there.'
            for size in study.sizes
            if not any(row.is_baseline and row.chosen for row in rows if row.size == size)
        ]
    counts = sorted({len(row.chosen) for row in rows if row.chosen})
    if counts and counts[-1] > 1:
        n = '-'.join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
        said.append(
            f'Intervals (95 %, Student t) over {n} seeds are descriptive: they are not corrected '
            'for the number of comparisons and are no verdict.'
        )
    else:
        said.append('One seed: no interval can be given, and a difference may be seed noise.')
    said.append(_learning_rate_note(rows))
    if any(row.at_edge for row in rows):
        said.append(
            '* The best learning rate is the smallest or largest that was run, so it is not '
            'bracketed.'
        )
    diverged = sum(row.num_diverged for row in rows)
    if diverged:
        total = sum(len(row.trials) for row in rows)
        said.append(f'{diverged} of {total} trials diverged; they are counted and never averaged.')
    residuals = [abs(row.example.residual) for row in rows if row.example.residual is not None]
    if study.matched is not None and residuals:
        said.append(
            f'Weights are matched in {study.matched.replace("_", "-")} count; the largest residual '
            f'is {100 * max(residuals):.3f} %.'
        )
    elif study.matched is None:
        said.append('Weights are not matched between variants.')
    said += _score_notes(rows)
    said.append('FLOPs/token are those of a forward pass.')
    said.append("tokens/s and cell s are the whole cell's, all its trials together, training only.")
    if study.missing:
        names = ', '.join(f'{c.variant} at {c.size} ({c.progress})' for c in study.missing)
        said.append(f'Missing cells, {len(study.missing)} of {len(study.cells)}: {names}.')
    return tuple(said)


def _score_notes(rows: Sequence[Row]) -> list[str]:
    """What the scores in the table are, each sentence only where its score is shown."""
    said = []
    fields = {measure.field for measure in scores(rows)}
    if fields & {'val_accuracy', 'test_accuracy'}:
        said.append(
            'Accuracy: the part of the targets that are the likeliest token; solved: the part of '
            'the rows in which every target is.'
        )
    for name, metric in (('BLEU', 'bleu'), ('chrF', 'chrf')):
        for split in ('val', 'test'):
            if f'{split}_{metric}' not in fields:
                continue
            said.append(f'{name}: {split} split, from 0 to 100{_made(rows, split, metric)}.')
    return said


def _made(rows: Sequence[Row], split: str, metric: str) -> str:
    """', 1,000 sentences, signature ...', of the two what is recorded."""

    def each(field: str) -> list:
        values = dict.fromkeys(getattr(trial, f'{split}_{field}') for trial in shown(rows))
        return [value for value in values if value is not None]

    sentences = ' or '.join(f'{number:,}' for number in each('num_sentences'))
    signatures = ' or '.join(each(f'{metric}_signature'))
    return (f', {sentences} sentences' if sentences else '') + (
        f', signature {signatures}' if signatures else ''
    )


def _learning_rate_note(rows: Sequence[Row]) -> str:
    tuned = [row for row in rows if len(row.learning_rates) > 1]
    if not tuned:
        rates = sorted({rate for row in rows for rate in row.learning_rates})
        listed = ', '.join(f'{rate:g}' for rate in rates)
        return f'The learning rate was not tuned per arm: each ran at one only ({listed}).'
    listed = ', '.join(f'{rate:g}' for rate in sorted({r for t in tuned for r in t.learning_rates}))
    said = (
        f'Each row is shown at the learning rate with its lowest mean val loss, of {listed}; the '
        'same seeds chose it, so the loss is slightly optimistic.'
    )
    if len(tuned) < len(rows):
        names = ', '.join(f'{r.variant} at {r.size}' for r in rows if len(r.learning_rates) == 1)
        said += f' Not tuned, one learning rate only: {names}.'
    return said
