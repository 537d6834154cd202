"""Checks the rights of senders in a cluster: tokens and rights are those of Kubernetes.

    token ──► TokenReview ──► user ──┐
                                     ├──► SubjectAccessReview ──► yes, or 403
    route ──► need ──────────────────┘

Without an answer of the API server every request is refused. A permission is remembered for 10 s, a
refusal for 2 s, and neither beyond the end of the token. Of users' tokens only hashes are stored.
Equal questions at one time are asked once. Refusals are remembered apart from permissions, so that
a stranger with many questions cannot push out the answers of users who are allowed in.

Pods identify themselves by the token of their service account, which names the pod. Pods that
Kubetorch did not make (`NamespacePods`) bring the token of their namespace instead, from the Secret
`kubetorch-pod-token` of the namespace. The token opens sessions, and the blobs of the namespace,
and only for pods of workloads that select pods by labels. Deleting the Secret makes the token void.

The controller makes objects with its own rights, which are more than those of most users. Users
who may `create kubetorchworkloads` in a namespace may have pods there as Kubetorch renders them:
its own kinds, its own service account, secrets and volumes that Kubetorch made. Other objects are
made only for users who could have made them themselves. A deploy that only selects pods makes none,
but runs code in pods of other users and shows their logs: it needs rights on all pods of the
namespace.
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
from kubetorch.controller.tuning import LIMITS, TIMING
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
from kubetorch.manifests.desired_pods import MountedNames, read_mounted_names
from kubetorch.manifests.kinds import Manifest
from kubetorch.manifests.workload_manifest import WorkloadManifest
from kubetorch.specs import names
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import tokens, versions
from kubetorch.wire.messages import Creator, Welcome

_POD_NAME = "authentication.kubernetes.io/pod-name"
_POD_UID = "authentication.kubernetes.io/pod-uid"
# Subresources of workloads that the role kubetorch-view may read.
_VIEW_ROLE_PARTS = ("", "data", "logs", "status", "volumes")
_ACCOUNT = "system:serviceaccount:"
_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")
#: Verbs that a user needs on an object beyond those that Kubetorch renders.
_OBJECT_VERBS = ("create", "patch")
#: API groups whose kinds the cluster's own role `edit` has.
_EDIT_ROLE_GROUPS = ("", "apps", "batch")
_CONTROLLER = "kubetorch-controller"
#: Verbs and subresources that a user needs on all pods of a namespace to select some of them.
_SELECTED_PODS_VERBS = (("create", ""), ("patch", ""), ("get", "log"))
#: Name of the Secret, and the key in it.
SECRET, KEY = "kubetorch-pod-token", "token"
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
    audiences: tuple[str, ...] = ()
    expires: float | None = None


def token_claims(token: str) -> UncheckedClaims:
    """The claims of a token, if it is a JWT; any text is accepted, and nothing is checked."""
    parts = token.split(".")
    if len(parts) != 3:
        return UncheckedClaims()
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (ValueError, binascii.Error, RecursionError):
        return UncheckedClaims()
    if not isinstance(claims, dict):
        return UncheckedClaims()
    audience_claim, expires = claims.get("aud"), claims.get("exp")
    audiences = audience_claim if isinstance(audience_claim, list) else [audience_claim]
    return UncheckedClaims(
        tuple(audience for audience in audiences if isinstance(audience, str)),
        float(expires) if isinstance(expires, (int, float)) and abs(expires) < 1e15 else None,
    )


class Reviews:
    def __init__(
        self, client: Client, watched: tuple[str, ...] = (), install_namespace: str = "kubetorch"
    ) -> None:
        self._client = client
        self._watched = watched
        #: The service account of the controller itself.
        self.controller = User(
            f"{_ACCOUNT}{install_namespace}:{_CONTROLLER}",
            groups=(
                "system:serviceaccounts",
                f"system:serviceaccounts:{install_namespace}",
                "system:authenticated",
            ),
        )
        self._turns = asyncio.Semaphore(LIMITS.concurrent_reviews)

    async def user(self, token: str, audiences: tuple[str, ...]) -> User | None:
        requested_audiences = [AUDIENCE] if AUDIENCE in audiences else []
        spec = {
            "token": token,
            **({"audiences": requested_audiences} if requested_audiences else {}),
        }
        status = await self._review("authentication.k8s.io/v1", "TokenReview", spec)
        if status.get("authenticated") is not True or status.get("error"):
            return None
        # A server without support for audiences names none, and has not checked ours.
        if requested_audiences and AUDIENCE not in (status.get("audiences") or ()):
            return None
        return _user(status.get("user") or {}, is_for_us=bool(requested_audiences))

    async def verdict(self, user: User, need: Need) -> Verdict:
        """Review a right; without a namespace, in all watched ones."""
        if need.namespace or not self._watched:
            return await self._verdict(user, need)
        needs = [msgspec.structs.replace(need, namespace=where) for where in self._watched]
        verdicts = await asyncio.gather(
            *(self._verdict(user, namespace_need) for namespace_need in needs)
        )
        return next((verdict for verdict in verdicts if not verdict.is_allowed), verdicts[0])

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


def grant_command(user: User, need: Need) -> str:
    """The command with which an administrator grants a right to a user."""
    is_view = need.verb in ("get", "list") and need.subresource in _VIEW_ROLE_PARTS
    role = "kubetorch-view" if is_view else "kubetorch-edit"
    subject, name = _subject(user), "NAME"
    if subject.startswith("--serviceaccount"):
        name = subject.rpartition(":")[2]
    kind, where = "clusterrolebinding", ""
    if need.namespace:
        kind, where = "rolebinding", f" -n {need.namespace}"
    return f"kubectl create {kind} {name}-{role} --clusterrole={role} {subject}{where}"


def _subject(user: User) -> str:
    """The option of `kubectl create rolebinding` for a user."""
    account = user.name.removeprefix(_ACCOUNT)
    if user.name.startswith(_ACCOUNT) and account.partition(":")[2]:
        return f"--serviceaccount={account}"
    return f"--user={user.name}"


def _user(user_info: Object, *, is_for_us: bool) -> User:
    """The user of a review; only a token for the audience of Kubetorch identifies a pod."""
    name = str(user_info.get("username") or "")
    if not name:
        raise UnauthorizedError("the token belongs to a user without a name")
    extra = {
        str(key): tuple(map(str, values)) for key, values in (user_info.get("extra") or {}).items()
    }
    return User(
        name=name,
        uid=str(user_info.get("uid") or ""),
        groups=tuple(map(str, user_info.get("groups") or ())),
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
    is_positive: bool
    seconds: float


class AnswerCache(Generic[_Key, _Value]):
    """Remembers answers for some seconds, and asks equal questions once."""

    def __init__(
        self,
        now: Callable[[], float],
        *,
        size: int = LIMITS.remembered_answers,
        open_questions_limit: int = LIMITS.open_questions,
        timeout: float = TIMING.access_review_seconds,
    ) -> None:
        self._now = now
        self._size = size
        self._limit = open_questions_limit
        self._timeout = timeout
        self._positive: OrderedDict[_Key, tuple[float, _Value]] = OrderedDict()
        self._negative: OrderedDict[_Key, tuple[float, _Value]] = OrderedDict()
        self._open_questions: dict[_Key, asyncio.Task[_Value]] = {}

    async def get(self, key: _Key, ask: Callable[[], Awaitable[Answer[_Value]]]) -> _Value:
        for memory in (self._positive, self._negative):
            cached_answer = memory.get(key)
            if cached_answer is not None and cached_answer[0] > self._now():
                memory.move_to_end(key)
                return cached_answer[1]
        task = self._open_questions.get(key)
        if task is None:
            if len(self._open_questions) >= self._limit:
                raise ControllerUnavailableError(
                    "the controller checks too many requests at this moment",
                    hint="try again in a moment",
                )
            task = asyncio.get_running_loop().create_task(self._ask(key, ask))
            self._open_questions[key] = task
            task.add_done_callback(lambda done: self._close_question(key, done))
        # The first caller may end, while later callers still wait for the answer.
        return await asyncio.shield(task)

    def forget(self, key: _Key) -> None:
        self._positive.pop(key, None)
        self._negative.pop(key, None)

    def __len__(self) -> int:
        return len(self._positive) + len(self._negative)

    async def _ask(self, key: _Key, ask: Callable[[], Awaitable[Answer[_Value]]]) -> _Value:
        try:
            async with deadlines.timeout(self._timeout):
                answer = await ask()
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise ControllerUnavailableError(
                f"the API server has not said within {self._timeout:.0f} s who may do this",
                hint="try again when the cluster's API server answers",
            ) from error
        self.forget(key)
        if answer.seconds > 0:
            memory = self._positive if answer.is_positive else self._negative
            memory[key] = (self._now() + answer.seconds, answer.value)
            while len(memory) > self._size:
                memory.popitem(last=False)
        return answer.value

    def _close_question(self, key: _Key, task: asyncio.Task[_Value]) -> None:
        del self._open_questions[key]
        if not task.cancelled():
            task.exception()  # retrieved: all callers may have ended


class MountedObject(NamedTuple):
    """A secret or volume, as it is now."""

    kind: str
    name: str
    identity: str = ""
    #: Whether any user who deploys may see it: Kubetorch made it, or it does not exist.
    is_unrestricted: bool = True

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


class Clocks(NamedTuple):
    time: Callable[[], float]
    steady: Callable[[], float]


class ClusterAccess:
    """Decides by reviews of the API server, and by the pods of workloads."""

    def __init__(  # noqa: PLR0913  # its collaborators
        self,
        reviews: Reviews,
        *,
        pods: WorkloadPods,
        pod_tokens: PodTokens,
        stores: Stores,
        secret: bytes,
        clocks: Clocks,
        hosts: Hosts = NO_HOSTS,
        records: bool = True,
    ) -> None:
        self._reviews = reviews
        self._hosts = hosts
        self._records = records
        self._pods = pods
        self._pod_tokens = pod_tokens
        self._stores = stores
        self._secret = secret
        self._time = clocks.time
        self._users: AnswerCache[bytes, User | None] = AnswerCache(clocks.steady)
        self._verdicts: AnswerCache[tuple[User, Need], Verdict] = AnswerCache(clocks.steady)

    def check_origin(self, headers: Mapping[str, str]) -> None:
        """See `Access`: pages are refused; any host is good, since the ingress chooses it."""
        origin = headers.get("origin")
        if origin is not None:
            raise ForeignOriginError(
                f"requests of pages from {origin[:200]!r} are refused",
                hint="pages cannot use the controller; send no Origin header",
            )

    async def identify(self, headers: Mapping[str, str]) -> Principal:
        token = bearer(headers, hint=_HINT)
        if (
            len(token) > LIMITS.user_token_characters
            or not token.isascii()
            or not token.isprintable()
        ):
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
        claims = token_claims(token)
        user = await self._reviews.user(token, claims.audiences)
        if user is None:
            return Answer(None, False, TIMING.denied_answer_seconds)
        seconds_left = (
            TIMING.allowed_answer_seconds
            if claims.expires is None
            else claims.expires - self._time()
        )
        return Answer(user, True, min(TIMING.allowed_answer_seconds, seconds_left))

    async def authorize(self, principal: Principal, need: Need) -> None:
        if not isinstance(principal, User):
            raise UnauthorizedError(
                "the token of a pod is not for this", hint="use a token of a service account"
            )
        if need.namespace:
            names.check_namespace(need.namespace)
        verdict = await self._verdicts.get(
            (principal, need), lambda: self._review_right(principal, need)
        )
        if not verdict.is_allowed:
            raise _forbidden(principal, need, verdict)

    async def _review_right(self, user: User, need: Need) -> Answer[Verdict]:
        verdict = await self._reviews.verdict(user, need)
        seconds = (
            TIMING.allowed_answer_seconds if verdict.is_allowed else TIMING.denied_answer_seconds
        )
        return Answer(verdict, verdict.is_allowed, seconds)

    async def check_deploy(self, principal: Principal, spec: WorkloadSpec) -> Grant:
        """See `Access`: beyond our own kind of pods, users need the right to make the object."""
        user = principal if isinstance(principal, User) else None
        creator = self.creator(principal, spec.username)
        if spec.compute.is_selector_only:
            reason = "its pods are found by labels, so they may be anybody's"
            needs = [
                Need(verb, spec.namespace, "", part, PODS.group, PODS.plural)
                for verb, part in _SELECTED_PODS_VERBS
            ]
            await asyncio.gather(
                *(self._authorize_beyond(principal, need, reason) for need in needs)
            )
            return Grant(user, creator=creator)
        manifest = rendering.of_workload(spec)
        secrets, volumes = await self._mounted_objects(spec.namespace, _mounted(spec, manifest))
        foreign_objects = (mount for mount in (*secrets, *volumes) if not mount.is_unrestricted)
        foreign_object = next(foreign_objects, None)
        reason = beyond_rendered(spec)
        if not reason and foreign_object is not None:
            reason = f"its pods see the {foreign_object}, which Kubetorch did not make"
        if reason:
            await self._authorize_object(principal, manifest, reason)
        return Grant(user, _identities(secrets), _identities(volumes), creator)

    async def check_mounts(
        self,
        spec: WorkloadSpec,
        grants: Sequence[Grant],
        mounted: MountedNames,
        *,
        is_running: bool,
    ) -> None:
        """See `Access`: the present objects under the mounted names are compared with the grants.

        Users who deploy may see the secrets and volumes that Kubetorch made, those that existed at
        the time of their deploy, and those that they have the right to mount.
        """
        secrets, volumes = await self._mounted_objects(spec.namespace, mounted)
        granted = {("secret", *secret) for grant in grants for secret in grant.secrets}
        granted |= {("volume", *volume) for grant in grants for volume in grant.volumes}
        for mounted_object in (*secrets, *volumes):
            if not mounted_object.identity:
                if not is_running and mounted_object.name not in mounted.optional:
                    raise ForbiddenError(
                        f"the {mounted_object} that the pod of {spec.name} was started with is "
                        "gone",
                        hint="another pod takes its place; deploy again if that is refused too",
                    )
            elif not (mounted_object.is_unrestricted or mounted_object[:3] in granted):
                await self._check_replaced(spec, grants[0].user, mounted_object)

    async def _check_replaced(
        self, spec: WorkloadSpec, user: User | None, mounted_object: MountedObject
    ) -> None:
        """Refuse an object in the place of a granted one to a user without a right to it."""
        deployer = "nobody with a right to it" if user is None else user.name
        error = ForbiddenError(
            f"a pod of {spec.name} has the {mounted_object} mounted, which Kubetorch did not make, "
            f"and which is not what was there when {spec.name} was deployed by {deployer}",
            hint=f"let somebody deploy {spec.name} who may see it",
        )
        if user is None:
            raise error
        try:
            await self._authorize_object(user, rendering.of_workload(spec), error.message)
        except ForbiddenError as refusal:
            raise error from refusal

    async def _mounted_objects(
        self, namespace: str, mounted: MountedNames
    ) -> tuple[list[MountedObject], list[MountedObject]]:
        """The secrets and volumes that are mounted, as they are now."""
        secret_store, volume_store = self._stores
        secrets, volumes = await asyncio.gather(
            asyncio.gather(*(secret_store.get(namespace, name) for name in mounted.secrets)),
            asyncio.gather(*(volume_store.get(namespace, name) for name in mounted.claims)),
        )
        return (
            [
                MountedObject("secret", name, secret.identity, labels.MOUNT_TYPE in secret.labels)
                if secret is not None
                else MountedObject("secret", name)
                for name, secret in zip(mounted.secrets, secrets, strict=True)
            ],
            [
                MountedObject("volume", name, volume.identity, volume.is_ours)
                if volume is not None
                else MountedObject("volume", name)
                for name, volume in zip(mounted.claims, volumes, strict=True)
            ],
        )

    async def _authorize_object(
        self, principal: Principal, manifest: Manifest, reason: str
    ) -> None:
        resource = await self._reviews.resource_of(manifest)
        if not resource.is_namespaced:
            raise SpecError(f"a {resource.kind} lies in no namespace, so it can be no service")
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]

        def need(verb: str) -> Need:
            return Need(verb, namespace, name, group=resource.group, resource=resource.plural)

        # The chart grants the controller the kinds that Kubetorch knows; without its operator a
        # kind is an error of its own.
        is_custom_kind = kinds.find(manifest) is None and await self._reviews.is_served(manifest)
        maker_verbs = failures.MAKER_VERBS if is_custom_kind else ()
        lacking = [verb for verb in maker_verbs if not await self._controller_may(need(verb))]
        rule = ""
        if lacking:
            rule = (
                f"the controller lacks the rule apiGroups: [{resource.group}], "
                f"resources: [{resource.plural}], verbs: [{', '.join(lacking)}]"
            )
        for verb in _OBJECT_VERBS:
            await self._authorize_beyond(principal, need(verb), reason, rule)
        if lacking:
            controller = self._reviews.controller
            error = _forbidden(controller, need(lacking[0]), Verdict(False, ""))
            error.message = f"{rule} in namespace {namespace!r}"
            error.hint = _commands(need(lacking[0]), [controller])
            raise error

    async def _controller_may(self, need: Need) -> bool:
        user = self._reviews.controller
        verdict = await self._verdicts.get((user, need), lambda: self._review_right(user, need))
        return verdict.is_allowed

    async def _authorize_beyond(
        self, principal: Principal, need: Need, reason: str, rule: str = ""
    ) -> None:
        """Refuse a deploy beyond rendered pods to a user who lacks the right to make the object.

        `reason` says what goes beyond; `rule` is a rule that the controller itself lacks, too.
        """
        try:
            await self.authorize(principal, need)
        except ForbiddenError as error:
            kind = f"{need.kind}.{need.group}" if need.group else need.kind
            error.hint = (
                f"{reason}, and for that you need the right to {need.verb} {kind} yourself; "
            )
            if need.group in _EDIT_ROLE_GROUPS:
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
        workload = None if pod is None else self._pods.workload_of(pod)
        return (workload and workload.creator) or Creator(name_of(principal), username)

    def namespace_of_pod(self, principal: Principal) -> str | None:
        if isinstance(principal, NamespacePods):
            return principal.namespace
        pod = principal.pod if isinstance(principal, User) else None
        if pod is not None and self._pods.workload_of(pod) is not None:
            return pod.namespace
        return None

    def check_pod(self, principal: Principal, pod: PodIdentity) -> None:
        """See `Access`: the token names the pod, or is for all pods that Kubetorch did not make."""
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
        """See `Access`: the key with which the pod verifies tokens for its workload."""
        audience = tokens.audience(pod.namespace, pod.workload)
        key = tokens.workload_key(self._secret, audience)
        return Welcome(
            key=key.hex(),
            version=__version__,
            protocol=versions.PROTOCOL,
            app_hosts=self._hosts.allowed_hosts(pod.namespace, pod.workload),
            records=self._records,
        )


def _commands(need: Need, users: Sequence[User]) -> str:
    """The commands that grant users the rights on a custom kind."""
    kind = f"{need.resource}.{need.group}"
    subjects = [_subject(user) for user in users]
    commands = failures.grant_commands(kind, failures.MAKER_VERBS, subjects, need.namespace)
    return f"an administrator grants it with\n{commands}\nor by rbac.extraRules of the chart"


def _identities(mounted_objects: Sequence[MountedObject]) -> tuple[tuple[str, str], ...]:
    return tuple((mount.name, mount.identity) for mount in mounted_objects)


def _forbidden(user: User, need: Need, verdict: Verdict) -> ForbiddenError:
    review_reason = f": {verdict.reason}" if verdict.reason else ""
    error = ForbiddenError(
        f"{user.name} may not {need}{review_reason}",
        hint=f"ask an administrator: {grant_command(user, need)}",
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


def _mounted(spec: WorkloadSpec, manifest: Manifest) -> MountedNames:
    """The names of the secrets and claims that the pods of an object see."""
    workload = WorkloadManifest.parse(manifest, spec.compute.pod_template_path)
    template_mounts = [
        read_mounted_names(template.spec, template.container) for template in workload.templates
    ]
    secrets = [ref.object_name for ref in spec.compute.secrets]
    claims = [volume.claim_name for volume in spec.compute.volumes]
    for mounts in template_mounts:
        secrets += mounts.secrets
        claims += mounts.claims
    return MountedNames(tuple(dict.fromkeys(secrets)), tuple(dict.fromkeys(claims)))


class WorkloadPods:
    def __init__(self, workloads: Workloads) -> None:
        self._workloads = workloads

    def workload_of(self, pod: BoundPod) -> Workload | None:
        for workload in self._workloads.in_namespace(pod.namespace):
            for pod_status in workload.pods:
                if pod_status.name == pod.name:
                    return workload if pod_status.uid in ("", pod.uid) else None
        return None

    def uid_of(self, pod: PodIdentity) -> str | None:
        """The uid of a pod of a workload; empty while it is not known, `None` without the pod."""
        workload = self._workloads.workload_of(pod)
        statuses = [] if workload is None else workload.pods
        return next((status.uid for status in statuses if status.name == pod.pod), None)

    def is_selector_only(self, namespace: str, workload: str) -> bool:
        """True for a workload whose pods Kubetorch did not make."""
        try:
            deployed_workload = self._workloads.get(namespace, workload)
        except ServiceNotFoundError:
            return False
        return deployed_workload.spec.compute.is_selector_only


class PodTokens:
    """The tokens of namespaces, for pods that Kubetorch did not make."""

    def __init__(self, client: Client, *, secret: bytes, clocks: Clocks) -> None:
        self._client = client
        self._secret = secret
        self._time = clocks.time
        self._token_cache: AnswerCache[str, str] = AnswerCache(clocks.steady)

    async def ensure(self, namespace: str) -> None:
        """Provide a token in a namespace that is valid for some time."""
        token = await self._read(namespace)
        if token and self._seconds_left(namespace, token) > TIMING.namespace_token_renewal_seconds:
            return
        manifest = self._manifest(namespace)
        try:
            await self._client.create(manifest)
        except KubernetesConflictError:
            await self._client.apply(manifest, force=True)
        self._token_cache.forget(namespace)

    async def check(self, token: str) -> str:
        """The namespace of a token; raises `UnauthorizedError` for any other token."""
        audience = tokens.claimed_audience(token)
        namespace, _, workload = audience.partition("/")
        if workload != "*":
            raise UnauthorizedError("this token is not for the controller", hint=_POD_TOKEN_HINT)
        claims = self._verify(namespace, token)
        if claims.subject != _SUBJECT:
            raise UnauthorizedError("this token is not for the controller", hint=_POD_TOKEN_HINT)
        current = await self._token_cache.get(namespace, lambda: self._current_token(namespace))
        if not hmac.compare_digest(current.encode(), token.encode()):
            raise UnauthorizedError(
                "this token is void, there is a newer one", hint=_POD_TOKEN_HINT
            )
        return namespace

    async def _current_token(self, namespace: str) -> Answer[str]:
        try:
            token = await self._read(namespace)
        except KubetorchError as error:
            raise ControllerUnavailableError(
                f"the controller cannot read the Secret {SECRET} of namespace {namespace}",
                hint="try again when the cluster's API server answers",
            ) from error
        seconds = (
            TIMING.present_token_recheck_seconds if token else TIMING.absent_token_recheck_seconds
        )
        return Answer(token, bool(token), seconds)

    async def _read(self, namespace: str) -> str:
        """The token in the Secret; empty without one."""
        try:
            secret = await self._client.get(Ref(SECRETS, SECRET, namespace))
        except KubernetesNotFoundError:
            return ""
        try:
            return base64.b64decode((secret.get("data") or {}).get(KEY) or "").decode("ascii")
        except (binascii.Error, UnicodeDecodeError):
            return ""

    def _seconds_left(self, namespace: str, token: str) -> float:
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
        claims = tokens.Claims(
            audience, now + TIMING.namespace_token_seconds, _SUBJECT, (), issued=now
        )
        token = tokens.sign(tokens.workload_key(self._secret, audience), claims)
        metadata = {"name": SECRET, "namespace": namespace, "labels": dict(labels.MANAGED)}
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "metadata": metadata,
            "data": {KEY: base64.b64encode(token.encode()).decode()},
        }
