from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from kubetorch.errors import SpecError
from kubetorch.sdk.deploys import source
from kubetorch.sdk.deploys.source import MARKERS, ProjectRef, find_project, locate


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.fixture
def module(home: Path) -> Path:
    """`ml.deep.train`, of the root `src` in the project `shop`."""
    file = home / "shop/src/ml/deep/train.py"
    touch(file, home / "shop/pyproject.toml")
    return file


def test_a_module_of_a_package_is_imported_from_the_packages_parent(
    home: Path, module: Path
) -> None:
    assert locate(str(module), "ml.deep.train") == ProjectRef(
        "ml.deep.train",
        folder=home / "shop",
        name="shop",
        root="src",
        source_file="src/ml/deep/train.py",
    )


@pytest.mark.parametrize("name", [None, "__main__"])
def test_a_script_is_imported_from_its_own_folder(
    home: Path, module: Path, name: str | None
) -> None:
    assert locate(str(module), name) == ProjectRef(
        "train",
        folder=home / "shop",
        name="shop",
        root="src/ml/deep",
        source_file="src/ml/deep/train.py",
    )


def test_a_package_is_the_module_of_its_init_file(home: Path) -> None:
    touch(home / "shop/setup.py", home / "shop/ml/deep/__init__.py")
    project = locate(str(home / "shop/ml/deep/__init__.py"), "ml.deep")
    assert (project.import_path, project.root) == ("ml.deep", "")
    assert project.source_file == "ml/deep/__init__.py"


def test_a_module_whose_name_does_not_fit_its_file_is_taken_for_a_script(
    home: Path, module: Path
) -> None:
    project = locate(str(module), "something.else")
    assert (project.import_path, project.root) == ("train", "src/ml/deep")


@pytest.mark.parametrize("marker", MARKERS)
def test_each_marker_makes_a_project(home: Path, marker: str) -> None:
    touch(home / "a/b/c/train.py", home / "a" / marker)
    assert find_project(home / "a/b/c") == home / "a"


def test_the_nearest_marker_wins(home: Path) -> None:
    touch(home / "a/.git/HEAD", home / "a/b/requirements.txt", home / "a/b/c/x.py")
    assert find_project(home / "a/b/c") == home / "a/b"


def test_a_home_folder_is_no_project(home: Path) -> None:
    touch(home / ".git/HEAD", home / "scripts/x.py")
    assert find_project(home / "scripts") is None
    assert find_project(home) is None


def test_a_home_folder_behind_a_link_is_no_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path / "real/.git/HEAD", tmp_path / "real/scripts/x.py")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv("HOME", str(tmp_path / "link"))
    assert find_project(tmp_path / "real/scripts") is None


def test_without_a_marker_the_file_alone_travels(home: Path) -> None:
    touch(home / "scripts/train.py", home / "scripts/other.py")
    assert locate(str(home / "scripts/train.py"), None) == ProjectRef(
        "train",
        folder=home / "scripts",
        only="train.py",
        name="scripts",
        source_file="train.py",
    )


def test_without_a_marker_a_module_of_a_package_keeps_its_place(home: Path) -> None:
    touch(home / "scripts/ml/train.py")
    project = locate(str(home / "scripts/ml/train.py"), "ml.train")
    assert (project.folder, project.only) == (home / "scripts", "ml/train.py")


# ------------------------------------------------------------------------------------- sync_dir


def test_a_parent_of_the_root_keeps_the_import_path(home: Path, module: Path) -> None:
    project = locate(str(module), "ml.deep.train", sync_dir=home)
    assert (project.folder, project.root, project.import_path) == (
        home,
        "shop/src",
        "ml.deep.train",
    )


def test_the_root_itself_keeps_the_import_path(home: Path, module: Path) -> None:
    project = locate(str(module), "ml.deep.train", sync_dir=str(home / "shop/src"))
    assert (project.name, project.root, project.import_path) == ("src", "", "ml.deep.train")


def test_a_folder_below_the_root_shortens_the_import_path(home: Path, module: Path) -> None:
    project = locate(str(module), "ml.deep.train", sync_dir=home / "shop/src/ml")
    assert (project.name, project.root, project.import_path) == ("ml", "", "deep.train")
    project = locate(str(module), "ml.deep.train", sync_dir=home / "shop/src/ml/deep")
    assert (project.name, project.root, project.import_path) == ("deep", "", "train")


def test_a_package_below_the_root_shortens_the_import_path(home: Path) -> None:
    touch(home / "ml/deep/__init__.py")
    project = locate(str(home / "ml/deep/__init__.py"), "ml.deep", sync_dir=home / "ml")
    assert project.import_path == "deep"
    with pytest.raises(SpecError, match=r"is the package ml\.deep itself"):
        locate(str(home / "ml/deep/__init__.py"), "ml.deep", sync_dir=home / "ml/deep")


def test_a_relative_path_and_a_tilde_are_understood(
    home: Path, module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home / "shop")
    assert locate(str(module), "ml.deep.train", sync_dir="src").name == "src"
    assert locate("src/ml/deep/train.py", None, sync_dir="~/shop").name == "shop"


def test_a_folder_that_is_given_through_a_link_is_the_same_folder(home: Path, module: Path) -> None:
    (home / "link").symlink_to(home / "shop")
    project = locate(str(module), "ml.deep.train", sync_dir=home / "link")
    assert (project.root, project.source_file) == ("src", "src/ml/deep/train.py")
    through = str(home / "link/src/ml/deep/train.py")
    assert locate(through, "ml.deep.train", sync_dir=home / "shop").root == "src"


def test_a_file_in_a_folder_that_a_project_links_to_is_a_part_of_the_project(home: Path) -> None:
    touch(home / "shared/ml/train.py", home / "shop/pyproject.toml")
    (home / "shop/ml").symlink_to("../shared/ml")
    project = locate(str(home / "shop/ml/train.py"), "ml.train")
    assert (project.folder, project.source_file) == (home / "shop", "ml/train.py")


@pytest.mark.parametrize("folder", ["elsewhere", "shop/src/ml/other"])
def test_a_folder_without_the_module_is_refused(home: Path, module: Path, folder: str) -> None:
    (home / folder).mkdir(parents=True)
    with pytest.raises(SpecError, match="does not have") as caught:
        locate(str(module), "ml.deep.train", sync_dir=home / folder)
    assert str(module) in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("folder", ["nowhere", "shop/pyproject.toml"])
def test_what_is_no_folder_is_refused(home: Path, module: Path, folder: str) -> None:
    with pytest.raises(SpecError, match="is no folder"):
        locate(str(module), "ml.deep.train", sync_dir=home / folder)


# ------------------------------------------------------------------------------ nothing travels


def test_sync_dir_false_sends_nothing(module: Path) -> None:
    assert locate(str(module), "ml.deep.train", sync_dir=False) == ProjectRef("ml.deep.train")


def test_sync_dir_true_finds_the_project(home: Path, module: Path) -> None:
    assert locate(str(module), "ml.deep.train", sync_dir=True).folder == home / "shop"


def test_remote_dir_sends_nothing(module: Path) -> None:
    project = locate(str(module), "ml.deep.train", remote_dir="/app")
    assert project == ProjectRef("ml.deep.train", remote_dir="/app")
    project = locate(
        str(module), "ml.deep.train", sync_dir=False, remote_dir="/app", remote_import_path="x.y"
    )
    assert project == ProjectRef("x.y", remote_dir="/app")


@pytest.mark.parametrize("sync_dir", [True, "/tmp"])
def test_sync_dir_and_remote_dir_exclude_each_other(module: Path, sync_dir: str | bool) -> None:
    with pytest.raises(SpecError, match="exclude each other"):
        locate(str(module), None, sync_dir=sync_dir, remote_dir="/app")


def test_remote_import_path_needs_a_remote_dir(module: Path) -> None:
    with pytest.raises(SpecError, match=r"'x\.y' needs a remote_dir"):
        locate(str(module), None, remote_import_path="x.y")


def test_what_is_installed_does_not_travel(home: Path) -> None:
    assert locate(json.__file__, "json") == ProjectRef("json")
    assert locate(None, "math") == ProjectRef("math")
    installed = home / "shop/.venv/lib/python3.12/site-packages/dist/mod.py"
    touch(installed, home / "shop/pyproject.toml")
    assert locate(str(installed), "dist.mod") == ProjectRef("dist.mod")


def test_a_callable_without_a_file_cannot_be_sent() -> None:
    with pytest.raises(SpecError, match="no source file"):
        locate(None, "__main__")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "work").mkdir()
    for name in ("main.py", "sib.py"):
        (tmp_path / "work" / name).touch()
    return tmp_path / "work"


def reason(folder: Path, module: str, **placement: str | bool) -> str | None:
    return source.reason_of(module, source.locate(str(folder / "main.py"), None, **placement))


def test_without_a_marker_the_file_that_stayed_and_what_to_do_are_named(folder: Path) -> None:
    explanation = reason(folder, "sib")
    assert explanation is not None
    assert explanation.startswith(
        f"only main.py was sent, and not sib.py: neither {folder} nor a folder "
    )
    assert "requirements.txt; make one of them there" in explanation
    assert f"sync_dir={str(folder)!r}" in explanation


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
    (folder / ".ktignore").write_text("deep.*\n")
    explanation = str(reason(folder, "inner.deep"))
    assert (
        f"and was not sent: line 1 of {folder}/.ktignore, deep.* leaves inner/deep.py"
        in explanation
    )
    assert reason(folder, "torch") is None


def test_the_reason_stands_in_the_message(folder: Path) -> None:
    error = ModuleNotFoundError("No module named 'sib'", name="sib")
    source.explain_missing(error, source.locate(str(folder / "main.py"), None))
    assert "not sib.py" in str(error)
    assert error.args == (error.msg,)


def test_a_file_that_stayed_is_explained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "pyproject.toml").touch()
    (folder / ".gitignore").write_text("data/\n")
    for name in ("data/x.csv", "conf/c.yaml", "sub/data/y.csv"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    (folder.parent / "outer.csv").touch()
    monkeypatch.chdir(folder / "sub")

    def explanation(name: str) -> str:
        error = FileNotFoundError(2, "No such file or directory", name)
        source.explain_missing(error, source.locate(str(folder / "main.py"), None))
        return "".join(getattr(error, "__notes__", ()))

    (folder / "out").symlink_to(folder.parent / "outer.csv")
    (folder / "nowhere").symlink_to("gone")
    (folder / "within").symlink_to("conf/c.yaml")
    for name in ("data/x.csv", "/pod/code/0/work/data/x.csv"):
        rule = f"line 1 of {folder}/.gitignore, data/ leaves data/ out"
        assert f"data/x.csv is in {folder}, and was not sent: {rule}" in explanation(name)
        assert "a line !data/ in .ktignore" in explanation(name)
    assert explanation("data/y.csv").endswith("top of the project, where it is sub/data/y.csv")
    assert explanation(str(folder / "conf/c.yaml")).endswith("where it is conf/c.yaml")
    assert f"lies outside of the project {folder}" in explanation("../../outer.csv")
    assert f"out is a link to {folder.parent}/outer.csv, out of the project" in explanation("out")
    assert "a line !follow out in .ktignore" in explanation("out")
    assert explanation("nowhere").startswith(
        f"nowhere is a link to {folder}/gone, which is not there"
    )
    assert explanation("conf/c.yaml") == explanation("within") == ""
    for name in ("nothing.csv", "/pod/code/0/work/nothing.csv"):
        assert explanation(name) == f"nothing.csv is not in the project {folder} either"
    assert explanation("/nothing.csv") == "/nothing.csv is not on this machine either"


@pytest.mark.parametrize(
    ("file", "rules", "line"),
    [
        (".ktignore", "# ours\n\n*.csv\n", 3),
        ("data/.gitignore", "!y\n*.csv\n", 2),
        (".gitignore", "*.txt\ndata\n", 2),
    ],
)
def test_the_line_that_leaves_a_file_out_is_named(
    folder: Path, file: str, rules: str, line: int
) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "x.csv").touch()
    (folder / file).write_text(rules)
    (folder / "pyproject.toml").touch()
    error = FileNotFoundError(2, "No such file or directory", "data/x.csv")
    source.explain_missing(error, source.locate(str(folder / "main.py"), None))
    assert f"line {line} of {folder}/{file}, " in "".join(error.__notes__)


def test_filters_and_rules_that_are_built_in_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "pyproject.toml").touch()
    (folder / "node_modules").mkdir()
    (folder / "node_modules" / "x.js").touch()

    def explanation() -> str:
        error = FileNotFoundError(2, "No such file or directory", "node_modules/x.js")
        source.explain_missing(error, source.locate(str(folder / "main.py"), None))
        return "".join(error.__notes__)

    assert "a rule that is built in leaves node_modules/ out" in explanation()
    monkeypatch.setenv("KT_RSYNC_FILTERS", "--exclude=*.js")
    assert "KT_RSYNC_FILTERS (*.js) leaves node_modules/x.js out" in explanation()


def test_a_module_outside_of_the_project_is_explained(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "pyproject.toml").touch()
    (folder.parent / "common").mkdir()
    file = folder.parent / "common" / "consts.py"
    module = types.ModuleType("consts")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "consts", module)
    monkeypatch.setenv("HOME", "/elsewhere")

    explanation = str(reason(folder, "consts"))
    assert explanation.startswith(f"{file} lies outside of the project {folder}")
    assert f"sync_dir={str(folder.parent)!r}" in explanation
    monkeypatch.setenv("HOME", str(folder.parent))
    assert "sync_dir" not in str(reason(folder, "consts"))
