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
    path.write_text(''.join(f'{{"step":{s},  "loss": 1.0}}\n' for s in steps) + tail)


def steps_of(path) -> list[int]:
    return [record['step'] for record in read_metrics(path)]


def test_a_record_needs_an_integer_step_that_does_not_go_back(path):
    metrics = MetricsFile(path)
    metrics.append({'step': 3})
    for record in ({}, {'step': None}, {'step': 4.0}, {'step': True}, {'step': 2}):
        with pytest.raises(ValueError, match='step'):
            metrics.append(record)
    metrics.append({'step': 3, 'split': 'validation'})
    assert steps_of(path) == [3, 3]


@pytest.mark.parametrize('kept', [0, 30, 50])
def test_rewind_drops_what_follows_a_step(path, kept):
    write_steps(path, range(10, kept + 10, 10))
    expected = path.read_bytes()
    # Five steps, and a sixth of which the end is missing.
    write_steps(path, range(10, 60, 10), tail='{"step": 60, "lo')
    metrics = MetricsFile(path)
    assert metrics.last_step == 50
    metrics.rewind(kept)
    assert metrics.last_step == (kept or None)
    assert path.read_bytes() == expected
    metrics.append({'step': kept + 10})
    assert steps_of(path) == [*range(10, kept + 20, 10)]


def test_rewind_drops_the_final_record_and_if_asked_the_evaluation_of_its_step(path):
    write_steps(path, [10, 20])
    metrics = MetricsFile(path)
    metrics.append({'step': 20, 'kind': 'eval'})
    metrics.append({'step': 20, 'kind': 'final'})
    metrics.rewind(20)
    assert steps_of(path) == [10, 20, 20]
    metrics.rewind(20, evaluated=False)
    assert steps_of(path) == [10, 20]


@pytest.mark.parametrize('tail', ['{"step": 3}', '{"step": 3, "lo\n', '\0\0\0', '3\n'])
def test_a_torn_last_line_is_repaired_at_the_first_append(path, tail):
    write_steps(path, [1, 2], tail=tail)
    assert steps_of(path) == [1, 2], 'a reader of a live file leaves the torn line out'
    metrics = MetricsFile(path)
    assert path.read_text().endswith(tail), 'a file that may be no log stays until it is written'
    metrics.append({'step': 3})
    assert steps_of(path) == [1, 2, 3]


@pytest.mark.parametrize('damage', ['{"step": 3, "lo', '', '[3]', '{"loss": 1}', '{"step": 1}'])
def test_a_damaged_line_in_the_middle_is_refused(path, damage):
    write_steps(path, [1, 2], tail=damage + '\n{"step": 4}\n')
    before = path.read_bytes()
    for reader in (read_metrics, lambda path: MetricsFile(path).rewind(4)):
        with pytest.raises(RunDirectoryError, match=r'metrics\.jsonl, line 3 is damaged'):
            reader(path)
    assert path.read_bytes() == before


AFTER_CHECKPOINT = [
    ('{"step": 3, "lo\n', None),  # what a crash has left
    ('{"step": 3}\n{"step": 4, "lo', None),
    ('{"step": 1}\n', 'line 3 is damaged (step 1 comes after step 2)'),
    ('{"step": 3}\n\0\0\n{"step": 9}\n', 'line 4 is damaged (it is not JSON'),
    ('{"step": 3, "crc32": 1}\n{"step": 4}\n', 'line 3 is damaged (its checksum does not'),
]


@pytest.mark.parametrize(('tail', 'damage'), AFTER_CHECKPOINT)
def test_damage_behind_the_checkpoint_is_dropped(path, caplog, tail, damage):
    metrics = MetricsFile(path)
    for step in (1, 2):
        metrics.append({'step': step})
    # The checkpoint knows how much of the log was written; `tail` is behind that.
    kept = metrics.flush()
    before = path.read_bytes()
    path.write_bytes(before + tail.encode())
    MetricsFile(path).rewind(2, written=kept)
    assert path.read_bytes() == before
    if damage is None:
        assert not caplog.records
    else:
        (warning,) = caplog.messages
        assert warning.startswith(f'{path}, {damage}')
        assert '\n' not in warning
        assert warning.endswith('; the lines from 3 on are dropped, and training writes them again')


def test_damage_behind_the_start_is_dropped(path, caplog):
    write_steps(path, [1], tail='damaged\n{"step": 2}\n')
    MetricsFile(path).rewind(0)
    assert path.read_bytes() == b''
    assert [message.partition(' (')[0] for message in caplog.messages] == [
        f'{path}, line 2 is damaged'
    ]


def test_a_resume_parses_the_last_lines_of_a_log_alone(path, monkeypatch):
    write_steps(path, range(1000))
    kept = MetricsFile(path).flush()
    write_steps(path, range(1003))  # the three after the checkpoint are checked
    parse = Mock(wraps=metrics_log.parse_json)
    monkeypatch.setattr(metrics_log, 'parse_json', parse)
    metrics = MetricsFile(path)
    metrics.rewind(999, written=kept)
    metrics.append({'step': 1000})
    metrics.check()
    assert metrics.last_step == 1000
    assert parse.call_count < 10


@pytest.mark.parametrize('written_share', [0.0, 0.9])
def test_a_line_that_a_full_disk_cuts_is_removed(path, monkeypatch, written_share):
    write_steps(path, [1, 2])
    metrics = MetricsFile(path)
    before = path.read_bytes()
    file = metrics._file

    def write_a_share(data):
        return file.write(data[: int(written_share * len(data))])

    with monkeypatch.context() as patch, pytest.raises(DiskError, match='the disk is full'):
        patch.setattr(metrics, '_file', Mock(wraps=file, write=write_a_share))
        metrics.append({'step': 3, 'loss': 1.0})
    assert path.read_bytes() == before
    # With room again, the next line follows the whole ones.
    metrics.append({'step': 3})
    metrics.close()
    line = json.dumps(with_checksum({'step': 3}))
    assert path.read_bytes() == before + line.encode() + b'\n'


@pytest.mark.parametrize(
    ('damage', 'message'),
    [
        (lambda lines: [lines[0].replace(b'1.5', b'1.6'), *lines[1:]], 'line 1 is damaged .*check'),
        (lambda lines: [*lines[:4], *lines[5:]], '5 lines are not the 5 that the run has'),
        (lambda lines: lines[:4], '4 lines are not the 5'),
        (lambda lines: [*lines[:2], b'{"step": 3}\n', *lines[3:]], '5 lines are not'),
        (lambda lines: [b'\x80garbage'], '0 lines are not the 5'),
    ],
    ids=['digit', 'no eval', 'cut', 'other', 'no log'],
)
def test_a_log_that_lacks_lines_of_its_checkpoint_is_refused_unchanged(path, damage, message):
    with contextlib.closing(MetricsFile(path)) as metrics:
        for step in range(1, 7):
            metrics.append({'step': step, 'loss': 1.5})
            if step == 4:
                metrics.append({'step': 4, 'kind': 'eval'})
                kept = metrics.flush()
    # The log has six steps, of which the checkpoint of step 4 has kept five lines.
    lines = path.read_bytes().splitlines(keepends=True)
    before = b''.join(damage(lines))
    path.write_bytes(before)
    with pytest.raises(RunDirectoryError, match=rf'metrics\.jsonl[,:] .*{message}'):
        MetricsFile(path).rewind(4, written=kept)
    assert path.read_bytes() == before
    # The undamaged log is rewound to these five lines.
    path.write_bytes(b''.join(lines))
    metrics = MetricsFile(path)
    metrics.rewind(4, written=kept)
    assert path.read_bytes() == b''.join(lines[:5])
    assert metrics.flush() == kept


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda path: path.unlink(), r'metrics\.jsonl is damaged \(No such file'),
        (lambda path: path.write_text('other\n'), 'first 0 lines are not the 2'),
    ],
    ids=['removed', 'replaced'],
)
def test_a_log_that_is_changed_while_it_is_open_is_refused(path, change, message):
    metrics = MetricsFile(path)
    metrics.append({'step': 1, 'loss': 1.5})
    metrics.append({'step': 2})
    change(path)
    with pytest.raises(RunDirectoryError, match=message):
        metrics.check()


def test_metrics_reach_a_bucket_at_flush(bucket):
    path = make_directory('gs://runs/a') / 'metrics.jsonl'
    metrics = MetricsFile(path)
    metrics.append({'step': 1})
    assert read_metrics(path) == []
    metrics.flush()
    metrics.append({'step': 2})
    assert steps_of(path) == [1]
    metrics.close()

    # A log that is continued is rewound to step 1.
    with contextlib.closing(MetricsFile(path)) as again:
        assert again.last_step == 2
        again.rewind(1)
        again.append({'step': 2, 'again': True})
    assert read_metrics(path) == [{'step': 1}, {'step': 2, 'again': True}]
