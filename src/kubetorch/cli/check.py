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
from kubetorch.sdk.tuning import TIMING
from kubetorch.wire import routes, versions
from kubetorch.wire.messages import WorkloadView

_MARKS: dict[State, tuple[str, Style]] = {
    "ok": ("✓", "green"),
    "note": ("!", "yellow"),
    "skipped": ("-", "dim"),
    "broken": ("✗", "red"),
}


def check_cluster(namespace: str | None, *, as_json: bool) -> None:
    """Check each part of the cluster, report each in a line, and fail if a part is broken."""
    output = Output(as_json=as_json)
    if config.backend == "local" or not backend.has_cluster():
        _local(output, backend.choose().why)
        return
    where = namespace or config.namespace
    findings: list[Finding] = []
    for finding in _findings(where):
        findings.append(finding)
        _show(finding, output)
    is_ok = all(finding.state != "broken" for finding in findings)
    if as_json:
        output.value({"ok": is_ok, "checks": [_fact(finding) for finding in findings]})
    if not is_ok:
        raise typer.Exit(1)
    output.report("✓ Kubetorch works in this cluster", "green")


def _local(output: Output, why: str) -> None:
    finding = Finding("backend", "ok", f"programs run here, on this machine ({why})")
    _show(finding, output)
    if output.as_json:
        output.value({"ok": True, "checks": [_fact(finding)]})


def _findings(namespace: str) -> list[Finding]:
    api_url = config.api_url
    findings = _cluster_findings(namespace, api_url)
    states = {finding.check: finding.state for finding in findings}
    if api_url is not None or states.get("controller") in ("ok", "note", "skipped"):
        findings += _controller_findings(namespace, api_url)
    return findings


def _cluster_findings(namespace: str, api_url: str | None) -> list[Finding]:
    try:
        access = kubeconfig.find()
    except KubetorchError as error:
        return [Finding("kubeconfig", "broken", error.message, error.hint)]

    def client() -> Client:
        if api_url is None:
            return Client(access)
        # Where api_url leads to the controller, the API server often cannot be reached.
        return Client(access, timeout=TIMING.check_answer_seconds, patience=0.0)

    async def examine() -> list[Finding]:
        async with client() as server:
            return await checks.cluster(
                server, namespace, config.install_namespace, api_url=api_url
            )

    return [Finding("kubeconfig", "ok", access.origin), *asyncio.run(examine())]


def _controller_findings(namespace: str, api_url: str | None) -> list[Finding]:
    cluster = ClusterSettings(None, config.install_namespace, api_url)
    try:
        session = cluster_session.open_session(cluster)
    except KubetorchError as error:
        return [Finding("login", "broken", error.message, error.hint)]
    findings: list[Finding] = []
    check_name = "version"
    try:
        findings.append(judge_version(session.ask(_health)))
        check_name = "login"
        services = session.ask(lambda controller: controller.list_workloads(namespace))
        findings.append(
            Finding(check_name, "ok", f"{len(services)} services in namespace {namespace}")
        )
    except KubetorchError as error:
        findings.append(Finding(check_name, "broken", error.message, error.hint))
    finally:
        session.close()
    return findings


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


def _show(finding: Finding, output: Output) -> None:
    mark, style = _MARKS[finding.state]
    output.report(f"{mark} {finding.check}: {finding.reason}", style)
    if finding.hint and finding.state != "ok":
        output.report(f"    hint: {finding.hint}")


def _fact(finding: Finding) -> dict[str, object]:
    return {
        "check": finding.check,
        "ok": finding.state != "broken",
        "state": finding.state,
        "reason": finding.reason,
        "hint": finding.hint,
    }


app = typer.Typer(rich_markup_mode=None, add_completion=False)

_LOG_LINES = 20

#: A check of a service: raises the fault, or returns a remark.
Check = Callable[[Services, WorkloadView], str | None]


@app.command("check")
def check(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A service.", autocompletion=service_names)
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
    """Raise if pods are missing; returns a remark if the service is scaled to zero."""
    if views.is_at_zero(service):
        return "scaled to zero, a call makes a pod"
    ready, expected_pods = (
        views.ready_pods(service),
        1 if service.scaler else views.pods_wanted(service),
    )
    if ready < expected_pods:
        reasons = [f"{pod.name}: {pod.reason or pod.phase}" for pod in service.pods]
        missing = "; ".join(reasons) or "there are no pods"
        raise PodContainerError(f"{ready} of {expected_pods} pods are ready ({missing})")
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
