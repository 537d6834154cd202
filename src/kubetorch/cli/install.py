"""`kt install`, `kt upgrade` and `kt uninstall`: Kubetorch in a cluster."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from kubetorch.cli.args import AsJson, duration
from kubetorch.cli.output import Output
from kubetorch.config.settings import config
from kubetorch.errors import ConfigError, InstallError, KubernetesCredentialsError, KubernetesError
from kubetorch.install import apply, readiness, releases, remove, values
from kubetorch.install.apply import Applied
from kubetorch.install.chart import Chart
from kubetorch.install.readiness import NAME
from kubetorch.install.releases import Item, Release
from kubetorch.install.remove import Removal, Removed
from kubetorch.install.values import Values
from kubetorch.k8s import kubeconfig
from kubetorch.k8s.client import Client
from kubetorch.sdk.tuning import TIMING

InstallNamespace = Annotated[
    str | None,
    typer.Option("-n", "--namespace", help="Namespace of Kubetorch; by default install_namespace."),
]
RuntimeImage = Annotated[
    str | None, typer.Option("--image", help="Image of the controller and of the pods' runtime.")
]
PodImage = Annotated[
    str | None, typer.Option("--pod-image", help="Image of pods whose Compute names none.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Values of the chart: a.b=1,c={x,y},d[0].e=2."),
]
ValueFiles = Annotated[
    list[Path] | None, typer.Option("-f", "--values", help="A file with values of the chart.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the objects, change nothing.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Do not wait for the controller.")]
Timeout = Annotated[str, typer.Option("--timeout", help="How long to wait: 900, 30m, 1h30m.")]


@dataclass(frozen=True)
class InstallRequest:
    values: Values
    namespace: str
    timeout: str | None
    as_json: bool
    must_exist: bool = False
    is_reset: bool = False
    may_downgrade: bool = False


def _chart_values(
    image: str | None, pod_image: str | None, settings: list[str], files: list[Path]
) -> Values:
    """The values of a command line: files in their order, then `--set`, then the images."""
    chart_values: Values = {}
    for file in files:
        chart_values = values.layered(chart_values, _read(file))
    for text in settings:
        chart_values = values.parse_set(text, chart_values)
    for key, reference in (("image", image), ("podImage", pod_image)):
        if reference is not None:
            chart_values = values.layered(chart_values, {key: values.parse(reference)})
    return chart_values


def _read(file: Path) -> Mapping[str, Any]:
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if document is not None and not isinstance(document, Mapping):
        raise ConfigError(f"{file} has {type(document).__name__}; it must have a mapping of values")
    return document or {}


#: Texts that the YAML of Go, as in kubectl, reads as numbers, though PyYAML does not.
_GO_NUMBER = re.compile(
    r"[-+]?(?:\.?\d[\d_]*\.?[\d_]*(?:e[-+]?[\d_]+)?|0[box][\da-f_]+)", re.IGNORECASE
)


class _ManifestDumper(yaml.SafeDumper):
    """Writes repeated objects in full, and quotes texts that kubectl takes for other values."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if text.lower() in ("y", "n") or _GO_NUMBER.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_ManifestDumper.add_representer(str, _quoted)


def render_yaml(objects: Iterable[Mapping[str, Any]]) -> str:
    """The objects as YAML that kubectl reads as they are."""
    text = yaml.dump_all(objects, Dumper=_ManifestDumper, sort_keys=False, width=100)
    return text.rstrip()


def _print_manifests(request: InstallRequest, output: Output) -> None:
    chart = Chart()
    chart.values(request.values)  # refuses wrong values before the cluster is asked
    merged_values = _merged_values(chart, request, asyncio.run(_earlier_release(request, output)))
    objects = [
        apply.namespace_manifest(request.namespace),
        *chart.render(merged_values, namespace=request.namespace),
    ]
    if request.as_json:
        output.value(objects)
    else:
        output.text(render_yaml(objects))


async def _earlier_release(request: InstallRequest, output: Output) -> Release | None:
    """The present installation, as far as the cluster shows it."""
    try:
        async with Client(
            kubeconfig.find(), timeout=TIMING.dry_run_answer_seconds, patience=0.0
        ) as client:
            return await releases.load(client, request.namespace)
    except (KubernetesError, KubernetesCredentialsError) as error:
        if request.must_exist:
            raise
        output.warn(
            f"the objects lack the values of an earlier installation, if any: {error.message}"
        )
        return None


def _merged_values(chart: Chart, request: InstallRequest, former: Release | None) -> Values:
    if former is None:
        if request.must_exist:
            raise InstallError(
                f"Kubetorch is not installed in namespace {request.namespace}, or not by kt "
                "install",
                hint=f"kt install --namespace {request.namespace}; a helm release is changed with "
                "helm upgrade",
            )
        return request.values
    if not request.may_downgrade:
        apply.check_version(chart, former)
    return request.values if request.is_reset else apply.keep(chart, former, request.values)


def _install_or_show(request: InstallRequest, *, dry_run: bool) -> None:
    output = Output(as_json=request.as_json)
    if dry_run:
        _print_manifests(request, output)
        return
    applied = asyncio.run(_install(request, output))
    if request.as_json:
        output.value(_install_facts(applied, is_ready=request.timeout is not None))


async def _install(request: InstallRequest, output: Output) -> Applied:
    seconds = duration(request.timeout, "--timeout") if request.timeout is not None else None
    chart, namespace = Chart(), request.namespace
    async with Client(kubeconfig.find()) as client:
        server = client.access.cluster.server
        about = f"Kubetorch {chart.about['version']} in namespace {namespace} of {server}"
        verb = "Upgrading" if request.must_exist else "Installing"
        output.report(f"{verb} {about} ({client.access.origin})...")
        merged_values = _merged_values(chart, request, await releases.load(client, namespace))
        applied = await apply.apply(
            client, chart, merged_values, namespace=namespace, report=output.report
        )
        if not applied.is_changed:
            output.report("nothing to change")
        if seconds is not None:
            components = [readiness.CONTROLLER]
            if chart.values(merged_values)["store"]["separate"]["enabled"]:
                # Before the controller, which relays to it.
                components.insert(0, readiness.STORE)
            for component in components:
                await readiness.wait(
                    client, namespace, component, timeout=seconds, report=output.report
                )
    state = "ready" if seconds is not None else "applied"
    output.report(f"✓ {about} is {state}, of the image {chart.image(merged_values)}", "green")
    output.note(chart.notes(merged_values, namespace=namespace).rstrip())
    return applied


def _install_facts(applied: Applied, *, is_ready: bool) -> dict[str, Any]:
    return {
        "namespace": applied.release.namespace,
        "version": applied.release.version,
        "image": Chart().image(applied.release.values),
        "values": applied.release.values,
        "ready": is_ready,
        "objects": [
            {
                "api_version": item.api_version,
                "kind": item.kind,
                "namespace": item.namespace or None,
                "name": item.name,
                "change": change,
            }
            for item, change in applied.changes.items()
        ],
    }


app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("install")
def install(  # noqa: PLR0913  # the documented options
    image: RuntimeImage = None,
    pod_image: PodImage = None,
    settings: Settings = None,
    files: ValueFiles = None,
    namespace: InstallNamespace = None,
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    timeout: Timeout = "5m",
    as_json: AsJson = False,
) -> None:
    """Install Kubetorch in the cluster of the kubeconfig.

    Where it is installed already, it keeps the values that it was given before, as kt upgrade does.
    """
    request = InstallRequest(
        _chart_values(image, pod_image, settings or [], files or []),
        namespace=namespace or config.install_namespace,
        timeout=None if no_wait else timeout,
        as_json=as_json,
    )
    _install_or_show(request, dry_run=dry_run)


@app.command("upgrade")
def upgrade(  # noqa: PLR0913  # the documented options
    image: RuntimeImage = None,
    pod_image: PodImage = None,
    settings: Settings = None,
    files: ValueFiles = None,
    reset_values: Annotated[
        bool, typer.Option("--reset-values", help="Forget the values of the earlier installation.")
    ] = False,
    downgrade: Annotated[
        bool, typer.Option("--downgrade", help="Go back to an older version than is installed.")
    ] = False,
    namespace: InstallNamespace = None,
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    timeout: Timeout = "5m",
    as_json: AsJson = False,
) -> None:
    """Upgrade the Kubetorch of the cluster, or change its values.

    Values that were given before are kept; an image of another version has to be given anew. Calls
    go on while the controller is replaced.
    """
    request = InstallRequest(
        _chart_values(image, pod_image, settings or [], files or []),
        namespace=namespace or config.install_namespace,
        timeout=None if no_wait else timeout,
        as_json=as_json,
        must_exist=True,
        is_reset=reset_values,
        may_downgrade=downgrade,
    )
    _install_or_show(request, dry_run=dry_run)


async def _uninstall(
    namespace: str, timeout: str, output: Output, *, volumes: bool, secrets: bool, yes: bool
) -> Removed:
    """Remove Kubetorch, once the user agrees."""
    seconds = duration(timeout, "--timeout")
    async with Client(kubeconfig.find()) as client:
        release = await _find_release(client, namespace)
        if release is None:
            output.report(f"Kubetorch is not installed in namespace {namespace}")
            return Removed()
        scope = await remove.scope_of(client, release.watched, namespace)
        removal = Removal(namespace, scope, seconds, volumes, secrets)
        server = f"{client.access.cluster.server} ({client.access.origin})"
        output.report(f"Removing Kubetorch from namespace {namespace} of {server}...")
        if not yes:
            await _confirm_removal(client, removal, output)
        removed = await remove.remove(client, removal, release.items, output.report)
    _report_what_stays(removed, namespace, output)
    return removed


async def _find_release(client: Client, namespace: str) -> Release | None:
    """Returns the present installation; `None` if there is none, and nothing may be deleted.

    Without a record of the release, the controller's Deployment names the watched namespaces;
    without a Deployment too, the definition, which one installation of a cluster owns, says that
    this installation watched all.
    """
    deployment = await apply.get(client, Item("apps/v1", "Deployment", namespace, NAME))
    if deployment is not None:
        releases.check(deployment, namespace, verb="uninstall")
    release = await releases.load(client, namespace)
    if release is not None:
        return release
    definition = await apply.get(client, releases.DEFINITION)
    if deployment is not None:
        values = {"watchNamespaces": readiness.watched(deployment)}
    elif definition is not None and releases.is_of(definition, namespace):
        values = {"watchNamespaces": []}
    else:
        return None
    chart = Chart()
    items = map(Item.of, chart.render(values, namespace=namespace))
    return Release(namespace, str(chart.about["version"]), values, tuple(items))


async def _confirm_removal(client: Client, removal: Removal, output: Output) -> None:
    workloads = await removal.scope.workloads(client)
    for workload in workloads:
        metadata = workload["metadata"]
        output.report(f"  • {metadata['namespace']}/{metadata['name']}")
    user_objects = await remove.find(client, removal.scope)
    if removal.volumes:
        output.report("with the volumes " + _names(user_objects.volumes), "yellow")
    if removal.secrets:
        output.report("with the secrets " + _names(user_objects.secrets), "yellow")
    services = f"{len(workloads)} service" + ("" if len(workloads) == 1 else "s")
    output.confirm(f"Remove Kubetorch and {services}?")


def _report_what_stays(removed: Removed, namespace: str, output: Output) -> None:
    for word, items in (
        ("volumes", removed.user_objects.volumes),
        ("secrets", removed.user_objects.secrets),
    ):
        if items:
            output.report(f"These {word} of users stay (--{word} deletes them):", "yellow")
            for item in items:
                output.report(f"  • {item.namespace}/{item.name}")
    if removed.leftovers:
        output.report(f"The namespace {namespace} stays, for it has or may have:", "yellow")
        for line in removed.leftovers:
            output.report(f"  • {line}")
    if removed.definition_users:
        output.report("The kind KubetorchWorkload stays, which these need:", "yellow")
        for line in removed.definition_users:
            output.report(f"  • {line}")
        output.report(
            "  hint: kt upgrade --set crd.create=true,rbac.userRoles=true, with -n and the "
            "namespace of another installation, lets that installation own the kind and the roles"
        )
    output.report(f"✓ Kubetorch is removed from namespace {namespace}", "green")


def _names(items: tuple[Item, ...]) -> str:
    return ", ".join(f"{item.namespace}/{item.name}" for item in items) or "(there are none)"


def _removal_facts(removed: Removed) -> dict[str, object]:
    return {
        "deleted": list(map(_item_facts, removed.items)),
        "kept": {
            "volumes": list(map(_item_facts, removed.user_objects.volumes)),
            "secrets": list(map(_item_facts, removed.user_objects.secrets)),
        },
        "definition_needed_by": removed.definition_users,
        "left_in_namespace": removed.leftovers,
    }


def _item_facts(item: Item) -> dict[str, str | None]:
    return {"kind": item.kind, "namespace": item.namespace or None, "name": item.name}


@app.command("uninstall")
def uninstall(  # the documented options
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    volumes: Annotated[
        bool, typer.Option("--volumes", help="Delete the users' volumes, with their data.")
    ] = False,
    secrets: Annotated[bool, typer.Option("--secrets", help="Delete the users' secrets.")] = False,
    namespace: InstallNamespace = None,
    timeout: Annotated[
        str, typer.Option("--timeout", help="How long it may take: 900, 30m, 1h30m.")
    ] = "5m",
    as_json: AsJson = False,
) -> None:
    """Remove Kubetorch and its services from the cluster.

    Volumes and secrets of users stay, and are listed.
    """
    output = Output(as_json=as_json)
    namespace = namespace or config.install_namespace
    removed = asyncio.run(
        _uninstall(namespace, timeout, output, volumes=volumes, secrets=secrets, yes=yes)
    )
    if as_json:
        output.value(_removal_facts(removed))
