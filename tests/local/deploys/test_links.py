"""Links that lead out of a project, and what of ours lies in one: what travels."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

import kubetorch as kt
from kubetorch.datastore import trees
from kubetorch.datastore.blobs import Source, digest_of
from kubetorch.datastore.scan import Options, scan
from kubetorch.datastore.slots import CodeSlots
from kubetorch.datastore.trees import Entry, Tree
from kubetorch.errors import DataStoreError
from kubetorch.sdk.controller import Controller
from kubetorch.specs.volume import VolumeSpec
from kubetorch.wire.secrets import PutSecret, SecretDraft
from shared import WHOLE
from tests.local.user_project import UserProject

#: Trees of links: projects and their pods, and forged ones.
TREES = 1241 if WHOLE else 40

PROGRAM = """
import sys
from pathlib import Path
import kubetorch as kt

def look(*names):
    here = Path(__file__).parent
    return [(here / name).read_text() if (here / name).exists() else None for name in names]

def listed():
    here = Path(__file__).parent
    return sorted(str(path.relative_to(here)) for path in here.rglob("*") if path.is_file())

if __name__ == "__main__":
    remote = kt.fn(listed).to(kt.Compute(cpus="0.1"))
    print([name for name in remote() if "__pycache__" not in name])
    remote.teardown()
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home: Path) -> Path:
    return shared_service_home


def controller() -> Controller:
    client: Controller = kt.globals.controller_client()
    return client


def test_links_out_of_the_project_do_not_travel_unless_named(
    project: UserProject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret, shared = tmp_path / "shadow", tmp_path / "shared"
    secret.write_text("root:x")
    shared.mkdir()
    (shared / "data").write_text("data")
    for name, target in {"shadow": secret, "shared": shared, "copied": secret}.items():
        (project.folder / name).symlink_to(target)
    look = project.module(PROGRAM).look
    names = ("shadow", "shared/data", "copied")
    remote = kt.fn(look).to(kt.Compute(cpus="0.1"))
    assert remote(*names) == [None, None, None]
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "lead out" in line]
    assert all(f"{name} -> {tmp_path}" in warning for name in ("copied", "shadow", "shared"))
    (project.folder / ".ktignore").write_text("!follow shared\n")
    remote.to(kt.Compute(cpus="0.1"))
    assert "shared ->" not in capsys.readouterr().err
    assert remote(*names) == [None, "data", None]
    remote.to(kt.Compute(cpus="0.1", image=kt.Image().copy(str(secret), "elsewhere")))
    assert remote(*names) == ["root:x", "data", "root:x"]
    remote.teardown()


def test_what_is_ours_never_travels(project: UserProject) -> None:
    program = project.write("program.py", PROGRAM)
    home = project.folder / "home"
    (home / ".kt").mkdir(parents=True)
    (home / "notes").write_text("mine")
    (home / ".kt" / "config.yaml").write_text("{}")
    (project.folder / ".ktignore").write_text("!.kt\n")
    for _ in range(3):
        completed = project.run(program, HOME=str(home), KT_CACHE_DIR="", KT_QUIET="true")
        assert (completed.returncode, completed.stderr) == (0, "")
        assert (
            completed.stdout == f"{['.ktignore', 'home/notes', 'program.py', 'pyproject.toml']}\n"
        )
    assert list((home / ".kt" / "cache").rglob("*.listing"))


# ------------------------------------------------------------------------------- 1,241 trees


def grow(chance: random.Random, base: Path) -> tuple[Path, list[str]]:
    """A project with links of all kinds beside what is none of it, and the links it names."""
    project, outside = base / "deep/project", base / "outside"
    for folder in (project, outside):
        for path in ("a/b", "c"):
            (folder / path).mkdir(parents=True)
        for path in ("x", "a/x", "a/b/x", "c/x"):
            (folder / path).write_text(f"{folder.name} {path}")
    named = []
    for number in range(chance.randint(1, 8)):
        folder = chance.choice([project, project / "a", project / "a/b", outside, outside / "a"])
        link = folder / f"l{number}"
        inner = chance.choice(
            ["", "a", "a/b", "x", "a/x", "c/x", "l0", "l1", "a/l2", "l3/x", "gone"]
        )
        target = chance.choice([project, outside, base, Path("/etc"), Path("/")]) / inner
        kind = chance.choice(["absolute", "relative", "up"])
        if kind == "relative":
            target = Path(os.path.relpath(target, folder))
        elif kind == "up":
            target = Path(*[".."] * chance.randint(1, 9), inner)
        link.symlink_to(target)
        if chance.random() < 0.2 and os.path.realpath(link).startswith(f"{base}/outside"):
            named.append(link.name)
    (project / ".ktignore").write_text("".join(f"!follow {name}\n" for name in named))
    return project, named


def forge(chance: random.Random) -> Tree | None:
    """A tree of files and links that nobody's scan made; nothing where it is refused."""
    names = ["a", "b", "a/b", "a/c", "b/x", "a/b/c", "l", "l/x", "../x", "/x", "a/../b", "."]
    targets = [
        "a",
        "b",
        "..",
        "../b",
        "../../x",
        "/etc",
        "a/../..",
        ".",
        "l",
        "a/b/c",
        "l/../..",
        "",
    ]
    entries = {}
    for _ in range(chance.randint(1, 6)):
        path = chance.choice(names)
        entries[path] = chance.choice(
            [
                Entry(path, "file", 1, digest_of(b"x")),
                Entry(path, "symlink", target=chance.choice(targets)),
            ]
        )
    try:
        built = trees._encoder.encode(tuple(entries[path] for path in sorted(entries)))
        return trees.decode(built)
    except DataStoreError:
        return None


def check_unpacked(tree: Tree, source: Source, pods: Path) -> None:
    """A pod gets no link that leads out of the code, and nothing is written beside it."""
    slots = CodeSlots(pods / "code")
    slot = slots.update(tree, source, "project")
    for path in slot.path.rglob("*"):
        assert Path(os.path.realpath(path)).is_relative_to(os.path.realpath(slot.path))
    assert {path.name for path in pods.iterdir()} == {"code"}
    assert {path.name for path in slot.path.parent.iterdir()} == {"project"}
    slots.release(slot)


@pytest.mark.timeout(600)  # most of it is the disk's
def test_no_tree_of_links_takes_or_writes_what_is_beside_it(tmp_path: Path) -> None:
    followed = forged = 0
    for seed in range(TREES):
        chance, base = random.Random(seed), tmp_path / str(seed)
        project, named = grow(chance, base)
        cache = base / "cache"
        for _ in range(2):
            scanned = scan(project, Options(cache=cache))
            assert scanned.digest == scan(project).digest
            for entry in scanned.tree.entries:
                is_inside = Path(os.path.realpath(project / entry.path)).is_relative_to(project)
                assert is_inside or any(part in named for part in entry.path.split("/")), seed
                followed += not is_inside
            assert sum("lead out of the project" in warning for warning in scanned.warnings) <= 1
            (project / "a/x").write_text("another")
        check_unpacked(scan(project).tree, scan(project).stream, base / "pod")
        tree = forge(chance)
        if tree is not None:
            forged += 1
            check_unpacked(tree, lambda _: (1, [b"x"]), base / "forged")
        shutil.rmtree(base)
    print(
        f"{TREES} trees, {followed} files through links that are named, {forged} forged ones taken"
    )
    assert followed
    assert forged


# ------------------------------------------------------- what a cluster would refuse as well


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": "0"},
        {"size": "-1Gi"},
        {"size": "much"},
        {"size": "1.5"},
        {"size": "10Ei"},
        {"size": None},
        {"access_mode": "Sometimes"},
        {"storage_class": "a..b"},
        {"volume_name": "-a"},
        {"claim": "other"},
    ],
    ids=str,
)
def test_an_impossible_volume_is_refused_locally(wrong: dict[str, str]) -> None:
    volume_fields = {"name": "data", "mount_path": "/data", "size": "1Gi", **wrong}
    with pytest.raises(kt.SpecError):
        controller().volumes.create("default", VolumeSpec(**volume_fields))
    assert controller().volumes.get("default", "data") is None


@pytest.mark.parametrize("key", [".", "..", "..data", "a/b", "", "ä", "x" * 254])
def test_an_impossible_key_of_a_secret_is_refused_locally(key: str) -> None:
    draft = SecretDraft(name="odd", mount_type="volume", path="~/odd")
    put = PutSecret(draft=draft, values={key: b"x"}, collision="replace")
    with pytest.raises(kt.SpecError):
        controller().secrets.put("default", "kt.secret.global.odd", put)
    assert controller().secrets.list("default") == []


@pytest.mark.parametrize("name", ["a..b", "a.-b", "a-.b", ".a"])
def test_an_impossible_name_is_refused_locally(name: str) -> None:
    put = PutSecret(draft=SecretDraft(name=name, mount_type="env"), values={}, collision="replace")
    with pytest.raises(kt.SpecError):
        controller().secrets.put("default", "kt.secret.global.odd", put)
    with pytest.raises(kt.SpecError):
        kt.Volume("data", pvc=name, mount_path="/data")
