"""An API server that knows users and rights: TokenReview, SubjectAccessReview and Secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import unquote

from kubetorch.k8s.client import Client
from tests.cluster_controller import InCluster
from tests.local.fake_apiserver import Exchange, FakeApiServer

_DISCOVERY = {
    "/apis/authentication.k8s.io/v1": ("TokenReview", "tokenreviews", False),
    "/apis/authorization.k8s.io/v1": ("SubjectAccessReview", "subjectaccessreviews", False),
    "/api/v1": ("Secret", "secrets", True),
    "/apis/apps/v1": ("Deployment", "deployments", True),
    "/apis/example.com/v1": ("Fleet", "fleets", True),
}


class FakeReviews:
    """What it knows, and what it was asked.

    Attributes:
        users: Name and, if it is that of a pod, name and uid of the pod, by token.
        audiences: Audiences of tokens that are not for the API server.
        rights: User, verb, kind with subresource, namespace (`*` for all).
        reviews: The specs of all reviews.
        is_away: Whether it breaks off instead of answering.
    """

    def __init__(self) -> None:
        self.users: dict[str, tuple[str, str, str]] = {}
        self.audiences: dict[str, list[str]] = {}
        self.rights: set[tuple[str, str, str, str]] = set()
        self.secrets: dict[str, dict[str, Any]] = {}
        self.reviews: list[dict[str, Any]] = []
        self.is_away = False

    def allow(self, user: str, verbs: str, kind: str, namespace: str) -> None:
        for verb in verbs.split():
            self.rights.add((user, verb, kind, namespace))

    async def answer(self, exchange: Exchange) -> None:
        request = exchange.request
        if self.is_away:
            exchange.cut()
        elif request.path in _DISCOVERY:
            kind, plural, namespaced = _DISCOVERY[request.path]
            resource = {"name": plural, "kind": kind, "namespaced": namespaced, "verbs": ["create"]}
            exchange.answer(200, {"kind": "APIResourceList", "resources": [resource]})
        elif request.path.endswith("/tokenreviews"):
            exchange.answer(201, {**request.json, "status": self._token(request.json["spec"])})
        elif request.path.endswith("/subjectaccessreviews"):
            exchange.answer(201, {**request.json, "status": self._rights(request.json["spec"])})
        elif "/secrets" in request.path:
            self._secret(exchange)
        else:
            exchange.refuse(404, "NotFound", "404 page not found")

    def _token(self, spec: dict[str, Any]) -> dict[str, Any]:
        self.reviews.append(spec)
        audiences = spec.get("audiences", [])
        token_audiences = self.audiences.get(spec["token"], [])
        if spec["token"] not in self.users or (
            (token_audiences or audiences) and not set(token_audiences) & set(audiences)
        ):
            return {"authenticated": False}
        name, pod, uid = self.users[spec["token"]]
        extra = {}
        if pod:
            prefix = "authentication.kubernetes.io"
            extra = {f"{prefix}/pod-name": [pod], f"{prefix}/pod-uid": [uid]}
        user = {"username": name, "uid": "1", "groups": ["system:authenticated"], "extra": extra}
        return {"authenticated": True, "user": user, "audiences": audiences}

    def _rights(self, spec: dict[str, Any]) -> dict[str, Any]:
        self.reviews.append(spec)
        attributes = spec["resourceAttributes"]
        kind = "/".join(filter(None, (attributes["resource"], attributes.get("subresource"))))
        namespaces = (attributes.get("namespace", "*"), "*")
        sufficient_rights = {
            (spec["user"], attributes["verb"], kind, namespace) for namespace in namespaces
        }
        return {"allowed": bool(sufficient_rights & self.rights)}

    def _secret(self, exchange: Exchange) -> None:
        request = exchange.request
        key = unquote(request.path)
        if request.method == "POST":
            key = f"{key}/{request.json['metadata']['name']}"
            if key in self.secrets:
                exchange.refuse(409, "AlreadyExists")
                return
            self.secrets[key] = request.json
            exchange.answer(201, request.json)
        elif key in self.secrets:
            exchange.answer(200, self.secrets[key])
        else:
            exchange.refuse(404, "NotFound")


class ReviewedController(InCluster):
    """A controller as it is in a cluster, and the API server that it asks."""

    def __init__(self, folder: Path, reviews: FakeReviews) -> None:
        self.server = FakeApiServer(reviews.answer)
        super().__init__(folder, lambda: Client(self.server.access(), patience=0.5, timeout=20))

    async def _start(self) -> None:
        await self.server.start()
        await super()._start()

    async def _stop(self) -> None:
        await super()._stop()
        await self.server.stop()
