"""Messages of steps and shells, which run in a pod beside calls.

A step (`POST /v1/run`) is answered by events, one JSON object per line. A shell and its terminal
share a WebSocket:

    client   ShellOpen, then bytes for the standard input | ShellResize | ShellEnd
    agent    bytes of the output, each message with `OUTPUT` or `ERRORS` in front; last ShellExit

Bytes are binary messages, the rest is JSON text.
"""

from __future__ import annotations

import msgspec

from kubetorch.specs.data import DataMount
from kubetorch.specs.image import Step
from kubetorch.wire.messages import Message
from kubetorch.wire.tuning import TIMING


class RunStepNow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Body of a request to run a step in a running pod; the step is not part of the pod's image."""

    step: Step
    timeout: float = TIMING.image_step_seconds


class RunLine(Message, tag="line", frozen=True):
    text: str
    source: str = "stdout"


class RunEnd(Message, tag="exit", frozen=True):
    """Last event: the exit status of the step, as a shell counts."""

    exit_code: int


RunEvent = RunLine | RunEnd


class FetchData(msgspec.Struct, frozen=True, kw_only=True):
    """An agent has a program fetch what keys hold: the content of mount N goes to `<folder>/N`.

    The digest of a mount is that of what the pod shows already.

    Attributes:
        former: By path of a mount the file or folder that the pod shows there.
        node: The folder of the node for trees that pods share; empty without one.
        lease: The lease of the pod there.
        wait_seconds: For so long the program waits for another pod that fetches the same.
    """

    namespace: str
    folder: str
    mounts: tuple[DataMount, ...]
    former: dict[str, str] = {}
    node: str = ""
    lease: str = ""
    wait_seconds: float = 0.0


#: First byte of a message with standard output, and of a message with standard error.
OUTPUT, ERRORS = b"\x01", b"\x02"


class ShellMessage(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag_field="type"):
    """Base of the messages."""


class ShellOpen(ShellMessage, tag="open", frozen=True):
    """First message of the client.

    Attributes:
        command: The command line for a shell; `None` starts an interactive shell.
        terminal: Whether it gets a terminal; else its output and its errors are separate.
        kind: Kind of the terminal, as `TERM` has it.
    """

    command: str | None = None
    terminal: bool = False
    kind: str = "xterm"
    rows: int = 24
    columns: int = 80


class ShellResize(ShellMessage, tag="resize", frozen=True):
    """The terminal has a new size."""

    rows: int
    columns: int


class ShellEnd(ShellMessage, tag="end", frozen=True):
    """The standard input has ended."""


class ShellExit(ShellMessage, tag="exit", frozen=True):
    code: int


FromClient = ShellOpen | ShellResize | ShellEnd
