"""What a broadcast comes to, given how the call ended on each pod."""

from __future__ import annotations

from kubetorch.errors import CallCancelledError
from kubetorch.sdk.calls.attempts import Done
from kubetorch.sdk.calls.broadcast import combine


class Slotted(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


def test_values_are_a_list_in_pod_order() -> None:
    assert combine([Done(1), Done(None), Done([2])]).value == [1, None, [2]]


def test_the_first_error_in_pod_order_is_raised_and_the_others_are_attached() -> None:
    first, second = ValueError("a"), KeyError("b")
    done = combine([Done(1), Done(None, first), Done(None, second)])
    assert done.error is first
    assert first.other_errors == (second,)  # type: ignore[attr-defined]
    assert first.__notes__ == [  # type: ignore[attr-defined]
        "raised in pod 1; the call went to 3 pods\nalso in pod 2: KeyError: 'b'"
    ]


def test_a_call_that_was_cancelled_because_of_another_one_is_no_error_of_its_own() -> None:
    first = ValueError("a")
    done = combine([Done(None, CallCancelledError("not wanted")), Done(None, first)])
    assert done.error is first
    assert first.other_errors == ()  # type: ignore[attr-defined]


def test_when_all_were_cancelled_that_is_the_error() -> None:
    first, second = CallCancelledError("a"), CallCancelledError("b")
    done = combine([Done(None, first), Done(None, second)])
    assert done.error is first
    assert first.other_errors == (second,)  # type: ignore[attr-defined]


def test_an_error_without_room_for_the_others_is_raised_as_it_is() -> None:
    error = Slotted()
    assert combine([Done(None, error), Done(None, ValueError())]).error is error
