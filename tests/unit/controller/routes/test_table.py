"""What a request asks for: its route, and the parameters of its URL."""

from __future__ import annotations

from typing import Any

import pytest

from kubetorch.controller.routes.table import Exchange, Route, Table
from kubetorch.errors import ControllerError, ProtocolError
from kubetorch.wire import exceptions


def exchange(path: str = "/", query: str = "", method: str = "GET") -> Exchange:
    scope: dict[str, Any] = {
        "method": method,
        "path": path,
        "headers": [],
        "query_string": query.encode(),
    }
    unused: Any = None
    return Exchange(scope, unused, unused)


TABLE = Table(
    [
        Route("GET", "/v1/x/{namespace}", print),
        Route("GET", "/v1/x/{namespace}/{name}", print),
        Route("DELETE", "/v1/x/{namespace}/{name}", print),
    ]
)


def test_a_path_has_the_parameters_of_its_route() -> None:
    route, parameters = TABLE.find(exchange("/v1/x/team/f", method="DELETE"))
    assert (route, parameters) == (TABLE.routes[2], {"namespace": "team", "name": "f"})


@pytest.mark.parametrize(
    ("path", "method", "status", "message"),
    [
        ("/v1/x/team/f", "PUT", 405, "answers GET and DELETE, not PUT"),
        ("/v1/x/team/f/", "GET", 404, "there is nothing at /v1/x/team/f/"),
        ("/v1/x//f", "GET", 404, "there is nothing at /v1/x//f"),
        ("/v1/x/", "GET", 404, "there is nothing"),
        ("/v1/y/team", "GET", 404, "there is nothing"),
        ("/\n", "GET", 404, "there is nothing at /%0A"),
    ],
)
def test_what_there_is_no_route_for_is_refused(
    path: str, method: str, status: int, message: str
) -> None:
    with pytest.raises(ProtocolError, match=message) as caught:
        TABLE.find(exchange(path, method=method))
    assert exceptions.http_status(caught.value) == status


@pytest.mark.parametrize(
    ("query", "is_set"),
    [("", False), ("f=true", True), ("f=1", True), ("f=False", False), ("f=0", False)],
)
def test_a_flag_is_one_of_few_words(query: str, is_set: bool) -> None:
    assert exchange(query=query).flag("f") is is_set


@pytest.mark.parametrize("query", ["f=", "f=yes", "f=2"])
def test_another_word_is_no_flag(query: str) -> None:
    with pytest.raises(ProtocolError, match=r"f is '.*'; it must be true or false"):
        exchange(query=query).flag("f")


def test_a_number_has_bounds() -> None:
    def number(query: str) -> float:
        return exchange(query=query).number("n", 5.0, least=1, most=9)

    assert [number(query) for query in ("", "n=", "n=1", "n=9", "n=2.5")] == [5, 5, 1, 9, 2.5]
    for wrong in ("0.9", "9.1", "x", "nan", "inf"):
        with pytest.raises(ProtocolError, match=f"n is '{wrong}'; it must be a number from 1 to 9"):
            number(f"n={wrong}")


def test_nobody_has_asked_before_somebody_was_let_in() -> None:
    with pytest.raises(ControllerError, match="was let in by nobody"):
        _ = exchange().asker
