"""A volume with data is not deleted by mistake."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import kubetorch as kt
from tests.local import commands
from tests.local.user_project import UserProject


def volumes(*arguments: str, answer: str = "") -> subprocess.CompletedProcess[str]:
    return commands.kt("volumes", *arguments, stdin=answer)


def folder() -> Path:
    (listed,) = json.loads(volumes("list", "--json").stdout)
    return Path(listed["folder"])


def test_the_command_asks_before_it_deletes(emptied_home: Path) -> None:
    kt.Volume("data", size="1Gi", mount_path="/data").create()
    stored_file = folder() / "x"
    stored_file.write_text("1")

    for answer in ("n\n", ""):  # nobody there to ask is a no
        refused = volumes("delete", "data", answer=answer)
        assert refused.returncode == 1
        assert "data in namespace default and all data in it?" in refused.stderr
        assert stored_file.exists()
    # Some versions of click have the question's last space on stdout.
    assert volumes("delete", "data", answer="y\n").stdout.strip() == "✓ Deleted volume data"
    assert not stored_file.exists()


def test_a_mounted_volume_is_deleted_by_force_only(emptied_home: Path, tmp_path: Path) -> None:
    project = UserProject(tmp_path / "shop")
    try:
        jobs = project.module("def hello():\n    return 'hello'\n")
        volume = kt.Volume("data", size="1Gi", mount_path="/data")
        kt.fn(jobs.hello).to(kt.Compute(cpus="0.1", volumes=[volume]))
        volume_folder = folder()

        refused = volumes("delete", "data", "-y")
        assert refused.returncode == 1
        assert "'data' is mounted by hello" in refused.stderr
        assert "--force" in refused.stderr
        assert volume_folder.exists()
        declined = volumes("delete", "data", "--force", answer="n\n")
        assert "which hello has mounted" in declined.stderr
        assert volume_folder.exists()
        assert volumes("delete", "data", "--force", "-y").returncode == 0
        assert not volume_folder.exists()
    finally:
        project.forget()
