"""The columns of a report, each declared once: an entry of `columns` adds one to every table.

A column with a heading is printed on the page, in table.md and in table.txt, a brief one also in
the LaTeX table, one of the headline in a Markdown page, one for controls in their table. Every
column with a key stands in the data frame, unrounded, and in table.csv, to six digits, in the unit
of the result files.
"""

import functools
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from qkattn.report import prose
from qkattn.report.column import (
    DIFFERENCE,
    ESTIMATE,
    Column,
    follow,
    of_knob,
    of_metric,
    of_parts,
    of_place,
    of_shape,
    of_verdict,
)
from qkattn.report.prose import interval, mean_sd, reasons, si
from qkattn.study.tuning import KNOBS
from qkattn.verdict.arms import Arm
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study
from qkattn.verdict.measures import Measure, losses, probes, scores


def measured(found: Findings) -> tuple[Measure, ...]:
    """The metrics that a report shows, in the order of their columns; losses are in nats/token."""
    val, *test = losses(found.arms)
    return (*(test or [val]), *scores(found.arms), *probes(found.arms), *([val] if test else []))


def columns(study: Study, found: Findings) -> list[Column]:
    """The columns of a study; results stand left, in sight on a narrow screen."""
    arms, tuned = found.arms, study.tuning is not None
    intervals = any(arm.difference and arm.difference.low is not None for arm in arms)
    compared = study.baseline is not None
    multipliers = {(of.variant, of.corpus): of.multiplier for of in found.scaling}
    groups = dict.fromkeys(group for arm in arms for group in arm.example.parameters)
    main, *_ = metrics = measured(found)
    unit = 'nats/token [95 % interval]' if intervals else 'nats/token'
    heading = f'difference in {found.split} loss,|{unit}'
    by_key = {
        'p_equivalence': 'difference.p_equivalence',
        **{name: f'difference.{name}' for name in ('detectable', 'margin', 'paired')},
        'split': 'comparison.split',
        'difference_validation': 'comparison.validation',
        'num_documents': 'comparison.num_documents',
        'alpha': 'verdict.alpha',
        'num_comparisons': 'verdict.num_comparisons',
        'num_seeds': 'verdict.num_seeds',
    }
    declared = [
        Column('variant', 'variant'),
        *of_place(study, compared),
        Column('control', 'control'),
        Column('is_baseline', 'is_baseline'),
        Column('post_hoc', lambda arm: int(prose.is_post_hoc(study, arm.place))),
        Column('', _difference, heading, headline=compared, control=compared),
        Column('', _interval, heading, full=False, brief=compared),
        Column('difference', 'difference', parts=DIFFERENCE),
        *of_verdict(study),
        *of_parts(found),
        Column('reason', lambda arm: arm.verdict and reasons(arm)),
        *(Column(key, path) for key, path in by_key.items()),
        *(c for metric in metrics for c in of_metric(metric, metric == main, not compared)),
        *(
            Column(field, functools.partial(Arm.over_seeds, field=field), parts=ESTIMATE)
            for field in ('val_bits_per_byte', 'test_bits_per_byte')
            if any(arm.over_seeds(field) for arm in arms)
        ),
        *(column for knob in KNOBS for column in of_knob(knob, arms, tuned)),
        Column(
            '',
            lambda arm: follow(arm.sweeps.get(KNOBS[0]), 'sensitivity'),
            'learning rate sensitivity,|nats/token',
            '.3f',
            has=tuned,
            description='Learning rate sensitivity: mean loss over the screened values minus the '
            'lowest; it compares arms only as far as their grids agree.',
        ),
        Column(
            'correlation',
            'comparison.correlation',
            'correlation|over seeds' * compared,
            '+.2f',
        ),
        Column('', 'screening_trials', 'screening|diverged', _diverged, has=tuned),
        Column('', lambda arm: len(arm.chosen), 'seeds', control=True),
        Column(
            'parameters', 'example.parameters.total', 'parameters', ',', brief=True, control=True
        ),
        Column('target_parameters', 'example.target_parameters'),
        Column(
            'residual',
            'example.residual',
            'residual,|%',
            lambda of: f'{100 * of:+.3f}',
            control=True,
        ),
        *(
            Column(f'parameters_{group}', f'example.parameters.{group}', heading, ',')
            for group in groups
            if group != 'total'
            for heading in ['attention|parameters' * (group == 'attention')]
        ),
        *of_shape(found),
        Column(
            'flops_per_token',
            'example.flops_per_token',
            'FLOPs|/token',
            si,
            description='FLOPs/token are those of a forward pass.',
        ),
        Column(
            'cache_floats_per_token', 'example.cache_floats_per_token', 'cache|floats/token', si
        ),
        Column(
            'tokens_per_second',
            lambda arm: _mean(arm.of_runs('tokens_per_second')),
            'tokens|/s',
            si,
            description='tokens/s and run time are of the whole run, all its trials together, '
            'training only.',
        ),
        Column('train_seconds', lambda arm: sum(arm.of_runs('train_seconds')), 'run time,|s', si),
        Column('compile_seconds', lambda arm: sum(arm.of_runs('compile_seconds'))),
        Column('', 'verdict_trials', 'diverged', _diverged, control=True),
        Column('diverged', 'num_diverged'),
        Column('trials', lambda arm: len(arm.verdict_trials)),
        Column('steps', 'example.num_steps'),
        Column('screening_diverged', lambda arm: sum(not t.finished for t in arm.screening_trials)),
        Column('screening_trials', lambda arm: len(arm.screening_trials)),
        Column('seeds', lambda arm: _seeds(arm.chosen)),
        Column('screening_seeds', lambda arm: _seeds(arm.screening_trials)),
        Column('learning_rates_run', lambda arm: ' '.join(f'{r:g}' for r in arm.learning_rates)),
        Column('learning_rate_at_edge', 'at_edge'),
        Column('val_loss_se', lambda arm: _mean(t.metrics['val_loss_se'] for t in arm.chosen)),
        Column('eval_tokens', 'example.eval_tokens'),
        Column('test_tokens', 'example.test_tokens'),
        Column(
            'multiplier',
            lambda arm: multipliers.get((arm.variant, arm.corpus)),
            parts=('value', 'low', 'high'),
            has=bool(multipliers),
        ),
    ]
    return [column for column in declared if column.has]


def _difference(arm: Arm) -> str:
    loss = f', {arm.split} loss {mean_sd(arm.loss, 4)}' * arm.is_baseline
    return f'{_interval(arm)}{loss}'


def _interval(arm: Arm) -> str:
    if arm.is_baseline:
        return 'baseline'
    unpaired = arm.difference is not None and not arm.difference.paired
    return interval(arm.difference) + ' unpaired' * unpaired


def _diverged(trials: Sequence[Any]) -> str:
    return f'{sum(not trial.finished for trial in trials)}/{len(trials)}'


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _seeds(trials: Iterable[Any]) -> str:
    return ' '.join(map(str, sorted({trial.seed for trial in trials})))
