"""What is left of a study that several workers train."""

from qkattn.study.tally import Tally


def test_time_left_follows_from_the_work_done_since_the_first_report():
    tally = Tally()
    assert tally.text(0.0) == '' and tally.seconds_left(0.0) is None
    left = {'a': 100.0, 'b': 100.0, 'c': 200.0}
    tally.leased(0, 'a', 3, left)
    tally.leased(1, 'c', 3, left)
    assert tally.text(1.0) == '0 of 3 runs done'
    tally.stepped(0, 0.5, 10.0)  # resumed: what was done before tells nothing of the speed
    tally.stepped(1, 0.0, 10.0)
    assert tally.seconds_left(12.0) is None
    tally.stepped(0, 1.0, 15.0)
    tally.stepped(1, 0.25, 15.0)
    # 100 units in 5 s; left are b and three quarters of c.
    assert tally.seconds_left(15.0) == 250 * 5 / 100
    tally.leased(0, 'b', 3, {'b': 100.0, 'c': 200.0})
    assert tally.text(15.0) == '1 of 3 runs done, 00:12 left'
    tally.stepped(0, 0.0, 15.0)
    # A run that a worker has left, or lost, is counted as left again.
    tally.ended(1)
    assert tally.seconds_left(15.0) == 300 * 5 / 100


def test_a_plan_may_grow_and_ends_without_a_time():
    tally = Tally()
    tally.leased(0, 'a', 1, {'a': 1.0})
    tally.stepped(0, 0.0, 0.0)
    tally.stepped(0, 1.0, 1.0)
    assert tally.changed() and not tally.changed()
    tally.leased(0, 'b', 2, {'b': 3.0})
    assert tally.changed() and tally.text(1.0) == '1 of 2 runs done, 00:03 left'
    tally.leased(0, None, 2, {})
    assert tally.text(2.0) == '2 of 2 runs done'
