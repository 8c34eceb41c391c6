"""A number that the logs do not give is found, wherever it stands."""

import json
import math
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
    """A check does not look at pictures, so rendering is skipped."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(style, 'render', lambda figure, kind: b'<svg></svg>')
        yield


@pytest.fixture(scope='module')
def written(tmp_path_factory, figures_are_not_rendered):
    """The directory of a tuned study with a report, written once for all tests.

    The baseline is qk/vo. qk/no_o has higher losses, and qk/no_v has lower losses.
    """
    lowest_losses = {'qk/vo': 2.0, 'qk/no_o': 2.1, 'qk/no_v': 1.9}
    records = []
    for place, (variant, lowest_loss) in enumerate(lowest_losses.items()):
        # Losses differ between seeds. The differences from the baseline differ between seeds too.
        losses = [lowest_loss + 0.001 * seed + 0.003 * place * (seed % 3) for seed in range(8)]
        for trial in studies.tuned_arm(variant, losses=losses):
            # Each trial has a value of a metric from outside the package.
            with_metric = studies.outside_record('qk/vo', 1 / trial['val_loss']) | trial
            # Each trial also has a loss on a further corpus (collection of texts).
            further_loss = 1 + trial['val_loss']
            records.append(studies.on_corpus(with_metric, 'stdlib@test', further_loss))

    # A check requires that the name of each run is the hash of its config.
    records = studies.named_by_hash(records)
    directory = tmp_path_factory.mktemp('verify') / 'study'
    studies.write_tuned(directory, records)
    report.write_report(directory)
    return directory


@pytest.fixture
def study(written, tmp_path):
    """A copy of `written` that was exported and made a working directory again."""
    kept = report.export(written, tmp_path / 'kept')
    stored.unpack_in_place(kept)
    return kept


def changed_at(content, keys, change):
    """The content with `change` applied to content[keys[0]][keys[1]]..., or to all of it."""
    if not keys:
        return change(content)
    first, *rest = keys
    content[first] = changed_at(content[first], rest, change)
    return content


def path_of_file(study, name):
    """The path of a file. LOG and DOCUMENTS are files in the run of the last result."""
    last_result = studies.read_lines(study / 'results.jsonl')[-1]
    if name == 'LOG':
        return study / last_result['run'] / 'metrics.jsonl'
    if name == 'DOCUMENTS':
        return study / last_result['run'] / 'documents.json'
    return study / name


def change_file(study, name, keys, change):
    """Changes a file of a study, as somebody could do by hand.

    Args:
        study: Directory of the study.
        name: Name of the file, or LOG or DOCUMENTS.
        keys: Keys of the value to change. In a .jsonl file, (-1, 'test_loss') is `test_loss` in the
            last line. In a .csv file, the value is the whole text, and keys are ignored.
        change: Function of the old value that returns the new value. None removes the file.
    """
    path = path_of_file(study, name)
    if change is None:
        path.unlink()
    elif path.suffix == '.csv':
        path.write_text(change(path.read_text()))
    elif path.suffix == '.jsonl':
        lines = studies.read_lines(path)
        studies.write_lines(path, changed_at(lines, keys, change))
    else:
        content = json.loads(path.read_text())
        path.write_text(json.dumps(changed_at(content, keys, change)) + '\n')


def less(x):
    return x - 0.01


def lower_nats_of_documents(documents):
    """Lowers the losses of all test documents of the last trial by 0.01 nats a token."""
    test = documents['test']
    lowered = []
    for nats, num_tokens in zip(test['nats'][-1], test['tokens'], strict=True):
        lowered.append(nats - 0.01 * num_tokens)
    test['nats'][-1] = lowered
    return documents


def without_no_v(entries):
    return [entry for entry in entries if entry['variant'] != 'qk/no_v']


def without_residuals(lines):
    return [line | {'residual': 0.0} for line in lines]


def without_last(lines):
    return lines[:-1]


# Changes of files: (file, keys, function of the value). LOWER_TEST_LOSS changes every file with
# the loss.
LOWER_TEST_LOSS = [
    ('results.jsonl', (-1, 'test_loss'), less),
    ('LOG', (-1, 'test_loss', -1), less),
    ('DOCUMENTS', (), lower_nats_of_documents),
]
REMOVE_AN_ARM = [
    ('study.json', ('variants',), lambda variants: variants[:-1]),
    ('study.json', ('arms',), lambda arms: arms[:-1]),
    ('plan.jsonl', (), without_no_v),
    ('results.jsonl', (), without_no_v),
    ('yardsticks.json', ('runs',), without_no_v),
]
NO_RESIDUAL = [
    ('plan.jsonl', (), without_residuals),
    ('results.jsonl', (), without_residuals),
]

# Changes of files, and what the refusal says.
CHANGES = [
    ([('results.jsonl', (), without_last)], 'not the trials of its config in their order'),
    ([('results.jsonl', (-1, 'num_tokens'), lambda x: x // 2)], 'num_tokens 153600, which is 3072'),
    (NO_RESIDUAL, 'has residual 0.0, which is'),
    ([('results.jsonl', (-1, 'eval_tokens'), lambda x: x + 9)], 'ends with eval_tokens'),
    (LOWER_TEST_LOSS, 'results.jsonl and logs changed since the last look'),
    ([('LOG', (-1, 'test_loss', 0), lambda x: math.nextafter(x, 9))], 'ends with test_loss'),
    ([('LOG', (-2, 'val_top_3', 0), less)], 'ends with val_top_3 .*, its results with'),
    (
        [('LOG', (-2, 'loss[stdlib@test]', 0), less)],
        r'ends with loss\[stdlib@test\] .*, its results with',
    ),
    (
        [('LOG', (-1, 'loss[stdlib@test]', 0), less)],
        r'ends with loss\[stdlib@test\] .*, its results with',
    ),
    ([('LOG', (2, 'val_loss', 0), less)], 'logs changed since the last look'),
    ([('LOG', (-1, 'trials', 0, 'seed'), lambda x: 9)], 'ends with trials .*, its results with'),
    ([('LOG', (-1, 'step'), lambda x: 401)], 'does not end with the last evaluation and the final'),
    (
        [('plan.jsonl', (0, 'config', 'optimizer', 'warmup_steps'), less)],
        'not the hash of its config',
    ),
    ([('study.json', ('margin',), lambda x: 0.2)], 'study.json is not what the last declaration'),
    ([('study.json', ('base', 'train', 'num_steps'), less)], 'base_hash of study.json is not'),
    (REMOVE_AN_ARM, 'study.json is not what the last declaration'),
    ([('ledger.jsonl', (0, 'margin'), less)], r'ledger\.jsonl, line 1 was edited'),
    ([('ledger.jsonl', (), without_last)], 'changed since the last look'),
    ([('yardsticks.json', ('seconds',), less)], r'yardsticks\.json changed since the last look in'),
    ([('table.md', (), None)], r'table\.md does not exist; make it'),
    ([('table.csv', (), lambda text: text.replace('0.09', '0.08', 1))], 'table.csv does .*0.08'),
]


@pytest.mark.parametrize(('changes', 'message'), CHANGES, ids=[says for _, says in CHANGES])
def test_a_file_that_was_changed_by_hand_is_refused(study, changes, message):
    for file, keys, change in changes:
        change_file(study, file, keys, change)
    with pytest.raises(ReportError, match=message):
        check_study(study)


def test_results_that_were_changed_before_another_look_are_found(study):
    for file, keys, change in LOWER_TEST_LOSS:
        change_file(study, file, keys, change)
    report.write_report(study)
    with pytest.raises(ReportError, match=r'last look in .*; run \w+ is not what look 1 saw;'):
        check_study(study)


def test_a_stored_number_may_differ_by_rounding():
    assert near(3.14159, 3.1415951)
    assert not near(3.14159, 3.1416)


@pytest.mark.parametrize(
    ('printed', 'expected'),
    [
        ('p < 0.001, worse', 'p 0.001, worse'),
        ('+0.0000', '-0.0000'),
        ('1.5e-07', '1.6e-07'),
    ],
)
def test_printed_numbers_may_differ_by_rounding(printed, expected):
    assert difference(printed, expected) is None


@pytest.mark.parametrize(
    ('printed', 'expected'),
    [
        ('13 seeds', '14 seeds'),
        ('p < 0.001', 'p 0.003'),
        ('+0.082 better', '+0.083 worse'),
        ('a\nb', 'a'),
    ],
)
def test_counts_and_words_may_not_differ(printed, expected):
    assert difference(printed, expected) is not None


def test_a_difference_is_described_with_its_line():
    assert difference('0.082', '0.084') == "line 1: '0.082', expected '0.084'"


def test_a_first_report_on_verdict_results_is_a_look(written):
    # `written` has a report already. A second report adds no look.
    report.write_report(written)
    entries = ledger.read(written / 'ledger.jsonl').entries
    assert [entry['event'] for entry in entries] == ['declared', 'looked']


def test_a_report_on_screening_alone_is_no_look(tmp_path):
    num_screening_trials = len(studies.RATES) * len(studies.SCREENING_SEEDS)
    screening = studies.tuned_arm('qk/vo')[:num_screening_trials]
    study = studies.write_tuned(tmp_path / 'study', screening)
    report.write_report(study)
    assert ledger.read(study / 'ledger.jsonl').first_look is None


def test_a_report_is_made_again_from_an_export(written, tmp_path):
    """An export has the logs of a study in a zip file, and the tables of its report."""
    exported = report.export(written, tmp_path / 'kept')

    names = {path.name for path in exported.iterdir()}
    logs = {'study.json', 'ledger.jsonl', 'yardsticks.json', 'logs.zip'}
    assert names == logs | {'table.md', 'table.csv'}

    # `check_study` compares the tables with the logs, and returns how many numbers they have.
    num_numbers = check_study(written)
    assert check_study(exported) == num_numbers

    # The ledger records each look at new results. These results are not new.
    report.write_report(exported)
    for name in ('report.html', 'ledger.jsonl'):
        assert (exported / name).read_text() == (written / name).read_text()


def test_an_export_warns_of_paths_of_this_machine(tmp_path, caplog):
    """An exported study may be published, and a path such as /home/ann reveals a user's name."""
    # The 'a/b' in the question is no absolute path, so it causes no warning.
    study = studies.write_study(
        tmp_path / 'study',
        [studies.trial_record('qk/vo')],
        question='is a/b worse?',
        command='python -m experiments.ablate --workdir=/home/ann/a',
    )
    report.export(study, tmp_path / 'kept')

    # There is one warning. It names the field that has a path, `command`.
    assert len(caplog.records) == 1
    warning = caplog.records[0].message
    assert 'kept/study.json contains paths of this machine in command; they stay' in warning


def test_an_export_replaces_nothing_but_exports_of_its_study(written, tmp_path):
    """An export replaces nothing except an earlier export of the same study."""
    file = tmp_path / 'mine.txt'
    file.write_text('precious')
    other_study = studies.write_study(
        tmp_path / 'other', [studies.trial_record('qk/vo')], name='another'
    )
    # A copy of the directory in which the study was trained is no export.
    copy_of_study = shutil.copytree(written, tmp_path / 'run')

    # `tmp_path` is a directory with the file, the other study and the copy.
    for destination in (tmp_path, file, written, other_study, copy_of_study):
        with pytest.raises(ReportError, match='holds something other than an export of study'):
            report.export(written, destination)


def write_and_interrupt(path, content):
    write_atomic(path, content)
    raise KeyboardInterrupt


def test_an_export_may_be_made_again(written, tmp_path, monkeypatch):
    kept = tmp_path / 'kept'
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stored, 'write_atomic', write_and_interrupt)
        report.export(written, kept)

    # The first export follows an interrupted export. The second follows a finished one.
    assert report.export(written, kept) == kept
    assert report.export(written, kept) == kept


def test_a_headline_that_differs_from_its_study_is_refused(study, tmp_path):
    """A headline is the table of a study in a page, between two comments.

    `check_page` compares each headline with its study, or writes it. It returns how many there are.
    """
    # The first comment names the directory of the study, `kept`. The page lacks the table.
    page = tmp_path / 'README.md'
    page.write_text('before\n<!-- headline: kept -->\n<!-- end -->\nafter 1.5\n')
    # Line 3 should begin the table, but has the second comment, `<!-- end -->`.
    with pytest.raises(ReportError, match='README.md does not match its studies, line 3'):
        check_page(page)

    # With write=True, `check_page` writes the table.
    assert check_page(page, write=True) == 1
    assert check_page(page) == 1
    text = page.read_text()
    assert text.startswith('before\n<!-- headline: kept -->\n| variant')
    # The losses of qk/no_v are about 0.095 below the baseline's, so qk/no_v is better.
    assert '| qk/no_v | -0.09' in text
    assert '| better at this length |' in text
    # Text outside the comments stays.
    assert 'after 1.5' in text

    # A number in the table that was changed by hand is found.
    page.write_text(text.replace('-0.09', '-0.10', 1))
    with pytest.raises(ReportError, match='does not match its studies'):
        check_page(page)


@pytest.mark.parametrize('write', [False, True])
@pytest.mark.parametrize('rest', ['after', '<!-- headline: kept -->\n<!-- end -->\n'])
def test_a_headline_without_an_end_is_refused(study, tmp_path, rest, write):
    """A headline without its second comment would be prose, which `check_page` does not check."""
    page = tmp_path / 'README.md'
    text = f'<!-- headline: kept -->\n| qk/no_v | -0.5 |\n{rest}'
    page.write_text(text)
    with pytest.raises(ReportError, match=r'the block headline: kept has no <!-- end --> before'):
        check_page(page, write=write)
    assert page.read_text() == text


def test_an_export_to_a_bucket_writes_nothing_here(written, bucket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report.export(written, 'gs://runs/kept')
    report.export(written, 'gs://runs/kept')  # replaces the first

    names = bucket.names('runs')
    for name in ('kept/study.json', 'kept/logs.zip', 'kept/table.md'):
        assert name in names
    assert check_study('gs://runs/kept') == check_study(written)
    assert list(tmp_path.iterdir()) == []
