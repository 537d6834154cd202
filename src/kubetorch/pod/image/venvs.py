"""Virtual environments on top of an interpreter and its packages.

uv makes the environments. The packages of the interpreter are visible through a `.pth` file. While
a step installs packages, each package of the interpreter has a stand-in, so that the installer
takes it for installed: with torch in the interpreter, a package that needs torch does not bring
another one. An installer that needs another version replaces the stand-in, and the interpreter's
own package stays as it is.

A copy shares its files with the original (hard links): installers replace files and write none.

The pods of a machine share environments, which are made once, never changed, collected when unused:

    <folder>/<digest>/        an environment
    <folder>/<digest>.lock    locked by the agents that use it; its time says when they last did
    <folder>/.<random>/       an environment that is being made
    <folder>/uv/              uv's downloads

A whole environment gets its name by a rename, so an unfinished environment is never used.
Two pods that need the same environment at the same time both make it, and one of the two is kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from kubetorch.datastore.blobs import digest_of
from kubetorch.errors import StartupError
from kubetorch.pod.tuning import LIMITS, TIMING

#: Lets an environment see the packages of its interpreter.
_PTH = "_kubetorch.pth"
_RECORD = "RECORD"
#: The first line of a stand-in's record: it names a file that never exists.
_STAND_IN = "kubetorch-stand-in,,\n"
_PIP = """#!/bin/sh
here=$(dirname "$0")
"$here/python" -c 'import pip' 2>/dev/null && exec "$here/python" -m pip "$@"
exec "$here/uv" pip "$@"
"""
#: Has the interpreter beside it run a Python program, as uv has it.
_PROGRAM = b"""#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")"/'python' "$0" "$@"
' '''
"""
_log = logging.getLogger(__name__)


def find_uv() -> str:
    beside = Path(sys.prefix, "bin", "uv")
    if beside.exists():
        return str(beside)
    try:
        import uv  # noqa: PLC0415  # only steps that install need it

        return os.fsdecode(uv.find_uv_bin())
    except (ImportError, FileNotFoundError) as error:
        raise StartupError(f"uv is not installed: {error}", hint="pip install uv") from error


def base_digest(python: str, version: str | None, site: Sequence[str]) -> str:
    """Identity of an interpreter with its packages."""
    packages = [str(path) for path in _distributions(site)]
    return digest_of(json.dumps([2, python, version, packages]).encode())


def create_command(uv: str, python: str, folder: Path) -> list[str]:
    """The command that makes an environment that can be moved."""
    options = ["--quiet", "--relocatable", "--no-project", "--no-python-downloads"]
    return [uv, "venv", *options, "--python", python, str(folder)]


def finish_creation(folder: Path, site: Sequence[str], uv: str) -> None:
    """Make installers, and the packages of the interpreter, visible in a new environment."""
    (folder / "bin" / "uv").symlink_to(uv)
    version = site_packages(folder).parent.name.removeprefix("python")
    for name in ("pip", "pip3", f"pip{version}"):
        # The interpreter's own program would install into the interpreter.
        (folder / "bin" / name).write_text(_PIP)
        (folder / "bin" / name).chmod(0o755)
    for program in _programs(site):
        target = folder / "bin" / program.name
        code = None if target.exists() else _code_of(program)
        if code is not None:
            target.write_bytes(_PROGRAM + code)
            target.chmod(0o755)
    # Byte code of modules at the top level must not look like another package.
    (site_packages(folder) / "__pycache__").mkdir()
    lines = [f"import site; site.addsitedir({entry!r})\n" for entry in site]
    (site_packages(folder) / _PTH).write_text("".join(lines))


def _programs(site: Sequence[str]) -> Iterator[Path]:
    """The programs of the packages of an interpreter, wherever their installer put them."""
    for path in _distributions(site):
        try:
            lines = (path / _RECORD).read_text().splitlines()
        except (OSError, UnicodeDecodeError):  # not every installer writes one
            continue
        for name in (line.partition(",")[0] for line in lines if line.startswith("../")):
            program = path.parent / name
            if program.parent.name == "bin":
                yield program


def _code_of(program: Path) -> bytes | None:
    """A Python program without the lines that name its interpreter; `None` for other files."""
    try:
        head, _, code = program.read_bytes().partition(b"\n")
    except OSError:
        return None
    if head.startswith(b"#!") and b"python" in head:
        return code
    if head == b"#!/bin/sh" and code.startswith(b"'''exec'"):  # a path with blanks, or a long one
        return code.split(b"\n", 2)[-1]
    return None


def python_of(folder: Path) -> str:
    return str(folder / "bin" / "python")


def site_packages(folder: Path) -> Path:
    for path in folder.glob("lib/python*/site-packages"):
        return path
    raise StartupError(f"{folder} is no virtual environment")


def clone(source: Path, target: Path) -> None:
    """Copy an environment to a path of its own. Whatever was at the target is removed."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True, copy_function=_link)
    source_path, target_path = os.fsencode(source), os.fsencode(target)
    for program in (target / "bin").iterdir():
        if program.is_symlink() or not program.is_file():
            continue
        content = program.read_bytes()
        if source_path in content:  # the program names its interpreter
            mode = program.stat().st_mode
            program.unlink()
            program.write_bytes(content.replace(source_path, target_path))
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
    """The metadata folders of installed packages: of each project the one found first."""
    metadata_folders: dict[str, Path] = {}
    for folder in site:
        try:
            paths = sorted(Path(folder).iterdir())
        except OSError:
            continue
        for path in paths:
            if path.suffix in (".dist-info", ".egg-info"):
                project = path.stem.partition("-")[0].lower().replace("_", "-").replace(".", "-")
                metadata_folders.setdefault(project, path)
    return list(metadata_folders.values())


def put_stand_ins(site_folder: Path, site: Sequence[str]) -> None:
    """Let the installer see the packages of other folders."""
    for path in _distributions([str(site_folder), *site]):
        project, _, rest = path.stem.partition("-")
        version = rest.partition("-")[0]
        if path.parent != site_folder and version:
            _put_stand_in(site_folder / f"{project}-{version}.dist-info", path)


def _put_stand_in(stand_in: Path, original: Path) -> None:
    stand_in.mkdir(exist_ok=True)
    is_folder = original.is_dir()
    metadata_files = {"METADATA": original}
    if is_folder:
        kind = "METADATA" if original.suffix == ".dist-info" else "PKG-INFO"
        metadata_files = {
            "METADATA": original / kind,
            "entry_points.txt": original / "entry_points.txt",
        }
    for name, path in metadata_files.items():
        if path.exists():
            (stand_in / name).symlink_to(path)
    lines = [f"{stand_in.name}/{name},,\n" for name in (*metadata_files, _RECORD)]
    (stand_in / _RECORD).write_text(_STAND_IN + "".join(lines))


def remove_stand_ins(site_folder: Path) -> None:
    """Remove the stand-ins, and leave the packages that are installed in the folder."""
    for record in site_folder.glob(f"*.dist-info/{_RECORD}"):
        if record.read_bytes()[: len(_STAND_IN)] == _STAND_IN.encode():
            shutil.rmtree(record.parent)


class SharedVenvs:
    """The shared environments, as one agent sees them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._locks: OrderedDict[str, int] = OrderedDict()

    @property
    def downloads(self) -> Path:
        return self.folder / "uv"

    def use(self, digest: str) -> Path | None:
        """Return the environment of this digest, and lock it; `None` if it does not exist."""
        venv = self.folder / digest
        if not venv.is_dir():
            return None
        if digest in self._locks:
            self._locks.move_to_end(digest)
            return venv
        descriptor = self._lock(digest)
        if not venv.is_dir():  # another agent collected it in between
            os.close(descriptor)
            return None
        self._locks[digest] = descriptor
        while len(self._locks) > LIMITS.locked_venvs:
            os.close(self._locks.popitem(last=False)[1])
        return venv

    def new(self) -> Path:
        """The path of an environment that is to be made."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.folder / f".{os.urandom(8).hex()}"

    def publish(self, new_venv: Path, digest: str) -> Path:
        """Give an environment its name, unless another pod was faster."""
        (new_venv / "size").write_text(str(measure(new_venv)))
        try:
            new_venv.rename(self.folder / digest)
        except OSError:
            if not (self.folder / digest).is_dir():
                raise
            shutil.rmtree(new_venv, ignore_errors=True)
        venv = self.use(digest)
        assert venv is not None, "it was collected while it was made"
        return venv

    def close(self) -> None:
        while self._locks:
            os.close(self._locks.popitem()[1])

    def collect(
        self,
        *,
        longest_unused: float = TIMING.venv_longest_unused_seconds,
        total: int = LIMITS.venvs_bytes,
    ) -> int:
        """Remove unused environments that are old, or too many; returns how many were removed."""
        now = time.time()
        venvs = []
        for folder in self.folder.iterdir():
            with contextlib.suppress(OSError, ValueError):
                if folder.name.startswith("."):
                    if now - folder.stat().st_mtime > TIMING.venv_abandoned_seconds:
                        shutil.rmtree(folder, ignore_errors=True)
                elif (folder / "size").is_file():
                    last_use = (self.folder / f"{folder.name}.lock").stat().st_mtime
                    venvs.append((last_use, int((folder / "size").read_text()), folder.name))
        bytes_left = sum(size for _, size, _ in venvs)
        removed = 0
        for last_use, size, digest in sorted(venvs):
            is_needed = now - last_use <= longest_unused and bytes_left <= total
            if not is_needed and self._remove(digest):
                bytes_left -= size
                removed += 1
        return removed

    def _lock(self, digest: str) -> int:
        """Mark an environment as used, for as long as the descriptor is open."""
        path = self.folder / f"{digest}.lock"
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(descriptor).st_ino == path.stat().st_ino:
                    os.utime(descriptor)
                    return descriptor
            os.close(descriptor)

    def _remove(self, digest: str) -> bool:
        path = self.folder / f"{digest}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            trash = self.new()
            (self.folder / digest).rename(trash)
            path.unlink()
        except OSError:  # another agent uses it
            return False
        finally:
            os.close(descriptor)
        shutil.rmtree(trash, ignore_errors=True)
        _log.info("environment collected digest=%s", digest)
        return True
