"""A synthetic study: files as training writes them, with numbers a test can recompute by hand."""

import json
from pathlib import Path

import pytest

# What the study adds to the results that training writes.
STUDY_FIELDS = ('study', 'cell', 'variant', 'size', 'target_weights', 'residual')
NATS_PER_BIT = 0.6931471805599453


def trial_record(
    variant: str,
    size: str = 'd_model=128',
    seed: int = 0,
    learning_rate: float = 1e-3,
    val_loss: float | None = 2.0,
    d_model: int = 128,
    cell: str | None = None,
    **changes: object,
) -> dict:
    attention, mlp = 4 * 4 * d_model**2 - 10 * len(variant), 8 * 4 * d_model**2
    weights = {'embedding': 256 * d_model, 'attention': attention, 'mlp': mlp, 'norm': 9 * d_model}
    weights['total'] = sum(weights.values())
    target = 16 * 3 * d_model**2 + 265 * d_model
    record = {
        'study': 'synthetic',
        'cell': cell if cell is not None else cell_name(variant, size),
        'variant': variant,
        'size': size,
        'trial': {'seed': seed, 'learning_rate': learning_rate, 'weight_decay': 0.1},
        'status': 'diverged' if val_loss is None else 'finished',
        'num_steps': 400,
        'num_tokens': 400 * 768,
        'weights': weights,
        'target_weights': target,
        'residual': weights['total'] / target - 1,
        'config': {
            'd_model': d_model,
            'd_ff': 4 * d_model,
            'num_layers': 4,
            'num_heads': 4,
            'num_kv_heads': 4,
            'head_size': d_model // 4,
        },
        'flops_per_token': 6 * weights['total'],
        'cache_floats_per_token': 8 * d_model,
        'val_loss': val_loss,
        'val_bits_per_byte': None if val_loss is None else val_loss / NATS_PER_BIT,
        'test_loss': None if val_loss is None else val_loss + 0.1,
        'test_bits_per_byte': None if val_loss is None else (val_loss + 0.1) / NATS_PER_BIT,
        'train_seconds': 12.5,
        'compile_seconds': 3.25,
        'tokens_per_second': 123456.0,
        'lifting': 'map',
        'data': {'name': 'stdlib', 'version': '3.11.7', 'unigram_bits_per_byte': 4.53},
        'eval_tokens': 65536,
        'provenance': {
            'git': {'commit': 'abc1234', 'dirty': False},
            'versions': {'jax': '0.10.2'},
            'devices': {'platform': 'cpu', 'kind': 'cpu', 'count': 2},
        },
    }
    return record | changes


def translation_record(variant: str, bleu: float | None = 30.0, **changes: object) -> dict:
    """A trial that was scored on translations; None is one that diverged, which has no scores."""
    sides = {
        side: {'name': f'pairs-de-en/{language}', 'version': '1.0.0', 'tokenizer': 'bpe'}
        for side, language in (('source', 'de'), ('target', 'en'))
    }
    record = trial_record(variant, **{'val_loss': None if bleu is None else 2.0} | changes)
    record['data'] = sides | {
        'packing': {'version': 1, 'source_length': 64, 'length': 64},
        'dropped_pairs': {'train': 7},
        'unigram_loss': 6.1,
        'unigram_bits_per_byte': 2.5,
    }
    for split, less in (('val', 1.0), ('test', 0.0)) if bleu is not None else ():
        record |= {
            f'{split}_accuracy': 0.5,
            f'{split}_solved': 0.125,
            f'{split}_bleu': bleu - less,
            f'{split}_chrf': bleu + 20 - less,
            f'{split}_exact_match': bleu / 200,
            f'{split}_num_sentences': 1000 if split == 'test' else 1014,
            f'{split}_bleu_signature': 'nrefs:1|case:lc|tok:13a|version:2.5.1',
            f'{split}_chrf_signature': 'nrefs:1|case:lc|nc:6|version:2.5.1',
        }
    return record | {name: value for name, value in changes.items() if name in record}


def probe_record(variant: str, accuracy: float | None = 0.5, **changes: object) -> dict:
    """A trial on a synthetic task: no bytes, so no bits/byte."""
    loss = None if accuracy is None else 1 - accuracy
    record = trial_record(variant, **{'val_loss': loss} | changes)
    record |= {'val_bits_per_byte': None, 'test_bits_per_byte': None}
    record['data'] = {
        'name': 'recall',
        'version': 1,
        'options': {'pairs': 8, 'length': 32},
        'unigram_loss': 2.77,
        'unigram_bits_per_byte': None,
    }
    for split in ('val', 'test'):
        record[f'{split}_accuracy'] = accuracy
        record[f'{split}_solved'] = None if accuracy is None else accuracy / 4
    return record | {name: value for name, value in changes.items() if name in record}


def cell_name(variant: str, size: str) -> str:
    kept = ''.join(c if c.isalnum() or c in '-_' else '_' for c in f'{variant}-{size}')
    return f'{kept[:60]}-{len(variant)}'


def write_study(
    directory: Path,
    records: list[dict],
    baseline: str | None = 'qk/vo',
    declared: list[tuple[str, str]] = (),
    num_evals: int = 10,
    **changes: object,
) -> Path:
    """Writes the study `records` make up; `declared` adds (variant, size) cells without results."""
    directory.mkdir(parents=True, exist_ok=True)
    cells: dict[str, list[dict]] = {}
    for record in records:
        cells.setdefault(record['cell'], []).append(record)
    grid = [
        {'cell': name, 'variant': rs[0]['variant'], 'size': rs[0]['size'], 'directory': name}
        for name, rs in cells.items()
    ]
    for variant, size in declared:
        name = cell_name(variant, size)
        grid.append({'cell': name, 'variant': variant, 'size': size, 'directory': name})
    study = {
        'name': 'synthetic',
        'question': 'Does attention need all four matrices at equal weights?',
        'baseline': baseline,
        'variants': list(dict.fromkeys(entry['variant'] for entry in grid)),
        'sizes': list(dict.fromkeys(entry['size'] for entry in grid)),
        'matched': 'total',
        'cells': grid,
        'command': 'python -m experiments.ablate --config=configs/synthetic.py',
    }
    (directory / 'study.json').write_text(json.dumps(study | changes))
    lines = [json.dumps(record) for record in records]
    (directory / 'results.jsonl').write_text(''.join(line + '\n' for line in lines))
    for name, of_cell in cells.items():
        (directory / name).mkdir(exist_ok=True)
        own = [{k: v for k, v in record.items() if k not in STUDY_FIELDS} for record in of_cell]
        (directory / name / 'result.json').write_text(json.dumps(own))
        write_metrics(directory / name, of_cell, num_evals)
    return directory


def write_metrics(directory: Path, records: list[dict], num_evals: int) -> None:
    """Curves that fall to each final loss; a diverged trial's is null from the third on.

    bits/byte are those of one byte a token, or null where no trial has any.
    """
    lines = []
    num_steps = records[0]['num_steps']
    in_bytes = any(record['val_bits_per_byte'] is not None for record in records)
    for index in range(1, num_evals + 1):
        step = num_steps * index // num_evals
        fall = 2.0 * (num_steps / step - 1) / num_evals
        finals = [record['val_loss'] for record in records]
        loss = [(3.5 if index < 3 else None) if f is None else f + fall for f in finals]
        bits = [None if nats is None else nats / NATS_PER_BIT for nats in loss]
        lines.append({'kind': 'train', 'step': step, 'loss': loss, 'grad_norm': loss})
        evaluation = {'val_loss': loss, 'val_bits_per_byte': bits if in_bytes else None}
        lines.append({'kind': 'eval', 'step': step, **evaluation})
    text = ''.join(json.dumps(line) + '\n' for line in lines)
    (directory / 'metrics.jsonl').write_text(text)


@pytest.fixture
def study_dir(tmp_path: Path) -> Path:
    return tmp_path / 'study'
