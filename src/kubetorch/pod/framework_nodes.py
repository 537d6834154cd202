"""The node of a framework beside the workers of a pod: a node of a Ray cluster, or a Monarch host.

The user's program runs in a worker, and the nodes do its work. The options of Ray are those of
https://docs.ray.io/en/latest/cluster/cli.html. Where KubeRay runs the cluster, its own containers
have started the Ray of their image already, and this module starts no node. A Monarch host is
a worker loop: the program on the first pod attaches to the host, which starts the processes that
the program spawns on it: https://meta-pytorch.org/monarch/api/monarch.actor.html.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from kubetorch.errors import ProtocolError, ResourceNotAvailableError, StartupError
from kubetorch.lib import async_http, deadlines, process_watch, processes
from kubetorch.lib.process_watch import ExitWatch, Output
from kubetorch.pod.rank_environment import ray_host
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.specs.distribution import RAY_HEAD_PORTS, RAY_HEAD_VARIABLES, RAY_NODE_PORTS
from kubetorch.wire.messages import World

#: Variable that marks the processes that a node started.
MARKER = "KT_NODE"

#: Set by KubeRay in the containers of a RayCluster.
KUBERAY_START_COMMAND = "KUBERAY_GEN_RAY_START_CMD"
#: The URL of the KubeRay probe that says whether the node has joined, and the option of its port.
_HEALTH_URL = "http://127.0.0.1:{port}/api/local_raylet_healthz"
_HEALTH_PORT = re.compile(r"--dashboard-agent-listen-port[= ](\d+)")
#: Printed by `ray start --block` once the node has started.
_STARTED = "Ray runtime started"
#: Printed by `ray start` if a node took more than 30 s, as on a busy machine.
_STARTS_SLOWLY = "timed out during startup"
#: The program `ray`, without the port of the client server where that server's grpcio is missing.
_RAY_PROGRAM = f"""
import importlib.util, sys
from ray.scripts.scripts import main
refused = "--{RAY_HEAD_PORTS[0]}=" if importlib.util.find_spec("grpc") is None else "none"
sys.argv = ["ray", *(option for option in sys.argv[1:] if not option.startswith(refused))]
main()
"""

#: Printed once Monarch is imported.
_IMPORTED = "monarch is imported"
_MONARCH_PROGRAM = f"""
import sys
from monarch.actor import run_worker_loop_forever
print({_IMPORTED!r}, flush=True)
run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""


class Node:
    """A process of a framework with all the processes that it starts."""

    def __init__(self, python: str, env: Mapping[str, str], on_line: Callable[[str], None]) -> None:
        self._python = python
        # For the framework's files and sockets, whose paths may have 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="kt-node-"))
        value = secrets.token_hex(8)
        self._marker = f"{MARKER}={value}"
        node_variables = {"TMPDIR": str(self._folder), MARKER: value, "PYTHONUNBUFFERED": "1"}
        self._env = {**env, **node_variables}
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=LIMITS.framework_node_error_lines)
        # The output of the last attempt that failed, or what the node waits for.
        self._last_failure = ""
        # A line with this text says that the node has started.
        self._ready_text = ""
        self._pid = 0
        self._watch: ExitWatch | None = None
        self._output: Output | None = None
        # Set at each line of output and at the exit of the process.
        self._changed = asyncio.Event()
        self._is_ready = self._has_ended = False

    @property
    def is_alive(self) -> bool:
        return not self._has_ended

    @property
    def delay_reason(self) -> str:
        """Why the node has not started yet."""
        return self._last_failure or self._output_text or "it printed nothing"

    @property
    def _output_text(self) -> str:
        return "\n".join(self._lines)

    async def _run(self, *arguments: str, until: str) -> bool:
        """Run Python; returns true once a line with this text is printed, false if Python ends."""
        self._lines.clear()
        self._pid = 0
        self._ready_text = until
        self._is_ready = self._has_ended = False
        reader, writer = os.pipe()
        self._output = Output(reader, self._on_output_line)
        command = (self._python, "-c", *arguments)
        try:
            self._pid = processes.spawn(command, self._env, output=writer, errors=writer)
        finally:
            os.close(writer)
        self._watch = ExitWatch(self._pid, self._on_exit)
        while not self._has_ended and not self._is_ready:
            self._changed.clear()
            await self._changed.wait()
        return self._is_ready

    def _on_output_line(self, line: str) -> None:
        self._lines.append(line)
        self._is_ready = self._is_ready or self._ready_text in line
        if line != self._ready_text:
            self._on_line(line)
        self._changed.set()

    def _on_exit(self) -> None:
        self._has_ended = True
        if self._output is not None:
            self._output.drain()
            self._output.close()
        process_watch.reap(self._pid)
        self._changed.set()

    async def kill(self) -> None:
        if self._pid and not self._has_ended:
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with deadlines.timeout(TIMING.framework_node_stop_seconds):
                    while not self._has_ended:
                        self._changed.clear()
                        await self._changed.wait()
        await self._kill_rest()
        if self._watch is not None:
            self._watch.close()
        self._has_ended = True
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _kill_rest(self) -> None:
        """End leftover processes of the node: they may hold ports that the next attempt needs."""
        if self._pid:
            for pid in await asyncio.to_thread(self._kill_members):
                process_watch.reap(pid)

    def _kill_members(self) -> list[int]:
        if not self._has_ended or processes.start_time(self._pid) is None:
            return processes.kill_session(self._pid, marker=self._marker)
        # Another process has the number of the ended node, so nothing of its session is left.
        pids = processes.members(-1, marker=self._marker)
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        return pids


class RayNode(Node):
    """The processes below `ray start --block`."""

    def __init__(self, python: str, env: Mapping[str, str], on_line: Callable[[str], None]) -> None:
        node_env = {name: value for name, value in env.items() if name != "RAY_ADDRESS"}
        super().__init__(python, node_env, on_line)

    async def start(self, world: World, rank: int) -> None:
        """Start the node of this rank in a cluster; the nodes after the head, rank 0, wait for it.

        Workers listen where the system lets them: Ray would choose among 10002 to 19999.
        """
        is_head, port = rank == 0, world.ports[0]
        host, own_host = ray_host(world.members[0]), ray_host(world.members[rank])
        ports = ray_ports(world, rank)
        self._env |= {name: str(ports.pop(name)) for name in RAY_HEAD_VARIABLES if name in ports}
        options = [f"--node-ip-address={own_host}", "--disable-usage-stats", "--block"]
        options += ["--min-worker-port=0", "--max-worker-port=0"]
        options += [f"--{name}={number}" for name, number in ports.items()]
        if is_head:
            temp_dir_option = f"--temp-dir={self._folder}"
            options += ["--head", f"--port={port}", "--include-dashboard=false", temp_dir_option]
        else:
            options += [f"--address={host}:{port}"]
        while not await self._run(_RAY_PROGRAM, "start", *options, until=_STARTED):
            if any("No module named 'ray'" in line for line in self._lines):
                raise ResourceNotAvailableError(
                    f"{self._python} has no Ray, which a service that is distributed as ray needs",
                    hint='kt.Image().pip_install(["ray[default]"]) installs it',
                )
            text = self._output_text
            if is_head and _STARTS_SLOWLY not in text:
                raise StartupError(f"the head of the Ray cluster did not start:\n{text}")
            self._last_failure = text
            await self._kill_rest()
            await asyncio.sleep(TIMING.ray_retry_delay_seconds)


def ray_ports(world: World, rank: int) -> dict[str, int]:
    """The ports of a node of Ray, by option or variable, without the port of the cluster's head.

    Empty where the world has no further ports: pods with a network of their own use Ray's ports.
    """
    head_names = (*RAY_HEAD_PORTS, *RAY_HEAD_VARIABLES)
    further_ports = world.ports[1:]
    begin = len(head_names) + rank * len(RAY_NODE_PORTS)
    node_ports = dict(zip(RAY_NODE_PORTS, further_ports[begin:], strict=False))
    return (
        dict(zip(head_names, further_ports, strict=False)) | node_ports if rank == 0 else node_ports
    )


class MonarchNode(Node):
    """A host of Monarch, as the processes below its worker loop."""

    async def start(self, addresses: Sequence[str], rank: int) -> None:
        """Start the host of this rank; rank 0 waits for the hosts of the other pods too."""
        address = addresses[rank]
        if not await self._run(_MONARCH_PROGRAM, address, until=_IMPORTED):
            last_line = self._lines[-1] if self._lines else "it printed nothing"
            raise ResourceNotAvailableError(
                f"{self._python} cannot import Monarch, which a service that is distributed as "
                f"monarch needs: {last_line}",
                hint='kt.Image().pip_install(["torchmonarch"]) installs it, for Linux on x86_64',
            )
        for awaited in [address, *(addresses if rank == 0 else ())]:
            self._last_failure = f"the Monarch host at {awaited} does not answer"
            while not await _listens(awaited):
                if self._has_ended:
                    raise StartupError(
                        f"the Monarch host at {address} did not start:\n{self._output_text}"
                    )
                await asyncio.sleep(TIMING.monarch_retry_delay_seconds)


async def _listens(address: str) -> bool:
    url = urlsplit(address)
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.close()
        return True
    return False


# ------------------------------------------------------------------------------------------ KubeRay


def lacks_ray(environ: Mapping[str, str]) -> bool:
    """True if KubeRay runs the cluster and the image has no Ray to start."""
    return (
        KUBERAY_START_COMMAND in environ and shutil.which("ray", path=environ.get("PATH")) is None
    )


async def wait_until_joined(environ: Mapping[str, str], timeout: float) -> None:
    """Wait until the node that KubeRay has started is part of the cluster."""
    port_option = _HEALTH_PORT.search(environ[KUBERAY_START_COMMAND])
    url = _HEALTH_URL.format(port=port_option[1] if port_option else 52365)
    health, ask_seconds = "", TIMING.ray_health_seconds
    try:
        async with deadlines.timeout(timeout):
            while True:
                with contextlib.suppress(OSError, asyncio.TimeoutError, ProtocolError):
                    async with async_http.fetch(
                        "GET", url, {}, connect_timeout=ask_seconds, timeout=ask_seconds
                    ) as answer:
                        text = await answer.read(
                            LIMITS.ray_health_answer_bytes, timeout=ask_seconds
                        )
                        health = text.decode(errors="replace")
                if health == "success":
                    return
                await asyncio.sleep(TIMING.ray_retry_delay_seconds)
    except (TimeoutError, asyncio.TimeoutError):
        raise StartupError(
            f"Ray of this pod did not join the cluster within {timeout:.0f} s: "
            f"the last answer of {url} was {health!r}",
            hint="kt logs shows what `ray start` printed",
        ) from None


def ray_job_environ(paths: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """The variable by which processes of a Ray that an operator started find the user's code.

    Those processes started before the code came; `ray.init` sends them the value of this variable.
    """
    inherited = env.get("PYTHONPATH", "").split(os.pathsep)
    python_path = os.pathsep.join(filter(None, [*paths, *inherited]))
    config = {"runtime_env": {"env_vars": {"PYTHONPATH": python_path}}}
    return {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(config)}
