"""`python -m tools.goldens`: what it prints, writes and refuses."""

import pytest
import yaml

from tools.goldens import main

TWO = """
import kubetorch as kt

first = kt.Compute(cpus="1", replicas=2)
pool = kt.Compute(selector={"app": "workers"})
not_one = 3

if __name__ == "__main__":
    raise SystemExit("a deploy would stand here")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "computes.py"
    path.write_text(TWO)
    return path


def test_it_prints_all_objects_of_each_compute(file, capsys):
    assert main([str(file)]) == 0
    printed = capsys.readouterr().out
    printed_objects = [
        (manifest["kind"], manifest["metadata"]["name"]) for manifest in yaml.safe_load_all(printed)
    ]
    pods = [("Deployment", "first"), ("Service", "first"), ("Service", "first-headless")]
    assert printed_objects == [*pods, ("Service", "pool")]
    assert "# first\n" in printed and "# pool\n" in printed


def test_it_writes_a_file_for_each(file, tmp_path, capsys):
    folder = tmp_path / "made" / "here"
    assert main([str(file), "--into", str(folder)]) == 0
    assert capsys.readouterr().out == ""
    assert sorted(path.name for path in folder.iterdir()) == ["first.yaml", "pool.yaml"]
    first = next(yaml.safe_load_all((folder / "first.yaml").read_text()))
    assert first["spec"]["replicas"] == 2


def test_a_file_without_computes_is_an_error(tmp_path, capsys):
    empty = tmp_path / "empty.py"
    empty.write_text("x = 1\n")
    assert main([str(empty)]) == 1
    assert "no kt.Compute" in capsys.readouterr().err
