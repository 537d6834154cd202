"""Virtual environments on top of an interpreter and all that is installed in it.

They are made by uv. The packages of the interpreter are visible through a `.pth` file. While
something is installed, each of them has a stand-in, so that the installer takes it for installed:
with torch in the interpreter, what needs torch does not bring another one. When another version
is wanted the stand-in makes place for it, and the interpreter's own stays as it is.

A copy shares its files with the original (hard links): installers replace files and write none.

The pods of a machine share environments, which are made once, never changed, collected when unused:

    <folder>/<digest>/        an environment
    <folder>/<digest>.lock    locked by the agents that use it; its time says when that was last
    <folder>/.<random>/       one that is being made
    <folder>/uv/              uv's downloads

An environment gets its name by a rename once it is whole, so one that was cut short is never used.
Two pods that make the same one at the same time both make it, and one of the two is kept.
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
#: Has the interpreter beside it run a Python program, as uv has it.
_PROGRAM = b"""#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")"/'python' "$0" "$@"
' '''
"""
#: Environments that nobody used for so many seconds are removed.
LONGEST_UNUSED = 14 * 86400.0
#: Bytes that all environments may have together before those that nobody uses are removed.
TOTAL_BYTES = 20 * 1024**3
#: Environments that an agent holds: those of the generations that it may still serve.
_HELD = 8
#: Seconds after which what is being made was left behind.
_ABANDONED = 86400.0
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
    """Identity of an interpreter with what is installed in it."""
    found = [str(path) for path in _distributions(site)]
    return digest_of(json.dumps([2, python, version, found]).encode())


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
        place = folder / "bin" / program.name
        code = None if place.exists() else _code_of(program)
        if code is not None:
            place.write_bytes(_PROGRAM + code)
            place.chmod(0o755)
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
    """A Python program without the lines that name its interpreter; `None` if it is none."""
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
    for found in folder.glob("lib/python*/site-packages"):
        return found
    raise StartupError(f"{folder} is no virtual environment")


def clone(source: Path, target: Path) -> None:
    """A copy of an environment, at a path of its own. What was at the target is removed."""
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
    """Let the installer see what lies elsewhere."""
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


class SharedVenvs:
    """The shared environments, as one agent sees them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._locks: OrderedDict[str, int] = OrderedDict()

    @property
    def downloads(self) -> Path:
        return self.folder / "uv"

    def use(self, digest: str) -> Path | None:
        """The environment of this digest, kept from now on; `None` if there is none."""
        place = self.folder / digest
        if not place.is_dir():
            return None
        if digest in self._locks:
            self._locks.move_to_end(digest)
            return place
        descriptor = self._lock(digest)
        if not place.is_dir():  # it was collected in between
            os.close(descriptor)
            return None
        self._locks[digest] = descriptor
        while len(self._locks) > _HELD:
            os.close(self._locks.popitem(last=False)[1])
        return place

    def new(self) -> Path:
        """A place to make an environment in."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.folder / f".{os.urandom(8).hex()}"

    def publish(self, made: Path, digest: str) -> Path:
        """Give an environment its name, unless somebody was faster."""
        (made / "size").write_text(str(measure(made)))
        try:
            made.rename(self.folder / digest)
        except OSError:
            if not (self.folder / digest).is_dir():
                raise
            shutil.rmtree(made, ignore_errors=True)
        found = self.use(digest)
        assert found is not None, "it was collected while it was made"
        return found

    def close(self) -> None:
        while self._locks:
            os.close(self._locks.popitem()[1])

    def collect(self, *, longest_unused: float = LONGEST_UNUSED, total: int = TOTAL_BYTES) -> int:
        """Remove what nobody uses and is old, or too much; how many environments that were."""
        now = time.time()
        found = []
        for place in self.folder.iterdir():
            with contextlib.suppress(OSError, ValueError):
                if place.name.startswith("."):
                    if now - place.stat().st_mtime > _ABANDONED:
                        shutil.rmtree(place, ignore_errors=True)
                elif (place / "size").is_file():
                    used = (self.folder / f"{place.name}.lock").stat().st_mtime
                    found.append((used, int((place / "size").read_text()), place.name))
        bytes_left = sum(size for _, size, _ in found)
        removed = 0
        for used, size, digest in sorted(found):
            is_wanted = now - used <= longest_unused and bytes_left <= total
            if not is_wanted and self._remove(digest):
                bytes_left -= size
                removed += 1
        return removed

    def _lock(self, digest: str) -> int:
        """Say that an environment is used, for as long as the descriptor is open."""
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
            removed = self.new()
            (self.folder / digest).rename(removed)
            path.unlink()
        except OSError:  # somebody uses it
            return False
        finally:
            os.close(descriptor)
        shutil.rmtree(removed, ignore_errors=True)
        _log.info("environment collected digest=%s", digest)
        return True
