"""The notes under the summary table."""

from collections.abc import Sequence

from qkattn.report.numbers import counted, listed, span, words
from qkattn.report.sentences import (
    NO_SCALING_LAW,
    QUANTITIES,
    at,
    not_scaled,
    progress,
    reason,
    remark_text,
    scaling_problem,
)
from qkattn.stats.inference import LEVEL, POWER
from qkattn.stats.scaling import ProblemCode
from qkattn.verdict import Decision, Findings
from qkattn.verdict.arms import Arm
from qkattn.verdict.load import Study
from qkattn.verdict.measures import probes, scores

UNDECIDED = (Decision.UNDECIDED, Decision.NO_VERDICT)


def notes(study: Study, findings: Findings) -> tuple[str, ...]:
    """Sentences under the table: what the numbers are, and what they do not show."""
    rows = findings.arms
    said = [*_difference_notes(study, rows)]
    said += _verdict_notes(study, findings) if study.tuning else _descriptive_notes(rows)
    said += _budget_notes(study, rows)
    said += [remark_text(remark) for remark in findings.remarks]
    said += _reasons(findings)
    said += _score_notes(rows)
    if probes(rows):
        said.append(
            'Induction: how much lower the loss of a random pattern is at its repetition (gain), '
            'and the part of its tokens that are then the likeliest (accuracy).'
        )
    said.append('FLOPs/token are those of a forward pass.')
    said.append("tokens/s and run s are the whole run's, all its trials together, training only.")
    said += _scaling_notes(study, findings)
    if study.missing:
        names = ', '.join(f'{m.variant} at {m.size} ({progress(m)})' for m in study.missing)
        said.append(f'Missing, {len(study.missing)}: {names}.')
    return tuple(said)


def _difference_notes(study: Study, rows: Sequence[Arm]) -> list[str]:
    if study.baseline is None:
        return []
    said = [
        f'Difference: val loss minus that of {study.baseline} at the same size, paired by seed, in '
        'nats/token; above zero is worse than the baseline. "unpaired": no seed is shared (Welch).'
    ]
    return said + [
        f'No difference at {size}: the baseline {study.baseline} has no finished trial there.'
        for size in study.sizes
        if not any(row.is_baseline and row.chosen for row in rows if row.size == size)
    ]


def _verdict_notes(study: Study, findings: Findings) -> list[str]:
    """How a word in the verdict column comes about."""
    tuning = study.tuning
    number = findings.num_comparisons
    said = [
        f'Verdicts: t tests of the differences, corrected after Holm over all '
        f'{counted(number, "comparison")} of the study, so that with probability {LEVEL:g} none of '
        'the words better and worse is false. Equivalent: two one-sided tests, corrected alike, '
        f'put the difference within {study.margin:g} nats/token. Undecided is not equivalent.',
        f'Detectable difference: what would be found with probability {POWER:g} after that '
        'correction, at the spread between seeds that was seen; each interval is 95 % by itself.',
        f'Settings ({listed(map(words, tuning.knobs)) or "none"}) were tuned per arm on screening '
        f'seeds {listed(tuning.seeds)}; losses and differences are over the verdict seeds '
        f'{listed(study.seeds)} alone.',
    ]
    if len(tuning.knobs) > 1:
        said.append(
            f'They were tuned one after another ({", ".join(map(words, tuning.knobs))}): each with '
            'those before it at what was found for them and those behind it at the middle of their '
            'grids, and not again.'
        )
    said.append(_given_settings(findings))
    if any(arm.not_bracketed for arm in findings.arms):
        said.append(
            '* Not bracketed: no worse value was tried on one side, so a better one may lie there.'
        )
    if any(bowl.sensitivity is not None for arm in findings.arms for bowl in arm.sweeps.values()):
        said.append(
            'Learning rate sensitivity: mean loss over the screened values minus the lowest, in '
            'nats/token; it compares arms only as far as their grids agree.'
        )
    return said


def _given_settings(findings: Findings) -> str:
    """What intervals and words leave out: how well the settings are known, and on which rows."""
    bowls = [(arm, knob, bowl) for arm in findings.arms for knob, bowl in arm.sweeps.items()]
    known = [(bowl.at_worst, arm, knob) for arm, knob, bowl in bowls if bowl.at_worst is not None]
    missed = 'by how much screening may have missed the best ones is not known'
    if known:
        most, arm, knob = max(known, key=lambda found: found[0])
        missed = (
            'screening may have missed the best ones (within the 95 % intervals of the optima) by '
            f'up to {most:.2g} nats/token ({words(knob)} of {at(arm.place)})'
        )
        if unknown := len(bowls) - len(known):
            missed += f', and {unknown} of {len(bowls)} optima by an unknown amount'
    rows = 'screening and verdict are evaluated on the same validation rows'
    if any(trial.metrics['test_loss'] is not None for row in findings.arms for trial in row.chosen):
        rows += ", while the test column's rows have chosen nothing"
    return f'Intervals and words are given the settings found: {missed}; {rows}.'


def _reasons(findings: Findings) -> list[str]:
    """Why an arm is neither better nor worse nor equivalent, or not for sure; each reason once."""
    arms: dict[tuple[str, str], list[str]] = {}
    for arm in findings.arms:
        if arm.verdict and (arm.verdict.decision in UNDECIDED or arm.verdict.caveats):
            arms.setdefault((arm.verdict.decision.value, reason(arm.verdict)), []).append(
                at(arm.place)
            )
    return [
        f'{word.capitalize()}, {listed(names)}: {reason}.' for (word, reason), names in arms.items()
    ]


def _descriptive_notes(rows: Sequence[Arm]) -> list[str]:
    said = []
    counts = {len(row.chosen) for row in rows if row.chosen}
    if max(counts, default=0) > 1:
        said.append(
            f'Intervals (95 %, Student t) over {span(counts)} seeds are descriptive: they are '
            'not corrected for the number of comparisons and are no verdict.'
        )
    else:
        said.append('One seed: no interval can be given, and a difference may be seed noise.')
    said.append(_learning_rate_note(rows))
    if any(row.at_edge for row in rows):
        said.append(
            '* The best learning rate is the smallest or largest that was run, so it is not '
            'bracketed.'
        )
    return said


def _budget_notes(study: Study, rows: Sequence[Arm]) -> list[str]:
    residuals = [abs(row.example.residual) for row in rows if row.example.residual is not None]
    if study.matched is None:
        return ['Parameters are not matched between variants; only the shapes are those given.']
    if not residuals:
        return []
    said = [
        f'Matched between arms: {QUANTITIES[study.matched]}; the largest residual is '
        f'{100 * max(residuals):.3f} %.'
    ]
    if len(study.destinations) > 1:
        said.append(
            f'In brackets: where the parameters go that a variant saves '
            f'({listed(study.destinations)}); each is an arm of its own.'
        )
    return said


def _scaling_notes(study: Study, findings: Findings) -> list[str]:
    """Multipliers, or once each why there are none."""
    said: list[str] = []
    problems: dict[str, list[str]] = {}
    sizes = {found.variant: len(found.fit.sizes) for found in findings.scaling}
    for found in findings.scaling:
        if found.variant == study.baseline and found.fit.problem:
            problems.setdefault(scaling_problem(found.fit.problem), []).append(found.variant)
        if found.multiplier is None:
            continue
        if refused := found.multiplier.problem:
            if refused.code is not ProblemCode.NO_BASELINE_LAW:
                problems.setdefault(scaling_problem(refused), []).append(found.variant)
            continue
        said.append(
            f'One weight of {found.variant} is worth {found.multiplier.value:.3g} '
            f'[{found.multiplier.low:.3g}, {found.multiplier.high:.3g}] of {study.baseline}, by '
            f"the law of loss against size fitted to the baseline's {sizes[study.baseline]} sizes."
        )
    for problem, variants in problems.items():
        said.append(f'No scaling law for {listed(variants)}: {problem}.')
    if findings.lacks_scaling:
        said.append(NO_SCALING_LAW)
    left_out = [f'{at(arm.place)} ({not_scaled(arm)})' for arm in findings.arms if arm.not_scaled]
    if left_out and (findings.scaling or findings.lacks_scaling):
        said.append(f'Left out of the laws of size: {listed(left_out)}.')
    if any(not found.fit.problem for found in findings.scaling) and study.tuning is None:
        said.append(
            'The laws of size are descriptive: the learning rate was not tuned with seeds of its '
            'own.'
        )
    return said


def _score_notes(rows: Sequence[Arm]) -> list[str]:
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


def _made(rows: Sequence[Arm], split: str, metric: str) -> str:
    """', 1,000 sentences, signature ...', of the two what is recorded."""

    def each(field: str) -> list:
        values = dict.fromkeys(
            trial.metrics[f'{split}_{field}'] for arm in rows for trial in arm.chosen
        )
        return [value for value in values if value is not None]

    sentences = ' or '.join(f'{number:,}' for number in each('num_sentences'))
    signatures = ' or '.join(each(f'{metric}_signature'))
    return (f', {sentences} sentences' if sentences else '') + (
        f', signature {signatures}' if signatures else ''
    )


def _learning_rate_note(rows: Sequence[Arm]) -> str:
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
