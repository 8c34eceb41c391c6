"""table.tex is the headline of a study for an article, with booktabs alone."""

import re

import pytest

from qkattn.report.tables import latex, latex_table
from qkattn.verdict import find, load_study
from tests.report.conftest import HOSTILE
from tests.studies import tuned_arm, write_tuned

LOSSES = [2 + 0.01 * seed for seed in range(8)]


def test_a_table_of_hostile_names(study_dir):
    records = tuned_arm('qk/vo', losses=LOSSES)
    name = HOSTILE + 'é→' + chr(0x4E00)
    records += tuned_arm(name, losses=[x - 0.02 - 0.001 * i for i, x in enumerate(LOSSES)])
    study = load_study(write_tuned(study_dir, records, question='Are 100 % of W_O needed? {no}'))
    table = latex_table(study, find(study))
    assert_compiles(table)
    minus = r'\ensuremath{-}'
    assert f'{minus}0.0235 [{minus}0.0255, {minus}0.0215]' in table and '& better' in table
    (caption,) = re.findall(r'\\caption\{(.*)\}\n', table)
    for part in (
        r'synthetic: Are 100 \% of W\_O needed? \{no\} Difference:',
        r'Equal total parameters (820k, within 0.1 \%).',
        'Learning rate tuned per arm on other seeds; 8 seeds',
        'p corrected for 1 comparison; margin 0.005 nats/token.',
    ):
        assert part in ' '.join(caption.split())


def assert_compiles(table):
    """Braces balance, environments nest, nothing active is bare, rows have as many cells."""
    plain = re.sub(r'\\[{}%&#$_\\]', '', table)
    assert plain.count('{') == plain.count('}') and not re.search(r'[_#^~"|<>$]', plain)
    opened = re.findall(r'\\(begin|end)\{(\w+)\}', table)
    assert opened == [
        *(('begin', 'table'), ('begin', 'tabular'), ('end', 'tabular'), ('end', 'table'))
    ]
    (places,) = re.findall(r'\{@\{\}([lr]+)@\{\}\}', table)
    rows = [line for line in table.splitlines() if line.endswith(r'\\')]
    assert len(rows) == 3
    assert {len(re.split(r'(?<!\\)&', row)) for row in rows} == {len(places)}


@pytest.mark.parametrize(
    ('text', 'escaped'),
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
def test_latex_escapes(text, escaped):
    assert latex(text) == escaped
