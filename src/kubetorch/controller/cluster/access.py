"""Checks the rights of senders in a cluster: tokens and rights are those of Kubernetes.

    token ──► TokenReview ──► user ──┐
                                     ├──► SubjectAccessReview ──► yes, or 403
    route ──► need ──────────────────┘

Where the API server does not answer, nobody gets in. An answer is remembered for 10 s if it was
yes, for 2 s if it was no, and never beyond the end of the token. Of users' tokens only hashes are
kept.
Equal questions at one time are asked once. Refusals are remembered apart from permissions, so that
a stranger with many questions cannot push out the answers of users who are allowed in.

Pods prove who they are by the token of their service account, which names the pod. Pods to which
Kubetorch gave no such token (`NamespacePods`) bring the token of their namespace instead, from the
Secret `kubetorch-pod-token` of the namespace. The token opens sessions, and the blobs of the
namespace, and only for pods of workloads that select pods by labels. Deleting the Secret makes the
token void.

The controller makes objects with its own rights, which are more than those of most users. Who may
`create kubetorchworkloads` in a namespace may have pods there as Kubetorch renders them: its own
kinds, its own service account, secrets and volumes that Kubetorch made. What goes beyond that is
done only for users who could have made such an object themselves. A deploy that only selects pods
makes none, but runs code in them and shows their logs, whoever made them and for whatever.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from kubetorch._version import __version__
from kubetorch.controller.access import (
    BoundPod,
    Grant,
    NamespacePods,
    Need,
    PodIdentity,
    Principal,
    User,
    bearer,
    name_of,
)
from kubetorch.controller.backends.base import Stores
from kubetorch.controller.backends.kubernetes.secrets import SECRETS
from kubetorch.controller.relay import NO_HOSTS, Hosts
from kubetorch.controller.workload import Workload
from kubetorch.controller.workloads import Workloads
from kubetorch.errors import (
    ControllerUnavailableError,
    ForbiddenError,
    ForeignOriginError,
    KubernetesConflictError,
    KubernetesForbiddenError,
    KubernetesNotFoundError,
    KubetorchError,
    ServiceNotFoundError,
    SpecError,
    UnauthorizedError,
)
from kubetorch.k8s import failures
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import PODS, Object, Ref, Resource
from kubetorch.lib import deadlines
from kubetorch.manifests import kinds, labels, rendering
from kubetorch.manifests.agent import AUDIENCE
from kubetorch.manifests.agent_container import SERVICE_ACCOUNT
from kubetorch.manifests.desired_pods import Mounted, read_mounted
from kubetorch.manifests.kinds import Manifest
from kubetorch.manifests.workload_manifest import WorkloadManifest
from kubetorch.specs import names
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import tokens, versions
from kubetorch.wire.messages import Creator, Welcome

#: Characters that a token may have.
TOKEN_LIMIT = 32 * 1024
#: Reviews at one time: fewer than the client has turns, so that strangers with many tokens hold up
#: each other and nothing else that the controller asks of the API server.
AT_ONCE = 12
#: Seconds in which the same answer is given without asking again.
ALLOWED_SECONDS, DENIED_SECONDS = 10.0, 2.0

_POD_NAME = "authentication.kubernetes.io/pod-name"
_POD_UID = "authentication.kubernetes.io/pod-uid"
# Parts of workloads that the role kubetorch-view shows.
_VIEWED = ("", "logs", "status", "volumes")
_ACCOUNT = "system:serviceaccount:"
#: Answers of each kind that are remembered.
SIZE = 4096
#: Questions that are under way at one time; further ones are refused.
UNDER_WAY = 512
#: Seconds that an answer may take.
PATIENCE = 15.0
_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")
#: What somebody needs who has an object made that goes beyond: they could make it themselves.
_OBJECT_VERBS = ("create", "patch")
#: API groups whose kinds the cluster's own role `edit` has.
_EDITED = ("", "apps", "batch")
_CONTROLLER = "kubetorch-controller"
#: What somebody needs on all pods of a namespace who selects some: verb and part.
_SELECTED_PODS_VERBS = (("create", ""), ("patch", ""), ("get", "log"))
#: Name of the Secret, and the key in it.
SECRET, KEY = "kubetorch-pod-token", "token"
#: Seconds that a token is good for, and those before its end in which the next deploy makes a new
#: one. Pods that mount the Secret see the new one by themselves.
LIFETIME, RENEWED_BEFORE = 365 * 86400.0, 90 * 86400.0
#: Seconds in which the Secret is not read again, when it is there and when it is not.
_KNOWN_SECONDS, _UNKNOWN_SECONDS = 10.0, 2.0
_SUBJECT = "namespace-pods"
_POD_TOKEN_HINT = f"mount the key {KEY!r} of the Secret {SECRET!r} of the pod's namespace"
_HINT = (
    "send a token of Kubernetes as Authorization: Bearer <token>; "
    "kubectl create token ACCOUNT --audience kubetorch makes one"
)


class Verdict(NamedTuple):
    is_allowed: bool
    reason: str


class UncheckedClaims(NamedTuple):
    """What a token says of itself, which nobody has verified."""

    audiences: tuple[str, ...] = ()
    expires: float | None = None


def token_claims(token: str) -> UncheckedClaims:
    """The claims of a token, if it is a JWT; any text is accepted, and nothing is checked."""
    parts = token.split(".")
    if len(parts) != 3:
        return UncheckedClaims()
    try:
        found = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (ValueError, binascii.Error, RecursionError):
        return UncheckedClaims()
    if not isinstance(found, dict):
        return UncheckedClaims()
    given, expires = found.get("aud"), found.get("exp")
    audiences = given if isinstance(given, list) else [given]
    return UncheckedClaims(
        tuple(one for one in audiences if isinstance(one, str)),
        float(expires) if isinstance(expires, (int, float)) and abs(expires) < 1e15 else None,
    )


class Reviews:
    def __init__(
        self, client: Client, watched: tuple[str, ...] = (), install_namespace: str = "kubetorch"
    ) -> None:
        self._client = client
        self._watched = watched
        #: The user that the controller itself is.
        self.controller = User(
            f"{_ACCOUNT}{install_namespace}:{_CONTROLLER}",
            groups=(
                "system:serviceaccounts",
                f"system:serviceaccounts:{install_namespace}",
                "system:authenticated",
            ),
        )
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def user(self, token: str, audiences: tuple[str, ...]) -> User | None:
        asked = [AUDIENCE] if AUDIENCE in audiences else []
        spec = {"token": token, **({"audiences": asked} if asked else {})}
        status = await self._review("authentication.k8s.io/v1", "TokenReview", spec)
        if status.get("authenticated") is not True or status.get("error"):
            return None
        # A server that knows nothing of audiences names none, and has not checked ours.
        if asked and AUDIENCE not in (status.get("audiences") or ()):
            return None
        return _user(status.get("user") or {}, is_for_us=bool(asked))

    async def verdict(self, user: User, need: Need) -> Verdict:
        """Review a right; without a namespace, in all watched ones."""
        if need.namespace or not self._watched:
            return await self._verdict(user, need)
        needs = [msgspec.structs.replace(need, namespace=where) for where in self._watched]
        found = await asyncio.gather(*(self._verdict(user, one) for one in needs))
        return next((one for one in found if not one.is_allowed), found[0])

    async def _verdict(self, user: User, need: Need) -> Verdict:
        attributes = msgspec.structs.asdict(need)
        spec = {
            "user": user.name,
            "uid": user.uid,
            "groups": list(user.groups),
            "extra": {key: list(values) for key, values in user.extra},
            "resourceAttributes": {key: text for key, text in attributes.items() if text},
        }
        status = await self._review("authorization.k8s.io/v1", "SubjectAccessReview", spec)
        reason = str(status.get("reason") or status.get("evaluationError") or "")
        is_allowed = status.get("allowed") is True and status.get("denied") is not True
        return Verdict(is_allowed, reason)

    async def resource_of(self, manifest: Manifest) -> Resource:
        """The resource of an object's kind; a guess for a kind that is not served."""
        try:
            return await self._client.discovery.resource_of(manifest)
        except KubernetesNotFoundError:
            kind = kinds.find(manifest) or kinds.custom(manifest, ())
            version = manifest["apiVersion"].rpartition("/")[2]
            return Resource(kind.group, version, kind.plural, kind.kind)
        except KubetorchError as error:
            raise _unavailable() from error

    async def is_served(self, manifest: Manifest) -> bool:
        try:
            await self._client.discovery.resource_of(manifest)
        except KubernetesNotFoundError:
            return False
        return True

    async def _review(self, api_version: str, kind: str, spec: dict[str, Any]) -> Object:
        manifest: Object = {"apiVersion": api_version, "kind": kind, "metadata": {}, "spec": spec}
        try:
            async with self._turns:
                status = (await self._client.create(manifest)).get("status")
        except KubernetesForbiddenError as error:
            raise ControllerUnavailableError(
                f"the controller cannot check who asks: it may not create a {kind}",
                hint="kt upgrade (or helm upgrade) puts the ClusterRole of the controller right; "
                "kt check names what is missing",
            ) from error
        except KubetorchError as error:
            raise _unavailable() from error
        return status if isinstance(status, dict) else {}


def _unavailable() -> ControllerUnavailableError:
    return ControllerUnavailableError(
        "the controller cannot check who asks: the cluster's API server does not answer",
        hint="try again when it does; calls go on meanwhile with the tokens that they have",
    )


def grant(user: User, need: Need) -> str:
    """The command with which an administrator lets somebody do something."""
    is_view = need.verb in ("get", "list") and need.subresource in _VIEWED
    role = "kubetorch-view" if is_view else "kubetorch-edit"
    who, name = _subject(user), "NAME"
    if who.startswith("--serviceaccount"):
        name = who.rpartition(":")[2]
    kind, where = "clusterrolebinding", ""
    if need.namespace:
        kind, where = "rolebinding", f" -n {need.namespace}"
    return f"kubectl create {kind} {name}-{role} --clusterrole={role} {who}{where}"


def _subject(user: User) -> str:
    """A user as `kubectl create rolebinding` has them."""
    account = user.name.removeprefix(_ACCOUNT)
    if user.name.startswith(_ACCOUNT) and account.partition(":")[2]:
        return f"--serviceaccount={account}"
    return f"--user={user.name}"


def _user(found: Object, *, is_for_us: bool) -> User:
    """The user of a review; a pod is one by a token for us alone, not by that for the API."""
    name = str(found.get("username") or "")
    if not name:
        raise UnauthorizedError("the token belongs to a user without a name")
    extra = {
        str(key): tuple(map(str, values)) for key, values in (found.get("extra") or {}).items()
    }
    return User(
        name=name,
        uid=str(found.get("uid") or ""),
        groups=tuple(map(str, found.get("groups") or ())),
        extra=tuple(sorted(extra.items())),
        pod=_pod(name, extra) if is_for_us else None,
    )


def _pod(name: str, extra: dict[str, tuple[str, ...]]) -> BoundPod | None:
    """The pod that a service account's token was given to."""
    pod, uid = extra.get(_POD_NAME, ()), extra.get(_POD_UID, ())
    if not name.startswith(_ACCOUNT) or len(pod) != 1 or len(uid) != 1:
        return None
    namespace = name.removeprefix(_ACCOUNT).partition(":")[0]
    return BoundPod(namespace, pod[0], uid[0])


class Answer(NamedTuple, Generic[_Value]):
    value: _Value
    is_yes: bool
    seconds: float


class AnswerCache(Generic[_Key, _Value]):
    """Remembers answers for some seconds, and asks equal questions once."""

    def __init__(
        self,
        now: Callable[[], float],
        *,
        size: int = SIZE,
        under_way: int = UNDER_WAY,
        patience: float = PATIENCE,
    ) -> None:
        self._now = now
        self._size = size
        self._limit = under_way
        self._patience = patience
        self._yes: OrderedDict[_Key, tuple[float, _Value]] = OrderedDict()
        self._no: OrderedDict[_Key, tuple[float, _Value]] = OrderedDict()
        self._asking: dict[_Key, asyncio.Task[_Value]] = {}

    async def get(self, key: _Key, ask: Callable[[], Awaitable[Answer[_Value]]]) -> _Value:
        for memory in (self._yes, self._no):
            known = memory.get(key)
            if known is not None and known[0] > self._now():
                memory.move_to_end(key)
                return known[1]
        task = self._asking.get(key)
        if task is None:
            if len(self._asking) >= self._limit:
                raise ControllerUnavailableError(
                    "the controller checks too many requests at this moment",
                    hint="try again in a moment",
                )
            task = asyncio.get_running_loop().create_task(self._ask(key, ask))
            self._asking[key] = task
            task.add_done_callback(lambda done: self._asked(key, done))
        # Whoever asked first may go away, and the others still wait for the answer.
        return await asyncio.shield(task)

    def forget(self, key: _Key) -> None:
        self._yes.pop(key, None)
        self._no.pop(key, None)

    def __len__(self) -> int:
        return len(self._yes) + len(self._no)

    async def _ask(self, key: _Key, ask: Callable[[], Awaitable[Answer[_Value]]]) -> _Value:
        try:
            async with deadlines.timeout(self._patience):
                answer = await ask()
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise ControllerUnavailableError(
                f"the API server has not said within {self._patience:.0f} s who may do this",
                hint="try again when the cluster's API server answers",
            ) from error
        self.forget(key)
        if answer.seconds > 0:
            memory = self._yes if answer.is_yes else self._no
            memory[key] = (self._now() + answer.seconds, answer.value)
            while len(memory) > self._size:
                memory.popitem(last=False)
        return answer.value

    def _asked(self, key: _Key, task: asyncio.Task[_Value]) -> None:
        del self._asking[key]
        if not task.cancelled():
            task.exception()  # retrieved: all who waited for it may have gone


class Seen(NamedTuple):
    """A secret or volume, as it is now."""

    kind: str
    name: str
    identity: str = ""
    #: Whether whoever deploys may see it, since Kubetorch made it, or nothing is there.
    is_free: bool = True

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


class Clocks(NamedTuple):
    """The time of day, and one that is never set."""

    time: Callable[[], float]
    steady: Callable[[], float]


class ClusterAccess:
    """Decides by reviews of the API server, and by the pods of workloads."""

    def __init__(
        self,
        reviews: Reviews,
        *,
        pods: WorkloadPods,
        pod_tokens: PodTokens,
        stores: Stores,
        secret: bytes,
        clocks: Clocks,
        hosts: Hosts = NO_HOSTS,
    ) -> None:
        self._reviews = reviews
        self._hosts = hosts
        self._pods = pods
        self._pod_tokens = pod_tokens
        self._stores = stores
        self._secret = secret
        self._time = clocks.time
        self._users: AnswerCache[bytes, User | None] = AnswerCache(clocks.steady)
        self._verdicts: AnswerCache[tuple[User, Need], Verdict] = AnswerCache(clocks.steady)

    def check_origin(self, headers: Mapping[str, str]) -> None:
        """See `Access`: no page may ask; the host is what the cluster and its ingress call us."""
        origin = headers.get("origin")
        if origin is not None:
            raise ForeignOriginError(
                f"requests of pages from {origin[:200]!r} are refused",
                hint="pages cannot use the controller; send no Origin header",
            )

    async def identify(self, headers: Mapping[str, str]) -> Principal:
        token = bearer(headers, hint=_HINT)
        if len(token) > TOKEN_LIMIT or not token.isascii() or not token.isprintable():
            raise UnauthorizedError("what was sent is no token", hint=_HINT)
        if tokens.is_signed(token):
            return NamespacePods(await self._pod_tokens.check(token))
        key = hashlib.sha256(token.encode()).digest()
        user = await self._users.get(key, lambda: self._review(token))
        if user is None:
            raise self._unknown(token)
        return user

    def _unknown(self, token: str) -> UnauthorizedError:
        # Only a guess at the reason: clocks may differ, and the API server has decided already.
        expires = token_claims(token).expires
        if expires is not None and expires <= self._time():
            past = self._time() - expires
            return UnauthorizedError(f"the token expired {past:.0f} s ago", hint="log in again")
        return UnauthorizedError("the API server does not know this token", hint=_HINT)

    async def _review(self, token: str) -> Answer[User | None]:
        said = token_claims(token)
        user = await self._reviews.user(token, said.audiences)
        if user is None:
            return Answer(None, False, DENIED_SECONDS)
        left = ALLOWED_SECONDS if said.expires is None else said.expires - self._time()
        return Answer(user, True, min(ALLOWED_SECONDS, left))

    async def authorize(self, principal: Principal, need: Need) -> None:
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

    async def check_deploy(self, principal: Principal, spec: WorkloadSpec) -> Grant:
        """See `Access`: beyond our own kind of pods, users need the right to make the object."""
        user = principal if isinstance(principal, User) else None
        creator = self.creator(principal, spec.username)
        if spec.compute.is_selector_only:
            why = "its pods are found by labels, so they may be anybody's"
            needs = [
                Need(verb, spec.namespace, "", part, PODS.group, PODS.plural)
                for verb, part in _SELECTED_PODS_VERBS
            ]
            await asyncio.gather(*(self._authorize_more(principal, need, why) for need in needs))
            return Grant(user, creator=creator)
        manifest = rendering.of_workload(spec)
        secrets, volumes = await self._look(spec.namespace, _mounted(spec, manifest))
        foreign = next((one for one in (*secrets, *volumes) if not one.is_free), None)
        why = beyond_rendered(spec)
        if not why and foreign is not None:
            why = f"its pods see the {foreign}, which Kubetorch did not make"
        if why:
            await self._authorize_object(principal, manifest, why)
        return Grant(user, _identified(secrets), _identified(volumes), creator)

    async def check_mounts(
        self,
        spec: WorkloadSpec,
        grants: Sequence[Grant | None],
        mounted: Mounted,
        *,
        is_running: bool,
    ) -> None:
        """See `Access`: what is there by now under the names of what was mounted is compared.

        Whoever deploys may see what Kubetorch made; what was there when they did; and all that they
        have the right to have objects mount.
        """
        latest = grants[0]
        if latest is None:
            return  # an earlier version deployed it
        secrets, volumes = await self._look(spec.namespace, mounted)
        known = [one for one in grants if one is not None]
        granted = {("secret", *each) for one in known for each in one.secrets}
        granted |= {("volume", *each) for one in known for each in one.volumes}
        for one in (*secrets, *volumes):
            if not one.identity:
                if not is_running and one.name not in mounted.optional:
                    raise ForbiddenError(
                        f"the {one} that the pod of {spec.name} was started with is gone",
                        hint="another pod takes its place; deploy again if that is refused too",
                    )
            elif not (one.is_free or one[:3] in granted):
                await self._check_replaced(spec, latest.user, one)

    async def _check_replaced(self, spec: WorkloadSpec, user: User | None, one: Seen) -> None:
        """Refuse what took the place of what was granted to who has no right to it."""
        who = "nobody with a right to it" if user is None else user.name
        error = ForbiddenError(
            f"a pod of {spec.name} has the {one} mounted, which Kubetorch did not make, and which "
            f"is not what was there when {spec.name} was deployed by {who}",
            hint=f"let somebody deploy {spec.name} who may see it",
        )
        if user is None:
            raise error
        try:
            await self._authorize_object(user, rendering.of_workload(spec), error.message)
        except ForbiddenError as refusal:
            raise error from refusal

    async def _look(self, namespace: str, mounted: Mounted) -> tuple[list[Seen], list[Seen]]:
        """The secrets and volumes of these names, as they are now."""
        of_secrets, of_volumes = self._stores
        secrets, volumes = await asyncio.gather(
            asyncio.gather(*(of_secrets.get(namespace, name) for name in mounted.secrets)),
            asyncio.gather(*(of_volumes.get(namespace, name) for name in mounted.claims)),
        )
        return (
            [
                Seen("secret", name, one.identity, labels.MOUNT_TYPE in one.labels)
                if one is not None
                else Seen("secret", name)
                for name, one in zip(mounted.secrets, secrets, strict=True)
            ],
            [
                Seen("volume", name, one.identity, one.is_ours)
                if one is not None
                else Seen("volume", name)
                for name, one in zip(mounted.claims, volumes, strict=True)
            ],
        )

    async def _authorize_object(self, principal: Principal, manifest: Manifest, why: str) -> None:
        resource = await self._reviews.resource_of(manifest)
        if not resource.is_namespaced:
            raise SpecError(f"a {resource.kind} lies in no namespace, so it can be no service")
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]

        def need(verb: str) -> Need:
            return Need(verb, namespace, name, group=resource.group, resource=resource.plural)

        # The chart grants the controller the kinds that Kubetorch knows; without its operator a
        # kind is an error of its own.
        is_own = kinds.find(manifest) is None and await self._reviews.is_served(manifest)
        asked = failures.MAKER_VERBS if is_own else ()
        lacking = [verb for verb in asked if not await self._controller_may(need(verb))]
        rule = ""
        if lacking:
            rule = (
                f"the controller lacks the rule apiGroups: [{resource.group}], "
                f"resources: [{resource.plural}], verbs: [{', '.join(lacking)}]"
            )
        for verb in _OBJECT_VERBS:
            await self._authorize_more(principal, need(verb), why, rule)
        if lacking:
            controller = self._reviews.controller
            error = _forbidden(controller, need(lacking[0]), Verdict(False, ""))
            error.message = f"{rule} in namespace {namespace!r}"
            error.hint = _commands(need(lacking[0]), [controller])
            raise error

    async def _controller_may(self, need: Need) -> bool:
        user = self._reviews.controller
        verdict = await self._verdicts.get((user, need), lambda: self._judge(user, need))
        return verdict.is_allowed

    async def _authorize_more(
        self, principal: Principal, need: Need, why: str, rule: str = ""
    ) -> None:
        """Refuse what goes beyond to who could not do it themselves.

        `rule`: what the controller would lack for it, too.
        """
        try:
            await self.authorize(principal, need)
        except ForbiddenError as error:
            kind = f"{need.kind}.{need.group}" if need.group else need.kind
            error.hint = f"{why}, and for that you need the right to {need.verb} {kind} yourself; "
            if need.group in _EDITED:
                error.hint += (
                    "let an administrator bind you the ClusterRole edit in namespace "
                    f"{need.namespace}"
                )
                raise
            users = [principal] if isinstance(principal, User) else []
            if rule:
                error.hint += f"{rule}; "
                users.append(self._reviews.controller)
            error.hint += _commands(need, users)
            raise

    def creator(self, principal: Principal, username: str | None) -> Creator:
        """See `Access`: a pod deploys for the creator of its workload."""
        pod = principal.pod if isinstance(principal, User) else None
        found = None if pod is None else self._pods.workload_of(pod)
        return (found and found.creator) or Creator(name_of(principal), username)

    def namespace_of_pod(self, principal: Principal) -> str | None:
        if isinstance(principal, NamespacePods):
            return principal.namespace
        pod = principal.pod if isinstance(principal, User) else None
        if pod is not None and self._pods.workload_of(pod) is not None:
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
        return Welcome(
            key=key.hex(),
            version=__version__,
            protocol=versions.PROTOCOL,
            app_hosts=self._hosts.known(pod.namespace, pod.workload),
        )


def _commands(need: Need, users: Sequence[User]) -> str:
    """What grants a kind of somebody's own to users, for people."""
    kind = f"{need.resource}.{need.group}"
    subjects = [_subject(user) for user in users]
    commands = failures.grant_commands(kind, failures.MAKER_VERBS, subjects, need.namespace)
    return f"an administrator grants it with\n{commands}\nor by rbac.extraRules of the chart"


def _identified(found: Sequence[Seen]) -> tuple[tuple[str, str], ...]:
    return tuple((one.name, one.identity) for one in found)


def _forbidden(user: User, need: Need, verdict: Verdict) -> ForbiddenError:
    said = f": {verdict.reason}" if verdict.reason else ""
    error = ForbiddenError(
        f"{user.name} may not {need}{said}",
        hint=f"ask an administrator: {grant(user, need)}",
    )
    error.user, error.verb, error.resource = user.name, need.verb, need.kind
    error.namespace = need.namespace
    return error


def beyond_rendered(spec: WorkloadSpec) -> str:
    """The reason why a spec goes beyond the pods that Kubetorch renders; empty if it does not."""
    compute = spec.compute
    if compute.manifest is not None:
        return "it brings a manifest of its own"
    if compute.service_template is not None:
        return "its service_template changes the object"
    if compute.service_account_name not in (None, SERVICE_ACCOUNT):
        return f"its pods run as the service account {compute.service_account_name!r}"
    if compute.selector is not None and not compute.is_selector_only:
        return "its pods are found by labels of its own"
    return ""


def _mounted(spec: WorkloadSpec, manifest: Manifest) -> Mounted:
    """The names of the secrets and claims that the pods of an object see."""
    workload = WorkloadManifest.parse(manifest, spec.compute.pod_template_path)
    seen = [read_mounted(one.spec, one.container) for one in workload.templates]
    secrets = [ref.object_name for ref in spec.compute.secrets]
    claims = [volume.claim_name for volume in spec.compute.volumes]
    return Mounted(
        tuple(dict.fromkeys([*secrets, *(name for one in seen for name in one.secrets)])),
        tuple(dict.fromkeys([*claims, *(name for one in seen for name in one.claims)])),
    )


class WorkloadPods:
    def __init__(self, workloads: Workloads) -> None:
        self._workloads = workloads

    def workload_of(self, pod: BoundPod) -> Workload | None:
        for workload in self._workloads.in_namespace(pod.namespace):
            for one in workload.pods:
                if one.name == pod.name:
                    return workload if one.uid in ("", pod.uid) else None
        return None

    def uid_of(self, pod: PodIdentity) -> str | None:
        """Identity of a pod of a workload; empty when it is not known, `None` without a pod."""
        workload = self._workloads.workload_of(pod)
        found = [] if workload is None else workload.pods
        return next((one.uid for one in found if one.name == pod.pod), None)

    def is_selector_only(self, namespace: str, workload: str) -> bool:
        """True for a workload whose pods are made by somebody else."""
        try:
            found = self._workloads.get(namespace, workload)
        except ServiceNotFoundError:
            return False
        return found.spec.compute.is_selector_only


class PodTokens:
    """The tokens of namespaces, which pods bring that Kubetorch did not make."""

    def __init__(self, client: Client, *, secret: bytes, clocks: Clocks) -> None:
        self._client = client
        self._secret = secret
        self._time = clocks.time
        self._current: AnswerCache[str, str] = AnswerCache(clocks.steady)

    async def ensure(self, namespace: str) -> None:
        """Provide a token in a namespace that is valid for some time."""
        token = await self._read(namespace)
        if token and self._left(namespace, token) > RENEWED_BEFORE:
            return
        manifest = self._manifest(namespace)
        try:
            await self._client.create(manifest)
        except KubernetesConflictError:
            await self._client.apply(manifest, force=True)
        self._current.forget(namespace)

    async def check(self, token: str) -> str:
        """The namespace that a token is of."""
        audience = tokens.claimed_audience(token)
        namespace, _, what = audience.partition("/")
        if what != "*":
            raise UnauthorizedError("this token is not for the controller", hint=_POD_TOKEN_HINT)
        claims = self._verify(namespace, token)
        if claims.subject != _SUBJECT:
            raise UnauthorizedError("this token is not for the controller", hint=_POD_TOKEN_HINT)
        current = await self._current.get(namespace, lambda: self._look(namespace))
        if not hmac.compare_digest(current.encode(), token.encode()):
            raise UnauthorizedError(
                "this token is void, there is a newer one", hint=_POD_TOKEN_HINT
            )
        return namespace

    async def _look(self, namespace: str) -> Answer[str]:
        try:
            token = await self._read(namespace)
        except KubetorchError as error:
            raise ControllerUnavailableError(
                f"the controller cannot read the Secret {SECRET} of namespace {namespace}",
                hint="try again when the cluster's API server answers",
            ) from error
        seconds = _KNOWN_SECONDS if token else _UNKNOWN_SECONDS
        return Answer(token, bool(token), seconds)

    async def _read(self, namespace: str) -> str:
        """The token that lies there; empty when there is none."""
        try:
            found = await self._client.get(Ref(SECRETS, SECRET, namespace))
        except KubernetesNotFoundError:
            return ""
        try:
            return base64.b64decode((found.get("data") or {}).get(KEY) or "").decode("ascii")
        except (binascii.Error, UnicodeDecodeError):
            return ""

    def _left(self, namespace: str, token: str) -> float:
        try:
            return self._verify(namespace, token).expires - self._time()
        except UnauthorizedError:
            return 0.0

    def _verify(self, namespace: str, token: str) -> tokens.Claims:
        audience = tokens.audience(namespace, "*")
        key = tokens.workload_key(self._secret, audience)
        return tokens.verify(key, token, audience=audience, now=self._time())

    def _manifest(self, namespace: str) -> Object:
        audience = tokens.audience(namespace, "*")
        now = self._time()
        claims = tokens.Claims(audience, now + LIFETIME, _SUBJECT, (), issued=now)
        token = tokens.sign(tokens.workload_key(self._secret, audience), claims)
        metadata = {"name": SECRET, "namespace": namespace, "labels": dict(labels.MANAGED)}
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "metadata": metadata,
            "data": {KEY: base64.b64encode(token.encode()).decode()},
        }
