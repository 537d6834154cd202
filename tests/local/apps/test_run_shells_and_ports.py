"""Ways to apps and pods, from the command line and from a program."""

import hashlib
import http.client
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kubetorch as kt
from tests.free_ports import free_port
from tests.local import commands
from tests.local.user_project import UserProject

KT = str(Path(sys.executable).with_name("kt"))
TIMEOUT = 60.0


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture
def project(project, monkeypatch):
    monkeypatch.chdir(project.folder)
    return project


@pytest.fixture(scope="module")
def served(tmp_path_factory, shared_service_home):
    """A function that is deployed, for all that only looks at its pod."""
    project = UserProject(tmp_path_factory.mktemp("served") / "shop")
    module = project.module("def train(n):\n    return n + 1\n")
    remote = kt.fn(module.train, name=f"train{project.suffix}")
    remote.to(kt.Compute(cpus="0.1", env_vars={"STAGE": "test"}))
    yield remote
    remote.teardown()
    project.forget()


def kt_process(*arguments, **options):
    """`kt` in a process of its own, for what it reads."""
    return subprocess.run(
        [KT, *arguments], capture_output=True, text=True, timeout=TIMEOUT, **options
    )


# --------------------------------------------------------------------------------------- kt run

SCRIPT = """
import sys
import kubetorch as kt

kt.app(cpus="0.1"{more})
print("arguments", sys.argv[1:])
print("was", "imported" if __name__ != "__main__" else "run")
sys.exit(int(sys.argv[-1]))
"""


def test_run_shows_lines_and_ends_with_the_exit_code_of_the_command(project):
    project.write("work.py", SCRIPT.format(more=""))
    completed = commands.kt("run", "python", "work.py", "--epochs", "a b", "3")

    assert completed.returncode == 3, completed.stderr
    assert completed.stdout == "arguments ['--epochs', 'a b', '3']\nwas run\n"
    assert "work ended with exit code 3" in completed.stderr
    listed = json.loads(commands.kt("describe", "work", "--json").stdout)
    assert listed["status"] == "Failed"
    assert listed["pods"][0]["app"]["exit_code"] == 3
    assert commands.kt("teardown", "work", "-y").returncode == 0


def test_run_says_which_options_behind_the_command_are_its_own(project):
    project.write("work.py", SCRIPT.format(more=""))
    completed = commands.kt("run", "python", "work.py", "--name", "exp", "--lr", "1", "0")
    assert "kt run takes --name for itself, which belongs before the command: " in completed.stderr
    assert "kt run --name … python …; what follows -- is the command's: " in completed.stderr
    assert completed.stdout.startswith("arguments ['--lr', '1', '0']")
    assert commands.kt("teardown", "exp", "-y").returncode == 0

    completed = commands.kt("run", "--", "python", "work.py", "--name", "exp", "0")
    assert "for itself" not in completed.stderr
    assert completed.stdout.startswith("arguments ['--name', 'exp', '0']")
    assert commands.kt("teardown", "work", "-y").returncode == 0


def test_run_async_returns_once_it_runs(project):
    project.write(
        "nap.py", "import kubetorch as kt\nkt.app(name='naps')\nimport time; time.sleep(99)"
    )
    completed = commands.kt("run", "--detach", "python", "nap.py")

    assert completed.returncode == 0, completed.stderr
    assert "kt logs naps" in completed.stdout
    assert "kt teardown naps" in completed.stdout
    assert json.loads(commands.kt("describe", "naps", "--json").stdout)["status"] == "Running"
    assert "Access:" not in commands.kt("describe", "naps").stdout  # it has no port
    assert commands.kt("teardown", "naps", "-y").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ((), 2, "the command is missing"),
        (("work.py",), 2, "kt run python work.py"),
        (("--cpus", "1", "python", "work.py"), 2, "kt run has no option --cpus"),
        (("echo", "hello"), 1, "no Python file was detected"),
        (("python", "missing.py"), 1, "missing.py not found"),
        (("python", "plain.py"), 1, "no kt.app was found"),
        (("--name", "other", "python", "named.py"), 1, "names the app 'mine'"),
    ],
)
def test_run_refuses_what_it_cannot_run(project, arguments, status, message):
    project.write("plain.py", "print('nothing')\n")
    project.write("named.py", "import kubetorch as kt\nkt.app('mine')\n")
    completed = commands.kt("run", *arguments)

    assert completed.returncode == status, completed.stderr
    assert message in completed.stderr.replace("\n", " ")


def test_interrupting_run_leaves_the_app_alone(project):
    project.write(
        "loop.py", "import kubetorch as kt\nkt.app()\nimport time\nprint('on')\ntime.sleep(99)"
    )
    running = subprocess.Popen(
        [KT, "run", "python", "loop.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout.readline() == "on\n"
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=TIMEOUT)

    assert running.returncode == 0
    assert "kt logs loop" in output
    assert json.loads(commands.kt("describe", "loop", "--json").stdout)["status"] == "Running"
    assert commands.kt("teardown", "loop", "-y").returncode == 0


def test_a_program_that_deploys_an_app_may_be_the_app_itself(project):
    port = free_port()
    project.write(
        "serve.py",
        f"""
        import http.server, sys
        import kubetorch as kt

        app = kt.app("python serve.py {port}", port={port})
        app.to(kt.Compute(cpus="0.1"))
        print("deployed" if len(sys.argv) == 1 else "serving", app.name, flush=True)
        if len(sys.argv) > 1:
            handler = http.server.SimpleHTTPRequestHandler
            http.server.ThreadingHTTPServer(("127.0.0.1", {port}), handler).serve_forever()
        """,
    )
    completed = project.run("serve.py")

    assert completed.returncode == 0, completed.stderr
    assert "deployed serve" in completed.stdout
    token = commands.kt("token", "serve").stdout.strip()
    url = json.loads(commands.kt("describe", "serve", "--json").stdout)["url"]
    assert "Access:     with a token\n" in commands.kt("describe", "serve").stdout
    status, body = ask(url, "/http/serve.py", token)
    assert status == 200
    assert b"SimpleHTTPRequestHandler" in body
    assert commands.kt("teardown", "serve", "-y").returncode == 0


def test_a_file_without_kt_run_goes_on_after_its_kt_app(project):
    project.write("plain.py", "import kubetorch as kt\nassert kt.app(port=80, cpus=1) is None\n")
    assert project.run("plain.py").returncode == 0


# ------------------------------------------------------------------------------------- forwarding


def ask(url, path, token=None, host=None):
    address = url.partition("//")[2]
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT)
    try:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        if host is not None:
            headers["Host"] = host
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_the_client_port_leads_to_the_pod_and_lends_no_rights(project):
    module = project.module("def train(n):\n    return n + 1\n")
    served = kt.fn(module.train, name=f"door{project.suffix}").to(kt.Compute(cpus="0.1"))
    url = f"http://127.0.0.1:{served.compute.client_port()}"
    token = served.request_headers["Authorization"].partition(" ")[2]

    assert served.compute.client_port() == int(url.rpartition(":")[2])
    assert ask(url, "/ready")[0] == 401
    assert ask(url, "/ready", token)[0] == 200
    assert ask(url, "/ready", token, host="evil.example")[0] == 403
    endpoint = kt.Endpoint(url=f"{served.service_name}.default.svc.cluster.local:80/ready")
    proxied = endpoint.get_proxied_url(served.compute.client_port())
    assert ask(url, proxied[len(url.replace("127.0.0.1", "localhost")) :], token)[0] == 200
    served.teardown()
    with pytest.raises(OSError):
        ask(url, "/health")


def test_a_compute_without_a_service_has_no_port():
    with pytest.raises(kt.SpecError, match="nothing was deployed"):
        kt.Compute().client_port()


def test_calls_go_to_a_url_of_the_users_own(served, project):
    module = project.module("def where():\n    import os\n    return os.environ['POD_NAME']\n")
    remote = kt.fn(module.where, name=f"where{project.suffix}")
    remote.to(kt.Compute(cpus="0.1"))
    front = remote.compute.client_port()
    compute = kt.Compute(cpus="0.1", endpoint=kt.Endpoint(url=f"127.0.0.1:{front}"))
    redirected = kt.fn(module.where, name=f"where{project.suffix}").to(compute)

    assert redirected.compute.endpoint == f"127.0.0.1:{front}"
    assert redirected.base_endpoint == f"http://127.0.0.1:{front}"
    assert redirected().startswith(f"where{project.suffix}-")
    remote.teardown()


def test_port_forward_leads_to_the_pod_until_interrupted(served):
    port = free_port()
    running = subprocess.Popen(
        [KT, "port-forward", served.service_name, str(port)], stdout=subprocess.PIPE, text=True
    )
    assert f"http://127.0.0.1:{port}" in running.stdout.readline()
    token = served.request_headers["Authorization"].partition(" ")[2]
    assert ask(f"http://127.0.0.1:{port}", "/ready", token)[0] == 200
    assert ask(f"http://127.0.0.1:{port}", "/ready")[0] == 401
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=TIMEOUT)
    assert running.returncode == 0


def test_port_forward_refuses_a_port_that_is_taken_or_leads_nowhere(served):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        completed = commands.kt("port-forward", served.service_name, port)
        assert completed.returncode == 1
        assert "is taken" in completed.stderr
    completed = commands.kt("port-forward", served.service_name, str(free_port()), "9999")
    assert completed.returncode == 1
    assert "nothing answers at port 9999" in completed.stderr


# ------------------------------------------------------------------------------------------ ssh


def test_a_command_runs_in_the_environment_of_a_worker(served):
    command = "echo $STAGE $KT_SERVICE_NAME; pwd; command -v python; echo wrong >&2; exit 7"
    completed = commands.kt("ssh", served.service_name, "--", command)

    assert completed.returncode == 7
    stage, folder, python = completed.stdout.splitlines()
    assert stage == f"test {served.service_name}"
    assert folder.endswith("/work")
    assert Path(python).parent == Path(sys.executable).parent
    assert "wrong" in completed.stderr


def test_words_of_a_command_stay_apart_and_input_arrives_whole(served):
    completed = commands.kt("ssh", served.service_name, "--", "printf", "%s|", "a b", "c")
    assert completed.stdout == "a b|c|"
    body = "0123456789abcdef" * 100_000
    assert kt_process("ssh", served.service_name, "--", "cat", input=body).stdout == body


def test_a_large_file_as_input_arrives_whole(served, tmp_path):
    file = tmp_path / "large"
    file.write_bytes(os.urandom(1 << 20) * 8)
    with file.open() as stdin:
        completed = kt_process("ssh", served.service_name, "--", "sha256sum", stdin=stdin)
    assert completed.stdout.split()[0] == hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_file_as_input_is_read_only_as_fast_as_the_command_takes_it(served, tmp_path):
    larger_than_memory = tmp_path / "sparse"
    larger_than_memory.touch()
    os.truncate(larger_than_memory, 64 << 30)
    with larger_than_memory.open() as stdin:
        completed = kt_process(
            "ssh", served.service_name, "--", "head -c 3 | wc -c; exit 7", stdin=stdin
        )
    assert (completed.stdout.strip(), completed.returncode) == ("3", 7), completed.stderr


def test_without_standard_input_a_command_has_none_either(served):
    completed = kt_process("ssh", served.service_name, "--", "wc -c", stdin=subprocess.DEVNULL)
    assert completed.stdout.strip() == "0"


def test_a_shell_has_a_terminal_and_ends_with_its_exit_code(served):
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(KT, [KT, "ssh", served.service_name])
    try:
        os.write(terminal, b"PS1=; test -t 0 && echo is a $STAGE terminal; exit 5\n")
        screen = read_until(terminal, b"is a test terminal\r\n")
        assert b"is a test terminal\r\n" in screen
    finally:
        drain(terminal)
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 5


def read_until(terminal, text):
    screen, deadline = b"", time.monotonic() + TIMEOUT
    while text not in screen and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            screen += os.read(terminal, 65536)
    return screen


def drain(terminal):
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:
        pass


def test_a_shell_needs_more_than_a_token_for_calls(served):
    token = served.request_headers["Authorization"].partition(" ")[2]
    address = served.base_endpoint.partition("//")[2]
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT)
    headers = {
        "Authorization": f"Bearer {token}",
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Key": "a" * 22 + "==",
        "Sec-WebSocket-Version": "13",
    }
    connection.request("GET", "/v1/shell", headers=headers)
    answer = connection.getresponse()
    assert answer.status == 401
    assert "user's own token" in answer.read().decode()
    connection.close()


def test_what_a_shell_started_ends_with_it(served):
    completed = commands.kt("ssh", served.service_name, "--", "setsid sleep 1000 & echo $!")
    pid = int(completed.stdout)
    deadline = time.monotonic() + TIMEOUT
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
