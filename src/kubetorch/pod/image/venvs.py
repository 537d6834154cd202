"""Virtual environments on top of an interpreter and all that is installed in it.

They are made by uv. The packages of the interpreter are visible through a `.pth` file. While
something is installed, each of them has a stand-in, so that the installer takes it for installed:
with torch in the interpreter, what needs torch does not bring another one. When another version
is wanted the stand-in makes place for it, and the interpreter's own stays as it is.

A copy shares its files with the original (hard links): installers replace files and write none.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from kubetorch.datastore.blobs import digest_of
from kubetorch.errors import StartupError

#: Lets an environment see the packages of its interpreter.
_PTH = "_kubetorch.pth"
_RECORD = "RECORD"
#: What the record of a stand-in begins with: a file that is never there.
_STAND_IN = "kubetorch-stand-in,,\n"
_PIP = """#!/bin/sh
here=$(dirname "$0")
"$here/python" -c 'import pip' 2>/dev/null && exec "$here/python" -m pip "$@"
exec "$here/uv" pip "$@"
"""


def find_uv() -> str:
    """The path of uv.

    Raises:
        StartupError: It is not installed.
    """
    beside = Path(sys.prefix, "bin", "uv")
    if beside.exists():
        return str(beside)
    try:
        import uv  # noqa: PLC0415  # only steps that install need it

        return os.fsdecode(uv.find_uv_bin())
    except (ImportError, FileNotFoundError) as error:
        raise StartupError(f"uv is not installed: {error}", hint="pip install uv") from error


def base_digest(python: str, version: str | None, site: Sequence[str]) -> str:
    """Identity of an interpreter with what is installed in it.

    Args:
        python: Its path.
        version: Its version.
        site: Folders that its packages are installed in.
    """
    found = [str(path) for path in _distributions(site)]
    return digest_of(json.dumps([1, python, version, found]).encode())


def create_command(uv: str, python: str, folder: Path) -> list[str]:
    """What makes an environment that can be moved."""
    options = ["--quiet", "--relocatable", "--no-project", "--no-python-downloads"]
    return [uv, "venv", *options, "--python", python, str(folder)]


def finish_creation(folder: Path, site: Sequence[str], uv: str) -> None:
    """Make installers, and the packages of the interpreter, visible in a new environment."""
    (folder / "bin" / "uv").symlink_to(uv)
    for name in ("pip", "pip3"):
        # The interpreter's own program would install into the interpreter.
        (folder / "bin" / name).write_text(_PIP)
        (folder / "bin" / name).chmod(0o755)
    # Byte code of modules at the top level must not look like another package.
    (site_packages(folder) / "__pycache__").mkdir()
    lines = [f"import site; site.addsitedir({entry!r})\n" for entry in site]
    (site_packages(folder) / _PTH).write_text("".join(lines))


def python_of(folder: Path) -> str:
    """The interpreter of an environment."""
    return str(folder / "bin" / "python")


def site_packages(folder: Path) -> Path:
    """Where packages are installed in an environment.

    Raises:
        StartupError: It is none.
    """
    for found in folder.glob("lib/python*/site-packages"):
        return found
    raise StartupError(f"{folder} is no virtual environment")


def clone(source: Path, target: Path) -> None:
    """A copy of an environment, at a path of its own. What was at the target is removed.

    Raises:
        OSError: It cannot be written.
    """
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True, copy_function=_link)
    here, there = os.fsencode(source), os.fsencode(target)
    for program in (target / "bin").iterdir():
        if program.is_symlink() or not program.is_file():
            continue
        content = program.read_bytes()
        if here in content:  # it names the interpreter that it is for
            mode = program.stat().st_mode
            program.unlink()
            program.write_bytes(content.replace(here, there))
            program.chmod(mode)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another file system, or too many links
        shutil.copy2(source, target, follow_symlinks=False)


def measure(folder: Path) -> int:
    """Bytes of the files in an environment."""
    total = 0
    for above, _, names in os.walk(folder):
        for name in names:
            total += os.lstat(os.path.join(above, name)).st_size  # noqa: PTH118  # thousands
    return total


# --------------------------------------------------------------------------------------- stand-ins


def _distributions(site: Sequence[str]) -> list[Path]:
    """The metadata folders of what is installed, what is found first before what it hides."""
    found: dict[str, Path] = {}
    for folder in site:
        try:
            paths = sorted(Path(folder).iterdir())
        except OSError:
            continue
        for path in paths:
            if path.suffix in (".dist-info", ".egg-info"):
                project = path.stem.partition("-")[0].lower().replace("_", "-").replace(".", "-")
                found.setdefault(project, path)
    return list(found.values())


def put_stand_ins(own: Path, site: Sequence[str]) -> None:
    """Let the installer see what lies elsewhere.

    Args:
        own: The folder that it installs into.
        site: Folders that have more, the first before others.

    Raises:
        OSError: They cannot be written.
    """
    for path in _distributions([str(own), *site]):
        project, _, rest = path.stem.partition("-")
        version = rest.partition("-")[0]
        if path.parent != own and version:
            _put_stand_in(own / f"{project}-{version}.dist-info", path)


def _put_stand_in(place: Path, original: Path) -> None:
    place.mkdir(exist_ok=True)
    is_folder = original.is_dir()
    found = {"METADATA": original}
    if is_folder:
        kind = "METADATA" if original.suffix == ".dist-info" else "PKG-INFO"
        found = {"METADATA": original / kind, "entry_points.txt": original / "entry_points.txt"}
    for name, path in found.items():
        if path.exists():
            (place / name).symlink_to(path)
    lines = [f"{place.name}/{name},,\n" for name in (*found, _RECORD)]
    (place / _RECORD).write_text(_STAND_IN + "".join(lines))


def remove_stand_ins(own: Path) -> None:
    """Leave what is installed in the folder alone."""
    for record in own.glob(f"*.dist-info/{_RECORD}"):
        if record.read_bytes()[: len(_STAND_IN)] == _STAND_IN.encode():
            shutil.rmtree(record.parent)
