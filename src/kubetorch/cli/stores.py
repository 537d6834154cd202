"""`kt secrets` and `kt volumes`: credentials and storage that the controller keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kubetorch.cli.args import AllNamespaces, AsJson, Namespace
from kubetorch.cli.output import Output
from kubetorch.cli.services import open_session
from kubetorch.config import environment
from kubetorch.config.settings import config
from kubetorch.errors import SecretNotFound, SpecError, VolumeInUseError
from kubetorch.sdk.deploys.attachments import upload_secret
from kubetorch.sdk.secret import Secret
from kubetorch.sdk.tuning import TIMING
from kubetorch.sdk.volume import Volume
from kubetorch.specs import names
from kubetorch.specs.secret import check_variable
from kubetorch.specs.volume import default_mount_path
from kubetorch.wire.secrets import Collision, SecretView, StoredSecret
from kubetorch.wire.volumes import VolumeView


class _Keeper:
    def __init__(
        self,
        namespace: str | None,
        output: Output,
        *,
        is_changing: bool,
        all_namespaces: bool = False,
    ) -> None:
        chosen_namespace = namespace or config.get("namespace")
        self.namespace: str = names.check_namespace(chosen_namespace)
        self._all_namespaces = all_namespaces
        self._session = open_session(self.namespace, output, is_changing=is_changing)

    @property
    def where(self) -> str:
        return "any namespace" if self._all_namespaces else f"{self.namespace} namespace"

    @property
    def _listed_namespace(self) -> str | None:
        return None if self._all_namespaces else self.namespace


class SecretKeeper(_Keeper):
    def all(self, *, prefix: str | None = None) -> list[SecretView]:
        views = self._session.ask(
            lambda controller: controller.secrets.list(self._listed_namespace)
        )
        return [view for view in views if view.name.startswith(prefix or "")]

    def find(self, name: str) -> SecretView:
        view = self._session.ask(lambda controller: controller.secrets.find(self.namespace, name))
        # Only views of a list have their users.
        listed_views = self._session.ask(lambda controller: controller.secrets.list(self.namespace))
        return next(
            (
                listed_view
                for listed_view in listed_views
                if listed_view.object_name == view.object_name
            ),
            view,
        )

    def values(self, view: SecretView) -> dict[str, str]:
        hidden = self._session.ask(
            lambda controller: controller.secrets.values(view.namespace, view.object_name)
        )
        return {key: hidden[key].decode(errors="replace") for key in hidden}

    def delete(self, view: SecretView) -> None:
        self._session.ask(
            lambda controller: controller.secrets.delete(view.namespace, view.object_name)
        )

    def put(self, secret: Secret, collision: Collision) -> StoredSecret:
        return self._session.ask(
            lambda controller: upload_secret(controller, self.namespace, secret, collision)
        )


class VolumeKeeper(_Keeper):
    def all(self) -> list[VolumeView]:
        """All claims that Kubetorch made as volumes."""
        views = self._session.ask(
            lambda controller: controller.volumes.list(self._listed_namespace)
        )
        return [view for view in views if view.is_ours]

    def get(self, volume: Volume) -> VolumeView:
        view = self._session.ask(
            lambda controller: controller.volumes.get(volume.namespace, volume.pvc_name)
        )
        assert view is not None
        return view

    def delete(self, view: VolumeView, *, is_forced: bool) -> bool:
        """Delete a volume and its data; true if it is gone."""
        return self._session.ask(
            lambda controller: controller.volumes.delete(
                view.namespace, view.claim, wait=TIMING.volume_delete_seconds, is_forced=is_forced
            )
        )


def _checked_source(source: dict[str, Any]) -> dict[str, Any]:
    source_fields = {key: value for key, value in source.items() if value is not None}
    if not source_fields:
        raise SpecError(
            "the secret has no values: give --provider, --path or --env-vars",
            hint="for example kt secrets create hf-token --env-vars HF_TOKEN",
        )
    return source_fields


def _variables(words: list[str]) -> dict[str, Any]:
    """The arguments of a `Secret` with these variables: `NAME=VALUE`, or read here."""
    pairs = [word.partition("=") for word in words]
    values = {_variable(name): value for name, equals, value in pairs if equals}
    names = [_variable(name) for name, equals, _ in pairs if not equals]
    for name, count in Counter(name for name, _, _ in pairs).items():
        if count > 1:
            raise SpecError(f"the variable {name} is given {count} times", hint="name it once")
    for name in names:
        if environment.variable(name) is None:
            raise SpecError(
                f"the variable {name} is not set here",
                hint=f"export {name}=... before, or -v {name}=VALUE",
            )
    if not values:
        return {"env_vars": names or None}
    return {"values": {**(Secret("read", env_vars=names).values if names else {}), **values}}


def _variable(name: str) -> str:
    try:
        return check_variable(name)
    except SpecError as error:
        error.hint = "-v NAME for each variable of here, or -v NAME=VALUE; --from-env A,B for both"
        raise


app = typer.Typer(rich_markup_mode=None, add_completion=False)


@dataclass(frozen=True)
class _SecretRequest:
    keeper: SecretKeeper
    output: Output
    name: str | None
    prefix: str | None
    yes: bool
    show: bool
    source: dict[str, Any]


@app.command("secrets")
def secrets(  # noqa: PLR0913  # the documented options
    action: Annotated[
        str, typer.Argument(metavar="ACTION", help="list, create, update, delete or describe.")
    ] = "list",
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Name of the secret.")] = None,
    prefix: Annotated[
        str | None, typer.Option("-x", "--prefix", help="Only secrets whose name begins with this.")
    ] = None,
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask before deleting.")] = False,
    path: Annotated[
        str | None,
        typer.Option("-p", "--path", "--from-file", help="File or folder with the values."),
    ] = None,
    provider: Annotated[
        str | None, typer.Option("-c", "--provider", help="Provider of the credentials.")
    ] = None,
    env_vars: Annotated[
        list[str] | None,
        typer.Option(
            "-v",
            "--env-vars",
            metavar="VARIABLE[=VALUE]",
            help="Environment variable, and its value if not that of here; repeatable.",
        ),
    ] = None,
    from_env: Annotated[
        str | None, typer.Option("--from-env", help="The same, several with commas: A,B.")
    ] = None,
    show: Annotated[
        bool, typer.Option("-s", "--show", help="Show the values too, when describing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List, create, update, delete or describe secrets."""
    output = Output(as_json=as_json)
    if action not in _SECRET_ACTIONS:
        raise typer.BadParameter(
            f"{action!r} is none of {', '.join(_SECRET_ACTIONS)}", param_hint="ACTION"
        )
    several = [variable.strip() for variable in (from_env or "").split(",")]
    variables = [*(env_vars or ()), *filter(None, several)]
    option_values = {
        "--prefix": prefix,
        "--all-namespaces": all_namespaces,
        "--yes": yes,
        "--path": path,
        "--provider": provider,
        "--env-vars": variables,
        "--show": show,
    }
    _check_words(action, name, [option for option, value in option_values.items() if value])
    source = {"provider": provider, "path": path, **_variables(variables)}
    is_changing = action not in ("list", "describe")
    keeper = SecretKeeper(namespace, output, is_changing=is_changing, all_namespaces=all_namespaces)
    _SECRET_ACTIONS[action](_SecretRequest(keeper, output, name, prefix, yes, show, source))


def _check_words(action: str, name: str | None, options: list[str]) -> None:
    """Refuse a name and options that the action does not use."""
    for option in options:
        if option not in _SECRET_OPTIONS[action]:
            takers = [
                other_action for other_action, taken in _SECRET_OPTIONS.items() if option in taken
            ]
            raise SpecError(
                f"kt secrets {action} takes no {option}", hint=f"it is for {', '.join(takers)}"
            )
    if action == "list" and name is not None:
        raise SpecError(
            f"kt secrets list takes no name, and got {name!r}",
            hint=f"kt secrets describe {name} shows it, --prefix {name} lists those that begin so",
        )
    if action == "delete" and name is not None and "--prefix" in options:
        raise SpecError("kt secrets delete takes a name or --prefix, not both")
    if name is None and action in ("create", "update", "describe") and "--provider" not in options:
        raise SpecError(
            f"kt secrets {action} takes the name of a secret",
            hint="for example kt secrets create hf-token --env-vars HF_TOKEN"
            if action == "create"
            else "kt secrets lists them",
        )


def _list_secrets(request: _SecretRequest) -> None:
    views = request.keeper.all(prefix=request.prefix)
    if request.output.as_json:
        request.output.value([_secret_json(view) for view in views])
    elif views:
        request.output.table(
            [
                {"SECRET": view.name, "CREATOR": view.username or "-", "NAMESPACE": view.namespace}
                for view in views
            ]
        )
    else:
        request.output.report(f"No secrets found in {request.keeper.where}", "yellow")


def _create_secret(request: _SecretRequest) -> None:
    stored = request.keeper.put(Secret(request.name, **_checked_source(request.source)), "keep")
    view, output = stored.secret, request.output
    if output.as_json:
        output.value(_secret_json(view))
    elif stored.outcome == "unchanged":
        output.report(
            f"Secret {view.name} already exists in namespace {view.namespace}, skipping creation; "
            f"kt secrets update {view.name} changes it",
            "yellow",
        )
    else:
        output.report("✔ Secret created successfully", "green")
        output.report(f"Name: {view.name}")
        output.report(f"Namespace: {view.namespace}")


def _update_secret(request: _SecretRequest) -> None:
    secret = Secret(request.name, **_checked_source(request.source))
    try:
        request.keeper.find(secret.name)
    except SecretNotFound as error:
        error.hint = "kt secrets create makes one"
        raise
    stored = request.keeper.put(secret, "merge").secret
    view = request.keeper.find(stored.object_name)
    if request.output.as_json:
        request.output.value(_secret_json(view))
    else:
        request.output.report("✔ Secret updated successfully", "green")
        request.output.report(f"Name: {view.name}")
        request.output.report(f"Namespace: {view.namespace}")
        for service in view.used_by:
            request.output.note(f"{service} sees the new values when it is deployed again")


def _delete_secret(request: _SecretRequest) -> None:
    output = request.output
    if request.name is None and request.prefix is None:
        raise SpecError(
            "kt secrets delete takes the name of a secret, or --prefix",
            hint="kt secrets lists them",
        )
    if request.name is None:
        views = request.keeper.all(prefix=request.prefix)
    else:
        views = [request.keeper.find(request.name)]
    if not views:
        output.report(f"No secrets found in {request.keeper.where}", "yellow")
        return
    output.note(f"Deleting {len(views)} secret(s)...")
    for view in views:
        users = f" (used by {', '.join(view.used_by)})" if view.used_by else ""
        output.note(f"  - {view.name}{users}")
    if not request.yes:
        output.confirm("Delete them?")
    for view in views:
        request.keeper.delete(view)
        output.report(f"✓ Deleted secret {view.name}", "green")
    if output.as_json:
        output.value([_secret_json(view) for view in views])


def _describe_secret(request: _SecretRequest) -> None:
    assert request.name is not None
    view, output = request.keeper.find(request.name), request.output
    values = request.keeper.values(view) if request.show else None
    if output.as_json:
        output.value({**_secret_json(view), **({} if values is None else {"data": values})})
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


_SECRET_ACTIONS: dict[str, Callable[[_SecretRequest], None]] = {
    "list": _list_secrets,
    "create": _create_secret,
    "update": _update_secret,
    "delete": _delete_secret,
    "describe": _describe_secret,
}


_SOURCES = ("--path", "--provider", "--env-vars")
#: The options of each action, without the options of all.
_SECRET_OPTIONS: dict[str, tuple[str, ...]] = {
    "list": ("--prefix", "--all-namespaces"),
    "create": _SOURCES,
    "update": _SOURCES,
    "delete": ("--prefix", "--all-namespaces", "--yes"),
    "describe": ("--show",),
}


def _secret_json(view: SecretView) -> dict[str, Any]:
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


#: The facts that are shown of a created volume.
_VOLUME_FACTS = ("Name", "Namespace", "Size", "Storage Class", "Access Mode", "Mount Path")
#: Columns that a narrow terminal can do without, the first to go first.
_DISPENSABLE_VOLUME_COLUMNS = ("PVC Name", "Storage Class", "Access Mode", "Used By", "Size")
_VOLUME_ACTIONS = ("list", "create", "delete", "ssh")


@app.command("volumes")
def volumes(  # noqa: PLR0913  # the documented options
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
    size: Annotated[str, typer.Option("-s", "--size", help="Size of the volume.")] = "10Gi",
    access_mode: Annotated[
        str | None,
        typer.Option("-a", "--access-mode", help="Access mode; that of the class if not given."),
    ] = None,
    volume_name: Annotated[
        str | None, typer.Option("--pv", help="PersistentVolume to bind to.")
    ] = None,
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask before deleting.")] = False,
    force: Annotated[
        bool, typer.Option("-f", "--force", help="Delete a volume that is mounted, too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List, create or delete volumes, or open a shell in one."""
    output = Output(as_json=as_json)
    if action not in _VOLUME_ACTIONS:
        raise typer.BadParameter(
            f"{action!r} is none of {', '.join(_VOLUME_ACTIONS)}", param_hint="ACTION"
        )
    keeper = VolumeKeeper(
        namespace, output, is_changing=action != "list", all_namespaces=all_namespaces
    )
    if action == "list":
        _list_volumes(keeper, output, all_namespaces=all_namespaces)
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
        _create_volume(keeper, output, volume)
    elif action == "delete":
        volume = Volume.from_name(name, keeper.namespace)
        _delete_volume(keeper, output, volume, yes=yes, force=force)
    else:
        Volume.from_name(name, keeper.namespace, mount_path).ssh()


def _list_volumes(keeper: VolumeKeeper, output: Output, *, all_namespaces: bool) -> None:
    views = keeper.all()
    if output.as_json:
        output.value([_volume_json(view) for view in views])
    elif not views:
        output.report(f"No volumes found in {keeper.where}", "yellow")
    else:
        rows = [_volume_cells(view) for view in views]
        for row in () if all_namespaces else rows:
            del row["Namespace"]
        output.table(rows, dispensable=_DISPENSABLE_VOLUME_COLUMNS)


def _create_volume(keeper: VolumeKeeper, output: Output, volume: Volume) -> None:
    was_there = volume.exists()
    volume.create()
    view = keeper.get(volume)
    if output.as_json:
        output.value(_volume_json(view))
        return
    if was_there:
        output.report(f"Volume {volume.name} already exists", "yellow")
    else:
        output.report(f"✓ Created volume {volume.name}", "green")
    cells = _volume_cells(view)
    for key in _VOLUME_FACTS:
        output.report(f"• {key}: {cells[key]}")


def _delete_volume(
    keeper: VolumeKeeper, output: Output, volume: Volume, *, yes: bool, force: bool
) -> None:
    view = keeper.get(volume)
    # Only views of a list have their users.
    users = next(
        (volume_view.used_by for volume_view in keeper.all() if volume_view.claim == view.claim), ()
    )
    if users and not force:
        raise VolumeInUseError(
            f"the volume {view.claim!r} is mounted by {', '.join(users)}",
            services=users,
            hint=f"kt teardown {users[0]} -n {view.namespace}; --force deletes it and its data all "
            "the same",
        )
    if not yes:
        mounted = f", which {', '.join(users)} has mounted," if users else ""
        output.confirm(
            f"Delete the volume {volume.name} in namespace {view.namespace}{mounted} and all data "
            "in it?"
        )
    if keeper.delete(view, is_forced=force):
        output.report(f"✓ Deleted volume {volume.name}", "green")
    else:
        output.report(f"The volume {volume.name} is deleted once no pod holds it", "yellow")
    if output.as_json:
        output.value(_volume_json(view))


def _volume_cells(view: VolumeView) -> dict[str, str]:
    return {
        "Namespace": view.namespace,
        "Name": view.spec.name,
        "PVC Name": view.claim,
        "Status": view.phase,
        "Size": view.spec.size or "-",
        "Storage Class": view.storage_class or "-",
        "Access Mode": view.spec.access_mode or "-",
        "Mount Path": view.spec.mount_path,
        "Used By": ", ".join(view.used_by) or "-",
    }


def _volume_json(view: VolumeView) -> dict[str, Any]:
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
