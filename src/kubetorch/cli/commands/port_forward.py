"""`kt port-forward`: a port of this machine that leads to a pod or its app."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from kubetorch.cli import pods
from kubetorch.cli.args import Namespace, ServiceName
from kubetorch.cli.output import Output
from kubetorch.cli.services import Services
from kubetorch.errors import ServiceNotFoundError
from kubetorch.sdk import forwarding

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_Port = Annotated[int, typer.Argument(min=1, max=65535, help="Port of this machine.")]
_Remote = Annotated[
    int, typer.Argument(min=1, max=65535, help="Port of the pod: 32300 its own, else its app's.")
]


@app.command()
def run(
    name: ServiceName,
    local: _Port = forwarding.SERVER_PORT,
    remote: _Remote = forwarding.SERVER_PORT,
    pod: Annotated[
        str | None, typer.Option("-p", "--pod", help="This pod: its name, or its index.")
    ] = None,
    namespace: Namespace = None,
) -> None:
    """Lead a port of this machine to a pod, or to its app.

    It does so until interrupted. Whoever asks there needs a token, as at the pod: kt token NAME
    prints one.
    """
    output = Output()
    services = Services(namespace, output)
    service = services.find(name)
    is_scaled = pod is None and bool(services.session.scaler(service))
    chosen = None
    if not is_scaled:
        chosen = forwarding.choose(service) if pod is None else pods.choose(service, pod)
    inside = forwarding.inside(service, remote)

    def find() -> str:
        found = services.get(service.spec.name)
        if found is None:
            raise ServiceNotFoundError(f"the service {name} is gone")
        if chosen is None:
            return services.session.scaler(found)
        return services.address(found, None if pod is None else chosen.name)

    done = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: done.set())
    opened = forwarding.Forwarding(
        find,
        services.way,
        inside=inside,
        port=local,
        service=(service.spec.namespace, service.spec.name),
    )
    leads_to = service.spec.name if chosen is None else chosen.name
    try:
        output.report(f"Forwarding http://127.0.0.1:{local} -> {leads_to}:{remote}")
        output.report(f"Requests need a token: kt token {service.spec.name}")
        done.wait()
    finally:
        opened.close()
