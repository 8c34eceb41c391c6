"""A number that the logs do not give is found, wherever it stands."""

import functools
import json
import math
import operator
import shutil

import pytest

from qkattn import report
from qkattn.errors import ReportError
from qkattn.report.figures import style
from qkattn.report.verify import check_page, check_study, difference, near
from qkattn.storage import ledger
from qkattn.storage.files import write_atomic
from qkattn.study import stored
from tests import studies


@pytest.fixture(scope='module', autouse=True)
def figures_are_not_rendered():
    """Pictures are no part of a check: they are not rendered."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(style, 'render', lambda figure, kind: b'<svg></svg>')
        yield


@pytest.fixture(scope='module')
def written(tmp_path_factory, figures_are_not_rendered):
    """A tuned study, its runs named by the hashes of their configs, with its report."""
    arms = {'qk/vo': 2.0, 'qk/no_o': 2.1, 'qk/no_v': 1.9}
    records = []
    for place, (variant, loss) in enumerate(arms.items()):
        losses = [loss + 0.001 * seed + 0.003 * place * (seed % 3) for seed in range(8)]
        for record in studies.tuned_arm(variant, losses=losses):
            record = studies.outside_record('qk/vo', 1 / record['val_loss']) | record
            records.append(studies.on_corpus(record, 'stdlib@test', 1 + record['val_loss']))
    directory = tmp_path_factory.mktemp('verify') / 'study'
    studies.write_tuned(directory, studies.named_by_hash(records))
    report.write_report(directory)
    return directory


@pytest.fixture
def study(written, tmp_path):
    """A copy of `written` that was exported and made a working directory again."""
    kept = report.export(written, tmp_path / 'kept')
    stored.unpack_in_place(kept)
    return kept


def change_file(study, name, keys, change):
    """Changes a file of a study at the end of `keys`, as in (-1, 'test_loss'), or removes it.

    LOG and DOCUMENTS are the files of the run of the last result.
    """
    if file := {'LOG': 'metrics.jsonl', 'DOCUMENTS': 'documents.json'}.get(name):
        name = f'{studies.read_lines(study / "results.jsonl")[-1]["run"]}/{file}'
    path = study / name
    if change is None:
        path.unlink()
    elif path.suffix == '.csv':
        path.write_text(change(path.read_text()))
    else:
        is_lines = path.suffix == '.jsonl'
        whole = [studies.read_lines(path) if is_lines else json.loads(path.read_text())]
        path_of_keys = [0, *keys]
        last = path_of_keys.pop()
        holder = functools.reduce(operator.getitem, path_of_keys, whole)
        holder[last] = change(holder[last])
        studies.write_lines(path, whole[0] if is_lines else whole)


def less(x):
    return x - 0.01


def lower_nats_of_documents(documents):
    """Lowers the losses of all test documents of the last trial by 0.01 nats a token."""
    test = documents['test']
    test['nats'][-1] = [n - 0.01 * t for n, t in zip(test['nats'][-1], test['tokens'], strict=True)]
    return documents


LOWER_TEST_LOSS = [  # lowers a loss in all files that have it
    ('results.jsonl', (-1, 'test_loss'), less),
    ('LOG', (-1, 'test_loss', -1), less),
    ('DOCUMENTS', (), lower_nats_of_documents),
]
REMOVE_AN_ARM = [
    ('study.json', ('variants',), lambda variants: variants[:-1]),
    ('study.json', ('arms',), lambda arms: arms[:-1]),
    *((file, (), lambda lines: [x for x in lines if x['variant'] != 'qk/no_v'])
      for file in ('plan.jsonl', 'results.jsonl')),
    ('yardsticks.json', ('runs',), lambda runs: [x for x in runs if x['variant'] != 'qk/no_v']),
]  # fmt: skip
NO_RESIDUAL = [
    (file, (), lambda lines: [line | {'residual': 0.0} for line in lines])
    for file in ('plan.jsonl', 'results.jsonl')
]

# Changes of files, each (file, keys, function of the value), and a part of the refusal.
CHANGES = [
    ([('results.jsonl', (), lambda lines: lines[:-1])], 'not the trials of its config in their or'),
    ([('results.jsonl', (-1, 'num_tokens'), lambda x: x // 2)], 'num_tokens 153600, which is 3072'),
    (NO_RESIDUAL, 'has residual 0.0, which is'),
    ([('results.jsonl', (-1, 'eval_tokens'), lambda x: x + 9)], 'ends with eval_tokens'),
    (LOWER_TEST_LOSS, 'results.jsonl and logs changed since the last look'),
    ([('LOG', (-1, 'test_loss', 0), lambda x: math.nextafter(x, 9))], 'ends with test_loss'),
    ([('LOG', (-2, 'val_top_3', 0), less)], 'ends with val_top_3 .*, its results with'),
    ([('LOG', (-2, 'loss[stdlib@test]', 0), less)], r'ends with loss\[stdlib@test\] .*, its res'),
    ([('LOG', (-1, 'loss[stdlib@test]', 0), less)], r'ends with loss\[stdlib@test\] .*, its res'),
    ([('LOG', (2, 'val_loss', 0), less)], 'logs changed since the last look'),
    ([('LOG', (-1, 'trials', 0, 'seed'), lambda x: 9)], 'ends with trials .* its results with'),
    ([('LOG', (-1, 'step'), lambda x: 401)], 'does not end with the last evaluation and the fin'),
    ([('plan.jsonl', (0, 'config', 'optimizer', 'warmup_steps'), less)], 'not the hash of its con'),
    ([('study.json', ('margin',), lambda x: 0.2)], 'study.json is not what the last declaration'),
    ([('study.json', ('base', 'train', 'num_steps'), less)], 'base_hash of study.json is not'),
    (REMOVE_AN_ARM, 'study.json is not what the last declaration'),
    ([('ledger.jsonl', (0, 'margin'), less)], r'ledger\.jsonl, line 1 was edited'),
    ([('ledger.jsonl', (), lambda lines: lines[:-1])], 'changed since the last look'),
    ([('yardsticks.json', ('seconds',), less)], r'yardsticks\.json changed since the last look in'),
    ([('table.md', (), None)], r'table\.md does not exist; make it'),
    ([('table.csv', (), lambda text: text.replace('0.09', '0.08', 1))], 'table.csv does .*0.08'),
]  # fmt: skip


@pytest.mark.parametrize(('changes', 'message'), CHANGES, ids=lambda x: x if type(x) is str else '')
def test_a_file_that_was_changed_by_hand_is_refused(study, changes, message):
    for change in changes:
        change_file(study, *change)
    with pytest.raises(ReportError, match=message):
        check_study(study)


def test_results_that_were_changed_before_another_look_are_found(study):
    for change in LOWER_TEST_LOSS:
        change_file(study, *change)
    report.write_report(study)
    with pytest.raises(ReportError, match=r'last look in .*; run \w+ is not what look 1 saw;'):
        check_study(study)


def test_numbers_may_differ_by_rounding_but_text_may_not():
    for kept, number, agree in ((3.14159, 3.1415951, True), (3.14159, 3.1416, False)):
        assert near(kept, number) == agree

    # Two texts, and whether they agree.
    for one, other, expected in (
        ('p < 0.001, worse', 'p 0.001, worse', True),
        ('+0.0000', '-0.0000', True),
        ('1.5e-07', '1.6e-07', True),
        ('13 seeds', '14 seeds', False),
        ('p < 0.001', 'p 0.003', False),
        ('+0.082 better', '+0.083 worse', False),
        ('a\nb', 'a', False),
    ):
        assert (difference(one, other) is None) == expected
    assert difference('0.082', '0.084') == "line 1: '0.082', expected '0.084'"


def test_a_report_on_verdict_results_is_a_look(written, tmp_path):
    report.write_report(written)  # once more
    entries = ledger.read(written / 'ledger.jsonl').entries
    assert [entry['event'] for entry in entries] == ['declared', 'looked']
    unseen = studies.write_tuned(tmp_path / 'study', studies.tuned_arm('qk/vo')[:10])
    report.write_report(unseen)
    assert ledger.read(unseen / 'ledger.jsonl').first_look is None


def test_an_export_has_a_few_files_of_which_the_report_is_made_again(written, tmp_path):
    kept = report.export(written, tmp_path / 'kept')
    names = 'study.json ledger.jsonl yardsticks.json logs.zip table.md table.csv'
    assert {path.name for path in kept.iterdir()} == {*names.split()}
    assert check_study(kept) == check_study(written)
    report.write_report(kept)
    for name in ('report.html', 'ledger.jsonl'):
        assert (kept / name).read_text() == (written / name).read_text()


def test_an_export_warns_of_settings_that_name_a_directory_of_the_machine(tmp_path, caplog):
    study = studies.write_study(
        tmp_path / 'study',
        [studies.trial_record('qk/vo')],
        question='is a/b worse?',
        command='python -m experiments.ablate --workdir=/home/ann/a',
    )
    report.export(study, tmp_path / 'kept')
    (record,) = caplog.records
    assert 'kept/study.json contains paths of this machine in command; they stay' in record.message


def write_and_interrupt(path, content):
    write_atomic(path, content)
    raise KeyboardInterrupt


def test_an_export_replaces_an_export_of_its_study_and_nothing_else(written, tmp_path, monkeypatch):
    (tmp_path / 'mine.txt').write_text('precious')
    other = studies.write_study(tmp_path / 'other', [studies.trial_record('qk/vo')], name='another')
    copy = shutil.copytree(written, tmp_path / 'run')
    for destination in (tmp_path, tmp_path / 'mine.txt', written, other, copy):
        with pytest.raises(ReportError, match='holds something other than an export of study'):
            report.export(written, destination)

    # An export that was interrupted may be made again, and so may a finished one.
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stored, 'write_atomic', write_and_interrupt)
        report.export(written, tmp_path / 'twice')
    for _ in range(2):
        assert report.export(written, tmp_path / 'twice') == tmp_path / 'twice'


def test_a_headline_that_differs_from_its_study_is_refused(study, tmp_path):
    page = tmp_path / 'README.md'
    page.write_text('before\n<!-- headline: kept -->\n<!-- end -->\nafter 1.5\n')
    with pytest.raises(ReportError, match='README.md does not match its studies, line 3'):
        check_page(page)

    # Written again, the page has the table of the study.
    assert check_page(page, write=True) == check_page(page) == 1
    text = page.read_text()
    assert text.startswith('before\n<!-- headline: kept -->\n| variant')
    assert 'after 1.5' in text
    assert '| qk/no_v | -0.09' in text
    assert '| better at this length |' in text

    # A number of the table is changed by hand.
    page.write_text(text.replace('-0.09', '-0.10', 1))
    with pytest.raises(ReportError, match='does not match its studies'):
        check_page(page)


def test_an_export_to_a_bucket_writes_nothing_here(written, bucket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        report.export(written, 'gs://runs/kept')
    assert {'kept/study.json', 'kept/logs.zip', 'kept/table.md'} <= set(bucket.names('runs'))
    assert check_study('gs://runs/kept') == check_study(written)
    assert not [*tmp_path.iterdir()]
