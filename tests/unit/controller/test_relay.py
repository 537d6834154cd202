"""Which requests the controller passes on, and where tokens in them may be."""

import asyncio
from types import SimpleNamespace

import pytest

from kubetorch.controller.relay import Hosts, Relay
from kubetorch.controller.workloads import stopped
from kubetorch.errors import (
    CallRefusedError,
    ForeignOriginError,
    ServiceNotFoundError,
    UnauthorizedError,
)
from kubetorch.specs.callable import AppSpec, CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import tokens
from kubetorch.wire.messages import PodView, WorkloadView


def nothing(namespace, name):
    raise ServiceNotFoundError(f"{namespace}/{name}")


RELAY = Relay(nothing, secret=b"secret", clock=lambda: 0.0)


def locate(path, relay=RELAY, host=b"kt.example.com"):
    return relay.locate(path, [(b"host", host)])


def is_app(path):
    location = locate(path)
    return location is not None and location.is_app


def bearer(name):
    """The header of a request to a service of the team that has its token."""
    audience = tokens.audience("team", name)
    claims = tokens.Claims(audience=audience, expires=60.0)
    token = tokens.sign(tokens.workload_key(b"secret", audience), claims)
    return (b"authorization", f"Bearer {token}".encode())


@pytest.mark.parametrize(
    "path", [b"/team/train", b"/team/train/", b"/a/b/v1/stream", b"/a/b/http/x", b"/a/b/x%2Fy"]
)
def test_paths_of_services_are_passed_on(path):
    assert locate(path) is not None


@pytest.mark.parametrize(
    "path",
    [
        *(b"/", b"/health", b"/v1/workloads", b"/v1/blobs/fetch"),
        *(b"/Team/train", b"/team//x", b"/te_am/a", b"x"),
        *(b"/team%2Ftrain/http/x", b"/team/train%2Fhttp/x", b"/%74eam/train"),
    ],
)
def test_others_are_the_controllers_own(path):
    assert locate(path) is None


def test_the_app_of_a_pod_lies_below_its_own_path():
    assert is_app(b"/team/web/http")
    assert is_app(b"/team/web/http/page")
    assert not is_app(b"/team/web/https")
    assert not is_app(b"/team/http/page")
    assert not is_app(b"/team/web/http%2Fpage")


def test_without_a_token_nobody_learns_that_there_is_no_service():
    with pytest.raises(UnauthorizedError):
        asyncio.run(RELAY._target(locate(b"/team/train/double"), b"", [], lambda: None))


def test_with_a_token_a_request_hears_why_the_service_has_stopped():
    def find(namespace, name):
        raise stopped(name, "no call for 10m (inactivity_ttl)")

    passing = Relay(find, secret=b"secret", clock=lambda: 0.0)
    for headers, error in (
        ([], UnauthorizedError),
        ([bearer("train")], ServiceNotFoundError),
    ):
        with pytest.raises(error) as raised:
            asyncio.run(passing._target(locate(b"/team/train/double"), b"", headers, lambda: None))
        assert ("no call for 10m" in str(raised.value)) == bool(headers)


def test_of_a_public_app_only_its_own_pages_need_no_token():
    pod = PodView(name="a", ordinal=0, phase="Running", is_ready=True, url="http://1.2.3.4:32300")
    app = AppSpec("serve", port=80, public=True)
    spec = WorkloadSpec("team", "web", CallableRef("app", "web", "m", "web", app=app))
    view = WorkloadView(spec=spec, generation=1, status="Ready", pods=(pod,))
    workload = SimpleNamespace(view=lambda: view, spec=spec, scaling=None)
    passing = Relay(lambda *_: workload, secret=b"secret", clock=lambda: 0.0)
    admitted = []

    def target(path, *headers):
        pod_target, _ = asyncio.run(
            passing._target(locate(path), b"", list(headers), lambda: admitted.append(path))
        )
        return pod_target.host

    assert target(b"/team/web/http/page") == "1.2.3.4"
    assert admitted == []
    for path in (b"/team/web/v1/logs", b"/team/web/v1/stream", b"/team/web"):
        with pytest.raises(UnauthorizedError):
            target(path)
    assert target(b"/team/web/v1/logs", bearer("web")) == "1.2.3.4"
    assert admitted == [b"/team/web/v1/logs"]


def test_a_held_request_to_a_service_that_is_torn_down_meanwhile_hears_that_it_is_gone():
    spec = WorkloadSpec("team", "train", CallableRef("fn", "f", "m", "f"), ComputeSpec())

    class TornDown:
        """Scaling that is closed while it holds a request: its service is still known."""

        pod_slots = None

        async def hold(self, request, seconds, has_room, has_failed):
            workload.is_torn_down = True

    workload = SimpleNamespace(
        spec=spec, scaling=TornDown(), pod_views=tuple, is_torn_down=False, stop_reason=""
    )
    passing = Relay(lambda *_: workload, secret=b"secret", clock=lambda: 0.0)
    with pytest.raises(ServiceNotFoundError, match="torn down"):
        asyncio.run(
            passing._target(locate(b"/team/train/double"), b"", [bearer("train")], lambda: None)
        )


def chosen(pods, pod_name):
    spec = WorkloadSpec("team", "train", CallableRef("fn", "train", "m", "train"))
    view = WorkloadView(spec=spec, generation=1, status="Ready", pods=tuple(pods))
    return RELAY._choose(view, pod_name)


def test_the_pod_that_is_named_is_meant_else_the_idlest_that_serves():
    pods = [
        PodView(name="a", ordinal=0, phase="Running", is_ready=True, url="http://1:1", calls=3),
        PodView(name="b", ordinal=1, phase="Running", is_ready=True, url="http://2:1", calls=1),
        PodView(name="c", ordinal=2, phase="Running", url="http://3:1"),
        PodView(name="d", ordinal=3, phase="Pending"),
    ]
    assert chosen(pods, None).name == "b"
    assert chosen(pods, "c").name == "c"
    with pytest.raises(ServiceNotFoundError, match="no pod 'd'"):
        chosen(pods, "d")
    with pytest.raises(CallRefusedError, match="no pod of train is ready"):
        chosen(pods[2:], None)


def test_who_has_the_token_of_a_service_hears_why_no_pod_of_it_is_ready():
    pod = PodView(name="a", ordinal=0, phase="Running", reason="it loads", lines=("one", "two"))
    app = AppSpec("serve", port=80, public=True)
    spec = WorkloadSpec("team", "web", CallableRef("app", "web", "m", "web", app=app))
    failure = {"error_type": "ImportError", "message": "no numpy", "traceback": "line 1"}
    views = [
        WorkloadView(spec=spec, generation=1, status="Creating", pods=(pod,)),
        WorkloadView(spec=spec, generation=1, status="Failed", pods=(pod,), failure=failure),
    ]

    def refused(view, *headers):
        workload = SimpleNamespace(view=lambda: view, spec=spec, scaling=None)
        passing = Relay(lambda *_: workload, secret=b"secret", clock=lambda: 0.0)
        with pytest.raises(CallRefusedError) as raised:
            asyncio.run(
                passing._target(locate(b"/team/web/http/"), b"", list(headers), lambda: None)
            )
        return raised.value

    lines = "the last lines of pod a:\n  one\n  two"
    waiting, failed = (refused(view, bearer("web")) for view in views)
    assert waiting.message == f"no pod of web is ready: pod a: it loads; {lines}"
    assert failed.message == f"no pod of web can start: ImportError: no numpy; {lines}"
    assert failed.remote_traceback == "line 1"
    for view in views:
        stranger = refused(view)
        assert (stranger.message, stranger.remote_traceback) == ("no pod of web is ready", None)


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
    workload = SimpleNamespace(view=lambda: view, spec=spec, scaling=None)
    passing = Relay(lambda *_: workload, secret=b"secret", clock=lambda: 0.0)
    headers = [(b"host", b"localhost:8080"), bearer("train")]

    target, request = asyncio.run(
        passing._target(locate(b"/team/train/v1/stream"), b"", headers, lambda: None)
    )
    assert (target.host, target.port) == ("train.team.svc.cluster.local", 80)
    passed = target.passed(request.headers)
    assert [value for name, value in passed if name == b"host"] == [b"train.team.svc.cluster.local"]

    named = [*headers, (b"x-kubetorch-pod", b"a")]
    target, request = asyncio.run(
        passing._target(locate(b"/team/train/v1/stream"), b"", named, lambda: None)
    )
    assert (target.host, target.port) == ("1.2.3.4", 32300)
    assert request.headers == headers


HOSTS = Hosts("kt.example.com", ("apps.example.com",), are_per_service=True)


@pytest.mark.parametrize(
    ("namespace", "name", "host"),
    [
        ("team", "web", "web--team.kt.example.com"),
        ("a" * 30, "b" * 31, f"{'b' * 31}--{'a' * 30}.kt.example.com"),
        ("a" * 30, "b" * 32, ""),
        ("te--am", "web", ""),
        ("team", "w--eb", ""),
        ("team", "xn", ""),
    ],
)
def test_a_service_has_a_host_of_its_own_where_one_label_says_both_names(namespace, name, host):
    assert HOSTS.of(namespace, name) == host
    assert HOSTS.find(host) == ((namespace, name) if host else None)
    assert Hosts("kt.example.com").of(namespace, name) == ""


@pytest.mark.parametrize(
    "host",
    [
        "kt.example.com",
        "web--team.example.com",
        "web.kt.example.com",
        "a.web--team.kt.example.com",
        "",
    ],
)
def test_other_hosts_are_no_services(host):
    assert HOSTS.find(host) is None


def test_a_browser_may_call_an_app_by_its_own_host_and_the_common_ones():
    assert HOSTS.allowed_hosts("team", "web") == (
        "kt.example.com",
        "apps.example.com",
        "web--team.kt.example.com",
    )
    assert Hosts().allowed_hosts("team", "web") == ()


def test_all_paths_of_the_host_of_a_service_are_those_of_its_app():
    passing = Relay(nothing, secret=b"secret", clock=lambda: 0.0, hosts=HOSTS)
    for path in (b"/", b"/v1/workloads", b"/health", b"/other/service/http/x"):
        location = locate(path, passing, b"web--team.kt.example.com:8443")
        assert (location.namespace, location.name, location.is_app) == ("team", "web", True)
        assert location.mount.enter(path) == b"/http" + path
    assert locate(b"/team/web/http/", passing).is_service_host is False
    assert locate(b"/v1/workloads", passing) is None


def test_a_page_is_sent_to_the_host_of_its_app_by_the_way_that_it_came():
    passing = Relay(nothing, secret=b"secret", clock=lambda: 0.0, hosts=HOSTS)
    location = locate(b"/team/web/http/page", passing)
    page = ((b"sec-fetch-site", b"none"), (b"sec-fetch-mode", b"navigate"))

    def moved(*headers, method="GET"):
        return passing._redirect_base(location, method, [*page, *headers])

    host = "web--team.kt.example.com"
    assert moved() == f"https://{host}"
    assert moved((b"x-forwarded-proto", b"https")) == f"https://{host}"
    assert moved((b"x-forwarded-proto", b"http")) == f"http://{host}"
    assert moved((b"host", b"kt.example.com:8443")) == f"https://{host}:8443"
    with pytest.raises(ForeignOriginError, match=f"pages of web are at {host}"):
        moved(method="POST")
    assert passing._redirect_base(location, "GET", []) == ""  # a program's


CLUSTER_HOSTS = Hosts(
    "kt.example.com", ("example.com", "kubetorch-controller.kubetorch.svc"), are_of_cluster=True
)


@pytest.mark.parametrize(
    ("host", "service"),
    [
        (b"web.team.svc.cluster.local", ("team", "web")),
        (b"WEB.team.svc.cluster.local.:80", ("team", "web")),
        (b"web.team.svc:80", ("team", "web")),
        (b"there.team", ("team", "there")),
        (b"web.team", None),
        (b"web", None),
        (b"web.team.svc.example.com", None),
        (b"10.0.0.7:8080", None),
        (b"kt.example.com", None),
        (b"example.com", None),
        (b"kubetorch-controller.kubetorch.svc", None),
    ],
)
def test_a_service_without_pods_is_known_by_its_name_in_the_cluster(host, service):
    def find(namespace, name):
        return SimpleNamespace() if name in ("there", "example") else nothing(namespace, name)

    passing = Relay(find, secret=b"secret", clock=lambda: 0.0, hosts=CLUSTER_HOSTS)
    for path in (b"/", b"/double", b"/v1/workloads", b"/health", b"/http"):
        location = locate(path, passing, host)
        if service is None:
            assert location is None
        else:
            assert (location.namespace, location.name) == service
            assert location.mount.enter(path) == path
            assert location.is_app is (path == b"/http")
    assert (locate(b"/a/b/x", passing, host).mount.enter(b"/a/b/x") == b"/x") is (service is None)
    assert locate(b"/", Relay(find, secret=b"", clock=lambda: 0.0), host) is None


def test_its_short_name_is_that_of_the_service_whose_token_is_sent():
    passing = Relay(nothing, secret=b"secret", clock=lambda: 0.0, hosts=CLUSTER_HOSTS)

    def found(token):
        headers = [(b"host", b"web"), (b"authorization", f"Bearer {token}".encode())]
        location = passing.locate(b"/double", headers)
        return location and (location.namespace, location.name)

    def token(audience):
        return tokens.sign(b"key", tokens.Claims(audience, 60.0, "me"))

    assert found(token("team/web")) == ("team", "web")
    assert found(token("team/train")) is None
    assert found(token("team")) is None
    assert found("a.token.of-kubernetes") is None
