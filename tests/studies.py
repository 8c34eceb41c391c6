"""A synthetic study: files as training writes them, with numbers a test can recompute by hand."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from qkattn.config import Config, fingerprint, from_json, to_json
from qkattn.metrics import Metric, logged_fields
from qkattn.storage import ledger
from qkattn.storage.records import (
    ARM_KEY,
    corpora_of,
    describe_outside_metrics,
    metric_fields,
    metrics_of,
)
from qkattn.study import stored
from qkattn.study.tuning import MODEL_KNOBS
from tests.processes import ROOT

RESULTS = ROOT / 'experiments/results'  # committed studies
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
SCREENING_SEEDS = (100, 101)
VERDICT_SEEDS = tuple(range(8))
RUN_KEY = ('run', *ARM_KEY, 'stage', 'knob')
# What a line of results.jsonl has beside an entry of result.json.
OF_STUDY = ('study', *RUN_KEY, 'target_parameters', 'residual')


def trial_record(
    variant: str,
    size: str = 'd_model=128',
    seed: int = 0,
    learning_rate: float = 1e-3,
    val_loss: float | None = 2.0,
    d_model: int = 128,
    **changes: object,
) -> dict:
    """A line of results.jsonl."""
    key = {'variant': variant, 'size': size, 'corpus': 'stdlib', 'control': None}
    key |= {'stage': 'single', 'knob': None}
    key |= {name: changes[name] for name in key.keys() & changes.keys()}
    run = run_name(variant, size, *(key[n] for n in ('stage', 'knob', 'corpus', 'control')))
    attention = 4 * 4 * d_model**2 - 10 * len(variant)
    mlp = 8 * 4 * d_model**2
    parameters = {'embedding': 256 * d_model, 'attention': attention, 'mlp': mlp}
    parameters['norm'] = 9 * d_model
    parameters['total'] = sum(parameters.values())
    target = 16 * 3 * d_model**2 + 265 * d_model
    measured = {'val_loss': val_loss, 'test_loss': None if val_loss is None else val_loss + 0.1}
    for split in ('val', 'test'):
        nats = measured[f'{split}_loss']
        measured[f'{split}_bits_per_byte'] = None if nats is None else nats / math.log(2)
    shape = {'num_layers': 4, 'num_heads': 4, 'num_kv_heads': 4, 'head_size': d_model // 4}
    record = {
        'study': 'synthetic',
        'run': run,
        'config_hash': run,
        **key,
        'trial': {'seed': seed, 'learning_rate': learning_rate, 'weight_decay': 0.1},
        'status': 'diverged' if val_loss is None else 'finished',
        'num_steps': 400,
        'num_tokens': 400 * 768,
        'parameters': parameters,
        'target_parameters': target,
        'residual': parameters['total'] / target - 1,
        'config': {'d_model': d_model, 'd_ff': 4 * d_model} | shape,
        'flops_per_token': 6 * parameters['total'],
        'cache_floats_per_token': 8 * d_model,
        **measured,
        'val_loss_se': None if val_loss is None else 0.0125,
        **{'train_seconds': 12.5, 'compile_seconds': 3.25, 'tokens_per_second': 123456.0},
        'lifting': 'map',
        'data': {'name': 'stdlib', 'version': '3.11.7', 'unigram_bits_per_byte': 4.53},
        **{'eval_tokens': 65536, 'eval_rows': 512, 'test_tokens': 32768},
        'provenance': {
            'git': {'commit': 'abc1234', 'dirty': False},
            'versions': {'jax': '0.10.2'},
            'devices': {'platform': 'cpu', 'kind': 'cpu', 'count': 2},
        },
    }
    return record | changes


def result_record(**changes: object) -> dict:
    """A trial as result.json has it, without what a study adds."""
    record = trial_record('qk/vo', **changes)
    return {name: value for name, value in record.items() if name not in OF_STUDY}


def outside_record(variant: str, top: float | None = 0.75, **changes: object) -> dict:
    """A trial with a metric from outside the package, as it is described in results."""
    record = trial_record(variant, **changes)
    metric = Metric('top_3', 'score', 'Share of the first three.', unit='%', scale=100, logged=True)
    top = None if record['val_loss'] is None else top
    return (
        record | describe_outside_metrics({'top_3': metric}) | {'val_top_3': top, 'test_top_3': top}
    )


def on_corpus(record: dict, corpus: str, loss: float | None) -> dict:
    """The trial of a record with a loss on a further corpus, an entry of data.evaluate."""
    data = record['data'] | {'evaluate': {corpus: {'name': 'a', 'eval_tokens': 4096}}}
    return record | {'data': data, f'loss[{corpus}]': loss}


def tuned_arm(
    variant: str,
    size: str = 'd_model=128',
    losses: Sequence[float | None] = (2.0,) * 8,
    optimum: float = 4e-3,
    rates: Sequence[float] = RATES,
    diverged_rates: Sequence[float] = (),
    learning_rate: float | None = None,
    seeds: Sequence[int] = VERDICT_SEEDS,
    screening_seeds: Sequence[int] = SCREENING_SEEDS,
    **changes: object,
) -> list[dict]:
    """Screening and verdict trials of one arm.

    Screening losses are an exact parabola in ln(rate) with its vertex at `optimum`, one level per
    seed; the verdict ran at `learning_rate` (the optimum where it is None), one of `losses` a seed.
    """
    level = min((loss for loss in losses if loss is not None), default=2.0)
    screening = {'stage': 'screening', 'knob': 'learning_rate'} | changes
    records = []
    for rate in rates:
        for place, seed in enumerate(screening_seeds):
            loss = level + 0.01 * place + 0.1 * math.log(rate / optimum) ** 2
            loss = None if rate in diverged_rates else loss
            records.append(trial_record(variant, size, seed, rate, loss, **screening))
    rate = optimum if learning_rate is None else learning_rate
    return records + [
        trial_record(variant, size, seed, rate, loss, stage='verdict', **changes)
        for seed, loss in zip(seeds, losses, strict=False)
    ]


def write_tuned(directory: Path, records: list[dict], **keywords: object) -> Path:
    """A study with tuning, of records that `tuned_arm` made.

    Grids are those of `RATES` and may not grow; `tuning__seeds` is a field of the tuning. All
    baselines beat their yardsticks; `yardsticks` are changes of `write_yardsticks`.
    """
    yardsticks = keywords.pop('yardsticks', {})
    tuning = {
        'seeds': list(SCREENING_SEEDS),
        **{'max_points': len(RATES), 'max_seeds': len(SCREENING_SEEDS)},
        **{'learning_rates': list(RATES), 'weight_decays': [0.1]},
        **{f'{knob}s': [1.0] for knob in MODEL_KNOBS},
    }
    given = [name for name in keywords if name.startswith('tuning__')]
    tuning |= {name.removeprefix('tuning__'): keywords.pop(name) for name in given}
    write_study(directory, records, **{'tuning': tuning} | keywords)
    write_yardsticks(directory, records, **yardsticks)
    return directory


def write_study(
    directory: Path,
    records: list[dict],
    baseline: str = 'qk/vo',
    declared: Sequence[tuple] = (),
    num_evals: int = 10,
    num_documents: int = 100,
    **changes: object,
) -> Path:
    """Writes the study that `records` make up.

    `declared` adds runs without results, (variant, size) or (variant, size, stage, knob);
    `changes` are fields of study.json, which the ledger declares but for `arms`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    runs = by_run(records)
    plan = [plan_line(trials[0], trials) for trials in runs.values()]
    for variant, size, *stage in declared:
        about = dict(zip(('stage', 'knob'), stage, strict=False))
        plan.append(plan_line(trial_record(variant, size, **about)))
    # Arms that are trained longer are planned once others have results, so never declared.
    keys = [tuple(line[name] for name in ARM_KEY) for line in plan if line['control'] != 'longer']
    arms = [dict(zip(ARM_KEY, key, strict=True)) for key in dict.fromkeys(keys)]
    base = from_json(Config, {'trials': {'seeds': VERDICT_SEEDS}})
    study = {
        'name': 'synthetic',
        'question': 'Does attention need all four matrices at equal parameters?',
        'baseline': baseline,
        **{
            many: list(dict.fromkeys(arm[name] for arm in arms))
            for name, many in (('variant', 'variants'), ('size', 'sizes'), ('corpus', 'corpora'))
        },
        **{'matched': 'total', 'fill': 'd_ff', 'tolerance': 1e-3, 'margin': 0.005},
        'destinations': ['d_model'],
        'controls': {'equal_shape': True, 'longer': None, 'longer_seeds': []},
        **{'seeds': list(VERDICT_SEEDS), 'looks': [], 'tuning': None},
        **{'base': to_json(base), 'base_hash': fingerprint(base)},
        'arms': arms,
        'command': 'python -m experiments.ablate --config=configs/synthetic.py',
    }
    (directory / 'study.json').write_text(json.dumps(study | changes))
    (directory / ledger.NAME).unlink(missing_ok=True)
    ledger.declare(directory, study | changes | {'arms': arms})
    write_lines(directory / 'plan.jsonl', plan)
    write_lines(directory / 'results.jsonl', records)
    for name, trials in runs.items():
        (directory / name).mkdir(exist_ok=True)
        write_metrics(directory / name, trials, num_evals)
        write_documents(directory / name, trials, num_documents)
    return directory


def by_run(records: list[dict]) -> dict[str, list[dict]]:
    """Groups records by the run that they are of."""
    runs: dict[str, list[dict]] = {}
    for record in records:
        runs.setdefault(record['run'], []).append(record)
    return runs


def named_by_hash(records: list[dict]) -> list[dict]:
    """The records with the hash of its config as the name of each run, which plans have."""
    names = {run: fingerprint(run_config(t[0], t)) for run, t in by_run(records).items()}
    named = {run: {'run': name, 'config_hash': name} for run, name in names.items()}
    return [record | named[record['run']] for record in records]


def run_name(variant: str, size: str, *rest: str | None) -> str:
    """The directory of a run; the rest is its stage, knob, corpus and control, in any order."""
    parts = [variant, size] + [part for part in rest if part not in ('single', 'stdlib', None)]
    kept = ''.join(c if c.isalnum() or c in '-_' else '_' for c in '-'.join(parts))
    return f'{kept[:90]}-{len(variant)}'


def run_config(record: Mapping, trials: Sequence[Mapping] = ()) -> Config:
    """The resolved config of the run of a record with these trials, or that has not begun."""
    points = {'seed': VERDICT_SEEDS, 'learning_rate': RATES, 'weight_decay': (0.1,)}
    if trials:
        points = {name: tuple(dict.fromkeys(t['trial'][name] for t in trials)) for name in points}
    score, _, value = record['variant'].partition('?')[0].partition(' ')[0].partition('/')
    shape = {'score': score, 'value': value, 'context': 48} | record['config']
    settings = {
        **{'model': shape, 'data': {'name': record['corpus']}},
        **{'optimizer': {'schedule': 'linear'}, 'train': {'num_steps': record['num_steps']}},
        'trials': {f'{name}s': values for name, values in points.items()},
    }
    return from_json(Config, settings)


def plan_line(record: Mapping, trials: Sequence[Mapping] = ()) -> dict:
    """The line of plan.jsonl of the run of a record."""
    standard = record['variant'] == 'qk/vo' or record['control'] == 'equal_shape'
    return {
        **{name: record[name] for name in RUN_KEY},
        'destination': None if standard else 'd_model',
        **{'directory': record['run'], 'trials': len(trials) or 8},
        **{'target': record['target_parameters'], 'residual': record['residual']},
        'config': to_json(run_config(record, trials)),
    }


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def write_lines(path: Path, records: Sequence[Mapping]) -> None:
    path.write_text(''.join(json.dumps(record) + '\n' for record in records))


def edit_plan(directory: Path, run: str, **changes: object) -> None:
    """Changes a run's line in plan.jsonl; 'train__num_steps' is a setting of its config."""
    lines = read_lines(directory / 'plan.jsonl')
    (line,) = [line for line in lines if line['run'] == run]
    for name, value in changes.items():
        part, _, field = name.partition('__')
        if field:
            line['config'][part][field] = value
        else:
            line[name] = value
    write_lines(directory / 'plan.jsonl', lines)


def write_metrics(directory: Path, records: list[dict], num_evals: int) -> None:
    """Curves that fall to each final loss; a diverged trial's is null from the third on.

    bits/byte are those of one byte a token, or null where no trial has any.
    """
    first = records[0]
    lines = []
    logged = logged_fields(metrics_of(first), corpora_of(first))
    scores = {n: [record.get(n) for record in records] for n in logged}
    in_bytes = any(record['val_bits_per_byte'] is not None for record in records)
    for index in range(1, num_evals + 1):
        step = first['num_steps'] * index // num_evals
        fall = 2.0 * (first['num_steps'] / step - 1) / num_evals
        finals = [record['val_loss'] for record in records]
        loss = [(3.5 if index < 3 else None) if f is None else f + fall for f in finals]
        bits = [None if nats is None else nats / math.log(2) for nats in loss]
        lines.append({'kind': 'train', 'step': step, 'loss': loss, 'grad_norm': loss})
        evaluation = scores | {'val_loss': loss, 'val_bits_per_byte': bits if in_bytes else None}
        lines.append({'kind': 'eval', 'step': step, **evaluation})
    measured = [n for n in metric_fields(first) if any(n in r for r in records)]
    final = {
        **{'kind': 'final', 'step': first['num_steps']},
        'trials': [record['trial'] for record in records],
        **{name: first.get(name) for name in ('eval_tokens', 'test_tokens')},
        **{name: [record.get(name) for record in records] for name in measured},
    }
    write_lines(directory / 'metrics.jsonl', [*lines, final])


def write_documents(
    directory: Path, records: Sequence[Mapping], number: int = 100, shifts: float | np.ndarray = 0.0
) -> None:
    """Losses by document whose sums are those of the records, of documents that differ in length.

    They differ from the split's loss by the same nats/token in every trial, plus `shifts` on the
    test split (by document, of mean zero), so that without these they leave no error in a
    difference.
    """
    weights_C = 10 + np.arange(number) % 5
    place_C = np.arange(number)
    content = {}
    for split, name, total, shifts_C in (
        ('validation', 'val_loss', records[0]['eval_tokens'], 0.0),
        ('test', 'test_loss', records[0]['test_tokens'], shifts),
    ):
        losses = [record[name] for record in records]
        if any(loss is not None for loss in losses):
            tokens_C = total * weights_C // weights_C.sum()
            tokens_C[-1] += total - tokens_C.sum()
            excess_C = 0.1 * (-1.0) ** place_C + shifts_C
            excess_C -= tokens_C @ excess_C / total
            content[split] = {
                'documents': [f'{split}/{place}.py' for place in place_C],
                'tokens': tokens_C.tolist(),
                'nats': [x if x is None else (tokens_C * (x + excess_C)).tolist() for x in losses],
            }
    (directory / 'documents.json').write_text(json.dumps(content) + '\n')


def write_yardsticks(
    directory: Path,
    records: Sequence[dict],
    baseline: str = 'qk/vo',
    trials: Mapping[str, Sequence[Mapping]] | None = None,
    **changes: object,
) -> None:
    """yardsticks.json of a study: losses far above those of any arm.

    `trials` are measured of the verdict runs of arms, by variant; `changes` are of every group.
    """
    losses = {split: {'5-gram': 9.0, '6-gram': 9.1} for split in ('val', 'test')}
    counted = {'task': 'language', 'seen': 307200, 'tokens': 307200, 'losses': losses}
    groups = {}
    runs = {}
    for record in (record for record in records if record['stage'] == 'verdict'):
        key = {field: record[field] for field in ARM_KEY}
        name = record['run']
        measured = (trials or {}).get(record['variant'])
        runs[name] = {'run': name, **key, 'trials': measured, 'why': None}
        if record['variant'] == baseline and record['control'] != 'equal_shape':
            group = {name: record[name] for name in ('size', 'corpus')}
            group['longer'] = record['control'] == 'longer'
            groups.setdefault(tuple(group.values()), {'run': name} | group | counted | changes)
    content = {'groups': list(groups.values()), 'runs': list(runs.values()), 'seconds': 1.0}
    (directory / ledger.YARDSTICKS).write_text(json.dumps(content))


def beat_yardsticks(study: Path) -> None:
    """Makes a copy of a committed study a working directory, with yardsticks that it beats."""
    stored.unpack_in_place(study)
    baseline = json.loads((study / 'study.json').read_text())['baseline']
    write_yardsticks(study, read_lines(study / 'results.jsonl'), baseline, task='probe')
