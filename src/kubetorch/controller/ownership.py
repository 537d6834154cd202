"""Who may deploy over a service that is there. Pure."""

from __future__ import annotations

from kubetorch.errors import ServiceTakenError
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import Creator, Deploy


def check(before: WorkloadSpec, owner: Creator | None, deploy: Deploy, by: Creator) -> str:
    """Refuse a deploy that would take a service away; returns what it replaces, if that is news.

    A service that an earlier version deployed, and one that only selects pods, is anybody's.
    """
    was, now = before.origin, deploy.spec.origin
    if was is None or before.compute.is_selector_only:
        return ""
    is_foreign = owner is not None and owner != by
    # An earlier client does not say whose code it deploys.
    is_other_project = now is not None and now.project != was.project
    if not is_foreign and (now is None or now.key == was.key):
        return ""
    service = f"the service {before.name} in namespace {before.namespace}"
    if deploy.replace or (deploy.is_named and not is_foreign and not is_other_project):
        said = f", deployed by {_named(owner)}" if is_foreign and owner else ""
        return f"{service} ran {was}{said}; this deploy replaces the service"
    whose = f"belongs to {_named(owner)}, and " if is_foreign and owner else ""
    this = f"this deploy is by {_named(by)}" if is_foreign else f"this deploy would run {now} there"
    error = ServiceTakenError(
        f"{service} {whose}runs {was}; {this}",
        hint="choose another name (name=...), or set a user name, which begins the names of your "
        "services (KT_USERNAME=...), or replace the service (replace=True, --replace, "
        f"KT_REPLACE=1); kt teardown {before.name} deletes it",
    )
    error.name, error.namespace = before.name, before.namespace
    error.creator = "" if owner is None else str(owner)
    error.project, error.callable = was.name, was.callable
    raise error


def _named(creator: Creator) -> str:
    """A creator in a message: two may have one user name, or none."""
    user = f"user {creator.user}" if creator.user else ""
    if creator.username is None:
        return user or "somebody without a user name"
    return f"{creator.username} ({user})" if user else creator.username
