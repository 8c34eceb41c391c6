"""The code prints the sentences that docs/troubleshooting.md quotes."""

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
# A quote comes from our code if it contains a constant part of a message. Shorter parts than this
# do not count.
MIN_CONSTANT_LENGTH = 15
# Quotes of the progress display and of XLA, which are not constants in our code.
QUOTES_FROM_ELSEWHERE = (
    'train: compiling ... ',
    '[Compiling module jit_f for CPU] Very slow compile? ',
)

TRAIN = ('train', '--config=run.py', '--workdir=w')
REFUSED_COMMANDS = [
    (*TRAIN, '--config.num_steps=9'),
    ('train', '--config=study.py', '--workdir=w'),
    (*TRAIN, '--config.train.num_steps=1e4'),
    (*TRAIN, '--config.model.d_model=90'),
    (*TRAIN, '--config.mesh.data=16'),
    ('ablate', '--config=study.py', '--dry_run', '--config.tuning.seeds=(10,)'),
]


@pytest.mark.parametrize('command', REFUSED_COMMANDS, ids=lambda command: command[-1])
def test_a_refusal_is_quoted_as_it_is_printed(command, refusal):
    assert refusal(*command) in QUOTES


def message_parts() -> Iterator[str]:
    """Yields the parts of all texts in the code between the inserted values.

    For example, the f-string f'unknown {name}, known: {names}' has the parts 'unknown ' and
    ', known: '.
    """
    for folder in ('qkattn', 'experiments'):
        for path in (ROOT / folder).rglob('*.py'):
            syntax_tree = ast.parse(path.read_text())
            for node in ast.walk(syntax_tree):
                # A constant is a plain string, or a part of an f-string.
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    # Log messages insert values at %s.
                    yield from node.value.split('%s')

    # Templates of reports insert values at {{ }}, and have statements in {% %}.
    template_tag = r'{{.*?}}|{%.*?%}'
    for path in (ROOT / 'qkattn/report/templates').glob('*.j2'):
        yield from re.split(template_tag, path.read_text())

    # Shell scripts insert values at $variables. Quotes and continued lines also split a text.
    shell_variable_or_quote = r'\$\{?\w+\}?|[\'"]|\\\n'
    for path in (ROOT / 'launch').glob('*.sh'):
        yield from re.split(shell_variable_or_quote, path.read_text())


def test_every_quote_is_a_message_of_the_code():
    parts = {one_line(part) for part in message_parts()}
    long_parts = [part for part in parts if len(part) >= MIN_CONSTANT_LENGTH]

    assert len(QUOTES) >= 30
    for quote in QUOTES:
        if not quote.startswith(QUOTES_FROM_ELSEWHERE):
            assert any(part in quote for part in long_parts), quote
