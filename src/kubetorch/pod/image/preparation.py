"""Running the steps of one generation's image.

Requirements that lead the steps are installed into environments that all pods of the machine share,
each on top of the one before it. From the first command on environments are the pod's own: a step
gets a copy of the one before it, and what was run is remembered after each. So a step that fails,
or an agent that is killed, leaves the environments of earlier generations as they were.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from pathlib import Path

from kubetorch.errors import ImageStepError
from kubetorch.lib.records import record
from kubetorch.pod.environment import expand
from kubetorch.pod.image import recipes, running, venvs
from kubetorch.pod.image.copying import Copying
from kubetorch.pod.image.records import Ran, Records
from kubetorch.pod.image.running import Place, Progress
from kubetorch.pod.image.store import Store
from kubetorch.pod.view import PodView
from kubetorch.specs.image import (
    INSTALL_VARIABLE,
    CopyStep,
    EnvStep,
    ImageSpec,
    PipStep,
    RunStep,
    Step,
    UserStep,
    WorkdirStep,
)
from kubetorch.specs.workload import RuntimeSpec


@record
class Tools:
    """What runs steps.

    Attributes:
        records: What the pod ran.
        shared: Environments that all pods share.
        view: The pod's view of the file system.
        copying: Copies files.
        working_dir: The pod's working directory.
    """

    records: Records
    shared: Store
    view: PodView
    copying: Copying
    working_dir: str


class Preparation:
    """One run.

    Args:
        generation: The generation.
        tools: What runs steps.
        image: The image.
        runtime: The interpreter that environments are made from, and what is installed in it.
        python: Its path.
        environ: Environment of the workers, without the image.
        progress: Told how far it is.
    """

    def __init__(
        self,
        generation: int,
        tools: Tools,
        image: ImageSpec,
        runtime: RuntimeSpec,
        python: str,
        environ: dict[str, str],
        progress: Progress,
    ) -> None:
        self._generation = generation
        self._tools = tools
        self._image = image
        self._runtime = runtime
        self._python = python
        self._environ = environ
        self._progress = progress
        self._folder = tools.working_dir
        self._uv = ""
        self._base = ""
        #: The step that is run now.
        self.at = 0
        #: Whether an environment was added to the shared ones.
        self.has_made = False
        #: What copied packages are imported from.
        self.path: tuple[str, ...] = ()

    async def run(self) -> Path | None:
        """Run what has to be run; the environment of the workers, if the image needs one.

        Raises:
            ImageStepError: A step failed.
            ResourceNotAvailableError: The machine does not allow what a step needs.
        """
        steps, runtime = self._image.steps, self._runtime
        if self._needs_view():
            await self._tools.view.shield(frozen=runtime.path)
        if any(recipes.needs_environment(step) for step in steps):
            self._uv = venvs.find_uv()
            self._base = await asyncio.to_thread(
                venvs.base_digest, self._python, runtime.version, runtime.site
            )
        records = self._tools.records
        if records.ran.base != self._base:
            records.ran = Ran(self._base)
        todo = records.todo(self._generation, steps)
        shared = recipes.shared_steps(self._image)
        venv = await self._share(shared)
        own = records.ran.own if todo.kept >= shared else None
        for number, step in enumerate(steps):
            self.at = number
            self._follow(step)
            if number < todo.kept:
                continue
            self._announce(number, step)
            if isinstance(step, CopyStep):
                place = Place(self.environ(number, venv), "/")
                await self._tools.copying.run(step, place, self._progress)
            elif isinstance(step, WorkdirStep):
                place = Place(self.environ(number, venv), "/")
                await running.program(
                    step, ["/bin/mkdir", "-p", self._folder], place, self._progress
                )
            elif number >= shared and self._is_run(step):
                self._check_rights(step)
                own = await self._run_in_copy(number, step, self._own(own) or venv)
            records.ran = Ran(self._base, steps[: number + 1], own)
        self._find_packages()
        if not any(recipes.needs_environment(step) for step in steps[shared:]):
            own = None
        records.ran = Ran(self._base, steps, own, self._generation)
        # Without an environment: its folder is no part of what a variable keeps.
        after = self.environ(len(steps), None)
        named = (step.name for step in steps if isinstance(step, EnvStep))
        records.variables.update({name: after[name] for name in named})
        return self._own(own) or venv

    def environ(self, count: int, venv: Path | None) -> dict[str, str]:
        """The variables after so many steps.

        Args:
            count: How many.
            venv: The environment to use.
        """
        found = self._tools.records.environ(self._environ, self._image.steps)
        if venv is not None:
            downloads = self._tools.shared.downloads
            found = running.variables(found, venv=venv, downloads=downloads)
        for step in self._image.steps[:count]:
            if isinstance(step, EnvStep):
                found[step.name] = expand(step.value, found)
        return found

    # ------------------------------------------------------------------------------------ walking

    def _follow(self, step: Step) -> None:
        """What a step means for those after it, whether it is run or not."""
        if isinstance(step, WorkdirStep):
            base = self._tools.working_dir
            self._folder = step.path if step.path.startswith("/") else f"{base}/{step.path}"

    def _find_packages(self) -> None:
        packages = [s for s in self._image.steps if isinstance(s, CopyStep) and s.is_package]
        entries = (entry for step in packages for entry in self._tools.copying.entries(step))
        self.path = tuple(dict.fromkeys(entries))

    def _needs_view(self) -> bool:
        steps = (step for step in self._image.steps if self._refused(step) is None)
        return any(recipes.needs_view(step, self._image) for step in steps)

    def _refused(self, step: Step) -> str | None:
        """The package manager that a step calls, where that is not allowed."""
        if self._runtime.package_managers or not isinstance(step, RunStep):
            return None
        return recipes.package_manager(step.command)

    def _is_run(self, step: Step) -> bool:
        return isinstance(step, (PipStep, RunStep)) and self._refused(step) is None

    def _check_rights(self, step: Step) -> None:
        """Say what is wrong better than a package manager does, which only cannot open its lock."""
        if not (self._tools.view.is_container and isinstance(step, RunStep) and os.geteuid()):
            return
        manager = recipes.package_manager(step.command)
        if manager is not None and not re.search(r"\bsudo\b", step.command):
            error = running.failure(
                step,
                f"cannot be run: {manager} needs root, and the container runs as user "
                f"{os.geteuid()}",
            )
            error.hint = "let the container run as root, or have the package in its image"
            raise error

    def _announce(self, number: int, step: Step) -> None:
        text = f"{recipes.describe(step)} ({number + 1}/{len(self._image.steps)})"
        refused = self._refused(step)
        if refused is not None:
            text = (
                f"skipped {recipes.describe(step)!r}: {refused} installs into the machine; "
                "KT_PACKAGE_MANAGERS=true allows it in the pod's own view of the machine's files"
            )
        elif isinstance(step, UserStep):
            is_container = self._tools.view.is_container
            whose = "its container says" if is_container else "the user of this machine"
            text = f"USER {step.user} has no effect: the pod runs as {whose}"
        elif isinstance(step, EnvStep):
            return
        is_warning = refused is not None or isinstance(step, UserStep)
        self._progress.on_step(text, warning=is_warning)

    # ------------------------------------------------------------------------------- environments

    async def _share(self, count: int) -> Path | None:
        """The shared environment after so many steps; `None` while there is nothing installed."""
        chain = []
        digest = self._base
        for number, step in enumerate(self._image.steps[:count]):
            if isinstance(step, PipStep):
                digest = recipes.digest(digest, step.requirement, self.environ(number, None))
                chain.append((number, step, digest))
        if not chain:
            return None
        shared, venv = self._tools.shared, None
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
        shared = self._tools.shared
        made = shared.new()
        try:
            await self._copy(venv, made)
            await self._install(step, Place(self.environ(number, made), self._folder), made)
            found = await asyncio.to_thread(shared.publish, made, digest)
        finally:
            await asyncio.to_thread(shutil.rmtree, made, ignore_errors=True)
        self.has_made = True
        return found

    def _own(self, number: int | None) -> Path | None:
        return None if number is None else self._tools.records.own(number)

    async def _run_in_copy(self, number: int, step: Step, venv: Path | None) -> int:
        """Run a step in a copy of an environment, for this pod alone; the number of the copy."""
        own = self._tools.records.new_own()
        made = self._tools.records.own(own)
        try:
            await self._copy(venv, made)
            await self._install(step, Place(self.environ(number, made), self._folder), made)
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
            place = Place(self.environ(0, target), "/")
            step = self._image.steps[self.at]
            await running.program(step, command, place, self._progress)
            await asyncio.to_thread(venvs.finish_creation, target, self._runtime.site, self._uv)
        except OSError as error:
            raise self._broken(error) from error

    async def _install(self, step: Step, place: Place, venv: Path) -> None:
        try:
            own = await asyncio.to_thread(venvs.site_packages, venv)
            await asyncio.to_thread(venvs.put_stand_ins, own, self._runtime.site)
            await running.shell(step, self._command(step), place, self._progress)
            await asyncio.to_thread(venvs.remove_stand_ins, own)
        except OSError as error:
            raise self._broken(error) from error

    def _command(self, step: Step) -> str:
        if isinstance(step, PipStep):
            install = self._image.install_cmd or f"${INSTALL_VARIABLE}"
            return f"{install} {step.requirement}"
        assert isinstance(step, RunStep)
        return running.background(step.command)

    def _broken(self, error: OSError) -> ImageStepError:
        return running.failure(self._image.steps[self.at], f"could not be run: {error}")
