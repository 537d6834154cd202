"""`kt.DebugConfig` and `kt.deep_breakpoint`: the debugger of code in pods.

`kubetorch.sdk.debugger.terminal` is the terminal's end.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

from kubetorch.errors import SpecError, did_you_mean
from kubetorch.wire import debugger


def default_mode() -> str:
    """The mode of debuggers that name none: that of the environment, or `pdb`."""
    return os.environ.get(debugger.MODE) or "pdb"


@dataclass(frozen=True)
class DebugConfig:
    """Settings of the debugger of a call: `f(x, debug=kt.DebugConfig(...))`.

    Attributes:
        mode: In the terminal (`"pdb"`), in a browser (`"pdb-ui"`), or in VS Code and other clients
            of the debug adapter protocol (`"dap"`); `KT_DEBUG_MODE` sets the default.
        port: A number that tells one stop of a pod from another in `kt debug`; nothing listens
            there.
    """

    mode: Literal["pdb", "pdb-ui", "dap"] = field(default_factory=default_mode)  # type: ignore[arg-type]  # it is checked
    port: int = debugger.PORT

    def __post_init__(self) -> None:
        if self.mode not in debugger.MODES:
            raise SpecError(
                f"mode is {self.mode!r}; it must be 'pdb', 'pdb-ui' or 'dap'",
                hint=did_you_mean(str(self.mode), debugger.MODES),
            )
        port: object = self.port
        if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
            raise SpecError(f"port is {port!r}; it must be a number from 1 to 65535")

    def to_dict(self) -> dict[str, Any]:
        """The fields of this config."""
        return {"mode": self.mode, "port": self.port}


def config_of(value: object) -> DebugConfig | None:
    """The settings that a call's `debug=` stands for; `None` if it is off."""
    if value is None or value is False:
        return None
    if value is True:
        return DebugConfig()
    if not isinstance(value, DebugConfig):
        raise SpecError(
            f"debug is {value!r}; it must be True, False or a kt.DebugConfig",
            hint="a function that has a parameter 'debug' of its own gets it",
        )
    return value


def deep_breakpoint(debug_port: int = debugger.PORT, debug_mode: str | None = None) -> None:
    """Stop here, for a debugger that attaches from elsewhere; `breakpoint()` in a pod does this.

    A caller at a terminal gets the prompt of the debugger at once. Else the call prints the command
    that attaches, and waits for 300 seconds; then it goes on. Outside of pods it is
    `pdb.set_trace()`.

    Args:
        debug_port: A number that tells one stop of a pod from another in `kt debug`.
        debug_mode: `"pdb"`, `"pdb-ui"` or `"dap"`; by default `KT_DEBUG_MODE`, or `"pdb"`.

    Raises:
        ValueError: There is no such mode, or no such port.

    Example:
        >>> def train(rate):
        ...     kt.deep_breakpoint()
        ...     return rate
    """
    config = DebugConfig(debug_mode or default_mode(), debug_port)  # type: ignore[arg-type]  # checked there
    frame = sys._getframe(1)
    if not os.environ.get(debugger.SOCKET):
        import pdb  # noqa: PLC0415  # 10 ms

        pdb.Pdb().set_trace(frame)
        return
    from kubetorch.pod.user_process import debugger as stops  # noqa: PLC0415  # where it stops alone

    stops.deep_breakpoint(frame, config.port, config.mode)
