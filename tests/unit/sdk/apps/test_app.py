import pytest

import kubetorch as kt
from kubetorch.config.environment import RunRequest
from kubetorch.errors import SpecError


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
    for name, value in request.write().items():
        monkeypatch.setenv(name, value)

    app = kt.app("web", port=8000, cpus=1)

    assert (app.name, app.command, app.run_async) == ("web", "python serve.py", True)
    assert kt.app(cpus=1).name == "serve"


def test_a_name_that_contradicts_that_of_kt_run_is_refused(monkeypatch):
    request = RunRequest("python serve.py", "/shop/serve.py", "other", False)
    for name, value in request.write().items():
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
    from kubetorch.manifests import deployment
    from kubetorch.specs.workload import WorkloadSpec

    app = kt.app("uvicorn main:app", port=8000, health_check="/health").to(
        kt.Compute(), dryrun=True
    )
    spec = WorkloadSpec("default", "web", app._declared_ref(), app.compute.to_spec())
    manifest = deployment.of_workload(spec)
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    env = {one["name"]: one.get("value") for one in container["env"]}

    assert (env["KT_APP_PORT"], env["KT_APP_HEALTHCHECK"]) == ("8000", "/health")
    assert deployment.read(manifest).is_recreated
