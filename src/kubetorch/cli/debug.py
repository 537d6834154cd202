"""`kt debug`: the debugger of a call that has stopped, or that runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from kubetorch.cli.args import Namespace
from kubetorch.cli.output import Output, browser
from kubetorch.cli.services import Services
from kubetorch.config import environment
from kubetorch.errors import CallRefusedError, KubetorchError, ServiceNotFoundError, SpecError
from kubetorch.sdk.debugger import adapter, terminal
from kubetorch.sdk.debugger.breakpoints import DebugConfig
from kubetorch.sdk.debugger.page import DebugPage
from kubetorch.sdk.deploys import source
from kubetorch.sdk.logs import pod_label
from kubetorch.wire import debugger, routes
from kubetorch.wire.messages import DebugView, PodView, WorkloadView

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("debug")
def debug(  # noqa: PLR0913  # its options
    name: Annotated[
        str | None, typer.Argument(metavar="[POD|NAME]", help="A pod, or a service.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Only a stop with this number.")
    ] = None,
    mode: Annotated[
        str, typer.Option(help="pdb, pdb-ui for a browser, or dap for VS Code and others.")
    ] = "pdb",
    pod_ip: Annotated[str | None, typer.Option(help="Only a pod with this address.")] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Only this rank of a distributed service.")
    ] = None,
    call: Annotated[
        str | None,
        typer.Option(help="Stop this running call: its id or its first digits, or its request."),
    ] = None,
    is_all: Annotated[
        bool, typer.Option("--all", help="Every call that has stopped: one prompt for all ranks.")
    ] = False,
    commands: Annotated[
        list[str] | None,
        typer.Option("--command", "-c", help="With --all: a command for pdb, for no prompt."),
    ] = None,
    vscode: Annotated[
        bool, typer.Option("--vscode", help="Debug in VS Code; the same as --mode dap.")
    ] = False,
    local_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of this machine for VS Code.")
    ] = debugger.PORT,
    launch_json: Annotated[
        bool, typer.Option("--launch-json", help="Write .vscode/launch.json for VS Code first.")
    ] = False,
    namespace: Namespace = None,
) -> None:
    """Attach a debugger to a call that has stopped.

    A call stops at breakpoint(), or at its first line with debug=True; --call stops one that runs.
    The session ends with the call, with q or with Ctrl-C; in the last two cases the call goes on.
    """
    output = Output()
    mode = debugger.DAP if vscode or launch_json else mode
    _check_mode(mode, port)
    if (commands and not is_all) or (is_all and (mode != "pdb" or call is not None)):
        raise SpecError("--all is for pdb and calls that have stopped, and --command for --all")
    services = Services(namespace, output)
    if call is not None:
        call = services.call_id(call, may_be_request=name is not None)
    service, pods = _find(services, name, call)
    if launch_json:
        _write_launch_json(service, local_port, output)
    if mode == debugger.DAP:
        adapter.debugpy_version()
    if call is None:
        stops = _stops(services, service, pods, output)
        properties = {"port": port, "rank": rank, "host": pod_ip}
        if is_all:
            _debug_all(services, service, _free(stops, properties, service.spec.name), commands)
            return
        stop, pod = _choose(stops, properties, name or service.spec.name, output)
        attached = _attach_stopped(services, service, stop, pod, mode)
    elif port is None and pod_ip is None:
        attached = _attach_running(services, service, pods, call, rank, mode)
    else:
        raise SpecError("--port and --pod-ip belong to calls that have stopped, not to --call")
    if mode == debugger.DAP:
        _serve_adapter(attached, service, local_port, is_configured=launch_json, output=output)
    elif mode == "pdb-ui":
        _serve_page(attached, output)
    else:
        terminal.run(attached)


def _check_mode(mode: str, port: int | None) -> None:
    """Refuse a debugger that does not exist, or that this machine cannot show."""
    DebugConfig(mode, port or debugger.PORT)  # type: ignore[arg-type]  # it is checked there
    if mode == "pdb-ui" and environment.is_in_pod():
        raise SpecError("a pod has no browser for pdb-ui", hint="--mode pdb debugs in the terminal")


def _debug_all(
    services: Services,
    service: WorkloadView,
    stops: list[tuple[DebugView, PodView]],
    commands: list[str] | None,
) -> None:
    """Debug all these calls together."""
    labels = terminal.labels_of(stop for stop, _ in stops)
    with contextlib.ExitStack() as stack:
        terminals = {}
        for stop, pod in stops:
            attached = _attach_stopped(services, service, stop, pod)
            stack.callback(attached.leave)
            terminals[labels[stop.session]] = attached
        terminal.TerminalGroup(terminals).run(commands or terminal.commands_of_user())


def _free(
    stops: list[tuple[DebugView, PodView]], properties: Mapping[str, object], name: str
) -> list[tuple[DebugView, PodView]]:
    """The stops with these properties that have no terminal, by rank."""
    free_stops = [
        (stop, pod) for stop, pod in stops if not stop.user and _has_properties(stop, properties)
    ]
    if not free_stops:
        raise CallRefusedError(
            f"no call of {name} waits for a debugger",
            hint="breakpoint() and debug=True stop a call; kt debug --call ID one that runs",
        )
    return sorted(free_stops, key=lambda entry: (entry[0].rank or 0, entry[0].since))


def _has_properties(stop: DebugView, properties: Mapping[str, object]) -> bool:
    """True if a stop has these properties, as far as they are not `None`."""
    return all(value in (None, getattr(stop, key)) for key, value in properties.items())


def _serve_page(attached: terminal.DebugTerminal, output: Output) -> None:
    """Serve the page of the debugger until the debugger is over, or Ctrl-C."""
    page = DebugPage(attached)
    try:
        output.report(f"The debugger is at {page.url}")
        with contextlib.ExitStack() as stack:
            if environment.opens_browser():
                stack.enter_context(browser(page.url))
            page.wait()
    finally:
        page.close()


def _write_launch_json(service: WorkloadView, port: int, output: Output) -> None:
    """Write the configuration of VS Code into the project of the working directory."""
    configuration = adapter.launch_configuration(service.spec.name, port)
    file = adapter.write_launch_json(_project(), configuration)
    output.report(f"Wrote {configuration['name']!r} to {file}")


def _project() -> Path:
    return source.find_project(Path.cwd()) or Path.cwd()


def _serve_adapter(
    attached: terminal.DebugTerminal,
    service: WorkloadView,
    port: int,
    *,
    is_configured: bool,
    output: Output,
) -> None:
    """Serve VS Code until the debugger is over, or Ctrl-C."""
    configuration = adapter.launch_configuration(service.spec.name, port)
    try:
        if not is_configured:
            output.note(f"launch.json of VS Code: {json.dumps(configuration)}")
        file_name = service.spec.callable.source_file or ""
        adapter.AdapterServer(attached, _project(), file_name).run(
            port, lambda text: output.report(f"{text}: start {configuration['name']!r} in VS Code")
        )
    finally:
        attached.leave()


def _find(
    services: Services, name: str | None, call: str | None
) -> tuple[WorkloadView, list[PodView]]:
    """The service, and those of its pods that are meant."""
    if name is None:
        if call is None:
            raise SpecError(
                "kt debug needs a pod or a service",
                hint="kt list shows the services; --call takes the id of a call",
            )
        spawned = services.call(call)
        service = services.find(spawned.workload)
        return service, [pod for pod in service.pods if spawned.pod in ("", pod.name)]
    for view in services.all():
        pods = [pod for pod in view.pods if pod.name == name]
        if pods:
            return view, pods
    service = services.find(name)
    return service, list(service.pods)


def _stops(
    services: Services, service: WorkloadView, pods: list[PodView], output: Output
) -> list[tuple[DebugView, PodView]]:
    """The calls that have stopped: those without a terminal first, then in the order of time."""
    stops: list[tuple[DebugView, PodView]] = []
    for pod in pods:
        try:
            pod_stops = terminal.stops_of(services.session, service, pod)
        except KubetorchError as error:
            output.warn(f"{pod.name} does not answer: {error}")
            continue
        stops += [(stop, pod) for stop in pod_stops]
    return sorted(stops, key=lambda entry: (bool(entry[0].user), entry[0].since))


def _choose(
    stops: list[tuple[DebugView, PodView]],
    properties: Mapping[str, object],
    name: str,
    output: Output,
) -> tuple[DebugView, PodView]:
    """The first stop that has these properties, as far as they are not `None`."""
    matching_stops = [(stop, pod) for stop, pod in stops if _has_properties(stop, properties)]
    chosen = matching_stops[0][0] if matching_stops else None
    other_labels = "; ".join(_label(stop) for stop, _ in stops if stop is not chosen)
    if not matching_stops:
        which = "this" if other_labels else "a"
        raise CallRefusedError(
            f"no call of {name} waits for {which} debugger"
            + (f"; others wait: {other_labels}" if other_labels else ""),
            hint="breakpoint() and debug=True stop a call; kt debug --call ID one that runs",
        )
    if other_labels:
        output.note(f"attaching to {_label(matching_stops[0][0])}; others wait: {other_labels}")
    return matching_stops[0]


def _attach_stopped(
    services: Services, service: WorkloadView, stop: DebugView, pod: PodView, mode: str = "pdb"
) -> terminal.DebugTerminal:
    """Attach to a call that has stopped."""
    path = routes.debug_terminal(stop.session, is_caller=False)
    return terminal.attach(services.session, service, pod, path, mode)


def _attach_running(
    services: Services,
    service: WorkloadView,
    pods: list[PodView],
    call: str,
    rank: int | None,
    mode: str,
) -> terminal.DebugTerminal:
    """Stop a running call, in the pod that has it."""
    path = routes.debug_call(call, rank)
    refusal: KubetorchError | None = None
    for pod in pods:
        try:
            return terminal.attach(services.session, service, pod, path, mode)
        except SpecError as error:  # it runs in another pod
            refusal = error
    raise refusal or ServiceNotFoundError(f"the service {service.spec.name} has no pod")


def _label(stop: DebugView) -> str:
    call = f"{stop.call}, " if stop.call else ""
    return f"{pod_label(stop.pod, stop.rank)} --port {stop.port}: {call}{stop.where}"
