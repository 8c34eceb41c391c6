"""Reports of three small studies and the sentence of every code, word for word.

Where a change of the report is meant, write the golden files again and read what has changed:

    python -m tests.report.test_golden
"""

import html
import math
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from qkattn.report import documents, headline
from qkattn.report.figures import figures
from qkattn.report.verify import difference, prints_of
from qkattn.verdict import Findings, Study
from tests.report.conftest import LONG, Page, arms, controlled, read, scaled, shifted
from tests.report.test_prose import clauses
from tests.studies import trial_record, tuned_arm, write_study, write_tuned

pytestmark = pytest.mark.stored
GOLDEN = Path(__file__).parent / 'golden'


def decided(directory: Path) -> Path:
    """One size, every decision, a probe, and what may be wrong with an arm."""
    records = [*arms(), *tuned_arm(LONG, losses=shifted(0.1))]
    for record in records:
        loss = record['val_loss']
        record |= {'val_induction_gain': 3 - loss, 'val_induction_accuracy': loss / 5}
    records += tuned_arm('edge/vo', losses=shifted(0.02), optimum=16e-3)
    records += tuned_arm('lost/vo', losses=[None, *shifted(0.0)[1:]])
    for place, record in enumerate(records):
        if record['stage'] == 'screening':
            # Without noise a sweep has intervals of rounding errors; the mean over seeds is kept.
            record['val_loss'] += 0.004 * math.sin(17 * (place // 2)) * (-1) ** place
    late = ('late/vo', 'd_model=128', 'screening', 'learning_rate')
    return write_tuned(directory, records, declared=[late], num_evals=4)


def described(directory: Path) -> Path:
    """Four sizes without tuning: differences and a scaling law, but no verdict."""
    records = [
        trial_record(r['variant'], r['size'], r['trial']['seed'], 4e-3, r['val_loss'], d_model=d)
        for r in scaled(1.2)
        if r['stage'] == 'verdict' and r['trial']['seed'] < 3
        for d in [r['config']['d_model']]
    ]
    return write_study(directory, records, num_evals=4)


STUDIES = {'decided': decided, 'described': described, 'controlled': controlled}
# Entries of a ledger are made while a test runs.
TIME = re.compile(r'\d{4}-\d\d-\d\d[ T][\d:]{8}')


def made(study: Study, findings: Findings) -> dict[str, str]:
    """The tables, and the text of the page with the headings and captions of its figures."""
    drawn = figures(study, findings)
    files = documents(study, findings, drawn, {drawing.stem: b'' for drawing in drawn})
    del files['trials.csv']  # a row for every trial, see test_tables.py
    document = files.pop('report.html')
    Page(document)
    text = re.sub(r'<style>.*?</style>|</?strong>', '', document, flags=re.DOTALL)
    text = re.sub(r'(<(?:h\d|p|li|tr|section|figcaption|dt)\b)', '\x1f\\1', ' '.join(text.split()))
    lines = [html.unescape(re.sub(r'<[^>]*>', ' ', line)) for line in text.split('\x1f')]
    page = [' '.join(words) for line in lines if (words := line.split())]
    files |= {'page.txt': '\n'.join(page) + '\n', 'headline.md': headline(study, findings)}
    return {name: TIME.sub('TIME', text) for name, text in files.items()}


@pytest.mark.parametrize('name', STUDIES)
def test_report(name, study_dir):
    pair = read(STUDIES[name](study_dir))
    files, agree = made(*pair), prints_of(lambda: [pair])
    golden = {path.name: path.read_text() for path in (GOLDEN / name).iterdir()}
    assert files.keys() == golden.keys()
    for file, text in files.items():
        assert difference(golden[file], text, agree) is None, f'{name}/{file}'


def test_every_code_is_a_clause_with_its_numbers():
    assert clauses() == (GOLDEN / 'clauses.txt').read_text()


if __name__ == '__main__':
    for name in STUDIES:
        shutil.rmtree(GOLDEN / name, ignore_errors=True)
        (GOLDEN / name).mkdir(parents=True)
        with tempfile.TemporaryDirectory() as directory:
            for file, text in made(*read(STUDIES[name](Path(directory) / 'study'))).items():
                (GOLDEN / name / file).write_text(text)
    (GOLDEN / 'clauses.txt').write_text(clauses())
