"""Checks of one run of a study: its results against its plan, its logs and each other.

plan.jsonl       the run's name is the hash of its config, its trials are the config's, in order
metrics.jsonl    the last evaluation and the final record hold what results.jsonl does
documents.json   is there; `load_study` compares its sums over documents with the losses
results.jsonl    tokens, residual, perplexity, bits per byte follow from the other fields
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qkattn.config import TrialsConfig, fingerprint_of, from_json
from qkattn.metrics import PREFIXES, bits_per_byte, logged_fields, perplexity, result_fields
from qkattn.storage.ledger import left_out_documents
from qkattn.storage.records import FINISHED, for_each_line
from qkattn.verdict import Study
from qkattn.verdict.runs import COUNTS, Run


def problems(study: Study, run: Run, records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What is wrong with a run, in sentences; `records` are its lines of results.jsonl."""
    if fingerprint_of(run.config) != run.name:
        yield f'run {run.name} of plan.jsonl is not the hash of its config'
    if not run.trials:
        return
    trials = from_json(TrialsConfig, run.config['trials']).trials()
    if [record['trial'] for record in records] != trials:
        yield f'run {run.name} has results that are not the trials of its config in their order'
        return
    for trial, record in zip(run.trials, records, strict=True):
        about = f'seed {trial.seed} of run {run.name}'
        yield from (f'{about} has {problem}' for problem in _unlike_itself(study, run, record))
    yield from _unlike_log(study.files / run.directory / 'metrics.jsonl', run, records)
    path = study.files / run.directory / 'documents.json'
    if not path.is_file() and not left_out_documents(path.parent):
        yield f'run {run.name} has results, but {path.name} is missing'


def _unlike_itself(study: Study, run: Run, record: Mapping[str, Any]) -> Iterator[str]:
    """Numbers of a result that do not follow from its others."""
    train, context = run.config['train'], run.config['model']['context']
    parameters = record['parameters']
    derived: dict[str, tuple[Any, Any]] = {
        'num_tokens': (
            record['num_tokens'],
            record['num_steps'] * train['batch_size'] * context,
        ),
        'parameters.total': (
            parameters['total'],
            sum(count for group, count in parameters.items() if group != 'total'),
        ),
    }
    if study.matched is not None and record['target_parameters']:
        measured = {
            'total': parameters['total'],
            'non_embedding': parameters['total'] - parameters['embedding'],
            'flops': record['flops_per_token'],
            'cache': record['cache_floats_per_token'],
        }[study.matched]
        derived['residual'] = (record['residual'], measured / record['target_parameters'] - 1)
    for prefix in PREFIXES.values() if record['status'] == FINISHED else ():
        loss = record[f'{prefix}_loss']
        for name, of_loss in (('perplexity', perplexity), ('bits_per_byte', _per_byte(run))):
            field = f'{prefix}_{name}'
            if loss is not None and record.get(field) is not None and of_loss is not None:
                derived[field] = (record[field], of_loss(loss))
    for name, (value, expected) in derived.items():
        close = math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-12)
        if not close:
            yield f'{name} {value}, which is {expected} by its other fields'


def _per_byte(run: Run) -> Callable[[float], float] | None:
    """Bits per byte from nats per token where a token is a byte; None for other tokenizers."""
    if run.config['data']['tokenizer'] != 'bytes':
        return None
    return lambda nats: bits_per_byte(nats, 1.0)


def _unlike_log(path: Path, run: Run, records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Results that are not those of the last evaluation and of the final record."""
    if not path.is_file():
        yield f'run {run.name} has results, but {path.name} is missing'
        return
    bad: list[str] = []
    lines: list[dict] = []
    for_each_line(path, path.name, bad, lines.append)
    yield from (f'run {run.name}: {problem}' for problem in bad)
    evaluations = [line for line in lines if line['kind'] == 'eval']
    final = lines[-1]  # `load_study` names a log without these records
    if final['step'] != run.trials[0].num_steps:
        yield f'run {run.name} has a final record of step {final["step"]}'
        return
    if final['trials'] != [record['trial'] for record in records]:
        yield f'run {run.name} has other trials in the final record of its log'
        return
    for name in COUNTS.values():
        for record in records:
            if (count := record.get(name)) != (logged := final.get(name)):
                yield f'run {run.name} has {name} {count}, but {logged} in its log'
    metrics = run.trials[0].declared_metrics
    yield from _unlike_line(evaluations[-1], logged_fields(metrics), run, records)
    yield from _unlike_line(final, tuple(result_fields(metrics)), run, records)


def _unlike_line(
    line: Mapping[str, Any],
    fields: Sequence[str],
    run: Run,
    records: Sequence[Mapping[str, Any]],
) -> Iterator[str]:
    for name in fields:
        logged = line.get(name) or [None] * len(records)
        if len(logged) != len(records):
            yield f'run {run.name} has {len(records)} trials, but {len(logged)} logged'
            return
        for record, value in zip(records, logged, strict=True):
            result = record.get(name)
            if result != value:
                about = f'seed {record["trial"]["seed"]} of run {run.name}'
                yield f'{about} has {name} {result}, but {value} in its log'
