"""Whose service it is: whether a deploy may take the place of what is deployed. Pure.

A service is of a creator, a project and a callable, whose deploys are edits. A deploy of another
creator is refused. Another callable of the same creator replaces a service that nobody uses: on
this machine always, in a cluster only where that is certain.
"""

from __future__ import annotations

from dataclasses import dataclass

from kubetorch.errors import ServiceTakenError
from kubetorch.specs.workload import Origin, WorkloadSpec
from kubetorch.wire.messages import Creator, Deploy

#: Seconds for which nobody has used a service of a cluster that another one may replace.
UNUSED = 600.0
#: Units of a time that has passed, in seconds.
_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"))


@dataclass(frozen=True)
class Use:
    """The use of a service at one moment.

    Attributes:
        is_local: Whether it runs on this machine.
        reason: Why no other callable may replace it: who uses it. Empty if nobody does.
        idle: Seconds since the last call; `None` if there was none.
        never_served: Whether all its deploys have failed.
    """

    is_local: bool
    reason: str = ""
    idle: float | None = None
    never_served: bool = False

    @property
    def last(self) -> str:
        """The time of the last call, for people."""
        if self.idle is None:
            return "never used"
        for seconds, unit in _UNITS:
            if self.idle >= 2 * seconds:
                return f"last used {self.idle // seconds:.0f} {unit} ago"
        return f"last used {max(0.0, self.idle):.0f} s ago"


def check_owner(
    before: WorkloadSpec, owner: Creator | None, deploy: Deploy, by: Creator, use: Use
) -> str:
    """Refuse a deploy that would take a service away; returns what it replaces, if that is news.

    A service that an earlier version deployed, and one that only selects pods, is anybody's. One
    whose deploys have all failed is nothing that its own creator could lose.
    """
    was, now = before.origin, deploy.spec.origin
    if was is None or before.compute.is_selector_only:
        return ""
    is_foreign = owner is not None and owner != by
    # An earlier client does not say whose code it deploys.
    is_other_project = now is not None and now.project != was.project
    if not is_foreign and (now is None or now.key == was.key or use.never_served):
        return ""
    said = f", deployed by {_named(owner)}" if is_foreign and owner else ""
    news = f"{_service(before)} ran {was}{said}, {use.last}; this deploy replaces the service"
    if deploy.replace:
        return news
    if is_foreign or now is None:
        whose = f"belongs to {_named(owner)}, and " if owner else ""
        raise _taken(
            before,
            owner,
            f"{whose}runs {was}; this deploy is by {_named(by)}",
            is_foreign=is_foreign,
        )
    if now.is_named and not is_other_project:
        return news
    if _is_namesake(was, now) and deploy.renames != was.callable:
        raise _namesake(before, owner, was, now)
    reason = use.reason or ("" if use.is_local else _reason_of_cluster(before, was, now))
    if reason:
        raise _taken(before, owner, f"runs {was}, and {reason}; {_deploys(was, now)}")
    return news


def _reason_of_cluster(before: WorkloadSpec, was: Origin, now: Origin) -> str:
    """Why a service in a cluster that nobody uses stays; empty if it does not."""
    if before.callable.kind == "cls":
        return "a class has a state"
    if not was.machine or was.machine != now.machine:
        return "another machine deployed it"
    if was.is_named and was.project != now.project:
        return "its name was chosen"
    return ""


def _is_namesake(was: Origin, now: Origin) -> bool:
    """True for two callables of a project that only a service's name cannot tell apart."""
    first, second = was.qualname, now.qualname
    return was.project == now.project and first != second and _letters(first) == _letters(second)


def _letters(name: str) -> str:
    return "".join(one for one in name.lower() if one.isalnum())


def _deploys(was: Origin, now: Origin) -> str:
    # Two homes have machines of their own, and a folder has one name.
    if str(now) == str(was):
        return (
            "this deploy is of the same folder, but of another machine or home "
            f"(~/.kt/machine): project {now.project}, not {was.project}"
        )
    return f"this deploy would run {now} there"


def _service(spec: WorkloadSpec) -> str:
    return f"the service {spec.name} in namespace {spec.namespace}"


def _taken(
    before: WorkloadSpec, owner: Creator | None, why: str, *, is_foreign: bool = False
) -> ServiceTakenError:
    exactly = " --exact-match" if is_foreign else ""
    hint = (
        "choose another name (name=...), or set a user name, which begins the names of your "
        "services (KT_USERNAME=...), or replace the service (replace=True, --replace, "
        f"KT_REPLACE=1); kt teardown {before.name}{exactly} deletes it"
    )
    return _described(ServiceTakenError(f"{_service(before)} {why}", hint=hint), before, owner)


def _namesake(
    before: WorkloadSpec, owner: Creator | None, was: Origin, now: Origin
) -> ServiceTakenError:
    error = ServiceTakenError(
        f"{now.callable} would be the service {before.name}, which {was.callable} of this project "
        "is already: the name of a service has no characters but a-z, 0-9 and -",
        hint=f"give one of them a name of its own, such as kt.fn({now.qualname}, "
        f'name="{before.name}-2")',
    )
    return _described(error, before, owner)


def _described(
    error: ServiceTakenError, before: WorkloadSpec, owner: Creator | None
) -> ServiceTakenError:
    assert before.origin is not None
    error.name, error.namespace = before.name, before.namespace
    error.creator = "" if owner is None else str(owner)
    error.project, error.callable = before.origin.name, before.origin.callable
    return error


def _named(creator: Creator | None) -> str:
    """A creator in a message: two may have one user name, or none."""
    user = f"user {creator.user}" if creator is not None and creator.user else ""
    if creator is None or creator.username is None:
        return user or "somebody without a user name"
    return f"{creator.username} ({user})" if user else creator.username
