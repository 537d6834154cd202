"""How much of the machine a process may use."""

from __future__ import annotations

import signal
from math import inf

import pytest

from kubetorch.lib import processes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max 100000\n", inf),
        ("150000 100000\n", 1.5),
        ("10000 100000\n", 0.1),
        ("-1\n 100000\n", inf),
        ("50000\n 100000\n", 0.5),
    ],
)
def test_a_quota_is_time_by_its_period(text: str, expected: float) -> None:
    assert processes.parse_quota(text) == expected


def test_at_least_one_processor_is_usable() -> None:
    assert processes.usable()
    assert processes.quota() > 0


def test_a_signal_without_a_name_is_its_number():
    assert processes.signal_name(signal.SIGKILL) == "SIGKILL"
    assert processes.signal_name(40) == "signal 40"
