"""The debugger, of which this release has the names: `kt.DebugConfig`, `kt.deep_breakpoint`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from kubetorch.errors import SpecError


@dataclass(frozen=True)
class DebugConfig:
    """Settings of a debugger; this release has none, and calls refuse them.

    Attributes:
        mode: In the terminal (`"pdb"`) or in a browser (`"pdb-ui"`).
        port: Port of the debugger in the pod.
    """

    mode: Literal["pdb", "pdb-ui"] = "pdb"
    port: int = 5678

    def __post_init__(self) -> None:
        if self.mode not in ("pdb", "pdb-ui"):
            raise SpecError(f"mode is {self.mode!r}; it must be 'pdb' or 'pdb-ui'")
        port: object = self.port
        if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
            raise SpecError(f"port is {port!r}; it must be a number from 1 to 65535")

    def to_dict(self) -> dict[str, Any]:
        """The fields of this config."""
        return {"mode": self.mode, "port": self.port}


def deep_breakpoint(debug_port: int = 5678, debug_mode: str | None = None) -> NoReturn:
    """Not in this release: stop here, for a debugger that attaches from elsewhere.

    Raises:
        SpecError: Always.
    """
    raise _absent("deep_breakpoint()")


def refuse_breakpoint(*_args: Any, **_kwargs: Any) -> NoReturn:  # noqa: ANN401  # as breakpoint()
    """Refuse `breakpoint()` in a pod, which has no terminal for its prompt."""
    raise _absent("breakpoint()")


def _absent(feature: str) -> SpecError:
    return SpecError(
        f"{feature} in a pod needs the debugger, which this release does not have",
        hint="print() and logging reach the caller, kt stacks shows where the code is, and "
        "PYTHONBREAKPOINT in env_vars names another debugger",
    )
