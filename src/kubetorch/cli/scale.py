"""`kt scale`: the bounds of an autoscaled service while it runs, and its last decisions."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kubetorch.cli import views
from kubetorch.cli.args import AsJson, ExactMatch, Namespace, ServiceName
from kubetorch.cli.inspection import show_decisions
from kubetorch.cli.output import Output
from kubetorch.cli.services import Services
from kubetorch.errors import SpecError
from kubetorch.wire.messages import WorkloadView

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("scale")
def scale(  # noqa: PLR0913  # the options of the command
    name: ServiceName,
    min_scale: Annotated[
        int | None, typer.Option("--min", help="Fewest pods; 0 allows none.")
    ] = None,
    max_scale: Annotated[
        int | None, typer.Option("--max", help="Most pods; 0 is no limit.")
    ] = None,
    target: Annotated[
        float | None, typer.Option("--target", help="Load per pod, in units of the metric.")
    ] = None,
    buffer: Annotated[
        int | None, typer.Option("--buffer", help="Free pods beyond those that work.")
    ] = None,
    window: Annotated[
        str | None, typer.Option("--window", help="Time of the averages, such as 30s.")
    ] = None,
    scale_down_delay: Annotated[
        str | None, typer.Option("--scale-down-delay", help="Time until a pod goes, such as 5m.")
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="As deployed again, before the other options.")
    ] = False,
    exact_match: ExactMatch = False,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Show or change how an autoscaled service scales.

    A change holds until the next deploy with other numbers. Without options kt scale shows the
    state and the last decisions.
    """
    output = Output(as_json=as_json)
    options: dict[str, Any] = {
        "min_scale": min_scale,
        "max_scale": max_scale,
        "target": target,
        "buffer": buffer,
        "window": window,
        "scale_down_delay": scale_down_delay,
    }
    changes = {option: value for option, value in options.items() if value is not None}
    is_changing = bool(changes or reset)
    services = Services(namespace, output, is_changing=is_changing)
    service = (
        services.find_to_change(name, exact_match=exact_match)
        if is_changing
        else services.find(name)
    )
    if service.scaling is None:
        raise SpecError(
            f"{service.spec.name} has a fixed number of pods",
            hint=f"{service.spec.name}.to(kt.Compute(...).autoscale(min_scale=1, max_scale=4))",
        )
    if is_changing:
        former = dict.fromkeys(service.scaling.settings) if reset else {}
        service = services.scale(service, {**former, **changes})
    if as_json:
        output.value(views.scaling_json(service))
        return
    _show(service, output)


def _show(service: WorkloadView, output: Output) -> None:
    labels = (service.spec.name, "reason")
    for label, line in zip(labels, views.scaling_lines(service), strict=False):
        output.report(f"{label}: {line}")
    assert service.scaling is not None
    if service.scaling.settings:
        changes = ", ".join(f"{name}={value}" for name, value in service.scaling.settings.items())
        output.report(f"changed since the deploy: {changes}")
    show_decisions(service, output, most=len(service.scaling.decisions))
