"""claims.json: read back as it was written, and an edited one is named."""

import dataclasses
import json
import re

import pytest

from qkattn.claims.decided import NAME, ClaimVerdict, Kind, Speaks, read_claims, write_claims
from qkattn.errors import ReportError, RunDirectoryError
from tests.claims.decided_claims import claims


def test_claims_are_read_as_they_were_written(tmp_path):
    written = claims()
    here = {ClaimVerdict.HOLDS_HERE, ClaimVerdict.FAILS_HERE}
    assert {claim.verdict for claim in written} == set(ClaimVerdict) - here
    assert [claim.name for claim in written if claim.is_theorem] == ['A1', 'C1']
    rows = [row for claim in written for row in claim.rows]
    assert {row.kind for row in rows} == set(Kind)
    assert {row.speaks for row in rows} == set(Speaks)
    assert read_claims(write_claims(tmp_path, written).parent) == written


def test_numbers_are_written_to_six_digits_and_whole_ones_as_they_are(tmp_path):
    (claim,) = (claim for claim in claims() if claim.name == 'A1')
    row = dataclasses.replace(claim.rows[0], value=1234567.0, low=0.01234567891, high=1234567.891)
    written = dataclasses.replace(claim, rows=(row, *claim.rows[1:]))
    (found,) = read_claims(write_claims(tmp_path, [written]).parent)
    assert (found.rows[0].value, found.rows[0].low) == (1234567.0, 0.0123457)
    assert (found.rows[0].high, found.rows[1:]) == (1234567.9, claim.rows[1:])


def test_a_missing_file_is_named_with_the_command_that_makes_it(tmp_path):
    told = f'{tmp_path}/claims.json does not exist; make it again with python -m experiments.claims'
    with pytest.raises(ReportError, match=f'^{re.escape(told)}'):
        read_claims(tmp_path)


@pytest.mark.parametrize(
    'number', ['"value": 16.0', '"low": ', '"seconds": 5025.0', '"decisive": 2']
)
def test_an_altered_number_is_found(tmp_path, number):
    path = write_claims(tmp_path, claims())
    text = path.read_text()
    assert number in text
    at = text.index(number) + len(number)
    path.write_text(text[:at] + '1' + text[at:])
    with pytest.raises(RunDirectoryError, match='is damaged .*; make it again with'):
        read_claims(tmp_path)


@pytest.mark.parametrize(
    'where, values, told',
    [
        ('rows', {'speaks': 'yes'}, "claim B2: row 0: 'yes' is not a valid Speaks"),
        ('rows', {'kind': 'both'}, "claim B2: row 0: 'both' is not a valid Kind"),
        ('rows', {'value': None}, "claim B2: row 0: field 'value' is None, expected float"),
        ('claim', {'verdict': 'true'}, "claim B2: 'true' is not a valid ClaimVerdict"),
        ('claim', {'decisive': 12}, 'claim B2: decisive is 12, but there are 12 rows'),
        ('claim', {'rule': 3}, "claim B2: field 'rule' is 3, expected str"),
    ],
)
def test_what_does_not_fit_is_named_by_claim_and_row(tmp_path, where, values, told):
    claim = dataclasses.asdict(claims()[1])
    (claim if where == 'claim' else claim['rows'][0]).update(values)
    (tmp_path / NAME).write_text(json.dumps([claim]))
    with pytest.raises(RunDirectoryError, match=re.escape(told)):
        read_claims(tmp_path)
