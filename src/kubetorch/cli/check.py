"""`kt check`: whether a service works, from its pods to its logs, or the cluster itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated

import msgspec
import typer

from kubetorch._version import __version__
from kubetorch.cli import views
from kubetorch.cli.args import AsJson, Namespace, service_names
from kubetorch.cli.output import Output, Style
from kubetorch.cli.services import Services
from kubetorch.config.settings import config
from kubetorch.errors import (
    KubetorchError,
    PodContainerError,
    ServiceHealthError,
    VersionMismatchError,
)
from kubetorch.install import checks
from kubetorch.install.checks import Finding, State
from kubetorch.k8s import kubeconfig
from kubetorch.k8s.client import Client
from kubetorch.lib import decoders
from kubetorch.sdk import backend
from kubetorch.sdk.controller import Controller
from kubetorch.sdk.transport import cluster_session
from kubetorch.sdk.transport.session import ClusterSettings
from kubetorch.wire import routes, versions
from kubetorch.wire.messages import WorkloadView

_MARKS: dict[State, tuple[str, Style]] = {
    "ok": ("✓", "green"),
    "note": ("!", "yellow"),
    "skipped": ("-", "dim"),
    "broken": ("✗", "red"),
}

#: Seconds that an API server has to answer which need not answer.
_ANSWER = 5.0


def check_cluster(namespace: str | None, *, as_json: bool) -> None:
    """Look at everything, say each in a line, and fail if something is broken."""
    output = Output(as_json=as_json)
    if config.backend == "local" or not backend.has_cluster():
        _local(output, backend.choose().why)
        return
    where = namespace or config.namespace
    found: list[Finding] = []
    for one in _findings(where):
        found.append(one)
        _show(one, output)
    is_ok = all(one.state != "broken" for one in found)
    if as_json:
        output.value({"ok": is_ok, "checks": [_fact(one) for one in found]})
    if not is_ok:
        raise typer.Exit(1)
    output.report("✓ Kubetorch works in this cluster", "green")


def _local(output: Output, why: str) -> None:
    found = Finding("backend", "ok", f"programs run here, on this machine ({why})")
    _show(found, output)
    if output.as_json:
        output.value({"ok": True, "checks": [_fact(found)]})


def _findings(namespace: str) -> list[Finding]:
    api_url = config.api_url
    found = _seen(namespace, api_url)
    states = {one.check: one.state for one in found}
    if api_url is not None or states.get("controller") in ("ok", "note", "skipped"):
        found += _answers(namespace, api_url)
    return found


def _seen(namespace: str, api_url: str | None) -> list[Finding]:
    try:
        access = kubeconfig.find()
    except KubetorchError as error:
        return [Finding("kubeconfig", "broken", error.message, error.hint)]

    def client() -> Client:
        if api_url is None:
            return Client(access)
        # Where it is not the way in, it often says nothing at all.
        return Client(access, timeout=_ANSWER, patience=0.0)

    async def look() -> list[Finding]:
        async with client() as server:
            return await checks.cluster(
                server, namespace, config.install_namespace, api_url=api_url
            )

    return [Finding("kubeconfig", "ok", access.origin), *asyncio.run(look())]


def _answers(namespace: str, api_url: str | None) -> list[Finding]:
    meant = ClusterSettings(None, config.install_namespace, api_url)
    try:
        session = cluster_session.open_session(meant)
    except KubetorchError as error:
        return [Finding("login", "broken", error.message, error.hint)]
    found: list[Finding] = []
    look = "version"
    try:
        found.append(judge_version(session.ask(_health)))
        look = "login"
        services = session.ask(lambda controller: controller.list_workloads(namespace))
        found.append(Finding(look, "ok", f"{len(services)} services in namespace {namespace}"))
    except KubetorchError as error:
        found.append(Finding(look, "broken", error.message, error.hint))
    finally:
        session.close()
    return found


class Health(msgspec.Struct, frozen=True):
    version: str = "of no version"
    protocol: int | None = None


def _health(controller: Controller) -> Health:
    return decoders.json_decoder(Health).decode(controller.ask("GET", routes.HEALTH))


def judge_version(health: Health) -> Finding:
    theirs, protocol = health.version, health.protocol
    words = f"controller {theirs}, this client {__version__}"
    try:
        versions.check(
            protocol,
            peer="the controller",
            fix_peer=versions.FIX_CONTROLLER["kubernetes"],
            fix_self=f"pip install kubetorch=={theirs}",
        )
    except VersionMismatchError as error:
        return Finding("version", "broken", error.message, error.hint or "")
    if versions.is_newer(__version__, theirs):
        hint = "kt upgrade makes the controller newer, with --image if it was given one"
        return Finding("version", "note", words, hint)
    if theirs != __version__:
        hint = f"pip install kubetorch=={theirs} makes both the same"
        return Finding("version", "note", words, hint)
    return Finding("version", "ok", f"{words}, protocol {protocol}")


def _show(one: Finding, output: Output) -> None:
    mark, style = _MARKS[one.state]
    output.report(f"{mark} {one.check}: {one.reason}", style)
    if one.hint and one.state != "ok":
        output.report(f"    hint: {one.hint}")


def _fact(one: Finding) -> dict[str, object]:
    return {
        "check": one.check,
        "ok": one.state != "broken",
        "state": one.state,
        "reason": one.reason,
        "hint": one.hint,
    }


app = typer.Typer(rich_markup_mode=None, add_completion=False)

_LOG_LINES = 20

#: Raises what is wrong; what it returns is worth knowing.
Check = Callable[[Services, WorkloadView], str | None]


@app.command("check")
def check(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A service.", autocompletion=service_names),
    ] = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Check that a service works, or without a name, the cluster.

    A service is checked from its pods to its logs, a cluster from its kubeconfig to the answer of
    the controller; each fault comes with the next step.
    """
    if name is None:
        check_cluster(namespace, as_json=as_json)
        return
    output = Output(as_json=as_json)
    try:
        services = Services(namespace, output)
        service = services.find(name)
    except KubetorchError as error:
        if as_json:
            missing = {"check": "service", "ok": False, "reason": error.message}
            output.value({"ok": False, "checks": [missing]})
        raise
    results: list[dict[str, object]] = []
    for subject, check in CHECKS.items():
        label = subject.format(mode=views.mode(service))
        output.report(f"Checking {label}...", "blue")
        try:
            note = check(services, service)
        except KubetorchError as error:
            results.append({"check": label, "ok": False, "reason": error.message})
            if as_json:
                output.value({"ok": False, "checks": results})
            _show_failure(services, service, error, output)
            raise typer.Exit(1) from error
        if note is not None:
            output.report(note, "yellow")
        results.append({"check": label, "ok": True, "reason": note})
    if as_json:
        output.value({"ok": True, "checks": results})
    output.report("✓ All service checks passed", "green")


def _check_service(services: Services, service: WorkloadView) -> None:
    del services
    if service.failure is not None:
        is_served = any(pod.is_ready for pod in service.pods)
        raise ServiceHealthError(
            f"generation {service.generation} is not served: "
            f"{service.failure.get('error_type')}: {service.failure.get('message')}",
            hint="deploy again once the cause is mended"
            + ("; the generation before goes on serving" if is_served else ""),
        )
    for pod in service.pods:
        if pod.app is not None and pod.app.exit_code:
            raise ServiceHealthError(f"{pod.name}: {views.app_words(pod.app)}")
    if not service.url:
        raise ServiceHealthError(f"{service.spec.name} has no address; it is {service.status}")


def judge_pods(service: WorkloadView) -> str | None:
    """A word about the pods of a service, if one is worth it."""
    if views.is_at_zero(service):
        return "scaled to zero, a call makes a pod"
    ready, wanted = views.ready_pods(service), 1 if service.scaler else views.pods_wanted(service)
    if ready < wanted:
        reasons = [f"{pod.name}: {pod.reason or pod.phase}" for pod in service.pods]
        missing = "; ".join(reasons) or "there are no pods"
        raise PodContainerError(f"{ready} of {wanted} pods are ready ({missing})")
    return None


def _check_call(services: Services, service: WorkloadView) -> None:
    for pod in service.pods:
        services.ask_pod(service, pod, routes.READY)


def _check_logs(services: Services, service: WorkloadView) -> None:
    for _ in services.logs(service, tail=1):
        return


CHECKS: dict[str, Check] = {
    "{mode} service": _check_service,
    "{mode} pod": lambda _, service: judge_pods(service),
    "service call": _check_call,
    "log streaming": _check_logs,
}


def _show_failure(
    services: Services, service: WorkloadView, error: KubetorchError, output: Output
) -> None:
    output.error(error.message, error.hint)
    pods = [
        f"{pod.name}  {pod.phase}  {'ready' if pod.is_ready else pod.reason or 'not ready'}  "
        f"restarts: {pod.restarts}"
        for pod in service.pods
    ]
    output.failure_panel("POD STATUS", pods or ["no pods"])
    try:
        lines = [
            views.line_text(line) for line in services.logs(service, tail=_LOG_LINES, system=True)
        ]
    except KubetorchError as broken:
        lines = [f"no logs: {broken.message}"]
    output.failure_panel("LOGS", lines or ["nothing was logged"])
