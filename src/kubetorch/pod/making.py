"""Making what serves a generation: its files, its image, then a worker or an app."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kubetorch.datastore.slots import Slot
from kubetorch.pod import environment
from kubetorch.pod.apps.host import AppHost
from kubetorch.pod.apps.process import AppProcess
from kubetorch.pod.code import Code
from kubetorch.pod.environment import Prepared
from kubetorch.pod.image.images import Images
from kubetorch.pod.workers.host import Worker, WorkerHost
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import LogReport, Observed, StageReport
from kubetorch.wire.podenv import PodEnv

#: Seconds after a reload until blobs that are not needed any more are deleted.
PRUNE_DELAY = 10.0


class Reporter(Protocol):
    """Tells the controller."""

    def observed(self, message: Observed) -> None:
        """What a reload came to."""

    def stage(self, message: StageReport) -> None:
        """How far it is."""

    def log(self, message: LogReport) -> None:
        """A line that was written while it was loaded."""


@dataclass
class Serving:
    """A loaded worker or an app that runs, and what it lives in."""

    process: Worker | AppProcess
    spec: WorkloadSpec
    slot: Slot | None
    loaded: float


class Maker:
    """Makes what serves.

    Args:
        pod: Who the pod is.
        environ: The agent's own environment.
        host: Starts workers.
        apps: Starts apps.
        code: Brings code into the pod.
        images: Runs the steps of images.
        reporter: Told how far it is.
    """

    def __init__(
        self,
        *,
        pod: PodEnv,
        environ: Mapping[str, str],
        host: WorkerHost,
        apps: AppHost,
        code: Code,
        images: Images,
        reporter: Reporter,
    ) -> None:
        self._pod = pod
        self._environ = environ
        self._host = host
        self._apps = apps
        self._code = code
        self._images = images
        self._reporter = reporter
        # Held while blobs are brought in, used, or deleted.
        self._storing = asyncio.Lock()
        self._pruning: asyncio.Task[None] | None = None
        # What the latest generation starts with.
        self._prepared: Prepared | None = None

    async def worker(self, generation: int, spec: WorkloadSpec, *, is_first: bool) -> Serving:
        """A worker that has loaded this generation.

        Args:
            generation: The generation.
            spec: The workload.
            is_first: Whether nothing served before.
        """
        loop = asyncio.get_running_loop()
        preparing: asyncio.Task[Prepared] | None = None
        slot: Slot | None = None
        worker: Worker | None = None
        try:
            if not self._images.needs_project(generation, spec):
                preparing = loop.create_task(self._prewarm(generation, spec, is_first=is_first))
            slot, init_args = await self._bring(generation, spec)
            if preparing is None:  # steps find the project as it will be
                await self._code.show(slot)
                preparing = loop.create_task(self._prewarm(generation, spec, is_first=is_first))
            wanted = environment.worker_spec(
                generation,
                spec,
                pod=self._pod,
                prepared=await preparing,
                code=slot.path if slot is not None else None,
                init_args=init_args,
            )
            worker = await self._host.start(
                wanted, lambda stage, message: self._on_stage(generation, stage, message)
            )
            self._on_stage(generation, "importing", "")
            await worker.load(float(spec.compute.launch_timeout))
            await self._code.show(slot)
        except BaseException:
            if preparing is not None:
                preparing.cancel()
            if worker is not None:
                await asyncio.shield(worker.kill())
            self._code.release(slot)
            raise
        return Serving(worker, spec, slot, time.monotonic())

    async def app(
        self, generation: int, spec: WorkloadSpec, *, make_room: Callable[[], Awaitable[None]]
    ) -> Serving:
        """An app of this generation that serves, or runs if it serves nothing.

        Args:
            generation: The generation.
            spec: The workload.
            make_room: Ends the app that runs: both may want the same port.
        """
        slot: Slot | None = None
        app: AppProcess | None = None
        try:
            slot, _ = await self._bring(generation, spec)
            await self._code.show(slot)
            prepared = await self._prepare(generation, spec)
            await make_room()
            wanted = environment.app_run(
                generation,
                spec,
                pod=self._pod,
                prepared=prepared,
                code=slot.path if slot is not None else None,
            )
            self._on_stage(generation, "starting", wanted.app.command)
            app = await self._apps.start(wanted)
            await app.settle(environment.patience(spec))
        except BaseException:
            if app is not None:
                await asyncio.shield(app.kill())
            self._code.release(slot)
            raise
        return Serving(app, spec, slot, time.monotonic())

    def surroundings(self, spec: WorkloadSpec, code: Path | None) -> tuple[str, Mapping[str, str]]:
        """Working directory and environment of what else runs in the pod, as a worker has them."""
        prepared = self._prepared or environment.unprepared(self._environ, self._pod, spec)
        return self._pod.working_dir, environment.shell_env(prepared, spec, self._pod, code)

    async def _bring(self, generation: int, spec: WorkloadSpec) -> tuple[Slot | None, str | None]:
        """The project in a slot, and the arguments of a class's constructor."""
        async with self._storing:
            self._on_stage(generation, "fetching", "")
            init_args = await self._code.fetch(spec)
            return await self._code.materialise(spec), init_args

    async def _prepare(self, generation: int, spec: WorkloadSpec) -> Prepared:
        """Run the image's steps."""
        env = environment.worker_env(self._environ, self._pod, spec)
        python = environment.interpreter(spec)
        self._prepared = await self._images.prepare(generation, spec, python, env)
        return self._prepared

    async def _prewarm(self, generation: int, spec: WorkloadSpec, *, is_first: bool) -> Prepared:
        """Run the image's steps; then import what the project imports, for the workers."""
        prepared = await self._prepare(generation, spec)
        preload = spec.runtime.preload
        if is_first and preload:
            self._on_stage(generation, "preloading", ", ".join(preload))
        await self._host.prewarm(
            prepared.python, tuple(prepared.env.items()), prepared.path, preload
        )
        return prepared

    def _on_stage(self, generation: int, stage: str, message: str) -> None:
        self._reporter.stage(StageReport(generation=generation, stage=stage, message=message))

    # -------------------------------------------------------------------------------- afterwards

    def release(self, slot: Slot | None) -> None:
        """Nothing runs in it any more."""
        self._code.release(slot)

    async def show(self, slot: Slot | None) -> None:
        """Let its project be seen in the working directory."""
        await self._code.show(slot)

    def prune_later(self, keep: Callable[[], list[WorkloadSpec]]) -> None:
        """Forget blobs of older generations, once the deploy that waits for this one is done.

        Args:
            keep: The generations whose blobs stay, asked when it is done.
        """
        self._stop_pruning()
        self._pruning = asyncio.get_running_loop().create_task(self._prune(keep))

    async def close(self) -> None:
        """End what makes workers."""
        self._stop_pruning()
        await self._host.close()
        await self._images.close()

    def _stop_pruning(self) -> None:
        if self._pruning is not None:
            self._pruning.cancel()

    async def _prune(self, keep: Callable[[], list[WorkloadSpec]]) -> None:
        await asyncio.sleep(PRUNE_DELAY)
        async with self._storing:
            await asyncio.to_thread(self._code.prune, keep())
