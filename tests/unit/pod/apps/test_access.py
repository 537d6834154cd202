import pytest

from kubetorch.pod.apps import access


def is_token(text):
    return text == "good"


def inspect(headers, query=b""):
    pairs = [(name.encode(), value.encode()) for name, value in headers]
    return access.inspect(pairs, query, is_token=is_token)


def test_a_token_of_ours_is_taken_out_wherever_it_is():
    found = inspect(
        [
            ("authorization", "Bearer good"),
            ("cookie", "a=1; kubetorch-app-x=good; b=2"),
            ("x-kubetorch-token", "good"),
            ("accept", "*/*"),
        ],
        b"x=1&kubetorch_token=good&y=2",
    )
    assert found.headers == [(b"cookie", b"a=1; b=2"), (b"accept", b"*/*")]
    assert found.query == b"x=1&y=2"
    assert found.query_token == "good"
    assert set(found.tokens) == {"good"}


@pytest.mark.parametrize(
    ("query", "rest"),
    [
        (b"kubetorch_token=good", b""),
        (b"kubetorch_token=good&a=1", b"a=1"),
        (b"a=1&kubetorch_token=good", b"a=1"),
        (b"not_kubetorch_token=good", b"not_kubetorch_token=good"),
    ],
)
def test_the_rest_of_the_query_stays(query, rest):
    assert inspect([], query).query == rest


def test_what_is_no_token_of_ours_is_the_apps_own():
    found = inspect([("authorization", "Bearer other"), ("authorization", "Basic abc")])
    assert len(found.headers) == 2
    assert found.tokens == ()


def test_the_cookie_is_kept_from_scripts_and_other_sites():
    text = access.cookie("kubetorch-app-web-0", "good.token_1")
    assert text.startswith("kubetorch-app-web-0=good.token_1;")
    assert {"HttpOnly", "Path=/", "SameSite=Strict"} <= {part.strip() for part in text.split(";")}


@pytest.mark.parametrize(
    ("method", "headers", "expected"),
    [
        ("GET", {}, False),
        ("GET", {"sec-fetch-site": "same-origin"}, False),
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, False),
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, True),
        ("POST", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, True),
    ],
)
def test_only_links_of_other_sites_pass(method, headers, expected):
    assert access.is_foreign(headers, method) is expected
