"""`kt.Image` and `kt.images`: what users write, and the steps that it becomes."""

import pickle

import pytest

import kubetorch as kt
from kubetorch.config.settings import DEFAULT_IMAGE, config


def lines(image):
    return image.contents.splitlines()[1:]


def test_methods_chain_and_change_the_image_itself():
    image = kt.Image()
    assert image.pip_install("a").run_bash("b").set_env_vars({"C": 1}) is image
    assert [step.text("pip install") for step in image.to_spec().steps] == [
        "RUN pip install a",
        "RUN b",
        "ENV C 1",
    ]


@pytest.mark.parametrize(
    ("requirement", "written"),
    [
        ("numpy", "numpy"),
        ("numpy==2.0", "numpy==2.0"),
        ("numpy>=2.0", "'numpy>=2.0'"),
        ("a[b,c] >= 1, < 2", "'a[b,c] >= 1, < 2'"),
        ("'numpy > 2.0'", "'numpy > 2.0'"),
        ("a==1; python_version<'3'", "\"a==1; python_version<'3'\""),
        ("a>=1 ; extra == 'x' --pre", "\"a>=1 ; extra == 'x'\" --pre"),
        ('a>=1; python_version < "3"', "'a>=1; python_version < \"3\"'"),
        ("--no-build-isolation flash-attn==2.7.3", "--no-build-isolation flash-attn==2.7.3"),
        ("flash-attn>=2 --no-build-isolation", "'flash-attn>=2' --no-build-isolation"),
        ("torch>=2.0 --index-url https://x.org/w", "'torch>=2.0' --index-url https://x.org/w"),
        ("numpy>=1.20 pandas >= 2,<3 scipy", "'numpy>=1.20' 'pandas >= 2,<3' scipy"),
        ("--pre torch>=2", "--pre 'torch>=2'"),
        ("torch>=$V --index-url $URL", '"torch>=$V" --index-url $URL'),
        ("'numpy > 2.0' pandas>2", "'numpy > 2.0' 'pandas>2'"),
        ("-c 'a b>=2 c'", "-c 'a b>=2 c'"),
        ("-r all.txt > log.txt 2>&1", "-r all.txt > log.txt 2>&1"),
        ("a > log.txt", "a > log.txt"),
        ("a && echo b>2", "a && echo b>2"),
    ],
)
def test_comparisons_are_no_redirections(requirement, written):
    assert (
        kt.Image(install_cmd="pip")
        .pip_install(requirement)
        .contents.endswith(f"RUN pip {written}\n")
    )


def test_one_step_for_each_requirement_and_command():
    image = kt.Image(install_cmd="pip").pip_install(["a", "b"], force=True).run_bash(["c", "d &"])
    assert lines(image) == ["RUN pip a # force", "RUN pip b # force", "RUN c", "RUN d &"]


@pytest.mark.parametrize("name", ["pytorch/pytorch:2.0.0", "python:3.12"])
def test_a_name_that_is_a_reference_is_the_base(name):
    image = kt.Image(name)
    assert (image.name, image.image_id) == (None, name)


def test_the_default_base_is_a_setting():
    assert kt.Image("docker-latest").contents == f"FROM {config.default_image}\n"
    config.default_image = "registry.local/own:1"
    try:
        assert kt.Image().contents == "FROM registry.local/own:1\n"
    finally:
        config.unset("default_image")


def test_a_base_is_set_once():
    assert kt.Image().from_docker("python:3.12").image_id == "python:3.12"
    with pytest.raises(ValueError, match=r"python:3\.12"):
        kt.Image(image_id="python:3.12").from_docker("other:1")


@pytest.mark.parametrize(
    "broken",
    [
        lambda: kt.Image(image_id="UPPER case"),
        lambda: kt.Image(name=""),
        lambda: kt.Image().pip_install([1]),
        lambda: kt.Image().pip_install({"a": 1}),
        lambda: kt.Image().run_bash(" "),
        lambda: kt.Image().set_env_vars({"1A": "x"}),
        lambda: kt.Image().set_env_vars({"A": None}),
        lambda: kt.Image().copy("/nowhere/at/all"),
        lambda: kt.Image().sync_package("no_such_package_at_all"),
    ],
)
def test_what_cannot_be_is_said_where_it_was_written(broken):
    with pytest.raises(kt.SpecError):
        broken()


def test_copies_have_absolute_sources(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    image = kt.Image().copy("data").copy("file", "/etc/file").copy("data", "d", contents=True)
    image.copy("data", "in").copy("data", ".").copy("data", "data", contents=True)
    assert lines(image) == [
        f"COPY {tmp_path}/data data",
        f"COPY {tmp_path}/file /etc/file",
        f"COPY {tmp_path}/data d",
        f"COPY {tmp_path}/data in/data",
        f"COPY {tmp_path}/data data",
        f"COPY {tmp_path}/data data",
    ]
    with pytest.warns(DeprecationWarning):
        assert kt.Image().rsync("data") == kt.Image().copy("data")


def test_images_are_values():
    image = kt.Image(image_id="python:3.12").pip_install("a").run_bash("b", force=True)
    assert pickle.loads(pickle.dumps(image)) == image
    assert eval(repr(image), {"Image": kt.Image}) == image
    assert kt.Image.from_spec(image.to_spec()) == image


@pytest.mark.parametrize(
    ("image", "name", "reference"),
    [
        (kt.images.debian(), "debian", DEFAULT_IMAGE),
        (kt.images.Debian(), "debian", DEFAULT_IMAGE),
        (kt.images.Ubuntu(), "ubuntu", "ghcr.io/run-house/ubuntu:v1"),
        (kt.images.python("3.12"), "python312", "python:3.12-slim"),
        (kt.images.Python310(), "python310", "python:3.10-slim"),
        (kt.images.Python311(), "python311", "python:3.11-slim"),
        (kt.images.Ray(), "ray", "rayproject/ray:latest"),
        (kt.images.ray("2.9"), "ray29", "rayproject/ray:2.9"),
        (kt.images.Pytorch2312(), "pytorch2312py3", "nvcr.io/nvidia/pytorch:23.12-py3"),
    ],
)
def test_ready_images(image, name, reference):
    assert (image.name, image.image_id) == (name, reference)


def test_each_ready_image_is_a_new_one():
    kt.images.debian().pip_install("a")
    assert kt.images.debian().to_spec().steps == ()


def test_a_requirement_of_two_lines_is_refused():
    with pytest.raises(kt.SpecError, match="more than one line"):
        kt.Image().pip_install("numpy\nRUN rm -rf /")


@pytest.mark.parametrize(
    "dest", ["/app/configs", "/app/configs/", "configs", "~/configs", "a/configs"]
)
def test_a_folder_lies_at_a_path_that_ends_in_its_own_name(tmp_path, monkeypatch, dest):
    (tmp_path / "configs").mkdir()
    monkeypatch.chdir(tmp_path)

    (line,) = lines(kt.Image().copy("./configs", dest))

    path_in_pod = dest.removeprefix("~/").rstrip("/")
    assert line.rstrip("/") == f"COPY {tmp_path}/configs {path_in_pod}"


@pytest.mark.parametrize("dest", ["/app", "/configs/app", "/app/configs2", "/app/my-configs"])
def test_a_folder_is_put_into_any_other_path(tmp_path, monkeypatch, dest):
    (tmp_path / "configs").mkdir()
    monkeypatch.chdir(tmp_path)

    assert lines(kt.Image().copy("configs", dest)) == [f"COPY {tmp_path}/configs {dest}/configs"]
