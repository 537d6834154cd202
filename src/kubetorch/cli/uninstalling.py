"""What `kt uninstall` does."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import typer

from kubetorch.cli.args import duration
from kubetorch.cli.output import Output
from kubetorch.config.settings import config
from kubetorch.k8s import locating
from kubetorch.k8s.client import Client
from kubetorch.sdk.installing import applying, kept, ownership, readiness, releases, removing
from kubetorch.sdk.installing.chart import Chart
from kubetorch.sdk.installing.kept import Kept
from kubetorch.sdk.installing.readiness import NAME
from kubetorch.sdk.installing.releases import Item, Release
from kubetorch.sdk.installing.removing import Removal, Removed


@dataclass(frozen=True)
class Wanted:
    """What was asked for; see `kt uninstall --help`."""

    namespace: str | None
    timeout: str
    volumes: bool
    secrets: bool
    yes: bool
    as_json: bool

    @property
    def where(self) -> str:
        """The namespace of the installation."""
        return self.namespace or config.install_namespace


def uninstall(wanted: Wanted) -> None:
    """Remove Kubetorch, once the user agrees."""
    output = Output(as_json=wanted.as_json)
    done = asyncio.run(_uninstall(wanted, output))
    if wanted.as_json:
        output.value(_facts(done))


async def _uninstall(wanted: Wanted, output: Output) -> Removed:
    seconds = duration(wanted.timeout, "--timeout")
    async with Client(locating.find()) as client:
        release = await _find(client, wanted.where)
        if release is None:
            output.report(f"Kubetorch is not installed in namespace {wanted.where}")
            return Removed()
        scope = await removing.scope_of(client, release.watched, wanted.where)
        removal = Removal(wanted.where, scope, seconds, wanted.volumes, wanted.secrets)
        server = f"{client.access.cluster.server} ({client.access.origin})"
        output.report(f"Removing Kubetorch from namespace {wanted.where} of {server}...")
        if not wanted.yes:
            await _ask(client, removal, output)
        done = await removing.remove(client, removal, release.items, output.report)
    _report(done, wanted, output)
    return done


async def _find(client: Client, namespace: str) -> Release | None:
    """What is installed; `None` if nothing is, and then nothing at all may be deleted.

    Where the cluster does not remember, the controller's own object says which namespaces are its,
    and without that one the definition, which one installation of a cluster has.

    Raises:
        InstallError: It is another one's, or helm's.
    """
    deployment = await applying.get(client, Item("apps/v1", "Deployment", namespace, NAME))
    if deployment is not None:
        ownership.check(deployment, namespace, verb="uninstall")
    found = await releases.load(client, namespace)
    if found is not None:
        return found
    definition = await applying.get(client, releases.DEFINITION)
    if deployment is not None:
        values = {"watchNamespaces": readiness.watched(deployment)}
    elif definition is not None and ownership.is_of(definition, namespace):
        values = {"watchNamespaces": []}
    else:
        return None
    chart = Chart()
    items = map(Item.of, chart.render(values, namespace=namespace))
    return Release(namespace, str(chart.about["version"]), values, tuple(items))


async def _ask(client: Client, removal: Removal, output: Output) -> None:
    workloads = await removal.scope.workloads(client)
    for one in workloads:
        metadata = one["metadata"]
        output.report(f"  • {metadata['namespace']}/{metadata['name']}")
    found = await kept.find(client, removal.scope)
    if removal.volumes:
        output.report("with the volumes " + _names(found.volumes), "yellow")
    if removal.secrets:
        output.report("with the secrets " + _names(found.secrets), "yellow")
    services = f"{len(workloads)} service" + ("" if len(workloads) == 1 else "s")
    typer.confirm(f"Remove Kubetorch and {services}?", abort=True, err=True)


def _report(done: Removed, wanted: Wanted, output: Output) -> None:
    _report_kept(done.kept, output)
    if done.leftovers:
        output.report(f"The namespace {wanted.where} stays, for it has or may have:", "yellow")
        for one in done.leftovers:
            output.report(f"  • {one}")
    if done.others:
        output.report("The kind KubetorchWorkload stays, which these need:", "yellow")
        for one in done.others:
            output.report(f"  • {one}")
        output.report(
            "  hint: kt upgrade -n NAMESPACE --set crd.create=true,rbac.userRoles=true has another "
            "installation own it, and bring the roles for users"
        )
    output.report(f"✓ Kubetorch is removed from namespace {wanted.where}", "green")


def _report_kept(found: Kept, output: Output) -> None:
    for word, items in (("volumes", found.volumes), ("secrets", found.secrets)):
        if items:
            output.report(f"These {word} of users stay (--{word} deletes them):", "yellow")
            for one in items:
                output.report(f"  • {one.namespace}/{one.name}")


def _names(items: tuple[Item, ...]) -> str:
    return ", ".join(f"{one.namespace}/{one.name}" for one in items) or "(there are none)"


def _facts(done: Removed) -> dict[str, object]:
    return {
        "deleted": list(map(_fact, done.items)),
        "kept": {
            "volumes": list(map(_fact, done.kept.volumes)),
            "secrets": list(map(_fact, done.kept.secrets)),
        },
        "definition_needed_by": done.others,
        "left_in_namespace": done.leftovers,
    }


def _fact(item: Item) -> dict[str, str | None]:
    return {"kind": item.kind, "namespace": item.namespace or None, "name": item.name}
