"""Who may do what in a cluster: tokens and rights are those of Kubernetes.

    token ──► TokenReview ──► user ──┐
                                     ├──► SubjectAccessReview ──► yes, or 403
    route ──► need ──────────────────┘

An answer is remembered for 10 s if it was yes, for 2 s if it was no, and never beyond the end of
the token. Of a token only a hash is kept. Where the API server does not answer, nobody gets in.

Pods prove who they are by the token of their service account, which names the pod. Those that
nobody gave one for us (`NamespacePods`) bring the token of their namespace instead.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from kubetorch._version import __version__
from kubetorch.controller.access import (
    NamespacePods,
    Need,
    PodIdentity,
    Principal,
    User,
    bearer,
)
from kubetorch.controller.backends.stores import Stores
from kubetorch.controller.cluster import deputy
from kubetorch.controller.cluster.answers import Answer, Answers
from kubetorch.controller.cluster.reviews import (
    ALLOWED_SECONDS,
    DENIED_SECONDS,
    TOKEN_LIMIT,
    Reviews,
    Verdict,
    claims,
    grant,
)
from kubetorch.errors import ForbiddenError, ForeignOriginError, SpecError, UnauthorizedError
from kubetorch.k8s.resources import PODS
from kubetorch.manifests import labels
from kubetorch.manifests.kinds import Manifest
from kubetorch.specs import names
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import tokens, versions
from kubetorch.wire.messages import Welcome

_HINT = (
    "send a token of Kubernetes as Authorization: Bearer <token>; "
    "kubectl create token ACCOUNT --audience kubetorch makes one"
)


class Pods(Protocol):
    """What is known of the pods of workloads."""

    def is_pod(self, namespace: str, pod: str, uid: str) -> bool:
        """Whether there is such a pod in some workload."""

    def uid_of(self, pod: PodIdentity) -> str | None:
        """Identity of a pod of a workload; empty when it is not known, `None` without a pod."""

    def is_selector_only(self, namespace: str, workload: str) -> bool:
        """Whether there is such a workload, and its pods are made by somebody else."""


class NamespaceTokens(Protocol):
    """The tokens that namespaces have for pods which somebody else made."""

    async def check(self, token: str) -> str:
        """The namespace that a token is of.

        Raises:
            UnauthorizedError: It is of none, or not any more.
        """


class Clocks(NamedTuple):
    """Both kinds of time.

    Attributes:
        time: Seconds since the epoch.
        steady: Seconds of a clock that only goes forward.
    """

    time: Callable[[], float]
    steady: Callable[[], float]


class ClusterAccess:
    """Asks the API server, and knows pods.

    Args:
        reviews: Asks.
        pods: The pods of workloads.
        tokens_of_namespaces: Tokens of pods that somebody else made.
        stores: Secrets and volumes of the cluster.
        secret: Secret of the installation.
        clocks: Say what is over.
    """

    def __init__(
        self,
        reviews: Reviews,
        *,
        pods: Pods,
        tokens_of_namespaces: NamespaceTokens,
        stores: Stores,
        secret: bytes,
        clocks: Clocks,
    ) -> None:
        self._reviews = reviews
        self._pods = pods
        self._namespaces = tokens_of_namespaces
        self._stores = stores
        self._secret = secret
        self._time = clocks.time
        self._users: Answers[bytes, User | None] = Answers(clocks.steady)
        self._verdicts: Answers[tuple[User, Need], Verdict] = Answers(clocks.steady)

    def check_origin(self, headers: Mapping[str, str]) -> None:
        """See `Access`: no page may ask; the host is what the cluster and its ingress call us."""
        origin = headers.get("origin")
        if origin is not None:
            raise ForeignOriginError(
                f"requests of pages from {origin[:200]!r} are refused",
                hint="pages cannot use the controller; send no Origin header",
            )

    async def identify(self, headers: Mapping[str, str]) -> Principal:
        """See `Access`."""
        token = bearer(headers, hint=_HINT)
        if len(token) > TOKEN_LIMIT or not token.isascii() or not token.isprintable():
            raise UnauthorizedError("what was sent is no token", hint=_HINT)
        if tokens.is_signed(token):
            return NamespacePods(await self._namespaces.check(token))
        key = hashlib.sha256(token.encode()).digest()
        user = await self._users.get(key, lambda: self._review(token))
        if user is None:
            raise self._unknown(token)
        return user

    def _unknown(self, token: str) -> UnauthorizedError:
        # Only a guess at the reason: clocks may differ, and the API server has decided already.
        expires = claims(token).expires
        if expires is not None and expires <= self._time():
            past = self._time() - expires
            return UnauthorizedError(f"the token expired {past:.0f} s ago", hint="log in again")
        return UnauthorizedError("the API server does not know this token", hint=_HINT)

    async def _review(self, token: str) -> Answer[User | None]:
        said = claims(token)
        user = await self._reviews.user(token, said.audiences)
        if user is None:
            return Answer(None, False, DENIED_SECONDS)
        left = ALLOWED_SECONDS if said.expires is None else said.expires - self._time()
        return Answer(user, True, min(ALLOWED_SECONDS, left))

    async def authorize(self, principal: Principal, need: Need) -> None:
        """See `Access`."""
        if not isinstance(principal, User):
            raise UnauthorizedError(
                "the token of a pod is not for this", hint="use a token of a service account"
            )
        if need.namespace:
            names.check_namespace(need.namespace)
        verdict = await self._verdicts.get((principal, need), lambda: self._judge(principal, need))
        if not verdict.is_allowed:
            raise _forbidden(principal, need, verdict)

    async def _judge(self, user: User, need: Need) -> Answer[Verdict]:
        verdict = await self._reviews.verdict(user, need)
        seconds = ALLOWED_SECONDS if verdict.is_allowed else DENIED_SECONDS
        return Answer(verdict, verdict.is_allowed, seconds)

    async def check_deploy(self, principal: Principal, spec: WorkloadSpec) -> None:
        """See `Access`: beyond our own kind of pods, users need the right to make the object."""
        manifest = deputy.rendered(spec)
        if manifest is None:
            why = "its pods are found by labels, so they may be anybody's"
            needs = [
                Need(verb, spec.namespace, "", part, PODS.group, PODS.plural)
                for verb, part in deputy.OF_SELECTED
            ]
            await asyncio.gather(*(self._authorize_more(principal, need, why) for need in needs))
            return
        why = deputy.beyond(spec)
        if not why:
            foreign = await self._foreign(spec, manifest)
            if not foreign:
                return
            why = f"its pods see the {foreign}, which Kubetorch did not make"
        for verb in deputy.VERBS:
            await self._authorize_object(principal, verb, manifest, why)

    async def _authorize_object(
        self, principal: Principal, verb: str, manifest: Manifest, why: str
    ) -> None:
        resource = await self._reviews.resource_of(manifest)
        if not resource.is_namespaced:
            raise SpecError(f"a {resource.kind} lies in no namespace, so it can be no service")
        metadata = manifest["metadata"]
        need = Need(
            verb,
            metadata["namespace"],
            metadata["name"],
            group=resource.group,
            resource=resource.plural,
        )
        await self._authorize_more(principal, need, why)

    async def _authorize_more(self, principal: Principal, need: Need, why: str) -> None:
        """Refuse what goes beyond to who could not do it themselves."""
        try:
            await self.authorize(principal, need)
        except ForbiddenError as error:
            kind = f"{need.kind}.{need.group}" if need.group else need.kind
            error.hint = (
                f"{why}, and for that you need the right to {need.verb} {kind} yourself; let an "
                f"administrator bind you the ClusterRole edit in namespace {need.namespace}"
            )
            raise

    async def _foreign(self, spec: WorkloadSpec, manifest: Manifest) -> str:
        """A secret or volume of the pods that somebody else made; empty if there is none."""
        secrets, volumes = self._stores
        for name in deputy.secrets(spec, manifest):
            secret = await secrets.get(spec.namespace, name)
            if secret is not None and labels.MOUNT_TYPE not in secret.labels:
                return f"secret {name!r}"
        for name in deputy.claims(spec):
            volume = await volumes.get(spec.namespace, name)
            if volume is not None and not volume.is_ours:
                return f"volume {name!r}"
        return ""

    # ------------------------------------------------------------------------------------- pods

    def namespace_of_pod(self, principal: Principal) -> str | None:
        """See `Access`."""
        if isinstance(principal, NamespacePods):
            return principal.namespace
        pod = principal.pod if isinstance(principal, User) else None
        if pod is not None and self._pods.is_pod(pod.namespace, pod.name, pod.uid):
            return pod.namespace
        return None

    def check_pod(self, principal: Principal, pod: PodIdentity) -> None:
        """See `Access`: the token names the pod, or is for all pods that somebody else made."""
        if isinstance(principal, NamespacePods):
            if principal.namespace != pod.namespace:
                raise UnauthorizedError(f"this token is not for pods of {pod.namespace}")
            if not self._pods.is_selector_only(pod.namespace, pod.workload):
                raise UnauthorizedError(
                    f"this token is not for pods of {pod.workload}, which Kubetorch makes itself",
                    hint="they have tokens of their own",
                )
            return
        bound = principal.pod if isinstance(principal, User) else None
        if bound is None or (bound.namespace, bound.name) != (pod.namespace, pod.pod):
            raise UnauthorizedError(f"this token is not the one of pod {pod.pod}")
        uid = self._pods.uid_of(pod)
        if uid and uid != bound.uid:
            raise UnauthorizedError(f"this token is of an earlier pod {pod.pod}")

    def welcome(self, pod: PodIdentity) -> Welcome:
        """See `Access`: the key by which the pod knows tokens for its workload."""
        audience = tokens.audience(pod.namespace, pod.workload)
        key = tokens.workload_key(self._secret, audience)
        return Welcome(key=key.hex(), version=__version__, protocol=versions.PROTOCOL)


def _forbidden(user: User, need: Need, verdict: Verdict) -> ForbiddenError:
    said = f": {verdict.reason}" if verdict.reason else ""
    error = ForbiddenError(
        f"{user.name} may not {need}{said}",
        hint=f"ask an administrator: {grant(user, need)}",
    )
    error.user, error.verb, error.resource = user.name, need.verb, need.kind
    error.namespace = need.namespace
    return error
