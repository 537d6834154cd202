import pytest

from kubetorch.pod.image import image_steps
from kubetorch.specs.image import (
    CopyStep,
    EnvStep,
    ImageSpec,
    PipStep,
    RunStep,
    UserStep,
    WorkdirStep,
)


@pytest.mark.parametrize(
    ("steps", "shared"),
    [
        ((), 0),
        ((PipStep("a"), EnvStep("X", "1"), PipStep("b")), 3),
        ((PipStep("a"), RunStep("true"), PipStep("b")), 1),
        ((PipStep("a"), PipStep("b", force=True), PipStep("c")), 1),
        ((CopyStep("/a", "a"), PipStep("a")), 2),
        ((CopyStep("/a", "a", force=True), PipStep("a")), 0),
    ],
)
def test_requirements_are_shared_up_to_the_first_command(steps, shared):
    assert image_steps.shared_steps(ImageSpec(steps=steps)) == shared


@pytest.mark.parametrize(
    "requirement",
    [
        "numpy",
        "'numpy > 2.0'",
        "torch==2.4 --index-url https://download.pytorch.org/whl/cpu",
        "'package[extra]>=1,<2; python_version > \"3\"'",
        "git+https://github.com/a/b@v1",
        "--no-build-isolation flash-attn==2.7.3",
    ],
)
def test_what_means_the_same_everywhere_is_shared(requirement):
    assert image_steps.shared_steps(ImageSpec(steps=(PipStep(requirement),))) == 1


@pytest.mark.parametrize(
    "requirement",
    [
        ".",
        "./package",
        "~/package",
        "/data/a-1.0-py3-none-any.whl",
        "file:///data/a",
        "-e package",
        "-r requirements.txt",
        "--requirement=requirements.txt",
        "a --find-links wheels",
        "$PACKAGE",
        '"$PACKAGE"',
        "a; touch b",
        "a && b",
        "'a",
    ],
)
def test_what_may_mean_something_else_in_another_pod_is_not(requirement):
    assert image_steps.shared_steps(ImageSpec(steps=(PipStep(requirement),))) == 0


def test_an_install_command_of_the_user_may_do_anything():
    image = ImageSpec(install_cmd="conda install", steps=(PipStep("a"),))
    assert image_steps.shared_steps(image) == 0
    assert image_steps.needs_own_paths(image.steps[0], image)


@pytest.mark.parametrize(
    ("step", "needs"),
    [
        (RunStep("true"), True),
        (PipStep("a"), False),
        (EnvStep("A", "1"), False),
        (CopyStep("/a", "a"), False),
        (CopyStep("/a", "~/a"), False),
        (CopyStep("/a", "/app"), True),
        (CopyStep("/a", "../a"), True),
        (CopyStep("/a", "~/../a"), True),
        (CopyStep("/a", "a/../../b"), True),
        (CopyStep("/a", "a/../b"), False),
        (CopyStep("/a", "..a"), False),
        (WorkdirStep("/app"), True),
        (WorkdirStep("app"), False),
        (WorkdirStep(".."), True),
        (UserStep("root"), False),
    ],
)
def test_only_what_may_write_anywhere_needs_a_view(step, needs):
    assert image_steps.needs_own_paths(step, ImageSpec()) is needs


def test_an_environment_is_named_by_all_that_makes_it():
    names = {
        image_steps.digest("base", "a", {}),
        image_steps.digest("other", "a", {}),
        image_steps.digest("base", "b", {}),
        image_steps.digest("base", "a", {"UV_INDEX_URL": "x"}),
        image_steps.digest("base", "a", {"PIP_INDEX_URL": "x"}),
    }
    assert len(names) == 5
    same = image_steps.digest("base", "a", {"HOME": "/h", "UV_CACHE_DIR": "/c"})
    assert same == image_steps.digest("base", "a", {})
    assert same == image_steps.digest("base", "a", {"UV_PYTHON": "/p", "PIP_TARGET": "/t"})


def test_installers_see_where_packages_come_from_and_not_where_else_to_put_them(tmp_path):
    python = tmp_path / "venv" / "bin" / "python"
    sources = {"UV_INDEX_URL": "x", "PIP_EXTRA_INDEX_URL": "y", "PIP_CONFIG_FILE": "/pip.conf"}
    outside = {"UV_PYTHON": "/p", "PIP_TARGET": "/t", "CONDA_PREFIX": "/c", "CONDA_SHLVL": "1"}
    environ = {**sources, **outside, "VIRTUAL_ENV": "/mine", "HOME": "/h"}

    variables = image_steps.installer_variables(environ, python=str(python))
    installer_settings = {"UV_PYTHON": str(python), "PIP_USER": "0"}
    assert variables == {**sources, **installer_settings, "HOME": "/h"}

    # An interpreter of conda's: `conda install` finds its environment.
    (tmp_path / "venv" / "conda-meta").mkdir(parents=True)
    environ["VIRTUAL_ENV"] = str(tmp_path / "venv")
    variables = image_steps.installer_variables(environ, python=str(python))
    assert variables["CONDA_PREFIX"] == variables["VIRTUAL_ENV"] == str(tmp_path / "venv")


@pytest.mark.parametrize(
    ("command", "expected_manager"),
    [
        ("apt-get update", "apt-get"),
        ("sudo apt-get install -y git", "apt-get"),
        ("sudo -E /usr/bin/apt install git", "apt"),
        ("echo a && DEBIAN_FRONTEND=noninteractive apt-get install git", "apt-get"),
        ("cd /tmp; yum install git", "yum"),
        ("if true; then apk add git; fi", "apk"),
        ("echo apt-get", None),
        ("pip install apt", None),
        ("adapt-get", None),
        ("", None),
    ],
)
def test_package_managers_are_found_where_they_are_called(command, expected_manager):
    assert image_steps.package_manager(command) == expected_manager


def test_the_value_of_a_variable_is_not_shown():
    assert image_steps.describe(EnvStep("TOKEN", "secret")) == "ENV TOKEN"
    assert len(image_steps.describe(RunStep("x" * 500))) < 250


def test_the_error_of_a_step_shows_what_its_program_said_last() -> None:
    error = image_steps.failure(RunStep("false"), "ended with exit code 1", ["a", "b"], exit_code=1)
    assert error.message == "the image's step 'RUN false' ended with exit code 1:\n  a\n  b"
    assert error.exit_code == 1
    assert (
        image_steps.failure(RunStep("x"), "is late").message == "the image's step 'RUN x' is late"
    )


def test_requirements_of_one_call_without_flags_are_one_command() -> None:
    items = ["a", "'b > 1'", "--no-deps c", "d", "$E", "f # g", "h"]
    steps = (
        PipStep("x"),
        *(PipStep(requirement, joins=n > 0) for n, requirement in enumerate(items)),
    )
    installations = [
        image_steps.installation(steps, number, len(steps)) for number in range(len(steps))
    ]
    commands = [step and step.requirement for step in installations]
    assert commands == [
        *("x", None, "a 'b > 1'", "--no-deps c", "a 'b > 1' d", "$E", "f # g", "a 'b > 1' d h")
    ]
    assert image_steps.installation(steps, 1, 2) == PipStep("a")
