"""The token of a namespace, for pods that somebody else made and gave no token for the controller.

It lies in the Secret `kubetorch-pod-token` of the namespace, under `token`. It opens sessions, and
the blobs of the namespace, and only for pods of workloads that select pods by labels; a pod that
Kubetorch made has a token of its own, which names it. Who deletes the Secret makes the token void.
"""

from __future__ import annotations

import base64
import binascii
import hmac

from kubetorch.controller.cluster.access import Clocks
from kubetorch.controller.cluster.answers import Answer, Answers
from kubetorch.errors import (
    ControllerUnavailableError,
    KubernetesConflictError,
    KubernetesNotFoundError,
    KubetorchError,
    UnauthorizedError,
)
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Object, Ref, Resource
from kubetorch.manifests import labels
from kubetorch.wire import tokens

#: Name of the Secret, and the key in it.
SECRET, KEY = "kubetorch-pod-token", "token"
#: Seconds that a token is good for, and those before its end in which the next deploy makes a new
#: one. Pods that mount the Secret see the new one by themselves.
LIFETIME, RENEWED_BEFORE = 365 * 86400.0, 90 * 86400.0
#: Seconds in which the Secret is not read again, when it is there and when it is not.
_KNOWN_SECONDS, _UNKNOWN_SECONDS = 10.0, 2.0

_SUBJECT = "namespace-pods"
_SECRETS = Resource("", "v1", "secrets", "Secret")
_HINT = f"mount the key {KEY!r} of the Secret {SECRET!r} of the pod's namespace"


class PodTokens:
    """Makes the tokens, and checks them.

    Args:
        client: Asks the API server as the controller.
        secret: Secret of the installation.
        clocks: Say what is over.
    """

    def __init__(self, client: Client, *, secret: bytes, clocks: Clocks) -> None:
        self._client = client
        self._secret = secret
        self._time = clocks.time
        self._current: Answers[str, str] = Answers(clocks.steady)

    async def ensure(self, namespace: str) -> None:
        """Have a token in a namespace that is good for some time.

        Raises:
            KubernetesError: It can be neither read nor made.
        """
        token = await self._read(namespace)
        if token and self._left(namespace, token) > RENEWED_BEFORE:
            return
        self._current.forget(namespace)
        manifest = self._manifest(namespace)
        try:
            await self._client.create(manifest)
        except KubernetesConflictError:
            await self._client.apply(manifest, force=True)
        self._current.forget(namespace)

    async def check(self, token: str) -> str:
        """The namespace that a token is of.

        Raises:
            UnauthorizedError: It is of none, or not any more.
            ControllerUnavailableError: The API server does not say.
        """
        audience = tokens.claimed_audience(token)
        namespace, _, what = audience.partition("/")
        if what != "*":
            raise UnauthorizedError("this token is not for the controller", hint=_HINT)
        claims = self._verify(namespace, token)
        if claims.subject != _SUBJECT:
            raise UnauthorizedError("this token is not for the controller", hint=_HINT)
        current = await self._current.get(namespace, lambda: self._look(namespace))
        if not hmac.compare_digest(current.encode(), token.encode()):
            raise UnauthorizedError("this token is void, there is a newer one", hint=_HINT)
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
            found = await self._client.get(Ref(_SECRETS, SECRET, namespace))
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
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "metadata": {
                "name": SECRET,
                "namespace": namespace,
                "labels": dict(labels.MANAGED),
            },
            "data": {KEY: base64.b64encode(token.encode()).decode()},
        }
