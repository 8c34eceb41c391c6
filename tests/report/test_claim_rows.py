"""Rows of a claim as they are shown."""

from qkattn.report.claim_results import Kind, Row, Speaks
from qkattn.report.claim_rows import compared


def test_rows_of_both_shapes_are_one_line_and_the_deciding_row_is_shown():
    def row(kind, speaks, value, word=None, **context):
        return Row('arm', kind, context, value, speaks, arm='qk/no_o', word=word)

    rows = [
        row(Kind.REMOVED, Speaks.FOR, 0.1, 'worse', shape='equal'),
        row(Kind.MATCHED, Speaks.BESIDE, 0.2, shape='equal'),
        row(Kind.REMOVED, Speaks.BESIDE, 0.3, shape='matched'),
        row(Kind.MATCHED, Speaks.OPEN, 0.4, 'undecided', shape='matched'),
    ]
    (one,) = compared(rows)
    assert {kind: of.value for kind, of in one.rows.items()} == {
        Kind.REMOVED: 0.1,
        Kind.MATCHED: 0.4,
    }
    assert (one.context, one.word) == ({}, 'worse / undecided')
