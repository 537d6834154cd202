"""Which pods a controller of a cluster lets in, and what they may have mounted."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kubetorch.controller.access import PodIdentity
from kubetorch.controller.cluster.resource import WORKLOADS
from kubetorch.k8s.client import Client
from kubetorch.manifests import labels
from kubetorch.specs.secret import SecretRef
from kubetorch.specs.volume import VolumeSpec
from kubetorch.wire import routes, tokens
from tests.cluster_controller import SECRET, OnKubernetes, say_hello
from tests.local.fake_apiserver import Exchange, FakeApiServer
from tests.local.fake_reviews import FakeReviews
from tests.local.object_server import ObjectServer

pytestmark = pytest.mark.security

Object = dict[str, Any]

TEAM = "team"
KIND = "kubetorchworkloads"
KINDS = (
    ("v1", "pods", "Pod"),
    ("v1", "secrets", "Secret"),
    ("v1", "services", "Service"),
    ("v1", "serviceaccounts", "ServiceAccount"),
    ("v1", "persistentvolumeclaims", "PersistentVolumeClaim"),
    ("v1", "events", "Event"),
    ("apps/v1", "deployments", "Deployment"),
    ("apps/v1", "replicasets", "ReplicaSet"),
    ("rbac.authorization.k8s.io/v1", "rolebindings", "RoleBinding"),
    ("authentication.k8s.io/v1", "tokenreviews", "TokenReview"),
    ("authorization.k8s.io/v1", "subjectaccessreviews", "SubjectAccessReview"),
    (WORKLOADS.api_version, WORKLOADS.plural, WORKLOADS.kind),
)
WELCOME = ["welcome", "members"]


class Server(ObjectServer):
    """Keeps objects, and knows users and rights."""

    def __init__(self) -> None:
        super().__init__(*KINDS)
        self.reviews = FakeReviews()

    async def __call__(self, exchange: Exchange) -> None:
        request = exchange.request
        if request.path.endswith("reviews"):
            await self.reviews.answer(exchange)
            return
        *parts, name = request.path.strip("/").split("/")
        is_apply = "apply" in (request.header("content-type") or "")
        if is_apply and (where(*parts[:-3], parts[-1]), name) not in self.objects:
            exchange.answer(201, self.put(where(*parts[:-3], parts[-1]), request.json))
            return
        await super().__call__(exchange)

    def of(self, plural: str, name: str) -> Object:
        """An object of the team."""
        for (collection, called), stored in self.objects.items():
            if called == name and collection.endswith(f"/{plural}/{TEAM}"):
                return stored
        raise LookupError(name)

    def make(self, api_version: str, kind: str, name: str, **parts: Any) -> Object:
        """Somebody makes an object of the team."""
        plural = next(
            plural
            for group, plural, known_kind in KINDS
            if (group, known_kind) == (api_version, kind)
        )
        metadata = {"name": name, "namespace": TEAM, **parts.pop("metadata", {})}
        group = ("apis", *api_version.split("/")) if "/" in api_version else ("api", api_version)
        created = {"apiVersion": api_version, "kind": kind, "metadata": metadata, **parts}
        return self.put(where(*group, plural), created)


def where(*parts: str) -> str:
    """A collection of the team, by its API and its plural."""
    return "/".join([*parts, TEAM])


def reference(owner: Object, **changed: Any) -> Object:
    owner_reference = {part: owner[part] for part in ("apiVersion", "kind")}
    owner_reference |= {part: owner["metadata"][part] for part in ("name", "uid")}
    return {**owner_reference, "controller": True, **changed}


class World(OnKubernetes):
    """A controller, its API server, and what its own controllers make."""

    def __init__(self, folder: Path, server: Server | None = None) -> None:
        self.server = server or Server()
        self.reviews = self.server.reviews
        self._api = FakeApiServer(self.server)
        folder.mkdir(exist_ok=True)
        super().__init__(folder, lambda: Client(self._api.access(), patience=0.5), TEAM)
        for user in ("ann", "root"):
            self.reviews.users[f"{user}'s"] = (user, "", "")
            self.reviews.allow(user, "get list create update delete", KIND, TEAM)
            self.reviews.allow(user, "create", f"{KIND}/call", TEAM)
        self.reviews.allow("root", "create patch", "deployments", TEAM)
        self.reviews.allow("root", "create patch", "pods", TEAM)
        self.reviews.allow("root", "get", "pods/log", TEAM)

    async def _prepare(self) -> None:
        await self._api.start()

    async def _stop(self) -> None:
        await super()._stop()
        await self._api.stop()

    def on_loop(self, act: Callable[[], Any]) -> Any:
        async def doing() -> Any:
            return act()

        return self.run(doing())

    def replica_set(self, name: str) -> Object:
        """What the Deployment of a workload makes, as soon as it is there."""
        deployment = self.until(lambda: self.server.of("deployments", name))
        metadata = {"ownerReferences": [reference(deployment)]}
        return self.make("apps/v1", "ReplicaSet", f"{name}-rs", metadata=metadata)

    def make(self, *identity: str, **parts: Any) -> Object:
        created: Object = self.on_loop(lambda: self.server.make(*identity, **parts))
        return created

    def pod(
        self, name: str, workload: str, owner: Object | None, *, spec: Object | None = None
    ) -> Object:
        """A pod with the labels of a workload."""
        metadata: Object = {"labels": {labels.SERVICE: workload}}
        if owner is not None:
            metadata["ownerReferences"] = [owner]
        container = {"name": "kubetorch", "image": "i"}
        running = {"phase": "Running", "podIP": "127.0.0.9"}
        pod_spec = spec or {"containers": [container]}
        return self.make("v1", "Pod", name, metadata=metadata, spec=pod_spec, status=running)

    def token(self, pod: Object | None, audience: str = "kubetorch", uid: str = "") -> str:
        """The token that the kubelet gives a pod, or one of its account that names no pod."""
        payload = base64.urlsafe_b64encode(json.dumps({"aud": [audience]}).encode()).decode()
        metadata = {"name": "", "uid": ""} if pod is None else pod["metadata"]
        token = f"e.{payload.rstrip('=')}.{metadata['name'] or 'account'}{uid}"
        account = f"system:serviceaccount:{TEAM}:sa"
        self.reviews.users[token] = (account, metadata["name"], uid or metadata["uid"])
        if audience == "kubetorch":
            self.reviews.audiences[token] = [audience]
        return token

    def hello(
        self, token: str, workload: str, pod: str, *, seconds: float = 60.0, **hello_fields: Any
    ) -> list[str]:
        """What a pod is told, once the controller has had time to find out who made it.

        Args:
            seconds: Until it has found out; fewer for what it is never to know.
        """
        identity = PodIdentity(hello_fields.pop("namespace", TEAM), workload, pod)
        deadline = time.monotonic() + seconds
        while True:
            replies = say_hello(self.url, token, identity, **hello_fields)
            if "there is no pod" not in replies[-1] or time.monotonic() > deadline:
                return replies[:2]
            time.sleep(0.05)

    def until(self, look: Callable[[], Any]) -> Any:
        """Wait until something is there."""
        deadline = time.monotonic() + 60
        while True:
            try:
                outcome = self.on_loop(look)
            except LookupError:
                outcome = None
            if outcome:
                return outcome
            assert time.monotonic() < deadline, "it did not come true"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Workloads `f`, `g` and a selector's, `pool`; `f-0` is a pod of `f`."""
    with World(tmp_path_factory.mktemp("controller")) as world:
        for name in ("f", "g"):
            assert world.deploy("ann's", TEAM, name)[0] == 200
        assert world.deploy("root's", TEAM, "pool", selector=(("app", "mine"),))[0] == 200
        for name in ("f", "g"):
            world.pod(f"{name}-0", name, reference(world.replica_set(name)))
        world.until(lambda: world.server.of("services", "pool"))
        yield world


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as world:
        yield world


def test_a_pod_that_the_controller_had_made_joins_with_its_token(
    shared: World,
) -> None:
    pod = shared.server.of("pods", "f-0")
    assert shared.hello(shared.token(pod), "f", "f-0") == WELCOME


def _nothing(world: World) -> Object | None:
    return None


def _of_another_deployment(world: World) -> Object:
    mine = world.make(
        "apps/v1", "Deployment", "mine", metadata={"annotations": {labels.APPLIED: "x"}}
    )
    return reference(mine)


def _of_a_namesake(world: World) -> Object:
    return reference(world.server.of("replicasets", "f-rs"), uid="made-up")


def _not_its_controller(world: World) -> Object:
    return reference(world.server.of("replicasets", "f-rs"), controller=False)


def _of_the_workload_itself(world: World) -> Object:
    return reference(world.server.of("kubetorchworkloads", "f"))


def _of_what_another_workload_made(world: World) -> Object:
    return reference(world.server.of("replicasets", "g-rs"))


@pytest.mark.parametrize(
    "owner",
    [
        _nothing,
        _of_another_deployment,
        _of_a_namesake,
        _not_its_controller,
        _of_the_workload_itself,
        _of_what_another_workload_made,
    ],
)
def test_labels_make_no_pod_one_of_a_workload(
    shared: World, owner: Callable[[World], Object | None]
) -> None:
    name = f"forged{owner.__name__.replace('_', '-')}"
    pod = shared.pod(name, "f", owner(shared))
    replies = shared.hello(shared.token(pod), "f", name, seconds=1.0)
    assert "there is no pod" in replies[-1], replies
    status, view = shared.request("GET", routes.workload(TEAM, "f"), "ann's")
    assert status == 200
    assert [pod_view["name"] for pod_view in view["pods"]] == ["f-0"]
    # Nor does its token open the blobs of the namespace.
    fetched = shared.request("POST", routes.BLOBS_FETCH, shared.token(pod), b'{"blobs": []}')
    assert fetched[0] == 403


@pytest.mark.parametrize("case", ["for the API server", "of no pod", "of an earlier pod"])
def test_a_token_that_is_not_the_pods_own_opens_nothing(shared: World, case: str) -> None:
    pod = shared.server.of("pods", "f-0")
    token = {
        "for the API server": lambda: shared.token(pod, audience="https://kubernetes"),
        "of no pod": lambda: shared.token(None),
        "of an earlier pod": lambda: shared.token(pod, uid="earlier"),
    }[case]()
    replies = shared.hello(token, "f", "f-0", seconds=1.0)
    assert "welcome" not in replies, replies
    assert shared.request("POST", routes.BLOBS_FETCH, token, b'{"blobs": []}')[0] == 403


def test_a_pod_speaks_for_no_other_pod_workload_or_namespace(
    shared: World,
) -> None:
    token = shared.token(shared.server.of("pods", "f-0"))
    for workload, pod, namespace in (
        ("g", "f-0", TEAM),
        ("g", "g-0", TEAM),
        ("pool", "f-0", TEAM),
        ("f", "f-0", "other"),
    ):
        replies = shared.hello(token, workload, pod, seconds=1.0, namespace=namespace)
        assert "welcome" not in replies, (workload, pod, replies)


def test_the_token_of_a_namespace_is_for_pods_that_a_selector_finds(
    shared: World,
) -> None:
    shared.run(shared.pod_tokens.ensure(TEAM))
    data = shared.server.of("secrets", "kubetorch-pod-token")["data"]
    token = base64.b64decode(data["token"]).decode()
    mine = {"labels": {"app": "mine"}}
    spec = {"containers": [{"name": "c", "image": "i"}]}
    shared.make("v1", "Pod", "mine-0", metadata=mine, spec=spec, status={"phase": "Running"})
    shared.pod("unselected", "pool", None)
    assert shared.hello(token, "pool", "mine-0") == WELCOME
    for workload, pod in (("f", "f-0"), ("f", "mine-0"), ("pool", "unselected")):
        replies = shared.hello(token, workload, pod, seconds=1.0)
        assert "welcome" not in replies, (workload, pod)


def test_what_a_key_signs_opens_neither_the_controller_nor_another_workload(
    shared: World,
) -> None:
    key = tokens.workload_key(SECRET, f"{TEAM}/f")
    later = time.time() + 600
    for audience in (f"{TEAM}/f", f"{TEAM}/g", f"{TEAM}/*", "*/*"):
        for subject in ("pod:f-0", f"pod:{TEAM}/*", "root"):
            claims = tokens.Claims(audience, later, subject, tokens.VERBS, later - 1200)
            token = tokens.sign(key, claims)
            for method, path in (
                ("GET", routes.workloads(TEAM)),
                ("GET", routes.WORKLOADS),
                ("DELETE", routes.workload(TEAM, "g")),
                ("GET", routes.secret(TEAM, "s", "values")),
                ("POST", routes.BLOBS_FETCH),
                ("GET", f"/{TEAM}/g/health"),
            ):
                assert shared.request(method, path, token, b"{}")[0] == 401, (path, claims)
            assert "welcome" not in shared.hello(token, "f", "f-0", seconds=1.0)


# ----------------------------------------------------------------------------------------- mounts


def secret(world: World, name: str, *, is_ours: bool, value: bytes = b"x") -> Object:
    tagged = {"labels": {labels.MOUNT_TYPE: "env"} if is_ours else {}}
    data = {"KEY": base64.b64encode(value).decode()}
    return world.make("v1", "Secret", name, metadata=tagged, type="Opaque", data=data)


def claim(world: World, name: str, *, is_ours: bool) -> Object:
    tagged = {"labels": {labels.VOLUME: name} if is_ours else {}}
    spec = {"resources": {"requests": {"storage": "1Gi"}}, "accessModes": ["ReadWriteOnce"]}
    return world.make("v1", "PersistentVolumeClaim", name, metadata=tagged, spec=spec)


def replaced(world: World, name: str, *, is_ours: bool = False, plural: str = "secrets") -> None:
    """Somebody deletes a secret or a claim and makes another one of its name."""
    world.on_loop(lambda: world.server.remove(where("api", "v1", plural), name))
    make = secret if plural == "secrets" else claim
    make(world, name, is_ours=is_ours)


def deployed(world: World, user: str, name: str = "f", **more: Any) -> Callable[[str], Object]:
    """A workload that sees the secret `s`; returns what makes a pod of it."""
    ref = SecretRef("s", "s", "env", ("KEY",))
    assert world.deploy(f"{user}'s", TEAM, name, secrets=(ref,), **more)[0] == 200
    owner = reference(world.replica_set(name))
    template = world.server.of("deployments", name)["spec"]["template"]["spec"]
    return lambda pod: world.pod(pod, name, owner, spec=template)


def events(world: World) -> list[str]:
    stored_events = [
        stored for (where, _), stored in world.server.objects.items() if "/events/" in where
    ]
    return [f"{event['involvedObject']['name']} {event['reason']}" for event in stored_events]


def is_there(world: World, pod: str) -> bool:
    return (where("api", "v1", "pods"), pod) in world.server.objects


def grants(world: World) -> list[Object]:
    status = world.server.of("kubetorchworkloads", "f").get("status") or {}
    recorded_grants: list[Object] = status.get("grants") or []
    return recorded_grants


def test_a_deploy_keeps_who_deployed_and_what_its_pods_may_mount(
    world: World,
) -> None:
    secret(world, "s", is_ours=True)
    deployed(world, "ann")
    (grant,) = world.until(lambda: grants(world))
    uid = world.server.of("secrets", "s")["metadata"]["uid"]
    assert grant["user"]["username"] == "ann"
    assert grant["user"]["groups"] == ["system:authenticated"]
    assert grant["secrets"] == [{"name": "s", "identity": tokens.fingerprint(uid)}]
    # It keys the version of a secret, which more people see than the secret.
    assert uid not in json.dumps(world.server.of("kubetorchworkloads", "f"))


@pytest.mark.parametrize(("plural", "name"), [("secrets", "s"), ("persistentvolumeclaims", "v")])
def test_what_took_a_name_is_handed_to_no_pod_of_who_may_not_have_it(
    world: World, plural: str, name: str
) -> None:
    secret(world, "s", is_ours=True)
    claim(world, "v", is_ours=True)
    pod = deployed(world, "ann", volumes=(VolumeSpec("v", "/data", claim="v"),))
    first = pod("f-0")
    assert world.hello(world.token(first), "f", "f-0") == WELCOME
    replaced(world, name, plural=plural)
    second = pod("f-1")
    replies = world.hello(world.token(second), "f", "f-1")
    assert "welcome" not in replies, replies
    assert f"{name!r}" in replies[-1], replies
    world.until(lambda: "f-1 MountRefused" in events(world))
    world.until(lambda: not is_there(world, "f-1"))
    assert is_there(world, "f-0")
    # The next ones end ever later, and until then the workload says why it lacks a pod.
    later = [f"f-{number}" for number in range(2, 7)]
    for pod_name in later:
        assert "welcome" not in world.hello(world.token(pod(pod_name)), "f", pod_name)
    _, view = world.request("GET", routes.workload(TEAM, "f"), "ann's")
    assert [pod_view["name"] for pod_view in view["pods"]] == ["f-0"]
    assert any(pod_name in view["reason"] for pod_name in later)
    assert f"{name!r}" in view["reason"]
    assert is_there(world, later[-1])


def test_a_deploy_whose_pods_are_refused_fails_and_says_why(world: World) -> None:
    secret(world, "s", is_ours=True)
    pod = deployed(world, "ann")
    replaced(world, "s")
    assert "welcome" not in world.hello(world.token(pod("f-0")), "f", "f-0")
    failure = world.until(
        lambda: (world.server.of("kubetorchworkloads", "f").get("status") or {}).get("failure")
    )
    assert failure["error_type"] == "ForbiddenError"
    assert "'s'" in failure["message"]


def test_who_could_have_made_the_pod_themselves_may_see_what_is_there_now(
    world: World,
) -> None:
    secret(world, "s", is_ours=False)
    pod = deployed(world, "root")
    replaced(world, "s")
    assert world.hello(world.token(pod("f-0")), "f", "f-0") == WELCOME


def test_another_secret_that_kubetorch_made_needs_no_right(world: World) -> None:
    secret(world, "s", is_ours=True)
    pod = deployed(world, "ann")
    replaced(world, "s", is_ours=True)
    assert world.hello(world.token(pod("f-0")), "f", "f-0") == WELCOME


def test_a_secret_that_is_gone_lets_running_pods_go_on_and_no_new_one_in(
    world: World,
) -> None:
    secret(world, "s", is_ours=True)
    pod = deployed(world, "ann")
    token = world.token(pod("f-0"))
    world.on_loop(lambda: world.server.remove(where("api", "v1", "secrets"), "s"))
    assert world.hello(token, "f", "f-0", generation=1) == WELCOME
    assert "welcome" not in world.hello(token, "f", "f-0")


@pytest.mark.parametrize("by", ["hand", "this version"])
def test_what_a_workload_without_a_record_may_mount(tmp_path: Path, by: str) -> None:
    with World(tmp_path / "first") as world:
        secret(world, "s", is_ours=False)
        pod = deployed(world, "root")("f-0")
        world.until(lambda: grants(world))
        world.reviews.rights = {
            right for right in world.reviews.rights if right[2] != "deployments"
        }
    record = world.server.of("kubetorchworkloads", "f")
    if by == "hand":
        del record["status"]
    with World(tmp_path / "second", world.server) as world:
        world.reviews.rights = {
            right for right in world.reviews.rights if right[2] != "deployments"
        }
        seconds = 1.0 if by == "hand" else 20.0
        replies = world.hello(world.token(pod), "f", "f-0", seconds=seconds)
        assert ("welcome" in replies) == (by != "hand"), replies


def test_a_workload_that_was_written_by_hand_selects_no_pods(
    tmp_path: Path,
) -> None:
    with World(tmp_path / "first") as world:
        assert world.deploy("root's", TEAM, "pool", selector=(("app", "mine"),))[0] == 200
        mine = {"labels": {"app": "mine"}}
        spec = {"containers": [{"name": "c", "image": "i"}]}
        pod = world.make("v1", "Pod", "mine-0", metadata=mine, spec=spec)
        token = world.token(pod)
        assert world.hello(token, "pool", "mine-0") == WELCOME
    record = world.server.of("kubetorchworkloads", "pool")
    record.pop("status", None)
    with World(tmp_path / "second", world.server) as world:
        assert world.request("GET", routes.workload(TEAM, "pool"), "root's")[0] == 404
        replies = world.hello(token, "pool", "mine-0", seconds=1.0)
        assert replies == ["there is no pod mine-0"]
        # Its token opens no blobs either.
        assert world.request("POST", routes.BLOBS_FETCH, token, b'{"blobs": []}')[0] == 403
        assert world.deploy("root's", TEAM, "pool", selector=(("app", "mine"),))[0] == 200
        assert world.hello(token, "pool", "mine-0") == WELCOME


def deploy_again(world: World, user: str) -> int:
    ref = SecretRef("s", "s", "env", ("KEY",))
    status: int = world.deploy(f"{user}'s", TEAM, "f", secrets=(ref,))[0]
    return status


# ----------------------------------------------------------------------- what its caller may not

_NATIVE = SecretRef("native", "native", "env", ("KEY",))
_FILES = SecretRef("native", "native", "volume", ("KEY",), "/secrets/native")
_POD_TOKEN = SecretRef("kubetorch-pod-token", "kubetorch-pod-token", "env", ("token",))
_POD: Object = {"spec": {"containers": [{"name": "c", "image": "x"}]}}


def _manifest(kind: str, api_version: str, spec: Object, **metadata: Any) -> Object:
    named = {"name": "sly", **metadata}
    return {"apiVersion": api_version, "kind": kind, "metadata": named, **spec}


def _projecting(source: str) -> str:
    """A template whose pods see a secret in one of the rarer ways."""
    volume: Object = {"name": "v"}
    if source == "projected":
        volume["projected"] = {"sources": [{"secret": {"name": "native"}}]}
    else:
        volume["secret"] = {"secretName": "native"}
    container: Object = {"name": "kubetorch", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}
    if source == "a key of it":
        container["volumeMounts"][0]["subPath"] = "KEY"
    spec = {"volumes": [volume], "containers": [container]}
    return json.dumps({"spec": {"template": {"spec": spec}}})


_JOB = json.dumps(_manifest("Job", "batch/v1", {"spec": {"template": _POD}}))
_BINDING = json.dumps(
    _manifest("RoleBinding", "rbac.authorization.k8s.io/v1", {"roleRef": {}, "x": _POD})
)
_ELSEWHERE = json.dumps(
    _manifest("Job", "batch/v1", {"spec": {"template": _POD}}, namespace="kube")
)

DEPLOYS: dict[str, Object] = {
    "an object of one's own": {"manifest": _JOB},
    "an object of one's own elsewhere": {"manifest": _ELSEWHERE},
    "an object that gives rights": {"manifest": _BINDING, "pod_template_path": ("x",)},
    "another service account": {"service_account_name": "admin"},
    "a change of the pods": {
        "service_template": json.dumps({"spec": {"template": {"spec": {"hostPID": True}}}})
    },
    "pods of others": {"selector": (("app", "mine"),)},
    "a secret in variables": {"secrets": (_NATIVE,)},
    "a secret in files": {"secrets": (_FILES,)},
    "a secret through a template": {"service_template": _projecting("a volume")},
    "a key of a secret": {"service_template": _projecting("a key of it")},
    "a projected secret": {"service_template": _projecting("projected")},
    "the token of other pods": {"secrets": (_POD_TOKEN,)},
    "a claim": {"volumes": (VolumeSpec("native", "/data"),)},
}
REQUESTS = {
    "values of a secret": ("GET", routes.secret(TEAM, "native", "values"), 400),
    "a secret's end": ("DELETE", routes.secret(TEAM, "native"), 400),
    "other values of a secret": ("POST", routes.secret(TEAM, "native"), 400),
    "a claim's end": ("DELETE", routes.volume(TEAM, "native"), 400),
}


@pytest.fixture(scope="module")
def natives(shared: World) -> World:
    """The world with a secret and a claim that Kubetorch did not make."""
    secret(shared, "native", is_ours=False, value=b"quince")
    claim(shared, "native", is_ours=False)
    shared.run(shared.pod_tokens.ensure(TEAM))
    everything = "get list create update delete"
    shared.reviews.allow("ann", everything, f"{KIND}/secrets", TEAM)
    shared.reviews.allow("ann", everything, f"{KIND}/volumes", TEAM)
    return shared


@pytest.mark.parametrize("attempt", DEPLOYS)
def test_a_deploy_gets_nobody_what_they_may_not_have(natives: World, attempt: str) -> None:
    before = dict(natives.server.objects)
    status, answer = natives.deploy("ann's", TEAM, "sly", **DEPLOYS[attempt])
    assert (status, answer["error_type"]) == (403, "ForbiddenError"), answer
    assert natives.server.objects.keys() == before.keys()


def secrets_and_claims(world: World) -> dict[tuple[str, str], Object]:
    """Its secrets and claims; the controller writes other objects when it likes."""
    kinds = [where("api", "v1", plural) for plural in ("secrets", "persistentvolumeclaims")]
    return {key: stored for key, stored in world.server.objects.items() if key[0] in kinds}


@pytest.mark.parametrize("attempt", REQUESTS)
def test_no_route_gives_or_changes_what_kubetorch_did_not_make(
    natives: World, attempt: str
) -> None:
    method, path, refused = REQUESTS[attempt]
    draft = {"name": "native", "mount_type": "env"}
    body = {"draft": draft, "values": {"KEY": "eA=="}, "collision": "replace"}
    before = secrets_and_claims(natives)
    status, answer = natives.request(method, path, "ann's", json.dumps(body).encode())
    assert status == refused, answer
    assert "quince" not in json.dumps(answer)
    assert secrets_and_claims(natives) == before
