"""Who sends a request, and whether it may: the seam, and what answers it on one machine.

A request is identified first (`Principal`); then the route that it asks for says what it needs
(`Need`), in the words of Kubernetes' RBAC. On one machine there is one user, who may do everything;
`kubetorch.controller.cluster.access` asks the API server instead.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from kubetorch.errors import ForbiddenError, ForeignOriginError, UnauthorizedError
from kubetorch.lib import origins
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import tokens
from kubetorch.wire.messages import FromController

#: What needs are about, if they do not say otherwise.
GROUP, RESOURCE = "kubetorch.com", "kubetorchworkloads"

_POD = "pod:"
_HINT = "send the user's token as Authorization: Bearer <token>"


class BoundPod(msgspec.Struct, frozen=True):
    """The pod that a token was given to, as the API server says."""

    namespace: str
    name: str
    uid: str


class User(msgspec.Struct, frozen=True):
    """A user: of this machine, or of a cluster, where service accounts are users too.

    Attributes:
        name, uid, groups, extra: As the API server knows them.
        pod: The pod that the token belongs to, if it belongs to one.
    """

    name: str = "user"
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()
    pod: BoundPod | None = None


class PodIdentity(msgspec.Struct, frozen=True):
    """A pod of a workload."""

    namespace: str
    workload: str
    pod: str


class NamespacePods(msgspec.Struct, frozen=True):
    """Any pod of a namespace that is one of a workload which only selects its pods."""

    namespace: str


Principal = User | PodIdentity | NamespacePods


class Need(msgspec.Struct, frozen=True):
    """What somebody must be allowed to do, in the words of RBAC.

    Attributes:
        verb: `get`, `list`, `create`, `update` or `delete`.
        namespace: Where; empty for all namespaces.
        name: Of which object; empty for a collection.
        subresource: The part of it, such as `call`.
        group, resource: The kind.
    """

    verb: str
    namespace: str
    name: str = ""
    subresource: str = ""
    group: str = GROUP
    resource: str = RESOURCE

    @property
    def kind(self) -> str:
        """The kind and the part of it, as roles have it."""
        return f"{self.resource}/{self.subresource}" if self.subresource else self.resource

    def __str__(self) -> str:
        where = f"in namespace {self.namespace!r}" if self.namespace else "in all namespaces"
        kind = f"{self.kind}.{self.group}" if self.group else self.kind
        return f"{self.verb} {kind} {where}"


class Access(Protocol):
    """Checks requests."""

    def check_origin(self, headers: Mapping[str, str]) -> None:
        """Refuse what the page of another site made a browser send.

        Raises:
            ForeignOriginError: It did.
        """

    async def identify(self, headers: Mapping[str, str]) -> Principal:
        """Who sends a request.

        Raises:
            UnauthorizedError: Nobody that is known. The message never repeats the token.
            ControllerUnavailableError: Whoever knows does not answer.
        """

    async def authorize(self, principal: Principal, need: Need) -> None:
        """Refuse what somebody must not do.

        Raises:
            ForbiddenError: They must not.
            UnauthorizedError: The token is not for this at all.
            ControllerUnavailableError: Whoever knows does not answer.
        """

    async def check_deploy(self, principal: Principal, spec: WorkloadSpec) -> None:
        """Refuse a deploy for which the controller would do what who deploys must not.

        Raises:
            ForbiddenError: They must not.
            SpecError: Nobody may.
            ControllerUnavailableError: Whoever knows does not answer.
        """

    def namespace_of_pod(self, principal: Principal) -> str | None:
        """The namespace of the pod that asks, if it is one that belongs to a workload."""

    def check_pod(self, principal: Principal, pod: PodIdentity) -> None:
        """Refuse the session of a pod to who is not that pod.

        Raises:
            UnauthorizedError: They are not.
        """

    def welcome(self, pod: PodIdentity) -> FromController | None:
        """What a pod is told first in its session, if it is told anything."""


class Asker:
    """Who sends a request, for handlers that know only when they look what it needs.

    Args:
        principal: Who.
        access: Decides.
    """

    def __init__(self, principal: Principal, access: Access) -> None:
        self.principal = principal
        self._access = access

    @property
    def name(self) -> str:
        """What the tokens that are made for them, and the audit log, call them."""
        return name_of(self.principal)

    @property
    def pod_namespace(self) -> str | None:
        """The namespace of the pod that asks, if it is one that belongs to a workload."""
        return self._access.namespace_of_pod(self.principal)

    async def require(self, need: Need) -> None:
        """Refuse what they must not do.

        Raises:
            ForbiddenError: They must not.
        """
        await self._access.authorize(self.principal, need)

    async def check_deploy(self, spec: WorkloadSpec) -> None:
        """See `Access`."""
        await self._access.check_deploy(self.principal, spec)

    async def may(self, need: Need) -> bool:
        """Whether they may do something."""
        try:
            await self._access.authorize(self.principal, need)
        except (ForbiddenError, UnauthorizedError):
            return False
        return True


def name_of(principal: Principal) -> str:
    """Somebody's name in tokens and logs."""
    match principal:
        case User():
            return principal.name
        case PodIdentity():
            return f"{_POD}{principal.namespace}/{principal.pod}"
        case NamespacePods():
            return f"{_POD}{principal.namespace}/*"


def bearer(headers: Mapping[str, str], *, hint: str) -> str:
    """The token of a request.

    Args:
        headers: Its headers.
        hint: What to tell who sends none.

    Raises:
        UnauthorizedError: There is none.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        raise UnauthorizedError("this needs a token", hint=hint)
    return token


class LocalAccess:
    """Knows the user of this machine by their own token, and pods by the tokens that they got.

    Tokens for calls (`kt token`) are for agents and open nothing here.

    Args:
        user: Fingerprint of the user's token.
        secret: Secret of the installation.
        clock: Seconds since the epoch.
        is_known: Whether there is such a pod; the token of one that is gone opens nothing.
    """

    def __init__(
        self,
        *,
        user: str,
        secret: bytes,
        clock: Callable[[], float],
        is_known: Callable[[PodIdentity], bool],
    ) -> None:
        self._user = user
        self._secret = secret
        self._clock = clock
        self._is_known = is_known

    def check_origin(self, headers: Mapping[str, str]) -> None:
        """See `Access`; `Host` is checked too, since everything listens on loopback."""
        if not origins.is_local_host(headers.get("host")):
            host = headers.get("host")
            raise ForeignOriginError(f"the Host header {host!r} is not one of this machine")
        if not origins.is_local_origin(headers.get("origin")):
            raise ForeignOriginError(f"requests of pages from {headers['origin']!r} are refused")

    async def identify(self, headers: Mapping[str, str]) -> Principal:
        """See `Access`."""
        token = bearer(headers, hint=_HINT)
        if hmac.compare_digest(tokens.fingerprint(token), self._user):
            return User()
        return self._pod(token)

    async def authorize(self, principal: Principal, need: Need) -> None:
        """See `Access`: the user may do everything, pods may not."""
        if not isinstance(principal, User):
            raise UnauthorizedError(
                "the token of a pod is not for this", hint="use the user's token"
            )

    async def check_deploy(self, principal: Principal, spec: WorkloadSpec) -> None:
        """See `Access`: pods are processes of the user."""

    def namespace_of_pod(self, principal: Principal) -> str | None:
        """See `Access`."""
        return principal.namespace if isinstance(principal, PodIdentity) else None

    def check_pod(self, principal: Principal, pod: PodIdentity) -> None:
        """See `Access`; the user may speak for every pod."""
        if not isinstance(principal, User) and principal != pod:
            raise UnauthorizedError(f"this token is not the one of pod {pod.pod}")

    def welcome(self, pod: PodIdentity) -> FromController | None:
        """See `Access`; what a pod must know lies in its files."""
        return None

    def _pod(self, token: str) -> PodIdentity:
        audience = tokens.claimed_audience(token)
        key = tokens.workload_key(self._secret, audience)
        claims = tokens.verify(key, token, audience=audience, now=self._clock())
        namespace, _, workload = audience.partition("/")
        pod = PodIdentity(namespace, workload, claims.subject.removeprefix(_POD))
        if not claims.subject.startswith(_POD) or not self._is_known(pod):
            raise UnauthorizedError("this token is not for the controller", hint=_HINT)
        return pod
