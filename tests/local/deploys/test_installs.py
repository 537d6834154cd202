"""Steps and commands install into the pod's environment, whatever the user's variables say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kubetorch as kt
from benchmarks import wheels
from tests.local.user_project import UserProject

SOURCE = """
import os

def values(*names):
    return [__import__(name).VALUE for name in names]

def variables(*names):
    return {name: os.environ.get(name) for name in names}
"""
NAMES = ("alpha", "beta", "gamma")
UV = (
    "uv pip install --system",
    "uv -q pip install",
    "uv pip install --system --break-system-packages",
)
PIP = (
    "pip install",
    "pip3 install",
    f"pip3.{sys.version_info.minor} install",
    "python -m pip install",
    "python3 -m pip install --upgrade",
)
#: A package for each step of an image.
STEPS = tuple(f"step{number}" for number in range(max(len(UV), len(PIP))))


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of the user's own, and folders for what installers would put elsewhere."""
    own_folder = tmp_path_factory.mktemp("own")
    subprocess.run(
        ["uv", "venv", "-q", "--python", sys.executable, own_folder / "venv"], check=True
    )
    return own_folder


@pytest.fixture(scope="module", autouse=True)
def index(own_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where packages come from, as the user's variables say, beside all that says where to."""
    index = tmp_path_factory.mktemp("index")
    for name in (*NAMES, *STEPS):
        wheels.build(index, name, "1.0", f"VALUE = '{name} 1.0'\ndef main(): print(VALUE)\n")
    places = {
        "UV_PYTHON": str(own_folder / "venv" / "bin" / "python"),
        "UV_SYSTEM_PYTHON": "1",
        "UV_PROJECT_ENVIRONMENT": str(own_folder / "venv"),
        "PIP_TARGET": str(own_folder / "target"),
        "PIP_PREFIX": str(own_folder / "prefix"),
        "PIP_ROOT": str(own_folder / "root"),
        "PIP_PYTHON": str(own_folder / "venv" / "bin" / "python"),
        "PIP_USER": "1",
        "PIP_REQUIRE_VIRTUALENV": "1",
        "VIRTUAL_ENV": str(own_folder / "venv"),
        "CONDA_PREFIX": str(own_folder / "venv"),
        "CONDA_DEFAULT_ENV": "own",
        "PYTHONUSERBASE": str(own_folder / "user"),
    }
    sources = {"UV_FIND_LINKS": str(index), "UV_OFFLINE": "1", "UV_NO_INDEX": "1"}
    sources |= {"PIP_FIND_LINKS": str(index), "PIP_NO_INDEX": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (places | sources).items():
            patch.setenv(name, value)
        yield index


@pytest.fixture(scope="module", autouse=True)
def service(index: Path, shared_service_home: Path) -> Path:
    del index  # its variables are those of the service, and of its pods
    return shared_service_home


@pytest.fixture
def values(tmp_path: Path) -> Iterator[kt.Fn]:
    project = UserProject(tmp_path / "shop")
    handle = kt.fn(project.module(SOURCE).values)
    yield handle
    handle.teardown()
    project.forget()


def found_in(own_folder: Path) -> list[Path]:
    """What was installed where the user's variables say."""
    return [path for name in (*NAMES, *STEPS) for path in own_folder.rglob(f"{name}*")]


def test_requirements_are_installed_for_the_pod(values, own_folder):
    values.to(kt.Compute(cpus="0.1", image=kt.Image().pip_install(["alpha", "beta"])))

    assert values("alpha", "beta") == ["alpha 1.0", "beta 1.0"]
    assert found_in(own_folder) == []


@pytest.mark.parametrize("installers", [UV, PIP], ids=["uv", "pip"])
def test_commands_of_an_image_install_for_the_pod(values, own_folder, installers):
    image = kt.Image()
    packages = STEPS[: len(installers)]
    for installer, package in zip(installers, packages, strict=True):
        image.run_bash(f"{installer} {package}")
    values.to(kt.Compute(cpus="0.1", image=image))

    assert values(*packages) == [f"{package} 1.0" for package in packages]
    assert found_in(own_folder) == []


def test_an_image_that_says_so_itself_installs_for_the_pod_too(values, own_folder, tmp_path):
    (tmp_path / "Dockerfile").write_text(
        "FROM python:3.11\n"
        f"ENV UV_SYSTEM_PYTHON=1 VIRTUAL_ENV={own_folder}/venv PIP_TARGET={own_folder}/target\n"
        f"ENV PATH={own_folder}/venv/bin:$PATH\n"
        "RUN uv pip install alpha\n"
        "RUN pip install beta\n"
        "RUN python -m pip install gamma\n"
    )
    image = kt.Image.from_dockerfile(tmp_path / "Dockerfile")
    values.to(kt.Compute(cpus="0.1", image=image))

    assert values("alpha", "beta", "gamma") == ["alpha 1.0", "beta 1.0", "gamma 1.0"]
    assert found_in(own_folder) == []


@pytest.mark.parametrize("image", [None, kt.Image().pip_install("alpha")], ids=["bare", "image"])
def test_commands_in_a_pod_install_for_it_alone(values, own_folder, service, image):
    values.to(kt.Compute(cpus="0.1", image=image))
    shared = "environments/*/lib/python*/site-packages/*"
    before = set(service.glob(shared))
    for number, installer in enumerate((*UV, *PIP)):
        name = ("beta", "gamma")[number % 2]
        command = f"{installer} {name}" + (" --force-reinstall" if number > 1 else "")
        ((status, output, error),) = values.compute.run_bash(command)
        assert status == 0, (installer, output, error)
    assert values.compute.pip_install("alpha") is not False

    assert values("beta", "gamma") == ["beta 1.0", "gamma 1.0"]
    assert found_in(own_folder) == []
    assert {path.name for path in set(service.glob(shared)) - before} <= {"__pycache__"}


def test_workers_have_what_the_user_declares(tmp_path, own_folder):
    project = UserProject(tmp_path / "shop")
    handle = kt.fn(project.module(SOURCE).variables)
    image = kt.Image().set_env_vars({"PIP_TARGET": "/declared"}).run_bash("true")
    env_vars = {"UV_PROJECT_ENVIRONMENT": "/given"}
    try:
        handle.to(kt.Compute(cpus="0.1", image=image, env_vars=env_vars))
        variables = handle("PIP_TARGET", "UV_PROJECT_ENVIRONMENT", "UV_PYTHON", "UV_FIND_LINKS")
    finally:
        handle.teardown()
        project.forget()

    expected = ["/declared", "/given", None, os.environ["UV_FIND_LINKS"]]
    assert list(variables.values()) == expected
