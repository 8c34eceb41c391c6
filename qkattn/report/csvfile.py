"""The summary as CSV: unrounded numbers, one line per arm, for other programs."""

import csv
import io
from collections.abc import Sequence

from qkattn.report.columns import mean, value_of
from qkattn.report.sentences import reason
from qkattn.study.tuning import KNOBS
from qkattn.verdict import Arm, Findings
from qkattn.verdict.measures import losses, probes, scores


def csv_table(findings: Findings) -> str:
    """An empty field means there is no such number."""
    rows = findings.arms
    measures = (*losses(rows), *scores(rows), *probes(rows))
    groups = dict.fromkeys(group for row in rows for group in row.example.parameters)
    multipliers = {of.variant: of.multiplier for of in findings.scaling}
    records = []
    for arm in findings.arms:
        record = _record(arm, [measure.field for measure in measures])
        parameters = arm.example.parameters
        record |= {
            f'weights_{group}': parameters.get(group) for group in groups if group != 'total'
        }
        if multipliers:
            found = multipliers.get(arm.variant)
            for part in ('value', 'low', 'high'):
                record[f'multiplier_{part}'] = found and getattr(found, part)
        records.append(record)
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(records[0]), lineterminator='\n')
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def _record(arm: Arm, fields: Sequence[str]) -> dict[str, object]:
    row, trial = arm, arm.example
    record: dict[str, object] = {
        'variant': row.variant,
        'size': row.size,
        'is_baseline': int(row.is_baseline),
        **_judged(arm),
        'd_model': trial.config['d_model'],
        'd_ff': trial.config['d_ff'],
        'parameters': trial.parameters['total'],
        'target_parameters': trial.target_parameters,
        'residual': trial.residual,
        'flops_per_token': trial.flops_per_token,
        'cache_floats_per_token': trial.cache_floats_per_token,
        'learning_rate': value_of(arm, 'learning_rate') if arm.sweeps else row.learning_rate,
        'learning_rates_run': ' '.join(f'{rate:g}' for rate in row.learning_rates),
        'learning_rate_at_edge': int(row.at_edge),
        'seeds': ' '.join(str(seed) for seed in sorted(t.seed for t in row.chosen)),
        'screening_seeds': ' '.join(
            str(seed) for seed in sorted({t.seed for t in row.screening_trials})
        ),
    }
    for knob in KNOBS:
        record |= _tuned(knob, arm)
    estimates = {'val_loss': row.val_loss}
    estimates |= {name: row.over_seeds(name) for name in fields}
    for name, value in estimates.items():
        for part in ('mean', 'sd', 'low', 'high', 'n'):
            record[f'{name}_{part}'] = None if value is None else getattr(value, part)
    errors = [e for t in row.chosen if (e := t.metrics['val_loss_se']) is not None]
    return record | {
        'val_loss_se': mean(errors),
        'eval_tokens': trial.eval_tokens,
        'tokens_per_second': mean(row.of_runs('tokens_per_second')),
        'train_seconds': sum(row.of_runs('train_seconds')),
        'compile_seconds': sum(row.of_runs('compile_seconds')),
        'diverged': row.num_diverged,
        'trials': len(row.verdict_trials),
        'screening_diverged': sum(not trial.finished for trial in row.screening_trials),
        'screening_trials': len(row.screening_trials),
    }


def _judged(arm: Arm) -> dict[str, object]:
    """The verdict and the difference it is about."""
    record = {'verdict': arm.verdict.decision.value if arm.verdict else None}
    record['reason'] = reason(arm.verdict) if arm.verdict else None
    for part in ('mean', 'sd', 'low', 'high', 'n', 'bootstrap_low', 'bootstrap_high', 'p'):
        record[f'difference_{part}'] = arm.difference and getattr(arm.difference, part)
    for part in ('p_equivalence', 'detectable', 'margin'):
        record[part] = arm.difference and getattr(arm.difference, part)
    for part in ('p_holm', 'p_equivalence_holm', 'detectable'):
        name = part if part != 'detectable' else 'detectable_holm'
        record[name] = arm.verdict and getattr(arm.verdict, part)
    record['paired'] = arm.difference and int(arm.difference.paired)
    return record


def _tuned(knob: str, arm: Arm) -> dict[str, object]:
    """What the screening says of one knob."""
    found = arm.sweeps.get(knob)
    record: dict[str, object] = {}
    if knob != 'learning_rate':
        record[knob] = value_of(arm, knob)
    parts = ('optimum', 'optimum_low', 'optimum_high', 'sensitivity', 'at_worst')
    record |= {f'{knob}_{part}': found and getattr(found, part) for part in parts}
    record[f'{knob}_bracketed'] = found and int(found.bracketed)
    return record
