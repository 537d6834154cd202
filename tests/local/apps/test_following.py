"""Following an app to its end, past whatever breaks on the way."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator

import pytest

from kubetorch.errors import ControllerRequestError, ControllerUnavailableError, UnauthorizedError
from kubetorch.lib.http_client import HttpClient
from kubetorch.sdk import service_logs
from kubetorch.sdk.controller import Controller
from kubetorch.sdk.transport.session import Session
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import exceptions, messages
from kubetorch.wire.messages import PodView, WorkloadView
from tests.local.net.test_http_client import CHUNKED, Connection, serving

EXIT_CODE = 3
#: Seconds; the first pause between attempts is shorter, and two are longer.
PATIENCE = 0.15
BAD_GATEWAY = b"<html><h1>502 Bad Gateway</h1></html>"


def answer(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d .\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def line(number: int) -> bytes:
    record = {"time": 2e9 + number, "text": f"line {number}", "generation": 1}
    text = json.dumps(record).encode() + b"\n"
    return b"%x\r\n%s\r\n" % (len(text), text)


class Pod:
    """The controller and the only pod of an app.

    Args:
        logs: What a request for lines gets, by how many came before.
        status: What a request for the state of the app gets, the same.
    """

    def __init__(
        self,
        logs: Callable[[int], bytes],
        status: Callable[[int], bytes] = lambda _: answer(
            200, json.dumps({"running": False, "exit_code": EXIT_CODE}).encode()
        ),
    ) -> None:
        self.logs, self.status = logs, status
        self.request_counts = {"logs": 0, "status": 0}
        self.url = ""
        self.tokens = 0

    def view(self) -> WorkloadView:
        pod = PodView(name="job-0", ordinal=0, phase="Running", generation=1, url=self.url)
        spec = WorkloadSpec("team", "job", CallableRef("fn", "job", "m", "job"))
        self.tokens += 1
        token = f"token {self.tokens}"
        return WorkloadView(spec=spec, generation=1, status="Ready", pods=(pod,), token=token)

    def serve(self, connection: Connection) -> None:
        while (request := connection.request()) is not None:
            path = request[0].split()[1]
            if path.startswith(b"/v1/workloads"):
                connection.send(answer(200, messages.encode(self.view())))
                continue
            kind = "logs" if path.startswith(b"/v1/logs") else "status"
            self.request_counts[kind] += 1
            payload = (self.logs if kind == "logs" else self.status)(self.request_counts[kind] - 1)
            connection.send(payload)
            is_broken = payload.startswith(CHUNKED) and not payload.endswith(b"0\r\n\r\n")
            if is_broken or not payload:
                return


@contextlib.contextmanager
def running(pod: Pod) -> Iterator[Session]:
    with serving(pod.serve) as server:
        pod.url = server.url
        session = Session(lambda: Controller(HttpClient(server.url)))
        with contextlib.closing(session):
            yield session


def follow(pod: Pod, on_line: Callable[[str], None] = lambda text: None) -> int:
    with running(pod) as session:
        return service_logs.follow_app(session, pod.view(), on_line, patience=PATIENCE)


def test_an_app_that_says_something_now_and_then_is_followed_past_any_number_of_breaks() -> None:
    breaks, lines = 5, []

    def logs(request_number: int) -> bytes:
        return CHUNKED + line(request_number) + (b"" if request_number < breaks else b"0\r\n\r\n")

    assert follow(Pod(logs), lines.append) == EXIT_CODE
    assert lines == [f"line {number}" for number in range(breaks + 1)]


def test_a_pod_that_never_answers_again_is_given_up() -> None:
    with pytest.raises(ControllerUnavailableError, match="closed before an answer came"):
        follow(Pod(lambda request_number: b"" if request_number else CHUNKED + line(0)))


def test_a_pod_that_has_no_address_for_too_long_is_given_up() -> None:
    pod = Pod(lambda _: b"")
    with running(pod) as session, pytest.raises(ControllerUnavailableError, match="job-0"):
        pod.url = ""
        service_logs.follow_app(session, pod.view(), print, patience=PATIENCE)


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_proxy_whose_server_is_away_for_a_moment_does_not_end_following(status: int) -> None:
    bad, good = answer(status, BAD_GATEWAY), CHUNKED + line(0) + b"0\r\n\r\n"
    assert follow(Pod(lambda request_number: good if request_number else bad)) == EXIT_CODE


def test_a_proxy_in_place_of_the_apps_state_does_not_end_following() -> None:
    ended = Pod(lambda _: CHUNKED + b"0\r\n\r\n")
    usual_status = ended.status
    ended.status = lambda request_number: (
        usual_status(request_number) if request_number else answer(502, BAD_GATEWAY)
    )
    assert follow(ended) == EXIT_CODE


@pytest.mark.parametrize("status", [404, 502])
def test_what_no_agent_says_is_never_taken_for_success(status: int) -> None:
    with pytest.raises(ControllerRequestError, match=f"answered {status}"):
        follow(Pod(lambda _: answer(status, BAD_GATEWAY)))


def test_an_app_that_runs_for_longer_than_a_token_is_good_for_is_followed_to_its_end() -> None:
    late = Pod(lambda _: CHUNKED + b"0\r\n\r\n")
    usual_status = late.status
    expired = exceptions.describe(UnauthorizedError("the token expired")).to_json()
    late.status = lambda request_number: (
        usual_status(request_number) if request_number else answer(401, expired)
    )
    assert follow(late) == EXIT_CODE
    assert late.request_counts["logs"] == 1


def test_a_pod_that_takes_no_token_at_all_is_an_error_at_once() -> None:
    expired = exceptions.describe(UnauthorizedError("no")).to_json()
    pod = Pod(lambda _: answer(401, expired))
    with pytest.raises(UnauthorizedError):
        follow(pod)
    assert pod.request_counts["logs"] == 2


def test_an_error_of_who_is_told_of_the_lines_is_raised() -> None:
    def break_off(text: str) -> None:
        raise BrokenPipeError(text)

    with pytest.raises(BrokenPipeError, match="line 0"):
        follow(Pod(lambda _: CHUNKED + line(0) + b"0\r\n\r\n"), break_off)
