"""Lines of logs over a connection that breaks."""

from kubetorch.sdk.service_logs import KnownLines
from kubetorch.wire.messages import DeployLog


def lines(*times, pod="p0", text="x"):
    return [DeployLog(text=f"{text}{time}", pod=pod, time=float(time)) for time in times]


def test_lines_that_come_again_after_a_break_are_known_once():
    known_lines = KnownLines(started=1000.0)
    assert all(known_lines.is_new(line) for line in lines(100, 101, 102))
    known_lines.begin_again()
    new = [known_lines.is_new(line) for line in lines(100, 101, 102, 103)]
    assert new == [False, False, False, True]


def test_lines_before_the_first_that_was_known_stay_hidden():
    known_lines = KnownLines(started=1000.0)
    known_lines.is_new(*lines(100))
    known_lines.begin_again()
    assert [known_lines.is_new(line) for line in lines(98, 99, 100, 101)] == [
        False,
        False,
        False,
        True,
    ]


def test_when_nothing_was_known_yet_only_lines_since_the_beginning_are_new():
    known_lines = KnownLines(started=1000.0)
    known_lines.begin_again()
    assert [known_lines.is_new(line) for line in lines(999, 1001)] == [False, True]


def test_lines_long_before_the_break_do_not_come_back():
    known_lines = KnownLines(started=1000.0)
    known_lines.is_new(*lines(100))
    known_lines.begin_again()
    assert [known_lines.is_new(line) for line in lines(10, 94, 100, 101)] == [
        False,
        False,
        False,
        True,
    ]


def test_equal_lines_are_told_apart_by_how_often_they_were_known():
    known_lines = KnownLines(started=1000.0)
    for line in lines(99, 100, 100):
        known_lines.is_new(line)
    known_lines.begin_again()
    assert [known_lines.is_new(line) for line in lines(100, 100, 100)] == [False, False, True]


def test_of_a_burst_at_the_same_time_what_was_left_out_stays_hidden():
    known_lines = KnownLines(started=1000.0)
    known_lines.is_new(*lines(100, text="last"))
    known_lines.begin_again()
    assert not known_lines.is_new(*lines(100, text="earlier"))


def test_pods_are_told_apart():
    known_lines = KnownLines(started=1000.0)
    known_lines.is_new(*lines(100, pod="p0"))
    known_lines.begin_again()
    assert known_lines.is_new(*lines(1001, pod="p1"))
    assert not known_lines.is_new(*lines(100, pod="p0"))


def test_it_holds_over_several_breaks():
    known_lines = KnownLines(started=99.5)
    for last in range(100, 110):
        known_lines.begin_again()
        new = [line.time for line in lines(*range(95, last + 1)) if known_lines.is_new(line)]
        assert new == [last]


def test_a_line_stamped_slightly_earlier_than_one_before_it_is_not_lost():
    known_lines = KnownLines(started=1000.0)
    for line in lines(99, 100.5):
        known_lines.is_new(line)
    known_lines.begin_again()
    assert known_lines.is_new(*lines(100.4))
