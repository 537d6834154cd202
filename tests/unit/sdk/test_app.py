"""Which pods of an app are followed to their end."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import kubetorch as kt
from kubetorch.config.environment import RunRequest
from kubetorch.errors import SpecError
from kubetorch.sdk import app, service_logs
from kubetorch.sdk.deploys.source import ProjectRef
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import PodView, WorkloadView


def test_a_first_argument_with_a_space_is_the_command():
    app = kt.app("uvicorn main:app", port="8000", health_check="/health", name="My_Web")
    assert isinstance(app, kt.App)
    assert isinstance(app, kt.Module)
    assert (app.command, app.port, app.name) == ("uvicorn main:app", 8000, "myweb")
    assert app.is_public is False
    assert app.compute is None


def test_it_is_called_like_the_file_of_its_command_or_else_of_its_program():
    assert kt.app("python jobs/train.py --x").name == "train"
    assert kt.app("uvicorn main:app").name == "testapp"


def test_other_arguments_are_those_of_a_compute():
    app = kt.app("uvicorn main:app", port=8000, cpus="0.5", inactivity_ttl="5m")
    assert (app.compute.cpus, app.compute.inactivity_ttl) == ("0.5", "5m")
    with pytest.raises(TypeError):
        kt.app("uvicorn main:app", cpu=1)


def test_without_a_command_nothing_happens_unless_kt_run_asks(monkeypatch):
    assert kt.app(port=8000, cpus=1) is None
    assert kt.app("web") is None
    request = RunRequest("python serve.py", "/shop/serve.py", None, True)
    for name, value in request.to_environment().items():
        monkeypatch.setenv(name, value)

    app = kt.app("web", port=8000, cpus=1)

    assert (app.name, app.command, app.run_async) == ("web", "python serve.py", True)
    assert kt.app(cpus=1).name == "serve"


def test_a_name_that_contradicts_that_of_kt_run_is_refused(monkeypatch):
    request = RunRequest("python serve.py", "/shop/serve.py", "other", False)
    for name, value in request.to_environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"'web'.*'other'"):
        kt.app("web")
    assert kt.app("other").name == "other"
    assert kt.app().name == "other"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 0}, "port is 0"),
        ({"port": 65536}, "port is 65536"),
        ({"port": "web"}, "port is 'web'"),
        ({"port": True}, "port is True"),
        ({"port": 2.5}, "port is 2.5"),
        ({"health_check": "/x"}, "needs a port"),
        ({"port": 80, "health_check": "x"}, "health_check is 'x'"),
        ({"port": 80, "health_check": "/x y"}, "health_check is"),
        ({"port": 80, "health_check": "/x\r\nHost: a"}, "health_check is"),
        ({"public": "yes"}, "public"),
    ],
)
def test_impossible_values_are_refused(options, message):
    with pytest.raises((SpecError, TypeError), match=message):
        kt.app("uvicorn main:app", **options)


@pytest.mark.parametrize("command", ["", "  ", None, 3, "a\0b"])
def test_impossible_commands_are_refused(command):
    with pytest.raises(SpecError, match="the command is"):
        kt.App(None, command, None, name="x")


def test_an_app_cannot_be_loaded_by_its_name():
    with pytest.raises(ValueError, match="cannot be loaded"):
        kt.App.from_name("web")


def test_arguments_of_a_constructor_are_refused():
    with pytest.raises(SpecError, match="is an app"):
        kt.app("uvicorn main:app").to(kt.Compute(), init_args={"x": 1}, dryrun=True)
    with pytest.raises(TypeError, match="not callable"):
        kt.app("uvicorn main:app")()


def test_the_container_is_told_port_and_health_check():
    from kubetorch.manifests import desired_pods, rendering
    from kubetorch.specs.workload import WorkloadSpec

    app = kt.app("uvicorn main:app", port=8000, health_check="/health").to(
        kt.Compute(), dryrun=True
    )
    spec = WorkloadSpec("default", "web", app._declared_ref(), app.compute.to_spec())
    manifest = rendering.of_workload(spec)
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    env = {variable["name"]: variable.get("value") for variable in container["env"]}

    assert (env["KT_APP_PORT"], env["KT_APP_HEALTHCHECK"]) == ("8000", "/health")
    assert desired_pods.read(manifest).is_recreated


@pytest.fixture
def shop(tmp_path):
    (tmp_path / "shop" / "jobs").mkdir(parents=True)
    (tmp_path / "shop" / "serve.py").touch()
    (tmp_path / "shop" / "jobs" / "train.py").touch()
    return tmp_path / "shop"


def project(folder, only=None):
    return ProjectRef("serve", folder=folder, only=only, name="shop", source_file="serve.py")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("uvicorn m:app", True),
        ("train", False),
        (" train ", False),
        ("a\tb", True),
        ("./serve.sh", True),
        ("/usr/bin/serve", True),
    ],
)
def test_a_command_is_told_from_a_name_by_a_space_or_a_slash(text, expected):
    assert app.is_command(text) is expected


def test_one_word_with_a_slash_or_a_port_is_a_command(monkeypatch):
    monkeypatch.delenv("KT_RUN", raising=False)

    assert kt.app("./serve.sh", port=8000).command == "./serve.sh"
    assert kt.app("./train.sh").command == "./train.sh"
    assert kt.app("serve", port=8000).command == "serve"
    assert kt.app("train") is None


def test_one_word_with_a_port_is_the_name_that_kt_run_gives_its_command(monkeypatch):
    for name, value in {
        "KT_RUN": "1",
        "KT_RUN_CMD": "uvicorn m:app",
        "KT_RUN_FILE": "m.py",
    }.items():
        monkeypatch.setenv(name, value)

    web_app = kt.app("web", port=8000)

    assert (web_app.name, web_app.command) == ("web", "uvicorn m:app")


def test_the_python_file_of_a_command_is_its_first_word_of_that_kind():
    assert app.python_file("fastapi run app/main.py other.py") == "app/main.py"
    assert app.python_file("uvicorn m:app") is None


def test_an_app_runs_where_the_program_was_started(shop):
    assert app.run_folder(project(shop), shop) == ""
    assert app.run_folder(project(shop), shop / "jobs") == "jobs"
    assert app.run_folder(project(shop), Path("/")) == ""
    assert app.run_folder(ProjectRef("serve"), shop) is None


def test_an_app_of_which_nothing_travels_runs_in_the_last_folder_of_its_image(shop):
    assert app.run_folder(ProjectRef("serve"), shop, "/app") == "/app"
    assert app.run_folder(project(shop), shop, "/app") == ""


def test_what_works_here_as_it_stands_is_kept(shop):
    for command in ("python serve.py", "./serve.py --x jobs/train.py", "echo 'a  b' | cat"):
        assert app.in_pod(command, project(shop), shop, "") == command


def test_absolute_paths_become_those_of_the_pod(shop):
    command = f"python {shop}/jobs/train.py --out /tmp/{shop.name}"
    expected = f"python jobs/train.py --out /tmp/{shop.name}"
    assert app.in_pod(command, project(shop), shop, "") == expected
    assert app.in_pod(f"{shop}/serve.py", project(shop), shop, "") == "./serve.py"


def test_paths_of_another_folder_here_are_found_from_the_one_there(shop):
    command = app.in_pod("python shop/jobs/train.py", project(shop), shop.parent, "")
    assert command == "python jobs/train.py"


def test_in_a_working_directory_of_its_own_the_project_lies_below(shop):
    command = app.in_pod("python jobs/train.py .", project(shop), shop, None)
    assert command == "python shop/jobs/train.py ."


def test_a_file_that_would_not_travel_is_refused(shop):
    (shop / "main.py").touch()
    where = project(shop, only="serve.py")
    assert app.in_pod("python serve.py", where, shop, "") == "python serve.py"
    with pytest.raises(SpecError, match=r"main\.py would not be sent"):
        app.in_pod("uvicorn main:app", where, shop, "")


def test_pods_that_newer_ones_have_replaced_are_not_followed() -> None:
    spec = WorkloadSpec("ns", "job", CallableRef("fn", "job", "m", "job"))
    pods = (
        PodView(name="new", ordinal=0, phase="Running", generation=2),
        PodView(name="reconnects", ordinal=1, phase="Running"),
        PodView(name="old", ordinal=0, phase="Running", generation=1),
        PodView(name="ends", ordinal=1, phase="Terminating"),
    )
    view = WorkloadView(spec=spec, generation=2, status="Ready", pods=pods)
    assert [pod.name for pod in service_logs.of_generation(view)] == ["new", "reconnects"]


def test_a_pickled_app_keeps_what_it_runs():
    app = kt.app("python serve.py", name="serve", port=8000, health_check="/up")
    unpickled_app = pickle.loads(pickle.dumps(app))
    assert (unpickled_app.command, unpickled_app.port, unpickled_app.is_public) == (
        "python serve.py",
        8000,
        False,
    )
    assert (unpickled_app.name, unpickled_app.run_async) == ("serve", app.run_async)
