"""The measures of a source tree, on a small one."""

from pathlib import Path

import pytest

from tools.house import House, Row, circles, table

FILES = {
    "__init__.py": "",
    "main.py": '''"""What
it is."""

from kubetorch.web import pages, server


def run():  # starts it
    """Run."""
    from kubetorch.web.server import serve, stop

    text = """
    """
    return serve, stop, pages, server
''',
    "web/__init__.py": "def only(): ...\n",
    "web/pages.py": "import kubetorch.web.words\n\nPAGES = 1\n\n\nclass Page: ...\n",
    "web/words.py": """if TYPE_CHECKING:
    from kubetorch.web.pages import Page

def word(): ...
""",
    "web/server.py": "import os\n\nasync def serve(): ...\n\n\ndef stop(): ...\n",
}


@pytest.fixture
def house(tmp_path: Path) -> House:
    for name, text in FILES.items():
        path = tmp_path / "src/kubetorch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return House(tmp_path)


def test_docstrings_comments_and_blank_lines_are_no_code(house):
    assert house.modules["kubetorch.main"].lines == 13
    assert house.modules["kubetorch.main"].code_lines == 6


def test_a_file_of_one_function_defines_nothing_else(house):
    assert house.files_of_one_function() == ["kubetorch.main", "kubetorch.web.words"]


def test_a_file_with_one_importer_counts_when_that_is_a_sibling(house):
    assert house.files_of_one_sibling() == ["kubetorch.web.words (by kubetorch.web.pages)"]
    assert house.importers["kubetorch.web.server"] == {"kubetorch.main"}


def test_imports_in_functions_are_counted_once_each(house):
    assert house.late_imports() == ["kubetorch.main:9"]


def test_circles_include_imports_for_type_checkers(house):
    assert house.circles() == [["kubetorch.web.pages", "kubetorch.web.words"]]


def test_a_chain_is_no_circle_and_two_loops_that_meet_are_one():
    assert circles({"a": "b", "b": "c", "c": ""}) == []
    assert circles({"a": "b", "b": "ac", "c": "b", "d": "a"}) == [["a", "b", "c"]]


def test_the_table_has_a_line_for_each_row():
    text = table([Row("files", 1234, 5), Row("others", 6, None)])
    assert [line.split("|")[1:-1] for line in text.splitlines()[2:]] == [
        [f" {'files':44} ", "  1,234 ", "      5 "],
        [f" {'others':44} ", "      6 ", "        "],
    ]
