"""What is missing has a moment to come."""

from __future__ import annotations

import pytest

from kubetorch.controller.tuning import TIMING
from unit.controller.backends.kubernetes.launch_failures import recorded

MISSING = (
    "no-claim",
    "no-key",
    "no-secret-env",
    "no-secret-vol",
    "no-storage-class",
    "owner-job-no-account",
    "owner-no-priority",
)


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_is_no_doom_at_once(name: str) -> None:
    since = recorded.judge(name).since
    assert since is not None
    early = recorded.judge(name, now=since + 0.5)
    assert not early.is_doomed
    assert early.reason
    assert early.recheck_seconds == TIMING.missing_object_settle_seconds - 0.5
    assert recorded.judge(name, now=since + TIMING.missing_object_settle_seconds).is_doomed
