"""Steps in a pod that serves (`POST /v1/run`): `Compute.run_bash`, `pip_install`, `sync_package`.

The workers' environment is not changed: other pods may share it. Packages are installed into a
folder of the pod's own that its workers import from first, so the workers find them without a
restart. The folder stays as long as the pod does.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from kubetorch.errors import ProtocolError
from kubetorch.lib import deadlines, process_watch
from kubetorch.lib.asgi import NDJSON, Request, Responder
from kubetorch.pod.environment import INTERPRETER_NAMES, Prepared
from kubetorch.pod.filesystem import PodFilesystem
from kubetorch.pod.image import image_steps, venvs
from kubetorch.pod.image.image_steps import Copier
from kubetorch.pod.tuning import LIMITS
from kubetorch.specs.image import CopyStep, ImageSpec, PipStep, RunStep
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import messages
from kubetorch.wire.pod_commands import RunEnd, RunLine, RunStepNow

#: Exit code of a command that was ended because its time was over, as that of `timeout`.
TIMED_OUT = 124

#: Receives a line, and the stream that it was written to.
OnLine = Callable[[str, str], None]

_PIP = """#!/bin/sh
if [ "$1" = install ]; then shift; exec {install} "$@"; fi
exec {python} -m pip "$@"
"""
_UV = """#!/bin/sh
flags=
for word; do
  case "$word" in -*) flags="$flags $word"; shift ;; *) break ;; esac
done
if [ "$1 $2" = "pip install" ]; then shift 2; exec {install} $flags "$@"; fi
exec {uv} $flags "$@"
"""
#: The names of pip, for each Python that workers run on.
_PIPS = ("pip", *(name.replace("python", "pip") for name in INTERPRETER_NAMES if name != "python"))


class CommandRunner(msgspec.Struct, eq=False, dict=True):
    root: Path
    working_dir: str
    filesystem: PodFilesystem
    copier: Copier
    downloads: Path

    def __post_init__(self) -> None:
        self._programs = self.root / "bin"
        self._installing = asyncio.Lock()
        #: The folder of packages that are installed beside the image's.
        self.packages = self.root / "packages"
        self.packages.mkdir(parents=True, exist_ok=True)

    async def run(
        self, order: RunStepNow, spec: WorkloadSpec, prepared: Prepared, on_line: OnLine
    ) -> int:
        step, image, runtime = order.step, spec.compute.image or ImageSpec(), spec.runtime
        if image_steps.needs_own_paths(step, image):
            await self.filesystem.shield(runtime.path)
        try:
            async with deadlines.timeout(order.timeout):
                environ = await asyncio.to_thread(self._environ, prepared)
                if isinstance(step, CopyStep):
                    await self.copier.run(step, environ, lambda text: on_line(text, "stdout"))
                    if step.is_package:
                        await asyncio.to_thread(self._link, step)
                    return 0
                if isinstance(step, RunStep):
                    return await self._shell(image_steps.watched(step.command), environ, on_line)
                if not isinstance(step, PipStep):
                    raise ProtocolError(f"{step!r} cannot be run in a pod that serves")
                install = image.install_cmd or "pip install"
                venv = Path(prepared.python).parents[1]
                venv_site = [str(path) for path in venv.glob("lib/python*/site-packages")]
                site = [*venv_site, *runtime.site]
                async with self._installing:
                    await asyncio.to_thread(venvs.put_stand_ins, self.packages, site)
                    try:
                        return await self._shell(f"{install} {step.requirement}", environ, on_line)
                    finally:
                        await asyncio.to_thread(venvs.remove_stand_ins, self.packages)
        except TimeoutError:
            on_line(f"ended after {order.timeout:g} s", "stderr")
            return TIMED_OUT

    def _link(self, step: CopyStep) -> None:
        """Link the modules of a copied package into the folder that workers import from first."""
        target = Path(self.copier.target(step))
        modules = [target] if (target / "__init__.py").exists() else []
        for entry in () if modules else self.copier.entries(step):
            folders = [path.parent for path in Path(entry).glob("*/__init__.py")]
            modules += [*folders, *Path(entry).glob("*.py")]
        for module in modules:
            link = self.packages / module.name
            link.unlink(missing_ok=True)
            link.symlink_to(module)

    async def _shell(self, command: str, environ: dict[str, str], on_line: OnLine) -> int:
        return await process_watch.run(
            [image_steps.SHELL, "-c", command],
            environ,
            folder=self.working_dir,
            on_line=lambda text: on_line(text, "stdout"),
            on_error_line=lambda text: on_line(text, "stderr"),
        )

    def _environ(self, prepared: Prepared) -> dict[str, str]:
        """The workers' variables, with installers that install for this pod alone."""
        python, uv = prepared.python, venvs.find_uv()
        target = ["--python", python, "--target", str(self.packages)]
        words = {
            "install": shlex.join([uv, "pip", "install", *target]),
            "python": shlex.quote(python),
            "uv": shlex.quote(uv),
        }
        # User code may have removed these folders.
        for folder in (self.working_dir, self._programs, self.packages):
            Path(folder).mkdir(parents=True, exist_ok=True)
        for name in (*_PIPS, "uv"):
            program = self._programs / name
            program.write_text((_UV if name == "uv" else _PIP).format(**words))
            program.chmod(0o755)
        path = [str(self._programs), str(Path(python).parent), prepared.env.get("PATH", os.defpath)]
        environ = {
            **image_steps.installer_variables(prepared.env, python=python),
            "PATH": os.pathsep.join(path),
            "PYTHONPATH": os.pathsep.join(prepared.sys_path),
            "PIP_TARGET": str(self.packages),
        }
        environ.setdefault("UV_CACHE_DIR", str(self.downloads))
        environ.update(image_steps.QUIET)
        return environ


async def run(
    request: Request, respond: Responder, run_step: Callable[[RunStepNow, OnLine], Awaitable[int]]
) -> None:
    """Run the step that a request describes. The step ends when the client disconnects."""
    order = messages.decode(RunStepNow, await request.body(LIMITS.step_body_bytes))
    lines: asyncio.Queue[RunLine | None] = asyncio.Queue(LIMITS.step_waiting_lines + 2)
    dropped = 0

    def on_line(text: str, source: str) -> None:
        nonlocal dropped
        if lines.qsize() < LIMITS.step_waiting_lines:
            lines.put_nowait(RunLine(text=text, source=source))
        else:
            dropped += 1

    step_task = asyncio.ensure_future(run_step(order, on_line))
    step_task.add_done_callback(lambda _: lines.put_nowait(None))
    disconnect = asyncio.ensure_future(request.disconnected())
    disconnect.add_done_callback(lambda _: step_task.cancel())
    try:
        while (line := await lines.get()) is not None:
            if not respond.has_begun:
                await respond.begin(200, NDJSON)
            await respond.write(messages.encode(line) + b"\n")
        if disconnect.done():
            return
        exit_code = await step_task
        if not respond.has_begun:
            await respond.begin(200, NDJSON)
        if dropped:
            last = RunLine(text=f"… {dropped} more lines", source="stderr")
            await respond.write(messages.encode(last) + b"\n")
        await respond.write(messages.encode(RunEnd(exit_code=exit_code)) + b"\n", more=False)
    finally:
        disconnect.cancel()
        step_task.cancel()
