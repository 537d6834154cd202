import os
from pathlib import Path

import pytest

from kubetorch.errors import StartupError
from kubetorch.pod.image import venvs


def environment(folder: Path) -> Path:
    packages = folder / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "module.py").write_text("VALUE = 1\n")
    (folder / "bin").mkdir()
    program = folder / "bin" / "program"
    program.write_text(f"#!{folder}/bin/python\n")
    program.chmod(0o755)
    return packages


def installed(site: Path, name: str, version: str) -> Path:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"{name}.py,,\n")
    return info


def test_a_copy_shares_files_and_its_programs_are_its_own(tmp_path):
    environment(tmp_path / "a")
    venvs.clone(tmp_path / "a", tmp_path / "b")
    paths = [venvs.site_packages(tmp_path / name) / "module.py" for name in "ab"]
    assert paths[0].samefile(paths[1])
    program = tmp_path / "b" / "bin" / "program"
    assert program.read_text() == f"#!{tmp_path}/b/bin/python\n"
    assert os.access(program, os.X_OK)
    assert (tmp_path / "a" / "bin" / "program").read_text() == f"#!{tmp_path}/a/bin/python\n"


def test_a_folder_without_packages_is_no_environment(tmp_path):
    with pytest.raises(StartupError, match="is no virtual environment"):
        venvs.site_packages(tmp_path)


def test_stand_ins_show_what_lies_elsewhere_and_leave_nothing(tmp_path):
    site_packages, site = environment(tmp_path / "a"), tmp_path / "site"
    installed(site_packages, "both", "2.0")
    original = installed(site, "both", "1.0")
    only = installed(site, "only", "1.0")
    before = sorted(site_packages.iterdir())

    venvs.put_stand_ins(site_packages, [str(site)])
    assert (site_packages / only.name / "METADATA").read_text() == (only / "METADATA").read_text()
    assert not (site_packages / original.name).exists()
    venvs.remove_stand_ins(site_packages)

    assert sorted(site_packages.iterdir()) == before
    assert (only / "METADATA").exists()


def test_an_interpreter_is_another_one_when_something_else_is_installed(tmp_path):
    installed(tmp_path, "a", "1.0")
    first = venvs.base_digest("/python", "3.11.7", [str(tmp_path)])
    assert venvs.base_digest("/python", "3.11.7", [str(tmp_path)]) == first
    assert venvs.base_digest("/python", "3.12.0", [str(tmp_path)]) != first
    installed(tmp_path, "b", "1.0")
    assert venvs.base_digest("/python", "3.11.7", [str(tmp_path)]) != first
