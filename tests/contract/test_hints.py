"""What messages and hints say to do can be done as it stands."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import kubetorch

PACKAGE = Path(kubetorch.__file__).parent
#: A word that stands for what the reader has to find out.
WORD = re.compile(r"\b(NAME|SERVICE|NAMESPACE)\b")
PLACEHOLDER = re.compile(rf"\b(kt|kubectl) [^;:,]*{WORD.pattern}|\bNAME@")


def texts() -> Iterator[tuple[Path, int, str]]:
    """Texts that are no docstrings, of modules with such a word; what is put in between is `{}`."""
    for file in PACKAGE.rglob("*.py"):
        source = file.read_text()
        if not WORD.search(source):
            continue  # to parse all of them takes 10 s
        tree = ast.parse(source)
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        inner = {
            id(part)
            for node in ast.walk(tree)
            if isinstance(node, ast.JoinedStr)
            for part in node.values
        }
        for node in ast.walk(tree):
            if id(node) in docs | inner:
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield file, node.lineno, node.value
            elif isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
                yield file, node.lineno, "".join(map(str, parts))


def test_no_text_names_a_command_with_a_word_for_a_name() -> None:
    placeholder_lines = [
        f"{file.relative_to(PACKAGE)}:{line}: {text}"
        for file, line, text in texts()
        if PLACEHOLDER.search(text)
    ]
    assert not placeholder_lines, "\n".join(placeholder_lines)
