"""Exports decided claims and answers with their evidence, and decides them again to check them.

claims.json holds the decided claims. answers.json holds the loss difference from the baseline for
each change of attention, such as 'drop W_V', in each kind of model.
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
from qkattn.verdict import longer
from qkattn.verdict.trained_arm import TrainedArm, with_baselines

CLAIMS = 'claims.json'
ANSWERS = 'answers.json'
WITHHELD = Decision.NO_VERDICT.value
# A study that belongs to no claim, but is exported with the claims.
SCALING = 'lm_scaling'
# The fields of a claim that depend on the machine or the commit.
_OF_MACHINE = ('commit', 'hardware', 'seconds')
# The variant of each change of attention.
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

    template: str  # an arm's variant, with '{}' for the changed attention
    studies: tuple[str, ...]  # the preferred study first
    longer_studies: tuple[str, ...] = ()  # the same arms, trained for four times the steps


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
    """A change of attention and the resulting loss differences."""

    name: str  # a key of CHANGES
    variant: str
    # Relative change in attention's parameters at the same shape: -0.25 saves a quarter.
    attention: float | None
    # At most one row for each model and each of the kinds SAME_SHAPE, MATCHED and LONGER.
    rows: tuple[Row, ...] = ()

    def row(self, model: str, kind: Kind) -> Row | None:
        """Returns the row of a model and kind, if any."""
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
    """Returns an answer for each change of attention that has results."""
    all_answers = []
    for name, variant in CHANGES.items():
        differences: list[_Difference] = []
        for model_name in MODELS:
            differences += _differences_of_variant(results, model_name, variant)
        if not differences:
            continue

        attention = None  # the change in attention's parameters, which the decoder determines
        for difference in differences:
            if difference.row.context['model'] == 'decoder':
                attention = _change_in_attention(difference.baseline, variant)
                break
        rows = tuple(difference.row for difference in differences)
        all_answers.append(Answer(name, variant, attention, rows))
    return tuple(all_answers)


def _differences_of_variant(results: Results, model_name: str, variant: str) -> list[_Difference]:
    """Returns a variant's differences in one kind of model, at most one of each `Kind`.

    Among several differences of a kind, those with a verdict are preferred, then earlier studies of
    the model, then larger sizes.
    """
    model = MODELS[model_name]
    # Of translation and 'qk/no_v', for example, it is 'qk/vo?encoder_variant=qk/no_v'.
    arm_variant = model.template.format(variant)
    differences: list[_Difference] = []
    for study in model.studies:
        for repeat in results.newest_first(study):
            differences.extend(_differences_in(results, repeat, model_name, arm_variant))
    for study in model.longer_studies:
        for difference in _differences_in(results, study, model_name, arm_variant):
            if difference.row.kind == Kind.MATCHED:
                # The row of the shorter training states whether the difference lasts.
                row = dataclasses.replace(difference.row, kind=Kind.LONGER, length=None)
                differences.append(_Difference(row, difference.baseline))

    # False sorts before True, so differences with a verdict come first. The sort is stable.
    differences.sort(key=lambda difference: difference.row.decision == WITHHELD)
    first_by_kind: dict[str, _Difference] = {}
    for difference in differences:
        first_by_kind.setdefault(difference.row.kind, difference)
    return list(first_by_kind.values())


def _differences_in(results: Results, name: str, model: str, variant: str) -> Iterator[_Difference]:
    """Yields a variant's differences in a study, the largest size first.

    At each size and corpus, the difference at the baseline's shape comes first, if trained, and the
    difference at equal parameter count second.
    """
    findings = results.study(name)
    if findings is None:
        return
    study = findings.study
    smallest_first = with_baselines(findings.arms)
    for arm, baseline in reversed(smallest_first):
        is_compared_variant = arm.variant == variant and not arm.is_baseline
        if not is_compared_variant or baseline is None or not arm.chosen:
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
            control_key = arm.key._replace(variant=study.bare(arm.variant), control=SAME_SHAPE)
            controls = [control for control in findings.controls if control.key == control_key]
            row = difference_row(
                variant,
                Kind.SAME_SHAPE,
                context,
                at_same_shape.difference,
                # Only the whole difference has a verdict.
                decision=WITHHELD if decision == WITHHELD else None,
                study=name,
                is_short=any(control.shortfalls for control in controls),
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


def _change_in_attention(baseline: TrainedArm, variant: str) -> float:
    """Returns the relative change in attention's parameters at the baseline's shape."""
    config = from_json(ModelConfig, baseline.example.config)
    # None derives num_kv_heads and head_size from num_heads, which a variant may set.
    changed_fields = {'num_kv_heads': None, 'head_size': None} | parse_variant(variant)
    changed_config = dataclasses.replace(config, **changed_fields)
    parameters = cost.count(config)['attention']
    changed_parameters = cost.count(changed_config)['attention']
    return changed_parameters / parameters - 1


def write(directory: str | Path, name: str, records: Iterable[Record]) -> Path:
    """Writes claims or answers as JSON with checksums, with the numbers of rows `rounded`.

    Args:
        directory: The directory of the file.
        name: The name of the file, CLAIMS or ANSWERS.
        records: Claims or answers. Fields that have their default are left out.

    Returns:
        The path of the file.
    """
    objects = []
    for record in records:
        rows = []
        for row in record.rows:
            row_fields = _non_default_fields(row)
            rows.append({name: rounded(value) for name, value in row_fields.items()})
        record_fields = _non_default_fields(record)
        record_fields['rows'] = rows
        objects.append(record_fields)
    path = as_path(directory) / name
    write_json(path, objects)
    return path


def _non_default_fields(record: Any) -> dict[str, Any]:
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

    Raises:
        ReportError: The file does not exist.
        RunDirectoryError: The file was edited, or another program wrote it.
    """
    remedy = f'make it again with python -m experiments.claims --workdir=DIR --export={path.parent}'
    if not path.is_file():
        raise ReportError(f'{path} does not exist; {remedy}.')
    records = []
    schema = [{'name': str, 'rows': list}]  # a list of objects with at least these fields
    where = ''  # the name of the record that is read, such as 'B2: ', for error messages
    try:
        for record in parse_file(path, schema):
            where = f'{record["name"]}: '
            rows = tuple(read_dataclass(Row, row) for row in record['rows'])
            records.append(read_dataclass(cls, record, rows=rows))
    except ValueError as error:
        located_error = ValueError(f'{where}{error}')
        raise damaged_file_error(path, located_error, remedy) from error
    return tuple(records)


def export(decided: Iterable[ClaimResult], results: Results, destination: str | Path) -> None:
    """Writes claims.json, answers.json and the studies behind them into a directory.

    The scaling study and studies that train longer are exported too.

    Raises:
        ReportError: The destination holds something else.
    """
    decided = list(decided)
    destination = as_path(destination)
    names = [*results.with_repeats(decided), SCALING]
    for model in MODELS.values():
        names += model.longer_studies
    names = list(dict.fromkeys(names))
    for name in names:
        findings = results.study(name)
        if findings is None:
            continue
        # Studies beside this one that train longer say which of its differences are settled. The
        # loop reaches the names that are appended.
        for longer_directory in longer.studies_beside(findings.study):
            if longer_directory.name not in names:
                names.append(longer_directory.name)
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

    Returns:
        The number of compared rows.

    Raises:
        ReportError: The stored claims or answers differ from the recomputed ones.
    """
    results = Results(directory)
    directory = Path(directory)
    stored_claims = read_claims(directory)
    scale = stored_claims[0].scale
    decided = [decide(claim, scale, results) for claim in declared.claims().values()]
    stored_answers = read_answers(directory)
    _check_equal(directory / CLAIMS, stored_claims, decided)
    _check_equal(directory / ANSWERS, stored_answers, answers(results))
    num_rows = sum(len(claim.rows) for claim in stored_claims)
    return num_rows + sum(len(answer.rows) for answer in stored_answers)


def _check_equal(file: Path, stored: Sequence[Record], recomputed: Sequence[Record]) -> None:
    """Raises ReportError unless the stored records of a file equal the recomputed ones."""
    stored_names = [record.name for record in stored]
    recomputed_names = [record.name for record in recomputed]
    if stored_names != recomputed_names:
        unequal = ', '.join(sorted(set(stored_names) ^ set(recomputed_names)))
        raise ReportError(f'{file} differs from what is declared: {unequal}')
    for stored_record, recomputed_record in zip(stored, recomputed, strict=True):
        difference = mismatch(stored_record, recomputed_record)
        if difference:
            raise ReportError(f'{file}: {difference}')


def mismatch(stored: Record, recomputed: Record) -> str | None:
    """Describes the first difference between a stored record and the recomputed one, if any.

    Numbers in rows may differ by rounding, or in exact checks by the tolerance. Counts in the text
    `needed`, such as '40 seeds in place of 16', may differ by one.
    """
    # Values by names such as 'verdict' and 'rows.0.value'.
    old = _values(stored)
    new = _values(recomputed)
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
            if not agrees and old[f'{row_name}.kind'] == Kind.EXACT:
                agrees = abs(old_value - new_value) <= old[f'{row_name}.tolerance']
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
    rows = {index: vars(row) for index, row in enumerate(record.rows)}
    nested = vars(record) | {'rows': rows}
    return dict(flat(nested))


def _counts_agree(old: str, new: str) -> bool:
    """Returns whether two printed numbers are `close`, or are counts that differ by at most one."""
    if close(old, new):
        return True
    are_counts = old.isdigit() and new.isdigit()
    return are_counts and abs(int(old) - int(new)) <= 1
