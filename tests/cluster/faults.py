"""Programs of a user that run while something breaks, and what can be broken from this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from kubetorch.wire import podenv

#: Calls that take a while, and say which pod they ran in; and a wait of the program for the test.
SERVICE = """
import os, socket, time

def slow(seconds):
    if seconds >= 60:
        print("sleeps", flush=True)  # as `Client.call_begins` waits for
    time.sleep(seconds)
    return os.environ["POD_NAME"]

def fill(mebibytes):
    held = b"1" * (mebibytes * 1024 * 1024)
    return os.environ["POD_NAME"]

def fill_disk(mebibytes):
    if mebibytes:
        with open("/tmp/filled", "wb") as file:
            file.write(bytes(mebibytes * 1024 * 1024))
        time.sleep(120)  # the kubelet looks now and then
    return os.environ["POD_NAME"]

def echo(value):
    return value

def ray_nodes():
    import ray
    ray.init(address="auto", ignore_reinit_error=True)
    where = ray.remote(num_cpus=0.01, scheduling_strategy="SPREAD")(host)
    return os.environ["POD_NAME"], sorted(set(ray.get([where.remote() for _ in range(20)])))

def host():
    time.sleep(0.2)
    return socket.gethostname()

def rank():
    names = ("RANK", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return {name: os.environ.get(name) for name in (*names, "POD_NAME", "POD_IP", "POD_IPS")}

def until(is_so, seconds=60):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)  # between two looks
"""


class Client:
    """A program of a user that runs while something breaks.

    Attributes:
        folder: Where it runs.
    """

    def __init__(self, program: str, folder: Path, environ: dict[str, str]) -> None:
        self.folder = folder
        # What makes the folder a project, so that all of it travels.
        (folder / "pyproject.toml").touch()
        (folder / "service.py").write_text(SERVICE)
        file = folder / "client.py"
        file.write_text("import kubetorch as kt\nimport service\n" + textwrap.dedent(program))
        self._process = subprocess.Popen(
            [sys.executable, "-u", str(file)],
            cwd=folder,
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def line(self, beginning: str, timeout: float = 100.0) -> str:
        """Wait for a line that begins so; the program ends when that takes too long."""
        assert self._process.stdout is not None
        printed_lines = []
        late = threading.Timer(timeout, self._process.kill)
        late.start()
        try:
            for line in self._process.stdout:
                printed_lines.append(line)
                if line.startswith(beginning):
                    return line.strip()
        finally:
            late.cancel()
        raise AssertionError(f"the program ended without {beginning!r}:\n{''.join(printed_lines)}")

    def call_begins(self, service: str) -> None:
        """Wait for what a long call of a service prints in its pod."""
        self.line(f"({service}-")

    def end(self, timeout: float = 60.0) -> str:
        """What else it prints; it has to succeed."""
        output, _ = self._process.communicate(timeout=timeout)
        assert self._process.returncode == 0, output
        return output

    def kill(self) -> None:
        """End it without a word."""
        self._process.kill()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextlib.contextmanager
def clients(folder: Path, environ: dict[str, str]) -> Iterator[Callable[[str], Client]]:
    """Starts programs of a user, each of them in a folder of its own."""
    started: list[Client] = []

    def start(program: str) -> Client:
        program_folder = folder / str(len(started))
        program_folder.mkdir()
        started.append(Client(program, program_folder, environ))
        return started[-1]

    with contextlib.ExitStack() as at_end:
        try:
            yield start
        finally:
            for client in started:
                at_end.callback(client.kill)


def pods(kubectl: Callable[..., str], namespace: str, service: str) -> list[str]:
    """The names of the pods of a service."""
    selector = f"kubetorch.com/service={service}"
    listing = json.loads(kubectl("get", "pods", "-n", namespace, "-l", selector, "-o", "json"))
    return [pod["metadata"]["name"] for pod in listing["items"]]


def processes(*words: str) -> list[psutil.Process]:
    """Processes of this machine, which is the cluster's node, with these words in their command."""
    matching_processes = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if all(any(word in part for part in command) for word in words):
            matching_processes.append(process)
    return matching_processes


def agents(pod: str) -> list[psutil.Process]:
    """The processes of a pod's agent; others may end while they are looked at."""
    agent_processes = []
    for process in processes("kubetorch.pod"):
        with contextlib.suppress(psutil.Error):
            if process.environ().get(podenv.POD) == pod:
                agent_processes.append(process)
    return agent_processes


def controllers() -> list[psutil.Process]:
    """The processes of controllers."""
    controller_processes = processes("kubetorch.controller")
    assert controller_processes, "no controller runs on this machine"
    return controller_processes


def kill(processes_to_kill: list[psutil.Process]) -> None:
    """Kill processes of containers: the first process of a container takes the others along."""
    for process in processes_to_kill:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def replace_controllers(kubectl: Callable[..., str], namespace: str = "kubetorch") -> None:
    """Have new pods of the controllers, as when their node is drained; they are ready then."""
    options = ("--namespace", namespace, "--timeout=80s")
    kubectl("delete", "pods", "--selector=app.kubernetes.io/component=controller", *options)
    kubectl("rollout", "status", "deployment/kubetorch-controller", *options)


def until(is_so: Callable[[], object], *, seconds: float = 60.0) -> float:
    """Seconds until something is so."""
    begun = time.monotonic()
    while not is_so():
        assert time.monotonic() < begun + seconds
        time.sleep(0.01)  # no more: what is waited for may be over soon
    return time.monotonic() - begun


@contextlib.contextmanager
def stopped(frozen_processes: list[psutil.Process]) -> Iterator[None]:
    """As if the machine that these run on had frozen."""
    for process in frozen_processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in frozen_processes:
            process.send_signal(signal.SIGCONT)
