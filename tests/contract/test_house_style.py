"""What CONTRIBUTING.md asks of every file, as far as a program can check it."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest

import kubetorch

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "kubetorch"
DRAWERS = {"base", "common", "core", "globals", "helpers", "manager", "misc", "types", "utils"}
#: The protocols that the other files of their folders implement.
BASES = ("backends/base.py",)
#: Folders of Python that people read, so code that does not run has no place in them.
READ = ("src", "tests", "benchmarks", "examples")
#: Its comments are those of the document that it transcribes.
TRANSCRIBED = {"tests/seeds/programs/004_autoscaling/complete_reference.py"}


def _files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def _entries(folder: Path) -> list[Path]:
    """All files and folders that somebody wrote."""
    return [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_a_file_says_what_it_holds() -> None:
    texts = {_name(path): path.read_text() for path in _files("src", "benchmarks")}
    mute = [name for name, text in texts.items() if not text.startswith(('"""', 'r"""', "#!"))]
    assert not mute, "no module docstring"


def test_a_file_is_named_after_what_it_holds() -> None:
    drawers = [_name(path) for path in _entries(SOURCES) if path.stem.strip("_") in DRAWERS]
    assert not [name for name in drawers if not name.endswith(BASES)]


def test_no_code_is_commented_out() -> None:
    written = (path for path in _files(*READ) if _name(path) not in TRANSCRIBED)
    suspects = [suspect for path in written for suspect in _suspects(path)]
    assert not suspects, "\n".join(suspects)


def _suspects(path: Path) -> Iterator[str]:
    """The comments with a line of their own that are code."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if any(_is_code(line.lstrip("#: ")) for line in map(str.strip, lines) if line[:1] == "#"):
        for token in tokenize.generate_tokens(iter([*lines, ""]).__next__):
            if token.type == tokenize.COMMENT and token.line.strip() == token.string:
                text = token.string.lstrip("#: ")
                if _is_code(text):
                    yield f"{_name(path)}:{token.start[0]}: {text}"


def _is_code(text: str) -> bool:
    """Whether a comment is a statement: an assignment, a call, an import, a return, ..."""
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return False
    return any(
        not isinstance(statement, (ast.Expr, ast.AnnAssign))
        or isinstance(getattr(statement, "value", None), (ast.Call, ast.Await))
        for statement in body
    )


def test_a_commented_statement_is_recognised_and_prose_is_not() -> None:
    assert _is_code("x = 3")
    assert _is_code("return value")
    assert _is_code("process.kill()")
    assert not _is_code("300 s: pulling an image takes about four minutes.")
    assert not _is_code("see `kubetorch.wire.tokens`")
    assert not _is_code("type")


@pytest.mark.timeout(300)  # seconds on a machine with time
def test_imports_only_go_down() -> None:
    command = Path(sys.executable).with_name("lint-imports")
    completed = subprocess.run([command], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert completed.returncode == 0, completed.stdout + completed.stderr


def _twins() -> Iterator[tuple[str, ast.FunctionDef | None, ast.AsyncFunctionDef]]:
    """Each coroutine `verb_async` of the SDK beside the blocking `verb` of the same scope."""
    for path in sorted((SOURCES / "sdk").rglob("*.py")):
        tree = ast.parse(path.read_text())
        for scope in (tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))):
            blocking = {node.name: node for node in scope.body if isinstance(node, ast.FunctionDef)}
            for node in scope.body:
                if isinstance(node, ast.AsyncFunctionDef) and node.name.endswith("_async"):
                    where = f"{path.stem}.{getattr(scope, 'name', '')}.{node.name}"
                    yield where, blocking.get(node.name.removesuffix("_async")), node


def test_blocking_and_async_forms_agree() -> None:
    for where, blocking, awaiting in _twins():
        if blocking is None:
            assert awaiting.name.startswith("_"), f"{where} has no blocking form"
            continue
        assert ast.unparse(blocking.args) == ast.unparse(awaiting.args), where
        assert ast.unparse(blocking.returns) == ast.unparse(awaiting.returns), where
        assert awaiting.name.startswith("_") or ast.get_docstring(blocking), where


def test_every_public_name_can_be_imported_and_documents_itself() -> None:
    assert kubetorch.__all__ == sorted(set(kubetorch.__all__))
    for name in kubetorch.__all__:
        value = getattr(kubetorch, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert inspect.getdoc(value), f"kubetorch.{name} has no docstring"
        for method, member in vars(value).items() if inspect.isclass(value) else ():
            if not method.startswith("_") and isinstance(member, (FunctionType, property)):
                assert inspect.getdoc(member), f"kubetorch.{name}.{method} has no docstring"
