"""Services whose calls go to the least busy of several pods: `dispatch="any"`, and `autoscale`."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kubetorch as kt
from kubetorch.sdk import backend
from tests.local.calling import InThread, until
from tests.local.user_project import UserProject

SOURCE = """
import os, time
import kubetorch as kt

def where():
    return os.environ["POD_NAME"]

def hold(held, end):
    with open(held, "w") as file:
        file.write(where())
    while not os.path.exists(end):
        time.sleep(0.01)
    return where()

def count(n):
    for number in range(n):
        yield number, where()

def work(name, *args):
    return globals()[name](*args)

def tree(n):
    return 1 if n == 0 else 1 + sum(kt.fn(name="tree").map([n - 1, n - 1]))

def factorial(n, how, names):
    first, *other_names = names
    if n <= 1:
        return 1
    call = kt.fn(name=first)
    rest = (n - 1, how, [*other_names, first])
    return n * (call.spawn(*rest).result() if how == "spawn" else call(*rest))

async def factorial_async(n):
    return 1 if n <= 1 else n * await kt.fn(name="factorial-async").options(async_=True)(n - 1)

def places(n):
    return [where(), *kt.fn(name="places").map([0] * n)] if n else where()

class Counter:
    def __init__(self):
        self.n = 0

    def add(self):
        self.n += 1
        return where(), self.n
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home: Path) -> Path:
    return shared_service_home


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return UserProject(tmp_path_factory.mktemp("dispatch") / "shop").module(SOURCE)


@pytest.fixture(scope="module")
def work(jobs: Any) -> Iterator[Any]:
    handle = kt.fn(jobs.work, name="spread")
    yield handle.to(kt.Compute(cpus="0.01", replicas=2, dispatch="any"))
    handle.teardown()


def post(handle: Any, body: object, path: str | None = None, **headers: str) -> Any:
    sent = {**handle.request_headers, **{k.replace("_", "-"): v for k, v in headers.items()}}
    request = urllib.request.Request(handle.endpoint(path), json.dumps(body).encode(), sent)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def where(handle: Any, **headers: str) -> str:
    pod: str = post(handle, {"args": ["where"]}, **headers)
    return pod


def pod_names(handle: Any) -> set[str]:
    service_key = ("default", handle.service_name)
    view = backend.session().ask(lambda session: session.get_workload(*service_key))
    return {pod.name for pod in view.pods}


@contextmanager
def held_pod(work: Any, folder: Path) -> Iterator[str]:
    """The name of a pod with one call, of another program."""
    pod_file, end_file = folder / "held", folder / "end"
    call = InThread(post, work, {"args": ["hold", str(pod_file), str(end_file)]})
    try:
        until(lambda: pod_file.exists() and pod_file.read_text())
        yield pod_file.read_text()
    finally:
        end_file.touch()
        call.join()
    assert call.value == pod_file.read_text()


def test_a_call_runs_on_one_pod_and_each_pod_gets_its_share(work: Any) -> None:
    assert Counter(work("where") for _ in range(6)) == dict.fromkeys(pod_names(work), 3)
    assert {work.spawn("where").result() for _ in range(4)} == pod_names(work)
    assert set(work.map(["where"] * 20)) <= pod_names(work)


def test_requests_to_the_endpoint_get_one_value_each_of_all_pods(work: Any) -> None:
    assert Counter(where(work) for _ in range(6)) == dict.fromkeys(pod_names(work), 3)


def test_calls_and_requests_avoid_a_pod_that_is_busy_with_those_of_others(
    work: Any, tmp_path: Path
) -> None:
    with held_pod(work, tmp_path) as busy:
        [free] = pod_names(work) - {busy}
        assert {work("where") for _ in range(5)} == {free}
        assert {work.spawn("where").result() for _ in range(5)} == {free}
        assert {where(work) for _ in range(5)} == {free}


def test_calls_with_one_key_are_one_call_however_they_come(work: Any) -> None:
    keys = [f"key-{number}" for number in range(8)]
    by_program = {key: work.options(idempotency_key=key)("where") for key in keys}
    assert {key: where(work, Idempotency_Key=key) for key in keys} == by_program
    assert set(by_program.values()) == pod_names(work)


def test_any_is_the_only_worker_that_may_be_asked_for(work: Any) -> None:
    assert work("where", workers="any") in pod_names(work)
    assert post(work, {"args": ["where"], "workers": "any"}) in pod_names(work)
    with pytest.raises(ValueError, match="workers= belongs to distributed services"):
        work("where", workers=[0])
    assert set(work.options(workers="any").map(["where"] * 3)) <= set(pod_names(work))
    with pytest.raises(kt.SpecError, match="no keyword 'workers'") as caught:
        work.map(["where"], workers="any")
    assert ".options(workers=...).map(" in str(caught.value.hint)
    with pytest.raises(kt.SpecError, match="no keyword 'other'") as caught:
        work.starmap_async([("where",)], other=1)
    assert 'kwargs={"other"' in str(caught.value.hint)
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(work, {"args": ["where"], "workers": [0]})
    with refused.value:
        assert refused.value.code == 400


def test_a_call_of_a_broadcast_service_can_ask_for_the_least_busy_pod(
    jobs: Any, tmp_path: Path
) -> None:
    handle = kt.fn(jobs.work, name="all-of-them")
    work = handle.to(kt.Compute(cpus="0.01", replicas=2))
    assert len(work("where")) == len(where(work)) == 2
    pod_file, end_file = tmp_path / "held", tmp_path / "end"
    first = work.options(workers="any").spawn("hold", str(pod_file), str(end_file))
    until(lambda: pod_file.exists() and pod_file.read_text())
    [free] = pod_names(work) - {pod_file.read_text()}
    assert {work("where", workers="any") for _ in range(4)} == {free}
    assert {post(work, {"args": ["where"], "workers": "any"}) for _ in range(4)} == {free}
    end_file.touch()
    assert first.result() == pod_file.read_text()
    work.teardown()


def test_a_class_has_an_instance_in_each_pod_and_the_deploy_says_so(
    jobs: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    handle: Any = kt.cls(jobs.Counter)
    handle.to(kt.Compute(cpus="0.01", replicas=2, dispatch="any"))
    assert "Counter has an instance in each of 2 pods" in capsys.readouterr().err
    answers = [*(handle.add() for _ in range(4)), *(post(handle, {}, "add") for _ in range(4))]
    counts = {pod: [n for where, n in answers if where == pod] for pod in pod_names(handle)}
    assert list(counts.values()) == [[1, 2, 3, 4], [1, 2, 3, 4]]
    handle.teardown()


def test_a_class_whose_replacement_is_an_error_has_one_instance(jobs: Any) -> None:
    with pytest.raises(kt.SpecError, match='its dispatch is "any"'):
        kt.cls(jobs.Counter, on_replace="error").to(kt.Compute(dispatch="any"))


def test_items_of_items_run_in_the_place_of_an_item_whatever_the_other_pods_do(jobs: Any) -> None:
    tree: Any = kt.fn(jobs.tree)
    for bounds in ({"dispatch": "any"}, {"dispatch": "any", "concurrency": 1}, {}):
        tree.to(kt.Compute(cpus="0.01", replicas=2, **bounds))
        assert list(tree.options(timeout=60).map([2, 2, 3])) == [7, 7, 15]
        if bounds:
            assert tree.spawn(2).result(timeout=60) == 7
    tree.teardown()


def test_calls_of_a_chain_run_in_its_slot_whatever_the_other_pods_do(jobs: Any) -> None:
    computes = [
        kt.Compute(cpus="0.01", replicas=2, dispatch="any", concurrency=1),
        kt.Compute(cpus="0.01").autoscale(min_scale=2, concurrency=1),
    ]
    handles: list[Any] = [kt.fn(jobs.factorial, name=name) for name in ("ping", "pong")]
    ping, _ = (handle.to(compute) for handle, compute in zip(handles, computes, strict=True))
    for how, names in (("call", ["ping"]), ("spawn", ["ping"]), ("call", ["pong", "ping"])):
        call = ping.options(timeout=60)
        assert list(call.map([6] * 3, [how] * 3, [names] * 3)) == [720] * 3
    handles.append(kt.fn(jobs.factorial_async, name="factorial-async"))
    on_loop = handles[-1].to(computes[0])
    assert list(on_loop.options(timeout=60).map([6] * 3)) == [720] * 3
    for handle in handles:
        handle.teardown()


def test_items_of_a_call_that_nothing_bounds_are_spread(jobs: Any) -> None:
    places: Any = kt.fn(jobs.places)
    places.to(kt.Compute(cpus="0.01", replicas=2, dispatch="any"))
    assert set(places(40)) == pod_names(places)
    places.teardown()


def test_requests_to_an_autoscaled_service_are_spread(jobs: Any) -> None:
    handle = kt.fn(jobs.count, name="scaled")
    count = handle.to(kt.Compute(cpus="0.01").autoscale(min_scale=2))
    assert {pod for _, pod in (next(iter(count(1))) for _ in range(4))} == pod_names(count)
    request = urllib.request.Request(count.endpoint(), b'{"args": [2]}', count.request_headers)
    pods = set()
    for _ in range(4):
        with urllib.request.urlopen(request, timeout=60) as answer:
            lines = [json.loads(line) for line in answer]
        assert [line["yield"][0] for line in lines[:2]] == [0, 1]
        pods.add(lines[0]["yield"][1])
    assert pods == pod_names(count)
    count.teardown()
