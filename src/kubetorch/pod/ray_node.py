"""The Ray node of a pod: `ray start`, on the head and on the pods that join it.

Options as of https://docs.ray.io/en/latest/cluster/cli.html. Where KubeRay runs the cluster, its
own containers have started Ray already, with what their image has, and no node is started here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence

from kubetorch.errors import ProtocolError, ResourceNotAvailableError, StartupError
from kubetorch.lib import async_http, deadlines
from kubetorch.pod.node_process import NodeProcess

#: Set by KubeRay in the containers of a RayCluster.
OPERATED = "KUBERAY_GEN_RAY_START_CMD"
#: Where KubeRay's probes ask if the node is part of the cluster, and the option for its port.
_HEALTH = "http://127.0.0.1:{port}/api/local_raylet_healthz"
_HEALTH_PORT = re.compile(r"--dashboard-agent-listen-port[= ](\d+)")
#: Seconds that one such question may take.
_HEALTH_TIMEOUT = 5.0
#: What `ray start --block` prints once the node is there.
_STARTED = "Ray runtime started"
#: Seconds between two attempts to join a head that is not there yet, and between two questions.
_AGAIN = 0.5
_RAY = "import sys; from ray.scripts.scripts import main; sys.argv[0] = 'ray'; main()"


def is_lacking(environ: Mapping[str, str]) -> bool:
    """True if KubeRay runs the cluster and the image, as it is now, has no Ray to start."""
    return OPERATED in environ and shutil.which("ray", path=environ.get("PATH")) is None


def lacking_error(pod_name: str) -> ResourceNotAvailableError:
    """The error of a service whose image `is_lacking`."""
    return ResourceNotAvailableError(
        f"the image of pod {pod_name} has no Ray: KubeRay starts Ray with the container, before "
        "any step of the image runs",
        hint='use an image that has Ray and bash, such as kt.images.ray("2.53.0")',
    )


async def wait_until_joined(environ: Mapping[str, str], timeout: float) -> None:
    """Wait until the node that KubeRay has started is part of the cluster.

    Raises:
        StartupError: It is not after so many seconds.
    """
    found = _HEALTH_PORT.search(environ[OPERATED])
    url = _HEALTH.format(port=found[1] if found else 52365)
    said = "nothing"
    try:
        async with deadlines.timeout(timeout):
            while True:
                with contextlib.suppress(OSError, asyncio.TimeoutError, ProtocolError):
                    async with async_http.fetch(
                        "GET", url, {}, connect_timeout=_HEALTH_TIMEOUT, timeout=_HEALTH_TIMEOUT
                    ) as answer:
                        said = (await answer.read(1000, timeout=_HEALTH_TIMEOUT)).decode()
                if said == "success":
                    return
                await asyncio.sleep(_AGAIN)
    except (TimeoutError, asyncio.TimeoutError):
        raise StartupError(
            f"Ray of this pod is not part of the cluster after {timeout:.0f} s: {url} says {said}",
            hint="kt logs shows what `ray start` printed",
        ) from None


def job_environ(paths: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """The variable by which processes of a Ray that an operator started find the user's code.

    They were started before the code came, and `ray.init` sends them what this says.
    """
    inherited = env.get("PYTHONPATH", "").split(os.pathsep)
    found = os.pathsep.join(filter(None, [*paths, *inherited]))
    config = {"runtime_env": {"env_vars": {"PYTHONPATH": found}}}
    return {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(config)}


class RayNode:
    """A node of a Ray cluster, as the processes below `ray start --block`."""

    def __init__(self, python: str, env: Mapping[str, str], on_line: Callable[[str], None]) -> None:
        self._python = python
        own = {name: value for name, value in env.items() if name != "RAY_ADDRESS"}
        self._process = NodeProcess(own, on_line)

    async def start(self, host: str, port: int, *, own_host: str, is_head: bool) -> None:
        """Start the node; it is part of the cluster at `host:port` then. Waits for a head.

        Raises:
            ResourceNotAvailableError: The interpreter of the workers has no Ray.
            StartupError: Ray does not start.
        """
        options = [f"--node-ip-address={own_host}", "--disable-usage-stats", "--block"]
        if is_head:
            folder = f"--temp-dir={self._process.folder}"
            options += ["--head", f"--port={port}", "--include-dashboard=false", folder]
        else:
            options += [f"--address={host}:{port}"]
        command = (self._python, "-c", _RAY, "start", *options)
        while not await self._process.start(command, _STARTED):
            lines = self._process.lines
            if any("No module named 'ray'" in line for line in lines):
                raise ResourceNotAvailableError(
                    f"{self._python} has no Ray, which a service that is distributed as ray needs",
                    hint='kt.Image().pip_install(["ray[default]"]) installs it',
                )
            if is_head:
                said = "\n".join(lines)
                raise StartupError(f"the head of the Ray cluster did not start:\n{said}")
            await asyncio.sleep(_AGAIN)

    @property
    def is_alive(self) -> bool:
        return not self._process.has_ended

    async def kill(self) -> None:
        """End all processes of the node."""
        await self._process.kill()
