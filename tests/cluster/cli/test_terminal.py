"""On a real cluster: what a deploy says while it waits, and what a pod lacks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.conftest import Installed, Kubectl

pytestmark = pytest.mark.cluster

KT = str(Path(sys.executable).parent / "kt")
PROGRAM = """
import sys, time
import kubetorch as kt

def lacks(x):
    import hypothesis
    return x

def train(epochs):
    for epoch in range(epochs):
        kt.progress(epoch + 1, epochs, "epochs")
    time.sleep(60)

def main(what):
    compute = kt.Compute(cpus="10m")
    if what == "lacks":
        kt.fn(lacks).to(compute)(1)
    elif what == "spawn":
        print(kt.fn(train).to(compute).spawn(4).id)
    elif what == "quota":
        kt.fn(train, name="crowd").to(kt.Compute(cpus="10m", replicas=6, launch_timeout=20))
    elif what == "steps":
        image = kt.Image().run_bash("sleep 12; echo built")
        kt.fn(train, name="steps").to(kt.Compute(cpus="10m", replicas=3, image=image))

if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.fixture
def program(installed: Installed, tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def run(installed: Installed, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, **installed.environ},
        capture_output=True,
        text=True,
        timeout=110,
    )


@contextlib.contextmanager
def quota(kubectl: Kubectl, namespace: str, pods: int) -> Iterator[None]:
    kubectl("create", "quota", "crowded", "-n", namespace, f"--hard=pods={pods}")
    try:
        yield
    finally:
        kubectl("delete", "quota", "crowded", "-n", namespace)


def causes(printed: str) -> Counter[str]:
    """The events that a deploy showed, without what differs from pod to pod."""
    event_messages = re.findall(r"^\(\S+ events\) .*? \| \S+ ?\S*?: (.*)$", printed, re.MULTILINE)
    return Counter(re.sub(r"\d+", "#", line) for line in event_messages)


def test_events_of_one_cause_are_one_line_and_waits_have_lines(
    installed: Installed, kubectl: Kubectl, program: Path
) -> None:
    completed = run(installed, sys.executable, str(program), "steps")
    print(completed.stdout, completed.stderr)
    assert completed.returncode == 0
    assert completed.stderr.count(" events) ") == sum(causes(completed.stderr).values())
    assert max(causes(completed.stderr).values(), default=1) == 1
    assert completed.stderr.count("(steps) step 1/1: RUN sleep 12; echo built\n") == 1
    assert re.search(r"\(steps\) .*step 1/1: RUN sleep 12; echo built, \d+s", completed.stderr)
    run(installed, KT, "teardown", "steps", "-y")
    with quota(kubectl, installed.namespace, 3):
        completed = run(installed, sys.executable, str(program), "quota")
    print(completed.stdout, completed.stderr)
    assert completed.returncode == 1
    assert "QuotaExceeded" in completed.stderr or "Timeout" in completed.stderr
    assert max(causes(completed.stderr).values(), default=1) == 1
    run(installed, KT, "teardown", "crowd", "-y")


def test_a_module_that_pods_lack_is_named_with_its_package(
    installed: Installed, program: Path
) -> None:
    completed = run(installed, sys.executable, str(program), "lacks")
    expected_hint = 'hint: kt.Compute(image=kt.Image().pip_install(["hypothesis"])) installs it'
    assert expected_hint in completed.stderr
    run(installed, KT, "teardown", "lacks", "-y")


def test_progress_and_all_namespaces_are_listed(installed: Installed, program: Path) -> None:
    completed = run(installed, sys.executable, str(program), "spawn")
    call = completed.stdout.split()[-1]
    for _ in range(60):
        progress = json.loads(run(installed, KT, "calls", "show", call, "--json").stdout)[
            "progress"
        ]
        if progress == {"current": 4, "total": 4, "message": "epochs"}:
            break
    assert progress == {"current": 4, "total": 4, "message": "epochs"}
    listed = run(installed, KT, "list", "-A")
    assert re.search(rf"^{installed.namespace} +train ", listed.stdout, re.MULTILINE), listed
    run(installed, KT, "teardown", "train", "-y")
