"""Who may speak with whom, and what makes the older side newer."""

from __future__ import annotations

import pytest

from kubetorch.errors import VersionMismatchError
from kubetorch.wire import versions


def check(theirs: int | None) -> int:
    return versions.check(theirs, peer="the client", fix_peer="fix them", fix_self="fix us")


def test_neighbours_speak_with_each_other() -> None:
    assert check(versions.PROTOCOL) == versions.PROTOCOL
    assert check(versions.OLDEST) == versions.OLDEST


@pytest.mark.parametrize(
    ("theirs", "command"),
    [
        (None, "make the client newer: fix them"),
        (versions.OLDEST - 1, "make the client newer: fix them"),
        (versions.PROTOCOL + 1, "make this side newer: fix us"),
    ],
)
def test_the_older_side_is_told_what_makes_it_newer(theirs: int | None, command: str) -> None:
    with pytest.raises(VersionMismatchError) as caught:
        check(theirs)
    assert caught.value.hint == command
