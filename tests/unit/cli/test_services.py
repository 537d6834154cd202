"""Calls that commands name by the first digits of their ids."""

import pytest

from kubetorch.cli.services import whole_call_id
from kubetorch.errors import SpecError
from kubetorch.wire.messages import CallView


def call(call_id, state="failed"):
    return CallView(
        id=call_id,
        namespace="default",
        workload="train",
        pod="train-0",
        callable="train",
        state=state,
        started=1.0,
    )


CALLS = [call(f"{number:02x}" * 16) for number in (0x3F, 0x8A)] + [call("3f3f3f" + "0" * 26)]


@pytest.mark.parametrize("beginning", ["8a8a8a", "8A8a8a8A", "8a" * 15])
def test_the_first_digits_of_an_id_stand_for_the_call_in_any_case(beginning):
    assert whole_call_id(beginning, CALLS) == "8a" * 16


def test_digits_that_no_id_begins_with_stand_for_nothing():
    assert whole_call_id("8a8a8b", CALLS) is None


def test_an_id_that_others_begin_with_stands_for_its_own_call():
    assert whole_call_id("3f3f3f3f", [*CALLS, call("3f3f3f3f")]) == "3f3f3f3f"


def test_digits_that_several_ids_begin_with_are_an_error_that_names_the_calls():
    with pytest.raises(SpecError, match="2 calls have an id that begins with 3f3f3f:") as caught:
        whole_call_id("3f3f3f", CALLS)
    for matching_call in (CALLS[0], CALLS[2]):
        assert f"  {matching_call.id}  train, failed" in caught.value.message.splitlines()
    assert "8a8a" not in caught.value.message
    assert caught.value.hint is not None
