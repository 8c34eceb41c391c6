"""A number that the logs do not give is found, wherever it stands."""

import json
import math
import re
import shutil

import pytest

from qkattn import report
from qkattn.errors import ReportError
from qkattn.report import export
from qkattn.report.verify import boundaries, check_page, check_study, difference, same_print
from qkattn.storage import ledger
from qkattn.verdict import load_findings
from tests.studies import trial_record, tuned_arm, write_lines, write_study, write_tuned

pytestmark = pytest.mark.usefixtures('blank')


def test_a_report_is_what_its_logs_give(study):
    # Three arms with a dozen numbers each, in two files.
    assert check_study(study) > 2 * 3 * 12


def test_a_report_on_verdict_results_is_a_look(written, tmp_path):
    entries = ledger.read(written / 'ledger.jsonl').entries
    assert [entry['event'] for entry in entries] == ['declared', 'looked']
    report.write_report(written)
    assert ledger.read(written / 'ledger.jsonl').entries == entries
    screened = [r for r in tuned_arm('qk/vo', losses=[2.0]) if r['stage'] == 'screening']
    unseen = write_tuned(tmp_path / 'study', screened)
    report.write_report(unseen)
    assert ledger.read(unseen / 'ledger.jsonl').first_look is None


def test_an_export_has_a_few_files_of_which_the_report_is_made_again(written, tmp_path):
    kept = export(written, tmp_path / 'kept')
    assert {path.name for path in kept.iterdir()} == {
        *('study.json', 'ledger.jsonl', 'yardsticks.json', 'runs.jsonl', 'documents.npz'),
        *('table.md', 'table.csv'),
    }
    assert check_study(kept) == check_study(written)
    report.write_report(kept)
    for name in ('report.html', 'trials.csv', 'ledger.jsonl'):
        assert (kept / name).read_text() == (written / name).read_text()


def test_a_damaged_line_is_named_before_a_study_is_stored(written, tmp_path):
    source = shutil.copytree(written, tmp_path / 'source')
    log = next(source.glob('*/metrics.jsonl'))
    log.write_bytes(log.read_bytes() + b'\x80{"kind": "ev\n')
    with pytest.raises(ReportError, match=f'{log} cannot be stored: it is not JSON'):
        export(source, tmp_path / 'copy')
    with pytest.raises(ReportError, match=f'{log.relative_to(source)}:[0-9]+ was left out: it is'):
        check_study(source)


def test_an_export_does_not_overwrite_something_else(written, tmp_path):
    (tmp_path / 'mine.txt').write_text('precious')
    with pytest.raises(ReportError, match='holds something else than study'):
        export(written, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ['mine.txt']
    with pytest.raises(ReportError, match='is a file; give a directory'):
        export(written, tmp_path / 'mine.txt')
    with pytest.raises(ReportError, match='is the study itself'):
        export(written, written)
    other = write_study(tmp_path / 'other', [trial_record('qk/vo')], name='another')
    with pytest.raises(ReportError, match='holds something else than study'):
        export(written, other)
    with pytest.raises(ReportError, match='holds a study that was run there'):
        export(written, shutil.copytree(written, tmp_path / 'run'))
    assert export(written, export(written, tmp_path / 'twice')) == tmp_path / 'twice'


@pytest.mark.parametrize('name', ['table.md', 'table.csv'])
def test_one_digit_changed_by_hand_is_found(study, name):
    text = (study / name).read_text()
    # The mean difference of no_v, -0.094 or so, as far as each file prints it.
    at = text.index('0.09')
    (study / name).write_text(f'{text[:at]}0.08{text[at + 4 :]}')
    with pytest.raises(ReportError, match=f'{name} is not what its logs give, line .*0.08'):
        check_study(study)


def test_the_last_bits_of_unrounded_numbers_may_differ_but_no_more(study):
    text = (study / 'table.csv').read_text()
    number = max(re.findall(r'\d\.\d{9,}', text), key=len)
    for factor, is_found in ((1 + 1e-13, False), (1 + 1e-7, True)):
        other = repr(float(number) * factor)
        assert other != number
        (study / 'table.csv').write_text(text.replace(number, other))
        if is_found:
            with pytest.raises(ReportError, match='table.csv is not what its logs give'):
                check_study(study)
        else:
            assert check_study(study) > 100


EXACT = math.pi / 1000  # 0.0031415926..., which lies at no boundary


def at(*numbers):
    """Whether one of these is within 1e-6 of a boundary, as `boundaries` of findings."""
    return lambda boundary: any(abs(abs(boundary) / abs(of) - 1) <= 1e-6 for of in numbers)


@pytest.mark.parametrize(
    ('stored', 'made', 'number', 'agree'),
    [
        # Six digits: one unit of the last one.
        ('3.14159', '3.1416', EXACT, True),
        ('0.00314159', '0.00314161', EXACT, False),
        ('1.00001e-07', '9.99996e-08', EXACT, False),
        ('1.0', '0.999999', EXACT, True),
        ('-0.0119999', '-0.012', EXACT, True),
        ('0.0119999', '-0.0119999', EXACT, False),
        ('3.14159', '3.14259', EXACT, False),
        ('1234567.8', '1234567.9', EXACT, True),
        # Counts are exact.
        ('1234567', '1234568', EXACT, False),
        ('1234567.0', '1234568.0', EXACT, False),
        ('12', '13', EXACT, False),
        # Fewer digits: only where the number lies at the boundary.
        ('+0.082', '+0.083', 0.0825 + 1e-12, True),
        ('+0.082', '+0.083', 0.0826, False),
        ('+0.082', '+0.084', 0.083, False),
        ('0.0042', '0.0041999', 0.00419995, True),
        ('0.0042', '0.0041', EXACT, False),
        ('914', '915', 914.5, True),
        ('+0.0000', '-0.0000', EXACT, True),
        ('+0.0000', '-0.0001', -0.00005, True),
        ('< 0.001', '0.001', 0.001 - 1e-12, True),
        ('< 0.001', '0.001', 0.0012, False),
        ('< 0.001', '0.002', 0.001, False),
    ],
)
def test_prints_agree_that_rounding_on_two_machines_gives(stored, made, number, agree):
    assert same_print(stored, made, at(number)) == agree
    assert same_print(made, stored, at(number)) == agree


def test_text_around_numbers_is_exact_but_for_the_width_of_a_table():
    for one, other, agree in (
        ('p &lt; 0.001, worse', 'p 0.001, worse', True),
        (r'p \textless{} 0.001 & \ensuremath{-}0.082', 'p 0.001 & -0.083', True),
        ('a   9.9995  b\n---------', 'a  10.0000  b\n----------', False),
        ('a   +0.082  b\n------', 'a  +0.083  b\n-------', True),
        ('+0.082 better', '+0.083 worse', False),
        ('3 seeds', '4 seeds', False),
    ):
        assert (difference(one, other, at(0.0825, 0.001)) is None) == agree
    assert difference('0.082', '0.083') is not None


def test_a_number_at_the_boundary_is_one_of_the_findings(study):
    pair = load_findings(study)
    at_boundary = boundaries(lambda: [pair])
    mean = pair[1].arms[1].difference.mean
    assert at_boundary(mean) and at_boundary(-100 * mean) and at_boundary(mean * (1 + 9e-7))
    assert not at_boundary(mean * (1 + 2e-6))


@pytest.mark.parametrize('name', ['table.md', 'table.csv'])
def test_the_last_digit_printed_is_held(study, name):
    """No number of this study lies at a boundary."""
    text = (study / name).read_text()
    (match,) = list(re.finditer(r'0\.09\d+', text))[:1]
    digit = text[match.end() - 1]
    other = str((int(digit) + (2 if name == 'table.csv' else 1)) % 10)
    (study / name).write_text(text[: match.end() - 1] + other + text[match.end() :])
    with pytest.raises(ReportError, match=f'{name} is not what its logs give'):
        check_study(study)


def edit(path, change):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    write_lines(path, lines)


def refused(study, message):
    with pytest.raises(ReportError, match=message):
        check_study(study)


def test_what_is_missing_or_unlike_its_log_is_found(written, study):
    def better(lines):
        lines[-1]['val_loss'] -= 0.001

    def worse(lines):
        lines[-1]['val_loss'] += 0.001

    def slower(lines):
        lines[0]['config']['optimizer']['warmup_steps'] += 1

    (study / 'table.md').unlink()
    refused(study, 'table.md does not exist')
    edit(study / 'results.jsonl', better)
    refused(study, r'has a loss of 1\.9\d+ nats/token over its documents, its result has 1\.9\d+')
    edit(study / 'results.jsonl', worse)
    log = study / json.loads((study / 'plan.jsonl').read_text().splitlines()[0])['directory']
    log /= 'metrics.jsonl'
    edit(log, lambda lines: lines.pop())
    refused(study, 'does not end with the last evaluation and the final record')
    edit(log, lambda lines: lines.pop())
    refused(study, 'does not end with the last evaluation and the final record')
    log.unlink()
    refused(study, 'metrics.jsonl is missing')
    shutil.copy(written / log.relative_to(study), log)
    edit(study / 'plan.jsonl', slower)
    refused(study, 'is not the hash of its config')


def test_a_headline_is_written_and_checked(study, tmp_path):
    page = tmp_path / 'README.md'
    page.write_text('before\n<!-- headline: kept -->\n<!-- end -->\nafter 1.5\n')
    with pytest.raises(ReportError, match='README.md is not what its studies give, line 3'):
        check_page(page)
    assert check_page(page, write=True) == 1
    text = page.read_text()
    assert text.startswith('before\n<!-- headline: kept -->\n| variant') and 'after 1.5' in text
    assert '| qk/no_v | -0.09' in text and '| better |' in text
    assert check_page(page) == 1
    page.write_text(text.replace('-0.09', '-0.10', 1))
    with pytest.raises(ReportError, match='not what its studies give'):
        check_page(page)


@pytest.mark.parametrize('lost', [False, True])
def test_yardsticks_are_those_of_the_last_look(lost, study):
    path = study / ledger.YARDSTICKS
    text = path.read_text().replace('9.0', '1.0')
    path.unlink() if lost else path.write_text(text)
    with pytest.raises(ReportError, match=r'yardsticks\.json changed since the last look in'):
        check_study(study)
