"""Images: the text of steps, and which of them a live pod runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubetorch.errors import SpecError
from kubetorch.specs.image import (
    CopyStep,
    EnvStep,
    ImageSpec,
    PipStep,
    RunStep,
    check_reference,
    check_variable,
    plan,
)

STEPS = st.lists(
    st.builds(RunStep, st.sampled_from("abc"), st.sampled_from([False, False, True])), max_size=6
)


def test_the_text_is_a_dockerfile():
    spec = ImageSpec(
        image_id="python:3.12",
        steps=(
            PipStep("'numpy > 2.0.0'"),
            RunStep("apt-get install -y curl", force=True),
            EnvStep("EMPTY", ""),
            EnvStep("PLAIN", "a $HOME b"),
            EnvStep("QUOTED", 'say "x"'),
            CopyStep("/src/app", ".", is_folder=True),
            CopyStep("/src/data", "/data", is_folder=True),
            CopyStep("/src/a b.txt", "~/b.txt", force=True),
        ),
    )
    assert spec.contents(default_image="base") == (
        "FROM python:3.12\n"
        'ARG KT_PIP_INSTALL_CMD="python3 -m pip install"\n'
        "RUN $KT_PIP_INSTALL_CMD 'numpy > 2.0.0'\n"
        "RUN apt-get install -y curl # force\n"
        'ENV EMPTY=""\n'
        "ENV PLAIN a $HOME b\n"
        'ENV QUOTED="say \\"x\\""\n'
        "COPY /src/app app\n"
        "COPY /src/data /data/data\n"
        "# force\n"
        'COPY ["/src/a b.txt", "b.txt"]\n'
    )


def test_an_install_command_of_the_users_own_stands_in_each_line():
    spec = ImageSpec(install_cmd="uv pip install", steps=(PipStep("numpy"),))
    assert spec.contents(default_image="base") == "FROM base\nRUN uv pip install numpy\n"


def test_equal_steps_run_nothing():
    steps = (RunStep("a"), RunStep("b"))
    assert plan(steps, steps).run == ()


def test_from_the_first_difference_on_everything_runs():
    old = (RunStep("a"), RunStep("b"), RunStep("c"))
    new = (RunStep("a"), RunStep("x"), RunStep("c"))
    planned = plan(old, new)
    assert (planned.unchanged_count, planned.run, planned.reason) == (1, new[1:], "changed")


def test_an_added_step_runs_alone():
    planned = plan((RunStep("a"),), (RunStep("a"), RunStep("b")))
    assert (planned.run, planned.reason) == ((RunStep("b"),), "new")


def test_steps_taken_away_at_the_end_run_nothing():
    assert plan((RunStep("a"), RunStep("b")), (RunStep("a"),)).run == ()


def test_a_forced_step_and_what_follows_it_always_run():
    steps = (RunStep("a"), RunStep("b", force=True), RunStep("c"))
    planned = plan(steps, steps)
    assert (planned.run, planned.reason) == (steps[1:], "forced")


@given(STEPS, STEPS)
def test_what_is_kept_and_what_runs_make_up_what_is_wanted(ran_steps, wanted_steps):
    planned = plan(ran_steps, wanted_steps)
    assert (*wanted_steps[: planned.unchanged_count], *planned.run) == tuple(wanted_steps)
    assert list(ran_steps[: planned.unchanged_count]) == list(
        wanted_steps[: planned.unchanged_count]
    )
    assert not any(step.force for step in wanted_steps[: planned.unchanged_count])


@pytest.mark.parametrize(
    "reference",
    [
        "python",
        "python:3.12-slim",
        "nvcr.io/nvidia/pytorch:23.10-py3",
        "localhost:5000/a/b@sha256:" + "0" * 64,
    ],
)
def test_references_of_images_are_taken(reference):
    assert check_reference(reference) == reference


@pytest.mark.parametrize("reference", ["", "UPPER", "a b", "-x", "a//b", "a:", "a\n", None, 3])
def test_what_is_no_reference_is_refused(reference):
    with pytest.raises(SpecError, match="image_id is"):
        check_reference(reference)


@pytest.mark.parametrize(
    ("name", "value"), [("1A", "x"), ("A-B", "x"), ("A\n", "x"), ("", "x"), ("A", None), ("A", [1])]
)
def test_an_impossible_variable_is_refused(name, value):
    with pytest.raises(SpecError):
        check_variable(name, value)


def test_a_command_of_several_lines_is_one_instruction():
    step = RunStep('echo "a"\necho b')
    assert step.text(None) == 'RUN ["/bin/bash", "-c", "echo \\"a\\"\\necho b"]'
    assert RunStep("a\nb", force=True).text(None).splitlines()[0] == "# force"


def test_a_line_break_in_a_variable_is_refused_in_a_dockerfile():
    with pytest.raises(SpecError, match=r"MOTD is 'a\\nb'"):
        EnvStep("MOTD", "a\nb").text(None)
