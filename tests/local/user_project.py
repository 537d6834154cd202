"""A user's project in a folder of its own: files, modules imported here, programs run."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

from tests.local import commands

_numbers = itertools.count()


class UserProject:
    """A folder with a marker of a project.

    Args:
        folder: Where it is made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "pyproject.toml").touch()
        #: Makes names of modules and services differ from those of other projects.
        self.suffix = str(next(_numbers))

    def write(self, name: str, source: str) -> Path:
        """Write a file; the time of a change is never that of the one before."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return path

    def module(self, source: str, name: str = "jobs") -> ModuleType:
        """Write a module and import it here."""
        path = self.write(f"{name}{self.suffix}.py", source)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module

    def run(
        self, program: str | Path, *arguments: str, timeout: float = 60, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of the project."""
        return commands.python(
            str(program), *arguments, cwd=self.folder, timeout=timeout, **environ
        )

    def forget(self) -> None:
        """Forget the modules that were imported here."""
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(f"{self.folder}/"):
                del sys.modules[name]
