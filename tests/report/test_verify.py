"""A number that the logs do not give is found, wherever it stands, or listed as not covered."""

import functools
import json
import math
import operator
import re
import shutil

import pytest

from qkattn import report
from qkattn.errors import ReportError
from qkattn.report import export
from qkattn.report.verify import (
    NOT_COVERED,
    check_page,
    check_study,
    difference,
    near,
    prints_of,
)
from qkattn.storage import ledger
from qkattn.verdict import load_findings
from tests.studies import trial_record, tuned_arm, write_lines, write_study, write_tuned

pytestmark = pytest.mark.usefixtures('blank')


def edit(study, name, keys, change):
    """Replaces what `keys` lead to in a file; LOG and DOCUMENTS are those of the last result."""
    if name in ('LOG', 'DOCUMENTS'):
        last = json.loads((study / 'results.jsonl').read_text().splitlines()[-1])
        plan = map(json.loads, (study / 'plan.jsonl').read_text().splitlines())
        directories = {line['run']: line['directory'] for line in plan}
        file = 'metrics.jsonl' if name == 'LOG' else 'documents.json'
        name = f'{directories[last["run"]]}/{file}'
    path = study / name
    if change is None:
        path.unlink()
        return
    parse, write = {
        '.jsonl': (lambda text: list(map(json.loads, text.splitlines())), write_lines),
        '.json': (json.loads, lambda path, content: path.write_text(json.dumps(content))),
    }.get(path.suffix, (str, type(path).write_text))
    content = parse(path.read_text())
    if keys:
        holder = functools.reduce(operator.getitem, keys[:-1], content)
        holder[keys[-1]] = change(holder[keys[-1]])
    else:
        content = change(content)
    write(path, content)


def less(x):
    return x - 0.01


def nats(documents):
    """A hundredth of a nat a token less."""
    of = documents['test']
    of['nats'][-1] = [n - 0.01 * t for n, t in zip(of['nats'][-1], of['tokens'], strict=True)]
    return documents


BITS = 0.01 / 0.6931471805599453
EVERYWHERE = [  # lower a loss in all files that have it
    ('results.jsonl', (-1, 'test_loss'), less),
    ('results.jsonl', (-1, 'test_bits_per_byte'), lambda x: x - BITS),
    ('LOG', (-1, 'test_loss', -1), less),
    ('LOG', (-1, 'test_bits_per_byte', -1), lambda x: x - BITS),
    ('DOCUMENTS', (), nats),
]
PER_BYTE = [
    ('results.jsonl', (-1, 'val_bits_per_byte'), less),
    ('LOG', (-1, 'val_bits_per_byte', -1), less),
    ('LOG', (-2, 'val_bits_per_byte', -1), less),
]
WITHOUT_ITS_ARM = [
    ('study.json', ('variants',), lambda variants: variants[:-1]),
    ('study.json', ('arms',), lambda arms: arms[:-1]),
    *((file, (), lambda lines: [x for x in lines if x['variant'] != 'qk/no_v'])
      for file in ('plan.jsonl', 'results.jsonl')),
]  # fmt: skip
NO_RESIDUAL = [
    (file, (), lambda lines: [line | {'residual': 0.0} for line in lines])
    for file in ('plan.jsonl', 'results.jsonl')
]
OTHER_COUNTS = [
    (
        'results.jsonl',
        (),
        lambda lines: [x | {'parameters': x['parameters'] | {'norm': 9}} for x in lines],
    )
]
CHANGES = [
    ([('results.jsonl', (), lambda lines: lines[:-1])], 'not the trials of its config in their or'),
    ([('results.jsonl', (-1, 'val_loss'), less)], 'over its documents, its result has'),
    ([('results.jsonl', (-1, 'num_tokens'), lambda x: x // 2)], 'num_tokens 153600, which is 3072'),
    (NO_RESIDUAL, 'has residual 0.0, which is'),
    (OTHER_COUNTS, r'has parameters\.total \d+, which is \d+ by'),
    ([('results.jsonl', (-1, 'test_top_3'), less)], 'has test_top_3 .* in its log'),
    ([('results.jsonl', (-1, 'eval_tokens'), lambda x: x + 9)], 'has eval_tokens .* in its log'),
    (PER_BYTE, r'has val_bits_per_byte \S+, which is'),
    (EVERYWHERE, 'results.jsonl and logs changed since the last look'),
    ([('LOG', (-1, 'test_loss', 0), lambda x: math.nextafter(x, 9))], 'test_loss .* in its log'),
    ([('LOG', (-2, 'val_top_3', 0), less)], 'seed 0 of run .* has val_top_3 .* in its log'),
    ([('LOG', (2, 'val_loss', 0), less)], 'logs changed since the last look'),
    ([('LOG', (-1, 'trials', 0, 'seed'), lambda x: 9)], 'has other trials in the final record'),
    ([('LOG', (-1, 'step'), lambda x: 399)], 'has a final record of step 399'),
    ([('LOG', (), None)], 'metrics.jsonl is missing'),
    ([('DOCUMENTS', (), None)], 'has results, but documents.json is missing'),
    ([('plan.jsonl', (0, 'config', 'optimizer', 'warmup_steps'), less)], 'not the hash of its con'),
    ([('study.json', ('margin',), lambda x: 0.2)], 'study.json is not what the last declaration'),
    ([('study.json', ('base', 'train', 'num_steps'), less)], 'base_hash of study.json is not'),
    (WITHOUT_ITS_ARM, 'study.json is not what the last declaration'),
    ([('ledger.jsonl', (0, 'margin'), less)], r'ledger\.jsonl, line 1 was edited'),
    ([('ledger.jsonl', (), lambda lines: lines[:-1])], 'changed since the last look'),
    ([('yardsticks.json', ('seconds',), less)], r'yardsticks\.json changed since the last look in'),
    ([('yardsticks.json', (), None)], r'yardsticks\.json changed since the last look in'),
    ([('table.md', (), lambda text: text.replace('0.09', '0.12', 1))], 'table.md is not .*0.12'),
    ([('table.md', (), None)], r'table\.md does not exist; make it'),
    ([('table.csv', (), lambda text: text.replace('0.09', '0.08', 1))], 'table.csv is not .*0.08'),
    ([('table.csv', (), lambda text: text.replace('worse', 'better', 1))], 'better,.*exp.*worse,'),
    ([('table.csv', (), lambda text: text[: text.rindex('qk/no_v')])], r'table\.csv is not what'),
]  # fmt: skip


@pytest.mark.parametrize(('changes', 'message'), CHANGES, ids=lambda x: x if type(x) is str else '')
def test_what_was_changed_by_hand_is_found(study, changes, message):
    for change in changes:
        edit(study, *change)
    with pytest.raises(ReportError, match=message):
        check_study(study)


def test_results_that_were_changed_before_another_look_are_found(study):
    for change in EVERYWHERE:
        edit(study, *change)
    report.write_report(study)
    with pytest.raises(ReportError, match=r'last look in .*; run \w+ is not what look 1 saw;'):
        check_study(study)


def draw_another_picture(study):
    (study / 'plots').mkdir()
    (study / 'plots/verdicts.png').write_bytes(b'higher')


def make_training_faster(study):
    edit(study, 'results.jsonl', (-1, 'train_seconds'), less)
    report.write_report(study)


def write_everything_again(study):
    for change in WITHOUT_ITS_ARM:
        edit(study, *change)
    (study / 'ledger.jsonl').unlink()
    ledger.declare(study, json.loads((study / 'study.json').read_text()))
    report.write_report(study)


@pytest.mark.parametrize(
    ('change', 'named'),
    [
        (draw_another_picture, 'pictures'),
        (make_training_faster, 'times'),
        (write_everything_again, 'a study whose results, logs, report and ledger'),
    ],
)
def test_what_is_not_found_is_listed(study, change, named):
    change(study)
    assert check_study(study) > 50
    assert any(sentence.startswith(named) for sentence in NOT_COVERED)


@pytest.mark.parametrize('name', ['table.md', 'table.csv'])
def test_the_last_digit_printed_is_held(study, name):
    """No number of this study lies at a boundary."""
    assert check_study(study) > 2 * 3 * 12
    text = (study / name).read_text()
    number = max(re.findall(r'\b0\.09\d+', text), key=len)
    other = number[:-1] + str((int(number[-1]) + 2) % 10)
    (study / name).write_text(text.replace(number, other))
    with pytest.raises(ReportError, match=f'{name} is not what its logs give'):
        check_study(study)


def test_stored_numbers_may_differ_by_rounding_but_no_more():
    for stored, number, agree in (
        (3.14159, 3.1415951, True),
        (3.14159, 3.1416, False),
        (1234567.8, 1234567.84, True),
        (3.0, 3.0, True),
    ):
        assert near(stored, number) == agree


@pytest.fixture(scope='module')
def pair(written):
    return load_findings(written)


def test_prints_may_differ_where_a_number_lies_at_their_boundary(pair):
    mean, agree = abs(pair[1].arms[1].difference.mean), prints_of(lambda: [pair])

    def around(boundary):
        """Two prints, one unit of their last digit apart, of a number between them."""
        return f'{boundary - 5e-13:.12f}', f'{boundary + 5e-13:.12f}'

    assert agree(*around(mean)) and agree(*around(100 * mean)) and agree(*around(mean * (1 + 9e-7)))
    assert not agree(*around(mean * (1 + 2e-6)))
    assert agree('+0.0000', '-0.0000')
    for one, other in (('0.0082', '0.0084'), ('13', '14'), ('< 0.001', '0.002')):
        assert not agree(one, other)


def test_text_around_numbers_is_exact():
    for one, other, agree in (
        ('p < 0.001, worse', 'p 0.001, worse', True),
        ('+0.082 better', '+0.083 better', True),
        ('+0.082 better', '+0.083 worse', False),
        ('a\nb', 'a', False),
    ):
        assert (difference(one, other, lambda a, b: True) is None) == agree
    assert difference('0.082', '0.083') == "line 1: '0.082', expected '0.083'"


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


def test_an_export_does_not_overwrite_something_else(written, tmp_path):
    (tmp_path / 'mine.txt').write_text('precious')
    other = write_study(tmp_path / 'other', [trial_record('qk/vo')], name='another')
    for destination, message in (
        (tmp_path, 'holds something else than an export of study'),
        (tmp_path / 'mine.txt', 'is a file; give a directory'),
        (written, 'is the study itself'),
        (other, 'holds something else than an export of study'),
        (shutil.copytree(written, tmp_path / 'run'), 'holds something else than an export of'),
    ):
        with pytest.raises(ReportError, match=message):
            export(written, destination)
    assert export(written, export(written, tmp_path / 'twice')) == tmp_path / 'twice'
    log = next((tmp_path / 'run').glob('*/metrics.jsonl'))
    log.write_bytes(log.read_bytes() + b'\x80{"kind": "ev\n')
    with pytest.raises(ReportError, match=f'{log} cannot be stored: it is not JSON'):
        export(tmp_path / 'run', tmp_path / 'copy')


def test_a_headline_is_written_and_checked(study, tmp_path):
    page = tmp_path / 'README.md'
    page.write_text('before\n<!-- headline: kept -->\n<!-- end -->\nafter 1.5\n')
    with pytest.raises(ReportError, match='README.md is not what its studies give, line 3'):
        check_page(page)
    assert check_page(page, write=True) == check_page(page) == 1
    text = page.read_text()
    assert text.startswith('before\n<!-- headline: kept -->\n| variant') and 'after 1.5' in text
    assert '| qk/no_v | -0.09' in text and '| better |' in text
    page.write_text(text.replace('-0.09', '-0.10', 1))
    with pytest.raises(ReportError, match='not what its studies give'):
        check_page(page)
