"""`kt check`: whether a service works, from its pods to its logs, or the cluster itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from kubetorch.cli import views
from kubetorch.cli.args import AsJson, Namespace
from kubetorch.cli.completing import service_names
from kubetorch.cli.output import Output
from kubetorch.cli.services import Services
from kubetorch.errors import KubetorchError, PodContainerError, ServiceHealthError
from kubetorch.wire import routes
from kubetorch.wire.messages import WorkloadView

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_LOG_LINES = 20

#: Raises what is wrong; what it returns is worth knowing.
Check = Callable[[Services, WorkloadView], str | None]


@app.command()
def run(
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
        from kubetorch.cli import checking  # noqa: PLC0415  # what reaches clusters takes a while

        checking.check(namespace, as_json=as_json)
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
        raise ServiceHealthError(
            f"generation {service.generation} is not served: "
            f"{service.failure.get('error_type')}: {service.failure.get('message')}",
            hint="deploy again once the cause is mended; the generation before goes on serving",
        )
    for pod in service.pods:
        if pod.app is not None and pod.app.exit_code:
            raise ServiceHealthError(f"{pod.name}: {views.app_words(pod.app)}")
    if not service.url:
        raise ServiceHealthError(f"{service.spec.name} has no address; it is {service.status}")


def _check_pods(services: Services, service: WorkloadView) -> str | None:
    del services
    return judge_pods(service)


def judge_pods(service: WorkloadView) -> str | None:
    """A word about the pods of a service, if one is worth it.

    Raises:
        PodContainerError: They are not as many as it needs.
    """
    if views.is_at_zero(service):
        return "scaled to zero, a call makes a pod"
    ready, wanted = views.ready_pods(service), 1 if service.scaler else service.spec.compute.pods
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
    "{mode} pod": _check_pods,
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
