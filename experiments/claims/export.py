"""Exports claims and answers with their evidence, and decides them again.

claims.json holds the claims as decided. answers.json says what each matrix is worth: for each
change of attention, the difference between an arm and its baseline in one study of each model.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from experiments.claims import declared
from experiments.claims.claim import ClaimResult, Kind, Row, difference_row
from experiments.claims.deciding import decide
from experiments.claims.studies import Results
from qkattn.config import ModelConfig, from_json
from qkattn.errors import ReportError
from qkattn.model import cost
from qkattn.report import export as export_study
from qkattn.report.prose import length, rounded
from qkattn.report.verify import close, difference, near
from qkattn.stats.decision import Decision
from qkattn.storage.files import as_path, below
from qkattn.storage.records import damaged, flat, parse_file, read, write_json
from qkattn.study.arm_key import SAME_SHAPE
from qkattn.study.arms import parse_variant
from qkattn.verdict.trained_arm import TrainedArm, with_baselines

CLAIMS = 'claims.json'
ANSWERS = 'answers.json'
WITHHELD = Decision.NO_VERDICT.value
SCALING = 'lm_scaling'  # a study of no claim, which is exported beside them
# What another machine or commit changes.
_OF_MACHINE = ('commit', 'hardware', 'seconds')
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
    'GQA, 2 key/value heads': 'qk/vo?num_kv_heads=2',
    'MQA, 1 key/value head': 'qk/vo?num_kv_heads=1',
    '1 head in place of 4': 'qk/vo?num_heads=1',
    'nonlinear W_Q': 'nonlinear_query/vo',
    'W_Q, W_K of D x D per head': 'full_size/vo',
    'W_Q, W_K, W_V as products of two': 'double/double',
}
# In each kind of model a variant, and the studies that compare them, the best ones first; each
# stands for its repeats, too.
MODELS = {
    'decoder': ('{}', ('lm_dropped', 'lm_sharing', 'lm_added', 'lm_doubled')),
    'masked LM': ('{}', ('masked_lm',)),
    'translation': ('qk/vo?encoder_variant={}', ('translation',)),
}


@dataclasses.dataclass(frozen=True)
class Answer:
    """A change of attention and what it costs, in each kind of model and at each shape."""

    name: str
    variant: str
    # Added to attention's parameters at the same shape, as a fraction: -0.25 saves a quarter.
    attention: float | None
    # At most one of each model and kind, `Kind.SAME_SHAPE` at the same shape and `Kind.MATCHED` at
    # equal parameter count; without a verdict, the decision is 'no verdict'.
    rows: tuple[Row, ...] = ()

    def row(self, model: str, kind: Kind) -> Row | None:
        """The row of a kind of model at a shape."""
        rows = (row for row in self.rows if (row.context['model'], row.kind) == (model, kind))
        return next(rows, None)


Record = TypeVar('Record', ClaimResult, Answer)


def answers(results: Results) -> tuple[Answer, ...]:
    """One answer for each change that a study of the directory has trained.

    Of the rows of a kind of model, the first with a verdict; without any, the first.
    """
    made = []
    for name, variant in CHANGES.items():
        best: dict[tuple[str, str], tuple[Row, TrainedArm]] = {}
        for model, (template, studies) in MODELS.items():
            arm = template.format(variant)
            names = [repeat for name in studies for repeat in results.newest_first(name)]
            pairs = [pair for name in names for pair in _rows(results, name, model, arm)]
            for row, baseline in sorted(pairs, key=lambda pair: pair[0].decision == WITHHELD):
                best.setdefault((model, row.kind), (row, baseline))
        decoders = [baseline for (model, _), (_, baseline) in best.items() if model == 'decoder']
        share = _attention(decoders[0], variant) if decoders else None
        if best:
            made.append(Answer(name, variant, share, tuple(row for row, _ in best.values())))
    return tuple(made)


def _rows(
    results: Results, name: str, model: str, variant: str
) -> Iterator[tuple[Row, TrainedArm]]:
    """The differences of a variant in a study, the largest model first, with their baseline."""
    if (loaded := results.study(name)) is None:
        return
    study = loaded.study
    for arm, baseline in reversed(with_baselines(loaded.arms)):
        if arm.variant != variant or arm.is_baseline or baseline is None or not arm.chosen:
            continue
        trial = arm.example
        decided = arm.verdict.decision.value if arm.verdict else WITHHELD
        context = {'model': model, 'size': arm.size, 'corpus': arm.corpus}
        sizes = {'parameters': trial.parameters['total'], 'tokens': trial.num_tokens}
        context |= {name: f'{number:,}' for name, number in sizes.items()}
        bare = arm.key._replace(variant=study.bare(arm.variant), control=SAME_SHAPE)
        same_shape = [one for one in loaded.controls if one.key == bare]
        for kind, comparison, decision in (
            (Kind.SAME_SHAPE, arm.parts.same_shape, WITHHELD if decided == WITHHELD else None),
            (Kind.MATCHED if study.match else Kind.SAME_SHAPE, arm.comparison, decided),
        ):
            if comparison:
                about: dict[str, Any] = {'decision': decision, 'study': name}
                if comparison is arm.comparison:
                    about |= {'is_short': bool(arm.shortfalls), 'length': length(arm.settling)}
                elif any(one.shortfalls for one in same_shape):
                    about['is_short'] = True
                row = difference_row(variant, kind, context, comparison.difference, **about)
                yield row, baseline


def _attention(baseline: TrainedArm, variant: str) -> float:
    """The change in attention's parameters at the baseline's shape, as a fraction."""
    config = from_json(ModelConfig, baseline.example.config)
    derived = {'num_kv_heads': None, 'head_size': None}  # from num_heads, which a variant may set
    changed = dataclasses.replace(config, **derived | parse_variant(variant))
    counts = [cost.count(model)['attention'] for model in (changed, config)]
    return counts[0] / counts[1] - 1


def write(directory: str | Path, name: str, records: Iterable[Record]) -> Path:
    """Writes CLAIMS or ANSWERS, a checksum in each record, without defaults, rows as `rounded`."""

    def fields(record: Any) -> dict[str, Any]:
        pairs = ((f, getattr(record, f.name)) for f in dataclasses.fields(record))
        return {f.name: value for f, value in pairs if value != f.default}

    made = []
    for record in records:
        rows = [{name: rounded(x) for name, x in fields(row).items()} for row in record.rows]
        made.append(fields(record) | {'rows': rows})
    write_json(path := as_path(directory) / name, made)
    return path


def read_claims(directory: str | Path) -> tuple[ClaimResult, ...]:
    """The claims of a directory; raises as `_read`."""
    return _read(Path(directory) / CLAIMS, ClaimResult)


def read_answers(directory: str | Path) -> tuple[Answer, ...]:
    """The answers of a directory, () without a file; raises as `_read`."""
    path = Path(directory) / ANSWERS
    return _read(path, Answer) if path.is_file() else ()


def _read(path: Path, cls: type[Record]) -> tuple[Record, ...]:
    """The records of a file of `write`.

    ReportError without a file, RunDirectoryError if it was edited or is not what `write` writes.
    """
    again = f'make it again with python -m experiments.claims --workdir=DIR --export={path.parent}'
    if not path.is_file():
        raise ReportError(f'{path} does not exist; {again}.')
    made = []
    where = ''
    try:
        for record in parse_file(path, [{'name': str, 'rows': list}]):
            where = f'{record["name"]}: '
            rows = tuple(read(Row, row) for row in record['rows'])
            made.append(read(cls, record, rows=rows))
    except ValueError as error:
        raise damaged(path, ValueError(f'{where}{error}'), again) from error
    return tuple(made)


def export(decided: Iterable[ClaimResult], results: Results, destination: str | Path) -> None:
    """Writes claims.json, answers.json and their studies into a directory.

    ReportError if the destination holds something else.
    """
    decided = list(decided)
    destination = as_path(destination)
    names = [name for claim in decided for name in claim.studies]
    names = [repeat for name in names for repeat in reversed(results.newest_first(name))]
    for name in dict.fromkeys([*names, SCALING]):
        loaded = results.study(name)
        if loaded is None:
            continue
        for earlier in loaded.study.earlier:  # without which it cannot be read
            if earlier.path is not None:
                export_study(earlier.path, below(destination, earlier.name))
        export_study(results.directory / name, below(destination, name))
    write(destination, CLAIMS, decided)
    if made := answers(results):
        write(destination, ANSWERS, made)


def check(directory: str | Path) -> int:
    """Makes the claims and answers of an exported directory again; returns how many rows agree.

    ReportError if claims.json or answers.json hold undeclared claims or other results.
    """
    results = Results(directory)
    directory = Path(directory)
    stored = read_claims(directory)
    answered = read_answers(directory)
    claims = [decide(claim, stored[0].scale, results) for claim in declared.claims().values()]
    pairs: list[tuple[str, Sequence, Sequence]] = [
        (CLAIMS, stored, claims),
        (ANSWERS, answered, answers(results)),
    ]
    for file, old, new in pairs:
        names, others = ([record.name for record in records] for records in (old, new))
        if names != others:
            unequal = ', '.join(sorted({*names} ^ {*others}))
            raise ReportError(f'{directory / file} differs from what is declared: {unequal}')
        for one, other in zip(old, new, strict=True):
            if unequal := mismatch(one, other):
                raise ReportError(f'{directory / file}: {unequal}')
    return sum(len(record.rows) for records in (stored, answered) for record in records)


def _needed(one: str, other: str) -> bool:
    return close(one, other) or (one + other).isdigit() and abs(int(one) - int(other)) <= 1


def mismatch(old: Record, new: Record) -> str | None:
    """The first difference between a stored claim or answer and the same one made again.

    Numbers of rows agree as `report.verify` says, those of exact checks within their tolerance;
    counts of what a claim needs may be one apart.
    """

    def values(record: Record) -> dict[str, Any]:
        """By name: 'verdict', 'rows.0.value'."""
        rows = {place: vars(row) for place, row in enumerate(record.rows)}
        return dict(flat(vars(record) | {'rows': rows}))

    one = values(old)
    other = values(new)
    for name in (name for name in one | other if name not in _OF_MACHINE):
        a = one.get(name)
        b = other.get(name)
        row = name.rpartition('.')[0]
        if name == 'needed' and None not in (a, b):
            same = difference(a, b, _needed) is None
        elif row and isinstance(a, float) and isinstance(b, float):
            is_exact = one[f'{row}.kind'] == Kind.EXACT
            same = near(a, b) or is_exact and abs(a - b) <= one[f'{row}.tolerance']
        else:
            same = a == b
        if not same:
            return f'{name} of {old.name} is {a!r}, but its checks and studies give {b!r}'
    return None
