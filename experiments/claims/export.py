"""Exports claims and answers with their evidence, and decides them again.

claims.json holds the claims as decided. answers.json says what each matrix is worth: for each
change of attention, the difference between an arm and its baseline in one study of each model.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from experiments.claims import declared
from experiments.claims.claim import ClaimResult, Kind, Row, difference_row
from experiments.claims.deciding import decide
from experiments.claims.studies import Results
from qkattn.config import ModelConfig, from_json
from qkattn.errors import ReportError
from qkattn.model import cost
from qkattn.report import export as export_study
from qkattn.report.prose import length, rounded
from qkattn.report.verify import close, near
from qkattn.report.verify import difference as text_difference
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
# The fields of a claim that another machine or commit changes.
_OF_MACHINE = ('commit', 'hardware', 'seconds')
# Each change of attention by its name in the table of answers, with the variant that makes it.
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


@dataclasses.dataclass(frozen=True)
class _Model:
    """A kind of model in which changes of attention are compared."""

    template: str  # the variant of the model, '{}' for that of its attention
    studies: tuple[str, ...]  # that compare the variants, the best first; each with its repeats


MODELS = {
    'decoder': _Model('{}', ('lm_dropped', 'lm_sharing', 'lm_added', 'lm_doubled')),
    'masked LM': _Model('{}', ('masked_lm',)),
    'translation': _Model('qk/vo?encoder_variant={}', ('translation',)),
}


@dataclasses.dataclass(frozen=True)
class Answer:
    """A change of attention and what it costs, in each kind of model and at each shape."""

    name: str  # a key of CHANGES
    variant: str
    # Added to attention's parameters at the same shape, as a fraction: -0.25 saves a quarter.
    attention: float | None
    # At most one of each model and kind, `Kind.SAME_SHAPE` at the same shape and `Kind.MATCHED` at
    # equal parameter count; without a verdict, the decision is 'no verdict'.
    rows: tuple[Row, ...] = ()

    def row(self, model: str, kind: Kind) -> Row | None:
        """The row of a kind of model at a shape; None without results."""
        for row in self.rows:
            if row.context['model'] == model and row.kind == kind:
                return row
        return None


Record = TypeVar('Record', ClaimResult, Answer)


class _Difference(NamedTuple):
    """The difference of a variant from a baseline as a row, and the baseline."""

    row: Row
    baseline: TrainedArm


def answers(results: Results) -> tuple[Answer, ...]:
    """One answer for each change that a study of the directory has trained.

    It has a row for each kind of model and shape: the first row with a verdict in the order of
    studies and their sizes; without any, the first.
    """
    changes = []
    for change, variant in CHANGES.items():
        chosen: dict[tuple[str, str], _Difference] = {}  # by kind of model, and of row
        for model_name, model in MODELS.items():
            differences: list[_Difference] = []
            for study in model.studies:
                for repeat in results.newest_first(study):
                    arm_variant = model.template.format(variant)
                    differences.extend(_differences_in(results, repeat, model_name, arm_variant))
            # A stable sort: rows with a verdict come first, each in its order.
            differences.sort(key=lambda difference: difference.row.decision == WITHHELD)
            for difference in differences:
                chosen.setdefault((model_name, difference.row.kind), difference)
        if not chosen:
            continue
        share = None
        for (model_name, _), difference in chosen.items():
            if model_name == 'decoder':
                share = _added_to_attention(difference.baseline, variant)
                break
        rows = tuple(difference.row for difference in chosen.values())
        changes.append(Answer(change, variant, share, rows))
    return tuple(changes)


def _differences_in(results: Results, name: str, model: str, variant: str) -> Iterator[_Difference]:
    """The differences of a variant in a study, the largest size first.

    For each size and corpus the difference at the baseline's shape, if it is trained, then that at
    equal parameter count.
    """
    loaded = results.study(name)
    if loaded is None:
        return
    study = loaded.study
    for arm, baseline in reversed(with_baselines(loaded.arms)):
        if arm.variant != variant or arm.is_baseline or baseline is None or not arm.chosen:
            continue
        context = {
            'model': model,
            'size': arm.size,
            'corpus': arm.corpus,
            'parameters': f'{arm.example.parameters["total"]:,}',
            'tokens': f'{arm.example.num_tokens:,}',
        }
        decision = arm.verdict.decision.value if arm.verdict else WITHHELD
        at_same_shape = arm.parts.same_shape
        if at_same_shape:
            # A part of the difference has no verdict of its own, but is withheld with the arm's.
            control = arm.key._replace(variant=study.bare(arm.variant), control=SAME_SHAPE)
            is_short = any(o.shortfalls for o in loaded.controls if o.key == control)
            row = difference_row(
                variant,
                Kind.SAME_SHAPE,
                context,
                at_same_shape.difference,
                decision=WITHHELD if decision == WITHHELD else None,
                study=name,
                is_short=is_short,
            )
            yield _Difference(row, baseline)
        if arm.comparison:
            row = difference_row(
                variant,
                Kind.MATCHED if study.match else Kind.SAME_SHAPE,
                context,
                arm.comparison.difference,
                decision=decision,
                study=name,
                is_short=bool(arm.shortfalls),
                length=length(arm.settling),
            )
            yield _Difference(row, baseline)


def _added_to_attention(baseline: TrainedArm, variant: str) -> float:
    """What a variant adds to attention's parameters at the baseline's shape, as a fraction."""
    config = from_json(ModelConfig, baseline.example.config)
    # Those follow from num_heads, which a variant may set.
    fields = {'num_kv_heads': None, 'head_size': None} | parse_variant(variant)
    changed = dataclasses.replace(config, **fields)
    return cost.count(changed)['attention'] / cost.count(config)['attention'] - 1


def write(directory: str | Path, name: str, records: Iterable[Record]) -> Path:
    """Writes claims or answers into the file `name`, CLAIMS or ANSWERS; returns its path.

    Each record is a JSON object of its fields, without those that have their default, and with a
    checksum. Numbers of rows are `rounded`.
    """
    objects = []
    for record in records:
        rows = []
        for row in record.rows:
            rows.append({field: rounded(value) for field, value in _set_fields(row).items()})
        objects.append(_set_fields(record) | {'rows': rows})
    path = as_path(directory) / name
    write_json(path, objects)
    return path


def _set_fields(record: Any) -> dict[str, Any]:
    """The fields of a dataclass instance that do not have their default."""
    values = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if value != field.default:
            values[field.name] = value
    return values


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
    records = []
    where = ''
    try:
        for record in parse_file(path, [{'name': str, 'rows': list}]):
            where = f'{record["name"]}: '
            rows = tuple(read(Row, row) for row in record['rows'])
            records.append(read(cls, record, rows=rows))
    except ValueError as error:
        raise damaged(path, ValueError(f'{where}{error}'), again) from error
    return tuple(records)


def export(decided: Iterable[ClaimResult], results: Results, destination: str | Path) -> None:
    """Writes claims.json, answers.json and their studies into a directory.

    ReportError if the destination holds something else.
    """
    decided = list(decided)
    destination = as_path(destination)
    for name in dict.fromkeys([*results.with_repeats(decided), SCALING]):
        loaded = results.study(name)
        if loaded is None:
            continue
        for earlier in loaded.study.earlier:  # without which it cannot be read
            if earlier.path is not None:
                export_study(earlier.path, below(destination, earlier.name))
        export_study(results.directory / name, below(destination, name))
    write(destination, CLAIMS, decided)
    answered = answers(results)
    if answered:
        write(destination, ANSWERS, answered)


def check(directory: str | Path) -> int:
    """Makes the claims and answers of an exported directory again; returns how many rows agree.

    ReportError if claims.json or answers.json hold undeclared claims or other results.
    """
    results = Results(directory)
    directory = Path(directory)
    stored = read_claims(directory)
    scale = stored[0].scale
    decided = [decide(claim, scale, results) for claim in declared.claims().values()]
    stored_answers = read_answers(directory)
    _check_equal(directory / CLAIMS, stored, decided)
    _check_equal(directory / ANSWERS, stored_answers, answers(results))
    num_rows = sum(len(claim.rows) for claim in stored)
    return num_rows + sum(len(answer.rows) for answer in stored_answers)


def _check_equal(file: Path, stored: Sequence[Record], again: Sequence[Record]) -> None:
    """Raises ReportError unless the stored records of a file are those made again."""
    names = [record.name for record in stored]
    names_again = [record.name for record in again]
    if names != names_again:
        unequal = ', '.join(sorted(set(names) ^ set(names_again)))
        raise ReportError(f'{file} differs from what is declared: {unequal}')
    for record, record_again in zip(stored, again, strict=True):
        difference = mismatch(record, record_again)
        if difference:
            raise ReportError(f'{file}: {difference}')


def mismatch(stored: Record, again: Record) -> str | None:
    """The first difference between a stored claim or answer and the same one made again.

    Numbers of rows agree as `report.verify` says, those of exact checks within their tolerance;
    counts of what a claim needs may be one apart.
    """
    old = _values(stored)
    new = _values(again)
    for name in old | new:
        if name in _OF_MACHINE:
            continue
        old_value = old.get(name)
        new_value = new.get(name)
        row = name.rpartition('.')[0]  # 'rows.0' of 'rows.0.value'
        if name == 'needed' and old_value is not None and new_value is not None:
            agrees = text_difference(old_value, new_value, _counts_agree) is None
        elif row and isinstance(old_value, float) and isinstance(new_value, float):
            agrees = near(old_value, new_value)
            if old[f'{row}.kind'] == Kind.EXACT:
                agrees = agrees or abs(old_value - new_value) <= old[f'{row}.tolerance']
        else:
            agrees = old_value == new_value
        if not agrees:
            return (
                f'{name} of {stored.name} is {old_value!r}, but its checks and studies give '
                f'{new_value!r}'
            )
    return None


def _values(record: ClaimResult | Answer) -> dict[str, Any]:
    """The values of a claim or answer by name: 'verdict', 'rows.0.value'."""
    rows = {number: vars(row) for number, row in enumerate(record.rows)}
    return dict(flat(vars(record) | {'rows': rows}))


def _counts_agree(old: str, new: str) -> bool:
    """Whether two prints of a number are `close`, or counts at most one apart."""
    if close(old, new):
        return True
    are_counts = old.isdigit() and new.isdigit()
    return are_counts and abs(int(old) - int(new)) <= 1
