"""`kt describe`: a service, and how to call it from a shell and from Python."""

from __future__ import annotations

import json
from typing import Any

import typer

from kubetorch.cli import usage, views
from kubetorch.cli.args import AsJson, Namespace, ServiceName
from kubetorch.cli.output import Output
from kubetorch.cli.services import Services
from kubetorch.config.settings import config
from kubetorch.errors import KubetorchError
from kubetorch.sdk.cls import OF_COMPUTE, Cls
from kubetorch.specs.app import AppSpec
from kubetorch.specs.callable import CallableRef
from kubetorch.wire import routes
from kubetorch.wire.messages import WorkloadView

app = typer.Typer(rich_markup_mode=None, add_completion=False)

# A port of this machine, where one is needed.
_PORT = 8080
# What follows the first line of a fact stands below it.
_NEXT_LINE = "\n" + " " * 12


@app.command()
def run(name: ServiceName, namespace: Namespace = None, as_json: AsJson = False) -> None:
    """Show a service, and how to call it from a shell and from Python.

    The lines of both panels work as they stand; values of arguments are examples.
    """
    output = Output(as_json=as_json)
    services = Services(namespace, output)
    service = services.find(name)
    spec, app = service.spec, service.spec.callable.app
    operations: list[usage.Operation] = []
    place = _place(services, service)
    if app is not None:
        curl = usage.app_curl(place, app)
        python = usage.app_python(place, app)
    else:
        operations = _operations(services, service, output)
        call = operations[0]
        curl = usage.curl(place, spec.callable, call)
        elsewhere = None if spec.namespace == config.namespace else spec.namespace
        python = usage.python(
            spec.name,
            elsewhere,
            spec.callable,
            call,
            is_hidden=call.method in OF_COMPUTE or call.method in dir(Cls("handle")),
            is_broadcast=spec.compute.broadcast is not None,
        )
    if as_json:
        signatures = [one.signature for one in operations]
        more = {"signatures": signatures, "curl": curl, "python": python}
        output.value(views.service_json(service) | more)
        return
    _show_facts(service, operations, output)
    if service.failure is not None:
        output.panel("Last failure", views.failure_lines(service.failure), style="red")
    if service.notes:
        output.panel("Not honoured", [f"• {note}" for note in service.notes], style="yellow")
    is_served = app is None or app.port is not None
    output.panel("With Curl" if is_served else "Its output", curl.splitlines())
    output.panel("With Python", python.splitlines())


def _operations(services: Services, service: WorkloadView, output: Output) -> list[usage.Operation]:
    """What can be called, as the first pod that is ready says."""
    callable_ = service.spec.callable
    for pod in service.pods:
        if pod.is_ready:
            try:
                page = json.loads(services.ask_pod(service, pod, routes.OPENAPI))
            except (KubetorchError, ValueError) as error:
                output.warn(f"{pod.name} does not say what can be called: {error}")
                continue
            found = usage.operations(page, callable_)
            if found:
                return found
    return [usage.unknown(callable_)]


def _place(services: Services, service: WorkloadView) -> usage.Place:
    """Where the service is called from this machine."""
    name, namespace = service.spec.name, service.spec.namespace
    url = services.base_url(service)
    if url is not None:
        return usage.Place(name, namespace, url or "http://SERVICE_IS_NOT_READY")
    forwarding = f"kt port-forward {name} {_PORT} -n {namespace} &"
    return usage.Place(name, namespace, f"http://localhost:{_PORT}", (forwarding,))


def _access(app: AppSpec | None) -> str | None:
    """Who reaches the port of an app."""
    if app is None or app.port is None:
        return None
    return "public" if app.public else "with a token"


def _pods(service: WorkloadView) -> str:
    if not service.scaler:
        return f"{views.ready_pods(service)} of {service.spec.compute.pods} ready"
    if views.is_at_zero(service):
        return "none: scaled to zero, a call makes one"
    return f"{views.ready_pods(service)} ready, as many as calls need"


def _show_facts(service: WorkloadView, operations: list[usage.Operation], output: Output) -> None:
    spec, compute = service.spec, service.spec.compute
    app = spec.callable.app
    facts: dict[str, Any] = {
        "Name": spec.name,
        "Namespace": spec.namespace,
        "Type": views.mode(service),
        "Callable": _callable(spec.callable),
        "Command": None if app is None else app.command,
        "Port": None if app is None else app.port,
        "Access": _access(app),
        "Status": service.status,
        "Generation": service.generation,
        "Pods": _pods(service),
        "Answers": _answers(service),
        "CPUs": compute.cpus,
        "Memory": compute.memory,
        "Volumes": ", ".join(f"{one.name} at {one.mount_path}" for one in compute.volumes),
        "Secrets": ", ".join(one.name for one in compute.secrets),
        "TTL": compute.inactivity_ttl,
        "Creator": spec.username,
        "Created": views.moment(service.created),
        "URL": service.url,
    }
    for key, value in facts.items():
        if value not in (None, "", "-"):
            lines = str(value).replace("\n", _NEXT_LINE)
            output.report(f"{key + ':':<12}{lines}")
    if operations:
        signatures = _NEXT_LINE.join(one.signature for one in operations)
        output.report(f"{'Calls:':<12}{signatures}")
    for pod in service.pods:
        words = views.app_words(pod.app)
        output.report(f"{'Pod:':<12}{pod.name}  {pod.phase}  {pod.url}  {words}".rstrip())
    output.report("")


def _callable(ref: CallableRef) -> str | None:
    """What is called, in words; nothing is of an app."""
    if ref.kind == "app":
        return None
    return f"{'class' if ref.kind == 'cls' else 'function'} {ref.qualname} of {ref.module}"


def _answers(service: WorkloadView) -> str | None:
    """What a call returns, where it is no plain value."""
    count = service.spec.compute.broadcast
    if count is None or service.spec.callable.kind == "app":
        return None
    return f"a list, one value of each of {count} pods"
