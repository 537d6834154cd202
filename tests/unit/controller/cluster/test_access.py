"""Who may do what in a cluster, by what an API server says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace as replaced

from kubetorch.controller.access import (
    BoundPod,
    NamespacePods,
    Need,
    PodIdentity,
    Principal,
    User,
)
from kubetorch.controller.backends.base import Stores
from kubetorch.controller.cluster.access import Clocks, ClusterAccess, Reviews, Verdict
from kubetorch.controller.tuning import TIMING
from kubetorch.errors import (
    ControllerUnavailableError,
    ForbiddenError,
    ForeignOriginError,
    KubetorchError,
    SpecError,
    UnauthorizedError,
)
from kubetorch.k8s.resources import Resource
from kubetorch.manifests import labels
from kubetorch.manifests.kinds import Manifest
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.secret import SecretRef
from kubetorch.specs.volume import VolumeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import tokens
from kubetorch.wire.messages import Creator
from kubetorch.wire.secrets import SecretView
from kubetorch.wire.volumes import VolumeView
from manual_clock import ManualClock
from tests.unit.controller.cluster.test_reviews import jwt

pytestmark = pytest.mark.security

ANN = User("ann", groups=("devs",))
POD = User("system:serviceaccount:team:bot", pod=BoundPod("team", "f-1", "u1"))
NEED = Need("create", "team", "f")
SECRET = b"s" * 32


class ApiServer(Reviews):
    """Knows some tokens and rights, and notes what it is asked."""

    def __init__(self) -> None:
        self.users: dict[str, User] = {"ann's": ANN}
        self.rights: set[tuple[str, Need]] = {("ann", NEED)}
        self.questions: list[object] = []
        self.is_away = False

    async def user(self, token: str, audiences: tuple[str, ...]) -> User | None:
        self._ask((token, audiences))
        return self.users.get(token)

    async def resource_of(self, manifest: Manifest) -> Resource:
        kind = manifest["kind"]
        namespaced = kind not in ("Namespace", "ClusterRole")
        group = manifest["apiVersion"].rpartition("/")[0]
        return Resource(group, "v1", f"{kind.lower()}s", kind, is_namespaced=namespaced)

    async def verdict(self, user: User, need: Need) -> Verdict:
        self._ask((user.name, need))
        return Verdict((user.name, need) in self.rights, "because")

    def _ask(self, question: object) -> None:
        self.questions.append(question)
        if self.is_away:
            raise ControllerUnavailableError("away")


class Claims:
    """The volumes of a cluster."""

    async def get(self, namespace: str, claim: str) -> VolumeView | None:
        if claim not in ("ours", "theirs"):
            return None
        volume = VolumeSpec(claim, "/data")
        return VolumeView(namespace=namespace, claim=claim, spec=volume, is_ours=claim == "ours")


class World:
    """What access looks at."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.server = ApiServer()
        self.uids = {PodIdentity("team", "f", "f-1"): "u1"}
        self.selectors = {("team", "theirs")}
        self.access = ClusterAccess(
            self.server,
            pods=self,
            pod_tokens=self,
            stores=Stores(self, Claims()),  # type: ignore[arg-type]  # only what is asked here
            secret=SECRET,
            clocks=Clocks(self.clock.time, self.clock.time),
        )

    def workload_of(self, pod: BoundPod) -> SimpleNamespace | None:
        for known_pod, uid in self.uids.items():
            if (known_pod.namespace, known_pod.pod, uid) == (pod.namespace, pod.name, pod.uid):
                return SimpleNamespace(creator=Creator("ann", "annie"))
        return None

    def uid_of(self, pod: PodIdentity) -> str | None:
        return self.uids.get(pod)

    def is_selector_only(self, namespace: str, workload: str) -> bool:
        return (namespace, workload) in self.selectors

    async def get(self, namespace: str, object_name: str) -> SecretView | None:
        tagged = {"ours": {labels.MOUNT_TYPE: "env"}, "theirs": {}}
        if object_name not in tagged:
            return None
        return SecretView(
            namespace=namespace,
            object_name=object_name,
            name=object_name,
            mount_type="env",
            keys=("KEY",),
            version="1",
            labels=tagged[object_name],
        )

    async def check(self, token: str) -> str:
        if token != "kt1.good.sig":
            raise UnauthorizedError("void")
        return "team"

    async def identify(self, token: str) -> Principal:
        return await self.access.identify({"authorization": f"Bearer {token}"})


def run(body: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(World()), 60))


def test_a_token_is_who_the_api_server_says_and_asked_about_again_after_10_s() -> None:
    async def body(world: World) -> None:
        for _ in range(5):
            assert await world.identify("ann's") == ANN
        assert len(world.server.questions) == 1
        world.clock.advance(TIMING.allowed_answer_seconds)
        del world.server.users["ann's"]
        with pytest.raises(UnauthorizedError):
            await world.identify("ann's")

    run(body)


def test_a_token_is_not_remembered_beyond_its_end() -> None:
    async def body(world: World) -> None:
        token = jwt({"exp": world.clock.time() + 3})
        world.server.users[token] = ANN
        await world.identify(token)
        world.clock.advance(3.0)
        del world.server.users[token]
        with pytest.raises(UnauthorizedError, match="expired 0 s ago"):
            await world.identify(token)

    run(body)


def test_a_clock_that_is_ahead_refuses_no_token_that_the_api_server_takes() -> None:
    async def body(world: World) -> None:
        token = jwt({"exp": world.clock.time() - 60})
        world.server.users[token] = ANN
        assert await world.identify(token) == ANN

    run(body)


def test_a_refused_token_is_asked_about_again_after_2_s() -> None:
    async def body(world: World) -> None:
        for _ in range(3):
            with pytest.raises(UnauthorizedError):
                await world.identify("new")
        assert len(world.server.questions) == 1
        world.server.users["new"] = ANN
        world.clock.advance(TIMING.denied_answer_seconds)
        assert await world.identify("new") == ANN

    run(body)


@pytest.mark.parametrize(
    "token", ["", "\u00fc", "a\x00b", "x" * 40_000, "kt1.forged.sig"], ids=lambda text: text[:6]
)
def test_what_is_no_token_is_refused_without_asking(token: str) -> None:
    async def body(world: World) -> None:
        with pytest.raises(UnauthorizedError):
            await world.identify(token)
        assert world.server.questions == []

    run(body)


def test_rights_are_those_that_the_api_server_says() -> None:
    async def body(world: World) -> None:
        await world.access.authorize(ANN, NEED)
        await world.access.authorize(ANN, NEED)
        assert len(world.server.questions) == 1
        with pytest.raises(ForbiddenError) as caught:
            await world.access.authorize(ANN, Need("delete", "team", "f"))
        error = caught.value
        assert (error.user, error.verb, error.resource) == ("ann", "delete", "kubetorchworkloads")
        assert "kubectl create rolebinding" in str(error)
        world.server.rights.clear()
        world.clock.advance(TIMING.allowed_answer_seconds)
        with pytest.raises(ForbiddenError):
            await world.access.authorize(ANN, NEED)

    run(body)


def test_nobody_gets_in_while_the_api_server_is_away() -> None:
    async def body(world: World) -> None:
        world.server.is_away = True
        with pytest.raises(ControllerUnavailableError):
            await world.identify("ann's")
        with pytest.raises(ControllerUnavailableError):
            await world.access.authorize(ANN, NEED)

    run(body)


def test_of_a_token_that_has_ended_is_said_when() -> None:
    async def body(world: World) -> None:
        ended = jwt({"exp": world.clock.time() - 90})
        with pytest.raises(UnauthorizedError, match="the token expired 90 s ago"):
            await world.identify(ended)
        with pytest.raises(UnauthorizedError, match="does not know this token"):
            await world.identify(jwt({"exp": world.clock.time() + 90}))

    run(body)


@pytest.mark.parametrize("namespace", ["*", "Team", "a/b", ".."])
def test_what_is_no_namespace_is_not_asked_about(namespace: str) -> None:
    async def body(world: World) -> None:
        with pytest.raises(KubetorchError):
            await world.access.authorize(ANN, Need("get", namespace))
        assert world.server.questions == []

    run(body)


def test_pages_are_refused_whatever_the_host() -> None:
    access = World().access
    access.check_origin({"host": "kubetorch-controller.kubetorch.svc"})
    for origin in ("null", "https://evil.example", "http://localhost"):
        with pytest.raises(ForeignOriginError):
            access.check_origin({"origin": origin})


# ------------------------------------------------------------------------------------------- pods


def test_a_pod_is_the_one_that_its_token_names() -> None:
    access = World().access
    access.check_pod(POD, PodIdentity("team", "f", "f-1"))
    assert access.namespace_of_pod(POD) == "team"


@pytest.mark.parametrize(
    ("principal", "pod"),
    [
        pytest.param(ANN, PodIdentity("team", "f", "f-1"), id="a user"),
        pytest.param(POD, PodIdentity("team", "f", "f-2"), id="another pod"),
        pytest.param(POD, PodIdentity("other", "f", "f-1"), id="another namespace"),
        pytest.param(
            User("system:serviceaccount:team:bot", pod=BoundPod("team", "f-1", "u0")),
            PodIdentity("team", "f", "f-1"),
            id="an earlier pod of that name",
        ),
        pytest.param(
            NamespacePods("team"), PodIdentity("team", "f", "f-1"), id="not a selector's pod"
        ),
        pytest.param(
            NamespacePods("other"), PodIdentity("team", "theirs", "x"), id="another namespace's"
        ),
    ],
)
def test_everybody_else_is_not_that_pod(principal: Principal, pod: PodIdentity) -> None:
    with pytest.raises(UnauthorizedError):
        World().access.check_pod(principal, pod)


def test_the_token_of_a_namespace_is_for_pods_that_somebody_else_made() -> None:
    async def body(world: World) -> None:
        principal = await world.identify("kt1.good.sig")
        assert principal == NamespacePods("team")
        world.access.check_pod(principal, PodIdentity("team", "theirs", "anything"))
        assert world.access.namespace_of_pod(principal) == "team"
        with pytest.raises(UnauthorizedError):
            await world.access.authorize(principal, NEED)

    run(body)


def test_a_pod_of_no_workload_is_a_user_like_others() -> None:
    stranger = User("system:serviceaccount:team:bot", pod=BoundPod("team", "x", "u9"))
    assert World().access.namespace_of_pod(stranger) is None


def test_a_pod_deploys_for_who_deployed_it_and_nobody_else_does() -> None:
    async def body(world: World) -> None:
        deployed = await world.access.check_deploy(POD, replace(spec(), username="mallory"))
        assert (deployed.user, deployed.creator) == (POD, Creator("ann", "annie"))
        stranger = replaced(POD, pod=BoundPod("team", "f-1", "u0"))
        deployed = await world.access.check_deploy(stranger, spec())
        assert deployed.creator == Creator(stranger.name)
        deployed = await world.access.check_deploy(ANN, replace(spec(), username="annie"))
        assert deployed.creator == Creator("ann", "annie")

    run(body)


def test_a_pod_is_welcomed_with_the_key_of_its_workload() -> None:
    welcome = World().access.welcome(PodIdentity("team", "f", "f-1"))
    assert welcome.key == tokens.workload_key(SECRET, "team/f").hex()


# ---------------------------------------------------------------------------------------- deploys


def spec(**compute: Any) -> WorkloadSpec:
    return WorkloadSpec("team", "f", CallableRef("fn", "f", "m", "f"), ComputeSpec(**compute))


def secret(name: str) -> SecretRef:
    return SecretRef(name=name, object_name=name, mount_type="env", keys=("KEY",))


JOB = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "f", "namespace": "kube-system"},
    "spec": {"template": {"spec": {"hostPID": True, "containers": [{"name": "c"}]}}},
}


@pytest.mark.parametrize(
    "plain",
    [
        spec(),
        spec(secrets=(secret("ours"),)),
        spec(volumes=(VolumeSpec("ours", "/data"), VolumeSpec("new", "/new"))),
        spec(service_account_name="kubetorch-service-account"),
    ],
)
def test_pods_as_kubetorch_renders_them_need_nothing_more(plain: WorkloadSpec) -> None:
    async def body(world: World) -> None:
        await world.access.check_deploy(ANN, plain)
        assert world.server.questions == []

    run(body)


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        (spec(manifest=json.dumps(JOB)), ("batch", "jobs")),
        (spec(service_template='{"spec": {"paused": true}}'), ("apps", "deployments")),
        (spec(service_account_name="admin"), ("apps", "deployments")),
        (spec(secrets=(secret("theirs"),)), ("apps", "deployments")),
        (spec(volumes=(VolumeSpec("v", "/v", claim="theirs"),)), ("apps", "deployments")),
        (spec(selector=(("app", "x"),), cpus="1"), ("apps", "deployments")),
    ],
)
def test_what_goes_beyond_is_done_for_who_could_do_it_themselves(
    more: WorkloadSpec, kind: tuple[str, str]
) -> None:
    async def body(world: World) -> None:
        with pytest.raises(ForbiddenError, match="ClusterRole edit in namespace team"):
            await world.access.check_deploy(ANN, more)
        for verb in ("create", "patch"):
            need = Need(verb, "team", "f", group=kind[0], resource=kind[1])
            world.server.rights.add(("ann", need))
        world.clock.advance(TIMING.denied_answer_seconds)
        await world.access.check_deploy(ANN, more)

    run(body)


def test_pods_are_selected_for_who_could_run_code_in_them_and_read_their_logs() -> None:
    async def body(world: World) -> None:
        selected = spec(selector=(("app", "postgres"),))
        for verb, part in (("create", ""), ("patch", ""), ("get", "log")):
            with pytest.raises(
                ForbiddenError, match="ClusterRole edit in namespace team"
            ) as caught:
                await world.access.check_deploy(ANN, selected)
            kind = f"pods/{part}" if part else "pods"
            assert (caught.value.verb, caught.value.resource) == (verb, kind)
            # Of one name would not do: labels find all of them.
            need = Need(verb, "team", subresource=part, group="", resource="pods")
            world.server.rights.add(("ann", need))
            world.clock.advance(TIMING.denied_answer_seconds)
        await world.access.check_deploy(ANN, selected)

    run(body)


def test_an_object_that_lies_in_no_namespace_is_nobodys_service() -> None:
    manifest = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "x"},
        "x": {"spec": {"containers": [{"name": "c"}]}},
    }

    async def body(world: World) -> None:
        sly = spec(manifest=json.dumps(manifest), pod_template_path=("x",))
        with pytest.raises(SpecError, match="lies in no namespace"):
            await world.access.check_deploy(ANN, sly)

    run(body)
