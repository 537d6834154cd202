"""Python as users write it, on a cluster: the same as on the embedded backend."""

from __future__ import annotations

import json
import zipfile

import pytest

pytestmark = pytest.mark.cluster

JOBS = """
import multiprocessing, os, sqlite3
import kubetorch as kt

class BrokenStock(kt.KubetorchError):
    pass

def say(n):
    print("child", n)

def in_pool(count):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(say, range(count), chunksize=1)

def listing(folder):
    folder = os.path.expanduser(folder)
    names = sorted(name for name in os.listdir(folder) if not name.startswith(".."))
    is_link = os.path.islink(f"{folder}/..data") and os.path.isdir(f"{folder}/..data")
    return names, is_link, open(f"{folder}/a").read()

def größe(n, *, ключ=0):
    import zipped
    return zipped.double(n) + ключ

class Zähler:
    def __init__(self):
        self.total = 0
        self.database = sqlite3.connect(":memory:")
        self.add = lambda n: n + self.database.total_changes

    def fail(self):
        error = BrokenStock("none left")
        error.add_note("of pears")
        error.rows = list(range(5000))
        raise error
"""
PROGRAM = """
if __name__ == "__main__":
    import json, sys
    compute = kt.Compute(cpus="0.01")
    kt.fn(in_pool).to(compute)(20)
    secret = kt.Secret("laid-out", values={"a": "1", "b": "2"}, path="~/.laid-out")
    listed = kt.fn(listing).to(kt.Compute(cpus="0.01", secrets=[secret]))("~/.laid-out")
    size = kt.fn(größe).to(compute)(2, ключ=3)
    counter = kt.cls(Zähler).to(compute)
    by_name = kt.cls(name="Zähler")
    try:
        by_name.fail()
    except BrokenStock as error:
        failed = [error.message, error.__notes__, "too large" in error.rows]
    found = [counter.add(3), by_name.add(4), hasattr(by_name, "total"), hasattr(counter, "nothing")]
    print(json.dumps([listed, size, found, failed]))
"""


def test_programs_run_as_on_the_embedded_backend(installed, tmp_path):
    (tmp_path / "pyproject.toml").touch()
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as packed:
        packed.writestr("zipped.py", "def double(n): return 2 * n\n")
    package = tmp_path / "übung"
    package.mkdir()
    (package / "größen.py").write_text(JOBS + PROGRAM)
    start = """
import runpy, sys
sys.path.append("packed.zip")
runpy.run_module("übung.größen", run_name="__main__", alter_sys=True)
"""
    *lines, last = installed.python(start, tmp_path).splitlines()
    listed, size, results, failed = json.loads(last)
    assert listed == [["a", "b"], True, "1"]
    assert size == 7
    assert results == [3, 4, False, False]
    assert failed == ["none left", ["of pears"], True]
    child_lines = [line.partition(") ")[2] for line in lines if ") child" in line]
    assert sorted(child_lines) == sorted(f"child {n}" for n in range(20))
