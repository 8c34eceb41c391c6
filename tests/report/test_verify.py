"""A number that the logs do not give is found, wherever it stands."""

import json
import math
import re
import shutil

import pytest

from qkattn import report
from qkattn.errors import ReportError
from qkattn.report.export import export
from qkattn.report.verify import boundaries, check_page, check_study, difference, same_print
from qkattn.storage import ledger
from qkattn.verdict import load_findings
from tests.studies import trial_record, tuned_arm, write_lines, write_study, write_tuned

pytestmark = pytest.mark.usefixtures('blank')


def test_a_report_is_what_its_logs_give(study):
    # Three arms with a dozen numbers each, in five files.
    assert check_study(study) > 5 * 3 * 12


def test_a_report_on_verdict_results_is_a_look(written, tmp_path):
    entries = ledger.read(written / 'ledger.jsonl').entries
    assert [entry['event'] for entry in entries] == ['declared', 'looked']
    report.write_report(written)
    assert ledger.read(written / 'ledger.jsonl').entries == entries
    screened = [r for r in tuned_arm('qk/vo', losses=[2.0]) if r['stage'] == 'screening']
    unseen = write_tuned(tmp_path / 'study', screened)
    report.write_report(unseen)
    assert ledger.read(unseen / 'ledger.jsonl').first_look is None


def test_what_is_exported_is_small_and_enough(written, study):
    names = {str(path.relative_to(study)) for path in study.rglob('*') if path.is_file()}
    logs = {name for name in names if name.endswith('metrics.jsonl')}
    documents = {name for name in names if name.endswith('documents.json')}
    assert len(logs) == len(documents) == 6 and not any(
        'result.json' in name.split('/') for name in names
    )
    assert {name for name in names - logs - documents if not name.startswith('plots/')} == {
        *('study.json', 'ledger.jsonl', 'plan.jsonl', 'results.jsonl', 'report.html'),
        *(f'table.{kind}' for kind in ('txt', 'md', 'csv', 'tex')),
        *('trials.csv', 'yardsticks.json'),
    }
    assert {path.suffix for path in (study / 'plots').iterdir()} == {
        '.json',
        '.pdf',
        '.png',
        '.svg',
    }
    kinds = {
        json.loads(line)['kind'] for log in logs for line in (study / log).read_text().splitlines()
    }
    assert kinds == {'eval', 'final'}
    before = (written / 'report.html').read_text()
    report.write_report(study)
    assert (study / 'report.html').read_text() == before


def test_damaged_lines_are_exported_as_they_are_and_named_by_a_check(written, tmp_path):
    source = shutil.copytree(written, tmp_path / 'source')
    log = next(source.glob('*/metrics.jsonl'))
    log.write_bytes(log.read_bytes() + b'\x80{"kind": "ev\n')
    copied = export(source, tmp_path / 'copy')
    assert (copied / log.relative_to(source)).read_bytes().endswith(b'\x80{"kind": "ev\n')
    with pytest.raises(ReportError, match=f'{log.relative_to(source)}:[0-9]+ was left out: it is'):
        check_study(copied)
    (written_page := tmp_path / 'source/report.html').write_bytes(b'\x80')
    log.write_bytes((written / log.relative_to(source)).read_bytes())
    with pytest.raises(ReportError, match=f'{written_page} is not what its logs give'):
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
    assert export(written, export(written, tmp_path / 'twice')) == tmp_path / 'twice'


def test_an_export_removes_what_an_earlier_one_left(written, study):
    stale = [study / 'runs/old/metrics.jsonl', study / 'runs/old/documents.json']
    stale.append(study / 'plots/old.png')
    other = [study / name for name in ('measures/b2.jsonl', 'plots/notes.txt', 'runs/mine.txt')]
    for path in (*stale, *other):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('old')
    kept = {path for path in study.rglob('*') if path.is_file()}
    export(written, study)
    assert {path for path in study.rglob('*') if path.is_file()} == kept - {*stale}
    assert not (study / 'runs/old').exists()


@pytest.mark.parametrize('name', ['table.txt', 'table.md', 'table.csv', 'table.tex', 'report.html'])
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


@pytest.mark.parametrize('name', ['table.txt', 'table.md', 'table.csv', 'table.tex', 'report.html'])
def test_the_last_digit_printed_is_held(study, name):
    """No number of this study lies at a boundary."""
    text = (study / name).read_text()
    (match,) = list(re.finditer(r'0\.09\d+', text))[:1]
    digit = text[match.end() - 1]
    other = str((int(digit) + (2 if name == 'table.csv' else 1)) % 10)
    (study / name).write_text(text[: match.end() - 1] + other + text[match.end() :])
    with pytest.raises(ReportError, match=f'{name} is not what its logs give'):
        check_study(study)


def test_the_fourth_digit_of_the_data_of_a_figure_is_held(study):
    path = study / 'plots/verdicts.json'
    text = path.read_text()
    number = next(of for of in re.findall(r'\d\.\d{5,}', text) if float(of))
    path.write_text(text.replace(number, f'{float(number) * 1.001:.6g}', 1))
    with pytest.raises(ReportError, match='verdicts.json is not what its logs give'):
        check_study(study)


def test_copies_of_logs_are_exact(study):
    path = study / 'trials.csv'
    text = path.read_text()
    number = max(re.findall(r'\d\.\d{9,}', text), key=len)
    path.write_text(text.replace(number, repr(float(number) * (1 + 1e-13)), 1))
    with pytest.raises(ReportError, match='trials.csv is not what its logs give'):
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

    (study / 'table.tex').unlink()
    refused(study, 'table.tex does not exist')
    edit(study / 'results.jsonl', better)
    refused(study, r'has a loss of 1\.9\d+ nats/token over its documents, its result has 1\.9\d+')
    edit(study / 'results.jsonl', worse)
    log = study / json.loads((study / 'plan.jsonl').read_text().splitlines()[0])['directory']
    log /= 'metrics.jsonl'
    edit(log, lambda lines: lines.pop())
    refused(study, 'has no final record at the end of its log')
    edit(log, lambda lines: lines.pop())
    refused(study, 'was not evaluated at its last step')
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


def test_the_log_of_an_unfinished_run_is_kept_whole(written, tmp_path):
    lines = (written / 'results.jsonl').read_text().splitlines(keepends=True)
    last = json.loads(lines[-1])['run']
    (unfinished,) = [
        json.loads(line)['directory']
        for line in (written / 'plan.jsonl').read_text().splitlines()
        if json.loads(line)['run'] == last
    ]
    kept = export(written, tmp_path / 'part')
    (kept / 'results.jsonl').write_text(''.join(x for x in lines if last not in x))
    edit(kept / 'ledger.jsonl', lambda entries: entries.pop())  # the look at all of them
    *log, _ = (written / unfinished / 'metrics.jsonl').read_text().splitlines(keepends=True)
    log = ''.join(log)
    (kept / unfinished / 'metrics.jsonl').write_text(log)
    report.write_report(kept)
    again = export(kept, tmp_path / 'again')
    assert (again / unfinished / 'metrics.jsonl').read_text() == log
    assert check_study(again) > 100


@pytest.mark.parametrize('lost', [False, True])
def test_yardsticks_are_those_of_the_last_look(lost, study):
    path = study / ledger.YARDSTICKS
    text = path.read_text().replace('9.0', '1.0')
    path.unlink() if lost else path.write_text(text)
    with pytest.raises(ReportError, match=r'yardsticks\.json changed since the last look in'):
        check_study(study)
