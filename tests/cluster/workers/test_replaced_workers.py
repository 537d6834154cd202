"""Workers and pods that are replaced, and code that deletes what it stands on, on a cluster."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.cluster

JOBS = """
import os, shutil, time
import kubetorch as kt

class Notes:
    def __init__(self):
        self.kept = []

    def add(self, note, seconds=0.0):
        self.kept.append(note)
        time.sleep(seconds)
        return self.kept

def wipe(*folders):
    for folder in folders:
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)
    return [os.path.expanduser("~"), os.getcwd(), os.path.dirname(__file__)]

def where():
    return os.path.isdir(os.getcwd())
"""
PROGRAM = """
import contextlib, subprocess, sys, warnings

def added(notes, note):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kept = notes.add(note)
    return kept, [str(one.message) for one in caught if one.category is kt.InstanceReplacedWarning]

if __name__ == "__main__":
    import json
    notes = kt.cls(Notes)
    notes.to(kt.Compute(cpus="0.01"))
    found = [added(notes, 1)]
    with contextlib.suppress(kt.CallTimeoutError):
        notes.add.options(timeout=5)("lost", seconds=60)
    found += [added(notes, 2), added(notes, 3)]
    pod = notes.compute.pod_names()[0]
    subprocess.run(["kubectl", "delete", "pod", "-n", NAMESPACE, pod], check=True,
                   stdout=subprocess.DEVNULL)
    while True:
        with contextlib.suppress(kt.PodTerminatedError):
            found += [added(notes, 4)]
            break
    wipes = kt.fn(wipe, name="wiped").to(kt.Compute(cpus="0.01"))
    folders = wipes()
    wipes(*folders, "/tmp")
    wipes()
    again = kt.fn(where, name="wiped").to(kt.Compute(cpus="0.01"))()
    print(json.dumps([found, again]))
"""


def test_10_replacements_are_said_and_deletions_survived(installed, tmp_path):
    (tmp_path / "pyproject.toml").touch()
    source = f"NAMESPACE = {installed.namespace!r}\n{JOBS}{PROGRAM}"
    (tmp_path / "replaced.py").write_text(source)
    start = "import runpy\nrunpy.run_module('replaced', run_name='__main__', alter_sys=True)\n"
    *_, last = installed.python(start, tmp_path).splitlines()
    values_and_warnings, ran_after_wipe = json.loads(last)
    assert [states for states, _ in values_and_warnings] == [[1], [2], [2, 3], [4]]
    silent, recycled, none, moved = [warned for _, warned in values_and_warnings]
    assert (silent, none, ran_after_wipe) == ([], [], True)
    assert "could not be interrupted" in recycled[0]
    assert "without the state of the one before" in moved[0]
