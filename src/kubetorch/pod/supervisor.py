"""What owns the workers of a pod: carries out what `kubetorch.pod.reload` decides."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from kubetorch.errors import CallRefusedError, KubetorchError
from kubetorch.pod import reload
from kubetorch.pod.apps.host import AppHost
from kubetorch.pod.apps.process import AppProcess
from kubetorch.pod.calls.calls import Calls
from kubetorch.pod.interpreters import Interpreters
from kubetorch.pod.making import Maker, Reporter, Serving
from kubetorch.pod.workers.host import LoadFailed, Worker
from kubetorch.pod.workers.lines import Line
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import failures
from kubetorch.wire.messages import LogReport, Observed, Reload
from kubetorch.wire.podenv import PodEnv

#: Seconds that calls of an older generation may go on after a reload.
DRAIN_GRACE = 3600.0
#: Older generations that may still have calls; with one more, the oldest is ended.
DRAINING_LIMIT = 2

_log = logging.getLogger(__name__)


class Supervisor:
    """Brings the pod to the generation that the controller wants, and keeps it there.

    Args:
        pod: Who the pod is.
        interpreters: Know what the user's code runs on.
        maker: Makes workers and apps; see `on_line`, `on_exit` and `on_app_exit`.
        apps: Told which app takes requests.
        calls: Told which worker runs calls.
        reporter: Told what happens.
    """

    def __init__(
        self,
        *,
        pod: PodEnv,
        interpreters: Interpreters,
        maker: Maker,
        apps: AppHost,
        calls: Calls,
        reporter: Reporter,
    ) -> None:
        self._pod = pod
        self._interpreters = interpreters
        self._maker = maker
        self._apps = apps
        self._calls = calls
        self._reporter = reporter
        self._machine = reload.Reconciler()
        self._specs: dict[int, WorkloadSpec] = {}
        self._failure: failures.Failure | None = None
        self._loading: asyncio.Task[None] | None = None
        self._loaded: Serving | None = None
        self._serving: Serving | None = None
        self._draining: dict[asyncio.Task[None], Worker | AppProcess] = {}
        self._restart: asyncio.TimerHandle | None = None
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
    def serves_app(self) -> bool:
        """Whether what is served, or is to be, is an app."""
        spec = self._specs.get(self._machine.loading or self._machine.serving)
        return spec is not None and spec.callable.app is not None

    @property
    def code(self) -> Path | None:
        """Folder of the project that is served."""
        serving = self._serving
        return serving.slot.path if serving is not None and serving.slot is not None else None

    def surroundings(self) -> tuple[str, Mapping[str, str]]:
        """Working directory and environment of what else runs in the pod, as a worker has them.

        Raises:
            CallRefusedError: It was not told yet what it is to run.
        """
        spec = self._specs.get(max(self._specs, default=0))
        if spec is None:
            raise CallRefusedError(f"pod {self._pod.pod} is being started", hint="try again")
        return self._maker.surroundings(spec, self.code)

    # ----------------------------------------------------------------------------------- events

    def on_reload(self, message: Reload) -> None:
        """The controller wants this generation."""
        self._specs[message.generation] = message.spec
        for generation in list(self._specs):
            if generation not in (message.generation, self._machine.serving):
                del self._specs[generation]
        self._handle(reload.Asked(message.generation))

    def on_line(self, line: Line, generation: int) -> None:
        """A worker or an app wrote a line: the deploy that waits for it shows it."""
        if line.call is None and generation == self._machine.loading:
            self._reporter.log(
                LogReport(
                    generation=generation,
                    text=line.text,
                    source=line.source,
                    level=line.level,
                    time=line.time,
                )
            )

    def on_exit(self, worker: Worker, error: KubetorchError) -> None:
        """A worker that was loaded has ended."""
        _log.warning("worker ended pid=%s error=%s", worker.pid, error.message)
        self._on_death(worker, had_calls=self._calls.lost_with == worker.pid)

    def on_app_exit(self, app: AppProcess) -> None:
        """An app that has to run has ended."""
        _log.warning("%s", app.ending)
        self._on_death(app, had_calls=False)

    def _on_death(self, process: Worker | AppProcess, *, had_calls: bool) -> None:
        serving = self._serving
        if serving is None or serving.process is not process or self._is_closing:
            return
        self._serving = None
        self._maker.release(serving.slot)
        lived = time.monotonic() - serving.loaded
        self._handle(reload.Died(process.generation, lived, had_calls))

    async def close(self, grace: float) -> None:
        """End all workers; calls have ended already, or are lost."""
        self._is_closing = True
        if self._restart is not None:
            self._restart.cancel()
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        if self._serving is not None:
            await self._serving.process.drain(grace)
        for task in self._draining:
            task.cancel()
        await asyncio.gather(*self._draining, return_exceptions=True)
        await self._maker.close()

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
                self._apps.hold()
            case reload.Refuse(generation):
                self._calls.refuse(self._refusal(generation))
                self._apps.refuse(self._refusal(generation))
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
        if isinstance(loaded.process, AppProcess):
            self._apps.serve(loaded.process)
            self._calls.hold(loaded.spec)
            self._calls.refuse(self._apps.no_call(loaded.spec))
        else:
            self._apps.hold()
            self._calls.serve(loaded.spec, loaded.process)
        if before is not None:
            self._drain(before)
        self._maker.prune_later(lambda: list(self._specs.values()))

    def _drain(self, old: Serving) -> None:
        while len(self._draining) >= DRAINING_LIMIT:
            oldest = next(iter(self._draining))
            self._draining.pop(oldest)
            oldest.cancel()
        task = asyncio.get_running_loop().create_task(self._drain_and_release(old))
        self._draining[task] = old.process
        task.add_done_callback(lambda task: self._draining.pop(task, None))

    async def _drain_and_release(self, old: Serving) -> None:
        try:
            await old.process.drain(DRAIN_GRACE)
        finally:
            # Also when this is cancelled: then calls that still run are lost.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(old.process.kill())
            self._maker.release(old.slot)

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
        try:
            spec = await self._interpreters.settle(self._specs[generation])
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

    async def _make(self, generation: int, spec: WorkloadSpec) -> Serving:
        try:
            if spec.callable.app is not None:
                make_room = functools.partial(self._make_room, generation)
                return await self._maker.app(generation, spec, make_room=make_room)
            is_first = not self._machine.serving
            return await self._maker.worker(generation, spec, is_first=is_first)
        except BaseException:
            if self._serving is not None:
                await asyncio.shield(self._maker.show(self._serving.slot))
            raise

    async def _make_room(self, generation: int) -> None:
        """End the app that serves."""
        before = self._serving
        if before is not None and isinstance(before.process, AppProcess):
            self._serving = None
            self._handle(reload.Stopped(generation))
            try:
                await before.process.drain(DRAIN_GRACE)
            finally:
                await asyncio.shield(before.process.kill())
                self._maker.release(before.slot)
