"""Checks that the numbers in Markdown prose have a source.

docs/numbers.toml has an entry for each sentence with such a number. On the pages that it lists as
complete, every number needs an entry:

    complete = ["README.md"]

    [[logged]]
    page = "docs/recipes.md"
    log = "experiments/results/char_lm_cpu/result.json"
    text = "**{log[0][val_loss]:.4f}** nats"      # a format string for the parsed log

    [[logged]]
    page = "docs/protocol.md"
    log = "qkattn/stats/decision.py"              # its constants, and the defaults of its classes
    text = "all looks share {log[ALPHA]:.0%}"

    [[decided]]
    page = "README.md"
    text = "**Undecided**: W_V."
    log = "experiments/results/claims/cpu/answers.json"
    holds = {"{log[6][name]}: {log[6][rows][1][decision]}" = "drop W_V: undecided"}

    [[external]]
    page = "docs/recipes.md"
    text = "1.88 nats/character"
    source = "https://github.com/karpathy/nanoGPT"

    [[stated]]
    page = "docs/protocol.md"
    text = "`--workers=4` starts four"
    reason = "an example of a command"

A page has to contain the text of each of its entries; line breaks do not matter. A percentage is
written with a space.

The text of a logged entry is a format string. `{log}` is the content of its file, as `read_log`
returns it, and `{count}` is the number of records. The text of a decided entry states verdicts. In
its `holds`, each key is a format string that has to give its value.
"""

import ast
import contextlib
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from qkattn.errors import ReportError
from qkattn.report.prose import one_line
from qkattn.storage.files import read_whole
from qkattn.storage.records import parse_json

# The fields of an entry, by kind. The third field says where the number is from.
FIELDS = {
    'logged': ('page', 'text', 'log'),
    'decided': ('page', 'text', 'log', 'holds'),
    'external': ('page', 'text', 'source'),
    'stated': ('page', 'text', 'reason'),
}

# Matches '+0.039', '4,096', '1e-5', and the '5' of '5-gram' and '5 %'. Does not match digits in
# versions or in names such as B4, W_2 or A100.
NUMBER = re.compile(r'(?<![\w.])(?<!GPT-)[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]*\w)')
# Matrices: W_Q, W_QK, Q = K, K = V.
MATRICES = re.compile(r'W_[QKVO]+|[QK] = [KV](?: = V)?')

# Parts of a page whose numbers need no entry: code, blocks generated from results, comments, link
# targets, and references such as (Shazeer 2019, arXiv 1911.02150).
NOT_PROSE = re.compile(
    r'```.*?```'
    # A comment without an end, such as `<!-- example: FILE -->`, begins no block.
    r'|<!-- \w+: \S+ -->(?:(?!<!--).)*<!-- end -->'
    r'|<!--.*?-->'
    r'|`[^`]*`'
    r'|\]\([^)]*\)'
    r'|(?:et al\.|[A-Z]\w+) (?:19|20)\d\d\b(?:, arXiv \d{4}\.\d{5})?',
    re.DOTALL,
)
# The text below a table of answers, to the end of its section. Matrices in this text need an entry,
# because they stand for answers.
DISCUSSION = re.compile(r'<!-- answers\w*: .*?<!-- end -->(.*?)(?=\n## |\Z)', re.DOTALL)


def check_numbers(path: str | Path) -> dict[str, int]:
    """Checks all entries of a numbers.toml.

    Args:
        path: The file, such as docs/numbers.toml. Pages and logs are relative to the parent of its
            directory, which is the repository.

    Returns:
        The number of entries of each kind.

    Raises:
        ReportError: An entry is malformed, a page does not contain the text of an entry, or a
            complete page has a number without an entry.
    """
    path = Path(path)
    root = path.parents[1]
    complete_pages, entries_by_kind = _read_entries(path)

    texts_by_page = defaultdict[str, list[str]](list)
    for kind, entries in entries_by_kind.items():
        for entry_number, entry in enumerate(entries, start=1):
            where = f'{path}, [[{kind}]] entry {entry_number}'
            _check_fields(kind, entry, where)
            text = _check_page(kind, entry, root, where)
            texts_by_page[entry['page']].append(text)

    for page in complete_pages:
        passages = uncovered(read_page(root / page), texts_by_page[page])
        passage = next(passages, None)
        if passage is not None:
            raise ReportError(
                f'{page} prints a number or a result that no entry of {path} has: {passage!r}; add '
                'a [[logged]] entry, or say where it is from'
            )
    return {kind: len(entries_by_kind.get(kind, ())) for kind in FIELDS}


def _read_entries(path: Path) -> tuple[list[str], dict[str, Any]]:
    """Reads a numbers.toml; returns its complete pages, and its unchecked entries by kind."""
    try:
        entries_by_kind = tomllib.loads(read_whole(path).decode())
    except (OSError, ValueError) as error:
        raise ReportError(f'{path} cannot be read: {error}') from error
    # All other keys of the file are kinds of entries.
    complete_pages = entries_by_kind.pop('complete', [])
    is_list = isinstance(complete_pages, list)
    if not is_list or not all(isinstance(page, str) for page in complete_pages):
        raise ReportError(f'{path}: complete = {complete_pages!r} must be a list of pages')
    return complete_pages, entries_by_kind


def _check_page(kind: str, entry: dict[str, Any], root: Path, where: str) -> str:
    """Checks that the page of an entry contains the entry's text; returns the text.

    `root` is the directory of pages and logs. `where` describes the entry in error messages.
    """
    text = _text_of(kind, entry, root, where)
    # The format {:.0%} writes '5%', but pages have '5 %'.
    text = re.sub(r'(?<=\d)%', ' %', text)
    text = one_line(text)
    page = entry['page']
    if not _contains(one_line(read_page(root / page)), text):
        source_field = FIELDS[kind][2]  # 'log', 'source' or 'reason'
        raise ReportError(
            f'{page} does not contain {text!r}, which is what {entry[source_field]} gives; correct '
            f'the page, or {where}'
        )
    return text


def _contains(line: str, text: str) -> bool:
    """Returns whether a line contains a text whose numbers are not parts of longer numbers.

    For example, 'a loss of 11.35' and 'a loss of 1.359' do not contain '1.35'.
    """
    places_in_numbers = set[int]()  # places between two characters of the same number
    for number in NUMBER.finditer(line):
        places_in_numbers.update(range(number.start() + 1, number.end()))
    for match in re.finditer(re.escape(text), line):
        cuts_number = match.start() in places_in_numbers or match.end() in places_in_numbers
        if not cuts_number:
            return True
    return False


def _check_fields(kind: str, entry: Any, where: str) -> None:
    """Checks that an entry has exactly the fields of its kind.

    `where` describes the entry in the error message.
    """
    fields = sorted(entry) if isinstance(entry, dict) else [str(entry)]
    expected_fields = sorted(FIELDS.get(kind, ()))
    if fields == expected_fields:
        return
    valid_entries = []  # such as '[[logged]] of page, text, log'
    for valid_kind, valid_fields in FIELDS.items():
        valid_entries.append(f'[[{valid_kind}]] of {", ".join(valid_fields)}')
    raise ReportError(f'{where} has {", ".join(fields)}; valid: {", ".join(valid_entries)}')


def _text_of(kind: str, entry: dict[str, Any], root: Path, where: str) -> str:
    """Returns the text that an entry's page has to contain.

    The text of a logged entry is filled with numbers of its log. For a decided entry, the log is
    checked against `holds`. `where` describes the entry in error messages.
    """
    text = entry['text']
    has_log = kind in ('logged', 'decided')
    if not has_log:
        return text

    source = entry['log']
    try:
        log = read_log(root / source)
        if kind == 'logged':
            return text.format(log=log, count=len(log))
        verdicts = []
        for template, expected in entry['holds'].items():
            # '{log[6][name]}: {log[6][rows][1][decision]}' gives 'drop W_V: undecided'.
            actual = template.format(log=log)
            verdicts.append((actual, expected))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SyntaxError) as error:
        raise ReportError(
            f'{where} cannot be made from {source} ({error!r}); correct the entry'
        ) from error
    for actual, expected in verdicts:
        if actual != expected:
            raise ReportError(f'{where} expects {expected!r}, but {source} gives {actual!r}')
    return text


def uncovered(page: str, texts: list[str]) -> Iterator[str]:
    """Yields the passages of a page whose numbers are in none of the texts.

    For example, the page 'It is 3 of 4, and 5.' with the text '3 of 4' gives one passage around
    '5'. Below a table of answers, matrices such as W_Q need a text as well.
    """
    line = one_line(page)

    # The positions in the line that are part of a text, or are not prose, such as code.
    covered = set[int]()
    for match in NOT_PROSE.finditer(line):
        covered.update(range(*match.span()))
    for text in texts:
        for match in re.finditer(re.escape(text), line):
            covered.update(range(*match.span()))

    # The numbers, and the matrices below tables of answers.
    statements = list(NUMBER.finditer(line))
    for match in DISCUSSION.finditer(page):
        discussion = one_line(match[1])
        start = line.index(discussion)
        statements += MATRICES.finditer(line, start, start + len(discussion))
    statements.sort(key=lambda statement: statement.start())

    for statement in statements:
        if not covered.issuperset(range(*statement.span())):
            passage_start = max(statement.start() - 40, 0)
            passage_end = statement.end() + 20
            yield line[passage_start:passage_end]


def read_log(path: Path) -> Any:
    """Reads a JSON, JSON Lines, TOML, CSV or Python file.

    Returns:
        The content: a list for JSON Lines; a list of rows for CSV, or a dict of rows by the first
        column if its entries are unique; a dict of constants for Python.
    """
    text = read_whole(path).decode()
    if path.suffix == '.jsonl':
        return [parse_json(line) for line in text.splitlines()]
    if path.suffix == '.toml':
        return tomllib.loads(text)
    if path.suffix == '.py':
        return _constants(ast.parse(text).body)
    if path.suffix == '.csv':
        table = pd.read_csv(path)
        rows = table.to_dict('records')
        first_column = table[table.columns[0]]
        if first_column.is_unique:
            return dict(zip(first_column, rows, strict=True))
        return rows
    return parse_json(text)


def _constants(statements: list[ast.stmt]) -> dict[str, Any]:
    """Returns the literal constants of a module or class body, by name.

    For example,

        ALPHA = 0.05
        class StudyConfig:
            margin: float = setting(0.005, ...)

    gives {'ALPHA': 0.05, 'StudyConfig': {'margin': 0.005}}.
    """
    constants = dict[str, Any]()
    for statement in statements:
        match statement:
            case ast.ClassDef(name=name, body=body):
                constants[name] = _constants(body)
                continue
            case ast.Assign(targets=[ast.Name(id=name), *_], value=value):
                pass  # NAME = VALUE
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                pass  # NAME: TYPE = VALUE
            case _:
                continue
        if isinstance(value, ast.Call) and value.args:
            value = value.args[0]  # the default in `setting(default, ...)`
        # literal_eval raises ValueError for a computed value.
        with contextlib.suppress(ValueError):
            constants[name] = ast.literal_eval(value)
    return constants


def read_page(path: Path) -> str:
    """Reads a page; for a Python file, its module docstring.

    Raises:
        ReportError: The file cannot be read.
    """
    try:
        text = read_whole(path).decode()
        if path.suffix == '.py':
            return ast.get_docstring(ast.parse(text)) or ''
        return text
    except (OSError, ValueError, SyntaxError) as error:
        raise ReportError(f'page {str(path)!r} cannot be read: {error}.') from error
