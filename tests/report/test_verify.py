"""A number that the logs do not give is found, wherever it stands."""

import json
import re
import shutil

import pytest

from qkattn import report
from qkattn.errors import ReportError
from qkattn.report.export import export
from qkattn.report.verify import check_page, check_study
from qkattn.run import ledger
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
        'trials.csv',
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


def edit(path, change):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    write_lines(path, lines)


def refused(study, message):
    with pytest.raises(ReportError, match=message):
        check_study(study)


def test_what_is_missing_or_unlike_its_log_is_found(study):
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
    log = (written / unfinished / 'metrics.jsonl').read_text()
    (kept / unfinished / 'metrics.jsonl').write_text(log)
    report.write_report(kept)
    again = export(kept, tmp_path / 'again')
    assert (again / unfinished / 'metrics.jsonl').read_text() == log
    assert check_study(again) > 100
