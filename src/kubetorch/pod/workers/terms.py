"""What an agent gives a worker, and what it is told by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kubetorch.errors import KubetorchError
from kubetorch.lib.records import record
from kubetorch.pod.workers.lines import Line
from kubetorch.pod.workers.links import Payload
from kubetorch.specs.callable import CallableRef
from kubetorch.wire.failures import Failure


@record
class WorkerSpec:
    """What a worker is to run, and how.

    Attributes:
        generation: The generation of the code.
        ref: The callable.
        python: Absolute path of the interpreter.
        sys_path: Entries to put first: the code's root, the project, what the caller had.
        cwd: Working directory.
        env: The whole environment, expanded.
        init_args: JSON object of the constructor's keyword arguments.
        preload: Third-party modules for the zygote.
        log_level: Level of the root logger, `debug` to `critical`.
        modules: Modules to look up under another name when arguments are unpickled.
        threads: Sync calls that run at the same time.
        library_path: Those entries of `sys_path` that lie outside of the deployed code, so that
            a zygote, which outlives generations, may import from them.
    """

    generation: int
    ref: CallableRef
    python: str
    sys_path: tuple[str, ...]
    cwd: str
    env: tuple[tuple[str, str], ...]
    init_args: str | None
    preload: tuple[str, ...]
    log_level: str
    modules: tuple[tuple[str, str], ...] = ()
    threads: int = 40
    library_path: tuple[str, ...] = ()


class CallSink(Protocol):
    """Told of what one call produces; exactly one of result, error and lost comes, as the last."""

    def on_log(self, line: Line) -> None:
        """It wrote a line."""

    def on_progress(self, current: float, total: float | None, message: str | None) -> None:
        """It has come so far."""

    def on_yield(self, codec: str, sizes: Sequence[int], payload: Payload) -> None:
        """It is a generator and yielded a value; see `Worker.grant`."""

    def on_result(
        self, codec: str, sizes: Sequence[int], payload: Payload, *, streamed: bool
    ) -> None:
        """It returned. With codec `none`, two segments are raw content and its content type."""

    def on_error(self, failure: bytes) -> None:
        """It raised; the failure is JSON, see `kubetorch.wire.failures`."""

    def on_lost(self, error: KubetorchError) -> None:
        """Its worker is gone, or was ended because the call did not end when it was cancelled."""


class LoadFailed(Exception):
    """The user's module or constructor raised."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.error_type}: {failure.message}")
        self.failure = failure
