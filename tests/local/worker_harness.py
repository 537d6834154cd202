"""What an agent does with workers, for tests: a host, workers of a file, calls."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from kubetorch.errors import KubetorchError
from kubetorch.lib import deadlines, memory
from kubetorch.lib.memory_files import MemoryFile
from kubetorch.pod.logs import Line
from kubetorch.pod.payloads import OwnedPayload, Payload
from kubetorch.pod.worker_process.worker import Worker, WorkerHost, WorkerSpec
from kubetorch.pod.worker_process.zygotes import LaunchedZygote
from kubetorch.specs.callable import CallableRef
from kubetorch.wire import codecs, exceptions
from kubetorch.wire.exceptions import Failure
from kubetorch.wire.frames import Body, Open, Progress

#: Seconds that anything in these tests may take.
DEADLINE = 60.0


def environment() -> dict[str, str]:
    """The environment of workers."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("COV", "PYTEST"))}


class CallFailed(Exception):
    """The user's code raised."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.error_type}: {failure.message}")
        self.failure = failure


@dataclass
class Outcome:
    """A sink that remembers everything, and the call's end as a future."""

    number: int = 0
    lines: list[Line] = field(default_factory=list)
    progress: list[tuple[float, float | None, str | None]] = field(default_factory=list)
    yields: list[Any] = field(default_factory=list)
    ends: int = 0
    streamed: bool = False
    #: Called for each yielded value.
    on_value: Callable[[Any], None] = lambda _: None
    raw: list[bytes] = field(default_factory=list)
    #: The types of the payloads that came.
    payloads: list[type] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.end: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def on_log(self, line: Line) -> None:
        assert self.ends == 0, "a line after the end of its call"
        self.lines.append(line)

    def on_kept(self, descriptor: int) -> None:
        os.close(descriptor)

    def on_failing(self, failure: bytes) -> None:
        self.on_error(failure)

    def on_progress(self, report: Progress) -> None:
        self.progress.append((report.current, report.total, report.message))

    def on_yield(self, codec: str, sizes: Sequence[int], payload: Payload) -> None:
        self.payloads.append(type(payload))
        value = codecs.decode(codec, codecs.split(payload.view, sizes))
        self.yields.append(value)
        self.on_value(value)

    def on_result(
        self, codec: str, sizes: Sequence[int], payload: Payload, *, streamed: bool
    ) -> None:
        self.ends += 1
        self.payloads.append(type(payload))
        self.streamed = streamed
        segments = codecs.split(payload.view, sizes)
        if codec == "none" and len(segments) == 2:
            self.raw = [bytes(segment) for segment in segments]
            self.end.set_result(None)
        else:
            self.end.set_result(codecs.decode(codec, segments))

    def on_error(self, failure: bytes) -> None:
        self.ends += 1
        self.end.set_exception(CallFailed(exceptions.parse_json(failure)))

    def on_lost(self, error: KubetorchError) -> None:
        self.ends += 1
        self.end.set_exception(error)

    @property
    def texts(self) -> list[str]:
        return [line.text for line in self.lines]

    async def result(self) -> Any:
        async with deadlines.timeout(DEADLINE):
            return await self.end


class Agent:
    """A host with the workers of one folder of code."""

    def __init__(
        self,
        folder: Path,
        python: str = sys.executable,
        zygote: LaunchedZygote | None = None,
        memory_limit: int | None = None,
    ) -> None:
        self.folder = folder
        self.python = python
        self.lines: list[Line] = []
        self.exits: list[tuple[Worker, KubetorchError]] = []
        self.exited = asyncio.Event()
        self.stages: list[tuple[str, str]] = []
        self.host = WorkerHost(
            pod_name="pod-0",
            service="shop",
            on_line=self._on_line,
            on_exit=self._on_exit,
            zygote=zygote,
            memory_limit=memory_limit,
        )

    def spec(self, name: str, *, module: str = "shop", **changes: Any) -> WorkerSpec:
        kind = "cls" if name[:1].isupper() else "fn"
        ref = CallableRef(
            kind=kind,
            name=name,
            module=module,
            qualname=name,
            source_file=module.replace(".", "/") + ".py",
            is_script=bool(changes.pop("is_script", False)),
        )
        env = environment() | changes.pop("env", {})
        values: dict[str, Any] = {
            "generation": 1,
            "ref": ref,
            "python": self.python,
            "sys_path": (str(self.folder),),
            "cwd": str(self.folder),
            "env": env,
            "init_args": None,
            "preload": (),
            "log_level": "info",
        }
        return WorkerSpec(**(values | changes))

    async def worker(self, name: str, **changes: Any) -> Worker:
        worker = await self.start(name, **changes)
        await worker.load(DEADLINE)
        return worker

    async def start(self, name: str, **changes: Any) -> Worker:
        spec = self.spec(name, **changes)
        return await self.host.start(spec, lambda *stage: self.stages.append(stage))

    def open(
        self,
        worker: Worker,
        *args: Any,
        method: str | None = None,
        codec: str = "json",
        arguments: list[codecs.Segment] | None = None,
        takes_files: bool = False,
        **kwargs: Any,
    ) -> Outcome:
        """Begin a call; with `takes_files` as one for a process of this machine."""
        outcome = Outcome()
        if arguments is None:
            arguments = codecs.encode(codec, {"args": args, "kwargs": kwargs})
        sizes = [len(segment) for segment in arguments]
        _, total = codecs.layout(sizes)
        outcome.number = worker.call(
            outcome,
            Open("id", "f", Body(codec, tuple(sizes), total), method, "request-7"),
            MemoryFile.write(codecs.join(arguments), total)
            if takes_files
            else payload_of(arguments, sizes, total),
            takes_files=takes_files,
        )
        return outcome

    async def call(self, worker: Worker, *args: Any, **options: Any) -> Any:
        """A call's value, or what it failed with."""
        return await self.open(worker, *args, **options).result()

    async def failure(self, worker: Worker, *args: Any, **options: Any) -> Failure:
        """What a call failed with."""
        try:
            value = await self.call(worker, *args, **options)
        except CallFailed as error:
            return error.failure
        raise AssertionError(f"the call returned {value!r}")

    async def exit(self) -> KubetorchError:
        """The error of the next worker that ends."""
        async with deadlines.timeout(DEADLINE):
            await self.exited.wait()
        self.exited.clear()
        return self.exits[-1][1]

    @property
    def texts(self) -> list[str]:
        return [line.text for line in self.lines]

    def _on_line(self, line: Line, generation: int, request: str | None) -> None:
        self.lines.append(line)

    def _on_exit(self, worker: Worker, error: KubetorchError) -> None:
        self.exits.append((worker, error))
        self.exited.set()


def payload_of(segments: list[codecs.Segment], sizes: Sequence[int], total: int) -> Payload:
    """As the agent does: what is large goes into memory that the worker can map."""
    if total <= 1024 * 1024:
        return OwnedPayload(b"".join(codecs.join(segments)))
    stored = memory.allocate(total)
    for offset, segment in zip(codecs.layout(sizes)[0], segments, strict=True):
        stored.write(offset, segment)
    return stored


@asynccontextmanager
async def agent(folder: Path, **options: Any) -> AsyncIterator[Agent]:
    """An agent whose workers end with the block."""
    running = Agent(folder, **options)
    try:
        yield running
    finally:
        await running.host.close()


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine on the agent's kind of loop."""

    async def limited() -> None:
        async with deadlines.timeout(1.5 * DEADLINE):
            await main

    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(limited())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
