"""`kt secrets`: credentials that the controller keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kubetorch.cli.args import AsJson, Namespace
from kubetorch.cli.output import Output
from kubetorch.cli.stores import AllNamespaces, SecretKeeper
from kubetorch.errors import KubetorchError, SpecError
from kubetorch.wire.secrets import SecretView

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_COLUMNS = ("SECRET", "CREATOR", "NAMESPACE")


@dataclass(frozen=True)
class _Request:
    """One command."""

    keeper: SecretKeeper
    output: Output
    name: str | None
    prefix: str | None
    yes: bool
    show: bool
    source: dict[str, Any]


@app.command()
def run(  # noqa: PLR0913  # the documented options
    action: Annotated[
        str, typer.Argument(metavar="ACTION", help="list, create, update, delete or describe.")
    ] = "list",
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Name of the secret.")] = None,
    prefix: Annotated[
        str | None,
        typer.Option("-x", "--prefix", help="Only secrets whose name begins with this."),
    ] = None,
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask before deleting.")] = False,
    path: Annotated[
        str | None, typer.Option("-p", "--path", help="File or folder with the values.")
    ] = None,
    provider: Annotated[
        str | None, typer.Option("-c", "--provider", help="Provider whose credentials they are.")
    ] = None,
    env_vars: Annotated[
        list[str] | None,
        typer.Option("-v", "--env-vars", help="Environment variable with a value; repeatable."),
    ] = None,
    show: Annotated[
        bool, typer.Option("-s", "--show", help="Show the values too, when describing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List, create, update, delete or describe secrets.

    An error is printed, and the exit status is 0 all the same, as programs expect.
    """
    output = Output(as_json=as_json)
    if action not in _ACTIONS:
        raise typer.BadParameter(
            f"{action!r} is none of {', '.join(_ACTIONS)}", param_hint="ACTION"
        )
    source = {"provider": provider, "path": path, "env_vars": env_vars or None}
    keeper = SecretKeeper(namespace, all_namespaces=all_namespaces)
    try:
        _ACTIONS[action](_Request(keeper, output, name, prefix, yes, show, source))
    except KubetorchError as error:
        output.error(error.message, error.hint)


def _list(asked: _Request) -> None:
    found = asked.keeper.all(prefix=asked.prefix)
    if asked.output.as_json:
        asked.output.value([_json(view) for view in found])
    elif found:
        rows = [(view.name, view.username or "-", view.namespace) for view in found]
        asked.output.table(_COLUMNS, rows)
    else:
        asked.output.report(f"No secrets found in {asked.keeper.where}", "yellow")


def _create(asked: _Request) -> None:
    stored = asked.keeper.create(asked.name, asked.source)
    view, output = stored.secret, asked.output
    if output.as_json:
        output.value(_json(view))
    elif stored.outcome == "unchanged":
        output.report(
            f"Secret {view.name} already exists in namespace {view.namespace}, skipping creation",
            "yellow",
        )
    else:
        output.report("✔ Secret created successfully", "green")
        output.report(f"Name: {view.name}")
        output.report(f"Namespace: {view.namespace}")


def _update(asked: _Request) -> None:
    stored = asked.keeper.update(asked.name, asked.source).secret
    view = asked.keeper.find(stored.object_name)
    if asked.output.as_json:
        asked.output.value(_json(view))
    else:
        asked.output.report("✔ Secret updated successfully", "green")
        asked.output.report(f"Name: {view.name}")
        asked.output.report(f"Namespace: {view.namespace}")
        for service in view.used_by:
            asked.output.note(f"{service} sees the new values when it is deployed again")


def _delete(asked: _Request) -> None:
    output = asked.output
    if asked.name is None and asked.prefix is None:
        raise SpecError("a name or --prefix is required for 'delete'")
    if asked.name is None:
        found = asked.keeper.all(prefix=asked.prefix)
    else:
        found = [asked.keeper.find(asked.name)]
    if not found:
        output.report(f"No secrets found in {asked.keeper.where}", "yellow")
        return
    output.note(f"Deleting {len(found)} secret(s)...")
    for view in found:
        users = f" (used by {', '.join(view.used_by)})" if view.used_by else ""
        output.note(f"  - {view.name}{users}")
    if not asked.yes:
        typer.confirm("Delete them?", abort=True, err=True)
    for view in found:
        asked.keeper.delete(view)
        output.report(f"✓ Deleted secret {view.name}", "green")
    if output.as_json:
        output.value([_json(view) for view in found])


def _describe(asked: _Request) -> None:
    if asked.name is None:
        raise SpecError("a name is required for 'describe'")
    view, output = asked.keeper.find(asked.name), asked.output
    values = asked.keeper.values(view) if asked.show else None
    if output.as_json:
        output.value({**_json(view), **({} if values is None else {"data": values})})
        return
    output.report(f"K8 Name: {view.object_name}")
    output.report(f"Namespace: {view.namespace}")
    output.report(f"Labels: {view.labels}")
    output.report(f"Type: {view.type}")
    output.report(f"Keys: {', '.join(view.keys)}")
    output.report(f"Used by: {', '.join(view.used_by) or '-'}")
    if values is not None:
        output.report("Data:")
        for key, value in values.items():
            output.report(f"  {key}: {value}")


_ACTIONS: dict[str, Callable[[_Request], None]] = {
    "list": _list,
    "create": _create,
    "update": _update,
    "delete": _delete,
    "describe": _describe,
}


def _json(view: SecretView) -> dict[str, Any]:
    return {
        "name": view.name,
        "namespace": view.namespace,
        "object_name": view.object_name,
        "creator": view.username,
        "provider": view.provider,
        "mount_type": view.mount_type,
        "path": view.path,
        "keys": list(view.keys),
        "labels": view.labels,
        "type": view.type,
        "used_by": list(view.used_by),
    }
