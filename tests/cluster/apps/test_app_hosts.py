"""A public app behind the names that an installation has for browsers, in a real cluster."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.conftest import Installed, Kubectl
from cluster.controller.test_faults_storage import install
from tests.free_ports import free_port

pytestmark = pytest.mark.alone
TIMEOUT = 60.0
COMMAND = "python page.py 8000"
PAGE = """
import http.server, json, sys

class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps(dict(self.headers)).encode()
        self.send_response(200)
        self.send_header("Set-Cookie", "a=1; Path=/; Domain=example.com")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Page).serve_forever()
"""
Ask = Callable[..., tuple[int, http.client.HTTPMessage, bytes]]


@pytest.fixture(scope="module")
def ask(controller: str, kubectl: Kubectl) -> Iterator[Ask]:
    """Requests to the controller of an installation with a host per service."""
    install("ingress.host=kt.example.com,ingress.perServiceHosts=true,ingress.appHosts={a.example}")
    port = free_port()
    command = ["kubectl", "port-forward", "-n", controller, "deployment/kubetorch-controller"]

    def ask(host: str, path: str, **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
        with contextlib.closing(connection):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request("GET", path, headers={"Host": host, **named})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()

    with subprocess.Popen(
        [*command, f"{port}:8080"], stdout=subprocess.PIPE, text=True
    ) as forwarding:
        assert forwarding.stdout is not None
        assert "Forwarding" in forwarding.stdout.readline()
        yield ask
        forwarding.terminate()
    install("ingress.host=,ingress.perServiceHosts=false,ingress.appHosts={}")


def test_18_an_app_has_its_own_host_and_refuses_strange_names(
    ask: Ask, installed: Installed, tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "page.py").write_text(PAGE)
    program = f"""
    import kubetorch as kt
    kt.app({COMMAND!r}, name="page", port=8000, public=True, cpus="10m").deploy()
    """
    installed.python(program, tmp_path)
    app_host, base = (
        f"page--{installed.namespace}.kt.example.com",
        f"/{installed.namespace}/page/http",
    )
    deadline = time.monotonic() + TIMEOUT
    while (answer := ask(app_host, "/v1/workloads"))[0] == 503:  # a controller that begins to lead
        assert time.monotonic() < deadline
        time.sleep(0.5)
    status, headers, body = answer
    assert (status, headers["set-cookie"]) == (200, "a=1; Path=/")
    seen_headers = {name.lower(): value for name, value in json.loads(body).items()}
    assert (seen_headers["host"], seen_headers["x-forwarded-prefix"]) == (app_host, "/")

    link = {"Sec_Fetch_Site": "none", "Sec_Fetch_Mode": "navigate"}
    status, headers, _ = ask("kt.example.com", f"{base}/x?y=1", **link)
    assert (status, headers["location"]) == (307, f"https://{app_host}/x?y=1")
    assert ask("kt.example.com", f"{base}/", Sec_Fetch_Site="same-origin")[0] == 403
    status, headers, _ = ask("a.example", f"{base}/")
    assert (status, headers["set-cookie"]) == (200, f"a=1; Path={base}")
    assert ask("evil.example", f"{base}/")[0] == 403
    assert (
        ask(app_host, "/", Origin=f"https://other--{installed.namespace}.kt.example.com")[0] == 403
    )
    assert ask(app_host, "/", Origin=f"https://{app_host}")[0] == 200
