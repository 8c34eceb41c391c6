"""The metrics log, through crashes, full disks, damage and rewinding."""

import contextlib
import json
from unittest.mock import Mock

import pytest

from qkattn.errors import DiskError, RunDirectoryError
from qkattn.storage import metrics_log
from qkattn.storage.files import make_directory
from qkattn.storage.metrics_log import MetricsFile, read_metrics
from qkattn.storage.records import with_checksum


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'metrics.jsonl'


def write_steps(path, steps, tail: str = '') -> None:
    """Writes a log without checksums: a line for each step, and `tail` after them."""
    lines = [f'{{"step":{step},  "loss": 1.0}}\n' for step in steps]
    path.write_text(''.join(lines) + tail)


def steps_of(path) -> list[int]:
    return [record['step'] for record in read_metrics(path)]


@pytest.mark.parametrize('record', [{}, {'step': None}, {'step': 4.0}, {'step': True}, {'step': 2}])
def test_a_record_needs_an_integer_step_that_does_not_go_back(path, record):
    metrics = MetricsFile(path)
    metrics.append({'step': 3})

    with pytest.raises(ValueError, match='step'):
        metrics.append(record)

    metrics.append({'step': 3, 'split': 'validation'})
    assert steps_of(path) == [3, 3]


@pytest.mark.parametrize(
    ('step', 'kept_steps', 'last_step'),
    [
        (0, [], None),
        (30, [10, 20, 30], 30),
        (50, [10, 20, 30, 40, 50], 50),
    ],
)
def test_rewind_drops_what_follows_a_step(path, step, kept_steps, last_step):
    """A run that resumes at a step writes the later steps again, so its log drops them.

    Step 0 is the start of the run, so no record is kept.
    """
    write_steps(path, kept_steps)
    expected_content = path.read_bytes()
    # A crash has cut the line of step 60, so this line does not count.
    write_steps(path, [10, 20, 30, 40, 50], tail='{"step": 60, "lo')
    metrics = MetricsFile(path)
    assert metrics.last_step == 50

    metrics.rewind(step)

    assert metrics.last_step == last_step
    assert path.read_bytes() == expected_content

    # The next record follows the steps that were kept.
    metrics.append({'step': step + 10})
    assert steps_of(path) == [*kept_steps, step + 10]


def test_rewind_drops_the_final_record_and_an_evaluation_if_asked(path):
    """A run that resumes at a step writes its final record again, so the old one is dropped.

    If its checkpoint was made before the evaluation of the step, the run evaluates again.
    """
    write_steps(path, [10, 20])
    metrics = MetricsFile(path)
    metrics.append({'step': 20, 'kind': 'eval'})
    metrics.append({'step': 20, 'kind': 'final'})

    # Step 20 keeps its training record and its evaluation.
    metrics.rewind(20)
    assert steps_of(path) == [10, 20, 20]

    # With evaluated=False, step 20 keeps only its training record.
    metrics.rewind(20, evaluated=False)
    assert steps_of(path) == [10, 20]


@pytest.mark.parametrize('tail', ['{"step": 3}', '{"step": 3, "lo\n', '\0\0\0', '3\n'])
def test_a_torn_last_line_is_repaired_at_the_first_append(path, tail):
    write_steps(path, [1, 2], tail=tail)
    assert steps_of(path) == [1, 2]  # a reader of a live file leaves the torn line out

    metrics = MetricsFile(path)
    assert path.read_text().endswith(tail)  # the file may be no log, so opening changes nothing

    metrics.append({'step': 3})
    assert steps_of(path) == [1, 2, 3]


@pytest.mark.parametrize(
    'damage',
    [
        pytest.param('{"step": 3, "lo', id='cut off'),
        pytest.param('', id='empty'),
        pytest.param('[3]', id='not an object'),
        pytest.param('{"loss": 1}', id='no step'),
        pytest.param('{"step": 1}', id='step goes back'),
    ],
)
def test_a_damaged_line_in_the_middle_is_refused(path, damage):
    """A crash can damage only the last line, so a damaged line before it is an error."""
    # Lines 1 and 2 are whole, line 3 is damaged, and line 4 is whole.
    write_steps(path, [1, 2], tail=f'{damage}\n{{"step": 4}}\n')
    before = path.read_bytes()

    message = r'metrics\.jsonl, line 3 is damaged'
    with pytest.raises(RunDirectoryError, match=message):
        read_metrics(path)
    with pytest.raises(RunDirectoryError, match=message):
        MetricsFile(path).rewind(4)

    assert path.read_bytes() == before


def write_checkpointed_log(path) -> dict:
    """Writes a log of steps 1 and 2, and returns what a checkpoint stores about the log."""
    metrics = MetricsFile(path)
    metrics.append({'step': 1})
    metrics.append({'step': 2})
    return metrics.flush()


def append_text(path, text: str) -> None:
    with path.open('a') as file:
        file.write(text)


@pytest.mark.parametrize('tail', ['{"step": 3, "lo\n', '{"step": 3}\n{"step": 4, "lo'])
def test_a_torn_line_after_the_checkpoint_is_dropped_silently(path, caplog, tail):
    written = write_checkpointed_log(path)
    before = path.read_bytes()
    append_text(path, tail)

    MetricsFile(path).rewind(2, written=written)

    assert path.read_bytes() == before
    assert not caplog.records


@pytest.mark.parametrize(
    ('tail', 'damage'),
    [
        pytest.param(
            '{"step": 1}\n',
            'line 3 is damaged (step 1 comes after step 2)',
            id='step goes back',
        ),
        pytest.param(
            '{"step": 3}\n\0\0\n{"step": 9}\n',
            'line 4 is damaged (it is not JSON',
            id='zeros',
        ),
        pytest.param(
            '{"step": 3, "crc32": 1}\n{"step": 4}\n',
            'line 3 is damaged (its checksum does not',
            id='wrong checksum',
        ),
    ],
)
def test_damage_after_the_checkpoint_is_dropped_with_a_warning(path, caplog, tail, damage):
    """A resumed run writes the lines after its checkpoint again, so damaged ones may be dropped."""
    # Lines 1 and 2 have the steps 1 and 2. `written` is what the checkpoint stores about them.
    written = write_checkpointed_log(path)
    before = path.read_bytes()
    append_text(path, tail)

    MetricsFile(path).rewind(2, written=written)

    # All lines after the checkpoint are dropped. The warning names the damaged line.
    assert path.read_bytes() == before
    assert len(caplog.messages) == 1
    warning = caplog.messages[0]
    assert '\n' not in warning
    assert warning.startswith(f'{path}, {damage}')
    assert warning.endswith('; the lines from 3 on are dropped, and training writes them again')


def test_damage_behind_the_start_is_dropped(path, caplog):
    write_steps(path, [1], tail='damaged\n{"step": 2}\n')

    MetricsFile(path).rewind(0)

    assert path.read_bytes() == b''
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f'{path}, line 2 is damaged (')


def test_a_resume_parses_only_the_last_lines_of_a_log(path, monkeypatch):
    """Lines before the checkpoint are not parsed: their checksum shows that they are unchanged."""
    # `written` is what a checkpoint at step 999 stores, with the checksum of the first 1000 lines.
    write_steps(path, range(1000))
    written = MetricsFile(path).flush()
    # Three lines follow the checkpoint.
    write_steps(path, range(1003))
    parse = Mock(wraps=metrics_log.parse_json)
    monkeypatch.setattr(metrics_log, 'parse_json', parse)

    metrics = MetricsFile(path)
    metrics.rewind(999, written=written)
    metrics.append({'step': 1000})
    metrics.check()

    assert metrics.last_step == 1000
    # Parsing all lines would take over 1000 calls.
    assert parse.call_count < 10


@pytest.mark.parametrize('written_share', [0.0, 0.9])
def test_a_line_that_a_full_disk_cuts_is_removed(path, monkeypatch, written_share):
    """A full disk stores only a part of the line of step 3, and this part is removed."""
    write_steps(path, [1, 2])
    metrics = MetricsFile(path)
    before = path.read_bytes()
    file = metrics._file

    def write_a_share(data):
        """Replaces `write` of the file: writes the first bytes, and returns their number."""
        num_written = int(written_share * len(data))
        return file.write(data[:num_written])

    full_file = Mock(wraps=file, write=write_a_share)
    with monkeypatch.context() as patch, pytest.raises(DiskError, match='the disk is full'):
        patch.setattr(metrics, '_file', full_file)
        metrics.append({'step': 3, 'loss': 1.0})
    assert path.read_bytes() == before

    # After the block, the disk has room again. The new line follows the lines of steps 1 and 2.
    metrics.append({'step': 3})
    metrics.close()
    line = json.dumps(with_checksum({'step': 3}))
    assert path.read_bytes() == before + line.encode() + b'\n'


def write_log_with_an_evaluation(path) -> dict:
    """Writes a log of seven lines: six steps, with an evaluation after step 4.

    Returns:
        What a checkpoint at step 4 stores about the log: the number of lines so far, which is 5,
        and their checksum.
    """
    with contextlib.closing(MetricsFile(path)) as metrics:
        for step in (1, 2, 3, 4):
            metrics.append({'step': step, 'loss': 1.5})
        metrics.append({'step': 4, 'kind': 'eval'})
        written = metrics.flush()
        for step in (5, 6):
            metrics.append({'step': step, 'loss': 1.5})
    return written


def edit_a_digit(lines):
    lines[0] = lines[0].replace(b'1.5', b'1.6')


def remove_the_evaluation(lines):
    del lines[4]


def remove_the_last_three_lines(lines):
    del lines[4:]


def replace_a_line(lines):
    lines[2] = b'{"step": 3}\n'


def replace_the_log(lines):
    lines[:] = [b'\x80garbage']


@pytest.mark.parametrize(
    ('damage', 'message'),
    [
        # Line 1 does not match the checksum that the line contains.
        (edit_a_digit, 'line 1 is damaged .*check'),
        # Line 5 is now the record of step 5 instead of the evaluation.
        (remove_the_evaluation, '5 lines are not the 5 that the run has'),
        (remove_the_last_three_lines, '4 lines are not the 5'),
        # The new line is valid, so only the checksum of all five lines shows the change.
        (replace_a_line, '5 lines are not'),
        # A last line that is no record counts as cut off, so no line is left.
        (replace_the_log, '0 lines are not the 5'),
    ],
)
def test_a_log_that_lacks_lines_of_its_checkpoint_is_refused(path, damage, message):
    """A run cannot resume if the lines that its log had at the checkpoint have changed.

    The message compares the number of valid lines with the number at the checkpoint.
    """
    # The log has 7 lines. `written` has the number and the checksum of the first 5.
    written = write_log_with_an_evaluation(path)
    lines = path.read_bytes().splitlines(keepends=True)
    damage(lines)
    damaged_content = b''.join(lines)
    path.write_bytes(damaged_content)

    with pytest.raises(RunDirectoryError, match=rf'metrics\.jsonl[,:] .*{message}'):
        MetricsFile(path).rewind(4, written=written)

    # Nothing is removed from the log.
    assert path.read_bytes() == damaged_content


def test_a_log_is_rewound_to_the_lines_of_its_checkpoint(path):
    written = write_log_with_an_evaluation(path)
    lines = path.read_bytes().splitlines(keepends=True)
    metrics = MetricsFile(path)

    metrics.rewind(4, written=written)

    assert path.read_bytes() == b''.join(lines[:5])
    assert metrics.flush() == written


def open_log_of_two_steps(path) -> MetricsFile:
    metrics = MetricsFile(path)
    metrics.append({'step': 1, 'loss': 1.5})
    metrics.append({'step': 2})
    return metrics


def test_a_log_that_is_removed_while_it_is_open_is_refused(path):
    metrics = open_log_of_two_steps(path)
    path.unlink()
    with pytest.raises(RunDirectoryError, match=r'metrics\.jsonl is damaged \(No such file'):
        metrics.check()


def test_a_log_that_is_replaced_while_it_is_open_is_refused(path):
    metrics = open_log_of_two_steps(path)
    path.write_text('other\n')
    with pytest.raises(RunDirectoryError, match='first 0 lines are not the 2'):
        metrics.check()


def test_metrics_reach_a_bucket_at_flush(bucket):
    path = make_directory('gs://runs/a') / 'metrics.jsonl'
    metrics = MetricsFile(path)

    metrics.append({'step': 1})
    assert read_metrics(path) == []

    metrics.flush()
    metrics.append({'step': 2})
    assert steps_of(path) == [1]


def test_a_log_in_a_bucket_is_continued(bucket):
    """A resumed run reads its log from a bucket, and replaces the steps that it repeats."""
    path = make_directory('gs://runs/a') / 'metrics.jsonl'
    metrics = MetricsFile(path)
    metrics.append({'step': 1})
    metrics.append({'step': 2})
    metrics.close()

    # The run resumes at step 1, and writes step 2 again.
    with contextlib.closing(MetricsFile(path)) as resumed_metrics:
        assert resumed_metrics.last_step == 2
        resumed_metrics.rewind(1)
        resumed_metrics.append({'step': 2, 'again': True})

    assert read_metrics(path) == [{'step': 1}, {'step': 2, 'again': True}]
