"""Programs outside of a cluster: deploys and calls through port-forwards of its API server."""

import asyncio
import json
import multiprocessing
import os
import socket
import threading
import time

import pytest

import kubetorch as kt
from kubetorch.local import lifetime
from kubetorch.sdk import backend
from tests.local.fake_cluster import CONTROLLER, FakeCluster

SOURCE = """
import os, time

def double(x):
    return 2 * x

def slow(folder):
    open(folder + "/begun", "w").close()
    while not os.path.exists(folder + "/go"):
        time.sleep(0.01)
    open(folder + "/ended", "w").close()
    return "done"

def size(data):
    return len(data), data

def pod():
    return os.environ["POD_NAME"]
"""


@pytest.fixture(scope="module")
def service(shared_service_home):
    return lifetime.ensure()


@pytest.fixture
def cluster(service, tmp_path, monkeypatch):
    with FakeCluster(service.url, service.token) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig(tmp_path)))
        monkeypatch.setenv("KT_BACKEND", "kubernetes")
        yield cluster
        backend.close_all()


@pytest.fixture
def jobs(project):
    return project.module(SOURCE)


@pytest.fixture
def deployed(cluster):
    handles = []

    def deploy(callable_object, **compute):
        handle = kt.fn(callable_object)
        handles.append(handle)
        return handle.to(kt.Compute(cpus="0.1", **compute))

    yield deploy
    for handle in handles:
        handle.teardown()


def test_a_function_is_deployed_and_called_through_the_api_server(cluster, jobs, deployed):
    double = deployed(jobs.double)

    assert [double(n) for n in range(3)] == [0, 2, 4]
    pod = double.service_config["pods"][0]["name"]
    # One connection for all calls.
    assert cluster.forwarded.count(pod) == 1
    assert set(cluster.forwarded) == {CONTROLLER, pod}
    # Nobody else has the certificate's rights at the controller.
    assert cluster.tokens == ["kubetorch-user", "kubetorch-admin"]


def test_large_arguments_and_results_pass(jobs, deployed):
    size = deployed(jobs.size, allowed_serialization=["pickle"])
    data = os.urandom(8_000_000)

    assert size.options(serialization="pickle")(data) == (len(data), data)


def test_coroutines_and_threads_share_the_connection(cluster, jobs, deployed):
    double = deployed(jobs.double)

    async def together():
        return await asyncio.gather(*(double.options(async_=True)(n) for n in range(20)))

    assert asyncio.run(together()) == [2 * n for n in range(20)]
    results = {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: double(n)})) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: 2 * n for n in range(8)}
    assert cluster.forwarded.count(double.service_config["pods"][0]["name"]) == 1


def test_a_call_survives_an_api_server_that_is_away(cluster, jobs, deployed, tmp_path):
    slow = deployed(jobs.slow)
    results = []
    caller = threading.Thread(target=lambda: results.append(slow(str(tmp_path))))
    caller.start()
    until((tmp_path / "begun").exists)
    cluster.stop()
    (tmp_path / "go").touch()
    until((tmp_path / "ended").exists)
    time.sleep(0.5)
    assert not results
    cluster.start()
    caller.join(60)

    assert results == ["done"]


def test_a_deploy_survives_an_api_server_that_is_away(cluster, project, tmp_path):
    slow = SOURCE + f"if 'POD_NAME' in os.environ:\n    slow({str(tmp_path)!r})\n"
    jobs = project.module(slow)
    double = kt.fn(jobs.double)
    handles = []
    deploy = threading.Thread(target=lambda: handles.append(double.to(kt.Compute(cpus="0.1"))))
    deploy.start()
    until((tmp_path / "begun").exists)
    cluster.stop()
    (tmp_path / "go").touch()
    until((tmp_path / "ended").exists)
    time.sleep(0.5)
    assert not handles
    cluster.start()
    deploy.join(60)
    try:
        assert double(2) == 4
        assert double.service_config["generation"] == 1
    finally:
        double.teardown()


def until(condition, timeout=20.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_calls_that_begin_while_the_api_server_is_away_wait(cluster, jobs, deployed):
    double = deployed(jobs.double)
    assert double(1) == 2
    cluster.stop()
    results = []
    caller = threading.Thread(target=lambda: results.append(double(21)))
    caller.start()
    time.sleep(1.5)
    cluster.start()
    caller.join(60)

    assert results == [42]


def test_a_forked_child_opens_connections_of_its_own(jobs, deployed):
    double = deployed(jobs.double)
    assert double(1) == 2
    queue = multiprocessing.get_context("fork").Queue()
    child = multiprocessing.get_context("fork").Process(target=lambda: queue.put(double(4)))
    child.start()

    assert queue.get(timeout=60) == 8
    child.join(20)
    assert double(5) == 10


def test_a_refused_port_forward_of_the_controller_says_which_right_is_missing(cluster):
    cluster.refused["forward controller"] = 403

    with pytest.raises(kt.errors.KubernetesForbiddenError, match="pods/portforward") as caught:
        backend.controller_client().get_status()
    assert "Role" in str(caught.value.hint)


def test_without_a_token_the_error_says_how_to_grant_one(cluster):
    cluster.refused["token kubetorch-admin"] = 403

    with pytest.raises(kt.errors.KubernetesCredentialsError) as caught:
        backend.controller_client().get_status()
    assert "kubectl create role kubetorch-login" in str(caught.value.hint)
    assert "serviceaccounts/token" in str(caught.value.hint)


def test_a_bearer_token_of_the_kubeconfig_is_the_login(cluster, service, tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    file = cluster.kubeconfig(tmp_path / "other", token=service.token)
    monkeypatch.setenv("KUBECONFIG", str(file))

    assert backend.controller_client().get_status().backend == "local"
    assert cluster.tokens == []


def test_a_cluster_without_kubetorch_is_an_error_that_says_so(cluster):
    cluster.is_installed = False

    with pytest.raises(
        kt.errors.ConfigError, match="not installed in namespace kubetorch"
    ) as caught:
        backend.controller_client().get_status()
    assert "kt install" in str(caught.value.hint)


@pytest.fixture
def by_default(cluster, tmp_path, monkeypatch):
    """The cluster is that of the default kubeconfig; nobody has pointed to it."""
    home = tmp_path / "home"
    (home / ".kube").mkdir(parents=True)
    text = (tmp_path / "kubeconfig").read_text()
    for name in ("ca.crt", "client.crt", "client.key"):
        text = text.replace(f'"{name}"', json.dumps(str(tmp_path / name)))
    (home / ".kube" / "config").write_text(text)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("KT_BACKEND", "auto")
    monkeypatch.delenv("KUBECONFIG")
    return home / ".kube" / "config"


@pytest.mark.parametrize(
    ("change", "is_cluster"),
    [
        (lambda cluster: None, True),
        (lambda cluster: setattr(cluster, "is_installed", False), False),
        (lambda cluster: cluster.refused.update({"list pods": 403}), False),
        (lambda cluster: cluster.stop(), False),
    ],
    ids=["installed", "not installed", "refused", "away"],
)
def test_auto_takes_a_cluster_that_answers_and_has_kubetorch(
    cluster, by_default, change, is_cluster
):
    change(cluster)
    begun = time.monotonic()

    session = backend.session()

    assert time.monotonic() - begun < 10
    while is_cluster and "PortForward" not in type(session.transport).__name__:
        # A busy machine was too late to answer.
        assert time.monotonic() - begun < 40
        backend.close_all()
        session = backend.session()
    assert (type(session.transport).__name__ == "PortForwardTransport") is is_cluster
    if not cluster.requests:
        cluster.start()


def test_auto_waits_no_longer_for_a_server_that_says_nothing(by_default):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        old = by_default.read_text()
        by_default.write_text(old.replace("https://127.0.0.1:", f"https://127.0.0.1:{port}#"))
        begun = time.monotonic()

        assert type(backend.session().transport).__name__ == "DirectTransport"
        assert 1.0 < time.monotonic() - begun < 10


def test_a_port_of_this_machine_leads_to_the_pod(jobs, deployed):
    double = deployed(jobs.double)
    port = double.compute.client_port()
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {**double.request_headers, "Content-Type": "application/json"}
    connection.request("POST", "/double", b'{"args": [6]}', headers)
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (200, b"12")
    connection.close()


def test_the_kubeconfig_of_a_compute_decides_for_it(cluster, service, jobs, monkeypatch, tmp_path):
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("KT_BACKEND", "auto")
    (tmp_path / "second").mkdir()
    file = cluster.kubeconfig(tmp_path / "second")
    double = kt.fn(jobs.double).to(kt.Compute(cpus="0.1", kubeconfig_path=str(file)))
    try:
        assert double(3) == 6
        handle = double.spawn(4)
        assert handle.get(30) == 8
        assert double.compute.run_bash("echo $POD_NAME") is not None
        assert type(backend.session().transport).__name__ == "DirectTransport"
        assert CONTROLLER in cluster.forwarded
    finally:
        double.teardown()


def test_a_call_waits_for_a_node_that_does_not_answer_just_now(cluster, jobs, deployed):
    double = deployed(jobs.double)
    cluster.refused["forward pods"] = 500
    results = []
    caller = threading.Thread(target=lambda: results.append(double(2)))
    caller.start()
    caller.join(1.5)
    assert not results
    assert caller.is_alive()
    cluster.refused.clear()
    caller.join(60)
    assert results == [4]


def test_rights_that_are_taken_away_are_said_soon(cluster, jobs, deployed):
    double = deployed(jobs.double)
    assert double(1) == 2
    cluster.refused.update({"forward controller": 403, "forward pods": 403})
    cluster.stop()
    cluster.start()
    begun = time.monotonic()
    try:
        with pytest.raises(kt.errors.KubernetesForbiddenError, match="pods/portforward"):
            double(2)
        assert time.monotonic() - begun < 45
    finally:
        cluster.refused.pop("forward controller")
        cluster.refused.pop("forward pods")


def test_a_pending_call_outlives_a_refusal_that_passes(cluster, jobs, deployed, tmp_path):
    slow = deployed(jobs.slow)
    results = []
    caller = threading.Thread(target=lambda: results.append(slow(str(tmp_path))))
    caller.start()
    until((tmp_path / "begun").exists)
    cluster.refused.update({"forward controller": 403, "forward pods": 403})
    cluster.stop()
    cluster.start()
    (tmp_path / "go").touch()
    time.sleep(2.5)
    cluster.refused.clear()
    caller.join(60)

    assert results == ["done"]
