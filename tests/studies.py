"""A synthetic study, whose files have numbers that a test can recompute by hand."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
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
# The fields that a line of results.jsonl has, but not an entry of result.json.
OF_STUDY = ('study', *RUN_KEY, 'target_parameters', 'residual')


def bits_per_byte(nats_per_token: float | None) -> float | None:
    """A loss in bits/byte if every token is one byte. None stays None."""
    return None if nats_per_token is None else nats_per_token / math.log(2)


def trial_record(
    variant: str,
    size: str = 'd_model=128',
    seed: int = 0,
    learning_rate: float = 1e-3,
    val_loss: float | None = 2.0,
    d_model: int = 128,
    **changes: object,
) -> dict:
    """Returns a line of results.jsonl.

    Args:
        variant: Variant of the arm.
        size: Size of the arm.
        seed: Seed of the trial.
        learning_rate: Learning rate of the trial.
        val_loss: Validation loss in nats/token. None if the trial diverged.
        d_model: Width of the model.
        **changes: Fields that replace others or are added.
    """
    key = {
        'variant': variant,
        'size': size,
        'corpus': 'stdlib',
        'control': None,
        'stage': 'single',
        'knob': None,
    }
    for field in key:
        if field in changes:
            key[field] = changes[field]
    run = run_name(variant, size, key['stage'], key['knob'], key['corpus'], key['control'])

    num_layers = 4
    num_heads = 4
    saved = 10 * len(variant)  # parameters: a small difference between variants
    parameters = {
        'embedding': 256 * d_model,
        'attention': num_layers * 4 * d_model**2 - saved,
        'mlp': num_layers * 8 * d_model**2,
        'norm': 9 * d_model,
    }
    parameters['total'] = sum(parameters.values())
    target = parameters['total'] + saved

    diverged = val_loss is None
    test_loss = None if diverged else val_loss + 0.1
    record = {
        'study': 'synthetic',
        'run': run,
        'config_hash': run,
        **key,
        'trial': {'seed': seed, 'learning_rate': learning_rate, 'weight_decay': 0.1},
        'status': 'diverged' if diverged else 'finished',
        'num_steps': 400,
        'num_tokens': 400 * 768,
        'parameters': parameters,
        'target_parameters': target,
        'residual': parameters['total'] / target - 1,
        'config': {
            'd_model': d_model,
            'd_ff': 4 * d_model,
            'num_layers': num_layers,
            'num_heads': num_heads,
            'num_kv_heads': num_heads,
            'head_size': d_model // num_heads,
        },
        'flops_per_token': 6 * parameters['total'],
        'cache_floats_per_token': 8 * d_model,
        'val_loss': val_loss,
        'test_loss': test_loss,
        'val_bits_per_byte': bits_per_byte(val_loss),
        'test_bits_per_byte': bits_per_byte(test_loss),
        'val_loss_se': None if diverged else 0.0125,
        'train_seconds': 12.5,
        'compile_seconds': 3.25,
        'tokens_per_second': 123456.0,
        'lifting': 'map',
        'data': {'name': 'stdlib', 'version': '3.11.7', 'unigram_bits_per_byte': 4.53},
        'eval_tokens': 65536,
        'eval_rows': 512,
        'test_tokens': 32768,
        'provenance': {
            'git': {'commit': 'abc1234', 'dirty': False},
            'versions': {'jax': '0.10.2'},
            'devices': {'platform': 'cpu', 'kind': 'cpu', 'count': 2},
        },
    }
    return record | changes


def result_record(**changes: object) -> dict:
    """A trial as result.json has it, without the fields `OF_STUDY`, which a study adds."""
    record = trial_record('qk/vo', **changes)
    return {name: value for name, value in record.items() if name not in OF_STUDY}


def outside_record(variant: str, top: float | None = 0.75, **changes: object) -> dict:
    """A trial whose metric top_3, from outside the package, is `top`, or None if it diverged."""
    metric = Metric('top_3', 'score', 'Share of the first three.', unit='%', scale=100, logged=True)
    record = trial_record(variant, **changes)
    record |= describe_outside_metrics({'top_3': metric})
    diverged = record['val_loss'] is None
    score = None if diverged else top
    return record | {'val_top_3': score, 'test_top_3': score}


def on_corpus(record: dict, corpus: str, loss: float | None) -> dict:
    """The trial of a record with a loss on a further corpus, an entry of data.evaluate."""
    data = record['data'] | {'evaluate': {corpus: {'name': 'a', 'eval_tokens': 4096}}}
    return record | {'data': data, f'loss[{corpus}]': loss}


def screening_loss(rate: float, optimum: float, lowest: float, seed_index: int) -> float:
    """A loss on an exact parabola in ln(rate).

    At the optimum, the first seed (index 0) has the loss `lowest`. Each further seed adds 0.01.
    """
    distance = math.log(rate / optimum)
    return lowest + 0.01 * seed_index + 0.1 * distance**2


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
    """Returns the records of one arm: screening trials of each rate, then verdict trials.

    Args:
        variant: Variant of the arm.
        size: Size of the arm.
        losses: Validation losses of the verdict trials, in the order of `seeds`. None means that
            the trial diverged. With fewer losses than seeds, the last seeds have no trial.
        optimum: Learning rate with the lowest screening loss. That loss is min(losses), or 2.0 if
            all losses are None.
        rates: Learning rates of the screening.
        diverged_rates: Rates at which screening trials diverge.
        learning_rate: Learning rate of the verdict. None means `optimum`.
        seeds: Seeds of the verdict.
        screening_seeds: Seeds of the screening.
        **changes: Fields of all records.
    """
    records = []

    # The screening has a trial for each rate and seed.
    finite_losses = [loss for loss in losses if loss is not None]
    lowest = min(finite_losses, default=2.0)
    screening_fields = {'stage': 'screening', 'knob': 'learning_rate'} | changes
    for rate in rates:
        for index, seed in enumerate(screening_seeds):
            loss = screening_loss(rate, optimum, lowest, index)
            if rate in diverged_rates:
                loss = None
            records.append(trial_record(variant, size, seed, rate, loss, **screening_fields))

    # The verdict has a trial for each loss, all at one rate.
    verdict_rate = optimum if learning_rate is None else learning_rate
    verdict_fields = {'stage': 'verdict'} | changes
    for seed, loss in zip(seeds, losses, strict=False):
        records.append(trial_record(variant, size, seed, verdict_rate, loss, **verdict_fields))
    return records


def write_tuned(directory: Path, records: list[dict], **keywords: object) -> Path:
    """Writes a study whose learning rates are tuned, and its yardsticks. Returns its directory.

    A yardstick is the loss of a simple model. By default, every baseline beats it.

    Args:
        directory: Directory of the study.
        records: Trials of all arms, as `tuned_arm` makes them.
        **keywords: `yardsticks={...}` has keywords of `write_yardsticks`. A prefix `tuning__`, as
            in `tuning__seeds=...`, sets a field of the tuning. All others go to `write_study`.
    """
    yardsticks = keywords.pop('yardsticks', {})

    tuning = {
        'seeds': list(SCREENING_SEEDS),
        'max_points': len(RATES),  # so a grid may not grow
        'max_seeds': len(SCREENING_SEEDS),
        'learning_rates': list(RATES),
        'weight_decays': [0.1],
    }
    # Each other setting that a study can tune has a single value, so only the rate is tuned.
    for knob in MODEL_KNOBS:
        tuning[f'{knob}s'] = [1.0]
    for keyword in list(keywords):
        if keyword.startswith('tuning__'):
            field = keyword.removeprefix('tuning__')
            tuning[field] = keywords.pop(keyword)
    study_keywords = {'tuning': tuning} | keywords

    write_study(directory, records, **study_keywords)
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
    """Writes the files of a study, with these records as its results.

    Args:
        directory: Directory of the study.
        records: Lines of results.jsonl.
        baseline: Variant that all others are compared with.
        declared: Planned runs without results, as (variant, size) or (variant, size, stage, knob).
        num_evals: Evaluations in each run's metrics.jsonl.
        num_documents: Documents in each run's documents.json.
        **changes: Fields of study.json. The ledger declares them too, except `arms`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    runs = by_run(records)
    plan = [plan_line(trials[0], trials) for trials in runs.values()]
    for variant, size, *stage_and_knob in declared:
        fields = dict(zip(('stage', 'knob'), stage_and_knob, strict=False))
        plan.append(plan_line(trial_record(variant, size, **fields)))

    arms = []
    for line in plan:
        arm = {field: line[field] for field in ARM_KEY}
        # study.json lists no arms that are trained longer, as they depend on earlier results.
        if line['control'] != 'longer' and arm not in arms:
            arms.append(arm)

    base = from_json(Config, {'trials': {'seeds': VERDICT_SEEDS}})
    study = {
        'name': 'synthetic',
        'question': 'Does attention need all four matrices at equal parameters?',
        'baseline': baseline,
        'variants': distinct(arm['variant'] for arm in arms),
        'sizes': distinct(arm['size'] for arm in arms),
        'corpora': distinct(arm['corpus'] for arm in arms),
        'matched': 'total',
        'fill': 'd_ff',
        'tolerance': 1e-3,
        'margin': 0.005,
        'destinations': ['d_model'],
        'controls': {'equal_shape': True, 'longer': None, 'longer_seeds': []},
        'seeds': list(VERDICT_SEEDS),
        'looks': [],
        'tuning': None,
        'base': to_json(base),
        'base_hash': fingerprint(base),
        'arms': arms,
        'command': 'python -m experiments.ablate --config=configs/synthetic.py',
    }
    study |= changes

    (directory / 'study.json').write_text(json.dumps(study))
    (directory / ledger.NAME).unlink(missing_ok=True)
    ledger.declare(directory, study | {'arms': arms})
    write_lines(directory / 'plan.jsonl', plan)
    write_lines(directory / 'results.jsonl', records)
    for run, trials in runs.items():
        (directory / run).mkdir(exist_ok=True)
        write_metrics(directory / run, trials, num_evals)
        write_documents(directory / run, trials, num_documents)
    return directory


def distinct(names: Iterable[str]) -> list[str]:
    """The names without repetitions, in order of first appearance."""
    return list(dict.fromkeys(names))


def by_run(records: list[dict]) -> dict[str, list[dict]]:
    """Groups records by their field `run`."""
    runs: dict[str, list[dict]] = {}
    for record in records:
        runs.setdefault(record['run'], []).append(record)
    return runs


def named_by_hash(records: list[dict]) -> list[dict]:
    """Copies of the records, where each run is named by its config's hash, as in a real plan."""
    hash_by_run = {}
    for run, trials in by_run(records).items():
        hash_by_run[run] = fingerprint(run_config(trials[0], trials))
    named = []
    for record in records:
        config_hash = hash_by_run[record['run']]
        named.append(record | {'run': config_hash, 'config_hash': config_hash})
    return named


def run_name(variant: str, size: str, *rest: str | None) -> str:
    """The directory of a run. `rest` is its stage, knob, corpus and control, in any order.

    Default values are left out, and the name ends with the length of the variant. For example,
    ('a/b', 'd=8', 'single', None) gives 'a_b-d_8-3'.
    """
    parts = [variant, size] + [part for part in rest if part not in ('single', 'stdlib', None)]
    joined = '-'.join(parts)
    safe = ''.join(c if c.isalnum() or c in '-_' else '_' for c in joined)
    return f'{safe[:90]}-{len(variant)}'


def run_config(record: Mapping, trials: Sequence[Mapping] = ()) -> Config:
    """Returns the config of a run, as a study plans it.

    Args:
        record: A trial of the run. The config has its model, corpus and number of steps.
        trials: All trials of the run. The config has their seeds, learning rates and weight decays.
            Without trials, it has `VERDICT_SEEDS`, `RATES` and the weight decay 0.1.
    """
    settings_of_trials = {
        'seed': VERDICT_SEEDS,
        'learning_rate': RATES,
        'weight_decay': (0.1,),
    }
    if trials:
        for name in settings_of_trials:
            values = [trial['trial'][name] for trial in trials]
            distinct_values = dict.fromkeys(values)  # in order
            settings_of_trials[name] = tuple(distinct_values)

    # Settings and a destination may follow SCORE/VALUE. For example, 'qk/vo?norm=rmsnorm [d_ff]'
    # has the score 'qk' and the value 'vo'.
    names, _, _ = record['variant'].partition('?')
    names, _, _ = names.partition(' ')
    score, _, value = names.partition('/')
    settings = {
        'model': {'score': score, 'value': value, 'context': 48} | record['config'],
        'data': {'name': record['corpus']},
        'optimizer': {'schedule': 'linear'},
        'train': {'num_steps': record['num_steps']},
        'trials': {f'{name}s': values for name, values in settings_of_trials.items()},
    }
    return from_json(Config, settings)


def plan_line(record: Mapping, trials: Sequence[Mapping] = ()) -> dict:
    """Returns the line of plan.jsonl of a run.

    Args:
        record: A trial of the run.
        trials: All trials of the run. Without trials, the run has no results yet.
    """
    # All other arms get the baseline's number of parameters by another `d_model`.
    has_shape_of_baseline = record['variant'] == 'qk/vo' or record['control'] == 'equal_shape'
    return {
        **{field: record[field] for field in RUN_KEY},
        'destination': None if has_shape_of_baseline else 'd_model',
        'directory': record['run'],
        'trials': len(trials) or len(VERDICT_SEEDS),
        'target': record['target_parameters'],
        'residual': record['residual'],
        'config': to_json(run_config(record, trials)),
    }


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def write_lines(path: Path, records: Sequence[Mapping]) -> None:
    path.write_text(''.join(json.dumps(record) + '\n' for record in records))


def edit_plan(directory: Path, run: str, **changes: object) -> None:
    """Changes the line of a run in the plan of a study, plan.jsonl.

    For example, `stage='verdict'` changes a field of the line. `train__num_steps=8` changes the
    setting train.num_steps in the config of the line.
    """
    lines = read_lines(directory / 'plan.jsonl')
    (line,) = [line for line in lines if line['run'] == run]

    for name, value in changes.items():
        if '__' in name:
            section, field = name.split('__')
            line['config'][section][field] = value
        else:
            line[name] = value

    write_lines(directory / 'plan.jsonl', lines)


def write_metrics(directory: Path, records: list[dict], num_evals: int) -> None:
    """Writes metrics.jsonl of a run, in which losses fall to the `val_loss` of each trial.

    Each line has a list with the loss of each trial. If `val_loss` is None, the trial has diverged:
    its loss is 3.5 in the first two evaluations, then null.

    Args:
        directory: Directory of the run.
        records: A record for each trial of the run.
        num_evals: Number of evaluations, at equal distances. The last one is at the last step.
    """
    first = records[0]
    # All metrics except the loss have their final values in every evaluation.
    logged = logged_fields(metrics_of(first), corpora_of(first))
    scores = {field: [record.get(field) for record in records] for field in logged}
    # If no trial has bits/byte, the field is null instead of a list.
    have_bits = any(record['val_bits_per_byte'] is not None for record in records)
    final_losses = [record['val_loss'] for record in records]

    lines = []
    for number in range(1, num_evals + 1):
        step = first['num_steps'] * number // num_evals
        above_final = 2.0 * (first['num_steps'] / step - 1) / num_evals  # 0 at the last step
        losses = []
        for final_loss in final_losses:
            if final_loss is not None:
                losses.append(final_loss + above_final)
            else:
                losses.append(3.5 if number < 3 else None)
        bits = [bits_per_byte(loss) for loss in losses] if have_bits else None
        lines.append({'kind': 'train', 'step': step, 'loss': losses, 'grad_norm': losses})
        evaluation = scores | {'val_loss': losses, 'val_bits_per_byte': bits}
        lines.append({'kind': 'eval', 'step': step, **evaluation})

    # The last line says how the run ended.
    final = {
        'kind': 'final',
        'step': first['num_steps'],
        'trials': [record['trial'] for record in records],
        'eval_tokens': first.get('eval_tokens'),
        'test_tokens': first.get('test_tokens'),
    }
    for field in metric_fields(first):
        if any(field in record for record in records):
            final[field] = [record.get(field) for record in records]
    write_lines(directory / 'metrics.jsonl', [*lines, final])


def write_documents(
    directory: Path, records: Sequence[Mapping], number: int = 100, shifts: float | np.ndarray = 0.0
) -> None:
    """Writes documents.json of a run: the loss of each trial on each evaluated document.

    The mean over all tokens is the loss in the record of the trial. Even documents have a higher
    loss than odd ones, by 0.2 nats/token in every trial. Without shifts, two runs therefore differ
    equally on all documents.

    Args:
        directory: Directory of the run.
        records: A record for each trial of the run.
        number: Documents of each split.
        shifts: Added to the losses of the C test documents, in nats/token. The mean of the shifts
            over all tokens is subtracted, so the mean loss stays the same.
    """
    place_C = np.arange(number)
    weights_C = 10 + place_C % 5  # lengths of documents are proportional to these weights
    content = {}
    for split, loss_field, num_tokens, shifts_C in (
        ('validation', 'val_loss', records[0]['eval_tokens'], 0.0),
        ('test', 'test_loss', records[0]['test_tokens'], shifts),
    ):
        losses = [record[loss_field] for record in records]
        if all(loss is None for loss in losses):  # all trials have diverged
            continue

        tokens_C = num_tokens * weights_C // weights_C.sum()
        tokens_C[-1] += num_tokens - tokens_C.sum()  # what rounding left over

        # The loss of each document minus the loss of the trial, in nats/token.
        excess_C = 0.1 * (-1.0) ** place_C + shifts_C
        excess_C -= tokens_C @ excess_C / num_tokens

        # The sum of losses over the tokens of each document, for each trial.
        nats = []
        for loss in losses:
            nats.append(None if loss is None else (tokens_C * (loss + excess_C)).tolist())
        content[split] = {
            'documents': [f'{split}/{place}.py' for place in place_C],
            'tokens': tokens_C.tolist(),
            'nats': nats,
        }
    (directory / 'documents.json').write_text(json.dumps(content) + '\n')


def write_yardsticks(
    directory: Path,
    records: Sequence[dict],
    baseline: str = 'qk/vo',
    trials: Mapping[str, Sequence[Mapping]] | None = None,
    **changes: object,
) -> None:
    """Writes yardsticks.json of a study, with losses far above the loss of any arm.

    A yardstick is the loss of an n-gram model. If a baseline does not beat the yardstick, its arms
    get no verdicts.

    Args:
        directory: Directory of the study.
        records: Lines of results.jsonl.
        baseline: Variant whose verdict runs get the yardsticks.
        trials: Measurements of the checkpoints of verdict runs, by variant.
        **changes: Fields of every group, such as `losses`.
    """
    losses = {'5-gram': 9.0, '6-gram': 9.1}  # nats/token, where an arm has about 2
    counts = {
        'task': 'language',
        'seen': 307200,
        'tokens': 307200,
        'losses': {'val': losses, 'test': losses},
    }
    groups = {}
    runs = {}
    for record in records:
        if record['stage'] != 'verdict':
            continue

        run = record['run']
        key = {field: record[field] for field in ARM_KEY}
        measured = (trials or {}).get(record['variant'])
        runs[run] = {'run': run, **key, 'trials': measured, 'why': None}

        # Baselines of the same size, corpus and length of training are one group.
        if record['variant'] == baseline and record['control'] != 'equal_shape':
            longer = record['control'] == 'longer'
            group = {'size': record['size'], 'corpus': record['corpus'], 'longer': longer}
            groups.setdefault(tuple(group.values()), {'run': run} | group | counts | changes)

    content = {'groups': list(groups.values()), 'runs': list(runs.values()), 'seconds': 1.0}
    (directory / ledger.YARDSTICKS).write_text(json.dumps(content))


def beat_yardsticks(study: Path) -> None:
    """Unpacks a copy of a committed study in place, and writes yardsticks that the study beats."""
    stored.unpack_in_place(study)
    baseline = json.loads((study / 'study.json').read_text())['baseline']
    write_yardsticks(study, read_lines(study / 'results.jsonl'), baseline, task='probe')
