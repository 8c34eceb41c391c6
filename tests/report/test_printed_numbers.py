"""Numbers in the prose of pages come from logs, from the code or from publications."""

import re

import pytest

from qkattn.errors import ReportError
from qkattn.report.printed_numbers import check_numbers, read_log, uncovered

FILES = {
    'docs/numbers.toml': """
complete = ["README.md"]

[[logged]]
page = "README.md"
log = "table.csv"
text = "no_o {log[qk/no_o][mean]:+.3f}, {log[qk/no_o][share]:.1%} of it"

[[logged]]
page = "config.py"
log = "scores.jsonl"
text = "BLEU {log[1][bleu]:.1f} of {log[1][pairs]:,} pairs in {count} lines"

[[logged]]
page = "README.md"
log = "code.py"
text = "the margin is {log[Study][margin]}"

[[decided]]
page = "README.md"
log = "table.csv"
text = "W_O is not needed"
holds = { "no_o {log[qk/no_o][verdict]}" = "no_o equivalent" }

[[external]]
page = "README.md"
text = "1.88 nats"
source = "https://example.org"

[[stated]]
page = "README.md"
text = "of 2 heads"
reason = "an example"
""",
    'README.md': """
<!-- answers: results -->
7
<!-- end -->
no_o -0.034,
12.5 % of it; published: 1.88 nats. W_O is not needed of 2 heads, and the margin is 0.01 in `x=3`.

## Next

W_K, B4 and GPT-2 (Shazeer 2019, arXiv 1911.02150)
""",
    'config.py': '"""A config.\n\nExpected: BLEU 38.7 of 1,234\npairs in 2 lines.\n"""\nX = 0.7\n',
    'code.py': 'class Study:\n    margin: float = setting(0.01, "a margin")\n',
    'table.csv': 'variant,mean,share,verdict\nqk/no_o,-0.0341,0.1249,equivalent\n',
    'scores.jsonl': '{"bleu": 30.0}\n{"bleu": 38.66, "pairs": 1234}\n',
}


@pytest.fixture
def numbers_toml(tmp_path):
    """The path of numbers.toml, in a directory of pages and logs that agree with the file."""
    (tmp_path / 'docs').mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path / 'docs/numbers.toml'


def test_entries_that_agree_are_counted(numbers_toml):
    assert check_numbers(numbers_toml) == {'logged': 3, 'decided': 1, 'external': 1, 'stated': 1}


@pytest.mark.parametrize(
    ('file', 'old', 'new', 'message'),
    [
        ('README.md', '-0.034', '-0.035', "README.md does not contain 'no_o -0.034, 12.5 % of it'"),
        ('README.md', '1.88 nats', '1.9 nats', "does not contain '1.88 nats'.*example.org"),
        # The text of an entry may not be a part of a longer number.
        ('README.md', '1.88 nats', '-1.88 nats', "does not contain '1.88 nats'.*example.org"),
        ('README.md', '1.88 nats', '11.88 nats', "does not contain '1.88 nats'.*example.org"),
        ('README.md', '0.01 in', '0.019 in', "does not contain 'the margin is 0.01'"),
        ('README.md', '\nW_K', '\n5 W_K', 'prints a number .* that no entry .* has: .*5 W_K'),
        ('README.md', 'W_O is', 'W_O and W_K is', "does not contain 'W_O is not needed'"),
        ('README.md', 'W_O is', 'W_K is. W_O is', 'a number or a result that no entry .*W_K is'),
        ('config.py', '38.7', '39.7', "config.py does not contain 'BLEU 38.7 of 1,234"),
        ('code.py', '0.01', '0.02', "does not contain 'the margin is 0.02'"),
        ('table.csv', 'qk/no_o', 'qk/no_v', r'entry 1 cannot be made .*no_o'),
        (
            'table.csv',
            'equivalent',
            'worse',
            r"entry 1 expects 'no_o equivalent', but table.csv gives 'no_o worse'$",
        ),
        ('scores.jsonl', '}', '', 'entry 2 cannot be made .*scores.jsonl'),
        ('docs/numbers.toml', ':.1f', ':.1q', 'entry 2 cannot be made'),
        ('docs/numbers.toml', 'source =', 'url =', r'\[\[external\]\] entry 1 has .*url'),
        ('docs/numbers.toml', '[[external]]', '[[other]]', r'\[\[other\]\] entry 1 has page'),
        ('docs/numbers.toml', '[[external]]', '[[', 'cannot be read'),
        ('docs/numbers.toml', '["README.md"]', '7', 'complete = 7 must be a list of pages'),
        ('config.py', '"""A', '"A', 'config.py.* cannot be read'),
    ],
)
def test_a_file_that_does_not_agree_is_named(numbers_toml, tmp_path, file, old, new, message):
    text = FILES[file]
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new, 1))

    with pytest.raises(ReportError, match=message):
        check_numbers(numbers_toml)


@pytest.mark.parametrize(
    'text',
    [
        'no number',
        'claims A1 and B2, W_2, A100, v0.1, GPT-2',
        '`--workers=4` and\n```sh\nrun 5\n```\n',
        '<!-- headline: DIR -->\n5 better\n<!-- end -->',
        '[a page](file_5.md#part-5)',
        'Wortsman et al. 2023; Shazeer 2019, arXiv 1911.02150',
        'covered: 3 of 4',
    ],
)
def test_a_number_that_is_no_result_needs_no_entry(text):
    passages = list(uncovered(text, texts=['covered: 3 of 4']))
    assert passages == []


@pytest.mark.parametrize('number', ['3', '-0.5', '+1,024', '1e-5', '95 %', '5-gram', 'factor-2'])
def test_each_other_number_needs_an_entry(number):
    passages = list(uncovered(f'It is {number} of them.', texts=['It is 4']))
    assert len(passages) == 1
    digits = number.removesuffix(' %')
    assert digits in passages[0]


def test_a_comment_without_an_end_hides_no_number():
    """A block is hidden from its first comment to `<!-- end -->`, as it is made from results."""
    block = '<!-- headline: DIR -->\n5 better\n<!-- end -->'
    page = f'<!-- example: file.py -->\nIt is 3 of them.\n{block}\nIt is over.'
    # The first comment begins no block. So the 3 needs an entry, and only the 5 is in a block.
    [passage] = uncovered(page, texts=[])
    assert 'It is 3 of' in passage


CODE = """
A = 0.05
B: int = 3
C = A * 2
D, E = 1, 2
class F:
    g: int = setting(4, "x")
"""


def test_constants_of_a_python_file_are_its_literals(tmp_path):
    (tmp_path / 'code.py').write_text(CODE)
    assert read_log(tmp_path / 'code.py') == {'A': 0.05, 'B': 3, 'F': {'g': 4}}


def test_a_log_that_is_not_utf8_is_named(numbers_toml, tmp_path):
    (tmp_path / 'scores.jsonl').write_bytes(b'\xff')
    with pytest.raises(ReportError, match=re.escape('cannot be made from scores.jsonl')):
        check_numbers(numbers_toml)
