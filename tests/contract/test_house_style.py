"""What CONTRIBUTING.md asks of every file, as far as a program can check it."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import kubetorch

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "kubetorch"
DRAWERS = {"base", "common", "core", "globals", "helpers", "manager", "misc", "types", "utils"}
#: The protocols that the other files of their folders implement.
BASES = {"backends/base.py"}
#: Folders of Python that people read, so code that does not run has no place in them.
READ = ("src", "tests", "benchmarks", "examples")
#: Its comments are those of the document that it transcribes.
TRANSCRIBED = {"tests/seeds/programs/004_autoscaling/complete_reference.py"}

#: One subject that would be harder to read in pieces.
LONGER = {"errors.py": 900, "messages.py": 480}


def _files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def _entries(folder: Path) -> list[Path]:
    """All files and folders that somebody wrote."""
    return [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", _files("src", "benchmarks"), ids=_name)
def test_a_file_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= LONGER.get(path.name, 400)
    assert ast.get_docstring(ast.parse(text)), "no module docstring"


@pytest.mark.parametrize("path", _entries(SOURCES), ids=_name)
def test_a_file_is_named_after_what_it_holds(path: Path) -> None:
    is_base = f"{path.parent.name}/{path.name}" in BASES
    assert is_base or path.stem.strip("_") not in DRAWERS


@pytest.mark.parametrize("path", _files(*READ), ids=_name)
def test_no_code_is_commented_out(path: Path) -> None:
    if _name(path) in TRANSCRIBED:
        return
    suspects = [f"{_name(path)}:{line}: {text}" for line, text in _comments(path) if _is_code(text)]
    assert not suspects, "\n".join(suspects)


def _comments(path: Path) -> Iterator[tuple[int, str]]:
    """The comments that have a line of their own."""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT and token.line.strip() == token.string:
                yield token.start[0], token.string.lstrip("#: ")


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


def test_imports_only_go_down() -> None:
    command = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([command], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


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


@pytest.mark.parametrize(
    ("blocking", "awaiting"), [pytest.param(*twin, id=name) for name, *twin in _twins()]
)
def test_blocking_and_async_forms_agree(
    blocking: ast.FunctionDef | None, awaiting: ast.AsyncFunctionDef
) -> None:
    if blocking is None:
        assert awaiting.name.startswith("_"), f"{awaiting.name} has no blocking form"
        return
    assert ast.unparse(blocking.args) == ast.unparse(awaiting.args)
    assert ast.unparse(blocking.returns) == ast.unparse(awaiting.returns)
    assert ast.get_docstring(blocking) == ast.get_docstring(awaiting) is not None


def test_every_public_name_can_be_imported_and_documents_itself() -> None:
    assert kubetorch.__all__ == sorted(set(kubetorch.__all__))
    for name in kubetorch.__all__:
        value = getattr(kubetorch, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert inspect.getdoc(value), f"kubetorch.{name} has no docstring"
