"""What `kt` and programs show on a terminal, and what of it comes through a pipe."""

import json
import os
import re
import subprocess
import sys

import pytest

import kubetorch as kt

PROGRAM = """
import time
import kubetorch as kt

def train(epochs):
    for epoch in range(epochs):
        kt.progress(epoch + 1, epochs, f"epoch {epoch + 1}")
        time.sleep(0.2)
    time.sleep(60)
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "jobs.py").write_text(PROGRAM)
    sys.path.insert(0, str(folder))
    import jobs

    return jobs


def run_kt(*words, **environ):
    done = subprocess.run(
        ["kt", *words], env={**os.environ, **environ}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_trust_24_all_namespaces_ages_and_time_zones(jobs):
    compute = kt.Compute(cpus="0.1")
    kt.fn(jobs.train).to(compute)
    other = kt.fn(jobs.train, name="elsewhere").to(kt.Compute(cpus="0.1", namespace="research"))
    assert "elsewhere" not in run_kt("list")
    header, *rows = run_kt("list", "-A", TZ="Asia/Tokyo").splitlines()
    assert header.split()[:2] == ["NAMESPACE", "RESOURCE"]
    found = {row.split()[1]: row for row in rows}
    assert found["elsewhere"].startswith("research ")
    assert found["train"].startswith("default ")
    assert re.search(r"  \d+s  .* \d{4}-\d\d-\d\d \d\d:\d\d:\d\d JST  ", found["train"])
    assert {one["namespace"] for one in json.loads(run_kt("list", "-A", "--json"))} == {
        *("default", "research")
    }
    assert re.search(r"Created: .* JST \(\d+s ago\)", run_kt("describe", "train", TZ="Asia/Tokyo"))
    other.teardown()


def test_trust_24_progress_is_shown_among_the_calls(jobs):
    call = kt.fn(jobs.train).to(kt.Compute(cpus="0.1")).spawn(4)
    wanted = {"current": 4, "total": 4, "message": "epoch 4"}
    # The last report, too, which comes less than a second after the one before.
    for _ in range(100):
        found = json.loads(run_kt("calls", "show", call.id, "--json"))["progress"]
        if found == wanted:
            break
    assert found == wanted
    header, row = run_kt("calls").splitlines()
    assert dict(zip(header.split(), row.split(), strict=True))["PROGRESS"] == "100%"
    assert "Progress: 100% 4/4 epoch 4\n" in run_kt("calls", "show", call.id)
    call.cancel()
    call.wait(30)
    assert json.loads(run_kt("calls", "show", call.id, "--json"))["progress"] is None
