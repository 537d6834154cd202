"""Images of real pods: environments made by uv, steps run once, failures, and views of files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

import kubetorch as kt
from benchmarks import wheels
from tests.local.user_project import UserProject

SOURCE = """
import importlib.metadata
import os
import subprocess
import sys

def values(*names):
    return {name: __import__(name).VALUE for name in names}

def version(name):
    return importlib.metadata.version(name)

def variable(name):
    return os.environ.get(name)

def read(path):
    with open(path) as file:
        return file.read()

def write(path, text):
    with open(path, "w") as file:
        file.write(text)

def program(*command):
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()

def prefix():
    return sys.prefix

def pid():
    return os.getpid()
"""
MAIN = "def main():\n    print(VALUE)\n"
#: Needs root here; elsewhere a user namespace does.
needs_views = pytest.mark.skipif(
    sys.platform != "linux"
    or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0,
    reason="this machine allows no namespaces of mounts",
)


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    for name, version in (("alpha", "1.0"), ("alpha", "2.0"), ("gamma", "1.0")):
        wheels.build(folder, name, version, f"VALUE = '{name} {version}'\n{MAIN}")
    wheels.build(folder, "beta", "1.0", f"VALUE = 'beta 1.0'\n{MAIN}", requires=["alpha"])
    wheels.build(folder, "numeric", "1.0", "import numpy\nVALUE = 1\n", requires=["numpy"])
    return folder


@pytest.fixture
def image(index) -> kt.Image:
    """An image whose requirements come from `index`."""
    return kt.Image().set_env_vars({"UV_FIND_LINKS": str(index), "UV_OFFLINE": "1"})


@pytest.fixture
def jobs(tmp_path):
    project = UserProject(tmp_path / "shop")
    yield project.module(SOURCE)
    project.forget()


@pytest.fixture
def deploy(jobs):
    """Deploys a function of the project, and tears down at the end."""
    handles = {}

    def deploy(name, image, *, service=None, **compute):
        handle = kt.fn(getattr(jobs, name), name=service or name)
        handles[handle.service_name] = handle
        return handle.to(kt.Compute(cpus="0.1", image=image, **compute))

    yield deploy
    for handle in handles.values():
        handle.teardown()


def folder_of(handle, home: Path) -> Path:
    return home / "pods" / "default" / handle.service_config["pods"][0]["name"]


def test_requirements_are_installed_beside_what_the_interpreter_has(deploy, image):
    values = deploy("values", image.pip_install(["alpha==1.0", "numeric"]))

    assert values("alpha", "numeric") == {"alpha": "alpha 1.0", "numeric": 1}
    # What the interpreter has is not installed again, and looks as it did.
    environment = Path(values.service_config["pods"][0] and prefix_of(deploy, image))
    assert not list(environment.glob("lib/python*/site-packages/numpy*"))
    assert deploy("version", image)("numpy") == version_here("numpy")


def prefix_of(deploy, image):
    return deploy("prefix", image)()


def version_here(name):
    from importlib.metadata import version

    return version(name)


def test_programs_of_packages_are_found(deploy, image):
    program = deploy("program", image.pip_install("alpha==1.0"))
    assert program("alpha") == "alpha 1.0"
    assert program("python", "-c", "import alpha; print(alpha.VALUE)") == "alpha 1.0"


def test_programs_of_the_interpreter_find_what_steps_install(deploy, image, tmp_path):
    test = tmp_path / "test_alpha.py"
    test.write_text("import alpha\ndef test_version(): assert alpha.VALUE == 'alpha 1.0'\n")
    with_alpha = image.pip_install("alpha==1.0")
    for steps in (with_alpha, with_alpha.run_bash("true")):
        program = deploy("program", steps)
        assert "1 passed" in program("pytest", "-q", "-p", "no:cacheprovider", str(test))


def test_a_second_service_with_the_same_steps_shares_the_environment(
    deploy, image, index, tmp_path
):
    image.pip_install(["alpha==1.0", "beta"])
    first = deploy("prefix", image, service="one")()
    hidden = index.rename(tmp_path / "hidden")
    try:  # so nothing can be installed any more
        assert deploy("prefix", image, service="two")() == first
    finally:
        hidden.rename(index)


def test_the_same_steps_run_nothing_and_keep_the_worker(deploy, image):
    image.pip_install("alpha==1.0")
    pid = deploy("pid", image)()
    assert deploy("pid", image)() == pid


def test_requirements_that_are_installed_together_are_one_step(deploy, image, capsys):
    for steps in (image, image.run_bash("true")):
        deploy("values", steps.pip_install(["alpha==1.0", "gamma"]))

        pip_lines = [
            line for line in capsys.readouterr().err.splitlines() if " pip install " in line
        ]
        assert len(pip_lines) == 1, pip_lines
        assert pip_lines[0].endswith(": RUN pip install alpha==1.0 gamma")


def test_an_added_step_is_live_in_the_same_pod_and_only_it_is_run(deploy, image, capsys):
    values = deploy("values", image.pip_install("alpha==1.0"))
    pod = values.service_config["pods"][0]
    capsys.readouterr()

    values = deploy("values", image.pip_install("gamma"))

    assert values("alpha", "gamma") == {"alpha": "alpha 1.0", "gamma": "gamma 1.0"}
    assert values.service_config["pods"][0]["pid"] == pod["pid"]
    shown = capsys.readouterr().err
    assert "gamma" in shown
    assert "alpha" not in shown


def test_another_version_of_what_is_installed_replaces_it_and_older_generations_keep_theirs(
    deploy, image
):
    values = deploy("values", kt.Image.from_spec(image.to_spec()).pip_install("alpha==1.0"))
    assert values("alpha") == {"alpha": "alpha 1.0"}
    values = deploy("values", kt.Image.from_spec(image.to_spec()).pip_install("alpha==2.0"))
    assert values("alpha") == {"alpha": "alpha 2.0"}


def test_a_failing_requirement_fails_the_deploy_with_its_output(deploy, image, capsys):
    values = deploy("values", image.pip_install("alpha==1.0"))

    with pytest.raises(kt.ImageStepError, match="nothing-like-this") as failed:
        deploy("values", image.pip_install("nothing-like-this"))

    assert failed.value.exit_code == 1
    assert "nothing-like-this" in failed.value.step
    assert "nothing-like-this" in capsys.readouterr().err
    assert values("alpha") == {"alpha": "alpha 1.0"}


def test_variables_are_expanded_in_order_and_reach_workers_and_their_programs(deploy):
    image = kt.Image().set_env_vars({"A": "1", "B": "$A/$HOME", "C": "$MISSING", "E": ""})
    variable = deploy("variable", image, env_vars={"HOME": "/h", "A": "0"})
    assert [variable(name) for name in "ABCE"] == ["0", "1//h", "$MISSING", ""]


def test_variables_that_are_taken_away_keep_their_values_in_the_pods_that_had_them(deploy, image):
    image.pip_install("alpha==1.0")
    first_image = kt.Image.from_spec(image.to_spec()).set_env_vars({"A": "1", "B": "$A/b"})
    deploy("program", first_image.set_env_vars({"PATH": "/x:$PATH"}))
    program = deploy("program", image.set_env_vars({"A": "2"}))
    assert program("sh", "-c", "echo $A $B") == "2 1/b"
    path = program("sh", "-c", "echo $PATH")
    # An environment's programs are found before what an earlier image said.
    assert path.index("/environments/") < path.index("/x:") < path.index("/bin:", path.index("/x:"))
    assert program("alpha") == "alpha 1.0"
    variable = deploy("variable", None, service="program")
    assert [variable(name) for name in "AB"] == ["2", "1/b"]


def test_variables_of_a_dockerfile_see_those_of_their_base(deploy, tmp_path):
    (tmp_path / "Dockerfile").write_text(
        "FROM x\nARG V=1\nENV V=2\nENV X=$V P=/x${B:+:$B} Q=/x${Q:+:$Q} R=${S:-word}\n"
    )
    image = kt.Image.from_dockerfile(tmp_path / "Dockerfile")
    variable = deploy("variable", image, env_vars={"B": "/base", "S": "given"})
    assert [variable(name) for name in "XPQR"] == ["2", "/x:/base", "/x", "given"]


def test_copies_land_in_the_working_directory(deploy, tmp_path):
    data = tmp_path / "data"
    (data / "inner").mkdir(parents=True)
    (data / "inner" / "a.txt").write_text("a")
    (data / "b.log").write_text("b")
    image = (
        kt.Image()
        .copy(str(data))
        .copy(str(data), "there")
        .copy(str(data), "own/data")
        .copy(str(data), "contents", contents=True, filter_options="--exclude=*.log")
        .copy(str(data / "b.log"), "~/file.txt")
    )
    read = deploy("read", image)
    for path in (
        "data/inner/a.txt",
        "own/data/inner/a.txt",
        "there/data/inner/a.txt",
        "contents/inner/a.txt",
    ):
        assert read(path) == "a"
    assert read("file.txt") == "b"
    with pytest.raises(FileNotFoundError):
        read("contents/b.log")

    (data / "inner" / "a.txt").write_text("edited")
    assert deploy("read", image)("data/inner/a.txt") == "edited"


@needs_views
def test_a_folder_that_is_copied_to_a_path_of_its_name_lies_there(deploy, tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "model.yaml").write_text("layers: 2")
    monkeypatch.chdir(tmp_path)
    read = deploy("read", kt.Image().copy("./configs", "/app/configs"))
    assert read("/app/configs/model.yaml") == "layers: 2"


@needs_views
def test_a_dockerfile_of_everyday_instructions(deploy, tmp_path):
    (tmp_path / "a.txt").write_text("added")
    with tarfile.open(tmp_path / "data.tar", "w") as archive:
        archive.add(tmp_path / "a.txt", "inner/a.txt")
    text = """
        FROM x
        LABEL of=me
        EXPOSE 80
        SHELL ["/bin/bash", "-o", "pipefail", "-c"]
        ADD a.txt /data/
        ADD data.tar /data
        RUN echo -n hi | tee /data/b.txt
    """
    (tmp_path / "Dockerfile").write_text(text)
    with pytest.warns(UserWarning, match="has no effect"):
        image = kt.Image.from_dockerfile(tmp_path / "Dockerfile")
    read = deploy("read", image)
    assert [read(f"/data/{name}") for name in ("a.txt", "inner/a.txt", "b.txt")] == [
        "added",
        "added",
        "hi",
    ]
    with pytest.raises(FileNotFoundError):
        read("/data/data.tar")
    (tmp_path / "Dockerfile").write_text(f"{text}RUN false | true\n")
    with pytest.warns(UserWarning), pytest.raises(kt.ImageStepError, match=r"false \| true"):
        deploy("read", kt.Image.from_dockerfile(tmp_path / "Dockerfile"))


def test_a_synced_package_is_importable_and_its_edits_are_live(deploy, tmp_path):
    package = tmp_path / "synced_package"
    package.mkdir()
    (package / "__init__.py").write_text("VALUE = 1\n")
    image = kt.Image().sync_package(str(package))
    assert deploy("values", image)("synced_package") == {"synced_package": 1}
    (package / "__init__.py").write_text("VALUE = 2\n")
    assert deploy("values", image)("synced_package") == {"synced_package": 2}


@needs_views
def test_what_commands_write_anywhere_is_the_pods_own(deploy, tmp_path):
    container_folder = "/kt-test-image"
    source = tmp_path / "f.txt"
    source.write_text("copied")
    image = (
        kt.Image()
        .run_bash(f"mkdir {container_folder} && echo -n hi > {container_folder}/a")
        .copy(str(source), f"{container_folder}/b")
    )
    read = deploy("read", image)
    assert (read(f"{container_folder}/a"), read(f"{container_folder}/b")) == ("hi", "copied")
    assert not Path(container_folder).exists()
    write = deploy("write", image, service="writer")
    write(f"{container_folder}/a", "other")
    assert read(f"{container_folder}/a") == "hi"


@needs_views
def test_commands_run_once_and_forced_ones_always(deploy):
    image = (
        kt.Image()
        .run_bash("echo once >> /kt-log")
        .run_bash("echo forced >> /kt-log", force=True)
        .run_bash("echo after >> /kt-log")
    )
    deploy("read", image)
    read = deploy("read", image)
    assert read("/kt-log").split() == ["once", "forced", "after", "forced", "after"]


@needs_views
def test_a_failing_command_keeps_the_steps_before_it_and_the_generation_that_serves(deploy, image):
    image.pip_install("alpha==1.0").run_bash("echo one >> /kt-log")
    read = deploy("read", image, service="same")
    broken = kt.Image.from_spec(image.to_spec()).run_bash("echo two >> /kt-log")
    broken.run_bash("echo the reason; exit 7")
    with pytest.raises(kt.ImageStepError, match="the reason") as failed:
        deploy("read", broken, service="same")
    assert failed.value.exit_code == 7
    assert read("/kt-log").split() == ["one", "two"]

    mended = kt.Image.from_spec(image.to_spec()).run_bash("echo two >> /kt-log")
    read = deploy("read", mended.run_bash("echo three >> /kt-log"), service="same")
    assert read("/kt-log").split() == ["one", "two", "three"]


@needs_views
def test_steps_taken_away_at_the_end_run_nothing(deploy):
    image = kt.Image().run_bash("echo one >> /kt-log")
    longer = kt.Image.from_spec(image.to_spec()).run_bash("echo two >> /kt-log")
    deploy("read", longer)
    assert deploy("read", image)("/kt-log").split() == ["one", "two"]


@needs_views
@pytest.mark.parametrize("installer", ["uv pip", "pip", "python -m pip"])
def test_what_a_command_installs_stays_in_its_pod(deploy, image, service, index, installer):
    pattern = "environments/*/lib/python*/site-packages/gamma.py"
    before = set(service.glob(pattern))
    image.pip_install("alpha==1.0").run_bash(
        f"{installer} install --no-index --find-links {index} beta gamma"
    )
    values = deploy("values", image)
    assert values("beta", "gamma") == {"beta": "beta 1.0", "gamma": "gamma 1.0"}
    assert set(service.glob(pattern)) == before


@needs_views
def test_commands_find_the_project_and_its_newest_files(deploy, jobs):
    project = Path(jobs.__file__).parent
    (project / "settings.txt").write_text("first")
    image = kt.Image().run_bash(f"cp {project.name}/settings.txt /kt-seen", force=True)
    deploy("read", image)
    (project / "settings.txt").write_text("second")
    assert deploy("read", image)("/kt-seen") == "second"


@needs_views
def test_a_command_in_the_background_goes_on_and_its_failure_is_seen(deploy):
    image = kt.Image().run_bash("(sleep 0.7; echo -n late > /kt-late; sleep 60) &")
    read = deploy("program", image)
    assert read("sh", "-c", "while ! cat /kt-late 2>/dev/null; do sleep 0.1; done") == "late"
    with pytest.raises(kt.ImageStepError, match="no such"):
        deploy("program", kt.Image().run_bash("echo no such; exit 4 &"), service="other")


def test_package_managers_are_skipped_with_a_warning(deploy, capsys):
    pid = deploy("pid", kt.Image().run_bash("sudo apt-get install -y nothing-like-this"))
    assert pid() > 0
    assert "KT_PACKAGE_MANAGERS" in capsys.readouterr().err


@needs_views
def test_an_agent_that_is_killed_in_a_step_runs_the_steps_again(deploy, image, service):
    fifo = service / "fifo"  # one of the places that pods and the machine share
    os.mkfifo(fifo)
    image.run_bash("echo one >> /kt-log").run_bash(
        f"if [ -e {fifo} ]; then uv pip install alpha==1.0; "
        f"echo killed > {fifo}; sleep 60; fi; echo two >> /kt-log"
    )

    def kill() -> None:
        fifo.read_text()
        fifo.unlink()
        (pod,) = kt.globals.session().find("default", ("read",)).pods
        os.kill(pod.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    read = deploy("read", image)
    killer.join()
    assert read("/kt-log").split() == ["one", "two"]


ELSEWHERE = """
import kubetorch as kt

image = kt.Image.from_dockerfile("Dockerfile").copy("./data").sync_package("./shown")

def main():
    import shown

    with open("data/text") as file:
        return file.read(), shown.VALUE
"""


def test_a_module_may_name_files_that_its_pods_do_not_have(tmp_path, monkeypatch):
    project = UserProject(tmp_path / "named")
    working_folder = tmp_path / "elsewhere"
    for folder in ("data", "shown"):
        (working_folder / folder).mkdir(parents=True)
    (working_folder / "Dockerfile").write_text("FROM python:3.12-slim\n")
    (working_folder / "data" / "text").write_text("read")
    (working_folder / "shown" / "__init__.py").write_text("VALUE = 5\n")
    monkeypatch.chdir(working_folder)
    module = project.module(ELSEWHERE)

    remote = kt.fn(module.main).to(kt.Compute(cpus="0.1", image=module.image))

    assert remote() == ["read", 5]
    remote.teardown()
    project.forget()
