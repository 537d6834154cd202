"""The terminal's end of a shell: in a pod of a service, or in a volume.

A volume of this machine is a folder. A volume of a cluster needs a pod, which is made for the shell
and deleted after it: the pod is the user's own, and needs the rights of `kubectl run` and
`kubectl exec`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import termios
import tty
from collections.abc import Callable, Iterator

from kubetorch.errors import (
    AgentDiedError,
    ConfigError,
    ImagePullError,
    KubernetesForbiddenError,
    ServiceTimeoutError,
)
from kubetorch.k8s import pod_streams
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Change, Informer
from kubetorch.k8s.kubeconfig import Access
from kubetorch.k8s.resources import PODS, Object, Ref, Selection
from kubetorch.lib import deadlines, websocket, websocket_protocol
from kubetorch.lib.tasks import cancel_all
from kubetorch.lib.websocket import Connection, Endpoint
from kubetorch.manifests import pod_security
from kubetorch.sdk.calls import stream
from kubetorch.sdk.transport.port_forward import PortForwardTransport
from kubetorch.sdk.transport.session import Session
from kubetorch.sdk.tuning import LIMITS, TIMING
from kubetorch.wire import messages, pod_commands, routes
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.messages import PodView, WorkloadView
from kubetorch.wire.pod_commands import ShellEnd, ShellExit, ShellMessage, ShellOpen, ShellResize
from kubetorch.wire.volumes import VolumeView

_READ_BYTES = 64 * 1024
#: Reasons of a waiting container whose image will not come.
_PULL_FAILURES = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")


#: Takes a piece of output; the byte before it says of which stream it is.
Show = Callable[[bytes, bytes], None]


def output(session: Session, view: WorkloadView, pod: PodView, command: str) -> tuple[int, str]:
    """Run a command in a pod; its exit code, and the beginning of its standard output."""
    written = bytearray()

    def show(kind: bytes, data: bytes) -> None:
        if kind != pod_commands.ERRORS and len(written) < LIMITS.pod_answer_bytes:
            written.extend(data)

    return run(session, view, pod, command, show), written.decode(errors="replace")


def _show(kind: bytes, data: bytes) -> None:
    stream = sys.stderr if kind == pod_commands.ERRORS else sys.stdout
    with contextlib.suppress(BrokenPipeError):
        stream.buffer.write(data)
        stream.buffer.flush()


def run(
    session: Session,
    view: WorkloadView,
    pod: PodView,
    command: str | None = None,
    show: Show = _show,
) -> int:
    """Run a shell in a pod on this program's standard streams; its exit code."""
    upgraded, rest = stream.dial_agent(session, view, pod, routes.SHELL)
    return asyncio.run(_run(pod, upgraded, rest, command, show))


async def _run(
    pod: PodView, upgraded: socket.socket, rest: bytes, command: str | None, show: Show
) -> int:
    has_terminal = command is None and os.isatty(0) and os.isatty(1)
    open_message = ShellOpen(command=command)
    if has_terminal:
        columns, rows = shutil.get_terminal_size()
        kind = os.environ.get("TERM") or "xterm"
        open_message = ShellOpen(terminal=True, kind=kind, rows=rows, columns=columns)
    client = _Client(show)
    await websocket.adopt(
        upgraded, rest, client, max_message=wire_tuning.LIMITS.shell_message_bytes
    )
    client.say(open_message)
    terminal = _terminal(client.resize) if has_terminal else contextlib.nullcontext()
    with terminal, client.attached(has_input=show is _show):
        code = await client.exited
    if code is None:
        raise AgentDiedError(pod.name, f"the shell was lost: {client.reason}")
    return code


class _Client(Endpoint):
    def __init__(self, show: Show) -> None:
        self._show = show
        self._loop = asyncio.get_running_loop()
        self._connection: Connection | None = None
        self.exited: asyncio.Future[int | None] = self._loop.create_future()
        self.reason = ""
        self._has_room = asyncio.Event()
        self._has_room.set()

    def say(self, message: ShellMessage) -> None:
        if self._connection is not None:
            self._connection.send(messages.encode(message), opcode=websocket_protocol.TEXT)

    def resize(self, columns: int, rows: int) -> None:
        self.say(ShellResize(rows=rows, columns=columns))

    @contextlib.contextmanager
    def attached(self, *, has_input: bool) -> Iterator[None]:
        """Pass the standard input on, if the shell has one."""
        passing = self._loop.create_task(self._pass_input() if has_input else self._end_input())
        try:
            yield
        finally:
            passing.cancel()
            if self._connection is not None:
                self._connection.abort("the shell has ended")

    async def _end_input(self) -> None:
        self.say(ShellEnd())

    async def _pass_input(self) -> None:
        """Send the standard input to its end, as fast as the pod reads it."""
        while data := await _read_input():
            if self._connection is not None:
                self._connection.send(data)
                if self._connection.is_congested:
                    self._has_room.clear()
            await self._has_room.wait()
        self.say(ShellEnd())

    # ------------------------------------------------------------------------------ connection

    def on_open(self, connection: Connection) -> None:
        self._connection = connection

    def on_message(self, opcode: int, payload: memoryview) -> None:
        if opcode == websocket_protocol.TEXT:
            self._end(messages.decode(ShellExit, bytes(payload)).code)
        else:
            self._show(bytes(payload[:1]), bytes(payload[1:]))

    def on_writable(self) -> None:
        self._has_room.set()

    def on_close(self, reason: str) -> None:
        self.reason = reason
        self._end(None)

    def _end(self, code: int | None) -> None:
        if not self.exited.done():
            self.exited.set_result(code)


# ---------------------------------------------------------------------------------- in a volume


def run_in_volume(session: Session, view: VolumeView, *, mount_path: str, image: str) -> None:
    """Open a shell in a volume; returns when it ends. `image` is the image of the shell's pod."""
    if view.folder is not None:
        shell = os.environ.get("SHELL") or "/bin/sh"
        subprocess.run([shell], cwd=view.folder, check=False)
        return
    if not isinstance(session.transport, PortForwardTransport):
        raise ConfigError(
            f"a shell in the volume {view.claim!r} takes a pod of yours, and this program does not "
            "speak with the API server",
            hint="unset KT_API_URL, and run it outside of pods with a kubeconfig",
        )
    asyncio.run(_run_volume_pod(session.transport.access, view, mount_path, image))


async def _run_volume_pod(access: Access, view: VolumeView, mount_path: str, image: str) -> int:
    name = f"{view.claim[:40].rstrip('-.')}-shell-{secrets.token_hex(3)}"
    pod = Ref(PODS, name, view.namespace)
    manifest = _manifest(name, view, mount_path, image)
    async with Client(access) as client:
        try:
            await client.create(manifest)
        except KubernetesForbiddenError as error:
            if "violates PodSecurity" not in error.message:
                raise
            spec = manifest["spec"]
            pod_security.restrict(spec, spec["containers"][0], root_images=[image])
            await client.create(manifest)
        try:
            await _wait_until_running(client, pod, image)
            return await _shell(client, pod, mount_path)
        finally:
            await client.delete(pod, grace_seconds=0)


def _manifest(name: str, view: VolumeView, mount_path: str, image: str) -> Object:
    container = {
        "name": "shell",
        "image": image,
        "command": ["/bin/sh", "-c", f"exec sleep {TIMING.shell_pod_seconds}"],
        "volumeMounts": [{"name": "volume", "mountPath": mount_path}],
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    claim = {"name": "volume", "persistentVolumeClaim": {"claimName": view.claim}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": view.namespace},
        "spec": {
            "containers": [container],
            "volumes": [claim],
            "restartPolicy": "Never",
            "activeDeadlineSeconds": TIMING.shell_pod_seconds,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
        },
    }


async def _wait_until_running(client: Client, pod: Ref, image: str) -> None:
    pod_runs: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    state = "it is not scheduled"

    def on_pod_change(change: Change) -> None:
        nonlocal state
        status = change.object.get("status") or {}
        for container in status.get("containerStatuses") or ():
            waiting = (container.get("state") or {}).get("waiting") or {}
            state = str(waiting.get("message") or waiting.get("reason") or state)
            if waiting.get("reason") in _PULL_FAILURES and not pod_runs.done():
                pod_runs.set_exception(
                    ImagePullError(
                        f"the image {image!r} of the shell cannot be had: {state}",
                        hint="choose one that the cluster has: volume.ssh(image=...)",
                    )
                )
        if status.get("phase") not in (None, "Pending") and not pod_runs.done():
            pod_runs.set_result(None)

    selection = Selection(PODS, pod.namespace, fields=f"metadata.name={pod.name}")
    try:
        async with (
            deadlines.timeout(TIMING.shell_pod_start_seconds),
            Informer(client, selection, on_pod_change),
        ):
            await pod_runs
    except TimeoutError as error:
        raise ServiceTimeoutError(
            f"the pod {pod.name} of the shell did not start within "
            f"{TIMING.shell_pod_start_seconds:.0f} s: {state}",
            hint=f"kubectl describe pod {pod.name} -n {pod.namespace}",
        ) from error


async def _shell(client: Client, pod: Ref, mount_path: str) -> int:
    has_terminal = os.isatty(0) and os.isatty(1)
    command = ["/bin/sh", "-c", 'cd "$1" && exec "${SHELL:-/bin/sh}"', "sh", mount_path]
    process = await pod_streams.start(client, pod, command, stdin=True, tty=has_terminal)
    async with process:
        if has_terminal:
            process.resize(*shutil.get_terminal_size())
        with _terminal(process.resize) if has_terminal else contextlib.nullcontext():
            reading = asyncio.create_task(_pass_input(process))
            try:
                async for stream, data in process.output():
                    out = sys.stderr if stream == pod_streams.STDERR else sys.stdout
                    out.buffer.write(data)
                    out.buffer.flush()
                return await process.wait()
            finally:
                await cancel_all([reading])


async def _pass_input(process: pod_streams.Process) -> None:
    while data := await _read_input():
        await process.write(data)
    process.end_input()


# ------------------------------------------------------------------ the terminal of this program


async def _read_input() -> bytes:
    """The next bytes of the standard input; none at its end, or without an input."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(0, ready.set)
    except PermissionError:  # a file, which no loop can wait for: it can be read at once
        await asyncio.sleep(0)  # a long file must not keep the loop from all else
    except OSError:
        return b""
    else:
        try:
            await ready.wait()
        finally:
            loop.remove_reader(0)
    try:
        return os.read(0, _READ_BYTES)
    except OSError:  # its terminal is gone
        return b""


@contextlib.contextmanager
def _terminal(on_resize: Callable[[int, int], None]) -> Iterator[None]:
    """Pass keys to the shell unchanged, Ctrl-C too; `on_resize` gets new columns and rows."""
    loop = asyncio.get_running_loop()
    terminal_settings = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSADRAIN)  # what was typed ahead stays
    loop.add_signal_handler(signal.SIGWINCH, lambda: on_resize(*shutil.get_terminal_size()))
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
        termios.tcsetattr(0, termios.TCSADRAIN, terminal_settings)
