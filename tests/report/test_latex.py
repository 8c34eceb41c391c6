"""table.tex compiles, with booktabs alone, and is no wider than the text."""

import re
import shutil
import string
import subprocess

import pytest

from qkattn.report.latex import em, latex, latex_table
from qkattn.verdict import find, load_study
from tests.report.conftest import HOSTILE, LONG, arms, assert_compiles, set_width, shifted
from tests.report.test_golden import STUDIES
from tests.studies import trial_record, tuned_arm, write_study, write_tuned

LOSSES_OF_8 = [2 + 0.01 * seed for seed in range(8)]


def table_of(directory):
    study = load_study(directory)
    return latex_table(study, find(study))


def large(directory):
    """Several sizes and corpora, two tuned settings, names that are as long as names are."""
    records = [
        record
        for corpus in ('stdlib', 'packages_of_python')
        for size, d in (('d_model=1024', 1024), ('small', 64))
        for record in arms(size, d_model=d, corpus=corpus)[:36]
        + tuned_arm(LONG + '&init_qk=0.5', size, shifted(0.006), corpus=corpus, d_model=d)
        + tuned_arm('M' * 60, size, shifted(0.1, 0.02), corpus=corpus, d_model=d)
    ]
    return write_tuned(directory, records, tuning__weight_decays=[0.1, 0.2])


def hostile(directory):
    records = tuned_arm('qk/vo', losses=LOSSES_OF_8)
    name = HOSTILE + 'é→' + chr(0x4E00)
    records += tuned_arm(name, losses=[x - 0.02 - 0.001 * i for i, x in enumerate(LOSSES_OF_8)])
    question = 'Are 100 % of the W_O needed? {no}'
    return write_tuned(directory, records, question=question)


TABLES = STUDIES | {'large': large, 'hostile': hostile}


@pytest.fixture(scope='module')
def tables(tmp_path_factory):
    directory = tmp_path_factory.mktemp('tables')
    return {name: table_of(make(directory / name)) for name, make in TABLES.items()}


@pytest.mark.parametrize('name', TABLES)
def test_the_structure_and_the_width_of_a_table(tables, name):
    assert_compiles(tables[name])
    # By heading the names of all arms, whatever the number of tables that they are spread over.
    names = {}
    for part in tables[name].split(r'\toprule')[1:]:
        heading, *groups = part.split(r'\end{tabular}')[0].split(r'\midrule')
        lines = re.findall(r'^([^&\n]*) &', ''.join(groups), re.MULTILINE)
        names.setdefault(heading, []).extend(filter(None, map(str.strip, lines)))
    assert len(names) >= 2 and len(set(map(tuple, names.values()))) == 1


def test_a_long_name_breaks_where_its_parts_end(study_dir):
    names = ['qk/vo', 'shared_qk(key_norm=True,self_mask=True)/vo', LONG]
    names.append('qk/vo?encoder_variant=query_free/vo')
    records = [trial_record(name, seed=seed) for name in names for seed in (0, 1)]
    table = table_of(write_study(study_dir, records)).split(r'\end{tabular}')[0]
    lines = [line.split(' & ')[0] for line in table.splitlines() if line.endswith(r'\\')]
    assert lines[lines.index('qk/vo') :] == [
        'qk/vo',
        r'shared\_qk(',
        r'\quad{}key\_norm=True,',
        r'\quad{}self\_mask=True)/vo',
        r'my\_package.my\_module:',
        r'\quad{}MyScore/my\_package.',
        r'\quad{}other:MyValue?',
        r'\quad{}num\_kv\_heads=1',
        r'qk/vo?encoder\_variant=',
        r'\quad{}query\_free/vo',
    ]


@pytest.mark.parametrize('points', ['10pt', '11pt', '12pt'])
def test_tables_compile_and_fit_the_text(tables, points, tmp_path):
    if not shutil.which('pdflatex'):
        pytest.skip('pdflatex is not installed')
    if not subprocess.run(['kpsewhich', 'booktabs.sty'], capture_output=True).stdout:
        pytest.skip('the LaTeX package booktabs is not installed')
    body = '\n\\clearpage\n'.join(tables.values())
    document = f'\\documentclass[{points}]{{article}}\n\\usepackage{{booktabs}}\n'
    document += f'\\begin{{document}}\n{body}\n\\end{{document}}\n'
    (tmp_path / 'tables.tex').write_text(document)
    command = ['pdflatex', '-interaction=nonstopmode', '-halt-on-error', 'tables.tex']
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    log = (tmp_path / 'tables.log').read_text(encoding='latin-1')
    assert done.returncode == 0, log[-2000:]
    assert re.findall(r'^(?:Overfull \\hbox|LaTeX Warning: Float too).*', log, re.MULTILINE) == []


def test_widths_of_characters_are_bounds():
    for character in string.ascii_letters + string.digits + ' +-=<>.,:;_()[]/?!@%&#':
        assert set_width(character) <= em(character) + 1e-3 < 1.3, character


def test_latex_of_hostile_names(tables):
    table = tables['hostile']
    minus = r'\ensuremath{-}'
    assert f'{minus}0.0235 [{minus}0.0255, {minus}0.0215]' in table
    assert r'better & \textless{} 0.001' in table
    caption = re.search(r'\\caption\{(.*)\}\n', table).group(1)
    assert caption.startswith(r'synthetic: Are 100 \% of the W\_O needed? \{no\} Difference:')
    assert r'Equal total parameters (820k, within 0.1 \%).' in caption
    assert 'Learning rate tuned per arm on other seeds; 8 seeds' in caption
    assert 'p corrected for 1 comparison; margin 0.005 nats/token.' in caption


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
