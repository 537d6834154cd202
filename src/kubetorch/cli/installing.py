"""What `kt install` and `kt upgrade` share: their options, and what they do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from kubetorch.cli.args import duration
from kubetorch.cli.output import Output
from kubetorch.config.settings import config
from kubetorch.errors import (
    ConfigError,
    InstallError,
    KubernetesCredentialsError,
    KubernetesError,
)
from kubetorch.k8s import locating
from kubetorch.k8s.client import Client
from kubetorch.sdk.installing import applying, readiness, references, releases, upgrading, values
from kubetorch.sdk.installing.applying import Applied
from kubetorch.sdk.installing.chart import Chart
from kubetorch.sdk.installing.releases import Release
from kubetorch.sdk.installing.values import Values

InstallNamespace = Annotated[
    str | None,
    typer.Option("-n", "--namespace", help="Where to install; the setting install_namespace."),
]
RuntimeImage = Annotated[
    str | None,
    typer.Option("--image", help="Image of the controller and of the pods' runtime."),
]
PodImage = Annotated[
    str | None, typer.Option("--pod-image", help="Image of pods whose Compute names none.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Values of the chart: a.b=1,c={x,y}."),
]
ValueFiles = Annotated[
    list[Path] | None, typer.Option("-f", "--values", help="A file with values of the chart.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the objects, change nothing.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Do not wait for the controller.")]
Timeout = Annotated[str, typer.Option("--timeout", help="How long to wait: 900, 30m, 1h30m.")]

#: Seconds that an API server has to say what is installed, when nothing is to be changed.
_ANSWER = 5.0


@dataclass(frozen=True)
class Wanted:
    """What was asked for.

    Attributes:
        values: Given in this command.
        namespace: Where; the configured one if not given.
        timeout: How long to wait for the controller; `None` not to wait.
        as_json: Whether stdout carries JSON only.
        must_exist: Whether it has to be installed already.
        resets: Whether earlier values are forgotten.
        downgrades: Whether an older version may take the place of a newer one.
    """

    values: Values
    namespace: str | None
    timeout: str | None
    as_json: bool
    must_exist: bool = False
    resets: bool = False
    downgrades: bool = False

    @property
    def where(self) -> str:
        """The namespace."""
        return self.namespace or config.install_namespace


def given(
    image: str | None, pod_image: str | None, settings: list[str], files: list[Path]
) -> Values:
    """The values of a command line: files in their order, then `--set`, then the images.

    Raises:
        ConfigError: One cannot be read.
    """
    found: Values = {}
    for file in files:
        found = values.layered(found, _read(file))
    for text in settings:
        found = values.layered(found, values.parse_set(text))
    for key, reference in (("image", image), ("podImage", pod_image)):
        if reference is not None:
            found = values.layered(found, {key: references.parse(reference)})
    return found


def _read(file: Path) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if found is not None and not isinstance(found, Mapping):
        raise ConfigError(f"{file} has {type(found).__name__}; it must have a mapping of values")
    return found or {}


class _Plain(yaml.SafeDumper):
    """Writes what occurs twice twice, and quotes what other readers of YAML take for truth."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if text.lower() in ("y", "n") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Plain.add_representer(str, _quoted)


def show(wanted: Wanted) -> None:
    """Print the objects of an installation, as it would apply them."""
    output = Output(as_json=wanted.as_json)
    chart = Chart()
    chart.values(wanted.values)  # what is wrong with them is known without a cluster
    found = _with_earlier(chart, wanted, asyncio.run(_look(wanted, output)))
    objects = [
        applying.namespace_manifest(wanted.where),
        *chart.render(found, namespace=wanted.where),
    ]
    if wanted.as_json:
        output.value(objects)
    else:
        text = yaml.dump_all(objects, Dumper=_Plain, sort_keys=False, width=100)
        output.text(text.rstrip())


async def _look(wanted: Wanted, output: Output) -> Release | None:
    """What is installed, as far as a cluster says so."""
    try:
        async with Client(locating.find(), timeout=_ANSWER, patience=0.0) as client:
            return await releases.load(client, wanted.where)
    except (KubernetesError, KubernetesCredentialsError) as error:
        if wanted.must_exist:
            raise
        output.warn(f"values that were given before, if any, are not in it: {error.message}")
        return None


def _with_earlier(chart: Chart, wanted: Wanted, former: Release | None) -> Values:
    """The values that are to hold."""
    if former is None:
        if wanted.must_exist:
            raise InstallError(
                f"Kubetorch is not installed in namespace {wanted.where}, or not by kt install",
                hint=f"kt install --namespace {wanted.where}; a helm release is changed with "
                "helm upgrade",
            )
        return wanted.values
    if not wanted.downgrades:
        upgrading.check_version(chart, former)
    return wanted.values if wanted.resets else upgrading.keep(chart, former, wanted.values)


def install(wanted: Wanted) -> None:
    """Install, or change what is installed, and wait for the controller."""
    output = Output(as_json=wanted.as_json)
    done = asyncio.run(_install(wanted, output))
    if wanted.as_json:
        output.value(_facts(done, is_ready=wanted.timeout is not None))


async def _install(wanted: Wanted, output: Output) -> Applied:
    seconds = duration(wanted.timeout, "--timeout") if wanted.timeout is not None else None
    chart, where = Chart(), wanted.where
    async with Client(locating.find()) as client:
        server = client.access.cluster.server
        about = f"Kubetorch {chart.about['version']} in namespace {where} of {server}"
        output.report(f"Installing {about} ({client.access.origin})...")
        found = _with_earlier(chart, wanted, await releases.load(client, where))
        done = await applying.apply(client, chart, found, namespace=where, report=output.report)
        if not done.is_changed:
            output.report("nothing to change")
        if seconds is not None:
            await readiness.wait(client, where, timeout=seconds, report=output.report)
    state = "ready" if seconds is not None else "applied"
    output.report(f"✓ {about} is {state}, of the image {chart.image(found)}", "green")
    output.note(chart.notes(found, namespace=where).rstrip())
    return done


def _facts(done: Applied, *, is_ready: bool) -> dict[str, Any]:
    return {
        "namespace": done.release.namespace,
        "version": done.release.version,
        "image": Chart().image(done.release.values),
        "values": done.release.values,
        "ready": is_ready,
        "objects": [
            {
                "api_version": item.api_version,
                "kind": item.kind,
                "namespace": item.namespace or None,
                "name": item.name,
                "change": change,
            }
            for item, change in done.changes.items()
        ],
    }
