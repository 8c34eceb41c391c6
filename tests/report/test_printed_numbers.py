"""Numbers in sentences: those of a log, those with a source elsewhere, and all others."""

import json

import pytest

from qkattn.errors import ReportError
from qkattn.report.printed_numbers import check_numbers, uncovered

ENTRIES = """
[[logged]]
page = "README.md"
log = "results/table.csv"
text = "no_o {log[qk/no_o][mean]:+.3f}, {log[qk/no_o][share]:.1%} of it"

[[logged]]
page = "config.py"
log = "results/result.json"
text = "loss {log[0][val_loss]:.2f} with {log[0][parameters][total]:,} parameters"

[[logged]]
page = "README.md"
log = "results/scores.jsonl"
text = "BLEU {log[1][bleu]:.1f}"

[[external]]
page = "README.md"
text = "1.88 nats"
source = "https://example.org"
"""
PAGE = """# Title 2.5
no_o -0.034,
12.5 % of it; BLEU 38.7; published: 1.88 nats, but also 1.88 here.
`code 1.5` [link](x1.5.md) arXiv 2510.23912 Python >= 3.11
<!-- headline: x -->
| 0.1234 |
<!-- end -->
```sh
command --rate=0.5
```
"""
CONFIG = '"""A config.\n\nExpected: loss 1.74 with 1,234\nparameters at rate 0.004.\n"""\nX = 0.7\n'
FILES = {
    'docs/numbers.toml': ENTRIES,
    'README.md': PAGE,
    'config.py': CONFIG,
    'results/table.csv': 'variant,mean,share\nqk/no_o,-0.0341,0.1249\n',
    'results/result.json': json.dumps([{'val_loss': 1.7369, 'parameters': {'total': 1234}}]),
    'results/scores.jsonl': '{"bleu": 30.0}\n{"bleu": 38.66}\n',
}


@pytest.fixture
def numbers(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / 'docs/numbers.toml'


def test_sentences_are_those_that_the_logs_give(numbers):
    assert check_numbers(numbers) == {'logged': 3, 'external': 1}


@pytest.mark.parametrize(
    ('name', 'old', 'new', 'message'),
    [
        ('README.md', '-0.034', '-0.035', "README.md does not contain 'no_o -0.034, 12.5 % of it'"),
        ('README.md', '38.7', '39.7', "README.md does not contain 'BLEU 38.7'.*scores.jsonl"),
        ('README.md', '1.88 nats', '1.9 nats', "does not contain '1.88 nats'.*example.org"),
        ('config.py', '1.74', '1.73', "config.py does not contain 'loss 1.74 with 1,234"),
        ('results/table.csv', '0.0341', '0.0361', "does not contain 'no_o -0.036"),
        ('results/table.csv', 'qk/no_o', 'qk/no_v', r'entry 1 cannot be made .*no_o'),
        ('results/result.json', '[', '', 'entry 2 cannot be made .*result.json'),
        ('docs/numbers.toml', '[val_loss]:.2f', '[val_loss]:.2q', 'entry 2 cannot be made'),
        ('docs/numbers.toml', 'source =', 'url =', r'\[\[external\]\] entry 1 has .*url'),
        ('docs/numbers.toml', '[[external]]', '[[other]]', r'\[\[other\]\] entry 1 has page'),
        ('docs/numbers.toml', '[[external]]', '[[', 'cannot be read'),
        ('config.py', '"""A', '"A', 'config.py.* cannot be read'),
    ],
)
def test_what_does_not_agree_or_cannot_be_read_is_named(numbers, name, old, new, message):
    path = numbers.parents[1] / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ReportError, match=message):
        check_numbers(numbers)


def test_numbers_without_a_source_are_listed(numbers):
    root = numbers.parents[1]
    pages = [root / 'README.md', root / 'config.py']
    expected = {'README.md': ['2.5', '1.88'], 'config.py': ['0.004']}
    assert uncovered(numbers, pages) == expected
