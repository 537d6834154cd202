"""Apps in real pods: commands that run there, reached below /http/."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

import kubetorch as kt
from kubetorch.lib import websocket_protocol
from kubetorch.local import lifetime
from kubetorch.pod.tuning import TIMING
from kubetorch.wire import routes
from tests.free_ports import free_port
from tests.local import commands
from tests.local.user_project import UserProject

TIMEOUT = 60.0
SERVER = Path(__file__).parents[1] / "app_server.py"


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture
def project(project, monkeypatch):
    shutil.copy(SERVER, project.folder / "server.py")
    monkeypatch.chdir(project.folder)
    return project


@pytest.fixture
def port():
    return free_port()


class Deployed:
    """An app that was deployed, and requests to it."""

    def __init__(self, project, port, after="", *, argument=None, compute=None, **options):
        self.project = project
        self.command = f"{sys.executable} server.py {argument or port}{after}"
        self.port = port
        self.options = {"name": f"web{project.suffix}", "port": port, **options}
        self.app = self.deploy(**compute or {})

    def deploy(self, **compute):
        settings = {"cpus": "0.1", **compute}
        code = (str(self.project.folder), "server", "app")
        app = kt.App(None, self.command, code, **self.options)
        self.app = app.to(kt.Compute(**settings))
        return self.app

    @property
    def agent(self):
        return urlsplit(self.app.base_endpoint)

    @property
    def token(self):
        return self.app.request_headers["Authorization"].partition(" ")[2]

    def connect(self):
        return http.client.HTTPConnection(self.agent.hostname, self.agent.port, timeout=TIMEOUT)

    def ask(self, path="/", method="GET", body=None, *, token=True, **headers):
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if token:
            sent.setdefault("Authorization", f"Bearer {self.token}")
        connection = self.connect()
        try:
            connection.request(method, f"/http{path}", body=body, headers=sent)
            answer = connection.getresponse()
            answer_headers = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, answer_headers, answer.read()
        finally:
            connection.close()

    def about(self, path="/about", **more):
        status, _, body = self.ask(path, **more)
        assert status == 200, body
        return json.loads(body)


@pytest.fixture
def web(project, port):
    deployed = Deployed(project, port)
    yield deployed
    deployed.app.teardown()


@pytest.fixture(scope="module")
def shared_web(tmp_path_factory, service):
    """An app for all tests that leave it as it is."""
    project = UserProject(tmp_path_factory.mktemp("shared") / "shop")
    shutil.copy(SERVER, project.folder / "server.py")
    deployed = Deployed(project, free_port())
    yield deployed
    deployed.app.teardown()


def wait_until(condition, timeout=TIMEOUT):
    deadline = time.monotonic() + timeout
    while not (outcome := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return outcome


# ------------------------------------------------------------------------------------ requests


def test_requests_reach_the_app_and_its_answers_come_back(shared_web):
    status, headers, body = shared_web.ask("/about?a=1&b=%20", "PUT", b"{}", X_Own="mine")

    assert (status, headers["x-app"]) == (200, "yes")
    about = json.loads(body)
    assert (about["method"], about["query"]) == ("PUT", "a=1&b=%20")
    assert about["headers"]["x-own"] == "mine"
    assert about["headers"]["x-forwarded-prefix"] == "/http"
    assert shared_web.ask("/missing")[0] == 404
    assert shared_web.ask("/nothing")[0] == 204
    assert shared_web.ask("/", "HEAD")[2] == b""


def test_the_app_runs_in_the_project_with_the_variables_of_its_pod(shared_web):
    about = shared_web.about()

    assert Path(about["cwd"]).name == "shop"
    assert about["env"]["KT_APP_PORT"] == str(shared_web.port)
    assert about["env"]["KT_SERVICE_NAME"] == shared_web.app.service_name
    assert not [name for name in about["env"] if name.startswith("KT_POD_")]


def test_a_redirect_to_its_own_path_stays_below_the_prefix(shared_web):
    status, headers, _ = shared_web.ask("/redirect")

    assert (status, headers["location"]) == (302, "/http/about?x=1")


def test_an_edit_restarts_the_app_with_the_new_code(web):
    assert web.ask()[2] == b"one"
    before = web.about()["pid"]

    source = web.project.folder / "server.py"
    source.write_text(source.read_text().replace('VERSION = "one"', 'VERSION = "two"'))
    web.deploy()

    assert web.ask()[2] == b"two"
    wait_until(lambda: not psutil.pid_exists(before))


def test_a_deploy_without_a_change_runs_the_command_again(web):
    before = web.about()["pid"]
    web.deploy()
    assert web.about()["pid"] != before


# ----------------------------------------------------------------------------- who may ask


SLOW_TO_END = """
import signal, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer


def end(*_):
    time.sleep(0.5)
    print("put away", flush=True)
    sys.exit(0)


signal.signal(signal.SIGTERM, end)
HTTPServer(("127.0.0.1", int(sys.argv[1])), BaseHTTPRequestHandler).serve_forever()
"""


def test_a_server_below_a_shell_has_time_to_end_and_gives_its_port_free(project, port, capsys):
    (project.folder / "slow.py").write_text(SLOW_TO_END)
    slow = kt.App(
        None,
        f"{sys.executable} slow.py {port}; exit 1",  # the shell stays, and ends at SIGTERM
        (str(project.folder), "slow", "app"),
        name=f"slow{project.suffix}",
        port=port,
    )
    compute = kt.Compute(cpus="0.1")

    for _ in range(3):
        slow.to(compute)

    compute.logs()
    assert capsys.readouterr().out.count("put away") == 2


def test_a_request_needs_a_token(shared_web):
    assert shared_web.ask(token=False)[0] == 401
    assert shared_web.ask(token=False, Authorization="Bearer wrong")[0] == 401
    assert shared_web.ask(token=False, X_Kubetorch_Token=shared_web.token)[0] == 200


def test_the_app_never_sees_a_token_but_its_own_authorization(shared_web):
    app_headers = shared_web.about(Cookie=f"kubetorch-app-other={shared_web.token}; own=1")[
        "headers"
    ]
    assert "authorization" not in app_headers
    assert app_headers["cookie"] == "own=1"

    headers = {"X_Kubetorch_Token": shared_web.token, "Authorization": "Basic abc"}
    app_headers = shared_web.about(token=False, **headers)["headers"]
    assert app_headers["authorization"] == "Basic abc"
    assert "x-kubetorch-token" not in app_headers


def test_a_browser_gets_a_cookie_for_the_token_in_the_address(shared_web):
    path = f"/about?a=1&kubetorch_token={shared_web.token}&b=2"
    status, headers, _ = shared_web.ask(path, token=False)

    assert (status, headers["location"]) == (303, "./about?a=1&b=2")
    assert "HttpOnly" in headers["set-cookie"]
    assert "SameSite=Strict" in headers["set-cookie"]
    cookie = headers["set-cookie"].partition(";")[0]
    about = shared_web.about("/about?a=1", token=False, Cookie=cookie)
    assert "cookie" not in about["headers"]
    _, headers, _ = shared_web.ask("/about?kubetorch_token=wrong", token=False)
    assert "set-cookie" not in headers


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example:80"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"},
    ],
)
def test_pages_of_other_sites_are_refused_token_or_not(shared_web, headers):
    assert shared_web.ask(**headers)[0] == 403


def test_the_page_of_the_app_itself_may_ask_and_links_to_it_work(shared_web):
    origin = f"http://127.0.0.1:{shared_web.agent.port}"
    assert shared_web.ask(Origin=origin, Sec_Fetch_Site="same-origin")[0] == 200
    assert shared_web.ask(Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200


def test_a_public_app_needs_no_token_but_still_refuses_foreign_pages(project, port):
    web = Deployed(project, port, public=True)
    try:
        assert web.ask(token=False)[0] == 200
        assert web.ask("/about", token=False, Origin="https://evil.example")[0] == 403
        assert "authorization" not in web.about()["headers"]
        app_headers = web.about(token=False, Authorization="Bearer of-the-app")["headers"]
        assert app_headers["authorization"] == "Bearer of-the-app"
        connection = web.connect()
        connection.request("POST", f"/{web.app.service_name}", body=b"{}")
        assert connection.getresponse().status == 401
        connection.close()
    finally:
        web.app.teardown()


# ------------------------------------------------------------------------------------ streams


def test_a_body_streams_in_both_directions_at_the_same_time(shared_web):
    with socket.create_connection(
        (shared_web.agent.hostname, shared_web.agent.port), timeout=TIMEOUT
    ) as sock:
        sock.sendall(
            b"POST /http/echo HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
            + f"Authorization: Bearer {shared_web.token}\r\n\r\n".encode()
        )
        for word in (b"first", b"second", b"third"):
            sock.sendall(b"%x\r\n%s\r\n" % (len(word), word))
            received = b""
            while word not in received:
                piece = sock.recv(65536)
                assert piece
                received += piece
        sock.sendall(b"0\r\n\r\n")
        assert sock.recv(65536).endswith(b"0\r\n\r\n")


def test_a_large_body_arrives_whole(shared_web):
    body = bytes(range(256)) * 40_000
    assert shared_web.ask("/echo", "POST", body)[2] == body


def test_a_slow_reader_holds_the_app_up_and_its_end_is_noticed(shared_web):
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.settimeout(TIMEOUT)
        sock.connect((shared_web.agent.hostname, shared_web.agent.port))
        head = "GET /http/flood HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        sock.sendall(f"{head}Authorization: Bearer {shared_web.token}\r\n\r\n".encode())
        assert b"200" in sock.recv(64)

        def sent_now():
            before = shared_web.about()["sent"]
            time.sleep(0.2)
            return shared_web.about()["sent"] - before == 0 and before

        sent = wait_until(sent_now)
        assert sent < 64 * 1024 * 1024
    wait_until(lambda: "reader gone" in log(shared_web.app))


def log(app):
    return commands.kt("logs", app.service_name).stdout


def test_an_answer_that_breaks_off_is_no_complete_one(web):
    connection = web.connect()
    connection.request("GET", "/http/cut", headers=web.app.request_headers)
    answer = connection.getresponse()
    with pytest.raises(http.client.IncompleteRead):
        answer.read()
    connection.close()


@pytest.mark.parametrize(
    ("path", "code", "text"),
    [("/exit", 9, "with exit code 9 in"), ("/killed", -9, "with exit code 137 (SIGKILL) in")],
)
def test_a_request_in_which_the_app_ends_is_told_so(web, path, code, text):
    status, _, body = web.ask(path)
    failure = json.loads(body)
    assert (status, failure["error_type"]) == (502, "WorkerDiedError")
    assert text in failure["message"]
    assert failure["message"].endswith("before it answered this request, and is started again")
    assert failure["state"]["exit_code"] == code
    assert web.app.service_name in failure["state"]["hint"]
    assert web.about()["pid"]


class Socket:
    """A WebSocket to the app, frame by frame."""

    def __init__(self, web, *, token=True, **headers):
        sent = {"Authorization": f"Bearer {web.token}"} if token else {}
        sent.update(headers)
        self.sock = socket.create_connection((web.agent.hostname, web.agent.port), TIMEOUT)
        host = f"127.0.0.1:{web.agent.port}"
        handshake = websocket_protocol.ClientHandshake(host, "/http/ws", sent.items())
        self.sock.sendall(handshake.request)
        self.status = 101
        try:
            while not handshake.feed(self.sock.recv(1)):
                pass
        except websocket_protocol.UpgradeRefusedError as error:
            self.status = error.status
        self.messages = []
        self.closed = None
        self.parser = websocket_protocol.Parser(self, masked=False, max_message=1 << 24)

    def send(self, data, opcode=websocket_protocol.BINARY):
        header = websocket_protocol.frame_header(opcode, len(data), masked=True)
        self.sock.sendall(header + data)

    def next(self):
        while not self.messages and self.closed is None:
            data = self.sock.recv(65536)
            if not data:
                return None
            self.parser.feed(data)
        return self.messages.pop(0) if self.messages else None

    def on_message(self, opcode, payload):
        self.messages.append((opcode, bytes(payload)))

    def on_large(self, head, length):
        return None

    def on_placed(self, head, rest):
        self.messages.append((websocket_protocol.BINARY, head + bytes(rest)))

    def on_control(self, opcode, payload):
        if opcode == websocket_protocol.CLOSE:
            self.closed = websocket_protocol.parse_close(payload)[0]


def test_a_websocket_reaches_the_app(shared_web):
    echo = Socket(shared_web)
    assert echo.status == 101
    echo.send(b"hello", websocket_protocol.TEXT)
    assert echo.next() == (websocket_protocol.TEXT, b"hello")
    large = os.urandom(3_000_000)
    threading.Thread(target=echo.send, args=(large,), daemon=True).start()
    assert echo.next() == (websocket_protocol.BINARY, large)
    echo.send(websocket_protocol.close_payload(1000), websocket_protocol.CLOSE)
    assert echo.next() is None
    assert echo.closed == 1000
    echo.sock.close()


def test_a_websocket_that_vanishes_is_gone_for_the_app_too(web):
    echo = Socket(web)
    echo.send(b"hello")
    assert echo.next() == (websocket_protocol.BINARY, b"hello")
    echo.sock.close()
    wait_until(lambda: "socket closed" in log(web.app))


def test_a_websocket_needs_a_token_and_a_page_of_this_machine(shared_web):
    for options, status in (
        ({"token": False}, 401),
        ({"Origin": "https://evil.example"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
    ):
        refused = Socket(shared_web, **options)
        assert refused.status == status
        refused.sock.close()


# --------------------------------------------------------------------------------- its ends


def agent_pid(app):
    view = kt.globals.session().get_workload(app.namespace, app.service_name)
    return view.pods[0].pid


def test_a_killed_server_is_started_again_and_requests_wait_for_it(web):
    before = web.about()["pid"]
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(before))

    assert web.about()["pid"] != before
    assert "the app ended with exit code 137, and is started again" in log(web.app)


def test_requests_wait_also_while_only_the_server_of_the_app_has_ended(project, port):
    web = Deployed(project, port, after="; code=$?; sleep 0.1; exit $code")
    try:
        before = web.about()["pid"]
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(before))
        assert web.about()["pid"] != before
    finally:
        web.app.teardown()


def test_a_killed_agent_takes_the_app_with_it_and_brings_it_back(web):
    before, agent = web.about()["pid"], agent_pid(web.app)
    os.kill(agent, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(before))

    wait_until(lambda: reachable(web) and web.about()["pid"] != before)


def reachable(web):
    try:
        return web.ask()[0] == 200
    except OSError:
        return False


def test_a_killed_service_leaves_the_app_alone(web):
    before = web.about()["pid"]
    service = kt.globals.controller_client().get_status().pid
    os.kill(service, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(service))

    assert web.about()["pid"] == before
    lifetime.ensure()
    wait_until(lambda: view_of(web.app).pods[0].is_ready)
    assert web.about()["pid"] == before


def view_of(app):
    return kt.globals.session().get_workload(app.namespace, app.service_name)


def test_teardown_ends_all_that_the_app_started(project):
    project.write(
        "tree.py",
        """
        import os, subprocess, sys, time
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print("child", child.pid, flush=True)
        time.sleep(1000)
        """,
    )
    app = script(project, "tree.py").to(kt.Compute(cpus="0.1"))
    child_lines = wait_until(lambda: [line for line in log(app).splitlines() if "child" in line])
    child = int(child_lines[0].split()[-1])

    app.teardown()

    wait_until(lambda: not psutil.pid_exists(child))


def script(project, command, **options):
    name = f"job{project.suffix}"
    pointers = (str(project.folder), "job", "app")
    return kt.App(None, f"{sys.executable} {command}", pointers, name=name, **options)


def test_a_script_ends_with_an_exit_code_and_is_not_run_again(project):
    project.write("job.py", "import os\nopen('ran', 'a').write('x')\nprint('done')\nos._exit(3)\n")
    app = script(project, "job.py").to(kt.Compute(cpus="0.1"))
    lines = []
    assert app.follow(lines.append) == 3
    assert lines == ["done"]
    wait_until(lambda: view_of(app).status == "Failed")
    assert view_of(app).pods[0].app.exit_code == 3

    agent = agent_pid(app)
    os.kill(agent, signal.SIGKILL)
    wait_until(lambda: view_of(app).pods[0].is_ready and agent_pid(app) != agent)
    wait_until(lambda: view_of(app).pods[0].app is not None)
    assert view_of(app).pods[0].app.exit_code == 3
    assert log(app).count("done") == 1
    app.teardown()


def test_a_failing_version_is_told_with_its_last_lines_and_the_one_before_comes_back(web):
    source = web.project.folder / "server.py"
    good = source.read_text()
    source.write_text("print('about to fail')\nraise SystemExit(4)\n")

    with pytest.raises(kt.ServiceHealthError, match="about to fail") as raised:
        web.deploy()

    assert "exit code 4" in str(raised.value)
    wait_until(lambda: reachable(web))
    assert web.ask()[2] == b"one"
    source.write_text(good)
    web.deploy()
    assert web.ask()[2] == b"one"


def test_a_health_check_that_never_passes_fails_the_deploy_in_time(project, port):
    # The pod starts within the same time.
    for launch_timeout in (10, 40):
        started = time.monotonic()
        with pytest.raises(kt.StartupError) as raised:
            failing(project, port, health_check="/missing", launch_timeout=launch_timeout)
        assert time.monotonic() - started < launch_timeout + 60
        if "listening" in str(raised.value):
            break
    assert isinstance(raised.value, kt.ServiceHealthError)
    assert re.search(r"GET /missing with 200 .* within \d+ s", str(raised.value))


def failing(project, port, *, health_check=None, launch_timeout=60):
    app = kt.App(
        None,
        f"{sys.executable} server.py {port}",
        (str(project.folder), "server", "app"),
        name=f"bad{project.suffix}",
        port=port,
        health_check=health_check,
    )
    try:
        app.to(kt.Compute(cpus="0.1", launch_timeout=launch_timeout))
    finally:
        app.teardown()


def test_a_port_that_is_taken_is_told_before_the_app_starts(project, port):
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(kt.StartupError, match=f"port {port} is taken"),
    ):
        failing(project, port)


def test_a_command_that_does_not_exist_fails_the_deploy(project):
    app = kt.App(
        None, "no-such-program --x", (str(project.folder), "job", "app"), name=f"no{project.suffix}"
    )
    with pytest.raises(kt.ServiceHealthError, match="exit code 127"):
        app.to(kt.Compute(cpus="0.1"))
    app.teardown()


# ---------------------------------------------------------------------------------- idle time


def test_other_pods_that_want_its_port_come_after_the_old_ones(web):
    before = web.about()
    web.deploy(env_vars={"STAGE": "test"})

    after = web.about()
    assert after["env"]["POD_NAME"] != before["env"]["POD_NAME"]
    assert after["pid"] != before["pid"]


def test_requests_count_as_activity_and_a_quiet_app_is_torn_down(project, port):
    web = Deployed(project, port)
    open_socket = None
    while open_socket is None:
        open_socket = socket_after_requests(web, ttl=3.0)
    time.sleep(4.2)
    assert view_of(web.app).pods[0].calls == 1
    open_socket.sock.close()

    wait_until(lambda: is_gone(web.app))


def socket_after_requests(web, ttl):
    """A WebSocket of an app that answered requests for longer than its time.

    `None` if this program stood so long between two requests that the app was quiet.
    """
    last_used = time.monotonic()
    web.deploy(inactivity_ttl=f"{ttl:.0f}s")
    begun = time.monotonic()
    try:
        while time.monotonic() - begun < ttl + 1.2:
            asked = time.monotonic()
            assert web.ask()[0] == 200
            last_used = asked
            time.sleep(0.2)
        return Socket(web)
    except (OSError, AssertionError):
        if time.monotonic() - last_used < ttl:
            raise
        return None


def is_gone(app):
    try:
        view_of(app)
    except kt.ServiceNotFoundError:
        return True
    return False


def test_a_frozen_app_runs_in_the_folder_of_the_program_on_this_machine(monkeypatch):
    folder = Path(__file__).parent
    monkeypatch.chdir(folder)
    with pytest.warns(UserWarning, match="in place"):
        app = kt.app("pwd -P", name="frozen").to(kt.Compute(cpus="0.1", freeze=True))
    lines = []
    assert app.follow(lines.append) == 0
    assert lines == [str(folder.resolve())]
    app.teardown()


FOLLOWED = """
import kubetorch as kt

app = kt.app("python job.py", name="followed").to(kt.Compute(cpus="0.1"))
print("deployed", flush=True)
app.follow()
"""


@pytest.fixture
def followed(project):
    """A program that follows its app, which is torn down at the end."""
    yield project.write("program.py", FOLLOWED)
    commands.kt("teardown", "followed", "-y").check_returncode()


def test_lines_that_a_deploy_has_shown_are_not_followed_again(project, followed):
    project.write("job.py", "for n in range(4):\n    print('line', n, flush=True)\n")
    completed = project.run(followed)
    assert completed.returncode == 0, completed.stderr
    assert [completed.stdout.count(f"line {n}") for n in range(4)] == [1, 1, 1, 1]


def test_ctrl_c_while_an_app_is_followed_says_what_goes_on(project, followed):
    project.write(
        "job.py", "import time\nwhile True:\n    print('tick', flush=True)\n    time.sleep(0.1)\n"
    )
    running = subprocess.Popen(
        [sys.executable, str(followed)],
        cwd=project.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert any("deployed" in line for line in running.stdout)
    assert "tick" in running.stdout.readline()
    running.send_signal(signal.SIGINT)
    errors = running.communicate(timeout=100)[1]
    assert errors.splitlines()[-1] == (
        "Interrupted. The app goes on: kt logs followed -f shows its lines, "
        "kt teardown followed ends it."
    )


def test_a_script_that_runs_is_busy(project):
    end = project.folder / "end"
    loop = f"while not os.path.exists({str(end)!r}): time.sleep(0.05)\n"
    project.write("job.py", f"import os, time\n{loop}")
    app = script(project, "job.py").to(kt.Compute(cpus="0.1", inactivity_ttl="1s"))
    time.sleep(2.5)
    assert view_of(app).pods[0].calls == 1
    end.touch()
    wait_until(lambda: is_gone(app))


def test_an_app_that_uses_more_memory_than_its_limit_is_ended_and_told_so(project):
    project.write("job.py", "import time\nblock = b'x' * 300_000_000\ntime.sleep(60)\n")
    limits = {"resources": {"limits": {"memory": "150Mi"}}}
    containers = {"containers": [{"name": "kubetorch", **limits}]}
    template = {"spec": {"template": {"spec": containers}}}
    app = script(project, "job.py").to(kt.Compute(cpus="0.1", service_template=template))
    try:
        assert app.follow([].append) == 137
        assert "its limit is 150Mi" in log(app)
    finally:
        app.teardown()


SCRIPT = """#!/bin/sh
exec {python} server.py {port}
"""


def test_a_script_of_the_project_is_a_command(project, port):
    script = project.folder / "serve.sh"
    script.write_text(SCRIPT.format(python=sys.executable, port=port))
    script.chmod(0o755)
    module = project.module(
        f"""
        import kubetorch as kt

        def make():
            return kt.app("./serve.sh", port={port}, name="script{project.suffix}")
        """
    )
    app = module.make().to(kt.Compute(cpus="0.1"))
    try:
        assert app.command == "./serve.sh"
        request = urllib.request.Request(app.endpoint("/about"), headers=app.request_headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            assert json.load(answer)["env"]["KT_APP_PORT"] == str(port)
    finally:
        app.teardown()


def test_an_app_has_no_ranks_and_says_so():
    compute = kt.Compute(cpus="0.1").distribute("spmd", workers=2)
    with pytest.raises(kt.SpecError, match="no ranks"):
        kt.app("sleep 1", name="ranked").to(compute)


# ---------------------------------------------------------------------- how many requests at once


UPGRADE = {"Connection": "Upgrade", "Upgrade": "websocket"}


def test_requests_wait_for_their_turn_and_the_health_path_and_websockets_do_not(project, port):
    web = Deployed(project, port, health_check="/about")
    try:
        pod = agent_pid(web.app)
        web.deploy(concurrency=1, max_queue=1)
        assert agent_pid(web.app) == pod
        echo = Socket(web)
        connection = web.connect()
        connection.putrequest("POST", "/http/echo")
        connection.putheader("Authorization", f"Bearer {web.token}")
        connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders(b"1\r\na\r\n")
        answer = connection.getresponse()
        answers = []
        waiting = threading.Thread(target=lambda: answers.append(web.ask("/")))
        waiting.start()
        wait_until(lambda: queue_of(web.app) == (1, 1))
        status, headers, body = web.ask("/")
        assert (status, headers["retry-after"]) == (429, "1")
        assert json.loads(body)["error_type"] == "QueueFullError"
        assert web.about()["pid"]
        echo.send(b"hello", websocket_protocol.TEXT)
        assert echo.next() == (websocket_protocol.TEXT, b"hello")
        echo.sock.close()
        # Nobody knows of a request that asks for an upgrade whether the app makes it.
        assert web.ask("/flood", **UPGRADE)[0] == 429
        assert answers == []
        connection.send(b"0\r\n\r\n")
        assert answer.read() == b"a"
        connection.close()
        waiting.join(TIMEOUT)
        assert [status for status, _, _ in answers] == [200]
    finally:
        web.app.teardown()


def test_a_request_for_an_upgrade_that_is_not_made_has_a_slot_until_its_end(project, port):
    web = Deployed(project, port)
    try:
        web.deploy(concurrency=1)
        assert web.ask("/echo", "POST", b"a body", **UPGRADE)[2] == b"a body"
        endless = web.connect()
        sent = {"Authorization": f"Bearer {web.token}", "Sec-WebSocket-Version": "13"}
        endless.request("GET", "/http/flood", headers={**sent, **UPGRADE})
        answer = endless.getresponse()
        assert answer.read(100) == b"x" * 100
        wait_until(lambda: queue_of(web.app) == (1, 0))
        status, _, body = web.ask("/", X_Kubetorch_Queue_Timeout="0.2")
        assert (status, json.loads(body)["error_type"]) == (504, "CallTimeoutError")
        status, _, body = web.ask("/", X_Kubetorch_Queue_Timeout="soon")
        assert (status, json.loads(body)["error_type"]) == (400, "ProtocolError")
        leaving = socket.create_connection((web.agent.hostname, web.agent.port), TIMEOUT)
        handshake = websocket_protocol.ClientHandshake("127.0.0.1", "/http/ws", sent.items())
        leaving.sendall(handshake.request)
        wait_until(lambda: queue_of(web.app) == (1, 1))
        leaving.close()
        wait_until(lambda: queue_of(web.app) == (1, 0))
        answer.close()
        endless.close()
        assert web.ask("/")[0] == 200
        websocket = Socket(web)
        assert websocket.status == 101
        wait_until(lambda: queue_of(web.app) == (0, 0))
        websocket.sock.close()
    finally:
        web.app.teardown()


def queue_of(app):
    queue = view_of(app).pods[0].queue
    return queue and (queue.taken, queue.waiting)


# ---------------------------------------------------------------------------------- several pods


def settle(web, websockets=0):
    """Wait until the pods have no requests but WebSockets, and count no others any more."""

    def counts():
        headers = {"Authorization": f"Bearer {web.token}"}
        for pod in view_of(web.app).pods:
            request = urllib.request.Request(f"{pod.url}{routes.LOAD}", headers=headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                yield json.load(answer)["calls"]

    wait_until(lambda: sum(counts()) == websockets)
    time.sleep(2 * TIMING.sibling_loads_valid_seconds)


def test_requests_and_websockets_go_to_the_least_busy_pod_each_with_a_port_of_its_own(
    project, port
):
    any_of_two = {"replicas": 2, "dispatch": "any"}
    web = Deployed(project, port, argument="{port}", compute=any_of_two)

    def pods_of_requests(websockets):
        for _ in range(4):
            settle(web, websockets)
            yield web.about()["env"]

    with contextlib.ExitStack() as at_end:
        at_end.callback(web.app.teardown)
        answers = [*pods_of_requests(0)]
        assert [answers.count(env) for env in answers] == [2, 2, 2, 2]
        assert len({env["KT_APP_PORT"] for env in answers} - {str(port)}) == 2
        settle(web)
        assert "x-kubetorch-alone" not in web.about()["headers"]
        for websockets in (1, 2):
            settle(web, websockets - 1)
            echo = Socket(web)
            at_end.enter_context(echo.sock)
            echo.send(b"hello", websocket_protocol.TEXT)
            assert echo.next() == (websocket_protocol.TEXT, b"hello")
            # With the second one both have one, wherever it came in.
            pods = {env["POD_NAME"] for env in pods_of_requests(websockets)}
            assert len(pods) == websockets
        large = os.urandom(3_000_000)
        assert [web.ask("/echo", "POST", large)[2] == large for _ in range(2)] == [True, True]


def of_two_pods(project, port, argument):
    code = (str(project.folder), "server", "app")
    command = f"{sys.executable} server.py {argument}"
    app = kt.App(None, command, code, name=f"two{project.suffix}", port=port)
    try:
        app.to(kt.Compute(cpus="0.1", replicas=2))
    finally:
        app.teardown()


def test_a_command_with_one_port_for_several_pods_is_refused(project, port):
    with pytest.raises(kt.SpecError, match=r"share the ports of this machine\nhint: write {port}"):
        of_two_pods(project, port, port)


def test_an_app_that_listens_on_a_port_of_its_own_choice_is_told_of_the_pods(project, port):
    (project.folder / "port").write_text(str(port))
    message = rf"listens on port {port}(?s:.*)each has one of its own(?s:.*){{port}}"
    with pytest.raises(kt.ServiceHealthError, match=message):
        of_two_pods(project, port, "$(cat port)")
