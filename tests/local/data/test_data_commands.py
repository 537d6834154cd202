"""`kt put`, `kt get`, `kt ls` and `kt rm`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.local import commands
from tests.local.service_harness import FAKE, Service

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def service(service_home: Path) -> Iterator[Service]:
    service = Service(service_home, FAKE).start()
    yield service
    service.terminate()


@pytest.fixture
def run(service: Service, tmp_path: Path) -> Run:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return commands.kt(*arguments, cwd=tmp_path)

    return run


def test_files_from_put_to_rm(run: Run, tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "w.bin").write_text("weights")
    (tmp_path / "ckpt" / "log.txt").write_text("log")
    assert run("ls").stdout == "Store is empty\n"
    assert run("ls", "models").stdout == "No items found under key 'models'\n"
    stored = run("put", "/models/base", "--src", "ckpt", "--exclude", "*.txt")
    assert stored.stdout == "✓ Stored at key '/models/base'\n", stored.stderr
    line = run("put", "models/one", "ckpt/w.bin", "--json").stdout
    answer = json.loads(line)
    assert line.count("\n") == 1
    assert (answer["key"], answer["files"], answer["bytes"], answer["moved"]) == (
        *("models/one", 1, 7),
        0,
    )
    listed = run("ls", "models")
    assert listed.stdout == "📁 base/\n📄 one\nTotal: 1 directories, 1 files\n"
    header, base, single = run("ls", "models", "-v").stdout.splitlines()[:3]
    assert header.split() == ["NAME", "SIZE", "AGE", "VERSION", "HOLDERS", "ENDS", "WITH"]
    assert base.split()[:3] == ["base/", "7", "B"]
    assert single.split()[-3:] == ["1", "store", "-"]
    got = run("get", "models/base", "out", "-c")
    assert got.stdout == "✓ Retrieved key 'models/base'\n", got.stderr
    assert (tmp_path / "out/ckpt/w.bin").read_text() == "weights"
    assert not (tmp_path / "out/ckpt/log.txt").exists()
    (tmp_path / "ckpt" / "sub").mkdir()
    (tmp_path / "ckpt" / "sub" / "a.json").write_text("{}")
    assert run("put", "only", "ckpt", "-c").returncode == 0
    some = run("get", "only", "some", "-c", "--only", "*.json", "--only", "w.*")
    assert some.returncode == 0, some.stderr
    paths = (tmp_path / "some").rglob("*")
    assert {path.name for path in paths if path.is_file()} == {"a.json", "w.bin"}
    refused = run("rm", "models/base")
    assert (refused.returncode, "--recursive" in refused.stderr) == (1, True)
    assert run("rm", "models/base", "-r").stdout == "✓ Deleted key 'models/base'\n"
    prefix = run("rm", "mod", "-p", "-v").stdout.splitlines()
    assert prefix == ["✓ Deleted all keys with prefix 'mod'", "deleted or changed: models/one"]
    assert json.loads(run("rm", "models/one", "--json").stdout) == {"deleted": []}


def test_what_is_not_there_is_said(run: Run) -> None:
    missing = run("put", "k", "-s", "nowhere")
    assert missing.returncode == 1
    assert "Could not locate path to sync up: nowhere" in missing.stderr
    unnamed = run("put", "k")
    assert (unnamed.returncode, "kt put k --src PATH" in unnamed.stderr) == (1, True)
    deleted = run("rm", "models/none")
    assert deleted.stdout == "There is no key 'models/none'; nothing was deleted\n"
    absent = run("get", "nothing")
    assert absent.returncode == 1
    assert "there is no key 'nothing' in namespace default" in absent.stderr
    assert run("rm", "nothing").stdout == "There is no key 'nothing'; nothing was deleted\n"


def test_rm_of_a_service_leads_to_teardown(run: Run, service: Service) -> None:
    service.deploy("trainer")
    refused = run("rm", "trainer")
    assert refused.returncode == 1
    assert "hint: kt teardown trainer deletes the service" in refused.stderr
