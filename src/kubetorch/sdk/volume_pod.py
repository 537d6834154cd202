"""A shell in a volume of a cluster: in a pod that is made for it, and goes with it.

The pod is the user's own: it takes the rights that `kubectl run` and `kubectl exec` take.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterator

from kubetorch.errors import ImagePullError, ServiceTimeoutError
from kubetorch.k8s import execs
from kubetorch.k8s.access import Access
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.resources import PODS, Object, Ref, Selection
from kubetorch.k8s.watching import Change
from kubetorch.lib import deadlines
from kubetorch.sdk import standard_input
from kubetorch.wire.volumes import VolumeView

#: Seconds until the pod has to run: its volume may have to be made and attached first.
_START = 180.0
#: Seconds after which a pod that was left behind ends by itself.
_LONGEST = 24 * 3600
#: What a container waits for in vain.
_DOOMED = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")


def run(access: Access, view: VolumeView, *, mount_path: str, image: str) -> int:
    """Open a shell in a volume; its exit code.

    Args:
        access: The cluster, and as whom.
        view: The volume.
        mount_path: Where the pod has it.
        image: Image of the pod; it needs a shell.

    Raises:
        ImagePullError: The image cannot be had.
        ServiceTimeoutError: The pod does not start.
        KubernetesError: The user may not make such a pod, or run something in it.
    """
    return asyncio.run(_run(access, view, mount_path, image))


async def _run(access: Access, view: VolumeView, mount_path: str, image: str) -> int:
    name = f"{view.claim[:40].rstrip('-.')}-shell-{secrets.token_hex(3)}"
    pod = Ref(PODS, name, view.namespace)
    async with Client(access) as client:
        await client.create(_manifest(name, view, mount_path, image))
        try:
            await _until_it_runs(client, pod, image)
            return await _shell(client, pod, mount_path)
        finally:
            await client.delete(pod, grace_seconds=0)


def _manifest(name: str, view: VolumeView, mount_path: str, image: str) -> Object:
    container = {
        "name": "shell",
        "image": image,
        "command": ["/bin/sh", "-c", f"exec sleep {_LONGEST}"],
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
            "activeDeadlineSeconds": _LONGEST,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
        },
    }


async def _until_it_runs(client: Client, pod: Ref, image: str) -> None:
    runs: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    state = "it is not scheduled"

    def look(change: Change) -> None:
        nonlocal state
        status = change.object.get("status") or {}
        for container in status.get("containerStatuses") or ():
            waiting = (container.get("state") or {}).get("waiting") or {}
            state = str(waiting.get("message") or waiting.get("reason") or state)
            if waiting.get("reason") in _DOOMED and not runs.done():
                runs.set_exception(
                    ImagePullError(
                        f"the image {image!r} of the shell cannot be had: {state}",
                        hint="choose one that the cluster has: volume.ssh(image=...)",
                    )
                )
        if status.get("phase") not in (None, "Pending") and not runs.done():
            runs.set_result(None)

    selection = Selection(PODS, pod.namespace, fields=f"metadata.name={pod.name}")
    try:
        async with deadlines.timeout(_START), Informer(client, selection, look):
            await runs
    except TimeoutError as error:
        raise ServiceTimeoutError(
            f"the pod {pod.name} of the shell did not start within {_START:.0f} s: {state}",
            hint=f"kubectl describe pod {pod.name} -n {pod.namespace}",
        ) from error


async def _shell(client: Client, pod: Ref, mount_path: str) -> int:
    has_terminal = os.isatty(0) and os.isatty(1)
    command = ["/bin/sh", "-c", 'cd "$1" && exec "${SHELL:-/bin/sh}"', "sh", mount_path]
    process = await execs.start(client, pod, command, stdin=True, tty=has_terminal)
    async with process:
        with _terminal(process) if has_terminal else contextlib.nullcontext():
            reading = asyncio.create_task(_pass_input(process))
            try:
                async for stream, data in process.output():
                    out = sys.stderr if stream == execs.STDERR else sys.stdout
                    out.buffer.write(data)
                    out.buffer.flush()
                return await process.wait()
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)


async def _pass_input(process: execs.Process) -> None:
    """Standard input to its end, read only as fast as the pod takes it."""
    while data := await standard_input.read():
        await process.write(data)
    process.end_input()


@contextlib.contextmanager
def _terminal(process: execs.Process) -> Iterator[None]:
    """Keys go to the pod as they are, and so do changes of the terminal's size."""

    def resize() -> None:
        columns, rows = shutil.get_terminal_size()
        process.resize(columns, rows)

    loop = asyncio.get_running_loop()
    before = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSADRAIN)  # what was typed ahead stays
    loop.add_signal_handler(signal.SIGWINCH, resize)
    resize()
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
        termios.tcsetattr(0, termios.TCSADRAIN, before)
