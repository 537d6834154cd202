"""What the API server says about tokens and rights: TokenReview and SubjectAccessReview."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from typing import Any, NamedTuple

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


class Verdict(NamedTuple):
    """Whether somebody may do something, and what the API server says about it."""

    is_allowed: bool
    reason: str


class Claims(NamedTuple):
    """What a token says of itself, unchecked.

    Attributes:
        audiences: Whom it is for; empty when it does not say.
        expires: Seconds since the epoch; `None` when it does not say.
    """

    audiences: tuple[str, ...] = ()
    expires: float | None = None


def claims(token: str) -> Claims:
    """What a token says of itself, if it is a JWT: total, and nothing of it is checked."""
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
    """Asks.

    Args:
        client: Asks the API server as the controller.
        watched: Namespaces that the controller has a say in, which are what everywhere means; all
            if there are none.
    """

    def __init__(self, client: Client, watched: tuple[str, ...] = ()) -> None:
        self._client = client
        self._watched = watched
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def user(self, token: str, audiences: tuple[str, ...]) -> User | None:
        """Whose token this is; `None` when it is nobody's.

        Args:
            token: The token.
            audiences: Whom it says that it is for. One for the controller is checked as such;
                every other one must be for the API server.

        Raises:
            ControllerUnavailableError: The API server does not say.
        """
        asked = [AUDIENCE] if AUDIENCE in audiences else []
        spec = {"token": token, **({"audiences": asked} if asked else {})}
        status = await self._review("authentication.k8s.io/v1", "TokenReview", spec)
        if status.get("authenticated") is not True or status.get("error"):
            return None
        # A server that knows nothing of audiences names none, and has not checked ours.
        if asked and AUDIENCE not in (status.get("audiences") or ()):
            return None
        return _user(status.get("user") or {})

    async def verdict(self, user: User, need: Need) -> Verdict:
        """Whether somebody may do something; everywhere, if they may wherever the controller works.

        Raises:
            ControllerUnavailableError: The API server does not say.
        """
        if need.namespace or not self._watched:
            return await self._verdict(user, need)
        needs = [msgspec.structs.replace(need, namespace=where) for where in self._watched]
        found = await asyncio.gather(*(self._verdict(user, one) for one in needs))
        return next((one for one in found if not one.is_allowed), found[0])

    async def _verdict(self, user: User, need: Need) -> Verdict:
        attributes = {
            "group": need.group,
            "resource": need.resource,
            "subresource": need.subresource,
            "verb": need.verb,
            "namespace": need.namespace,
            "name": need.name,
        }
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
        """How the kind of an object is served; a guess where it is not, as nothing is made then.

        Raises:
            ControllerUnavailableError: The API server does not say.
        """
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
    if need.namespace:
        kind, where = "rolebinding", f" -n {need.namespace}"
    else:
        kind, where = "clusterrolebinding", ""
    return f"kubectl create {kind} {name}-{role} --clusterrole={role} {who}{where}"


def _user(found: Object) -> User:
    """The user of a review.

    Raises:
        UnauthorizedError: The API server calls them nothing.
    """
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
        pod=_pod(name, extra),
    )


def _pod(name: str, extra: dict[str, tuple[str, ...]]) -> BoundPod | None:
    """The pod that a service account's token was given to."""
    pod, uid = extra.get(_POD_NAME, ()), extra.get(_POD_UID, ())
    if not name.startswith(_ACCOUNT) or len(pod) != 1 or len(uid) != 1:
        return None
    namespace = name.removeprefix(_ACCOUNT).partition(":")[0]
    return BoundPod(namespace, pod[0], uid[0])
