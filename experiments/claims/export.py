"""Exports decided claims and answers with their evidence, and decides them again to check them.

claims.json holds the decided claims. answers.json says what each matrix is worth: for each change
of attention and each kind of model, the difference between an arm and its baseline in one study.
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
from qkattn.report.prose import length_words, rounded
from qkattn.report.verify import close, near
from qkattn.report.verify import difference as text_difference
from qkattn.stats.decision import Decision
from qkattn.storage.files import as_path, join_without_links
from qkattn.storage.records import damaged_file_error, flat, parse_file, read_dataclass, write_json
from qkattn.study.arm_key import SAME_SHAPE
from qkattn.study.arms import parse_variant
from qkattn.verdict.trained_arm import TrainedArm, with_baselines

CLAIMS = 'claims.json'
ANSWERS = 'answers.json'
WITHHELD = Decision.NO_VERDICT.value
# This study belongs to no claim, but is exported with the claims.
SCALING = 'lm_scaling'
# The fields of a claim that depend on the machine or the commit.
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

    # The name of an arm, with '{}' for the variant of its attention.
    template: str
    # The studies that compare the variants, the best one first. Their repeats are used, too.
    studies: tuple[str, ...]
    # Studies that train the same arms for four times the steps.
    longer_studies: tuple[str, ...] = ()


MODELS = {
    'decoder': _Model(
        '{}',
        studies=('lm_dropped', 'lm_sharing', 'lm_added', 'lm_doubled'),
        longer_studies=('lm_long',),
    ),
    'masked LM': _Model('{}', ('masked_lm',)),
    'translation': _Model('qk/vo?encoder_variant={}', ('translation',)),
}


@dataclasses.dataclass(frozen=True)
class Answer:
    """A change of attention and what it costs, in each kind of model and at each shape."""

    name: str  # a key of CHANGES
    variant: str
    # The change in attention's parameters at the same shape, as a fraction: -0.25 saves a quarter.
    attention: float | None
    # At most one row for each model and kind. The kind is SAME_SHAPE, MATCHED (equal parameter
    # count) or LONGER. The decision of a row without a verdict is 'no verdict'.
    rows: tuple[Row, ...] = ()

    def row(self, model: str, kind: Kind) -> Row | None:
        """Returns the row of a model and kind; None without results."""
        for row in self.rows:
            if row.context['model'] == model and row.kind == kind:
                return row
        return None


Record = TypeVar('Record', ClaimResult, Answer)


class _Difference(NamedTuple):
    """The row of a variant's difference from its baseline, and the baseline."""

    row: Row
    baseline: TrainedArm


def answers(results: Results) -> tuple[Answer, ...]:
    """Returns one answer for each change of attention that a study of the directory has trained.

    For example, the answer 'drop W_V' has a row for the difference of qk/no_v in a decoder at equal
    parameter count, another one at the same shape, and so on for each kind of model.
    """
    all_answers = []
    for name, variant in CHANGES.items():
        differences: list[_Difference] = []
        for model_name in MODELS:
            differences += _differences_of_variant(results, model_name, variant)
        if not differences:
            continue

        # Attention's parameters are counted in the decoder, if it has results.
        share = None
        for difference in differences:
            if difference.row.context['model'] == 'decoder':
                share = _added_to_attention(difference.baseline, variant)
                break
        rows = tuple(difference.row for difference in differences)
        all_answers.append(Answer(name, variant, share, rows))
    return tuple(all_answers)


def _differences_of_variant(results: Results, model_name: str, variant: str) -> list[_Difference]:
    """Returns the differences of a variant in one kind of model: one for each kind of row.

    Several studies may have a difference of a kind. The first one with a verdict is chosen, in the
    order of the model's studies and of their sizes. If none has a verdict, it is the first one.
    """
    model = MODELS[model_name]
    arm_variant = model.template.format(variant)
    differences: list[_Difference] = []
    for study in model.studies:
        for repeat in results.newest_first(study):
            differences.extend(_differences_in(results, repeat, model_name, arm_variant))
    for study in model.longer_studies:
        for difference in _differences_in(results, study, model_name, arm_variant):
            if difference.row.kind == Kind.MATCHED:
                # Whether a difference is settled is said of the shorter training.
                row = dataclasses.replace(difference.row, kind=Kind.LONGER, length=None)
                differences.append(_Difference(row, difference.baseline))
    # The sort is stable: rows with a verdict come first, and each group keeps its order.
    differences.sort(key=lambda difference: difference.row.decision == WITHHELD)
    chosen: dict[str, _Difference] = {}  # by kind
    for difference in differences:
        chosen.setdefault(difference.row.kind, difference)
    return list(chosen.values())


def _differences_in(results: Results, name: str, model: str, variant: str) -> Iterator[_Difference]:
    """Yields the differences of a variant in a study, the largest size first.

    Each size and corpus has the difference at the baseline's shape, if that is trained, and then
    the difference at equal parameter count.
    """
    findings = results.study(name)
    if findings is None:
        return
    study = findings.study
    for arm, baseline in reversed(with_baselines(findings.arms)):
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
            # A part of a difference has no verdict. It is withheld if the arm's verdict is.
            control_key = arm.key._replace(variant=study.bare(arm.variant), control=SAME_SHAPE)
            is_short = any(
                control.shortfalls for control in findings.controls if control.key == control_key
            )
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
                length=length_words(arm.settling),
            )
            yield _Difference(row, baseline)


def _added_to_attention(baseline: TrainedArm, variant: str) -> float:
    """Returns the change in attention's parameters at the baseline's shape, as a fraction."""
    config = from_json(ModelConfig, baseline.example.config)
    # A variant may set num_heads. None lets these two fields follow from it.
    fields = {'num_kv_heads': None, 'head_size': None} | parse_variant(variant)
    changed_config = dataclasses.replace(config, **fields)
    parameters = cost.count(config)['attention']
    return cost.count(changed_config)['attention'] / parameters - 1


def write(directory: str | Path, name: str, records: Iterable[Record]) -> Path:
    """Writes claims or answers into the file `name`, CLAIMS or ANSWERS; returns its path.

    Each record becomes a JSON object with a checksum. Fields that have their default are left out.
    Numbers of rows are `rounded`.
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
    """Returns the fields of a dataclass instance that do not have their default."""
    values = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if value != field.default:
            values[field.name] = value
    return values


def read_claims(directory: str | Path) -> tuple[ClaimResult, ...]:
    """Reads the claims of a directory; raises like `_read`."""
    return _read(Path(directory) / CLAIMS, ClaimResult)


def read_answers(directory: str | Path) -> tuple[Answer, ...]:
    """Reads the answers of a directory; () if the file does not exist. Raises like `_read`."""
    path = Path(directory) / ANSWERS
    return _read(path, Answer) if path.is_file() else ()


def _read(path: Path, cls: type[Record]) -> tuple[Record, ...]:
    """Reads the records of a file that `write` wrote.

    Raises ReportError if the file does not exist. Raises RunDirectoryError if it was edited or is
    not a file of `write`.
    """
    again = f'make it again with python -m experiments.claims --workdir=DIR --export={path.parent}'
    if not path.is_file():
        raise ReportError(f'{path} does not exist; {again}.')
    records = []
    where = ''
    try:
        for record in parse_file(path, [{'name': str, 'rows': list}]):
            where = f'{record["name"]}: '
            rows = tuple(read_dataclass(Row, row) for row in record['rows'])
            records.append(read_dataclass(cls, record, rows=rows))
    except ValueError as error:
        raise damaged_file_error(path, ValueError(f'{where}{error}'), again) from error
    return tuple(records)


def export(decided: Iterable[ClaimResult], results: Results, destination: str | Path) -> None:
    """Writes claims.json, answers.json and their studies into a directory.

    Raises ReportError if the destination holds something else.
    """
    decided = list(decided)
    destination = as_path(destination)
    for name in dict.fromkeys([*results.with_repeats(decided), SCALING]):
        findings = results.study(name)
        if findings is None:
            continue
        # A study cannot be read without the studies that it repeats.
        for earlier in findings.study.earlier:
            if earlier.path is not None:
                export_study(earlier.path, join_without_links(destination, earlier.name))
        export_study(results.directory / name, join_without_links(destination, name))
    write(destination, CLAIMS, decided)
    answered = answers(results)
    if answered:
        write(destination, ANSWERS, answered)


def check(directory: str | Path) -> int:
    """Decides the claims and answers of an exported directory again and compares them.

    Returns the number of rows, which all agree. Raises ReportError if claims.json or answers.json
    has undeclared claims or other results.
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
    """Raises ReportError unless the stored records of a file equal the recomputed ones."""
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
    """Describes the first difference between a stored record and the recomputed one, if any.

    Numbers of rows may differ by rounding, as `report.verify` allows, and those of exact checks by
    their tolerance. The field `needed` is a text, such as '40 seeds in place of 16, ...'. Its
    counts may differ by one.
    """
    # Values by names such as 'verdict' and 'rows.0.value'.
    old = _values(stored)
    new = _values(again)
    for name in old | new:
        if name in _OF_MACHINE:
            continue
        old_value = old.get(name)
        new_value = new.get(name)
        row_name, _, _ = name.rpartition('.')  # 'rows.0', or '' for a value outside of rows
        if name == 'needed' and old_value is not None and new_value is not None:
            agrees = text_difference(old_value, new_value, _counts_agree) is None
        elif row_name and isinstance(old_value, float) and isinstance(new_value, float):
            agrees = near(old_value, new_value)
            if old[f'{row_name}.kind'] == Kind.EXACT:
                agrees = agrees or abs(old_value - new_value) <= old[f'{row_name}.tolerance']
        else:
            agrees = old_value == new_value
        if not agrees:
            return (
                f'{name} of {stored.name} is {old_value!r}, but its checks and studies give '
                f'{new_value!r}'
            )
    return None


def _values(record: ClaimResult | Answer) -> dict[str, Any]:
    """Returns the values of a claim or answer by name, such as 'verdict' or 'rows.0.value'."""
    rows = {number: vars(row) for number, row in enumerate(record.rows)}
    return dict(flat(vars(record) | {'rows': rows}))


def _counts_agree(old: str, new: str) -> bool:
    """Returns whether two printed numbers are `close`, or are counts that differ by at most one."""
    if close(old, new):
        return True
    are_counts = old.isdigit() and new.isdigit()
    return are_counts and abs(int(old) - int(new)) <= 1
