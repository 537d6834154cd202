"""What `kt check` makes of the version of the controller."""

import pytest

from kubetorch._version import __version__
from kubetorch.cli import checking
from kubetorch.wire import versions


def judged(version, protocol=versions.PROTOCOL):
    return checking.judge_version(checking.Health(version, protocol))


def test_a_controller_of_this_version_is_well():
    assert judged(__version__).state == "ok"


def test_who_is_older_is_told_to_become_newer():
    older, newer = judged("0.1.0"), judged("999.0.0")
    assert (older.state, newer.state) == ("note", "note")
    assert older.hint.startswith("kt upgrade makes the controller newer")
    assert newer.hint.startswith("pip install kubetorch==999.0.0")


@pytest.mark.parametrize(
    ("protocol", "hint"),
    [(None, "kt upgrade"), (versions.PROTOCOL + 1, "pip install kubetorch==999.0.0")],
)
def test_who_cannot_be_understood_is_broken(protocol, hint):
    found = judged("999.0.0", protocol)
    assert found.state == "broken"
    assert hint in found.hint
