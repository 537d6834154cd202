"""What owns the workers of a pod: carries out what `kubetorch.pod.reload` decides."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kubetorch.datastore.slots import Slot
from kubetorch.errors import CallRefusedError, KubetorchError
from kubetorch.pod import environment, reload
from kubetorch.pod.calls import Calls
from kubetorch.pod.code import Code
from kubetorch.pod.environment import Prepared
from kubetorch.pod.image.images import Images
from kubetorch.pod.lines import Line
from kubetorch.pod.workers import LoadFailed, Worker, WorkerHost
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import failures
from kubetorch.wire.messages import LogReport, Observed, Reload, StageReport
from kubetorch.wire.podenv import PodEnv

#: Seconds that calls of an older generation may go on after a reload.
DRAIN_GRACE = 3600.0
#: Older generations that may still have calls; with one more, the oldest is ended.
DRAINING_LIMIT = 2
#: Seconds after a reload until blobs that are not needed any more are deleted.
PRUNE_DELAY = 10.0

_log = logging.getLogger(__name__)


class Reporter(Protocol):
    """Tells the controller."""

    def observed(self, message: Observed) -> None:
        """What a reload came to."""

    def stage(self, message: StageReport) -> None:
        """How far it is."""

    def log(self, message: LogReport) -> None:
        """A line that was written while it was loaded."""


@dataclass
class _Serving:
    """A loaded worker, and what it lives in."""

    worker: Worker
    spec: WorkloadSpec
    slot: Slot | None
    loaded: float


class Supervisor:
    """Brings the pod to the generation that the controller wants, and keeps it there.

    Args:
        pod: Who the pod is.
        environ: The agent's own environment.
        host: Starts workers; see `on_line` and `on_exit`.
        code: Brings code into the pod.
        images: Runs the steps of images.
        calls: Told which worker runs calls.
        reporter: Told what happens.
    """

    def __init__(
        self,
        *,
        pod: PodEnv,
        environ: Mapping[str, str],
        host: WorkerHost,
        code: Code,
        images: Images,
        calls: Calls,
        reporter: Reporter,
    ) -> None:
        self._pod = pod
        self._environ = environ
        self._host = host
        self._code = code
        self._images = images
        self._calls = calls
        self._reporter = reporter
        self._machine = reload.Reconciler()
        self._specs: dict[int, WorkloadSpec] = {}
        self._failure: failures.Failure | None = None
        self._loading: asyncio.Task[None] | None = None
        self._loaded: _Serving | None = None
        self._serving: _Serving | None = None
        self._draining: dict[asyncio.Task[None], Worker] = {}
        self._restart: asyncio.TimerHandle | None = None
        # Held while blobs are brought in, used, or deleted.
        self._storing = asyncio.Lock()
        self._pruning: asyncio.Task[None] | None = None
        self._is_closing = False

    # ------------------------------------------------------------------------------------ state

    @property
    def generation(self) -> int:
        """The generation that serves calls; 0 when none does."""
        return self._machine.serving if self._machine.has_worker else 0

    @property
    def restarts(self) -> int:
        """Workers that were replaced after they died."""
        return self._machine.restarts

    @property
    def workers(self) -> int:
        """Worker processes that are alive."""
        return len(self._draining) + (self._serving is not None)

    @property
    def code(self) -> Path | None:
        """Folder of the project that is served."""
        serving = self._serving
        return serving.slot.path if serving is not None and serving.slot is not None else None

    # ----------------------------------------------------------------------------------- events

    def on_reload(self, message: Reload) -> None:
        """The controller wants this generation."""
        self._specs[message.generation] = message.spec
        for generation in list(self._specs):
            if generation not in (message.generation, self._machine.serving):
                del self._specs[generation]
        self._handle(reload.Asked(message.generation))

    def on_line(self, line: Line, worker: Worker) -> None:
        """A worker wrote a line: the deploy that waits for it shows it."""
        if line.call is None and worker.generation == self._machine.loading:
            self._reporter.log(
                LogReport(
                    generation=worker.generation,
                    text=line.text,
                    source=line.source,
                    level=line.level,
                    time=line.time,
                )
            )

    def on_exit(self, worker: Worker, error: KubetorchError) -> None:
        """A worker that was loaded has ended."""
        _log.warning("worker ended pid=%s error=%s", worker.pid, error.message)
        serving = self._serving
        if serving is None or serving.worker is not worker or self._is_closing:
            return
        self._serving = None
        self._code.release(serving.slot)
        lived = time.monotonic() - serving.loaded
        had_calls = self._calls.lost_with == worker.pid
        self._handle(reload.Died(worker.generation, lived, had_calls))

    async def close(self, grace: float) -> None:
        """End all workers; calls have ended already, or are lost."""
        self._is_closing = True
        if self._pruning is not None:
            self._pruning.cancel()
        if self._restart is not None:
            self._restart.cancel()
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        if self._serving is not None:
            await self._serving.worker.drain(grace)
        for task in self._draining:
            task.cancel()
        await asyncio.gather(*self._draining, return_exceptions=True)
        await self._host.close()
        await self._images.close()

    # ---------------------------------------------------------------------------------- effects

    def _handle(self, event: reload.Event) -> None:
        for effect in self._machine.handle(event):
            self._apply(effect)

    def _apply(self, effect: reload.Effect) -> None:
        match effect:
            case reload.Load(generation):
                loop = asyncio.get_running_loop()
                self._loading = loop.create_task(self._load(generation))
            case reload.Abandon():
                if self._loading is not None:
                    self._loading.cancel()
            case reload.Switch():
                self._switch()
            case reload.Hold(generation):
                self._calls.hold(self._specs[generation])
            case reload.Refuse(generation):
                self._calls.refuse(self._refusal(generation))
            case reload.Restart(generation, delay):
                due = reload.RestartDue(generation)
                loop = asyncio.get_running_loop()
                self._restart = loop.call_later(delay, self._handle, due)
            case reload.Report(generation, serving, is_failure):
                failure = self._failure.to_dict() if is_failure and self._failure else None
                self._reporter.observed(
                    Observed(generation=generation, serving=serving, failure=failure)
                )

    def _switch(self) -> None:
        loaded, self._loaded = self._loaded, None
        assert loaded is not None
        before, self._serving = self._serving, loaded
        self._calls.serve(loaded.spec, loaded.worker)
        if before is not None:
            self._drain(before)
        self._prune_later()

    def _drain(self, old: _Serving) -> None:
        while len(self._draining) >= DRAINING_LIMIT:
            oldest = next(iter(self._draining))
            self._draining.pop(oldest)
            oldest.cancel()
        task = asyncio.get_running_loop().create_task(self._drain_and_release(old))
        self._draining[task] = old.worker
        task.add_done_callback(lambda task: self._draining.pop(task, None))

    async def _drain_and_release(self, old: _Serving) -> None:
        try:
            await old.worker.drain(DRAIN_GRACE)
        finally:
            # Also when this is cancelled: then calls that still run are lost.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(old.worker.kill())
            self._code.release(old.slot)

    def _refusal(self, generation: int) -> KubetorchError:
        failure = self._failure
        if failure is None:
            return CallRefusedError(f"generation {generation} could not be loaded")
        error = CallRefusedError(
            f"generation {generation} could not be loaded: {failure.error_type}: {failure.message}",
            hint="deploy it again once that is put right",
        )
        error.remote_traceback = failure.traceback or None
        return error

    # ---------------------------------------------------------------------------------- loading

    async def _load(self, generation: int) -> None:
        spec = self._specs[generation]
        try:
            loaded = await self._make(generation, spec)
        except LoadFailed as error:
            self._failure = error.failure
        except KubetorchError as error:
            failure = failures.describe(error, pod_name=self._pod.pod)
            self._failure = failures.without_traceback(failure, error)
        except Exception as error:  # noqa: BLE001  # an agent that lives can be deployed to again
            _log.exception("load failed generation=%s", generation)
            self._failure = failures.describe(error, pod_name=self._pod.pod)
        else:
            self._loaded = loaded
            self._handle(reload.Loaded(generation))
            return
        _log.info("load failed generation=%s error=%s", generation, self._failure.message)
        self._handle(reload.Failed(generation))

    async def _make(self, generation: int, spec: WorkloadSpec) -> _Serving:
        loop = asyncio.get_running_loop()
        preparing: asyncio.Task[Prepared] | None = None
        slot: Slot | None = None
        worker: Worker | None = None
        try:
            if self._images.has_run(generation, spec):
                preparing = loop.create_task(self._prepare(generation, spec))
            async with self._storing:
                self._report_stage(generation, "fetching")
                init_args = await self._code.fetch(spec)
                slot = await self._code.materialise(spec)
            if preparing is None:  # steps find the project as it will be
                await self._code.show(slot)
                preparing = loop.create_task(self._prepare(generation, spec))
            wanted = environment.worker_spec(
                generation,
                spec,
                pod=self._pod,
                prepared=await preparing,
                code=slot.path if slot is not None else None,
                init_args=init_args,
            )
            worker = await self._host.start(wanted, self._stage(generation))
            self._report_stage(generation, "importing")
            await worker.load(float(spec.compute.launch_timeout))
            await self._code.show(slot)
        except BaseException:
            if preparing is not None:
                preparing.cancel()
            if worker is not None:
                await asyncio.shield(worker.kill())
            self._code.release(slot)
            if self._serving is not None:
                await asyncio.shield(self._code.show(self._serving.slot))
            raise
        return _Serving(worker, spec, slot, time.monotonic())

    async def _prepare(self, generation: int, spec: WorkloadSpec) -> Prepared:
        """Run the image's steps; then import what the project imports, for the workers."""
        env = environment.worker_env(self._environ, self._pod, spec)
        python = environment.interpreter(spec)
        prepared = await self._images.prepare(generation, spec, python, env)
        preload = spec.runtime.preload
        if not self._machine.serving and preload:
            self._report_stage(generation, "preloading", ", ".join(preload))
        await self._host.prewarm(
            prepared.python, tuple(prepared.env.items()), prepared.path, preload
        )
        return prepared

    def _stage(self, generation: int) -> Callable[[str, str], None]:
        return lambda stage, message: self._report_stage(generation, stage, message)

    def _report_stage(self, generation: int, stage: str, message: str = "") -> None:
        self._reporter.stage(StageReport(generation=generation, stage=stage, message=message))

    # ---------------------------------------------------------------------------------- pruning

    def _prune_later(self) -> None:
        """Forget blobs of older generations, once the deploy that waits for this one is done."""
        if self._pruning is not None:
            self._pruning.cancel()
        self._pruning = asyncio.get_running_loop().create_task(self._prune())

    async def _prune(self) -> None:
        await asyncio.sleep(PRUNE_DELAY)
        async with self._storing:
            await asyncio.to_thread(self._code.prune, list(self._specs.values()))
