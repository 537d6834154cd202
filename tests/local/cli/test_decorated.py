"""`kt deploy` of files whose functions and classes are decorated."""

import json
import subprocess
import sys

import pytest

from tests.local import commands

SOURCE = """
import os
import kubetorch as kt


@kt.compute(cpus="0.1", name="fact")
def factorial(n):
    return 1 if n < 2 else n * factorial(n - 1)


OUTSIDE = kt.Endpoint(url="https://outside")


@kt.async_
@kt.compute(cpus="0.1", env_vars={"STAGE": "test"})
@kt.autoscale(min_scale=1, max_scale=2)
def stage():
    return os.environ["STAGE"]


@kt.autoscale(min_scale=1)
@kt.compute(cpus="0.1")
class Counter:
    def __init__(self, start=0):
        self.n = start

    def add(self, k):
        self.n += k
        return self.n


@kt.compute(cpus="0.1", endpoint=OUTSIDE)
def train():
    pass


def plain(n):
    return factorial(n)


if __name__ == "__main__":
    import asyncio

    print(factorial(4), asyncio.run(stage()), Counter.add(2))
"""
CALLER = """
import asyncio

from work import Counter, factorial, stage

print(factorial(4), asyncio.run(stage()), asyncio.iscoroutinefunction(stage), Counter.add(2))
"""


def kt(*arguments, cwd):
    return commands.kt(*arguments, cwd=cwd, NO_COLOR="1")


@pytest.fixture(scope="module")
def project(shared_service_home, tmp_path_factory):
    """A folder whose `work.py` is deployed."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "pyproject.toml").touch()
    (folder / "work.py").write_text(SOURCE.replace("endpoint=OUTSIDE", "endpoint=None"))
    completed = kt("deploy", "work.py", cwd=folder)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert completed.stdout.splitlines()[:4] == ["• fact", "• stage", "• counter", "• train"]
    assert "Deploying fact..." in completed.stdout
    assert "Successfully deployed counter." in completed.stdout
    return folder


def python(folder, name, source=None):
    if source is not None:
        (folder / name).write_text(source)
    completed = commands.python(name, cwd=folder)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout.splitlines()[-1]


def test_what_was_deployed_is_called_by_its_name_from_the_file_and_from_others(project):
    assert python(project, "work.py") == "24 test 2"
    assert python(project, "caller.py", CALLER) == "24 test False 4"


def test_in_its_own_pod_a_decorated_function_is_itself_and_in_others_it_is_the_service(project):
    completed = kt("deploy", "work.py:plain", "--compute", '{"cpus": "0.1"}', cwd=project)
    assert completed.returncode == 0, completed.stderr

    # `factorial` calls itself there, without asking anybody.
    for name in ("fact", "plain"):
        completed = kt("call", name, "-a", "[5]", "--json", cwd=project)
        assert (completed.returncode, json.loads(completed.stdout)) == (0, 120), completed.stderr


def test_one_name_of_a_file_is_deployed_alone(project):
    completed = kt("deploy", "work.py:stage", "--json", cwd=project)

    assert completed.returncode == 0, completed.stderr
    assert [service["name"] for service in json.loads(completed.stdout)] == ["stage"]


def test_options_go_before_what_decorators_say(project):
    compute = '{"cpus": "0.1", "env_vars": {"STAGE": "other"}, "inactivity_ttl": "1h"}'

    completed = kt("deploy", "work.py:stage", "--compute", compute, "--json", cwd=project)

    assert completed.returncode == 0, completed.stderr
    assert json.loads(completed.stdout)[0]["inactivity_ttl"] == "1h"
    assert json.loads(kt("call", "stage", "--json", cwd=project).stdout) == "other"


def test_the_others_are_deployed_when_one_cannot_be(project):
    (project / "mixed.py").write_text(SOURCE)

    completed = kt("deploy", "mixed.py", cwd=project)

    assert completed.returncode == 1
    assert "Successfully deployed fact." in completed.stdout
    assert "train cannot be launched" in completed.stderr
    assert "https://outside" in completed.stderr


def test_a_wrong_decorator_is_shown_at_its_line(project):
    (project / "wrong.py").write_text(
        "import kubetorch as kt\n\n\n@kt.compute(cpus='2x')\ndef f():\n    pass\n"
    )

    completed = kt("deploy", "wrong.py", cwd=project)

    assert completed.returncode == 1
    assert "cpus is '2x'" in completed.stderr
    program = [sys.executable, "wrong.py"]
    completed = subprocess.run(program, cwd=project, capture_output=True, text=True, timeout=60)
    assert 'wrong.py", line 4' in completed.stderr


def test_an_autoscaled_service_is_listed_as_such(project):
    (row,) = [line for line in kt("list", cwd=project).stdout.splitlines() if "counter" in line]
    assert row.split()[:4] == ["counter", "autoscaled", "Ready", "1"]
    described = kt("describe", "counter", cwd=project).stdout
    assert "1 ready, as many as calls need" in described
