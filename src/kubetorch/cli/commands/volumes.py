"""`kt volumes`: storage that outlives services."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kubetorch.cli.args import AsJson, Namespace
from kubetorch.cli.output import Output
from kubetorch.cli.stores import AllNamespaces, VolumeKeeper
from kubetorch.errors import SpecError
from kubetorch.sdk.volume import Volume, missing
from kubetorch.specs.volume import default_mount_path
from kubetorch.wire.volumes import VolumeView

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_COLUMNS = (
    *("Name", "PVC Name", "Status", "Size", "Storage Class", "Access Mode", "Mount Path"),
    "Used By",
)
_ACTIONS = ("list", "create", "delete", "ssh")


@app.command()
def run(  # noqa: PLR0913  # the documented options
    action: Annotated[
        str, typer.Argument(metavar="ACTION", help="list, create, delete or ssh.")
    ] = "list",
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Name of the volume.")] = None,
    storage_class: Annotated[
        str | None,
        typer.Option("-c", "--storage-class", help="Storage class; the default one if not given."),
    ] = None,
    mount_path: Annotated[
        str | None,
        typer.Option("-m", "--mount-path", help="Path in pods; /ktfs/NAME if not given."),
    ] = None,
    size: Annotated[str, typer.Option("-s", "--size", help="Its size.")] = "10Gi",
    access_mode: Annotated[
        str, typer.Option("-a", "--access-mode", help="Who may mount it.")
    ] = "ReadWriteMany",
    volume_name: Annotated[
        str | None, typer.Option("--pv", help="PersistentVolume to bind to.")
    ] = None,
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    as_json: AsJson = False,
) -> None:
    """List, create or delete volumes, or open a shell in one."""
    output = Output(as_json=as_json)
    if action not in _ACTIONS:
        raise typer.BadParameter(
            f"{action!r} is none of {', '.join(_ACTIONS)}", param_hint="ACTION"
        )
    keeper = VolumeKeeper(namespace, all_namespaces=all_namespaces)
    if action == "list":
        _list(keeper, output, all_namespaces=all_namespaces)
        return
    if name is None:
        raise SpecError(f"Volume name is required for '{action}'")
    if action == "create":
        volume = Volume(
            name,
            size,
            mount_path or default_mount_path(name),
            storage_class,
            access_mode,
            keeper.namespace,
            volume_name,
        )
        _create(keeper, output, volume)
    elif action == "delete":
        _delete(keeper, output, Volume.from_name(name, keeper.namespace))
    else:
        Volume.from_name(name, keeper.namespace, mount_path).ssh()


def _list(keeper: VolumeKeeper, output: Output, *, all_namespaces: bool) -> None:
    found = keeper.all()
    if output.as_json:
        output.value([_json(view) for view in found])
    elif not found:
        output.report(f"No volumes found in {keeper.where}", "yellow")
    elif all_namespaces:
        output.table(("Namespace", *_COLUMNS), [(view.namespace, *_row(view)) for view in found])
    else:
        output.table(_COLUMNS, [_row(view) for view in found])


def _create(keeper: VolumeKeeper, output: Output, volume: Volume) -> None:
    was_there = volume.exists()
    volume.create()
    view = keeper.get(volume)
    if output.as_json:
        output.value(_json(view))
        return
    if was_there:
        output.report(f"Volume {volume.name} already exists", "yellow")
    else:
        output.report(f"✓ Created volume {volume.name}", "green")
    for key, value in _facts(view).items():
        output.report(f"• {key}: {value}")


def _delete(keeper: VolumeKeeper, output: Output, volume: Volume) -> None:
    if not volume.exists():
        raise missing(volume.pvc_name, keeper.namespace)
    view = keeper.get(volume)
    volume.delete()
    output.report(f"✓ Deleted volume {volume.name}", "green")
    if output.as_json:
        output.value(_json(view))


def _facts(view: VolumeView) -> dict[str, str]:
    return {
        "Name": view.spec.name,
        "Namespace": view.namespace,
        "Size": view.spec.size or "-",
        "Storage Class": view.storage_class or "-",
        "Access Mode": view.spec.access_mode,
        "Mount Path": view.spec.mount_path,
    }


def _row(view: VolumeView) -> tuple[str, ...]:
    facts = _facts(view)
    return (
        *(facts["Name"], view.claim, view.phase, facts["Size"], facts["Storage Class"]),
        *(facts["Access Mode"], facts["Mount Path"], ", ".join(view.used_by) or "-"),
    )


def _json(view: VolumeView) -> dict[str, Any]:
    return {
        "name": view.spec.name,
        "namespace": view.namespace,
        "pvc_name": view.claim,
        "status": view.phase,
        "size": view.spec.size,
        "storage_class": view.storage_class or None,
        "access_mode": view.spec.access_mode,
        "mount_path": view.spec.mount_path,
        "volume_name": view.spec.volume_name,
        "folder": view.folder,
        "used_by": list(view.used_by),
    }
