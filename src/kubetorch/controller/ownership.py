"""The owner of a service: whether a deploy may replace what is deployed. Pure.

A service belongs to a creator, a project and a callable, whose deploys are edits. A deploy of
another creator is refused. Another callable of the same creator replaces a service that is not in
use: on this machine always, in a cluster only where that is certain.
"""

from __future__ import annotations

import msgspec

from kubetorch.errors import ServiceTakenError
from kubetorch.specs.workload import Origin, WorkloadSpec
from kubetorch.wire.messages import Creator, Deploy

#: Units of a time that has passed, in seconds.
_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"))


class Use(msgspec.Struct, frozen=True):
    """The use of a service at one moment.

    Attributes:
        is_local: Whether it runs on this machine.
        reason: Why no other callable may replace it: what uses it. Empty if nothing does.
        idle: Seconds since the last call; `None` if there was none.
        never_served: Whether all its deploys have failed.
    """

    is_local: bool
    reason: str = ""
    idle: float | None = None
    never_served: bool = False

    @property
    def last_in_words(self) -> str:
        if self.idle is None:
            return "never used"
        for seconds, unit in _UNITS:
            if self.idle >= 2 * seconds:
                return f"last used {self.idle // seconds:.0f} {unit} ago"
        return f"last used {max(0.0, self.idle):.0f} s ago"


def check_owner(
    before: WorkloadSpec, owner: Creator | None, deploy: Deploy, creator: Creator, use: Use
) -> str:
    """Refuse a deploy that would take a service from its owner; returns what it replaces, in words.

    The words are empty for an edit, which a deploy without an origin is. A service without an
    origin, and a service that only selects pods, has no owner. A service whose deploys have all
    failed may be replaced by its own creator.
    """
    earlier_origin = before.origin
    if earlier_origin is None or before.compute.is_selector_only:
        return ""
    new_origin = deploy.spec.origin or earlier_origin
    is_foreign = owner is not None and owner != creator
    if not is_foreign and (new_origin.key == earlier_origin.key or use.never_served):
        return ""
    deployed_by = f", deployed by {_creator_in_words(owner)}" if is_foreign and owner else ""
    replacement = (
        f"{_service_in_words(before)} ran {earlier_origin}{deployed_by}, {use.last_in_words}; "
        "this deploy replaces the service; another name would keep both"
    )
    if deploy.replace:
        return replacement
    if is_foreign and owner:
        raise _taken_error(
            before,
            owner,
            f"belongs to {_creator_in_words(owner)}, and runs {earlier_origin}; this deploy is by "
            f"{_creator_in_words(creator)}",
            is_foreign=True,
        )
    if new_origin.is_named and new_origin.project == earlier_origin.project:
        return replacement
    if _is_namesake(earlier_origin, new_origin) and deploy.renames != earlier_origin.callable:
        raise _namesake_error(before, owner, earlier_origin, new_origin)
    reason = use.reason or (
        "" if use.is_local else _reason_of_cluster(before, earlier_origin, new_origin)
    )
    if reason:
        raise _taken_error(
            before,
            owner,
            f"runs {earlier_origin}, and {reason}; {_deploy_in_words(earlier_origin, new_origin)}",
        )
    return replacement


def _reason_of_cluster(before: WorkloadSpec, earlier_origin: Origin, new_origin: Origin) -> str:
    """Why an unused service of a cluster must stay; empty if another callable may replace it."""
    if before.callable.kind == "cls":
        return "a class has a state"
    if not earlier_origin.machine or earlier_origin.machine != new_origin.machine:
        return "another machine deployed it"
    if earlier_origin.is_named and earlier_origin.project != new_origin.project:
        return "its name was chosen"
    return ""


def _is_namesake(earlier_origin: Origin, new_origin: Origin) -> bool:
    """True for two callables of a project whose names make the same name of a service."""
    earlier_name, new_name = earlier_origin.qualname, new_origin.qualname
    return (
        earlier_origin.project == new_origin.project
        and earlier_name != new_name
        and _letters(earlier_name) == _letters(new_name)
    )


def _letters(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def _deploy_in_words(earlier_origin: Origin, new_origin: Origin) -> str:
    # Two homes have machines of their own, and a folder has one name.
    if str(new_origin) == str(earlier_origin):
        return (
            "this deploy is of the same folder, but of another machine or home "
            f"(~/.kt/machine): project {new_origin.project}, not {earlier_origin.project}"
        )
    return f"this deploy would run {new_origin} there"


def _service_in_words(spec: WorkloadSpec) -> str:
    return f"the service {spec.name} in namespace {spec.namespace}"


def _taken_error(
    before: WorkloadSpec, owner: Creator | None, reason: str, *, is_foreign: bool = False
) -> ServiceTakenError:
    exactly = " --exact-match" if is_foreign else ""
    hint = (
        "choose another name (name=...), or set a user name, which begins the names of your "
        "services (KT_USERNAME=...), or replace the service (replace=True, --replace, "
        f"KT_REPLACE=1); kt teardown {before.name}{exactly} deletes it"
    )
    return _with_details(
        ServiceTakenError(f"{_service_in_words(before)} {reason}", hint=hint), before, owner
    )


def _namesake_error(
    before: WorkloadSpec, owner: Creator | None, earlier_origin: Origin, new_origin: Origin
) -> ServiceTakenError:
    error = ServiceTakenError(
        f"{new_origin.callable} would be the service {before.name}, which "
        f"{earlier_origin.callable} of this project is already: the name of a service has no "
        "characters but a-z, 0-9 and -",
        hint=f"give one of them a name of its own, such as kt.fn({new_origin.qualname}, "
        f'name="{before.name}-2")',
    )
    return _with_details(error, before, owner)


def _with_details(
    error: ServiceTakenError, before: WorkloadSpec, owner: Creator | None
) -> ServiceTakenError:
    assert before.origin is not None
    error.name, error.namespace = before.name, before.namespace
    error.creator = "" if owner is None else str(owner)
    error.project, error.callable = before.origin.name, before.origin.callable
    return error


def _creator_in_words(creator: Creator | None) -> str:
    """A creator, with the user too: two creators may have one user name, or none."""
    user = f"user {creator.user}" if creator is not None and creator.user else ""
    if creator is None or creator.username is None:
        return user or "somebody without a user name"
    return f"{creator.username} ({user})" if user else creator.username
