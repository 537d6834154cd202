"""Pods bring along what programs of ours in the user's interpreter import there."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "kubetorch"
#: What runs on an interpreter of ours: agents, servers, the command line.
NOT_IN_USERS_INTERPRETER = {"cli", "controller", "install", "local", "pod"}
MODULES = {"pyyaml": "yaml"}
#: Imported where it is there: pods do without bars.
OPTIONAL = {("rich", "sdk/bars.py")}


def dependencies() -> set[str]:
    """The modules of the packages that an installation has."""
    lines = importlib.metadata.requires("kubetorch") or []
    names = [re.split(r"[<>=~ ]", line)[0] for line in lines if "extra ==" not in line]
    return {MODULES.get(name, name) for name in names}


def packages_of_runtime() -> set[str]:
    text = (ROOT / "deploy" / "runtime" / "build").read_text()
    lists = re.findall(r'^(?:compiled|pure)="(.*)"$', text, re.MULTILINE)
    assert len(lists) == 2
    return {name for line in lists for name in line.split()}


def imports(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def test_the_runtime_has_what_a_program_in_the_users_interpreter_imports() -> None:
    missing = [
        (name, place)
        for file in SOURCES.rglob("*.py")
        if (place := file.relative_to(SOURCES).as_posix()).partition("/")[0]
        not in NOT_IN_USERS_INTERPRETER
        for name in imports(file) & (dependencies() - packages_of_runtime())
    ]
    assert set(missing) == OPTIONAL
