"""Whose code a program deploys: which project it is, and what of it."""

from __future__ import annotations

import importlib
import json
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kubetorch.sdk.deploys import origin
from kubetorch.sdk.deploys.source import Placement, Source
from kubetorch.specs.workload import Origin

REMOTE = "github.com/acme/shop"


@pytest.mark.parametrize(
    "url",
    [
        "https://github.com/acme/shop.git",
        "https://github.com/acme/shop/",
        "https://alice:ghp_secret@GitHub.com:443/acme/shop.git",
        "git@github.com:acme/shop.git",
        "github.com:/acme/shop",
        "ssh://git@github.com:2222/acme/shop.git",
        "git://github.com:9418/acme/shop",
    ],
)
def test_a_repository_is_the_same_however_it_was_cloned(url: str) -> None:
    assert origin.normalised(url) == REMOTE


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://git.example.com:8443/a/b", "git.example.com:8443/a/b"),
        ("git@[::1]:a/b.git", "[::1]/a/b"),
        ("/srv/git/shop.git", None),
        ("../shop", None),
        ("file:///srv/git/shop.git", None),
        ("https://host:port/a", None),
    ],
)
def test_a_server_is_told_apart_by_its_port_and_a_folder_is_no_remote(
    url: str, expected: str | None
) -> None:
    assert origin.normalised(url) == expected


# ---------------------------------------------------------------------------------- the project


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def checkout(folder: Path, url: str | None = f"https://alice:secret@{REMOTE}.git") -> Path:
    """A repository with a remote, and another one in front of it."""
    git(folder.parent, "init", "-q", str(folder))
    if url is not None:
        git(folder, "remote", "add", "a-fork", "git@github.com:me/fork.git")
        git(folder, "remote", "add", "origin", url)
    return folder


def git(folder: Path, *arguments: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_all_checkouts_of_a_repository_are_one_project(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = origin.identify(checkout(home / "one/shop"))
    monkeypatch.setenv("HOME", str(home / "another machine"))
    second = origin.identify(checkout(home / "two", f"git@{REMOTE.replace('/', ':', 1)}"))
    assert first == second
    assert first[1] == REMOTE


def test_a_folder_in_a_repository_is_a_project_of_its_own(home: Path) -> None:
    repository = checkout(home / "mono")
    folders = [repository / "a", repository / "b"]
    for folder in folders:
        folder.mkdir()
    (first, named), (second, _) = map(origin.identify, folders)
    assert named == f"{REMOTE}/a"
    assert len({first, second, origin.identify(repository)[0]}) == 3


def test_work_trees_and_submodules_have_the_remote_of_their_repository(home: Path) -> None:
    repository = checkout(home / "shop")
    git(repository, "commit", "-q", "--allow-empty", "-m", "x")
    git(repository, "worktree", "add", "-q", str(home / "tree"))
    assert origin.identify(home / "tree") == origin.identify(repository)

    inner = checkout(home / "lib", "https://github.com/acme/lib")
    git(inner, "commit", "-q", "--allow-empty", "-m", "x")
    git(repository, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner), "lib")
    git(repository / "lib", "remote", "set-url", "origin", "https://github.com/acme/lib")
    assert origin.identify(repository / "lib")[1] == "github.com/acme/lib"


def test_without_a_remote_a_project_is_a_folder_of_a_machine(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout_folder, other_folder = checkout(home / "shop", None), home / "other"
    other_folder.mkdir()
    (home / "link").symlink_to(checkout_folder)
    first = origin.identify(checkout_folder)
    assert first[1].endswith(":~/shop")
    assert origin.identify(home / "link") == first
    assert origin.identify(other_folder)[0] != first[0]
    # The name of the machine does not count, which changes with the network: its id does.
    (home / ".kt/machine").write_text("another machine")
    assert origin.identify(checkout_folder)[0] != first[0]


def test_a_repository_above_the_home_folder_is_not_the_project(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout(home)
    (home / "shop").mkdir()
    assert origin.identify(home / "shop")[1].endswith(":~/shop")


def test_a_home_that_cannot_be_written_to_has_an_id_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/proc/nowhere")
    assert origin.identify(tmp_path) == origin.identify(tmp_path)


# --------------------------------------------------------------------------------- the callable


@pytest.fixture
def shop(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project whose package `ml` has a module with a function and a class."""
    folder = checkout(home / "shop")
    (folder / "src/ml").mkdir(parents=True)
    (folder / "src/ml/__init__.py").touch()
    (folder / "src/ml/train.py").write_text("class Outer:\n class Inner: pass\ndef train(): pass\n")
    before = list(sys.path)
    yield folder
    sys.path[:] = before
    for name in ("ml", "ml.train", "train"):
        sys.modules.pop(name, None)


def find(kind: str, callable_object: object, sync_dir: object = None) -> Origin:
    return origin.find(Source(kind, callable_object, Placement(sync_dir)))  # type: ignore[arg-type]


def test_a_function_is_the_same_imported_or_in_the_program_that_runs(shop: Path) -> None:
    sys.path.insert(0, str(shop / "src"))
    imported = importlib.import_module("ml.train")
    sys.path.insert(0, str(shop / "src/ml"))
    other_root = importlib.import_module("train")
    program = runpy.run_path(str(shop / "src/ml/train.py"), run_name="__main__")
    origins = {
        find("fn", function) for function in (imported.train, other_root.train, program["train"])
    }
    origins.add(find("fn", imported.train, str(shop / "src")))
    assert [(found_origin.name, found_origin.callable) for found_origin in origins] == [
        (REMOTE, "src/ml/train.py:train")
    ]
    assert find("cls", imported.Outer.Inner).callable == "src/ml/train.py:Outer.Inner"


def test_an_app_is_its_file(shop: Path) -> None:
    source = Source("app", None, Placement(), (str(shop / "src"), "ml.train", "app"))
    app_origin = origin.find(source)
    assert (app_origin.callable, app_origin.file) == ("src/ml/train.py", "src/ml/train.py")


def test_a_function_that_is_installed_is_of_the_program_that_deploys_it(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shop / "src")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/usr/bin/pytest", raising=False)
    assert find("fn", json.dumps).key == f"{origin.identify(shop)[0]}:json.py:dumps"


def test_code_in_a_pod_is_of_the_project_that_the_pod_runs(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sys.path.insert(0, str(shop / "src"))
    module = importlib.import_module("ml.train")
    own_origin = find("fn", module.train)
    # In the pod there is no repository, and another file of the project was deployed.
    pod = shop.parent / "code/1/shop"
    shutil.copytree(shop, pod, ignore=shutil.ignore_patterns(".git"))
    deployed = Origin(own_origin.project, own_origin.name, "src/serve.py:serve", own_origin.machine)
    monkeypatch.setenv("KT_ORIGIN", json.dumps(vars(deployed)))
    monkeypatch.setenv("KT_DEPLOYED_FILE", str(pod / "src/serve.py"))
    module.__file__ = str(pod / "src/ml/train.py")
    assert find("fn", module.train) == own_origin


@pytest.mark.parametrize("notebook_variable", ["__vsc_ipynb_file__", "JPY_SESSION_NAME"])
def test_a_function_of_a_notebook_is_known_by_the_notebooks_file(
    home: Path, monkeypatch: pytest.MonkeyPatch, notebook_variable: str
) -> None:
    def train() -> None: ...

    train.__qualname__, train.__module__ = "train", "__main__"
    folder = home / "notebooks"
    folder.mkdir()
    monkeypatch.chdir(folder)
    main = sys.modules["__main__"]
    monkeypatch.delattr(main, "__file__", raising=False)
    assert find("fn", train).callable == "train_fn.py:train"
    file = str(folder / "one.ipynb")
    if notebook_variable.startswith("__"):
        monkeypatch.setattr(main, notebook_variable, file, raising=False)
    else:
        monkeypatch.setenv(notebook_variable, file)
    assert find("fn", train).callable == "one.ipynb:train"
