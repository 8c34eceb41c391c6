"""The LaTeX table: escaped, balanced, and with the numbers of the findings."""

import re

import pytest

from qkattn.report import find, load_study
from qkattn.report.latex import escape, latex_table
from tests.studies import trial_record, tuned_arm, write_study, write_tuned

HOSTILE = r'a_b/v%o?x=1&y=$2#{~^\<--"|é→' + '\n' + chr(0x4E00)


def table_of(directory):
    study = load_study(directory)
    return latex_table(study, find(study))


def body(table):
    lines = table[table.index('\\midrule') : table.index('\\bottomrule')].splitlines()
    return [line.removesuffix(' \\\\').split(' & ') for line in lines if line.endswith('\\\\')]


def assert_compiles(table):
    """Braces balance, environments nest, nothing active is left bare, every line has its runs."""
    plain = re.sub(r'\\[{}%&#$_\\]', '', table)
    depth = 0
    for character in plain:
        depth += (character == '{') - (character == '}')
        assert depth >= 0
    assert depth == 0
    assert not re.search(r'[_#^~"|<>]', plain.replace('\\_', ''))
    assert plain.count('%') == 1 and plain.startswith('% needs')
    assert plain.count('$') == plain.count('$p$') * 2
    opened = re.findall(r'\\(begin|end)\{(\w+)\}', table)
    assert opened == [
        ('begin', 'table'),
        ('begin', 'tabular'),
        ('end', 'tabular'),
        ('end', 'table'),
    ]
    (places,) = re.findall(r'\\begin\{tabular\}\{([lr]+)\}', table)
    rows = [line for line in table.splitlines() if line.endswith(r'\\')]
    assert all(len(re.findall(r'(?<!\\)&', line)) == len(places) - 1 for line in rows)
    assert all(ord(c) <= 0x17F for c in table)


@pytest.fixture
def tuned(study_dir):
    losses = [2 + 0.01 * seed for seed in range(8)]
    records = tuned_arm('qk/vo', losses=losses)
    records += tuned_arm(HOSTILE, losses=[x - 0.02 - 0.001 * i for i, x in enumerate(losses)])
    return write_tuned(study_dir, records, question='Are 100 % of the W_O needed? {no}')


def test_table(tuned):
    table = table_of(tuned)
    assert_compiles(table)
    baseline, other = body(table)
    assert baseline[0] == 'qk/vo' and 'baseline' in baseline
    # Differences -0.020 to -0.027: mean -0.0235, sd 0.00245, half width 2.3646 * sd / sqrt(8).
    minus = r'\ensuremath{-}'
    assert f'{minus}0.0235 [{minus}0.0255, {minus}0.0215]' in other
    assert other[-3:] == [r'\textless{} 0.001', 'better', '0.004']


def test_caption_says_what_is_equal(tuned):
    caption = re.search(r'\\caption\{(.*)\}\n', table_of(tuned)).group(1)
    assert caption.startswith(r'synthetic: Are 100 \% of the W\_O needed? \{no\} Difference:')
    assert r'Equal total parameters (820k, within 0.1 \%).' in caption
    assert 'Learning rate tuned per arm on other seeds; 8 seeds' in caption
    assert 'p after Holm over 1 comparison; equivalence margin 0.005 nats/token.' in caption


def test_a_study_without_tuning_has_no_verdict_column(study_dir):
    records = [
        trial_record(variant, f's{d}', seed=seed, d_model=d, val_loss=2 + seed / 10)
        for d in (64, 128)
        for variant in ('qk/vo', 'b/vo')
        for seed in (0, 1)
    ]
    table = table_of(write_study(study_dir, records))
    assert_compiles(table)
    assert 'verdict &' not in table and 'no verdicts' in table
    assert table.count('\\midrule') == 2 and len(body(table)) == 4


@pytest.mark.parametrize(
    ('text', 'latex'),
    [
        ('a_b', r'a\_b'),
        ('50 %', r'50 \%'),
        ('-0.1 [-0.2, +0.3]', r'\ensuremath{-}0.1 [\ensuremath{-}0.2, +0.3]'),
        ('8-9 p-value', '8-9 p-value'),
        ('a--b', 'a-{}-b'),
        ('\\x{', r'\textbackslash{}x\{'),
        ('a\n b', 'a b'),
        ('1 ± 2', r'1 \ensuremath{\pm} 2'),
        (chr(0x4E00), '[U+4E00]'),
    ],
)
def test_escape(text, latex):
    assert escape(text) == latex
