"""What `kt check` does without the name of a service: it looks at the cluster."""

from __future__ import annotations

import asyncio

import msgspec
import typer

from kubetorch._version import __version__
from kubetorch.cli.output import Output, Style
from kubetorch.config.settings import config
from kubetorch.errors import KubetorchError, VersionMismatchError
from kubetorch.k8s import locating
from kubetorch.k8s.client import Client
from kubetorch.lib import decoding
from kubetorch.sdk.controller import Controller
from kubetorch.sdk.installing import checking
from kubetorch.sdk.installing.checking import Finding, State
from kubetorch.sdk.reach import choosing, sessions
from kubetorch.wire import routes, versions

_MARKS: dict[State, tuple[str, Style]] = {
    "ok": ("✓", "green"),
    "note": ("!", "yellow"),
    "skipped": ("-", "dim"),
    "broken": ("✗", "red"),
}

#: Seconds that an API server has to answer which need not answer.
_ANSWER = 5.0


def check(namespace: str | None, *, as_json: bool) -> None:
    """Look at everything, say each in a line, and fail if something is broken."""
    output = Output(as_json=as_json)
    if config.backend == "local":
        _local(output)
        return
    where = namespace or config.namespace
    found: list[Finding] = []
    for one in _findings(where):
        found.append(one)
        _show(one, output)
    is_ok = all(one.state != "broken" for one in found)
    if as_json:
        output.value({"ok": is_ok, "checks": [_fact(one) for one in found]})
    if not is_ok:
        raise typer.Exit(1)
    output.report("✓ Kubetorch works in this cluster", "green")


def _local(output: Output) -> None:
    """There is no cluster to look at."""
    found = Finding("backend", "ok", "services run on this machine (the setting backend is local)")
    _show(found, output)
    if output.as_json:
        output.value({"ok": True, "checks": [_fact(found)]})


def _findings(namespace: str) -> list[Finding]:
    api_url = config.api_url
    found = _seen(namespace, api_url)
    states = {one.check: one.state for one in found}
    if api_url is not None or states.get("controller") in ("ok", "note", "skipped"):
        found += _answers(namespace, api_url)
    return found


def _seen(namespace: str, api_url: str | None) -> list[Finding]:
    """What the kubeconfig and the API server say."""
    try:
        access = locating.find()
    except KubetorchError as error:
        return [Finding("kubeconfig", "broken", error.message, error.hint)]

    def client() -> Client:
        if api_url is None:
            return Client(access)
        # Where it is not the way in, it often says nothing at all.
        return Client(access, timeout=_ANSWER, patience=0.0)

    async def look() -> list[Finding]:
        async with client() as server:
            return await checking.cluster(
                server, namespace, config.install_namespace, api_url=api_url
            )

    return [Finding("kubeconfig", "ok", access.origin), *asyncio.run(look())]


def _answers(namespace: str, api_url: str | None) -> list[Finding]:
    """What the controller says to this user."""
    meant = choosing.Cluster(None, config.install_namespace, api_url)
    try:
        session = sessions.open_session(meant)
    except KubetorchError as error:
        return [Finding("login", "broken", error.message, error.hint)]
    found: list[Finding] = []
    look = "version"
    try:
        found.append(judge_version(session.ask(_health)))
        look = "login"
        services = session.ask(lambda controller: controller.list_workloads(namespace))
        found.append(Finding(look, "ok", f"{len(services)} services in namespace {namespace}"))
    except KubetorchError as error:
        found.append(Finding(look, "broken", error.message, error.hint))
    finally:
        session.close()
    return found


class Health(msgspec.Struct, frozen=True):
    """What a controller says of itself to anybody."""

    version: str = "of no version"
    protocol: int | None = None


def _health(controller: Controller) -> Health:
    return decoding.json_decoder(Health).decode(controller.ask("GET", routes.HEALTH))


def judge_version(health: Health) -> Finding:
    """Whether client and controller understand each other."""
    theirs, protocol = health.version, health.protocol
    words = f"controller {theirs}, this client {__version__}"
    try:
        versions.check(
            protocol,
            peer="the controller",
            fix_peer=versions.FIX_CONTROLLER["kubernetes"],
            fix_self=f"pip install kubetorch=={theirs}",
        )
    except VersionMismatchError as error:
        return Finding("version", "broken", error.message, error.hint or "")
    if versions.is_newer(__version__, theirs):
        hint = "kt upgrade makes the controller newer, with --image if it was given one"
        return Finding("version", "note", words, hint)
    if theirs != __version__:
        hint = f"pip install kubetorch=={theirs} makes both the same"
        return Finding("version", "note", words, hint)
    return Finding("version", "ok", f"{words}, protocol {protocol}")


def _show(one: Finding, output: Output) -> None:
    mark, style = _MARKS[one.state]
    output.report(f"{mark} {one.check}: {one.reason}", style)
    if one.hint and one.state != "ok":
        output.report(f"    hint: {one.hint}")


def _fact(one: Finding) -> dict[str, object]:
    return {
        "check": one.check,
        "ok": one.state != "broken",
        "state": one.state,
        "reason": one.reason,
        "hint": one.hint,
    }
