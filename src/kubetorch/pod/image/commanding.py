"""Running a step in a pod that serves: `Compute.run_bash`, `pip_install` and `sync_package`.

The workers' environment is not touched: it may be one that others share. What is installed goes to
a folder of the pod's own that its workers import from first, so they find it without being started
again. It stays as long as the pod does.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from kubetorch.errors import ProtocolError
from kubetorch.lib import commands, deadlines
from kubetorch.pod.environment import Prepared
from kubetorch.pod.image import recipes, running, venvs
from kubetorch.pod.image.copying import Copying
from kubetorch.pod.image.running import Place
from kubetorch.pod.view import PodView
from kubetorch.specs.image import CopyStep, ImageSpec, PipStep, RunStep, Step

#: Exit code of what was ended because its time was over, as that of `timeout`.
TIMED_OUT = 124

#: Told of a line, and of where it was written.
OnLine = Callable[[str, str], None]

_PIP = """#!/bin/sh
if [ "$1" = install ]; then shift; exec {install} "$@"; fi
exec {python} -m pip "$@"
"""
_UV = """#!/bin/sh
if [ "$1 $2" = "pip install" ]; then shift 2; exec {install} "$@"; fi
exec {uv} "$@"
"""


class Commanding:
    """Runs steps.

    Args:
        root: Folder of the pod.
        working_dir: The pod's working directory.
        view: The file system as the pod sees it.
        copying: Copies files.
        downloads: Where uv keeps what it downloaded.
    """

    def __init__(
        self, root: Path, working_dir: str, view: PodView, copying: Copying, downloads: Path
    ) -> None:
        self._programs = root / "bin"
        self._working_dir = working_dir
        self._view = view
        self._copying = copying
        self._downloads = downloads
        self._installing = asyncio.Lock()
        #: Where packages are installed that no image has.
        self.packages = root / "packages"
        self.packages.mkdir(parents=True, exist_ok=True)

    async def run(
        self,
        step: Step,
        image: ImageSpec | None,
        prepared: Prepared,
        site: Sequence[str],
        on_line: OnLine,
        *,
        frozen: Sequence[str],
        timeout: float,
    ) -> int:
        """Run a step; its exit code.

        Args:
            step: The step.
            image: The image of the pod.
            prepared: What its workers were started with.
            site: Folders that packages are installed in.
            on_line: Told of each line.
            frozen: Folders of the machine that its workers import from, see `PodView.shield`.
            timeout: Seconds after which it is ended.

        Raises:
            ResourceNotAvailableError: The machine does not allow what the step needs.
            ImageStepError: A copy failed.
        """
        if recipes.needs_view(step, image or ImageSpec()):
            await self._view.shield(frozen)
        try:
            async with deadlines.timeout(timeout):
                return await self._run(step, image, prepared, site, on_line)
        except TimeoutError:
            on_line(f"ended after {timeout:g} s", "stderr")
            return TIMED_OUT

    async def _run(
        self,
        step: Step,
        image: ImageSpec | None,
        prepared: Prepared,
        site: Sequence[str],
        on_line: OnLine,
    ) -> int:
        environ = await asyncio.to_thread(self._environ, prepared)
        if isinstance(step, CopyStep):
            await self._copying.run(step, Place(environ, "/"), _Lines(on_line))
            if step.is_package:
                await asyncio.to_thread(self._link, step)
            return 0
        if isinstance(step, RunStep):
            return await self._shell(running.background(step.command), environ, on_line)
        if not isinstance(step, PipStep):
            raise ProtocolError(f"{step!r} cannot be run in a pod that serves")
        install = image.install_cmd if image is not None and image.install_cmd else "pip install"
        async with self._installing:
            await asyncio.to_thread(venvs.put_stand_ins, self.packages, site)
            try:
                return await self._shell(f"{install} {step.requirement}", environ, on_line)
            finally:
                await asyncio.to_thread(venvs.remove_stand_ins, self.packages)

    def _link(self, step: CopyStep) -> None:
        """Let a package be imported from where it was copied to."""
        target = Path(self._copying.target(step))
        modules = [target] if (target / "__init__.py").exists() else []
        for entry in () if modules else self._copying.entries(step):
            folders = [path.parent for path in Path(entry).glob("*/__init__.py")]
            modules += [*folders, *Path(entry).glob("*.py")]
        for module in modules:
            link = self.packages / module.name
            link.unlink(missing_ok=True)
            link.symlink_to(module)

    async def _shell(self, command: str, environ: dict[str, str], on_line: OnLine) -> int:
        return await commands.run(
            [running.SHELL, "-c", command],
            environ,
            folder=self._working_dir,
            on_line=lambda text: on_line(text, "stdout"),
            on_error_line=lambda text: on_line(text, "stderr"),
        )

    def _environ(self, prepared: Prepared) -> dict[str, str]:
        """The workers' variables, but that every installer installs for this pod alone."""
        python, uv = prepared.python, venvs.find_uv()
        target = ["--python", python, "--target", str(self.packages)]
        words = {
            "install": shlex.join([uv, "pip", "install", *target]),
            "python": shlex.quote(python),
            "uv": shlex.quote(uv),
        }
        self._programs.mkdir(exist_ok=True)
        for name, text in (("pip", _PIP), ("pip3", _PIP), ("uv", _UV)):
            program = self._programs / name
            program.write_text(text.format(**words))
            program.chmod(0o755)
        path = [str(self._programs), str(Path(python).parent), prepared.env.get("PATH", os.defpath)]
        found = {
            **prepared.env,
            "PATH": os.pathsep.join(path),
            "PYTHONPATH": os.pathsep.join(prepared.path),
            "PIP_TARGET": str(self.packages),
        }
        found.setdefault("UV_CACHE_DIR", str(self._downloads))
        found.pop("UV_SYSTEM_PYTHON", None)
        found.update(running.QUIET)
        return found


class _Lines:
    """The `running.Progress` of a step whose lines are wanted only."""

    def __init__(self, on_line: OnLine) -> None:
        self._on_line = on_line

    def on_step(self, message: str, *, warning: bool = False) -> None:
        """Nothing waits for steps."""

    def on_output(self, text: str) -> None:
        """A step wrote a line."""
        self._on_line(text, "stdout")
