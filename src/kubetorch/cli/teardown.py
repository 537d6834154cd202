"""`kt teardown`: delete services and their pods."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

from kubetorch.cli import views
from kubetorch.cli.args import AsJson, Namespace, service_names
from kubetorch.cli.output import Output
from kubetorch.cli.services import Services
from kubetorch.errors import KubetorchError, ServiceNotFoundError, SpecError
from kubetorch.sdk.tuning import LIMITS
from kubetorch.specs import names
from kubetorch.wire.messages import Teardown, WorkloadView

app = typer.Typer(rich_markup_mode=None, add_completion=False)

#: Other users' services that are named.
_NAMED = 5


@app.command("teardown")
def teardown(  # noqa: PLR0913  # the documented options
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="A service, or a file.py, module or file.py:name with your services.",
            autocompletion=service_names,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    all_: Annotated[
        bool, typer.Option("-a", "--all", help="All services that you deployed in the namespace.")
    ] = False,
    prefix: Annotated[
        str | None, typer.Option("-p", "--prefix", help="All services of yours with this prefix.")
    ] = None,
    namespace_wide: Annotated[
        bool,
        typer.Option(
            "--namespace-wide", help="All services of the namespace; asks for their number."
        ),
    ] = False,
    count: Annotated[
        int | None,
        typer.Option("--count", help="Number of services for --namespace-wide; -y needs it."),
    ] = None,
    force: Annotated[
        bool, typer.Option("-f", "--force", help="End pods at once, without a grace period.")
    ] = False,
    exact_match: Annotated[
        bool, typer.Option("-e", "--exact-match", help="Only the exact name, whoever deployed it.")
    ] = False,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Delete services and their pods."""
    output = Output(as_json=as_json)
    _check_target(target, all_=all_ or namespace_wide, prefix=prefix)
    if count is not None and not namespace_wide:
        raise SpecError("--count is for --namespace-wide")
    services = Services(namespace, output, is_changing=True)
    subject = _describe(services, target=target, prefix=prefix, is_wide=namespace_wide)
    doing = ("Force deleting" if force else "Deleting") if yes else "Looking for"
    output.report(f"{doing} {subject}...")
    if target is not None:
        targets = _targeted(services, target, exact_match=exact_match)
    else:
        targets = services.all() if namespace_wide else _own_services(services, output, prefix)
    if not targets:
        _report_nothing(output, target, services, yes=yes)
        return
    if not yes or namespace_wide:
        _confirm(output, services, targets, count, is_wide=namespace_wide, is_asked=not yes)
    teardowns = _delete(services, targets, output, force=force)
    if as_json:
        output.value(_summary(teardowns))
    if len(teardowns) < len(targets):
        raise typer.Exit(1)
    output.report("Teardown completed successfully", "green")


def _confirm(
    output: Output,
    services: Services,
    targets: list[WorkloadView],
    count: int | None,
    *,
    is_wide: bool,
    is_asked: bool,
) -> None:
    """List the services that are to be deleted, and ask; for all of a namespace for the number."""
    for service in targets:
        owner = _owner_text(services, service)
        output.report(f"  • {views.mode(service)} {service.spec.name}{owner}")
    if is_wide:
        _check_count(output, services.namespace, len(targets), count, is_asked=is_asked)
    else:
        output.confirm(f"Delete {_count(targets)}?")


def _summary(teardowns: Sequence[Teardown]) -> dict[str, object]:
    """The deleted services for a program, with what stays of them and the keys that ended."""
    remaining = {end.deleted: end.remaining for end in teardowns if end.remaining}
    keys = {end.deleted: end.keys for end in teardowns if end.keys}
    details = {name: detail for name, detail in (("left", remaining), ("keys", keys)) if detail}
    return {"deleted": [end.deleted for end in teardowns], **details}


def _own_services(services: Services, output: Output, prefix: str | None) -> list[WorkloadView]:
    """The services to delete that the user deployed; prints which others there are."""
    all_services = services.all()
    targets = [service for service in all_services if _is_meant(services, service, prefix)]
    remaining_services = [service for service in all_services if service not in targets]
    _report_others(output, services, remaining_services, prefix)
    return targets


def _check_target(target: str | None, *, all_: bool, prefix: str | None) -> None:
    target_count = [target is not None, all_, prefix is not None].count(True)
    if target_count == 0:
        raise SpecError(
            "No target: name a service, or give --prefix or --all", hint="kt list shows services"
        )
    if target_count > 1:
        raise SpecError("Give one of a service's name, --prefix and --all, not several")
    if prefix is not None and prefix.rstrip("-") in names.RESERVED_USERNAMES:
        raise SpecError(
            f"the prefix {prefix!r} is reserved; reserved are {', '.join(names.RESERVED_USERNAMES)}"
        )
    if prefix is not None and not prefix:
        raise SpecError("--prefix is empty", hint="--all deletes all services of yours")


def _describe(services: Services, *, target: str | None, prefix: str | None, is_wide: bool) -> str:
    where = f"in {services.namespace} namespace"
    if target is not None:
        return f"resources for service {target} {where}"
    if prefix is not None:
        return f"all services with prefix {prefix} {where}"
    if is_wide:
        return f"all services {where}, also those of others"
    if services.username:
        return f"all services for username {services.username} {where}"
    return f"all services of yours {where}"


def _is_meant(services: Services, service: WorkloadView, prefix: str | None) -> bool:
    if prefix is not None:
        return _begins(service, prefix) and not services.is_foreign(service)
    return services.is_own(service)


def _begins(service: WorkloadView, prefix: str | None) -> bool:
    return service.spec.name.startswith((prefix or "").lower())


def _report_others(
    output: Output, services: Services, remaining_services: list[WorkloadView], prefix: str | None
) -> None:
    foreign_services = [service for service in remaining_services if _begins(service, prefix)]
    if not foreign_services:
        return
    named = ", ".join(
        f"{service.spec.name}{_owner_text(services, service)}"
        for service in foreign_services[:_NAMED]
    )
    more = f" and {len(foreign_services) - _NAMED} more" if len(foreign_services) > _NAMED else ""
    output.note(
        f"Not yours in {services.namespace} namespace: {named}{more}; "
        f"kt teardown {foreign_services[0].spec.name} --exact-match deletes that one, "
        "--namespace-wide all"
    )


def _owner_text(services: Services, service: WorkloadView) -> str:
    creator = views.creator(service)
    return f" (of {creator})" if creator and not services.is_own(service) else ""


def _check_count(
    output: Output, namespace: str, service_count: int, count: int | None, *, is_asked: bool
) -> None:
    """End the command unless the user knows how many services there are."""
    typed_count = None if count is None else str(count)
    if typed_count is None and is_asked:
        typed_count = output.ask(
            f"Type the number of services to delete all of namespace {namespace}"
        )
    if typed_count != str(service_count):
        problem = "no --count was given" if typed_count is None else f"the count is {typed_count}"
        raise SpecError(
            f"nothing was deleted: {problem}, and namespace {namespace} has {service_count}",
            hint=f"kt teardown --namespace-wide -y --count {service_count}"
            if typed_count is None
            else None,
        )


def _targeted(services: Services, target: str, *, exact_match: bool) -> list[WorkloadView]:
    """The service of that name, or those that were deployed from that file or module."""
    if exact_match or not target.partition(":")[0].endswith(".py"):
        try:
            return [services.find_to_change(target, exact_match=exact_match)]
        except ServiceNotFoundError:
            if exact_match:
                return []
    # Other users of the namespace may have a checkout of the same project.
    own_services = filter(services.is_own, services.all())
    return [service for service in own_services if _comes_from(service, target)]


def _comes_from(service: WorkloadView, target: str) -> bool:
    """True if a service was deployed from `file.py`, `module`, or a `:name` of it.

    The service's spec decides; no code of the user runs.
    """
    source, _, qualname = target.partition(":")
    callable_ = service.spec.callable
    if qualname and callable_.qualname != qualname:
        return False
    if not source.endswith(".py"):
        return callable_.module == source
    path = Path(source).resolve()
    if callable_.source_file is None or callable_.project is None:
        return callable_.module.rpartition(".")[2] == path.stem
    return path.as_posix().endswith(f"/{callable_.project}/{callable_.source_file}")


def _report_nothing(output: Output, target: str | None, services: Services, *, yes: bool) -> None:
    text = f"Service {target} not found" if target is not None else "No services found"
    if output.as_json:
        output.value({"deleted": []})
    if target is not None and not yes:
        raise ServiceNotFoundError(text, hint=services.hint(target))
    output.report(text, "yellow")
    if target is not None:
        output.note(f"hint: {services.hint(target)}")


def _delete(
    services: Services, targets: list[WorkloadView], output: Output, *, force: bool
) -> list[Teardown]:
    """Delete services at the same time."""
    teardowns = []
    verb = "Force deleted" if force else "Deleted"
    with ThreadPoolExecutor(min(LIMITS.parallel_deletions, len(targets))) as threads:
        jobs = [threads.submit(services.delete, service, force=force) for service in targets]
        for service, job in zip(targets, jobs, strict=True):
            name = service.spec.name
            try:
                teardown = job.result()
            except KubetorchError as error:
                output.error(f"Failed to delete {name}: {error.message}", error.hint)
            else:
                teardowns.append(teardown)
                output.report(f"✓ {verb} {views.mode(service)} {name}", "green")
                for remaining_object in teardown.remaining:
                    output.report(f"  left: {remaining_object}")
                if teardown.keys:
                    output.report(f"  deleted from the data store: {teardown.keys} keys")
    return teardowns


def _count(targets: list[WorkloadView]) -> str:
    return f"{len(targets)} service" + ("" if len(targets) == 1 else "s")
