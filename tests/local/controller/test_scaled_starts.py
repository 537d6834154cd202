"""Callers that wait for the first pod of a service, whose code takes long or fails to load."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

import kubetorch as kt
from kubetorch.errors import CallRefusedError
from kubetorch.sdk.tuning import TIMING
from tests.local.calling import InThread, until
from tests.local.user_project import UserProject

SOURCE = """
import os, time

print("looking for the model")
if os.path.exists({fail!r}):
    raise RuntimeError("no model today")
while os.path.exists({hold!r}):
    time.sleep(0.02)

def work():
    return os.environ["POD_NAME"]
"""


class Files(NamedTuple):
    """While the one is there, pods fail to load the code; while the other is, they load it."""

    fail: Path
    hold: Path


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home: Path) -> Path:
    return shared_service_home


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("starts")
    return Files(folder / "fail", folder / "hold")


@pytest.fixture(scope="module")
def jobs(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Any:
    project = UserProject(tmp_path_factory.mktemp("project") / "shop")
    return project.module(SOURCE.format(fail=str(files.fail), hold=str(files.hold)))


@pytest.fixture
def resting(jobs: Any, files: Files, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A service without pods until it is called; a test may give its `launch_timeout`."""
    compute = kt.Compute(cpus="0.01", launch_timeout=getattr(request, "param", 60)).autoscale(
        min_scale=0,
        initial_scale=0,
        max_scale=1,
        window="6s",
        scale_down_delay="0s",
        scale_to_zero_pod_retention_period="0s",
    )
    handle = kt.fn(jobs.work, name="starting").to(compute)
    yield handle
    for file in files:
        file.unlink(missing_ok=True)
    handle.teardown()


def post(handle: Any) -> tuple[int, Any]:
    """Status and body of the answer to a call by plain HTTP."""
    url = urlsplit(handle.endpoint())
    connection = http.client.HTTPConnection(url.netloc, timeout=60)
    connection.request("POST", url.path, json.dumps({"args": []}), dict(handle.request_headers))
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    return answer.status, body


def test_a_request_that_waits_for_a_service_that_is_torn_down_did_not_start(
    resting: Any, files: Files
) -> None:
    files.hold.touch()
    answer = InThread(post, resting)
    until(lambda: resting.stats().calls_waiting)
    resting.teardown()
    status, body = answer.join().value
    assert (status, body["error_type"], body["started"]) == (404, "ServiceNotFoundError", False)
    assert "starting was torn down" in body["message"]


def test_the_failure_of_earlier_pods_does_not_end_a_call_while_another_pod_starts(
    resting: Any, files: Files
) -> None:
    files.fail.touch()
    with pytest.raises(CallRefusedError, match="no model today"):
        resting()
    until(lambda: not resting.stats().pods, seconds=60)
    files.fail.unlink()
    files.hold.touch()
    call = InThread(resting)
    time.sleep(TIMING.starting_server_seconds + 1.0)
    assert not call.error
    files.hold.unlink()
    assert call.join().value


def test_callers_hear_why_pods_fail_to_start_with_the_traceback_and_the_lines_of_a_pod(
    resting: Any, files: Files
) -> None:
    files.fail.touch()
    answer = InThread(post, resting)
    with pytest.raises(CallRefusedError) as raised:
        resting()
    text = str(raised.value)
    assert "no pod of starting can start: RuntimeError: no model today" in text
    assert "\n  looking for the model" in text
    assert 'raise RuntimeError("no model today")' in str(raised.value.remote_traceback)
    assert isinstance(raised.value.__cause__, RuntimeError)
    status, body = answer.join().value
    assert (status, body["error_type"], body["started"]) == (503, "CallRefusedError", False)
    assert "RuntimeError: no model today" in body["message"]
    assert "\n  looking for the model" in body["message"]
    assert 'raise RuntimeError("no model today")' in body["traceback"]


@pytest.mark.parametrize("resting", [35], indirect=True)
def test_callers_hear_what_a_pod_wrote_that_is_not_ready_in_time(
    resting: Any, files: Files
) -> None:
    files.hold.touch()
    begin = time.monotonic()
    answer = InThread(post, resting)
    with pytest.raises(CallRefusedError) as raised:
        resting()
    assert time.monotonic() - begin >= 35  # not the patience with other services
    texts = (str(raised.value), answer.join().value[1]["message"])
    for text in texts:
        assert "it loads generation 1" in text
        assert "\n  looking for the model" in text
