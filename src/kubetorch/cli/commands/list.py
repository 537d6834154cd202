"""`kt list`: the services of a namespace."""

from __future__ import annotations

from typing import Annotated

import typer

from kubetorch.cli import views
from kubetorch.cli.args import AsJson, Namespace
from kubetorch.cli.output import Output
from kubetorch.cli.services import Services

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def run(
    namespace: Namespace = None,
    sort: Annotated[
        bool, typer.Option("-s", "--sort", help="Latest status change first, not by name.")
    ] = False,
    tag: Annotated[
        str | None, typer.Option("-t", "--tag", help="Only services whose name has this in it.")
    ] = None,
    pods: Annotated[bool, typer.Option("-p", "--pods", help="Show the names of pods too.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the services of a namespace."""
    output = Output(as_json=as_json)
    services = Services(namespace, output)
    found = [service for service in services.all() if tag is None or tag in service.spec.name]
    if sort:
        found.sort(key=lambda service: service.updated, reverse=True)
    else:
        found.sort(key=lambda service: service.spec.name)
    if as_json:
        output.value([views.service_json(service) for service in found])
        return
    if not found:
        output.report(f"No services found in {services.namespace} namespace")
        return
    columns = list(views.SERVICE_COLUMNS)
    rows = [views.service_row(service) for service in found]
    if pods:
        at = columns.index("# OF PODS") + 1
        columns.insert(at, "POD NAMES")
        for row, service in zip(rows, found, strict=True):
            row.insert(at, "\n".join(pod.name for pod in service.pods) or "-")
    output.table(columns, rows)
