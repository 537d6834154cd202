"""`kt secrets` and `kt volumes` against a local service."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import kubetorch as kt
from tests.local import commands
from tests.local.user_project import UserProject

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(emptied_home: Path) -> Run:
    def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return commands.kt(*arguments, **environ)

    return run


def test_a_secret_from_its_creation_to_its_end(run: Run) -> None:
    assert run("secrets").stdout == "No secrets found in default namespace\n"
    created = run("secrets", "create", "hf-token", "-v", "HF_TOKEN", HF_TOKEN="hush-value")
    assert created.stdout == (
        "✔ Secret created successfully\nName: hf-token\nNamespace: default\n"
    ), created.stderr
    second_create = run("secrets", "create", "hf-token", "-v", "HF_TOKEN", HF_TOKEN="other")
    assert "already exists in namespace default, skipping creation" in second_create.stdout
    assert run("secrets", "list").stdout.splitlines()[1].split() == ["hf-token", "-", "default"]
    described = run("secrets", "describe", "hf-token")
    assert "K8 Name: kt.secret.global.hf-token\nNamespace: default\n" in described.stdout
    assert "hush-value" not in described.stdout
    assert "HF_TOKEN: hush-value" in run("secrets", "describe", "hf-token", "--show").stdout
    updated = run("secrets", "update", "hf-token", "-v", "HF_TOKEN", HF_TOKEN="newer")
    assert "updated" in updated.stdout, updated.stderr
    shown = json.loads(run("secrets", "describe", "hf-token", "-s", "--json").stdout)
    assert shown["data"] == {"HF_TOKEN": "newer"}
    deleted = run("secrets", "delete", "hf-token", "-y")
    assert deleted.stdout == "✓ Deleted secret hf-token\n"
    assert deleted.stderr.partition("\n")[2].startswith("Deleting 1 secret(s)...\n  - hf-token\n")
    assert json.loads(run("secrets", "--json").stdout) == []


def test_a_secret_has_the_spellings_of_the_earlier_guides(run: Run, tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_text("hush-key")
    created = run("secret", "create", "both", "--from-env", "ONE,TWO", ONE="hush-1", TWO="hush-2")
    assert "created" in created.stdout, created.stderr
    assert "created" in run("secret", "create", "key", "--from-file", str(key)).stdout
    shown = run("secret", "describe", "both", "-s", "--json").stdout
    assert json.loads(shown)["data"] == {"ONE": "hush-1", "TWO": "hush-2"}
    shown = run("secret", "describe", "key", "-s", "--json").stdout
    assert json.loads(shown)["data"] == {"key.pem": "hush-key"}


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["create", "x", "-v", "NO_SUCH_VARIABLE"], 1, "NO_SUCH_VARIABLE"),
        (["create", "x"], 1, "--env-vars"),
        (["create", "x", "-c", "opnai"], 1, "is not a supported provider"),
        (["describe", "nowhere"], 1, "nowhere"),
        (["update", "nowhere", "-v", "HOME"], 1, "kt secrets create"),
        (["delete", "nowhere", "-y"], 1, "nowhere"),
        (["create", "x", "-v", "HOME", "--from-env", "PATH, HOME"], 1, "HOME is given 2 times"),
        (["create", "x", "-v", "A=1", "-v", "A=2"], 1, "A is given 2 times"),
        (["create", "x", "-v", "A B"], 1, "hint: -v NAME for each variable"),
        (["create", "my_big Token", "-v", "HOME"], 1, "hint: such as my-big-token"),
        (["describe", "my token"], 1, "the secret's name is 'my token'"),
        (["create", "-v", "HOME"], 1, "kt secrets create takes the name of a secret"),
        (["describe"], 1, "kt secrets describe takes the name of a secret"),
        (["delete"], 1, "or --prefix"),
        (["delete", "x", "-x", "y"], 1, "not both"),
        (["list", "x"], 1, "kt secrets describe x shows it"),
        (["list", "-v", "HOME"], 1, "takes no --env-vars\nhint: it is for create, update"),
        (["update", "x", "-A", "-v", "HOME"], 1, "takes no --all-namespaces"),
        (["burn", "nowhere"], 2, "list, create, update, delete, describe"),
    ],
)
def test_what_cannot_be_done_with_secrets_is_said_and_is_exit_status_1(
    run: Run, arguments: list[str], status: int, message: str
) -> None:
    completed = run("secrets", *arguments)
    assert message in completed.stderr
    assert completed.returncode == status


def test_variables_of_a_secret_have_the_value_that_is_given_or_that_of_here(run: Run) -> None:
    arguments = ("-v", "A=1", "-v", "B=x=y", "-v", "HERE")
    created = run("secrets", "create", "mixed", *arguments, HERE="here")
    assert created.returncode == 0, created.stderr
    shown = run("secrets", "describe", "mixed", "--show").stdout
    assert all(pair in shown for pair in ("A: 1", "B: x=y", "HERE: here")), shown
    assert run("secrets", "update", "mixed", "-v", "A=2").returncode == 0
    assert "A: 2" in run("secrets", "describe", "mixed", "--show").stdout
    assert run("secrets", "create", "other", "-v", "no-name=1").returncode == 1
    run("secrets", "delete", "mixed", "-y")


def test_a_mistyped_volume_is_named(run: Run) -> None:
    run("volumes", "create", "dataset")
    completed = run("volumes", "delete", "datset", "-y")
    assert (completed.returncode, "hint: did you mean dataset? " in completed.stderr) == (1, True)
    run("volumes", "delete", "dataset", "-y")


def test_a_volume_from_its_creation_to_its_end(run: Run, tmp_path: Path) -> None:
    assert run("volumes").stdout == "No volumes found in default namespace\n"
    created = run("volumes", "create", "data", "--size", "2Gi")
    assert created.stdout.startswith("✓ Created volume data\n• Name: data\n"), created.stderr
    assert "• Mount Path: /ktfs/data\n" in created.stdout
    assert run("volumes", "create", "data").stdout.startswith("Volume data already exists\n")
    (listed,) = json.loads(run("volumes", "list", "--json").stdout)
    assert (listed["size"], listed["status"], listed["used_by"]) == ("2Gi", "Bound", [])
    header, row = run("volumes", "-A").stdout.splitlines()
    assert header.split()[:3] == ["Namespace", "Name", "PVC"]
    assert row.split()[:2] == ["default", "data"]
    # A shell that says where it is.
    shell = tmp_path / "shell"
    shell.write_text("#!/bin/sh\npwd\n")
    shell.chmod(0o700)
    assert run("volumes", "ssh", "data", SHELL=str(shell)).stdout.strip() == listed["folder"]
    assert run("volumes", "delete", "data", "-y").stdout == "✓ Deleted volume data\n"
    assert not Path(listed["folder"]).exists()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["create"], 1, "name is required"),
        (["delete", "nowhere"], 1, "'nowhere' does not exist"),
        (["create", "data", "-s", "2 GB"], 1, "size is '2 GB'"),
        (["create", "data", "-m", "data"], 1, "mount_path is 'data'"),
        (["create", "data", "-a", "RWO2"], 1, "access_mode is 'RWO2'"),
        (["burn", "data"], 2, "list, create, delete, ssh"),
    ],
)
def test_what_cannot_be_done_with_volumes_is_said(
    run: Run, arguments: list[str], status: int, message: str
) -> None:
    completed = run("volumes", *arguments)
    assert message in completed.stderr
    assert completed.returncode == status


def test_both_say_which_services_use_them(run: Run, tmp_path: Path) -> None:
    project = UserProject(tmp_path / "shop")
    try:
        jobs = project.module("def hello():\n    return 'hello'\n")
        secret = kt.Secret("quince", values={"Q": "1"})
        kt.fn(jobs.hello).to(kt.Compute(cpus="0.1", secrets=[secret]))
        (view,) = json.loads(run("secrets", "--json").stdout)
        assert view["used_by"] == ["hello"]
        updated = run("secrets", "update", "quince", "-v", "Q", Q="2")
        assert "hello sees the new values when it is deployed again" in updated.stderr
    finally:
        project.forget()
