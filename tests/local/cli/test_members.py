"""What `kt call` and the lines of `kt describe` reach of functions and classes of every shape."""

import json
import os
import shlex
import subprocess
import sys
import textwrap

import pytest

from tests.local import commands

BASE = """
class Base:
    @property
    def size(self):
        return 1

    def inherited(self, factor=3):
        return factor * 7
"""
SOURCE = """
import functools

from bases import Base


def pos(a, b, /):
    return [a, b]


def numbers(n: int):
    for i in range(n):
        yield i


def export(n, serialization="csv", workers=1, async_=False, **more):
    return [n, serialization, workers, async_, more]


class Heir(Base):
    limit = 3


class PropFirst:
    @property
    def size(self):
        return 1

    @functools.cached_property
    def length(self):
        return 2

    def double(self, n: int):
        return 2 * n


class OnlyCall:
    def __call__(self, n: int):
        return n + 41


class Hidden:
    def name(self):
        return "its name"

    def teardown(self, workers):
        return f"{workers} torn"

    def run_bash(self, command):
        return f"not run: {command}"
"""
TARGETS = ("pos", "numbers", "export", "Heir", "PropFirst", "OnlyCall", "Hidden")


def kt(*arguments, cwd=None):
    return commands.kt(*arguments, cwd=cwd, NO_COLOR="1")


def shown(*arguments):
    completed = kt(*arguments, "--json")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return json.loads(completed.stdout)


@pytest.fixture(scope="module")
def project(shared_service_home, tmp_path_factory):
    """A folder with `odd.py`, all of it deployed."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "pyproject.toml").write_text("")
    (folder / "bases.py").write_text(BASE)
    (folder / "odd.py").write_text(SOURCE)
    targets = [f"odd.py:{name}" for name in TARGETS]
    completed = kt("deploy", *targets, "--compute", '{"cpus": "0.1"}', cwd=folder)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return folder


# ---------------------------------------------------------------------------------------- kt call


def test_the_methods_that_a_handle_hides_are_called(project):
    assert shown("call", "hidden:name") == "its name"
    assert shown("call", "hidden:teardown", "-k", '{"workers": 3}') == "3 torn"
    assert shown("call", "hidden:run_bash", "-a", '["id"]') == "not run: id"
    assert shown("call", "onlycall:__call__", "-a", "[1]") == 42


@pytest.mark.parametrize(
    "member", ["ssh", "to", "compute", "deploy_async", "__init__", "_callers", "size", "nope"]
)
def test_what_is_no_method_of_the_class_is_not_found(project, member):
    completed = kt("call", f"propfirst:{member}", "-a", "[]")
    assert (completed.returncode, completed.stdout) == (1, "")
    assert member in completed.stderr
    assert 'File "' not in completed.stderr
    assert shown("call", "propfirst:double", "-a", "[2]") == 4


def test_a_hint_is_shown_once(project):
    error = kt("call", "propfirst:doubel").stderr
    assert error.count("has no method 'doubel'") == 1
    assert error.count("did you mean double?") == 1


def test_all_keywords_are_the_users_own(project):
    keywords = {"serialization": "parquet", "workers": 4, "async_": True, "self": 1, "debug": 2}
    expected = [1, "parquet", 4, True, {"self": 1, "debug": 2}]
    assert shown("call", "export", "-a", "[1]", "-k", json.dumps(keywords)) == expected
    refused = kt("call", "numbers", "-a", "[1]", "-k", '{"async_": true}')
    assert refused.returncode == 1
    assert "async_" in refused.stderr


# ------------------------------------------------------------------------- handles by their names


@pytest.mark.parametrize(
    "handle",
    ["kt.fn(name='export')", "pickle.loads(pickle.dumps(kt.fn(name='export')))"],
)
def test_a_handle_without_the_function_knows_its_parameters(project, handle):
    call = f"print({handle}(1, serialization='parquet', workers=4))"
    assert python(f"import pickle\nimport kubetorch as kt\n{call}", project) == (
        "[1, 'parquet', 4, False, {}]"
    )


def test_a_handle_without_the_class_knows_the_parameters_of_its_methods(project):
    program = "import kubetorch as kt\nhidden = kt.cls(name='hidden')\n"
    assert python(program + "print(hidden['teardown'](workers=2))", project) == "2 torn"
    refused = "try: hidden['name'](workers=2)\nexcept kt.SpecError as error: print(error)"
    assert "workers= belongs to distributed services" in python(program + refused, project)


def test_a_handle_is_no_sequence(project):
    program = "import kubetorch as kt\ntry: list(kt.cls(name='hidden'))\n"
    assert "[...] takes the name" in python(program + "except TypeError as e: print(e)", project)


# ----------------------------------------------------------------------------------- kt describe


@pytest.mark.parametrize(
    ("service", "expected", "printed"),
    [
        ("pos", [1, 1], "[1, 1]"),
        ("numbers", {"yield": 0}, "0"),
        ("heir", 21, "21"),
        ("propfirst", 2, "2"),
        ("onlycall", 42, "42"),
        ("hidden", "its name", "its name"),
        ("export", [1, "csv", 1, False, {}], "[1, 'csv', 1, False, {}]"),
    ],
)
def test_the_lines_of_describe_work_as_they_stand(project, tmp_path, service, expected, printed):
    described = shown("describe", service)
    lines = shell(described["curl"], tmp_path).splitlines()
    assert json.loads(lines[0]) == expected
    assert python(described["python"], tmp_path) == printed


def test_the_description_has_what_can_be_called_and_nothing_else(project):
    signatures = {name: shown("describe", name)["signatures"] for name in ("heir", "propfirst")}
    assert signatures == {
        "heir": ["def inherited(self, factor=3)"],
        "propfirst": ["def double(self, n: int)"],
    }


def python(program, folder):
    completed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.strip()


def shell(line, folder):
    """What a command prints where `kt` is ours."""
    command = folder / "kt"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kubetorch "$@"\n')
    command.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path}
    completed = subprocess.run(f"{line} --silent", shell=True, env=environ, capture_output=True)
    return completed.stdout
