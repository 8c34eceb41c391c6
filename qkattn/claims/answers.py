"""What each matrix is worth: a row for each change of attention, from the studies of claims.

A cell is the difference between an arm and its baseline in the study that shows it best: one whose
models learned, as their baseline meets its yardsticks, then the one with the most training tokens
per run, then the one with the largest models.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from qkattn.claims.decided import Kind, Row, Speaks, read_records, stored
from qkattn.claims.results import UNIT, Loaded, Results
from qkattn.config import ModelConfig, from_json
from qkattn.model import cost
from qkattn.stats.decision import Decision
from qkattn.storage.records import write_json
from qkattn.study.arms import parse_variant
from qkattn.verdict.arms import Arm
from qkattn.verdict.codes import Comparison
from qkattn.verdict.rules import standings

NAME = 'answers.json'
# What is done to attention, and the variant that does it.
CHANGES = {
    'drop W_Q': 'query_free/vo',
    'drop W_K': 'key_free/vo',
    'Q = K': 'shared_qk/vo',
    'merge W_Q and W_K': 'merged/vo',
    'K = V': 'qk/k_is_v',
    'Q = K = V': 'shared_qk/k_is_v',
    'drop W_V': 'qk/no_v',
    'drop W_O': 'qk/no_o',
    'GQA, 2 key heads': 'qk/vo?num_kv_heads=2',
    'MQA, 1 key head': 'qk/vo?num_kv_heads=1',
    'one head for 4': 'qk/vo?num_heads=1',
    'nonlinear W_Q': 'nonlinear_query/vo',
    'W_Q, W_K of D x D': 'full_size/vo',
    'two in a row for each': 'double/double',
}
# The studies that compare them in each kind of model, and a variant there.
MODELS = {
    'decoder': (
        '{}',
        ('lm_added', 'lm_dropped', 'lm_sharing', 'lm_stdlib', 'decoder', 'depth_heads')
        + ('full_heads', 'nonlinear', 'overparameterised', 'rank', 'sharing'),
    ),
    'masked LM': ('{}', ('masked_lm', 'masked')),
    'translation': ('qk/vo?encoder_variant={}', ('translation', 'encoder_side')),
}


@dataclasses.dataclass(frozen=True)
class Answer:
    """A change of attention and what it costs, in each kind of model and at each shape."""

    what: str
    variant: str
    # Added to attention's parameters at the same shape, as a fraction: -0.25 saves a quarter.
    attention: float | None
    # At most one of each model and kind, `Kind.REMOVED` at the same shape and `Kind.MATCHED` at
    # equal parameter count; without a verdict, the word is 'no verdict'.
    rows: tuple[Row, ...] = ()

    def row(self, model: str, kind: Kind) -> Row | None:
        """The row of a kind of model at a shape."""
        rows = (row for row in self.rows if (row.context['model'], row.kind) == (model, kind))
        return next(rows, None)


def answers(results: Results) -> tuple[Answer, ...]:
    """One answer for each change that a study of the directory has trained."""
    made = []
    for what, variant in CHANGES.items():
        best: dict[tuple[str, Kind], tuple[tuple, Loaded, Arm, Row]] = {}
        for model, (template, names) in MODELS.items():
            for name in names:
                if (loaded := results.study(name)) is None:
                    continue
                for rank, arm, row in _rows(loaded, template.format(variant), model, name):
                    known = best.get((model, Kind(row.kind)))
                    if known is None or rank > known[0]:
                        best[model, Kind(row.kind)] = rank, loaded, arm, row
        if best:
            rows = tuple(stored(row) for *_, row in best.values())
            decoders = [at for (model, _), at in best.items() if model == 'decoder']
            share = _attention(*decoders[0][1:3], variant) if decoders else None
            made.append(Answer(what, variant, share, rows))
    return tuple(made)


def _rows(loaded: Loaded, variant: str, model: str, name: str) -> Iterator[tuple[tuple, Arm, Row]]:
    """The differences of a variant at each size and corpus, with what they are ranked by."""
    study, found = loaded
    learned = {s.arm.key for s in standings(study, found.arms) if not s.remarks}
    baselines = {arm.group: arm.key for arm in found.arms if arm.is_baseline}
    parts = {part.key: part for part in found.decomposition}
    for arm in found.arms:
        if arm.variant != variant or arm.is_baseline or not arm.chosen:
            continue
        trial, part = arm.example, parts.get(arm.key)
        has_learned = baselines.get(arm.group) in learned
        parameters = trial.parameters['total']
        rank = has_learned, trial.num_tokens, parameters, study.corpora.index(arm.corpus)
        decided = arm.verdict.decision if arm.verdict and has_learned else Decision.NO_VERDICT
        cells: dict[Kind, tuple[Comparison | None, str | None]] = {
            Kind.REMOVED: (part.removing if part else None, None if has_learned else decided.value),
            Kind.MATCHED: (arm.comparison, decided.value),
        }
        context = {'model': model, 'size': arm.size, 'corpus': arm.corpus}
        context |= {'parameters': f'{parameters:,}', 'tokens': f'{trial.num_tokens:,}'}
        for kind, (comparison, word) in cells.items():
            if comparison is not None:
                difference = comparison.difference
                bounds: dict[str, Any] = {'low': difference.low, 'high': difference.high}
                row = Row(variant, kind, context, difference.mean, Speaks.BESIDE, UNIT, **bounds)
                yield rank, arm, dataclasses.replace(row, arm=variant, word=word, study=name)


def _attention(loaded: Loaded, arm: Arm, variant: str) -> float:
    """What the variant adds to attention's parameters in the baseline's shape, as a fraction."""
    group = (other for other in loaded.found.arms if other.group == arm.group)
    baseline = from_json(ModelConfig, next(o for o in group if o.is_baseline).example.config)
    derived = {'num_kv_heads': None, 'head_size': None}  # from num_heads, which a variant may set
    changed = dataclasses.replace(baseline, **derived | parse_variant(variant))
    counts = [cost.count(model)['attention'] for model in (changed, baseline)]
    return counts[0] / counts[1] - 1


def write_answers(directory: str | Path, made: Iterable[Answer]) -> Path:
    """Writes answers.json, each answer with a checksum; returns its path."""
    path = Path(directory) / NAME
    write_json(path, list(made))
    return path


def read_answers(directory: str | Path) -> tuple[Answer, ...]:
    """The answers of a directory, () without a file; raises as `read_claims`."""
    path = Path(directory) / NAME
    return read_records(path, Answer, 'what') if path.is_file() else ()
