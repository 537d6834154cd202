"""Handles of a service that has fewer pods by now, since this or another program deployed it."""

import subprocess
import sys

import pytest

import kubetorch as kt
from kubetorch.sdk import backend

PROGRAM = """
import sys
import kubetorch as kt

def same(value):
    return value

def deploy(replicas):
    return kt.fn(same).to(kt.Compute(cpus="0.1", replicas=replicas))

if __name__ == "__main__":
    deploy(int(sys.argv[1]))
"""


@pytest.fixture
def deploy(shared_service_home, project, monkeypatch):
    program = project.write("shrinking.py", PROGRAM)
    monkeypatch.syspath_prepend(str(project.folder))

    def deploy(replicas, *, by):
        if by == "this program":
            return sys.modules["shrinking"].deploy(replicas)
        command = [sys.executable, str(program), str(replicas)]
        subprocess.run(command, cwd=project.folder, check=True, timeout=300)
        return None

    __import__("shrinking")
    yield deploy
    kt.fn(name="same").teardown()
    backend.route(backend.session(), "default", "same").close()
    del sys.modules["shrinking"]


@pytest.mark.parametrize("by", ["this program", "another program"])
def test_calls_go_to_the_pods_that_a_service_still_has(deploy, by):
    same = deploy(3, by="this program")
    assert same(1) == [1, 1, 1]
    configured = same.options(timeout=20)  # less than a pod is waited for that is to come

    deploy(2, by=by)
    assert configured(2) == [2, 2]
    assert same.spawn(3).result(timeout=60) == [3, 3]

    deploy(1, by=by)
    assert configured.spawn(4).result(timeout=60) == 4
    assert configured(5) == 5
    assert list(same.options(idempotency_key="key").map([1, 2, 3])) == [1, 2, 3]
