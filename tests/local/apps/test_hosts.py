"""Apps of several tenants behind one host: what a browser gives to each, and what reaches them."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from http.cookiejar import CookieJar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import kubetorch as kt
from agent_harness import NAMESPACE, WORKLOAD, FakeController
from agent_harness import SECRET as AGENT_SECRET
from kubetorch.controller.app import App
from kubetorch.controller.cluster.access import ClusterAccess
from kubetorch.controller.relay import NO_HOSTS, Hosts, Relay
from kubetorch.controller.routes.table import Table
from kubetorch.errors import ServiceNotFoundError
from kubetorch.lib import proxy, sockets
from kubetorch.lib.http_server import Server
from kubetorch.local import lifetime
from kubetorch.sdk.transport import pod_transport
from kubetorch.specs.callable import AppSpec, CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import messages, tokens
from kubetorch.wire.messages import PodView, WorkloadView
from tests.free_ports import free_port
from tests.local import fake_controller
from tests.local.agent.test_agent_in_cluster import Container
from tests.local.net.test_forwarding import Ingress, answer, forwarded, get
from tests.local.user_project import UserProject

pytestmark = pytest.mark.security

SECRET = b"secret"
NOW = 1_000.0


def token_of(service: str) -> str:
    key = tokens.workload_key(SECRET, service)
    return tokens.sign(key, tokens.Claims(service, NOW + 60.0, issued=NOW))


class Pod:
    """A pod's port on which somebody's own server answers, and tells what it was asked."""

    def __init__(self, set_cookie: bytes) -> None:
        self.requests: list[tuple[str, dict[str, str]]] = []
        self._set_cookie = set_cookie

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        target = scope["raw_path"] + (b"?" + scope["query_string"]).rstrip(b"?")
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.requests.append((target.decode(), headers))
        answer = [(b"content-length", b"0"), (b"set-cookie", self._set_cookie)]
        await send({"type": "http.response.start", "status": 200, "headers": answer})
        await send({"type": "http.response.body", "body": b""})


class Behind:
    """A controller with one service, whose pod is a `Pod`."""

    def __init__(self, pod: Pod, port: int) -> None:
        self.pod = pod
        self.port = port

    async def ask(self, path: str, *lines: str, method: str = "GET") -> tuple[int, dict[str, str]]:
        reader, writer = await asyncio.open_connection(sockets.LOOPBACK, self.port)
        try:
            head = [f"{method} {path} HTTP/1.1", *lines, "Connection: close"]
            writer.write("\r\n".join([*head, "", ""]).encode())
            first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            fields = dict(line.split(": ", 1) for line in rest)
            return int(first.split()[1]), {name.lower(): fields[name] for name in fields}
        finally:
            writer.close()


@asynccontextmanager
async def controller(
    name: str, *, public: bool = True, set_cookie: bytes = b"a=1", hosts: Hosts = NO_HOSTS
) -> AsyncIterator[Behind]:
    pod = Pod(set_cookie)
    listeners = [sockets.listen(sockets.LOOPBACK, 0) for _ in range(2)]
    port = listeners[0].getsockname()[1]
    namespace, _, service = name.partition("/")
    app = AppSpec(command="serve", port=8000, public=public)
    spec = WorkloadSpec(
        namespace, service, CallableRef("app", service, "m", "app", app=app), ComputeSpec()
    )
    url = f"http://{sockets.LOOPBACK}:{port}"
    pod_view = PodView(name="p-0", ordinal=0, phase="Running", is_ready=True, url=url)
    view = WorkloadView(spec=spec, generation=1, status="Ready", pods=(pod_view,))

    def find(*service_key: str) -> Any:
        if service_key != (namespace, service):
            raise ServiceNotFoundError("/".join(service_key))
        return SimpleNamespace(view=lambda: view, spec=spec, scaling=None)

    relay = Relay(find, secret=SECRET, clock=lambda: NOW, hosts=hosts)
    access = object.__new__(ClusterAccess)  # what the handlers need is of no interest here
    front = App(Table([]), access, relay, new_session=Any, on_request=lambda: None)
    upgrade = proxy.tunnels(
        lambda request: relay.locate(request.raw_path, request.headers) is not None, relay.open, Any
    )
    servers = [Server(pod), Server(front, upgrade=upgrade)]
    for server, listener in zip(servers, listeners, strict=True):
        await server.start(listener)
    try:
        yield Behind(pod, listeners[1].getsockname()[1])
    finally:
        for server in servers:
            await server.close(1.0)


HOST = "Host: kt.example.com"
UPGRADE = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
KEY = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="


@pytest.mark.parametrize(
    "header",
    [
        "Cookie: own=1; kubetorch-app-web-0={}",
        "Authorization: Bearer {}",
        "X-Kubetorch-Token: {}",
        "?kubetorch_token={}",
    ],
)
def test_tokens_of_other_services_do_not_reach_a_pod(header: str) -> None:
    async def main() -> None:
        for service, is_passed in (("team/web", False), ("evil/page", True)):
            text = header.format(token_of(service))
            async with controller("evil/page") as behind:
                query, more = (text, []) if text.startswith("?") else ("", [text])
                assert (await behind.ask(f"/evil/page/http/x{query}", HOST, *more))[0] == 200
                assert (token_of(service) in json.dumps(behind.pod.requests)) is is_passed
                if "own=1" in header:
                    assert "own=1" in behind.pod.requests[0][1]["cookie"]

    asyncio.run(main())


def test_a_pod_sets_no_cookie_for_other_services() -> None:
    async def main() -> None:
        cookie = b"a=1; Domain=example.com; Path=/; Secure"
        async with controller("evil/page", set_cookie=cookie) as behind:
            for upgrade in ((), (*UPGRADE, KEY)):
                _, headers = await behind.ask("/evil/page/http/x", HOST, *upgrade)
                assert headers["set-cookie"] == "a=1; Path=/evil/page; Secure"

    asyncio.run(main())


@pytest.mark.parametrize(
    "path", ["/evil%2Fpage/http/v1/logs", "/evil/page%2Fhttp/v1/logs", "/evil/page/http%2F/v1/logs"]
)
def test_a_relayed_path_is_decoded_once(path: str) -> None:
    """Checked as the path of a public app, it was forwarded as another one."""

    async def main() -> None:
        async with controller("evil/page") as behind:
            assert (await behind.ask(path, HOST))[0] == 401
            assert behind.pod.requests == []
            assert (await behind.ask("/evil/page/http/a%2Fb%2520", HOST))[0] == 200
            assert behind.pod.requests[0][0] == "/http/a%2Fb%2520"

    asyncio.run(main())


# ------------------------------------------------------------------------- a host per service

OWN_HOST = "Host: page--evil.kt.example.com"
HOSTS = Hosts("kt.example.com", are_per_service=True)


def test_all_of_a_services_own_host_is_its_app() -> None:
    async def main() -> None:
        cookie = b"a=1; Domain=kt.example.com; Path=/"
        async with controller("evil/page", set_cookie=cookie, hosts=HOSTS) as behind:
            for path in ("/", "/v1/workloads", "/health", "/team/web/http/x?y=%2F"):
                status, headers = await behind.ask(path, OWN_HOST, "Origin: https://own.example")
                assert (status, headers["set-cookie"]) == (200, "a=1; Path=/")
                target, app_headers = behind.pod.requests[-1]
                assert target == f"/http{path}"
                assert app_headers["host"] == "page--evil.kt.example.com"
                assert app_headers["x-forwarded-prefix"] == "/"
            behind.pod.requests.clear()
            for name in ("web--team", "page--other", "page"):
                assert (await behind.ask("/", f"Host: {name}.kt.example.com"))[0] == 401
            assert (await behind.ask("/health", HOST))[0] != 200  # this one has no such route
            assert behind.pod.requests == []

    asyncio.run(main())


def test_a_private_app_needs_its_token_at_its_own_host() -> None:
    async def main() -> None:
        async with controller("evil/page", public=False, hosts=HOSTS) as behind:
            for service, status in (("team/web", 401), ("evil/page", 200)):
                authorization = f"Authorization: Bearer {token_of(service)}"
                assert (await behind.ask("/", OWN_HOST, authorization))[0] == status
                cookie = f"Cookie: kubetorch-app-p-0={token_of(service)}"
                assert (await behind.ask("/", OWN_HOST, cookie))[0] == status

    asyncio.run(main())


def test_pages_are_at_their_own_host_alone() -> None:
    async def main() -> None:
        async with controller("evil/page", hosts=HOSTS) as behind:
            path, link = "/evil/page/http/a%2Fb?x=1", ("Sec-Fetch-Mode: navigate",)
            status, headers = await behind.ask(path, HOST, "Sec-Fetch-Site: none", *link)
            app_url = "https://page--evil.kt.example.com"
            assert (status, headers["location"]) == (307, f"{app_url}/a%2Fb?x=1")
            status, headers = await behind.ask(
                path, f"{HOST}:8443", "Sec-Fetch-Site: none", *link, "X-Forwarded-Proto: http"
            )
            assert headers["location"] == "http://page--evil.kt.example.com:8443/a%2Fb?x=1"
            for page in ("Sec-Fetch-Site: same-origin", "Origin: https://kt.example.com"):
                assert (await behind.ask(path, HOST, page))[0] == 403
                assert (await behind.ask(path, HOST, page, method="POST"))[0] == 403
                assert (await behind.ask(path, HOST, page, *UPGRADE, KEY))[0] == 403
            assert behind.pod.requests == []
            assert (await behind.ask(path, HOST))[0] == 200  # a program's
        async with controller("evil/pa--ge", hosts=HOSTS) as behind:
            status, _ = await behind.ask("/evil/pa--ge/http/", HOST, "Sec-Fetch-Site: none", *link)
            assert status == 403

    asyncio.run(main())


def test_programs_are_told_the_host_of_an_app() -> None:
    view = fake_controller.view("web", kind="app")
    base = "https://kt.example.com:8443/default/web"
    assert pod_transport.app_url(base, view) == f"{base}/http"
    view_with_host = msgspec.structs.replace(view, app_host="web--default.kt.example.com")
    assert pod_transport.app_url(base, view_with_host) == "https://web--default.kt.example.com:8443"
    assert (
        pod_transport.app_url("http://localhost:4000", view_with_host)
        == "http://localhost:4000/http"
    )


# ----------------------------------------------------------------------- pages of other sites

FOREIGN = [
    ["Origin: https://evil.example"],
    ["Origin: null"],
    ["Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors"],
    ["Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: no-cors"],
    ["Origin: https://other--evil.kt.example.com", "Sec-Fetch-Site: same-site"],
]


@pytest.mark.parametrize("public", [True, False])
def test_apps_in_a_cluster_refuse_other_sites_and_strange_names(
    public: bool, tmp_path: Path
) -> None:
    controller = FakeController(tmp_path, is_known={"first"}.__contains__)
    container = Container(tmp_path, controller, KT_POD_HOST="10.0.0.5")
    try:
        controller.wait_for(messages.Hello)
        hosts = ("kt.example.com", "*.apps.example.com")
        key = tokens.workload_key(AGENT_SECRET, tokens.audience(NAMESPACE, WORKLOAD))
        controller.send(messages.Welcome(key=key.hex(), version="1", protocol=1, app_hosts=hosts))
        port = free_port()
        command = f"{sys.executable} -m http.server {port} --bind 127.0.0.1"
        app = AppSpec(command=command, port=port, public=public)
        spec = controller.spec("", "f")
        spec = replace(spec, callable=replace(spec.callable, kind="app", app=app))
        controller.send(messages.Reload(generation=1, spec=spec))
        assert controller.wait_for(messages.Observed).failure is None
        claims = tokens.Claims(tokens.audience(NAMESPACE, WORKLOAD), time.time() + 60)
        token = [] if public else [f"Authorization: Bearer {tokens.sign(key, claims)}"]

        async def ask(*lines: str, method: str = "GET") -> int:
            answers = Behind(Pod(b""), container.port)
            return (await answers.ask("/http/", *lines, *token, method=method))[0]

        async def main() -> None:
            service = f"{WORKLOAD}.{NAMESPACE}.svc.cluster.local"
            known_hosts = ["kt.example.com", "a.apps.example.com:443", service, "10.0.0.5:32300"]
            for host in known_hosts:
                assert await ask(f"Host: {host}") == 200
                origin = f"Origin: https://{host}"
                assert await ask(f"Host: {host}", origin, "Sec-Fetch-Site: same-origin") == 200
                for page in FOREIGN:
                    assert await ask(f"Host: {host}", *page) == 403
                    assert await ask(f"Host: {host}", *page, *UPGRADE, KEY) == 403
                link = ["Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate"]
                assert await ask(f"Host: {host}", *link) == 200
            strange = 403 if public else 200
            assert await ask("Host: evil.example:32300") == strange
            assert await ask("Host: kt.example.com", "X-Forwarded-Host: evil.example") == strange
            # A port that is forwarded by kubectl.
            assert await ask("Host: localhost:8000", "Origin: http://127.0.0.1:3000") == 200
            assert await ask("Host: localhost:8000", "Origin: http://evil.example") == 403

        asyncio.run(main())
    finally:
        container.stop()
        controller.close()


@pytest.mark.parametrize(
    "foreign",
    [
        {"Host": "evil.example"},
        *(dict(header.split(": ") for header in page) for page in FOREIGN[:3]),
    ],
)
def test_a_forwarded_port_refuses_other_sites_and_strange_names(
    foreign: dict[str, str],
) -> None:
    ingress = Ingress(lambda headers: answer(200))
    with forwarded(ingress) as forwarding:
        assert get(forwarding, "/", **foreign).status == 403
        upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
        key = {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
        assert get(forwarding, "/live", **foreign, **upgrade, **key).status == 403
        assert ingress.requests == []
        own_page = {
            "Origin": f"http://localhost:{forwarding.port}",
            "Sec-Fetch-Site": "same-origin",
        }
        assert get(forwarding, "/", **own_page).status == 200
        # What is behind has another name than the page: there it is as a program's.
        ((_, app_headers),) = ingress.requests
        assert not {"origin", "sec-fetch-site"} & set(app_headers)


# ----------------------------------------------------------------------------- in real pods

SOURCE = """
import http.server, json, sys

class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps(dict(self.headers)).encode()
        self.send_response(200)
        self.send_header("Set-Cookie", "session=" + sys.argv[2] + "; Path=/")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Page).serve_forever()
"""


@pytest.fixture
def project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_service_home: Path
) -> Iterator[UserProject]:
    project = UserProject(tmp_path / "shop")
    project.write("page.py", SOURCE)
    monkeypatch.chdir(project.folder)
    yield project
    project.forget()


def deploy(project: UserProject, name: str, **more: Any) -> kt.App:
    port = free_port()
    name = f"{name}{project.suffix}"
    command = f"{sys.executable} page.py {port} {name}"
    pointers = (str(project.folder), "page", "app")
    app = kt.App(None, command, pointers, name=name, port=port, **more)
    return app.to(kt.Compute(cpus="0.1"))


def test_a_browser_gives_cookies_to_the_app_that_set_them(
    project: UserProject,
) -> None:
    private, public = deploy(project, "shop"), deploy(project, "page", public=True)
    try:
        jar = CookieJar()
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
        base = f"{lifetime.ensure().url}/default"

        def visit(app: kt.App, query: str = "") -> dict[str, str]:
            with browser.open(f"{base}/{app.service_name}/http/{query}", timeout=20) as answer:
                return dict(json.load(answer))

        token = private.request_headers["Authorization"].partition(" ")[2]
        assert "cookie" not in visit(private, f"?kubetorch_token={token}")
        assert f"session={private.service_name}" in visit(private)["cookie"]
        where = {(cookie.name, cookie.path) for cookie in jar}
        assert {path for _, path in where} == {f"/default/{private.service_name}/http"}
        assert len(where) == 2
        assert "cookie" not in visit(public)
        assert visit(public)["cookie"] == f"session={public.service_name}"
        jar.clear()
        with pytest.raises(urllib.error.HTTPError, match="401"):
            visit(private)
    finally:
        private.teardown()
        public.teardown()
