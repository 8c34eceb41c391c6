"""Checks that numbers in the prose of pages come from logs, from the code or from publications.

docs/numbers.toml has an entry for each sentence with such numbers. It also lists complete pages, on
which every number needs an entry:

    complete = ["README.md"]

    [[logged]]
    page = "docs/recipes.md"
    log = "experiments/results/char_lm_cpu/result.json"
    text = "**{log[0][val_loss]:.4f}** nats"      # a format string of the parsed log

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
returns it, and `{count}` the number of entries of the file. The text of a decided entry states
verdicts. Each key of its `holds` is a format string, which has to give the value beside it.
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

# The fields of an entry, by kind. The third one says where the number is from.
FIELDS = {
    'logged': ('page', 'text', 'log'),
    'decided': ('page', 'text', 'log', 'holds'),
    'external': ('page', 'text', 'source'),
    'stated': ('page', 'text', 'reason'),
}

# A number that stands alone: '+0.039', '4,096', '1e-5', and the '5' of '5-gram' and '5 %'. It does
# not match digits in names, such as B4, W_2 or A100, or in versions.
NUMBER = re.compile(r'(?<![\w.])(?<!GPT-)[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]*\w)')
# The name of a matrix, or of equal matrices: W_Q, W_QK, Q = K, K = V.
MATRICES = re.compile(r'W_[QKVO]+|[QK] = [KV](?: = V)?')

# Parts of a page whose numbers need no entry: code, blocks that are generated from results,
# comments, the targets of links, and references such as (Shazeer 2019, arXiv 1911.02150).
NOT_PROSE = re.compile(
    r'```.*?```'
    r'|<!-- \w+: \S+ -->.*?<!-- end -->'
    r'|<!--.*?-->'
    r'|`[^`]*`'
    r'|\]\([^)]*\)'
    r'|(?:et al\.|[A-Z]\w+) (?:19|20)\d\d\b(?:, arXiv \d{4}\.\d{5})?',
    re.DOTALL,
)
# The text below a table of answers, to the end of its section. It discusses the answers, so the
# names of matrices in it need an entry, too.
DISCUSSION = re.compile(r'<!-- answers\w*: .*?<!-- end -->(.*?)(?=\n## |\Z)', re.DOTALL)


def check_numbers(path: str | Path) -> dict[str, int]:
    """Checks all entries of a numbers.toml; returns the number of entries of each kind.

    Raises ReportError if the file or an entry is malformed, if a page does not contain the text of
    an entry, or if a complete page has a number without an entry. Pages and logs are relative to
    the parent of the directory with the file: the repository, for docs/numbers.toml.
    """
    path = Path(path)
    root = path.parents[1]
    complete_pages, entries_by_kind = _read_entries(path)

    texts_by_page = defaultdict[str, list[str]](list)
    for kind, entries in entries_by_kind.items():
        for number, entry in enumerate(entries, start=1):
            where = f'{path}, [[{kind}]] entry {number}'
            _check_fields(kind, entry, where)
            text = _check_page(kind, entry, root, where)
            texts_by_page[entry['page']].append(text)

    for page in complete_pages:
        for passage in uncovered(read_page(root / page), texts_by_page[page]):
            raise ReportError(
                f'{page} prints a number or a result that no entry of {path} has: {passage!r}; add '
                'a [[logged]] entry, or say where it is from'
            )
    return {kind: len(entries_by_kind.get(kind, ())) for kind in FIELDS}


def _read_entries(path: Path) -> tuple[list[str], dict[str, Any]]:
    """Reads a numbers.toml; returns the complete pages, and the lists of entries by kind.

    Raises ReportError if the file is not TOML, or if `complete` is not a list of pages. The entries
    are not checked.
    """
    try:
        content = tomllib.loads(read_whole(path).decode())
    except (OSError, ValueError) as error:
        raise ReportError(f'{path} cannot be read: {error}') from error
    complete_pages = content.pop('complete', [])
    is_list = isinstance(complete_pages, list)
    if not is_list or not all(isinstance(page, str) for page in complete_pages):
        raise ReportError(f'{path}: complete = {complete_pages!r} must be a list of pages')
    return complete_pages, content


def _check_page(kind: str, entry: dict[str, Any], root: Path, where: str) -> str:
    """Raises ReportError unless the page of an entry contains the entry's text; returns the text.

    `root` is the directory of pages and logs, and `where` names the entry in the message.
    """
    text = _text_of(kind, entry, root, where)
    # A format such as {:.0%} writes '5%'; pages have '5 %'.
    text = one_line(re.sub(r'(?<=\d)%', ' %', text))
    page = entry['page']
    if text not in one_line(read_page(root / page)):
        source_field = FIELDS[kind][2]  # 'log', 'source' or 'reason'
        raise ReportError(
            f'{page} does not contain {text!r}, which is what {entry[source_field]} gives; correct '
            f'the page, or {where}'
        )
    return text


def _check_fields(kind: str, entry: Any, where: str) -> None:
    """Raises ReportError unless an entry has exactly the fields of its kind.

    `where` names the entry in the message.
    """
    names = sorted(entry) if isinstance(entry, dict) else [str(entry)]
    if names != sorted(FIELDS.get(kind, ())):
        valid = [f'[[{kind}]] of {", ".join(fields)}' for kind, fields in FIELDS.items()]
        raise ReportError(f'{where} has {", ".join(names)}; valid: {", ".join(valid)}')


def _text_of(kind: str, entry: dict[str, Any], root: Path, where: str) -> str:
    """Returns the text that an entry's page has to contain.

    The text of a logged entry is a format string, which gets its numbers from the log. The text of
    a decided entry states verdicts, and its `holds` lists what the log then has to give. Entries of
    other kinds have no log.

    Raises ReportError if the log cannot be read, lacks a value, or gives other verdicts. `where`
    names the entry in the message.
    """
    text = entry['text']
    if 'log' not in FIELDS[kind]:
        return text

    source = entry['log']
    try:
        log = read_log(root / source)
        if kind == 'logged':
            return text.format(log=log, count=len(log))
        for template, expected in entry['holds'].items():
            # '{log[6][name]}: {log[6][rows][1][decision]}' gives 'drop W_V: undecided'.
            actual = template.format(log=log)
            if actual != expected:
                raise ReportError(f'{where} expects {expected!r}, but {source} gives {actual!r}')
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SyntaxError) as error:
        raise ReportError(
            f'{where} cannot be made from {source} ({error!r}); correct the entry'
        ) from error
    return text


def uncovered(page: str, texts: list[str]) -> Iterator[str]:
    """Yields a passage for each number in a page's prose that is in none of the texts.

    For example, the page 'It is 3 of 4, and 5.' with the text '3 of 4' gives one passage, the one
    around '5'. The passage has some characters on each side of the number. In the discussion of a
    table of answers, names of matrices such as W_Q have to be in a text as well.
    """
    line = one_line(page)

    # For each character of the line, whether it is inside one of the texts or is not prose.
    is_covered = [False] * len(line)
    matches = list(NOT_PROSE.finditer(line))
    for text in texts:
        matches += re.finditer(re.escape(text), line)
    for match in matches:
        is_covered[match.start() : match.end()] = [True] * len(match[0])

    # The numbers, and in discussions the names of matrices, all of which need to be covered.
    statements = list(NUMBER.finditer(line))
    for match in DISCUSSION.finditer(page):
        discussion = one_line(match[1])
        start = line.index(discussion)
        statements += MATRICES.finditer(line, start, start + len(discussion))
    statements.sort(key=lambda statement: statement.start())

    for statement in statements:
        if not all(is_covered[statement.start() : statement.end()]):
            passage_start = max(statement.start() - 40, 0)
            passage_end = statement.end() + 20
            yield line[passage_start:passage_end]


def read_log(path: Path) -> Any:
    """Reads a log, or a file of the code, into Python objects.

    JSON Lines give a list, and other JSON and TOML what they contain. CSV gives a list of rows, or
    if the entries of its first column differ, a dict {entry: row}. A Python file gives a dict of
    its constants.
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
    """Returns the literal values that statements of a Python file assign to names.

    `ALPHA = 0.05` gives {'ALPHA': 0.05}. A class gives its constants under its name. A field of a
    config class gives its default:

        class StudyConfig:
            margin: float = setting(0.005, ...)

    gives {'StudyConfig': {'margin': 0.005}}. For this, a call counts as its first argument.
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
            value = value.args[0]
        # A value that is computed is not a constant.
        with contextlib.suppress(ValueError):
            constants[name] = ast.literal_eval(value)
    return constants


def read_page(path: Path) -> str:
    """Returns the text of a page. The page of a Python file is its docstring.

    Raises ReportError if the file cannot be read.
    """
    try:
        text = read_whole(path).decode()
        if path.suffix == '.py':
            return ast.get_docstring(ast.parse(text)) or ''
        return text
    except (OSError, ValueError, SyntaxError) as error:
        raise ReportError(f'page {str(path)!r} cannot be read: {error}.') from error
