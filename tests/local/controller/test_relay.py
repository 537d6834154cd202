"""Pods behind their controller: what it passes on, and to whom it says nothing."""

import asyncio
import contextlib
import http.client
import json
import threading
from urllib.parse import urlsplit

import pytest

import kubetorch as kt
from kubetorch.local import lifetime
from kubetorch.sdk import backend
from tests.local.fake_apiserver import Authority
from tests.local.fake_cluster import CONTROLLER, FakeCluster
from tests.local.user_project import UserProject

SOURCE = """
def double(x):
    print("doubling", x)
    return 2 * x

def numbers(n):
    yield from range(n)
"""


@pytest.fixture(scope="module")
def service(shared_service_home):
    return lifetime.ensure()


@pytest.fixture
def cluster(service, tmp_path, monkeypatch):
    with FakeCluster(service.url, service.token) as cluster:
        file = cluster.kubeconfig(tmp_path, token=service.token)
        monkeypatch.setenv("KUBECONFIG", str(file))
        monkeypatch.setenv("KT_BACKEND", "kubernetes")
        yield cluster
        backend.close_all()


@pytest.fixture
def jobs(tmp_path):
    project = UserProject(tmp_path / "shop")
    yield project.module(SOURCE)
    project.forget()


@pytest.fixture
def by_url(service, cluster, monkeypatch):
    monkeypatch.setenv("KT_API_URL", service.url)
    return service.url


@pytest.fixture
def double(cluster, jobs):
    handle = kt.fn(jobs.double).to(kt.Compute(cpus="0.1"))
    yield handle
    handle.teardown()


def ask(url, method, path, body=None, **headers):
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, data


def test_with_an_api_url_everything_goes_there(cluster, by_url, double, jobs):
    assert [double(n) for n in range(3)] == [0, 2, 4]
    assert cluster.requests == []  # not a word to the API server

    numbers = kt.fn(jobs.numbers).to(kt.Compute(cpus="0.1"))
    try:
        assert list(numbers(4)) == [0, 1, 2, 3]
    finally:
        numbers.teardown()


@pytest.fixture
def ingress(service, tmp_path, monkeypatch):
    """TLS in front of the service, by an authority that this program is told of."""
    authority = Authority("localhost")
    (tmp_path / "authority.pem").write_bytes(authority.pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
    loop = asyncio.new_event_loop()
    upstream = urlsplit(service.url)

    open_ends = set()

    async def pump(reader, writer):
        open_ends.add(writer)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def accept(reader, writer):
        open_ends.add(writer)
        pod_streams = await asyncio.open_connection(upstream.hostname, upstream.port)
        await asyncio.gather(pump(reader, pod_streams[1]), pump(pod_streams[0], writer))

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    context = authority.server_context()
    serving = asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    server = asyncio.run_coroutine_threadsafe(serving, loop).result(20)
    yield f"https://localhost:{server.sockets[0].getsockname()[1]}"

    async def stop():
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A client that is gone never answers the end of TLS, for which `close` would wait.
        for end in open_ends:
            end.transport.abort()
        ends = (end.wait_closed() for end in open_ends)
        await asyncio.gather(*ends, return_exceptions=True)

    asyncio.run_coroutine_threadsafe(stop(), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    loop.close()


def test_calls_go_through_tls(cluster, ingress, jobs, monkeypatch):
    monkeypatch.setenv("KT_API_URL", ingress)
    double = kt.fn(jobs.double).to(kt.Compute(cpus="0.1"))
    try:
        assert [double(n) for n in range(3)] == [0, 2, 4]
        assert double.endpoint() == f"{ingress}/default/{double.service_name}/double"
    finally:
        double.teardown()
        backend.close_all()


def test_a_certificate_that_nobody_vouches_for_is_refused(cluster, ingress, monkeypatch):
    monkeypatch.setenv("KT_API_URL", ingress)
    monkeypatch.delenv("SSL_CERT_FILE")

    with pytest.raises(kt.errors.KubetorchError, match="certificate"):
        backend.controller_client().get_status()


def test_calls_pass_through_the_controller_where_ports_may_not_be_forwarded(cluster, jobs):
    cluster.refused["forward pods"] = 403
    double = kt.fn(jobs.double).to(kt.Compute(cpus="0.1"))
    try:
        assert [double(n) for n in range(3)] == [0, 2, 4]
    finally:
        double.teardown()
    assert set(cluster.forwarded) == {CONTROLLER}


def test_a_right_that_is_taken_away_sends_the_next_calls_through_the_controller(cluster, jobs):
    double = kt.fn(jobs.double).to(kt.Compute(cpus="0.1"))
    pod = double.service_config["pods"][0]["name"]
    try:
        cluster.refused["forward pods"] = 403
        assert double(4) == 8
    finally:
        double.teardown()
    assert pod not in cluster.forwarded


def test_a_post_reaches_the_pod_that_is_named(service, double):
    token = double.request_headers
    body = json.dumps({"args": [6]})
    path = f"/default/{double.service_name}/double"
    kind = {"Content-Type": "application/json"}
    pod = double.service_config["pods"][0]["name"]

    assert ask(service.url, "POST", path, body, **token, **kind) == (200, b"12")
    assert ask(service.url, "POST", path, body, **token, **kind, **{"X-Kubetorch-Pod": pod}) == (
        200,
        b"12",
    )
    status, body_text = ask(
        service.url, "POST", path, body, **token, **{"X-Kubetorch-Pod": "other"}
    )
    assert status == 404
    assert b"no pod 'other'" in body_text


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer kt1.e30.AAAA"}, {"Authorization": "Basic YTpi"}]
)
def test_strangers_cannot_tell_services_from_none(service, double, headers):
    name = double.service_name
    paths = ["", "/", "/double", "/health", "/ready", "/http/", "/v1/stream", "/openapi.json"]

    for path in paths:
        answer_of_service = ask(service.url, "GET", f"/default/{name}{path}", **headers)
        nowhere = ask(service.url, "GET", f"/default/nothing-of-that-name{path}", **headers)
        assert answer_of_service == nowhere
        assert answer_of_service[0] == 401


def test_a_token_of_one_service_opens_no_other(service, double):
    status, _ = ask(service.url, "GET", "/default/another/health", **double.request_headers)
    assert status == 401


def test_a_service_that_is_gone_is_said_to_whom_it_belonged(service, cluster, jobs):
    double = kt.fn(jobs.double).to(kt.Compute(cpus="0.1"))
    path, headers = f"/default/{double.service_name}/double", double.request_headers
    double.teardown()

    status, body_text = ask(service.url, "POST", path, "{}", **headers)
    assert status == 404
    assert json.loads(body_text)["error_type"] == "ServiceNotFoundError"


def test_a_token_does_not_travel_unencrypted(cluster, monkeypatch):
    monkeypatch.setenv("KT_API_URL", "http://kubetorch.example.com")

    with pytest.raises(kt.errors.ConfigError, match="unencrypted"):
        backend.session()
