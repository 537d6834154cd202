"""Steps in a running pod: `POST /v1/run`, answered by events, one JSON object per line."""

from __future__ import annotations

import msgspec

from kubetorch.specs.image import Step
from kubetorch.wire.messages import Message


class RunStepNow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Body of a request to run a step in a running pod, whose image does not change by it.

    Attributes:
        step: The step.
        timeout: Seconds after which it is ended.
    """

    step: Step
    timeout: float = 3600.0


class RunLine(Message, tag="line", frozen=True):
    """The step wrote a line."""

    text: str
    source: str = "stdout"


class RunEnd(Message, tag="exit", frozen=True):
    """Last event: what the step ended with, as a shell counts."""

    exit_code: int


RunEvent = RunLine | RunEnd
