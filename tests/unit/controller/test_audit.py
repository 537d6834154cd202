"""What the audit log says of a request."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from kubetorch.controller.access import PodIdentity, Principal, User
from kubetorch.controller.app import Audit
from kubetorch.controller.routes.table import Exchange, Permission, Route
from kubetorch.controller.tuning import LIMITS
from manual_clock import ManualClock

ROUTE = Route(
    "POST", "/v1/x/{namespace}/{name}", print, (Permission("create"), Permission("update", "log"))
)
ANN = User("ann", groups=tuple(f"g{number}" for number in range(LIMITS.audited_groups + 1)))


class Log:
    """What was written to an audit log."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "kubetorch.audit")
        self._caplog = caplog
        self.clock = ManualClock()
        self._audit = Audit(self.clock.time)

    def write(self, principal: Principal | None, status: int, *, named: bool = True) -> None:
        scope: dict[str, Any] = {
            "method": "POST",
            "path": "/v1/x",
            "headers": [(b"x-request-id", b"r1")],
            "query_string": b"namespace=asked&token=secret",
            "client": ("10.0.0.1", 5),
        }
        unused: Any = None
        parameters = {"namespace": "team", "name": "f"} if named else {}
        exchange = Exchange(scope, unused, unused)
        self._audit.write(exchange, ROUTE, parameters, principal, status)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(record.getMessage()) for record in self._caplog.records]


def test_a_line_says_who_did_what_with_what(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(caplog)
    log.write(ANN, 200)
    (line,) = log.lines
    assert line.pop("time")
    assert line.pop("request_id")
    assert line == {
        "user": "ann",
        "groups": list(ANN.groups[: LIMITS.audited_groups]),
        "verb": "create+update",
        "subresource": "log",
        "namespace": "team",
        "name": "f",
        "method": "POST",
        "path": "/v1/x",
        "outcome": "allowed",
        "status": 200,
        "source": "10.0.0.1",
    }
    log.write(PodIdentity("team", "f", "f-1"), 200, named=False)
    line = log.lines[1]
    assert (line["user"], line["groups"]) == ("pod:team/f-1", [])
    assert (line["namespace"], line["name"]) == ("asked", "")


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(303, "allowed"), (400, "failed"), (401, "refused"), (403, "refused"), (404, "failed")],
)
def test_what_a_request_came_to_is_one_word(
    caplog: pytest.LogCaptureFixture, status: int, outcome: str
) -> None:
    log = Log(caplog)
    log.write(ANN, status)
    assert log.lines[0]["outcome"] == outcome


def test_strangers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(caplog)
    for _ in range(LIMITS.unidentified_lines + 5):
        log.write(None, 401)
    log.write(ANN, 200)
    assert len(log.lines) == LIMITS.unidentified_lines + 1
    log.clock.advance(60)
    log.write(None, 401)
    assert log.lines[LIMITS.unidentified_lines + 1] == {"left_out": 5}
    assert log.lines[LIMITS.unidentified_lines + 2]["user"] is None
    log.clock.advance(60)
    log.write(None, 401)
    assert len(log.lines) == LIMITS.unidentified_lines + 4
