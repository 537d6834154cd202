"""Values that nothing shows by accident."""

from __future__ import annotations

import copy
import pickle

import pytest

from kubetorch.lib.secret_bytes import SecretBytes

HIDDEN = SecretBytes({"key": b"hush", "other": b"hush too"})


def test_a_value_is_there_for_who_asks_for_it() -> None:
    assert HIDDEN["key"] == b"hush"
    assert dict(HIDDEN) == {"key": b"hush", "other": b"hush too"}
    assert HIDDEN.size_bytes == 12


def test_nothing_shows_it() -> None:
    shown = f"{HIDDEN!r} {HIDDEN} {[HIDDEN]} {vars(type(HIDDEN)).get('_values')!r}"
    assert "hush" not in shown
    assert "key, other" in repr(HIDDEN)


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_is_not_sent_or_copied(send) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TypeError, match="not pickled"):
        send(HIDDEN)


def test_what_it_was_made_of_can_change() -> None:
    values = {"key": b"hush"}
    hidden = SecretBytes(values)
    values["key"] = b"other"
    assert hidden["key"] == b"hush"
