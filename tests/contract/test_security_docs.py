"""`docs/security.md` has every route, and says of each who may ask."""

from __future__ import annotations

import json

import pytest

from kubetorch.controller.routes import status
from kubetorch.controller.routes.table import Route
from tools import routes

ALL = routes.of_controller()


def _name(route: Route) -> str:
    return f"{route.method} {route.path}"


def test_the_page_is_what_the_code_says() -> None:
    text = routes.PAGE.read_text(encoding="utf-8")
    assert routes.filled(text) == text, "python tools/routes.py --write"


@pytest.mark.parametrize("route", ALL, ids=_name)
def test_every_route_needs_a_right_or_says_why_not(route: Route) -> None:
    free = {"GET /health", "GET /openapi.json"}
    assert route.needs or route.is_local or _name(route) in free
    assert all(need.when for need in route.needs if need.scope == "handler")
    if "{namespace}" in route.path:
        assert {need.scope for need in route.needs} <= {"path", "handler"}
    else:
        assert "path" not in {need.scope for need in route.needs}


@pytest.mark.parametrize("route", ALL, ids=_name)
def test_what_changes_something_is_audited(route: Route) -> None:
    workload_wait = "/v1/workloads/{namespace}/{name}/wait"
    data = "/v1/data/{namespace}"
    reading = {
        "/v1/blobs/missing",
        "/v1/blobs/fetch",
        workload_wait,
        f"{data}/find",
        f"{data}/join",
        f"{data}/window",
        f"{data}/blobs-missing",
        f"{data}/blobs-fetch",
    }
    if route.method != "GET" and route.path not in reading:
        assert route.is_audited


def test_the_description_for_programs_has_every_route() -> None:
    document = status.openapi_document(ALL)
    json.dumps(document)
    described_routes = {
        f"{method.upper()} {path}"
        for path, methods in document["paths"].items()
        for method in methods
    }
    assert described_routes == {_name(route) for route in ALL}
    operations = [
        operation for methods in document["paths"].values() for operation in methods.values()
    ]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert [operation["summary"] for operation in operations if not operation.get("security")] == [
        "Answer that the controller runs"
    ]
