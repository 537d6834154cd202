"""What the shell offers when the user presses TAB."""

from __future__ import annotations

import typer

from kubetorch.errors import KubetorchError


def service_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of services that begin so; none while no local service runs, which is not started here.

    Args:
        ctx: The command as far as it was typed; its `params` may have a `namespace`.
        incomplete: What was typed of the name.
    """
    from kubetorch.cli.output import Output  # noqa: PLC0415  # only while TAB is pressed
    from kubetorch.cli.services import Services  # noqa: PLC0415
    from kubetorch.local import lifetime  # noqa: PLC0415

    try:
        if lifetime.find() is None:
            return []
        found = Services(ctx.params.get("namespace"), Output(as_json=True)).all()
    except KubetorchError:
        return []
    return sorted(view.spec.name for view in found if view.spec.name.startswith(incomplete))
