import asyncio
import json

import pytest

from kubetorch.errors import CallRefusedError, ForeignOriginError, UnauthorizedError
from kubetorch.lib.http_server import Refusal, Upgrade
from kubetorch.pod.apps import proxy
from kubetorch.pod.http.auth import Credentials, Guard
from kubetorch.pod.http.request_forwarder import RequestForwarder
from kubetorch.pod.membership import Membership
from kubetorch.wire import tokens


def test_the_cookie_is_kept_from_scripts_and_other_sites():
    text = proxy.cookie("kubetorch-app-web-0", "good.token_1", path="/team/web", is_secure=True)
    assert text.startswith("kubetorch-app-web-0=good.token_1;")
    parts = {part.strip() for part in text.split(";")}
    assert {"HttpOnly", "Path=/team/web", "SameSite=Strict", "Secure"} <= parts


NAMES = ["10.0.0.5", "::1", "localhost", "127.0.0.1", "kt.example.com", "a.b.apps.example.com"]
APP_NAMES = [
    "web",
    "web-http",
    "web.team",
    "web.team.svc",
    "web-0.web-headless.team.svc.cluster.local",
]
FOREIGN = [
    *("", "evil.example", "apps.example.com", "kt.example.com.evil.example", "xweb", "other"),
    *(
        "web-x.team",
        "web.team.evil.example",
        "web.other.svc",
        "team.svc.cluster.local.evil.example",
    ),
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((app_name, True) for app_name in NAMES + APP_NAMES),
        *((app_name, False) for app_name in FOREIGN),
    ],
)
def test_an_app_has_the_names_of_its_services_and_those_of_the_controller(name, expected):
    names = proxy.AppNames("team", "web")
    assert names.has(name)
    names.controller_names = ("kt.example.com", "*.apps.example.com")
    assert names.has(name) is expected


KEY = b"k" * 32
TOKEN = tokens.sign(KEY, tokens.Claims("team/web", 60.0))
TOKEN_OF_ANOTHER = tokens.sign(b"o" * 32, tokens.Claims("team/other", 60.0))


class App:
    """The proxy of an app that does not run, and what it does with requests."""

    is_public = False
    view = object()
    latest = None

    def __init__(self, *, is_public=False, user="") -> None:
        self.is_public = is_public
        self.requests = 0
        self.begun = 0
        self.admitted = 0
        guard = Guard(
            Credentials(KEY, user=user), audience="team/web", host="10.0.0.5", clock=lambda: 0.0
        )
        names = proxy.AppNames("team", "web")
        names.controller_names = ("kt.example.com",)
        forwarder = RequestForwarder(
            pod_name="web-0",
            members=Membership(),
            token=lambda: None,
            load=lambda: 0,
            takes_turns=False,
        )
        self.proxy = proxy.AppProxy(
            pod_name="web-0", guard=guard, host=self, names=names, forwarder=forwarder
        )

    def begin(self) -> None:
        self.requests += 1
        self.begun += 1

    def finish(self) -> None:
        self.requests -= 1

    def check_stopping(self) -> None:
        pass

    async def serving(self):
        raise CallRefusedError("it does not run")

    def _admit(self) -> None:
        self.admitted += 1

    def get(self, path="/http/page", query="", **headers):
        """Status and headers of the answer to a browser; `CallRefusedError` where it goes on."""
        sent = []

        async def send(message):
            sent.append(message)

        headers = {"host": "kt.example.com", **headers}
        scope = {
            "method": "GET",
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(n.replace("_", "-").encode(), v.encode()) for n, v in headers.items()],
            "admit": self._admit,
        }
        asyncio.run(self.proxy.answer(scope, None, send))
        return sent[0]["status"], {name.decode(): v.decode() for name, v in sent[0]["headers"]}

    def upgrade(self, query=b"", **headers):
        headers = {"host": "kt.example.com", **headers}
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        upgrade = Upgrade(b"/http/socket?" + query, pairs)
        asyncio.run(self.proxy.open(upgrade))


def test_a_request_goes_on_with_a_token_of_the_service_alone():
    app = App()
    for headers in (
        {},
        {"authorization": f"Bearer {TOKEN_OF_ANOTHER}"},
        {"cookie": "kubetorch-app-x=y"},
    ):
        with pytest.raises(UnauthorizedError, match="this app needs a token"):
            app.get(**headers)
    assert (app.begun, app.admitted) == (0, 0)
    for headers in (
        {"authorization": f"Bearer {TOKEN}"},
        {"x_kubetorch_token": TOKEN},
        {"cookie": f"a=b; kubetorch-app-web-0={TOKEN}"},
    ):
        with pytest.raises(CallRefusedError):
            app.get(**headers)
    assert (app.begun, app.requests, app.admitted) == (3, 0, 3)


def test_a_public_app_is_for_everybody_by_the_names_that_it_has():
    app = App(is_public=True)
    with pytest.raises(CallRefusedError):
        app.get()
    with pytest.raises(ForeignOriginError, match=r"not called 'evil\.example'"):
        app.get(host="evil.example")
    assert (app.begun, app.admitted) == (1, 0)


@pytest.mark.parametrize(
    ("headers", "path", "is_secure"),
    [
        ({}, "/http", False),
        ({"x_forwarded_proto": "http"}, "/http", False),
        ({"x_forwarded_proto": "https"}, "/http", True),
        ({"x_forwarded_prefix": "/team/web/http"}, "/team/web/http", False),
        ({"x_forwarded_prefix": "/a; Domain=example.com"}, "/http", False),
        ({"x_forwarded_prefix": "a"}, "/http", False),
    ],
)
def test_a_browser_gets_a_cookie_for_where_it_sees_the_app(headers, path, is_secure):
    status, answer = App().get(query=f"a=b&kubetorch_token={TOKEN}", **headers)
    assert (status, answer["location"]) == (303, "./page?a=b")
    parts = {part.strip() for part in answer["set-cookie"].split(";")}
    assert f"kubetorch-app-web-0={TOKEN}" in parts
    assert f"Path={path}" in parts
    assert ("Secure" in parts) is is_secure
    assert not any(part.startswith("Domain") for part in parts)


def test_no_cookie_is_set_for_a_token_that_opens_nothing():
    status, answer = App(is_public=True).get(query=f"kubetorch_token={TOKEN_OF_ANOTHER}")
    assert (status, answer["location"]) == (303, "./page")
    assert "set-cookie" not in answer


def test_a_websocket_that_does_not_come_about_is_no_request_any_more():
    app = App()
    for query, status in ((b"", 401), (f"kubetorch_token={TOKEN}".encode(), 503)):
        with pytest.raises(Refusal) as caught:
            app.upgrade(query)
        assert (caught.value.status, app.requests) == (status, 0)
    assert app.begun == 1
    assert "it does not run" in json.loads(caught.value.body)["message"]


def test_the_users_own_token_is_kept_from_the_app_where_it_is_one():
    app = App(user=tokens.fingerprint("mine"))
    headers = [(b"host", b"kt.example.com"), (b"authorization", b"Bearer mine")]
    admitted_request = app.proxy._admit("POST", headers, b"", app._admit)
    assert (admitted_request.headers, app.admitted) == (headers[:1], 1)
    app = App(is_public=True)
    admitted_request = app.proxy._admit("POST", headers, b"", app._admit)
    assert (admitted_request.headers, app.admitted) == (headers, 0)
