"""The sentences that docs/troubleshooting.md quotes are those that the code prints."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.processes import ROOT

PAGE = (ROOT / 'docs/troubleshooting.md').read_text()


def one_line(text: str) -> str:
    return ' '.join(text.split())


BLOCKS = re.findall(r'```text\n(.*?)```', PAGE, re.DOTALL)
REASONS = re.findall(r'^\| `(.*?)` \|', PAGE, re.MULTILINE)
QUOTES = [one_line(quote) for quote in (*BLOCKS, *REASONS)]
# A quote holds at least so many characters of one message of the code, without its values.
CONSTANT = 15
# A phase of the display, and words of XLA.
OTHERS = ('train: compiling ... ', '[Compiling module jit_f for CPU] Very slow compile? ')

TRAIN = ('train', '--config=run.py', '--workdir=w')
REFUSED = [
    (*TRAIN, '--config.num_steps=9'),
    ('train', '--config=study.py', '--workdir=w'),
    (*TRAIN, '--config.train.num_steps=1e4'),
    (*TRAIN, '--config.model.d_model=90'),
    (*TRAIN, '--config.mesh.data=16'),
    ('ablate', '--config=study.py', '--dry_run', '--config.tuning.seeds=(10,)'),
]


@pytest.mark.parametrize('command', REFUSED, ids=lambda command: command[-1])
def test_a_refusal_is_quoted_as_it_is_printed(command, refusal):
    assert refusal(*command) in QUOTES


def constants() -> Iterator[str]:
    """The constant parts of all texts in the code: of strings, templates and shell scripts."""
    for folder in ('qkattn', 'experiments'):
        for path in (ROOT / folder).rglob('*.py'):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield from node.value.split('%s')
    for path in (ROOT / 'qkattn/report/templates').glob('*.j2'):
        yield from re.split(r'{{.*?}}|{%.*?%}', path.read_text())
    for path in (ROOT / 'launch').glob('*.sh'):
        yield from re.split(r'\$\{?\w+\}?|[\'"]|\\\n', path.read_text())


def test_every_quote_is_a_message_of_the_code():
    messages = {one_line(text) for text in constants()}
    messages = {text for text in messages if len(text) >= CONSTANT}
    assert len(QUOTES) >= 30
    for quote in QUOTES:
        is_ours = any(message in quote for message in messages)
        assert is_ours or quote.startswith(OTHERS), quote
