"""What `kt.LoggingConfig` may say."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kubetorch.errors import SpecError
from kubetorch.specs.logging import LoggingConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream_logs", "x"),
        ("stream_logs", 1),
        ("level", "loud"),
        ("level", None),
        ("include_system_logs", None),
        ("include_events", "false"),
        ("include_name", "no"),
        ("grace_period", -1),
        ("poll_timeout", "1"),
        ("grace_poll_timeout", math.nan),
        ("shutdown_grace_period", math.inf),
        ("shutdown_grace_period", True),
    ],
)
def test_an_impossible_value_is_refused_by_name(name: str, value: object) -> None:
    parameters: dict[str, Any] = {name: value}
    with pytest.raises(SpecError, match=f"^{name} is "):
        LoggingConfig(**parameters)


def test_streaming_may_be_left_to_the_settings() -> None:
    assert LoggingConfig(stream_logs=None, include_name=False, grace_period=0).grace_period == 0
