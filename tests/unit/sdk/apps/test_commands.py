from pathlib import Path

import pytest

from kubetorch.errors import SpecError
from kubetorch.sdk.apps import commands
from kubetorch.sdk.deploys.project import ProjectRef


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
    [("uvicorn m:app", True), ("train", False), (" train ", False), ("a\tb", True)],
)
def test_a_command_is_told_from_a_name_by_a_space(text, expected):
    assert commands.is_command(text) is expected


def test_the_python_file_of_a_command_is_its_first_word_of_that_kind():
    assert commands.python_file("fastapi run app/main.py other.py") == "app/main.py"
    assert commands.python_file("uvicorn m:app") is None


def test_an_app_runs_where_the_program_was_started(shop):
    assert commands.run_folder(project(shop), shop) == ""
    assert commands.run_folder(project(shop), shop / "jobs") == "jobs"
    assert commands.run_folder(project(shop), Path("/")) == ""
    assert commands.run_folder(ProjectRef("serve"), shop) is None


def test_an_app_of_which_nothing_travels_runs_in_the_last_folder_of_its_image(shop):
    assert commands.run_folder(ProjectRef("serve"), shop, "/app") == "/app"
    assert commands.run_folder(project(shop), shop, "/app") == ""


def test_what_works_here_as_it_stands_is_kept(shop):
    for command in ("python serve.py", "./serve.py --x jobs/train.py", "echo 'a  b' | cat"):
        assert commands.in_pod(command, project(shop), shop, "") == command


def test_absolute_paths_become_those_of_the_pod(shop):
    command = f"python {shop}/jobs/train.py --out /tmp/{shop.name}"
    expected = f"python jobs/train.py --out /tmp/{shop.name}"
    assert commands.in_pod(command, project(shop), shop, "") == expected
    assert commands.in_pod(f"{shop}/serve.py", project(shop), shop, "") == "./serve.py"


def test_paths_of_another_folder_here_are_found_from_the_one_there(shop):
    found = commands.in_pod("python shop/jobs/train.py", project(shop), shop.parent, "")
    assert found == "python jobs/train.py"


def test_in_a_working_directory_of_its_own_the_project_lies_below(shop):
    found = commands.in_pod("python jobs/train.py .", project(shop), shop, None)
    assert found == "python shop/jobs/train.py ."


def test_a_file_that_would_not_travel_is_refused(shop):
    (shop / "main.py").touch()
    where = project(shop, only="serve.py")
    assert commands.in_pod("python serve.py", where, shop, "") == "python serve.py"
    with pytest.raises(SpecError, match=r"main\.py would not be sent"):
        commands.in_pod("uvicorn main:app", where, shop, "")
