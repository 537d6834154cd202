"""Who may ask a controller in a cluster what, by what an API server says of tokens and rights."""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kubetorch as kt
from kubetorch.cli import pods
from kubetorch.controller.backends.base import PodStatus
from kubetorch.controller.tuning import Timing
from kubetorch.datastore.blobs import digest_of
from kubetorch.lib.http_client import HttpClient
from kubetorch.sdk import backend, shells
from kubetorch.wire import routes, tokens
from kubetorch.wire.messages import PodView, WorkloadView
from tests.cluster_controller import SECRET, open_session
from tests.local.fake_reviews import FakeReviews, ReviewedController
from tests.local.service_harness import pack

pytestmark = pytest.mark.security

KIND = "kubetorchworkloads"
#: A token that says whom it is for; its signature is the API server's business.
POD = "eyJ.eyJhdWQiOiBbImt1YmV0b3JjaCJdfQ.c2ln"


class World(ReviewedController):
    """A controller, and the API server that it asks."""

    def __init__(self, folder: Path) -> None:
        self.reviews = FakeReviews()
        super().__init__(folder, self.reviews)
        self.reviews.users = {
            "ann's": ("ann", "", ""),
            "bob's": ("bob", "", ""),
            "root's": ("root", "", ""),
            POD: ("system:serviceaccount:a:sa", "f-0", "uid-0"),
        }
        self.reviews.audiences[POD] = ["kubetorch"]
        for user, namespace in (("ann", "a"), ("bob", "b"), ("root", "*")):
            self.reviews.allow(user, "get list create update delete", KIND, namespace)
            self.reviews.allow(user, "create", f"{KIND}/call", namespace)
            self.reviews.allow(user, "get", f"{KIND}/logs", namespace)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("controller")) as world:
        world.backend.named["a", "f"] = [PodStatus("f-0", 0, "Running", "", uid="uid-0")]
        assert world.deploy("ann's", "a", "f")[0] == 200
        assert world.deploy("bob's", "b", "g")[0] == 200
        yield world


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as world:
        yield world


def workload(namespace: str, name: str, verb: str = "") -> str:
    return routes.workload(namespace, name, verb)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", routes.WORKLOADS),
        ("GET", routes.workloads("b")),
        ("GET", workload("b", "g")),
        ("GET", workload("b", "nothing")),
        ("DELETE", workload("b", "g")),
        ("POST", workload("b", "g", "token")),
        ("GET", workload("b", "g", "logs")),
        ("GET", routes.SECRETS),
        ("GET", routes.secret("b", "s", "values")),
        ("GET", routes.volumes("b")),
        ("POST", routes.volumes("b")),
        ("GET", f"{routes.CALLS}?namespace=b"),
        ("GET", routes.CALLS),
        ("POST", f"{routes.BLOBS_FETCH}?namespace=b"),
        ("POST", f"{routes.BLOBS_MISSING}?namespace=b"),
        ("POST", routes.BLOBS),
        *(("POST", routes.data("b", verb)) for verb in ("put", "find", "rm", "blobs")),
        ("POST", routes.data("b", "blobs-missing")),
        ("POST", routes.data("b", "blobs-fetch")),
        ("GET", routes.data("b", "ls")),
        ("GET", routes.STATUS),
    ],
)
def test_a_user_of_one_namespace_touches_no_other(shared: World, method: str, path: str) -> None:
    status, answer = shared.request(method, path, "ann's", b"{}")
    assert (status, answer["error_type"]) == (403, "ForbiddenError"), answer


def test_a_pod_has_the_data_of_its_namespace_and_of_no_other(shared: World) -> None:
    find = b'{"path": "k"}'
    assert shared.request("POST", routes.data("a", "find"), POD, find) == (200, {"keys": []})
    status, answer = shared.request("POST", routes.data("b", "find"), POD, find)
    assert (status, answer["error_type"]) == (403, "ForbiddenError"), answer


def test_a_user_who_may_only_read_data_puts_none(shared: World) -> None:
    shared.reviews.users["eve's"] = ("eve", "", "")
    shared.reviews.allow("eve", "get list", f"{KIND}/data", "a")
    find = shared.request("POST", routes.data("a", "find"), "eve's", b'{"path": "k"}')
    assert find == (200, {"keys": []})
    assert shared.request("GET", routes.data("a", "ls"), "eve's") == (200, [])
    for verb in ("put", "rm", "blobs", "blobs-missing"):
        status, answer = shared.request("POST", routes.data("a", verb), "eve's", b"{}")
        assert status == 403, answer
    # The blobs of deploys lie in the same folder.
    secret = b"arguments of a class"
    upload = f"{routes.BLOBS}?namespace=a"
    assert shared.request("POST", upload, "ann's", pack([secret]))[0] == 200
    names = json.dumps({"blobs": [digest_of(secret)]}).encode()
    status, answer = shared.request("POST", routes.data("a", "blobs-fetch"), "eve's", names)
    assert (status, answer["error_type"]) == (404, "DataStoreError"), answer


def test_a_spec_of_another_namespace_does_not_get_in_by_the_path_of_ones_own(
    shared: World,
) -> None:
    path = workload("a", "f", "deploy")
    status, answer = shared.deploy("ann's", "b", "g", path=path)
    assert (status, answer["error_type"]) == (400, "SpecError")


def test_a_namespace_in_disguise_is_none(shared: World) -> None:
    for namespace in ("a%2Fb", "a%00", "*", "..", "A"):
        status, _ = shared.request("GET", f"{routes.WORKLOADS}/{namespace}", "root's")
        assert status in (400, 404), namespace


def test_who_may_see_and_not_call_gets_no_token(shared: World) -> None:
    shared.reviews.users["eve's"] = ("eve", "", "")
    shared.reviews.allow("eve", "get", KIND, "a")
    status, view = shared.request("GET", workload("a", "f"), "eve's")
    assert (status, view.get("token", "")) == (200, "")
    status, view = shared.request("GET", workload("a", "f"), "ann's")
    key = tokens.workload_key(SECRET, "a/f")
    claims = tokens.verify(key, view["token"], audience="a/f", now=time.time())
    assert (claims.subject, claims.verbs) == ("ann", ("call",))


@pytest.fixture
def as_viewer(
    shared: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WorkloadView]:
    """A program of a user who may see the service and no more; the service as they see it."""
    shared.reviews.users["eve's"] = ("eve", "", "")
    shared.reviews.allow("eve", "get list", KIND, "a")
    user = {"name": "eve", "user": {"token": "eve's"}}
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "eve"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:9"}}],
        "users": [user],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("KT_BACKEND", "kubernetes")
    monkeypatch.setenv("KT_NAMESPACE", "a")
    monkeypatch.setenv("KT_API_URL", shared.url)
    yield backend.session().get_workload("a", "f")
    backend.close_all()


@pytest.mark.usefixtures("as_viewer")
def test_who_may_not_call_learns_which_right_that_takes_from_every_form_of_a_call() -> None:
    f = kt.Fn.from_name("f", namespace="a")
    for call in (
        f,
        lambda: f.spawn().result(timeout=60),
        lambda: list(f.map([1, 2])),
        lambda: f.request_headers,
    ):
        with pytest.raises(kt.ForbiddenError, match="eve may not create") as refused:
            call()
        error = refused.value
        assert (error.user, error.verb, error.resource) == ("eve", "create", f"{KIND}/call")


def test_a_shell_and_a_forwarded_port_take_the_right_to_run_commands(
    as_viewer: WorkloadView,
) -> None:
    pod = PodView(name="f-0", ordinal=0, phase="Running", url="http://127.0.0.1:9")
    for attempt in (
        lambda: shells.run(backend.session(), as_viewer, pod, "true"),
        lambda: pods.port_forward("f", namespace="a"),
    ):
        with pytest.raises(kt.ForbiddenError) as refused:
            attempt()
        assert (refused.value.verb, refused.value.resource) == ("create", f"{KIND}/exec")


@pytest.mark.parametrize(
    ("verbs", "status"),
    [(["call"], 200), (["logs"], 200), (["call", "exec"], 403), (["root"], 400), ([], 400)],
)
def test_a_token_is_for_what_who_asks_may_do(shared: World, verbs: list[str], status: int) -> None:
    body = json.dumps({"verbs": verbs}).encode()
    answer_status, answer = shared.request("POST", workload("a", "f", "token"), "ann's", body)
    assert answer_status == status, answer
    if status == 200:
        key = tokens.workload_key(SECRET, "a/f")
        claims = tokens.verify(key, answer["token"], audience="a/f", now=time.time())
        assert claims.verbs == tuple(verbs)


def test_a_kind_of_ones_own_takes_a_right_of_the_controller_and_the_error_grants_it(
    world: World,
) -> None:
    controller = "system:serviceaccount:kubetorch:kubetorch-controller"
    spec = {"template": {"spec": {"containers": [{"name": "c", "image": "i"}]}}}

    def deploy(name: str, kind: str = "Fleet") -> tuple[int, str, str]:
        metadata = {"name": name}
        fleet = {
            "apiVersion": "example.com/v1",
            "kind": kind,
            "metadata": metadata,
            "spec": spec,
        }
        text, path = json.dumps(fleet), ("spec", "template")
        # Each of its own name: a refusal is remembered for a while.
        status, answer = world.deploy("ann's", "a", name, manifest=text, pod_template_path=path)
        return status, str(answer.get("message")), str((answer.get("state") or {}).get("hint"))

    def commands(*subjects: str) -> str:
        verbs = "get,list,watch,create,update,patch,delete"
        kind = "kubetorch-fleets.example.com"
        return (
            f"kubectl create clusterrole {kind} --verb={verbs} --resource=fleets.example.com "
            "--dry-run=client -o yaml | kubectl apply -f -\n"
            f"kubectl create rolebinding {kind} -n a --clusterrole={kind} {' '.join(subjects)}\n"
        )

    ours = "--serviceaccount=kubetorch:kubetorch-controller"
    status, message, hint = deploy("h1")
    assert (status, "ann may not create fleets.example.com" in message) == (403, True), message
    assert "the controller lacks the rule apiGroups: [example.com], resources: [fleets]" in hint
    assert commands("--user=ann", ours) in hint
    world.reviews.allow("ann", "create patch", "fleets", "a")
    world.reviews.allow(controller, "get list", "fleets", "a")
    status, message, hint = deploy("h2")
    assert (status, commands(ours) in hint) == (403, True), hint
    assert "resources: [fleets], verbs: [watch, create, update, patch, delete]" in message
    world.reviews.allow(controller, "watch create update patch delete", "fleets", "a")
    assert deploy("h3")[0] == 200
    world.reviews.allow("ann", "create patch", "ships", "a")
    assert deploy("h4", "Ship")[0] == 200  # the cluster does not serve it: the deploy says so


def test_blobs_of_a_namespace_are_nobody_elses(shared: World) -> None:
    blob = b"the code of a"
    named = json.dumps({"blobs": [digest_of(blob)]}).encode()
    path = f"{routes.BLOBS}?namespace=a"
    assert shared.request("POST", path, "ann's", pack([blob])) == (200, {"stored": 1})
    path = f"{routes.BLOBS_FETCH}?namespace=a"
    assert shared.request("POST", path, "ann's", named)[0] == 200
    path = f"{routes.BLOBS_FETCH}?namespace=b"
    assert shared.request("POST", path, "bob's", named)[0] == 404
    path = f"{routes.BLOBS_MISSING}?namespace=b"
    assert shared.request("POST", path, "bob's", named)[1] == {"missing": [digest_of(blob)]}
    # A deploy that names it is asked for it too.
    status, event = shared.deploy("bob's", "b", "thief", tree=digest_of(blob))
    assert (status, event) == (200, {"type": "missing", "blobs": [digest_of(blob)]})
    # Pods have the blobs of their own namespace, whatever they say.
    path = f"{routes.BLOBS_FETCH}?namespace=b"
    assert shared.request("POST", path, POD, named)[0] == 200


def test_what_pods_of_others_wrote_is_for_who_may_read_their_logs(world: World) -> None:
    our_pod = PodStatus("h-0", 0, "Failed", "", uid="1")
    foreign_pod = PodStatus("postgres-0", 1, "Running", "", uid="2", is_ours=False)
    world.backend.named["a", "h"] = [our_pod, foreign_pod]
    for pod in ("h-0", "postgres-0"):
        line = {"time": 1.0, "text": f"of {pod}"}
        world.backend.logs["a", pod] = [json.dumps(line).encode()]
    assert world.deploy("ann's", "a", "h")[0] == 200

    world.reviews.users["eve's"] = ("eve", "", "")
    world.reviews.allow("eve", "get", f"{KIND}/logs", "a")
    world.reviews.allow("eve", "get", "pods/log", "a")

    def read(token: str) -> list[str]:
        with (
            HttpClient(world.url, token, timeout=30.0) as client,
            client.request("GET", workload("a", "h", "logs")) as answer,
        ):
            return [json.loads(line)["text"] for line in answer.iter_lines()]

    assert read("ann's") == ["of h-0"]
    assert read("eve's") == ["of h-0", "of postgres-0"]


def test_a_pod_opens_its_session_and_no_users_routes(shared: World) -> None:
    assert open_session(shared.url, POD) == 101
    assert open_session(shared.url, "") == 401
    status, answer = shared.request("GET", workload("a", "f"), POD)
    assert (status, answer["error_type"]) == (403, "ForbiddenError")


def test_the_token_of_a_namespace_is_made_checked_and_void_with_its_secret(world: World) -> None:
    world.run(world.pod_tokens.ensure("a"))
    world.run(world.pod_tokens.ensure("a"))
    (path,) = world.reviews.secrets
    secret = world.reviews.secrets[path]
    assert path.endswith("/namespaces/a/secrets/kubetorch-pod-token")
    token = base64.b64decode(secret["data"]["token"]).decode()
    assert open_session(world.url, token) == 101
    assert open_session(world.url, token[:-2]) == 401
    assert world.request("GET", routes.workloads("a"), token)[0] == 401
    del world.reviews.secrets[path]
    world.run(world.pod_tokens.ensure("a"))
    assert open_session(world.url, token) == 401


def test_nobody_gets_in_while_the_api_server_is_away(world: World) -> None:
    world.reviews.is_away = True
    status, answer = world.request("GET", routes.workloads("a"), "ann's")
    assert (status, answer["error_type"]) == (503, "ControllerUnavailableError")
    assert answer["state"]["hint"]
    assert open_session(world.url, POD) == 503
    assert world.request("GET", routes.HEALTH, "")[0] == 200
    world.reviews.is_away = False
    assert world.request("GET", routes.workloads("a"), "ann's")[0] == 200


def test_the_same_question_is_not_asked_again_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    timing = Timing(allowed_answer_seconds=600.0)
    monkeypatch.setattr("kubetorch.controller.cluster.access.TIMING", timing)
    for _ in range(5):
        assert world.request("GET", routes.workloads("a"), "ann's")[0] == 200
    assert len(world.reviews.reviews) == 2


def test_pages_are_refused_and_any_host_is_right(shared: World) -> None:
    host = {"Host": "kubetorch-controller.kubetorch.svc"}
    assert shared.request("GET", routes.HEALTH, "", headers=host)[0] == 200
    for origin in ("https://evil.example", "null", "http://localhost"):
        status, answer = shared.request("GET", routes.HEALTH, "", headers={"Origin": origin})
        assert (status, answer["error_type"]) == (403, "ForeignOriginError")


def test_the_service_of_one_user_alone_can_be_stopped_by_a_request(shared: World) -> None:
    assert shared.request("POST", routes.STOP, "root's", b"{}")[0] == 404


# ------------------------------------------------------------------------------------------ audit


def test_what_changes_something_is_written_down(
    shared: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kubetorch.audit")
    shared.request("GET", workload("a", "f"), "ann's")
    assert caplog.records == []
    headers = {"X-Request-ID": "my-1"}
    shared.request("POST", workload("a", "f", "token"), "ann's", b"{}", headers)
    shared.request("DELETE", workload("b", "g"), "ann's")
    shared.request("DELETE", workload("b", "g"), "stranger's")
    lines = [json.loads(record.getMessage()) for record in caplog.records]
    audit = [(line["user"], line["verb"], line["namespace"], line["name"]) for line in lines]
    assert audit == [
        ("ann", "create+get", "a", "f"),
        ("ann", "delete", "b", "g"),
        (None, "delete", "b", "g"),
    ]
    assert [(line["outcome"], line["status"]) for line in lines] == [
        ("allowed", 200),
        ("refused", 403),
        ("refused", 401),
    ]
    assert lines[0]["request_id"] == "my-1"
    assert lines[0]["source"] == "127.0.0.1"
    assert len(lines[1]["request_id"]) == 32
    assert "kt1." not in caplog.text
    assert "ann's" not in caplog.text
