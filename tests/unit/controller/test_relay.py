"""Which requests the controller passes on, and where tokens in them may be."""

from types import SimpleNamespace

import pytest

from kubetorch.controller import relay
from kubetorch.controller.relay import Relay
from kubetorch.errors import CallRefusedError, ServiceNotFoundError, UnauthorizedError
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import tokens
from kubetorch.wire.messages import PodView, WorkloadView


def nothing(namespace, name):
    raise ServiceNotFoundError(f"{namespace}/{name}")


RELAY = Relay(nothing, secret=b"secret", clock=lambda: 0.0)


@pytest.mark.parametrize("path", ["/team/train", "/team/train/", "/a/b/v1/stream", "/a/b/http/x"])
def test_paths_of_services_are_passed_on(path):
    assert RELAY.takes(path)


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/health", "/v1/workloads", "/v1/blobs/fetch"),
        *("/Team/train", "/team//x", "/te_am/a", "x"),
    ],
)
def test_others_are_the_controllers_own(path):
    assert not RELAY.takes(path)


def test_the_app_of_a_pod_lies_below_its_own_path():
    assert RELAY.is_app("/team/web/http")
    assert RELAY.is_app("/team/web/http/page")
    assert not RELAY.is_app("/team/web/https")
    assert not RELAY.is_app("/team/http/page")


def test_a_token_is_found_wherever_the_agent_takes_one():
    headers = [
        (b"authorization", b"Bearer one"),
        (b"x-kubetorch-token", b"two"),
        (b"cookie", b"other=x; kubetorch-app-pod-0=three"),
    ]
    found = list(relay._candidates(b"a=b&kubetorch_token=fo%20ur", headers))
    assert found == ["one", "two", "three", "fo ur"]
    assert list(relay._candidates(b"", [(b"authorization", b"Basic abc")])) == []


def test_without_a_token_nobody_learns_that_there_is_no_service():
    with pytest.raises(UnauthorizedError):
        RELAY._target("/team/train/double", b"", [])


def test_the_pod_that_is_named_is_meant_else_the_idlest_that_serves():
    pods = [
        PodView(name="a", ordinal=0, phase="Running", is_ready=True, url="http://1:1", calls=3),
        PodView(name="b", ordinal=1, phase="Running", is_ready=True, url="http://2:1", calls=1),
        PodView(name="c", ordinal=2, phase="Running", url="http://3:1"),
        PodView(name="d", ordinal=3, phase="Pending"),
    ]
    assert relay._choose("train", pods, None).name == "b"
    assert relay._choose("train", pods, "c").name == "c"
    with pytest.raises(ServiceNotFoundError, match="no pod 'd'"):
        relay._choose("train", pods, "d")
    with pytest.raises(CallRefusedError, match="no pod of train is ready"):
        relay._choose("train", pods[2:], None)


def test_calls_of_an_autoscaled_service_go_to_its_scaler_unless_they_name_a_pod():
    pod = PodView(name="a", ordinal=0, phase="Running", is_ready=True, url="http://1.2.3.4:32300")
    spec = WorkloadSpec("team", "train", CallableRef("fn", "f", "m", "f"), ComputeSpec())
    view = WorkloadView(
        spec=spec,
        generation=1,
        status="Ready",
        pods=(pod,),
        scaler="http://train.team.svc.cluster.local",
    )
    workload = SimpleNamespace(view=lambda: view, spec=spec)
    passing = Relay(lambda *_: workload, secret=b"secret", clock=lambda: 0.0)
    audience = tokens.audience("team", "train")
    claims = tokens.Claims(audience=audience, expires=60.0)
    token = tokens.sign(tokens.workload_key(b"secret", audience), claims)
    headers = [(b"host", b"localhost:8080"), (b"authorization", f"Bearer {token}".encode())]

    target = passing._target("/team/train/v1/stream", b"", headers)
    assert (target.host, target.port) == ("train.team.svc.cluster.local", 80)
    passed = target.passed(relay._passed(headers))
    assert [value for name, value in passed if name == b"host"] == [b"train.team.svc.cluster.local"]

    named = [*headers, (b"x-kubetorch-pod", b"a")]
    target = passing._target("/team/train/v1/stream", b"", named)
    assert (target.host, target.port) == ("1.2.3.4", 32300)
    assert relay._passed(named) == headers
