"""Which Python runs the user's code.

On the local backend the deploy says it: the one that called. A container has its own, which is
looked for when the agent starts: the one that the image is declared with, a virtual environment
that is active in it, and what its PATH has.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from kubetorch.errors import PodContainerError
from kubetorch.lib import deadlines, processes, spawning
from kubetorch.lib import runtime as own_runtime
from kubetorch.lib.commands import Output
from kubetorch.specs.workload import RuntimeSpec, WorkloadSpec
from kubetorch.wire.podenv import PodEnv

#: The oldest Python that workers run on.
OLDEST = (3, 10)
#: Seconds that one interpreter has to say what it is, and all together. One that cannot run says so
#: at once; one that can is slow to start in a small pod on a full node, which dooms no launch.
PATIENCE = 30.0
_TOTAL = 60.0
#: Names to look for.
NAMES = ("python3", "python", *(f"python3.{minor}" for minor in range(16, OLDEST[1] - 1, -1)))
#: Where images have it whose PATH does not say so.
FOLDERS = ("/usr/local/bin", "/opt/venv/bin", "/opt/conda/bin", "/usr/bin", "/bin")

_PROBE = """
import json, os, site, sys
folders = ([site.getusersitepackages()] if site.ENABLE_USER_SITE else []) + site.getsitepackages()
found = [sys.executable, list(sys.version_info[:3]), [f for f in folders if os.path.isdir(f)]]
print("kubetorch " + json.dumps(found))
"""


class Found(msgspec.Struct, frozen=True):
    """An interpreter.

    Attributes:
        path: Where it lies.
        version: Its version.
        site: Folders that its packages are installed in.
    """

    path: str
    version: tuple[int, ...]
    site: tuple[str, ...]


class Interpreters:
    """Finds the interpreter of a container, once for each thing that an image may say of it.

    Args:
        pod: Who the pod is.
        environ: The environment of the container.
        own: The agent's interpreter, where the user's code is to run on it unless an image says
            otherwise: the agent was installed there.
    """

    def __init__(self, pod: PodEnv, environ: Mapping[str, str], own: str | None = None) -> None:
        self._pod = pod
        self._environ = environ
        self._own = own
        self._looking: dict[str, asyncio.Task[Found | list[str]]] = {}

    def begin(self) -> None:
        """Look already, for an image that says nothing."""
        if self._pod.backend != "local":
            self._look("")

    async def settle(self, spec: WorkloadSpec) -> WorkloadSpec:
        """The workload with the interpreter that it runs on here.

        Raises:
            PodContainerError: There is none that is new enough.
        """
        if self._pod.backend == "local":
            return spec
        image = spec.compute.image
        wanted = (image.python_path if image is not None else None) or ""
        found = await asyncio.shield(self._look(wanted))
        if isinstance(found, Found):
            runtime = RuntimeSpec(
                python=found.path,
                version=".".join(map(str, found.version)),
                preload=spec.runtime.preload,
                site=found.site,
                package_managers=True,
            )
            return replace(spec, runtime=runtime)
        del self._looking[wanted]  # a command in the running pod may put it right
        name = (image.image_id if image is not None else None) or f"of pod {self._pod.pod}"
        oldest = ".".join(map(str, OLDEST))
        where = f" at {wanted}, where it is declared to be" if wanted else ""
        raise PodContainerError(
            f"the image {name} has no Python {oldest} or newer{where}; found: "
            f"{', '.join(found) or 'none'}",
            hint=f"use an image with Python {oldest} or newer on its PATH, or say where it is with "
            "kt.Image(python_path=...)",
        )

    def _look(self, wanted: str) -> asyncio.Task[Found | list[str]]:
        if wanted not in self._looking:
            loop = asyncio.get_running_loop()
            self._looking[wanted] = loop.create_task(self._find(wanted))
        return self._looking[wanted]

    async def _find(self, wanted: str) -> Found | list[str]:
        """An interpreter that is new enough; else what was found."""
        seen: list[str] = []
        try:
            async with deadlines.timeout(_TOTAL):
                for path in candidates(wanted, self._environ, self._own):
                    found = await _probe(path, self._environ)
                    if found is not None and found.version >= OLDEST:
                        return found
                    said = "does not run" if found is None else ".".join(map(str, found.version))
                    seen.append(f"{path} ({said})")
        except TimeoutError:
            seen.append(f"nothing more within {_TOTAL:g} s")
        return seen


def candidates(wanted: str, environ: Mapping[str, str], own: str | None) -> Iterator[str]:
    """Where to look, the best first, each interpreter once."""
    if wanted:
        paths = iter([wanted] if Path(wanted).is_file() else [f"{wanted}/{n}" for n in NAMES])
    else:
        paths = _usual(environ, own)
    seen = set()
    for path in paths:
        if not (os.access(path, os.X_OK) and Path(path).is_file()):
            continue
        folder = Path(path).parent
        is_venv = (folder.parent / "pyvenv.cfg").exists()
        # The program of a virtual environment is a link to the one that it was made from.
        identity = str(folder) if is_venv else os.path.realpath(path)
        if identity not in seen:
            seen.add(identity)
            yield path


def _usual(environ: Mapping[str, str], own: str | None) -> Iterator[str]:
    if own is not None:
        yield own
    if environ.get("VIRTUAL_ENV"):
        yield f"{environ['VIRTUAL_ENV']}/bin/python"
    folders = [each for each in environ.get("PATH", "").split(os.pathsep) if each]
    for folder in dict.fromkeys((*folders, *FOLDERS)):
        for name in NAMES:
            yield f"{folder}/{name}"


async def _probe(path: str, environ: Mapping[str, str]) -> Found | None:
    """What an interpreter says of itself; `None` if it is none that runs."""
    lines: list[str] = []
    reader, writer = os.pipe()
    output = Output(reader, lines.append)
    try:
        pid = spawning.spawn((path, "-c", _PROBE), environ, output=writer, errors=2)
    except OSError:
        output.close()
        return None
    finally:
        os.close(writer)
    ended = asyncio.Event()
    watch = processes.ExitWatch(pid, ended.set)
    try:
        async with deadlines.timeout(PATIENCE):
            await ended.wait()
    except BaseException as error:
        watch.close()
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        if not isinstance(error, TimeoutError):
            raise
    finally:
        output.drain()
        output.close()
        processes.reap(pid)
    for line in lines:
        if line.startswith("kubetorch "):
            executable, version, site = json.loads(line.partition(" ")[2])
            return Found(executable or path, tuple(version), tuple(site))
    return None


def of_agent() -> str | None:
    """The agent's interpreter, where it is the user's too."""
    return None if own_runtime.is_used() else sys.executable
