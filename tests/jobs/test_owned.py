"""What only process 0 has, and what it prepares for the others, without a job."""

import contextlib

import pytest

from qkattn.errors import InUseError
from qkattn.jobs import agreement
from qkattn.jobs.agreement import owned, owner_first


class Log:
    def __init__(self):
        self.lines = []

    def write(self, line):
        self.lines.append(line)


def test_process_0_has_what_was_made():
    log = owned(Log)
    log.write('a')
    assert log.lines == ['a'] and owner_first(lambda: 7) == 7
    with contextlib.closing(owned(lambda: contextlib.ExitStack())) as stack:
        assert isinstance(stack, contextlib.ExitStack)


def test_elsewhere_everything_does_nothing(monkeypatch):
    monkeypatch.setattr(agreement, 'on_owner', lambda call: None)  # as in the other processes
    made = []
    log = owned(lambda: made.append('never'))
    with log as entered, contextlib.closing(log.of_its_own), log.phase('preparing', quick=True):
        entered.metrics.append({'step': 1})
        entered.metrics.flush()
    assert made == []
    assert owner_first(lambda: made.append('here') or 7) == 7 and made == ['here']
    with pytest.raises(ValueError, match='stays'), log:
        raise ValueError('an error stays one')


def test_an_error_of_process_0_is_raised_elsewhere(monkeypatch):
    def refused(call):
        raise InUseError('in use')

    monkeypatch.setattr(agreement, 'on_owner', refused)
    for make in (owned, owner_first):
        with pytest.raises(InUseError, match='in use'):
            make(Log)
