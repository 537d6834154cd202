"""Asks the API server about tokens and rights: TokenReview and SubjectAccessReview.

An answer is remembered for 10 s if it was yes, for 2 s if it was no, and never beyond the end of
the token. Of a token only a hash is kept. Equal questions at one time are asked once. Refusals are
remembered apart from permissions, so that a stranger with many questions cannot push out the
answers of users who are allowed in.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from kubetorch.controller.access import BoundPod, Need, User
from kubetorch.errors import (
    ControllerUnavailableError,
    KubernetesForbiddenError,
    KubernetesNotFoundError,
    KubetorchError,
    UnauthorizedError,
)
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Object, Resource
from kubetorch.lib import deadlines
from kubetorch.manifests import kinds
from kubetorch.manifests.kinds import Manifest

#: Audience of tokens that are meant for the controller alone.
AUDIENCE = "kubetorch"
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


class Verdict(NamedTuple):
    is_allowed: bool
    reason: str


class Claims(NamedTuple):
    """The claims of a token, unchecked."""

    audiences: tuple[str, ...] = ()
    expires: float | None = None


def token_claims(token: str) -> Claims:
    """The claims of a token, if it is a JWT; any text is accepted, and nothing is checked."""
    parts = token.split(".")
    if len(parts) != 3:
        return Claims()
    try:
        found = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (ValueError, binascii.Error, RecursionError):
        return Claims()
    if not isinstance(found, dict):
        return Claims()
    given, expires = found.get("aud"), found.get("exp")
    audiences = given if isinstance(given, list) else [given]
    return Claims(
        tuple(one for one in audiences if isinstance(one, str)),
        float(expires) if isinstance(expires, (int, float)) and abs(expires) < 1e15 else None,
    )


class Reviews:
    def __init__(self, client: Client, watched: tuple[str, ...] = ()) -> None:
        self._client = client
        self._watched = watched
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def user(self, token: str, audiences: tuple[str, ...]) -> User | None:
        """The user of a token; `None` for an invalid token."""
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
    namespace, _, account = user.name.removeprefix(_ACCOUNT).partition(":")
    if user.name.startswith(_ACCOUNT) and account:
        who, name = f"--serviceaccount={namespace}:{account}", account
    else:
        who, name = f"--user={user.name}", "NAME"
    kind, where = "clusterrolebinding", ""
    if need.namespace:
        kind, where = "rolebinding", f" -n {need.namespace}"
    return f"kubectl create {kind} {name}-{role} --clusterrole={role} {who}{where}"


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
