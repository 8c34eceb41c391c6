"""Exports claims and answers with their evidence, and decides them again.

claims.json holds the claims as decided. answers.json says what each matrix is worth: for each
change of attention, the difference between an arm and its baseline in the best study. Studies whose
baseline meets its yardsticks come first, then those with the most training tokens per run, then
those with the largest models.
"""

import dataclasses
import itertools
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from qkattn.claims import declared
from qkattn.claims.claim import ClaimResult, Kind, Row, difference_row
from qkattn.claims.deciding import decide
from qkattn.claims.studies import MEASURES, Results, recording
from qkattn.config import ModelConfig, from_json
from qkattn.errors import ReportError
from qkattn.model import cost
from qkattn.report import export as export_study
from qkattn.report.prose import rounded
from qkattn.report.verify import difference, near
from qkattn.stats.decision import Decision
from qkattn.storage.files import make_directory
from qkattn.storage.records import damaged, parse_file, read, write_json
from qkattn.study.arms import parse_variant
from qkattn.verdict.arms import Arm, with_baselines
from qkattn.verdict.rules import standings

CLAIMS, ANSWERS = 'claims.json', 'answers.json'
SCALING = 'scaling'  # a study of no claim, which is exported beside them
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
        ('lm_dropped', 'lm_sharing', 'lm_added', 'depth_heads', 'overparameterised')
        + ('rank', 'sharing'),
    ),
    'masked LM': ('{}', ('masked_lm', 'masked')),
    'translation': ('qk/vo?encoder_variant={}', ('translation', 'encoder_side')),
}


@dataclasses.dataclass(frozen=True)
class Answer:
    """A change of attention and what it costs, in each kind of model and at each shape."""

    name: str
    variant: str
    # Added to attention's parameters at the same shape, as a fraction: -0.25 saves a quarter.
    attention: float | None
    # At most one of each model and kind, `Kind.REMOVED` at the same shape and `Kind.MATCHED` at
    # equal parameter count; without a verdict, the decision is 'no verdict'.
    rows: tuple[Row, ...] = ()

    def row(self, model: str, kind: Kind) -> Row | None:
        """The row of a kind of model at a shape."""
        rows = (row for row in self.rows if (row.context['model'], row.kind) == (model, kind))
        return next(rows, None)


Record = TypeVar('Record', ClaimResult, Answer)


def answers(results: Results) -> tuple[Answer, ...]:
    """One answer for each change that a study of the directory has trained."""
    made = []
    for name, variant in CHANGES.items():
        best: dict[tuple[str, str], tuple[tuple, Arm, Row]] = {}
        for model, (template, studies) in MODELS.items():
            shown = (_rows(results, study, model, template.format(variant)) for study in studies)
            for rank, baseline, row in itertools.chain.from_iterable(shown):
                if (model, row.kind) not in best or rank > best[model, row.kind][0]:
                    best[model, row.kind] = rank, baseline, row
        decoders = [baseline for (model, _), (_, baseline, _) in best.items() if model == 'decoder']
        share = _attention(decoders[0], variant) if decoders else None
        if best:
            made.append(Answer(name, variant, share, tuple(row for *_, row in best.values())))
    return tuple(made)


def _rows(
    results: Results, name: str, model: str, variant: str
) -> Iterator[tuple[tuple, Arm, Row]]:
    """The differences of a variant in a study, with their rank and baseline."""
    if (loaded := results.study(name)) is None:
        return
    study, findings = loaded
    learned = {s.arm.key for s in standings(study, findings.arms) if not s.remarks}
    parts = {part.key: part for part in findings.decomposition}
    for arm, baseline in with_baselines(findings.arms):
        if arm.variant != variant or arm.is_baseline or baseline is None or not arm.chosen:
            continue
        trial, part, has_learned = arm.example, parts.get(arm.key), baseline.key in learned
        parameters = trial.parameters['total']
        rank = has_learned, trial.num_tokens, parameters, study.corpora.index(arm.corpus)
        decided = arm.verdict.decision if arm.verdict and has_learned else Decision.NO_VERDICT
        context = {'model': model, 'size': arm.size, 'corpus': arm.corpus}
        context |= {'parameters': f'{parameters:,}', 'tokens': f'{trial.num_tokens:,}'}
        for kind, comparison, decision in (
            (Kind.REMOVED, part and part.removing, None if has_learned else decided.value),
            (Kind.MATCHED if study.matched else Kind.REMOVED, arm.comparison, decided.value),
        ):
            if comparison:
                about = {'decision': decision, 'study': name}
                row = difference_row(variant, kind, context, comparison.difference, **about)
                yield rank, baseline, row


def _attention(baseline: Arm, variant: str) -> float:
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
    write_json(path := Path(directory) / name, made)
    return path


def read_claims(directory: str | Path, advice: str | None = None) -> tuple[ClaimResult, ...]:
    """The claims of a directory; raises as `_read`."""
    return _read(Path(directory) / CLAIMS, ClaimResult, advice)


def read_answers(directory: str | Path) -> tuple[Answer, ...]:
    """The answers of a directory, () without a file; raises as `_read`."""
    path = Path(directory) / ANSWERS
    return _read(path, Answer) if path.is_file() else ()


def _read(path: Path, cls: type[Record], advice: str | None = None) -> tuple[Record, ...]:
    """The records of a file of `write`.

    ReportError without a file, RunDirectoryError if it was edited or is not what `write` writes;
    both give the `advice`, by default to export it again.
    """
    again = f'make it again with python -m experiments.claims --workdir=DIR --export={path.parent}'
    if not path.is_file():
        raise ReportError(f'{path} does not exist; {advice or again}.')
    made, where = [], ''
    try:
        for record in parse_file(path, [{'name': str, 'rows': list}]):
            where = f'{record["name"]}: '
            rows = tuple(read(Row, row) for row in record['rows'])
            made.append(read(cls, record, rows=rows))
    except ValueError as error:
        raise damaged(path, ValueError(f'{where}{error}'), advice or again) from error
    return tuple(made)


def export(decided: Iterable[ClaimResult], results: Results, destination: str | Path) -> None:
    """Writes claims.json, answers.json and their studies into a directory.

    ReportError if the destination holds something else.
    """
    decided, destination = list(decided), Path(destination)
    names = [name for claim in decided for name in claim.studies]
    for name in dict.fromkeys([*names, SCALING]):
        source = results.directory / name
        if results.study(name) is not None:
            export_study(source, destination / name)
        if recording(source).exists():
            make_directory(destination / name / MEASURES)
            shutil.copy(recording(source), recording(destination / name))
    write(destination, CLAIMS, decided)
    if made := answers(results):
        write(destination, ANSWERS, made)


def check(directory: str | Path) -> int:
    """Makes the claims and answers of an exported directory again; returns how many rows agree.

    ReportError if claims.json or answers.json hold undeclared claims or other results.
    """
    directory, results, count = Path(directory), Results(directory), 0
    stored = read_claims(directory)
    claims = [decide(claim, stored[0].scale, results) for claim in declared.claims().values()]
    pairs: list[tuple[str, Sequence, Sequence]] = [
        (CLAIMS, stored, claims),
        (ANSWERS, read_answers(directory), answers(results)),
    ]
    for file, old, new in pairs:
        names, made = ([record.name for record in records] for records in (old, new))
        if names != made:
            raise ReportError(
                f'{directory / file} does not hold what is declared and trained, in its order; '
                f'{", ".join(sorted({*names} ^ {*made}))} differ'
            )
        for one, other in zip(old, new, strict=True):
            if unequal := mismatch(one, other):
                raise ReportError(f'{directory / file}: {unequal}')
        count += sum(len(record.rows) for record in old)
    return count


def mismatch(old: Record, new: Record) -> str | None:
    """The first difference between a stored claim or answer and the same one made again.

    Numbers of rows agree as `report.verify` says, those of exact checks within their tolerance;
    counts of what a claim needs may be one apart.
    """
    number = 'number of rows'
    pairs: list[tuple[str, dict, dict]] = [
        (old.name, vars(old), vars(new)),
        (old.name, {number: len(old.rows)}, {number: len(new.rows)}),
    ]
    for place, (row, again) in enumerate(zip(old.rows, new.rows, strict=False)):
        pairs.append((f'row {place} of {old.name}', vars(row), vars(again)))
    for where, one, other in pairs:
        rounding = one['tolerance'] if one.get('kind') == Kind.EXACT else 0.0
        for name in (name for name in one if name not in ('rows', *_OF_MACHINE)):
            a, b = one[name], other[name]
            if name == 'needed' and None not in (a, b):
                same = difference(a, b, lambda x, y: abs(float(x) - float(y)) <= 1) is None
            elif isinstance(a, float) and isinstance(b, float) and 'kind' in one:
                same = near(a, b) or abs(a - b) <= rounding
            else:
                same = a == b
            if not same:
                return f'{name} of {where} is {a!r}, but its checks and studies give {b!r}'
    return None
