"""`kt status`: the pods of a service and its last failure."""

from __future__ import annotations

import typer

from kubetorch.cli import views
from kubetorch.cli.args import AsJson, Namespace, ServiceName
from kubetorch.cli.output import Output, Style
from kubetorch.cli.services import Services
from kubetorch.wire.messages import WorkloadView

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def run(name: ServiceName, namespace: Namespace = None, as_json: AsJson = False) -> None:
    """Show the pods of a service and its last failure."""
    output = Output(as_json=as_json)
    service = Services(namespace, output).find(name)
    if as_json:
        output.value(views.service_json(service))
        return
    show(service, output)


def show(service: WorkloadView, output: Output) -> None:
    """A line about the service, the table of its pods, and why it failed, if it did."""
    ready, pods = views.ready_pods(service), len(service.pods)
    calls = sum(pod.calls for pod in service.pods)
    style: Style = "green" if service.status == "Ready" else "yellow"
    output.report(
        f"{service.spec.name}: {service.status}, generation {service.generation}, "
        f"{ready}/{pods} pods ready, {calls} {'call' if calls == 1 else 'calls'} running",
        "red" if service.failure is not None else style,
    )
    if service.pods:
        output.table(views.POD_COLUMNS, [views.pod_row(pod) for pod in service.pods])
    if service.failure is not None:
        output.panel("Last failure", views.failure_lines(service.failure), style="red")
