"""Brings a pod to the image that a generation wants, and runs no step that it ran already.

Requirements that lead the steps are installed into environments that all pods of the machine share,
each on top of the one before it. From the first command on environments are the pod's own: a step
gets a copy of the one before it, and what was run is remembered after each. So a step that fails,
or an agent that is killed, leaves the environments of earlier generations as they were.

    <root>/own/<number>  environments of this pod alone

As the files of a container are, they are gone when the agent starts again: it runs the steps anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import posixpath
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from kubetorch.datastore.blobs import BlobStore
from kubetorch.errors import CallRefusedError, ImageStepError
from kubetorch.lib import deadlines
from kubetorch.pod.environment import Prepared, interpreter, worker_environ
from kubetorch.pod.filesystem import PodFilesystem
from kubetorch.pod.image import image_steps, venvs
from kubetorch.pod.image.commands import CommandRunner, OnLine
from kubetorch.pod.image.image_steps import Copier
from kubetorch.pod.image.venvs import SharedVenvs
from kubetorch.pod.session import Session
from kubetorch.pod.transfers import Transfers
from kubetorch.specs.image import (
    INSTALL_VARIABLE,
    CopyStep,
    EnvStep,
    ImageSpec,
    PipStep,
    Plan,
    RunStep,
    Step,
    UserStep,
    WorkdirStep,
    plan,
)
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import frames
from kubetorch.wire.messages import LogReport, StageReport
from kubetorch.wire.pod_commands import RunStepNow
from kubetorch.wire.podenv import PodEnv

#: Receives a line that a step wrote, and the generation that the step was run for.
OnStepLine = Callable[[str, int], None]

#: Environments of the pod's own that its workers may still use.
_KEPT = 4

_log = logging.getLogger(__name__)


class RanSteps(NamedTuple):
    base: str = ""
    steps: tuple[Step, ...] = ()
    own: int | None = None
    generation: int = 0


class StepRecords:
    def __init__(self, root: Path) -> None:
        self._environments = root / "own"
        shutil.rmtree(self._environments, ignore_errors=True)
        self._used: deque[Path] = deque(maxlen=_KEPT)
        self._last = 0
        #: What it ran.
        self.ran = RanSteps()
        #: The variables that its images have set so far, apart from those of environments.
        self.variables: dict[str, str] = {}

    def keep(self, base: str) -> None:
        """Forget what was run on another base, or in an environment that user code has removed."""
        own = self.ran.own
        if self.ran.base != base or (own is not None and not self.own(own).is_dir()):
            self.ran = RanSteps(base)

    def todo(self, generation: int, steps: Sequence[Step]) -> Plan:
        """The steps to run for a generation; none for a generation that was prepared before."""
        if self.ran.generation == generation and self.ran.steps == tuple(steps):
            return Plan(len(steps), ())
        return plan(self.ran.steps, steps)

    def environ(self, environ: Mapping[str, str], steps: Sequence[Step]) -> dict[str, str]:
        """The variables before any step: those that no step sets any more keep their values."""
        own = {step.name for step in steps if isinstance(step, EnvStep)}
        left = {name: value for name, value in self.variables.items() if name not in own}
        return {**environ, **left}

    def own(self, number: int) -> Path:
        return self._environments / str(number)

    def new_own(self) -> int:
        self._last += 1
        return self._last

    def use(self, venv: Path | None) -> None:
        """Workers will use this environment; remove those that none can use any more."""
        if venv is not None:
            self._used.append(venv)
        needed = set(self._used)
        if self.ran.own is not None:
            needed.add(self.own(self.ran.own))
        with contextlib.suppress(FileNotFoundError):
            for path in self._environments.iterdir():
                if path not in needed:
                    shutil.rmtree(path, ignore_errors=True)


class StepReports:
    """Reports how far the steps of one generation are."""

    def __init__(self, generation: int, session: Session, on_line: OnStepLine) -> None:
        self._generation = generation
        self._session = session
        self._on_line = on_line

    def on_step(self, message: str, number: int, count: int, *, warning: bool) -> None:
        """A step begins, or is not run: which, of how many."""
        report = StageReport(
            generation=self._generation,
            stage="image",
            message=message,
            warning=warning,
            step=number,
            steps=count,
        )
        self._session.report_stage(report)
        self._on_line(message, self._generation)

    def on_output(self, text: str) -> None:
        self._session.report_line(
            LogReport(generation=self._generation, text=text, source=frames.IMAGE, time=time.time())
        )
        self._on_line(text, self._generation)


@dataclass(eq=False)
class Preparation:
    generation: int
    images: Images
    image: ImageSpec
    spec: WorkloadSpec
    given: Mapping[str, str]
    progress: StepReports

    def __post_init__(self) -> None:
        self._python = interpreter(self.spec)
        self._folder = self.images.working_dir
        self._uv = ""
        self._base = ""
        #: The step that is run now.
        self.at = 0
        #: Whether an environment was added to the shared ones.
        self.has_made = False
        #: What copied packages are imported from.
        self.path: tuple[str, ...] = ()

    async def run(self) -> Path | None:
        """Run what has to be run; the environment of the workers, if the image needs one."""
        steps, runtime = self.image.steps, self.spec.runtime
        allowed = (step for step in steps if self._refused(step) is None)
        if any(image_steps.needs_own_paths(step, self.image) for step in allowed):
            await self.images.filesystem.shield(frozen=runtime.path)
        if any(image_steps.needs_environment(step) for step in steps):
            self._uv = venvs.find_uv()
            self._base = await asyncio.to_thread(
                venvs.base_digest, self._python, runtime.version, runtime.site
            )
        records = self.images.records
        records.keep(self._base)
        todo = records.todo(self.generation, steps)
        shared = image_steps.shared_steps(self.image)
        venv = await self._share(shared)
        own = records.ran.own if todo.unchanged_count >= shared else None
        for number, step in enumerate(steps):
            self.at = number
            if isinstance(step, WorkdirStep):  # it holds for the steps after it, run or not
                self._folder = posixpath.join(self.images.working_dir, step.path)
            if number < todo.unchanged_count:
                continue
            if isinstance(step, PipStep):
                if number >= shared:
                    wanted = image_steps.installation(steps, number, len(steps))
                    if wanted is None:
                        continue  # the last one of its command runs it
                    self._announce(number, wanted)
                    own = await self._run_in_copy(number, wanted, self._own(own) or venv)
                records.ran = RanSteps(self._base, steps[: number + 1], own)
                continue
            self._announce(number, step)
            if isinstance(step, (CopyStep, WorkdirStep)):
                await self._write(step, self.environ(number, venv))
            elif isinstance(step, RunStep) and self._refused(step) is None:
                self._check_rights(step)
                own = await self._run_in_copy(number, step, self._own(own) or venv)
            records.ran = RanSteps(self._base, steps[: number + 1], own)
        packages = [step for step in steps if isinstance(step, CopyStep) and step.is_package]
        entries = (entry for step in packages for entry in self.images.copier.entries(step))
        self.path = tuple(dict.fromkeys(entries))
        if not any(image_steps.needs_environment(step) for step in steps[shared:]):
            own = None
        records.ran = RanSteps(self._base, steps, own, self.generation)
        # Without an environment: its folder is no part of what a variable keeps.
        after = self.environ(len(steps), None)
        given = dict(self.spec.compute.env_vars)
        said = (step.name for step in steps if isinstance(step, EnvStep))
        records.variables.update({name: after[name] for name in said if name not in given})
        return self._own(own) or venv

    def environ(self, count: int, venv: Path | None) -> dict[str, str]:
        """The variables after so many steps."""
        before = self.images.records.environ(self.given, self.image.steps)
        if venv is not None:
            before = image_steps.without_places(before)
        said = [step for step in self.image.steps[:count] if isinstance(step, EnvStep)]
        found = worker_environ(before, self.images.pod, self.spec, said)
        if venv is not None:
            downloads = self.images.shared.downloads
            found = image_steps.variables(found, venv=venv, downloads=downloads)
        return found

    async def _run(
        self, step: Step, command: str | Sequence[str], environ: Mapping[str, str], folder: str
    ) -> None:
        await image_steps.run(step, command, environ, folder, self.progress.on_output)

    # ------------------------------------------------------------------------------------ walking

    async def _write(self, step: CopyStep | WorkdirStep, environ: Mapping[str, str]) -> None:
        if isinstance(step, CopyStep):
            await self.images.copier.run(step, environ, self.progress.on_output)
        else:
            await self._run(step, ["/bin/mkdir", "-p", self._folder], environ, "/")

    def _refused(self, step: Step) -> str | None:
        """The package manager that a step calls, where that is not allowed."""
        if self.spec.runtime.package_managers or not isinstance(step, RunStep):
            return None
        return image_steps.package_manager(step.command)

    def _check_rights(self, step: Step) -> None:
        """Say what is wrong better than a package manager does, which only cannot open its lock."""
        if not (self.images.filesystem.is_container and isinstance(step, RunStep) and os.geteuid()):
            return
        manager = image_steps.package_manager(step.command)
        if manager is not None and not re.search(r"\bsudo\b", step.command):
            error = image_steps.failure(
                step,
                f"cannot be run: {manager} needs root, and the container runs as user "
                f"{os.geteuid()}",
            )
            error.hint = "let the container run as root, or have the package in its image"
            raise error

    def _announce(self, number: int, step: Step) -> None:
        text = f"{image_steps.describe(step)} ({number + 1}/{len(self.image.steps)})"
        refused = self._refused(step)
        if refused is not None:
            text = (
                f"skipped {image_steps.describe(step)!r}: {refused} installs into the machine; "
                "KT_PACKAGE_MANAGERS=true allows it in the pod's own view of the machine's files"
            )
        elif isinstance(step, UserStep):
            is_container = self.images.filesystem.is_container
            whose = "its container says" if is_container else "the user of this machine"
            text = f"USER {step.user} has no effect: the pod runs as {whose}"
        elif isinstance(step, EnvStep):
            return
        is_warning = refused is not None or isinstance(step, UserStep)
        self.progress.on_step(text, number + 1, len(self.image.steps), warning=is_warning)

    # ------------------------------------------------------------------------------- environments

    async def _share(self, count: int) -> Path | None:
        """The shared environment after so many steps; `None` while there is nothing installed."""
        chain = []
        digest = self._base
        for number, step in enumerate(self.image.steps[:count]):
            wanted = None
            if isinstance(step, PipStep):
                wanted = image_steps.installation(self.image.steps, number, count)
            if wanted is not None:
                digest = image_steps.digest(digest, wanted.requirement, self.environ(number, None))
                chain.append((number, wanted, digest))
        if not chain:
            return None
        shared, venv = self.images.shared, None
        there = len(chain)
        while there and venv is None:
            venv = shared.use(chain[there - 1][2])
            there -= venv is None
        for number, step, digest in chain[there:]:
            self.at = number
            self._announce(number, step)
            venv = await self._make_shared(number, step, venv, digest)
        return venv

    async def _make_shared(
        self, number: int, step: PipStep, venv: Path | None, digest: str
    ) -> Path:
        shared = self.images.shared
        made = shared.new()
        try:
            await self._copy(venv, made)
            await self._install(number, step, made)
            found = await asyncio.to_thread(shared.publish, made, digest)
        finally:
            await asyncio.to_thread(shutil.rmtree, made, ignore_errors=True)
        self.has_made = True
        return found

    def _own(self, number: int | None) -> Path | None:
        return None if number is None else self.images.records.own(number)

    async def _run_in_copy(self, number: int, step: PipStep | RunStep, venv: Path | None) -> int:
        """Run a step in a copy of an environment, for this pod alone; the number of the copy."""
        own = self.images.records.new_own()
        made = self.images.records.own(own)
        try:
            await self._copy(venv, made)
            await self._install(number, step, made)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, made, ignore_errors=True)
            raise
        return own

    async def _copy(self, venv: Path | None, target: Path) -> None:
        try:
            if venv is not None:
                await asyncio.to_thread(venvs.clone, venv, target)
                return
            target.parent.mkdir(parents=True, exist_ok=True)
            command = venvs.create_command(self._uv, self._python, target)
            await self._run(self.image.steps[self.at], command, self.environ(0, target), "/")
            await asyncio.to_thread(venvs.finish_creation, target, self.spec.runtime.site, self._uv)
        except OSError as error:
            raise self._broken(error) from error

    async def _install(self, number: int, step: PipStep | RunStep, venv: Path) -> None:
        environ = self.environ(number, venv)
        environ = image_steps.installing(environ, python=venvs.python_of(venv))
        try:
            own = await asyncio.to_thread(venvs.site_packages, venv)
            await asyncio.to_thread(venvs.put_stand_ins, own, self.spec.runtime.site)
            command = (
                image_steps.background(step.command)
                if isinstance(step, RunStep)
                else (f"{self.image.install_cmd or f'${INSTALL_VARIABLE}'} {step.requirement}")
            )
            await self._run(step, command, environ, self._folder)
            await asyncio.to_thread(venvs.remove_stand_ins, own)
        except OSError as error:
            raise self._broken(error) from error

    def _broken(self, error: OSError) -> ImageStepError:
        return image_steps.failure(self.image.steps[self.at], f"could not be run: {error}")


class Images:
    def __init__(
        self,
        *,
        pod: PodEnv,
        store: BlobStore,
        blobs: Transfers,
        filesystem: PodFilesystem,
        session: Session,
        on_line: OnStepLine,
    ) -> None:
        self.pod = pod
        self._session = session
        self._on_line = on_line
        root, shared = Path(pod.root), Path(pod.environments)
        self.working_dir = pod.working_dir
        self.filesystem = filesystem
        self.records = StepRecords(root)
        self.shared = SharedVenvs(shared)
        self.copier = Copier(root / "copies", pod.working_dir, store, blobs)
        self._commands = CommandRunner(
            root, pod.working_dir, filesystem, self.copier, self.shared.downloads
        )
        self._prepared: tuple[WorkloadSpec, Prepared] | None = None
        self._working = asyncio.Lock()
        self._collecting: asyncio.Task[None] | None = None

    def needs_project(self, generation: int, spec: WorkloadSpec) -> bool:
        """True if steps of a generation may look for its code."""
        image = spec.compute.image
        if image is None or spec.compute.freeze:
            return False
        kept = self.records.todo(generation, image.steps).unchanged_count
        shared = image_steps.shared_steps(image)
        return any(
            not isinstance(step, EnvStep) and (number >= shared or not isinstance(step, PipStep))
            for number, step in enumerate(image.steps[kept:], start=kept)
        )

    async def prepare(
        self, generation: int, spec: WorkloadSpec, environ: Mapping[str, str]
    ) -> Prepared:
        """Run what has to be run; what workers start with."""
        image, runtime, python = spec.compute.image, spec.runtime, interpreter(spec)
        if spec.compute.freeze or image is None or not image.steps:
            found = environ if spec.compute.freeze else self.records.environ(environ, ())
            env = worker_environ(found, self.pod, spec)
            return self._keep(spec, Prepared(python, env, runtime.path))
        async with self._working:
            progress = StepReports(generation, self._session, self._on_line)
            preparation = Preparation(generation, self, image, spec, environ, progress)
            seconds = float(spec.compute.launch_timeout)
            try:
                async with deadlines.timeout(seconds):
                    venv = await preparation.run()
            except TimeoutError:
                step = image.steps[preparation.at]
                raise image_steps.failure(step, f"did not end within {seconds:.0f} s") from None
            await asyncio.to_thread(self.records.use, venv)
        if preparation.has_made and (self._collecting is None or self._collecting.done()):
            self._collecting = asyncio.get_running_loop().create_task(self._collect())
        prepared = Prepared(
            python if venv is None else venvs.python_of(venv),
            preparation.environ(len(image.steps), venv),
            tuple(dict.fromkeys((*preparation.path, *runtime.path))),
        )
        return self._keep(spec, prepared)

    def _keep(self, spec: WorkloadSpec, prepared: Prepared) -> Prepared:
        path = (str(self._commands.packages), *prepared.path)
        found = replace(prepared, path=path)
        self._prepared = spec, found
        return found

    async def run_now(self, order: RunStepNow, on_line: OnLine) -> int:
        """Run a step in the pod as it is, whose image does not change by it; its exit code."""
        if self._prepared is None:
            raise CallRefusedError("nothing is deployed on this pod yet")
        return await self._commands.run(order, *self._prepared, on_line)

    async def close(self) -> None:
        if self._collecting is not None:
            await asyncio.gather(self._collecting, return_exceptions=True)
        self.shared.close()

    async def _collect(self) -> None:
        try:
            await asyncio.to_thread(self.shared.collect)
        except OSError:
            _log.exception("environments not collected")
