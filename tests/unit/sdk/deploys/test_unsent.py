from pathlib import Path

import pytest

from kubetorch.sdk.deploys import project, unsent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "work").mkdir()
    for name in ("main.py", "sib.py"):
        (tmp_path / "work" / name).touch()
    return tmp_path / "work"


def reason(folder: Path, module: str, **placement: str | bool) -> str | None:
    return unsent.reason_of(module, project.locate(str(folder / "main.py"), None, **placement))


def test_without_a_marker_the_file_that_stayed_and_what_to_do_are_named(folder: Path) -> None:
    said = reason(folder, "sib")
    assert said is not None
    assert said.startswith(f"only main.py was sent, and not sib.py: neither {folder} nor a folder ")
    assert "requirements.txt; make one of them there" in said
    assert f"sync_dir={str(folder)!r}" in said


def test_a_module_that_is_not_here_either_is_not_named(folder: Path) -> None:
    assert str(reason(folder, "torch")).startswith("only main.py was sent: ")


def test_in_the_home_folder_a_marker_would_not_help(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert "move the files into a folder of their own" in str(reason(folder, "sib"))


def test_where_nothing_is_sent_the_reason_says_so(folder: Path) -> None:
    assert "remote_dir='/app'" in str(reason(folder, "sib", remote_dir="/app"))
    assert "no code was sent" in str(reason(folder, "sib", sync_dir=False))


def test_of_a_project_that_travels_only_what_stayed_is_explained(folder: Path) -> None:
    (folder / "pyproject.toml").touch()
    (folder / "inner").mkdir()
    (folder / "inner" / "deep.py").touch()
    assert "inner/deep.py is here, and was not sent" in str(reason(folder, "inner.deep"))
    assert reason(folder, "torch") is None


def test_the_reason_stands_in_the_message(folder: Path) -> None:
    error = ModuleNotFoundError("No module named 'sib'", name="sib")
    unsent.explain(error, project.locate(str(folder / "main.py"), None))
    assert "not sib.py" in str(error)
    assert error.args == (error.msg,)
