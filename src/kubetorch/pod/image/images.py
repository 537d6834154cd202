"""Brings a pod to the image that a generation wants, and runs no step that it ran already."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

from kubetorch.datastore.blobs import BlobStore
from kubetorch.errors import CallRefusedError
from kubetorch.lib import deadlines
from kubetorch.pod.environment import Prepared
from kubetorch.pod.image import recipes, running, venvs
from kubetorch.pod.image.commanding import Commanding, OnLine
from kubetorch.pod.image.copying import Blobs, Copying
from kubetorch.pod.image.preparation import Preparation, Tools
from kubetorch.pod.image.records import Records
from kubetorch.pod.image.reporting import OnStepLine, Reporter, StepReports
from kubetorch.pod.image.store import Store
from kubetorch.pod.view import PodView
from kubetorch.specs.image import EnvStep, PipStep
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.podenv import PodEnv
from kubetorch.wire.running import RunStepNow

_log = logging.getLogger(__name__)


class Images:
    """The images of one pod.

    Args:
        pod: Who the pod is.
        store: The pod's blobs.
        blobs: Brings blobs there.
        view: The file system as the pod sees it.
        reporter: Tells a deploy how far its steps are.
        on_line: Told of the steps, and of what they write.
    """

    def __init__(
        self,
        *,
        pod: PodEnv,
        store: BlobStore,
        blobs: Blobs,
        view: PodView,
        reporter: Reporter,
        on_line: OnStepLine,
    ) -> None:
        self._reporter = reporter
        self._on_line = on_line
        root, shared = Path(pod.root), Path(pod.environments)
        self._tools = Tools(
            records=Records(root),
            shared=Store(shared),
            view=view,
            copying=Copying(root / "copies", pod.working_dir, store, blobs),
            working_dir=pod.working_dir,
        )
        self._commanding = Commanding(
            root, pod.working_dir, view, self._tools.copying, self._tools.shared.downloads
        )
        self._prepared: tuple[WorkloadSpec, Prepared] | None = None
        self._working = asyncio.Lock()
        self._collecting: asyncio.Task[None] | None = None

    def needs_project(self, generation: int, spec: WorkloadSpec) -> bool:
        """Whether steps are to be run for a generation that may look for its code."""
        image = spec.compute.image
        if image is None or spec.compute.freeze:
            return False
        kept = self._tools.records.todo(generation, image.steps).kept
        shared = recipes.shared_steps(image)
        return any(
            not isinstance(step, EnvStep) and (number >= shared or not isinstance(step, PipStep))
            for number, step in enumerate(image.steps[kept:], start=kept)
        )

    async def prepare(
        self, generation: int, spec: WorkloadSpec, python: str, env: dict[str, str]
    ) -> Prepared:
        """Run what has to be run; what workers start with.

        Args:
            generation: The generation.
            spec: What it is.
            python: The interpreter that its environments are made from.
            env: Environment of its workers, without the image.

        Raises:
            ImageStepError: A step failed; the steps before it are not run again.
            ResourceNotAvailableError: The machine does not allow what a step needs.
        """
        image, runtime = spec.compute.image, spec.runtime
        if spec.compute.freeze:
            return self._keep(spec, Prepared(python, env, runtime.path))
        if image is None or not image.steps:
            env = self._tools.records.environ(env, ())
            return self._keep(spec, Prepared(python, env, runtime.path))
        async with self._working:
            progress = StepReports(generation, self._reporter, self._on_line)
            preparation = Preparation(
                generation, self._tools, image, runtime, python, env, progress
            )
            seconds = float(spec.compute.launch_timeout)
            try:
                async with deadlines.timeout(seconds):
                    venv = await preparation.run()
            except TimeoutError:
                step = image.steps[preparation.at]
                raise running.failure(step, f"did not end within {seconds:.0f} s") from None
            await asyncio.to_thread(self._tools.records.use, venv)
        if preparation.has_made:
            self._collect_later()
        prepared = Prepared(
            python if venv is None else venvs.python_of(venv),
            preparation.environ(len(image.steps), venv),
            tuple(dict.fromkeys((*preparation.path, *runtime.path))),
        )
        return self._keep(spec, prepared)

    def _keep(self, spec: WorkloadSpec, prepared: Prepared) -> Prepared:
        path = (str(self._commanding.packages), *prepared.path)
        found = replace(prepared, path=path)
        self._prepared = spec, found
        return found

    async def run_now(self, order: RunStepNow, on_line: OnLine) -> int:
        """Run a step in the pod as it is, whose image does not change by it; its exit code.

        Args:
            order: The step.
            on_line: Told of each line.

        Raises:
            CallRefusedError: The pod serves nothing yet.
            ResourceNotAvailableError: The machine does not allow what the step needs.
            ImageStepError: A copy failed.
        """
        if self._prepared is None:
            raise CallRefusedError("nothing is deployed on this pod yet")
        spec, prepared = self._prepared
        venv = Path(prepared.python).parents[1]
        site = [str(path) for path in venv.glob("lib/python*/site-packages")]
        return await self._commanding.run(
            order.step,
            spec.compute.image,
            prepared,
            [*site, *spec.runtime.site],
            on_line,
            frozen=spec.runtime.path,
            timeout=order.timeout,
        )

    async def close(self) -> None:
        """Use nothing any more."""
        if self._collecting is not None:
            await asyncio.gather(self._collecting, return_exceptions=True)
        self._tools.shared.close()

    def _collect_later(self) -> None:
        if self._collecting is None or self._collecting.done():
            self._collecting = asyncio.get_running_loop().create_task(self._collect())

    async def _collect(self) -> None:
        try:
            await asyncio.to_thread(self._tools.shared.collect)
        except OSError:
            _log.exception("environments not collected")
