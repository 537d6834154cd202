"""`kt notebook`: JupyterLab in a pod, in the browser of this machine.

    browser ── listener on loopback ── tunnel ── agent ── Jupyter on the pod's loopback

Jupyter makes itself a token as it starts, which it asks every request for. This command reads the
token in the pod, which takes the right of a shell, as what the token opens does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shlex
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Annotated

import typer

from kubetorch.cli.args import Namespace
from kubetorch.cli.output import Output, browser
from kubetorch.cli.services import Services
from kubetorch.config import environment
from kubetorch.errors import (
    ProjectTooLargeError,
    ResourceNotAvailableError,
    ServiceNotFoundError,
    SpecError,
    StartupError,
)
from kubetorch.lib import sockets
from kubetorch.sdk import shells
from kubetorch.sdk.app import App
from kubetorch.sdk.compute import Compute
from kubetorch.sdk.deploys.source import find_project
from kubetorch.sdk.image import Image
from kubetorch.sdk.transport import local_port
from kubetorch.sdk.tuning import TIMING
from kubetorch.wire import routes
from kubetorch.wire.messages import WorkloadView

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_NAME, _PORT = "kt-notebook", 8888
_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,200}")
_RUNTIME = '"$HOME/.cache/kubetorch/jupyter/$POD_NAME"'
_MISSING = (
    "JupyterLab is not installed in the pod: take an image that has it, such as "
    "kt notebook --image quay.io/jupyter/base-notebook, or leave --image out: then the pod "
    'installs it by the step kt.Image().pip_install(["jupyterlab"])'
)
#: Jupyter logs its token if it has made the token itself, and not if the environment has one. Its
#: remarks on its start are not for who opens it here: its URL and Ctrl-C are those of the pod.
COMMAND = f"""
python3 -c "import importlib.util as u; exit(u.find_spec('jupyterlab') is None)" || {{
  echo {shlex.quote(_MISSING)} >&2
  exit 127
}}
export JUPYTER_RUNTIME_DIR={_RUNTIME}
rm -rf "$JUPYTER_RUNTIME_DIR" && umask 077 && mkdir -p "$JUPYTER_RUNTIME_DIR" || exit 1
export JUPYTER_TOKEN=$(python3 -c "import secrets; print(secrets.token_urlsafe(32))")
exec python3 -m jupyterlab --no-browser --ip=127.0.0.1 --port="$PORT" --port-retries=0 \
  --allow-root --log-level=WARN
""".strip()
_ROOT_DIR = " --ServerApp.root_dir="


@app.command("notebook")
def notebook(  # noqa: PLR0913  # the documented options
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the service.")] = _NAME,
    cpus: Annotated[str | None, typer.Option("--cpus", help="CPUs of the pod.")] = None,
    memory: Annotated[str | None, typer.Option("-m", "--memory", help="Memory of the pod.")] = None,
    gpus: Annotated[str | None, typer.Option("--gpus", help="GPUs of the pod.")] = None,
    image: Annotated[
        str | None, typer.Option("-i", "--image", help="Container image that has JupyterLab.")
    ] = None,
    namespace: Namespace = None,
    port: Annotated[
        int, typer.Option("-p", "--port", min=1, max=65535, help="Port of this machine.")
    ] = _PORT,
    ttl: Annotated[
        str | None, typer.Option("--ttl", help="Delete the service after so long without use: 2h.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart/--no-restart", help="Deploy anew a notebook that runs.")
    ] = False,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open it in the browser.")
    ] = True,
) -> None:
    """Open JupyterLab in a pod.

    A notebook that runs is opened again; Ctrl-C leaves it running. The project of the working
    directory, or else this folder, is sent to the pod. What is saved in the pod is gone with the
    pod; without a cluster, Jupyter works on the files here.
    """
    output = Output()
    if environment.is_in_pod():
        raise SpecError("kt notebook connects from your own machine, and this is a pod")
    if not sockets.is_free(port):
        raise ResourceNotAvailableError(
            f"port {port} of this machine is taken",
            hint=f"--port takes another one: kt notebook --port {port % 65535 + 1}",
        )
    if gpus is not None and image is None:
        output.warn("--gpus needs an image with the libraries of GPUs and JupyterLab: --image ...")
        raise typer.Exit(1)
    services = Services(namespace, output, is_changing=True)
    is_local = services.session.is_local
    compute = Compute(
        cpus=cpus,
        memory=memory,
        gpus=gpus,
        inactivity_ttl=ttl,
        namespace=services.namespace,
        image=_image(image, is_local=is_local),
    )
    # Pods of one machine share its ports.
    inner_port = sockets.choose(()) if is_local else _PORT
    pointers = str(Path.cwd()), "app", "app"
    jupyter = App(compute, _command(services), pointers, name, port=inner_port, health_check="/api")
    service = services.get(jupyter.service_name)
    if service is not None and not restart:
        _check(service, jupyter, compute, output)
    else:
        output.note(f"Starting JupyterLab as {jupyter.service_name}...")
        _deploy(jupyter, compute, output, is_local=is_local, replaces=restart)
        service = services.find(jupyter.service_name)
    _forward(services, service, port, output, opens_browser=browser)
    again = "kt notebook" if name == _NAME else f"kt notebook {name}"
    output.note(f"\nIt runs on: {again} opens it again, kt teardown {service.spec.name} ends it.")


def _image(reference: str | None, *, is_local: bool) -> Image:
    if reference is not None:
        return Image(reference)
    # Pods of this machine run in the environment of this program.
    is_installed = is_local and importlib.util.find_spec("jupyterlab") is not None
    return Image() if is_installed else Image().pip_install(["jupyterlab"])


def _deploy(
    jupyter: App, compute: Compute, output: Output, *, is_local: bool, replaces: bool
) -> None:
    files = _files(Path.cwd(), output, is_local=is_local)
    with contextlib.redirect_stdout(sys.stderr):
        try:
            jupyter.to(compute, sync_dir=files, replace=replaces)
        except ProjectTooLargeError as error:
            output.warn(f"{error.message}\nThe notebook starts without these files")
            jupyter.to(compute, sync_dir=False, replace=replaces)


def _files(folder: Path, output: Output, *, is_local: bool) -> Path | bool | None:
    """The folder that is sent, see `kt.Fn.to`: the project around this folder, or this folder."""
    if find_project(folder) is not None:
        return None
    if is_local:  # Jupyter works on the files themselves
        return False
    if folder in (Path.home(), Path.home().resolve(), folder.parent):
        output.warn(f"the files of {folder} are not sent: start kt notebook in a folder below it")
        return False
    return folder


def _command(services: Services) -> str:
    if services.session.is_local:
        return f"{COMMAND}{_ROOT_DIR}{shlex.quote(str(Path.cwd()))}"
    return COMMAND


def _check(service: WorkloadView, jupyter: App, compute: Compute, output: Output) -> None:
    """Report how a notebook that runs differs from what the options ask for."""
    spec = service.spec
    if spec.callable.app is None or "jupyterlab" not in spec.callable.app.command:
        raise SpecError(
            f"the service {spec.name} is no notebook",
            hint="choose another name: kt notebook my-notebook",
        )
    requested, current = compute.to_spec(), spec.compute
    fields = ("cpus", "memory", "gpus", "image", "inactivity_ttl")
    different = [field for field in fields if getattr(requested, field) != getattr(current, field)]
    output.note(f"{spec.name} runs already, and is opened", "green")
    folder = _root_dir(spec.callable.app.command)
    if folder != _root_dir(jupyter.command):
        output.warn(f"it works on the files of {folder}; --restart takes those of this folder")
    if different:
        output.warn(f"it runs with other {', '.join(different)}; --restart applies the new ones")


def _root_dir(command: str) -> str | None:
    """The folder of this machine that a Jupyter works on."""
    _, sign, folder = command.partition(_ROOT_DIR)
    return shlex.split(folder)[0] if sign else None


def _token(text: str, pod: str) -> str:
    """The token of Jupyter, from the file in which a pod has it: it goes into a page."""
    try:
        token = json.loads(text)["token"]
    except (ValueError, LookupError, TypeError, RecursionError):
        token = None
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise StartupError(
            f"the file of JupyterLab in {pod} names no token",
            hint="kt notebook --restart starts it anew",
        )
    return token


def _forward(
    services: Services, service: WorkloadView, port: int, output: Output, *, opens_browser: bool
) -> None:
    session, name = services.session, service.spec.name
    pod = local_port.choose(service)
    code, text = shells.output(session, service, pod, f"cat {_RUNTIME}/jpserver-*.json")
    if code:
        raise StartupError(
            f"JupyterLab does not run in {pod.name}", hint=f"kt logs {name} shows why"
        )
    token = _token(text, pod.name)
    tokens: list[tuple[float, str]] = []

    def headers() -> dict[str, str]:
        if not tokens or tokens[0][0] < time.time():
            fresh = services.token(service)
            seconds = (fresh.expires - time.time()) * TIMING.token_renewal_share
            tokens[:] = [(time.time() + seconds, fresh.token)]
        return {routes.APP_TOKEN: tokens[0][1]}

    def find() -> str:
        view = services.get(name)
        if view is None:
            raise ServiceNotFoundError(f"the service {name} is gone")
        return session.address(view, local_port.choose(view, pod.name))

    done = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: done.set())
    listener = local_port.LocalPort(
        find, session.transport, inside=routes.APP, port=port, headers=headers
    )
    try:
        url = f"http://127.0.0.1:{port}/lab?token={token}"
        output.report(f"JupyterLab of {name}: {url}")
        with contextlib.ExitStack() as stack:
            if opens_browser and environment.opens_browser() and sys.stdout.isatty():
                stack.enter_context(browser(url))
            done.wait()
    finally:
        listener.close()
