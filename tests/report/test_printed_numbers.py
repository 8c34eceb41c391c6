"""Numbers in sentences: those of a log, those with a source elsewhere, and all others."""

import json

import pytest

from qkattn.errors import ReportError
from qkattn.report.printed_numbers import check_numbers, uncovered
from tests import damages

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


@pytest.fixture
def numbers(tmp_path):
    (tmp_path / 'docs').mkdir()
    (tmp_path / 'results').mkdir()
    (tmp_path / 'docs/numbers.toml').write_text(ENTRIES)
    (tmp_path / 'README.md').write_text(PAGE)
    (tmp_path / 'config.py').write_text(CONFIG)
    (tmp_path / 'results/table.csv').write_text('variant,mean,share\nqk/no_o,-0.0341,0.1249\n')
    result = [{'val_loss': 1.7369, 'parameters': {'total': 1234}}]
    (tmp_path / 'results/result.json').write_text(json.dumps(result))
    (tmp_path / 'results/scores.jsonl').write_text('{"bleu": 30.0}\n{"bleu": 38.66}\n')
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
        ('results/table.csv', '0.1249', 'x', 'entry 1 cannot be made from results/table.csv'),
        (
            'docs/numbers.toml',
            'log = "results/table.csv"',
            '',
            r'logged\]\] entry 1 has page, text',
        ),
        ('docs/numbers.toml', '[[external]]', '[[elsewhere]]', 'entries are .*logged'),
        ('docs/numbers.toml', '[[external]]', '[external', 'numbers.toml cannot be read'),
    ],
)
def test_another_number_is_found(numbers, name, old, new, message):
    path = numbers.parents[1] / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ReportError, match=message):
        check_numbers(numbers)


def test_a_log_that_is_damaged_or_gone_is_named(numbers):
    log = numbers.parents[1] / 'results/result.json'
    log.write_text(damages.NESTED)
    with pytest.raises(ReportError, match='cannot be made from results/result.json.*too deeply'):
        check_numbers(numbers)
    log.unlink()
    with pytest.raises(ReportError, match='cannot be made from results/result.json'):
        check_numbers(numbers)


def test_numbers_without_a_source_are_listed_by_page(numbers):
    root = numbers.parents[1]
    found = uncovered(numbers, [root / 'README.md', root / 'config.py'])
    assert found == {'README.md': ['2.5', '1.88'], 'config.py': ['0.004']}
