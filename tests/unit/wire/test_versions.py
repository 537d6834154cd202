"""Who may speak with whom, and what makes the older side newer."""

from __future__ import annotations

import itertools

import pytest

from kubetorch.errors import VersionMismatchError
from kubetorch.wire import versions


def check(theirs: int | None) -> None:
    versions.check(theirs, peer="the client", fix_peer="fix them", fix_self="fix us")


def test_the_same_version_is_understood() -> None:
    check(versions.PROTOCOL)


@pytest.mark.parametrize(
    ("theirs", "command"),
    [
        (None, "make the client newer: fix them"),
        (versions.PROTOCOL - 1, "make the client newer: fix them"),
        (versions.PROTOCOL + 1, "make this side newer: fix us"),
    ],
)
def test_the_older_side_is_told_what_makes_it_newer(theirs: int | None, command: str) -> None:
    with pytest.raises(VersionMismatchError) as caught:
        check(theirs)
    assert caught.value.hint == command


ORDER = ("0.6.0.dev2", "0.6.0a1", "0.6.0-rc.1", "0.6.0rc2", "0.6.0", "0.6.0.post1", "0.10", "1.0.0")


def test_packages_are_ordered_by_number_and_then_by_stage() -> None:
    for older, newer in itertools.combinations(ORDER, 2):
        assert versions.is_newer(newer, older)
        assert not versions.is_newer(older, newer)
    assert not versions.is_newer("0.6.0+dirty", "0.6.0")


@pytest.mark.parametrize("version", ["", "of no version", "dev", "0.6.0-fork"])
def test_what_is_no_version_is_newer_than_none(version: str) -> None:
    assert not versions.is_newer(version, "0.1.0")
    assert not versions.is_newer("0.1.0", version)
