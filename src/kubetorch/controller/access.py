"""Identifies the sender of a request and checks rights: the seam, and the form for one machine.

The sender of a request is identified first (`Principal`); then the route has the rights that the
request needs (`Need`), in the words of Kubernetes' RBAC. On one machine there is one user, who may
do everything; `kubetorch.controller.cluster.access` asks the API server instead.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from kubetorch.errors import ForbiddenError, UnauthorizedError
from kubetorch.lib import asgi
from kubetorch.manifests.desired_pods import MountedNames
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import tokens
from kubetorch.wire.messages import Creator, FromController

#: The API group and resource of a need that names no others.
GROUP, RESOURCE = "kubetorch.com", "kubetorchworkloads"

_POD = "pod:"
_HINT = "send the user's token as Authorization: Bearer <token>"


class BoundPod(msgspec.Struct, frozen=True):
    """The pod that a token is bound to, as the API server has verified."""

    namespace: str
    name: str
    uid: str


class User(msgspec.Struct, frozen=True):
    """A user: of this machine, or of a cluster, where service accounts are users too."""

    name: str = "user"
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()
    pod: BoundPod | None = None


class PodIdentity(msgspec.Struct, frozen=True):
    namespace: str
    workload: str
    pod: str


class NamespacePods(msgspec.Struct, frozen=True):
    """Any pod of a namespace whose workload only selects pods."""

    namespace: str


Principal = User | PodIdentity | NamespacePods


class Grant(msgspec.Struct, frozen=True):
    """The user who deployed a generation, and the secrets and volumes that its pods may mount.

    Attributes:
        user: The user who deployed; `None` where the generation was written by hand.
        secrets, volumes: Name and identity of each that the generation named.
        creator: The user that the deploy is for: a pod deploys for the creator of its workload.
            `None` where the generation was written by hand.
    """

    user: User | None = None
    secrets: tuple[tuple[str, str], ...] = ()
    volumes: tuple[tuple[str, str], ...] = ()
    creator: Creator | None = None


#: Of a generation that was written by hand, and of all generations on one machine.
NO_GRANT = Grant()


class Need(msgspec.Struct, frozen=True):
    """A right that a request needs, in the words of RBAC."""

    verb: str
    namespace: str
    name: str = ""
    subresource: str = ""
    group: str = GROUP
    resource: str = RESOURCE

    @property
    def kind(self) -> str:
        """The resource and the subresource, as the rules of roles have them."""
        return f"{self.resource}/{self.subresource}" if self.subresource else self.resource

    def __str__(self) -> str:
        where = f"in namespace {self.namespace!r}" if self.namespace else "in all namespaces"
        kind = f"{self.kind}.{self.group}" if self.group else self.kind
        return f"{self.verb} {kind} {where}"


class Gate(Protocol):
    """Identifies the senders of requests, and checks their rights."""

    def check_origin(self, headers: Mapping[str, str]) -> None:
        """Refuse a request that the page of another site made a browser send."""

    async def identify(self, headers: Mapping[str, str]) -> Principal:
        """Identify the sender of a request."""

    async def authorize(self, principal: Principal, need: Need) -> None:
        """Refuse a sender without this right."""

    def namespace_of_pod(self, principal: Principal) -> str | None:
        """The namespace of the sender, if it is a pod of a workload."""


class Access(Gate, Protocol):
    """The gate of a controller, which deploys and has sessions with pods."""

    async def check_deploy(self, principal: Principal, spec: WorkloadSpec) -> Grant:
        """Refuse a deploy whose objects the sender could not make; returns its grant.

        The grant is stored with the generation.
        """

    async def check_mounts(
        self,
        spec: WorkloadSpec,
        grants: Sequence[Grant],
        mounted: MountedNames,
        *,
        is_running: bool,
    ) -> None:
        """Refuse a pod with a secret or volume that its deployer must not see.

        The grants are those of the stored generations, the wanted one first.
        """

    def creator(self, principal: Principal, username: str | None) -> Creator:
        """The creator of a deploy by this sender, whose client has this user name configured."""

    def check_pod(self, principal: Principal, pod: PodIdentity) -> None:
        """Refuse the session of a pod to any other sender."""

    def welcome(self, pod: PodIdentity) -> FromController | None:
        """The first message of a session to its pod; `None` without one."""


class Asker:
    """The sender of a request, for handlers that check rights themselves."""

    def __init__(self, principal: Principal, gate: Gate) -> None:
        self.principal = principal
        self._gate = gate

    @property
    def name(self) -> str:
        return name_of(self.principal)

    @property
    def pod_namespace(self) -> str | None:
        return self._gate.namespace_of_pod(self.principal)

    async def require(self, need: Need) -> None:
        await self._gate.authorize(self.principal, need)

    async def may(self, need: Need) -> bool:
        try:
            await self._gate.authorize(self.principal, need)
        except (ForbiddenError, UnauthorizedError):
            return False
        return True


def name_of(principal: Principal) -> str:
    """The name of a sender in tokens and logs."""
    match principal:
        case User():
            return principal.name
        case PodIdentity():
            return f"{_POD}{principal.namespace}/{principal.pod}"
        case NamespacePods():
            return f"{_POD}{principal.namespace}/*"


def identity_of(principal: Principal) -> Principal:
    """The identity of a user, whichever token was sent: `extra` has the id of the token."""
    if isinstance(principal, User):
        return User(principal.name, principal.uid, pod=principal.pod)
    return principal


def bearer(headers: Mapping[str, str], *, hint: str) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        raise UnauthorizedError("this needs a token", hint=hint)
    return token


class LocalAccess:
    """Identifies the user of this machine by their token, and pods by the tokens of their sessions.

    Tokens for calls (`kt token`) are for agents and open nothing here.
    """

    def __init__(
        self,
        *,
        user: str,
        secret: bytes,
        clock: Callable[[], float],
        session_token_of: Callable[[PodIdentity], str],
    ) -> None:
        self._user = user
        self._secret = secret
        self._clock = clock
        # The token for the session of a pod; empty without such a pod.
        self._session_token_of = session_token_of

    def check_origin(self, headers: Mapping[str, str]) -> None:
        """See `Access`; `Host` is checked too, since everything listens on loopback."""
        asgi.check_local(headers.get("host"), headers.get("origin"))

    async def identify(self, headers: Mapping[str, str]) -> Principal:
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

    async def check_deploy(self, principal: Principal, spec: WorkloadSpec) -> Grant:
        """See `Access`: pods are processes of the user."""
        return NO_GRANT

    async def check_mounts(
        self,
        spec: WorkloadSpec,
        grants: Sequence[Grant],
        mounted: MountedNames,
        *,
        is_running: bool,
    ) -> None:
        """See `Access`: the user's own secrets and volumes."""

    def creator(self, principal: Principal, username: str | None) -> Creator:
        """See `Access`: there is one user."""
        return Creator("", username)

    def namespace_of_pod(self, principal: Principal) -> str | None:
        return principal.namespace if isinstance(principal, PodIdentity) else None

    def check_pod(self, principal: Principal, pod: PodIdentity) -> None:
        """See `Access`; the user may speak for every pod."""
        if not isinstance(principal, User) and principal != pod:
            raise UnauthorizedError(f"this token is not the one of pod {pod.pod}")

    def welcome(self, pod: PodIdentity) -> FromController | None:
        """See `Access`: a local pod has the key of its workload in a file."""
        return None

    def _pod(self, token: str) -> PodIdentity:
        audience = tokens.claimed_audience(token)
        key = tokens.workload_key(self._secret, audience)
        claims = tokens.verify(key, token, audience=audience, now=self._clock())
        namespace, _, workload = audience.partition("/")
        pod = PodIdentity(namespace, workload, claims.subject.removeprefix(_POD))
        # A pod can sign any token with its workload's key: only the token of its session counts.
        session_token = self._session_token_of(pod) if claims.subject.startswith(_POD) else ""
        if not session_token or not hmac.compare_digest(session_token.encode(), token.encode()):
            raise UnauthorizedError("this token is not for the controller", hint=_HINT)
        return pod
