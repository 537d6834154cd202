"""Brings a pod to the image of a generation, and runs no step that the pod ran already.

Requirements that lead the steps are installed into environments that all pods of the machine share,
each environment on top of the one before it. From the first command on, environments are the pod's
own: a step gets a copy of the environment before it, and is remembered once it ran. So a step that
fails, or an agent that is killed, leaves the environments of earlier generations as they were.

    <root>/own/<number>  environments of this pod alone

The pod's own environments are removed when the agent starts again, as the files of a container are:
the agent runs the steps anew.
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
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import structs

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
from kubetorch.pod.tuning import LIMITS
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


_log = logging.getLogger(__name__)


class RanSteps(NamedTuple):
    """The steps that a pod has run, and what they made.

    Attributes:
        base: Identity of the interpreter that the steps were run on.
        steps: The steps.
        venv_number: The number of the pod's own environment; `None` without one.
        generation: The generation whose steps are all run; 0 while some are left.
    """

    base: str = ""
    steps: tuple[Step, ...] = ()
    venv_number: int | None = None
    generation: int = 0


class StepRecords:
    """Remembers the steps that a pod has run, and owns the environments of the pod alone."""

    def __init__(self, root: Path) -> None:
        self._environments = root / "own"
        shutil.rmtree(self._environments, ignore_errors=True)
        self._used: deque[Path] = deque(maxlen=LIMITS.recent_venvs)
        self._last_number = 0
        #: The steps that the pod ran last.
        self.last_run = RanSteps()
        #: The variables that the pod's images have set so far, apart from those of environments.
        self.variables: dict[str, str] = {}

    def discard_stale(self, base: str) -> None:
        """Forget steps that ran on another base, or whose environment user code has removed."""
        venv_number = self.last_run.venv_number
        if self.last_run.base != base or (
            venv_number is not None and not self.private_venv(venv_number).is_dir()
        ):
            self.last_run = RanSteps(base)

    def todo(self, generation: int, steps: Sequence[Step]) -> Plan:
        """The steps to run for a generation; none for a generation that was prepared before."""
        if self.last_run.generation == generation and self.last_run.steps == tuple(steps):
            return Plan(len(steps), ())
        return plan(self.last_run.steps, steps)

    def environ(self, environ: Mapping[str, str], steps: Sequence[Step]) -> dict[str, str]:
        """The variables before any step: variables that no step sets any more keep their values."""
        names_of_steps = {step.name for step in steps if isinstance(step, EnvStep)}
        lasting_variables = {
            name: value for name, value in self.variables.items() if name not in names_of_steps
        }
        return {**environ, **lasting_variables}

    def private_venv(self, number: int) -> Path:
        return self._environments / str(number)

    def new_venv_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def use(self, venv: Path | None) -> None:
        """Workers will use this environment; remove those that no worker can use any more."""
        if venv is not None:
            self._used.append(venv)
        needed = set(self._used)
        if self.last_run.venv_number is not None:
            needed.add(self.private_venv(self.last_run.venv_number))
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
        """Report that a step begins, or is skipped."""
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


class Preparation(msgspec.Struct, eq=False, dict=True):
    """One run of an image's steps for a generation."""

    generation: int
    images: Images
    image: ImageSpec
    spec: WorkloadSpec
    base_environ: Mapping[str, str]
    progress: StepReports

    def __post_init__(self) -> None:
        self._python = interpreter(self.spec)
        self._folder = self.images.working_dir
        self._uv = ""
        self._base = ""
        #: The number of the step that runs.
        self.step_number = 0
        #: True once an environment was added to the shared environments.
        self.has_shared_venv = False
        #: The entries of `sys.path` that copied packages are imported from.
        self.path: tuple[str, ...] = ()

    async def run(self) -> Path | None:
        """Run the steps that have to run; returns the workers' environment, if there is one."""
        steps, runtime = self.image.steps, self.spec.runtime
        allowed = (step for step in steps if self._refused_manager(step) is None)
        if any(image_steps.needs_own_paths(step, self.image) for step in allowed):
            await self.images.filesystem.shield(frozen=runtime.path)
        if any(image_steps.needs_environment(step) for step in steps):
            self._uv = venvs.find_uv()
            self._base = await asyncio.to_thread(
                venvs.base_digest, self._python, runtime.version, runtime.site
            )
        records = self.images.records
        records.discard_stale(self._base)
        todo = records.todo(self.generation, steps)
        shared_count = image_steps.shared_steps(self.image)
        venv = await self._share(shared_count)
        venv_number = records.last_run.venv_number if todo.unchanged_count >= shared_count else None
        for number, step in enumerate(steps):
            self.step_number = number
            if isinstance(step, WorkdirStep):  # its folder is that of the steps after it
                self._folder = posixpath.join(self.images.working_dir, step.path)
            if number < todo.unchanged_count:
                continue
            if isinstance(step, PipStep):
                if number >= shared_count:
                    install_step = image_steps.installation(steps, number, len(steps))
                    if install_step is None:
                        continue  # a later step's command installs this requirement
                    self._announce(number, install_step)
                    venv_number = await self._run_in_copy(
                        number, install_step, self._private_venv(venv_number) or venv
                    )
                records.last_run = RanSteps(self._base, steps[: number + 1], venv_number)
                continue
            self._announce(number, step)
            if isinstance(step, (CopyStep, WorkdirStep)):
                await self._write(step, self.environ(number, venv))
            elif isinstance(step, RunStep) and self._refused_manager(step) is None:
                self._check_rights(step)
                venv_number = await self._run_in_copy(
                    number, step, self._private_venv(venv_number) or venv
                )
            records.last_run = RanSteps(self._base, steps[: number + 1], venv_number)
        packages = [step for step in steps if isinstance(step, CopyStep) and step.is_package]
        entries = (entry for step in packages for entry in self.images.copier.entries(step))
        self.path = tuple(dict.fromkeys(entries))
        if not any(image_steps.needs_environment(step) for step in steps[shared_count:]):
            venv_number = None
        records.last_run = RanSteps(self._base, steps, venv_number, self.generation)
        # Without an environment, whose folder must not stay in variables of later generations.
        final_environ = self.environ(len(steps), None)
        declared_variables = dict(self.spec.compute.env_vars)
        names_of_steps = (step.name for step in steps if isinstance(step, EnvStep))
        records.variables.update(
            {name: final_environ[name] for name in names_of_steps if name not in declared_variables}
        )
        return self._private_venv(venv_number) or venv

    def environ(self, count: int, venv: Path | None) -> dict[str, str]:
        """The variables after so many steps."""
        initial_environ = self.images.records.environ(self.base_environ, self.image.steps)
        if venv is not None:
            initial_environ = image_steps.without_locations(initial_environ)
        env_steps = [step for step in self.image.steps[:count] if isinstance(step, EnvStep)]
        variables = worker_environ(initial_environ, self.images.pod, self.spec, env_steps)
        if venv is not None:
            downloads = self.images.shared.downloads
            variables = image_steps.venv_variables(variables, venv=venv, downloads=downloads)
        return variables

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

    def _refused_manager(self, step: Step) -> str | None:
        """The package manager that a step calls, where package managers are not allowed."""
        if self.spec.runtime.package_managers or not isinstance(step, RunStep):
            return None
        return image_steps.package_manager(step.command)

    def _check_rights(self, step: Step) -> None:
        """Refuse a package manager without root, which would only say it cannot open its lock."""
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
        refused_manager = self._refused_manager(step)
        if refused_manager is not None:
            text = (
                f"skipped {image_steps.describe(step)!r}: {refused_manager} installs into the "
                "machine; KT_PACKAGE_MANAGERS=true allows it in the pod's own view of the "
                "machine's files"
            )
        elif isinstance(step, UserStep):
            is_container = self.images.filesystem.is_container
            user = "its container says" if is_container else "the user of this machine"
            text = f"USER {step.user} has no effect: the pod runs as {user}"
        elif isinstance(step, EnvStep):
            return
        is_warning = refused_manager is not None or isinstance(step, UserStep)
        self.progress.on_step(text, number + 1, len(self.image.steps), warning=is_warning)

    # ------------------------------------------------------------------------------- environments

    async def _share(self, count: int) -> Path | None:
        """The shared environment after so many steps; `None` if they install no package."""
        # The installing steps, each with the digest of the environment that it makes.
        chain = []
        digest = self._base
        for number, step in enumerate(self.image.steps[:count]):
            install_step = None
            if isinstance(step, PipStep):
                install_step = image_steps.installation(self.image.steps, number, count)
            if install_step is not None:
                digest = image_steps.digest(
                    digest, install_step.requirement, self.environ(number, None)
                )
                chain.append((number, install_step, digest))
        if not chain:
            return None
        shared, venv = self.images.shared, None
        # The longest part of the chain whose environment exists; only the rest is installed.
        ready_count = len(chain)
        while ready_count and venv is None:
            venv = shared.use(chain[ready_count - 1][2])
            ready_count -= venv is None
        for number, step, digest in chain[ready_count:]:
            self.step_number = number
            self._announce(number, step)
            venv = await self._make_shared(number, step, venv, digest)
        return venv

    async def _make_shared(
        self, number: int, step: PipStep, venv: Path | None, digest: str
    ) -> Path:
        shared = self.images.shared
        new_venv = shared.new()
        try:
            await self._copy(venv, new_venv)
            await self._install(number, step, new_venv)
            shared_venv = await asyncio.to_thread(shared.publish, new_venv, digest)
        finally:
            await asyncio.to_thread(shutil.rmtree, new_venv, ignore_errors=True)
        self.has_shared_venv = True
        return shared_venv

    def _private_venv(self, number: int | None) -> Path | None:
        return None if number is None else self.images.records.private_venv(number)

    async def _run_in_copy(self, number: int, step: PipStep | RunStep, venv: Path | None) -> int:
        """Run a step in a copy of an environment, for this pod alone; the number of the copy."""
        venv_number = self.images.records.new_venv_number()
        new_venv = self.images.records.private_venv(venv_number)
        try:
            await self._copy(venv, new_venv)
            await self._install(number, step, new_venv)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, new_venv, ignore_errors=True)
            raise
        return venv_number

    async def _copy(self, venv: Path | None, target: Path) -> None:
        try:
            if venv is not None:
                await asyncio.to_thread(venvs.clone, venv, target)
                return
            target.parent.mkdir(parents=True, exist_ok=True)
            command = venvs.create_command(self._uv, self._python, target)
            await self._run(
                self.image.steps[self.step_number], command, self.environ(0, target), "/"
            )
            await asyncio.to_thread(venvs.finish_creation, target, self.spec.runtime.site, self._uv)
        except OSError as error:
            raise self._failure(error) from error

    async def _install(self, number: int, step: PipStep | RunStep, venv: Path) -> None:
        environ = self.environ(number, venv)
        environ = image_steps.installer_variables(environ, python=venvs.python_of(venv))
        try:
            site_packages = await asyncio.to_thread(venvs.site_packages, venv)
            await asyncio.to_thread(venvs.put_stand_ins, site_packages, self.spec.runtime.site)
            command = (
                image_steps.watched(step.command)
                if isinstance(step, RunStep)
                else (f"{self.image.install_cmd or f'${INSTALL_VARIABLE}'} {step.requirement}")
            )
            await self._run(step, command, environ, self._folder)
            await asyncio.to_thread(venvs.remove_stand_ins, site_packages)
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> ImageStepError:
        return image_steps.failure(self.image.steps[self.step_number], f"could not be run: {error}")


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
        self._preparing = asyncio.Lock()
        self._collecting: asyncio.Task[None] | None = None

    def needs_project(self, generation: int, spec: WorkloadSpec) -> bool:
        """True if steps of a generation may look for its code."""
        image = spec.compute.image
        if image is None or spec.compute.freeze:
            return False
        unchanged_count = self.records.todo(generation, image.steps).unchanged_count
        shared_count = image_steps.shared_steps(image)
        return any(
            not isinstance(step, EnvStep)
            and (number >= shared_count or not isinstance(step, PipStep))
            for number, step in enumerate(image.steps[unchanged_count:], start=unchanged_count)
        )

    async def prepare(
        self, generation: int, spec: WorkloadSpec, environ: Mapping[str, str]
    ) -> Prepared:
        """Run the steps that have to run; returns what workers start with."""
        image, runtime, python = spec.compute.image, spec.runtime, interpreter(spec)
        if spec.compute.freeze or image is None or not image.steps:
            base_environ = environ if spec.compute.freeze else self.records.environ(environ, ())
            env = worker_environ(base_environ, self.pod, spec)
            return self._remember(spec, Prepared(python, env, runtime.path))
        async with self._preparing:
            progress = StepReports(generation, self._session, self._on_line)
            preparation = Preparation(generation, self, image, spec, environ, progress)
            seconds = float(spec.compute.launch_timeout)
            try:
                async with deadlines.timeout(seconds):
                    venv = await preparation.run()
            except TimeoutError:
                step = image.steps[preparation.step_number]
                raise image_steps.failure(step, f"did not end within {seconds:.0f} s") from None
            await asyncio.to_thread(self.records.use, venv)
        if preparation.has_shared_venv and (self._collecting is None or self._collecting.done()):
            self._collecting = asyncio.get_running_loop().create_task(self._collect())
        prepared = Prepared(
            python if venv is None else venvs.python_of(venv),
            preparation.environ(len(image.steps), venv),
            tuple(dict.fromkeys((*preparation.path, *runtime.path))),
        )
        return self._remember(spec, prepared)

    def _remember(self, spec: WorkloadSpec, prepared: Prepared) -> Prepared:
        path = (str(self._commands.packages), *prepared.sys_path)
        prepared = structs.replace(prepared, sys_path=path)
        self._prepared = spec, prepared
        return prepared

    async def run_now(self, order: RunStepNow, on_line: OnLine) -> int:
        """Run a step in the pod, without a change of its image; returns the exit code."""
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
