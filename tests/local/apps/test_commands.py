"""The command of an app is a program like any other: what it deploys and calls does happen."""

import json
import os
import subprocess
import sys
import urllib.request

import pytest

import kubetorch as kt
from tests.free_ports import free_port

JOB = """
import os
import kubetorch as kt

kt.app(cpus="0.1")

def double(x):
    return 2 * x, os.environ["KT_SERVICE_NAME"]

{guard}
    remote = kt.fn(double).to(kt.Compute(cpus="0.1"))
    print("called", remote(4), remote.map([1]).__next__()[0])
    found = kt.fn(name="double")
    print("found", found.compute.cpus, os.environ["KT_SERVICE_NAME"])
    remote.teardown()
    assert not kt.fn(double).compute
"""
#: An app that deploys itself, a class that it calls, and another app.
WEB = """
import http.server
import json
import os
import sys
import kubetorch as kt

@kt.compute(cpus="0.1", name="embedder")
class Embedder:
    def embed(self, text):
        print("embedding")
        return [len(text), text]

@kt.compute(cpus="0.1")
def upper(text):
    return text.upper()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        text = self.path.strip("/")
        found = Embedder.embed(text, stream_logs=False), upper(text, stream_logs=False)
        body = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

if __name__ == "__main__":
    ports = sys.argv[1:]
    for port in ports:
        command = " ".join([sys.executable, "web.py", port, *(p for p in ports if p != port)])
        made = kt.app(command, port=int(port), public=True, name=f"web{port}")
        made.to(kt.Compute(cpus="0.1"))
    Embedder.deploy()
    upper.deploy()
    if os.environ.get("KT_APP_PORT"):
        address = "127.0.0.1", int(ports[0])
        http.server.ThreadingHTTPServer(address, Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def service(service_home):
    return service_home


@pytest.mark.parametrize("guard", ['if __name__ == "__main__":', "if True:"])
def test_a_script_of_kt_run_deploys_and_calls(project, guard):
    project.write("job.py", JOB.format(guard=guard))
    completed = subprocess.run(
        [sys.executable, "-m", "kubetorch", "run", "python", "job.py"],
        cwd=project.folder,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "called [8, 'double'] 2\n" in completed.stdout
    assert "found 0.1 job\n" in completed.stdout


@pytest.mark.parametrize("username", ["", "ann"])
def test_apps_of_one_file_deploy_each_other_and_not_themselves(project, username, monkeypatch):
    monkeypatch.setenv("KT_USERNAME", username)
    first, second = free_port(), free_port()
    project.write("web.py", WEB)
    completed = project.run("web.py", str(first), str(second), timeout=120)
    assert completed.returncode == 0, completed.stdout + completed.stderr

    for port in (first, second):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/abc", timeout=30) as answer:
            assert json.load(answer) == [[3, "abc"], "ABC"]
    views = kt.globals.controller_client().list_workloads("default")
    prefix = f"{username}-" if username else ""
    assert all(view.spec.name.startswith(prefix) for view in views)
    generations = {view.spec.name.removeprefix(prefix): view.generation for view in views}
    assert generations.keys() == {f"web{first}", f"web{second}", "embedder", "upper"}
    # Each was deployed by the program, and once by the other.
    assert generations[f"web{first}"] <= 2
    assert generations[f"web{second}"] <= 2
