"""What a pod is given as environment wins over what its image says, as in Kubernetes."""

import os

import pytest

import kubetorch as kt

SOURCE = """
import os

def environ(*names):
    return [os.environ.get(name) for name in names]
"""


@pytest.fixture(scope="module", autouse=True)
def _service(shared_service_home):
    return shared_service_home


@pytest.fixture
def environ(project):
    handle = kt.fn(project.module(SOURCE).environ)
    yield handle
    handle.teardown()


IMAGE = {"WHO": "image", "BASE": "/image", "CHAIN": "$WHO-chain", "PATH": "/image/bin:$PATH"}


def test_variables_of_the_compute_win_over_those_of_the_image(environ):
    image = kt.Image().set_env_vars(IMAGE).run_bash('echo "$WHO $CHAIN" > said')
    env_vars = {"WHO": "compute", "UNDER": "$BASE/x", "PATH": "/compute/bin:$PATH"}
    environ.to(kt.Compute(cpus="0.1", image=image, env_vars=env_vars))

    who, chain, under, path = environ("WHO", "CHAIN", "UNDER", "PATH")
    # What an image says of its own variables it says before a pod is made of it.
    assert (who, chain, under) == ("compute", "image-chain", "/image/x")
    entries = path.split(":")
    assert entries.index("/compute/bin") < entries.index("/image/bin")
    assert entries.count("/compute/bin") == entries.count("/image/bin") == 1
    shown = environ.compute.run_bash(["cat said", "echo $WHO"])
    assert [output.strip() for _, output, _ in shown] == ["compute image-chain", "compute"]


def test_without_a_variable_of_the_compute_the_image_says_it(environ):
    image = kt.Image().set_env_vars(IMAGE)
    environ.to(kt.Compute(cpus="0.1", image=image, env_vars={"OTHER": "1"}))
    assert environ("WHO", "CHAIN") == ["image", "image-chain"]


def test_the_same_holds_for_a_dockerfile_and_for_secrets(environ, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN_OF_TEST", "secret")
    (tmp_path / "Dockerfile").write_text(
        "FROM python:3.11\nENV WHO=image\nENV TOKEN_OF_TEST=image\nENV KT_LOG_LEVEL=debug\n"
    )
    image = kt.Image.from_dockerfile(str(tmp_path / "Dockerfile"))
    secret = kt.Secret("of-test", env_vars=["TOKEN_OF_TEST"])
    env_vars = {"WHO": "compute", "KT_LOG_LEVEL": "error"}
    environ.to(kt.Compute(cpus="0.1", image=image, env_vars=env_vars, secrets=[secret]))

    assert environ("WHO", "TOKEN_OF_TEST", "KT_LOG_LEVEL") == ["compute", "secret", "error"]
    assert os.environ["TOKEN_OF_TEST"] == "secret"
