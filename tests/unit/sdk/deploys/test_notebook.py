"""Source of callables that were defined interactively."""

import linecache
import math
import sys
import types
from collections import OrderedDict as Ordered

import pytest

from kubetorch.errors import NotebookError
from kubetorch.sdk.deploys import notebook


@pytest.fixture
def session(monkeypatch):
    """Runs cells as IPython does: their text in `linecache`, their names in `__main__`."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    names = []

    def run(source):
        name = f"/tmp/ipykernel_1/{len(names)}.py"
        names.append(name)
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), vars(main))
        return main

    yield run
    for name in names:
        del linecache.cache[name]


def module_of(path):
    namespace = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    return namespace


def test_a_function_becomes_a_module(session, tmp_path):
    main = session("x = 1\n\ndef double(n):\n    return 2 * n\n\ny = 2\n")
    path = tmp_path / "double_fn.py"

    notebook.write_module(main.double, path)

    assert module_of(path)["double"](4) == 8
    assert "x = 1" not in path.read_text()


def test_the_last_definition_of_a_name_wins(session, tmp_path):
    session("def f():\n    return 'old'\n")
    main = session("\n\nif True:\n    pass\n\ndef f():\n    return 'new'\n")

    notebook.write_module(main.f, tmp_path / "f_fn.py")

    assert module_of(tmp_path / "f_fn.py")["f"]() == "new"


def test_a_class_is_found_by_its_methods_or_by_its_name(session, tmp_path):
    main = session("class A:\n    def f(self):\n        return 1\n\nclass B:\n    value = 2\n")

    notebook.write_module(main.A, tmp_path / "A_cls.py")
    notebook.write_module(main.B, tmp_path / "B_cls.py")

    assert module_of(tmp_path / "A_cls.py")["A"]().f() == 1
    assert module_of(tmp_path / "B_cls.py")["B"].value == 2


def test_imports_of_the_session_that_it_uses_come_with_it(session, tmp_path):
    main = session("import math as m\nfrom collections import OrderedDict as Ordered\nimport sys\n")
    session("def f(x):\n    return m.sqrt(x), Ordered(a=1)\n")

    notebook.write_module(main.f, tmp_path / "f_fn.py")

    assert module_of(tmp_path / "f_fn.py")["f"](4) == (math.sqrt(4), Ordered(a=1))
    assert "import sys" not in (tmp_path / "f_fn.py").read_text()


def test_decorators_come_with_it(session, tmp_path):
    main = session("import functools\n\n@functools.lru_cache\ndef f():\n    return 1\n")

    notebook.write_module(main.f, tmp_path / "f_fn.py")

    assert module_of(tmp_path / "f_fn.py")["f"].cache_info().hits == 0


def test_helpers_and_constants_of_other_cells_come_with_it(session, tmp_path):
    session("def f(x):\n    local = helper()\n    return x * RATE, local, len([])\n")
    main = session("RATE = 0.1\nUNUSED = 2\ndef helper():\n    return RATE\n")

    notebook.write_module(main.f, tmp_path / "f_fn.py")

    assert module_of(tmp_path / "f_fn.py")["f"](10) == (1.0, 0.1, 0)
    assert "UNUSED" not in (tmp_path / "f_fn.py").read_text()


def test_definitions_stand_in_front_of_what_needs_them(session, tmp_path):
    session("class Node:\n    def grow(self):\n        return Tree(), helper(self)\n")
    session("def helper(node, kind=Node):\n    return decorated(isinstance(node, kind))\n")
    session("class Tree(Node):\n    size = helper(Node()) if False else 3\n")
    session("def twice(function):\n    return lambda x: calls(function, x)\n")
    session("def calls(function, x):\n    return 2 * function(x) + OFFSET\nOFFSET = 1\n")
    main = session("@twice\ndef decorated(x):\n    return x\nvalue = decorated(2)\n")
    # Defined again, behind what uses it.
    session("def twice(function):\n    return lambda x: calls(function, x)\n")

    notebook.write_module(main.Node, tmp_path / "Node_cls.py")

    tree, number = module_of(tmp_path / "Node_cls.py")["Node"]().grow()
    assert (tree.size, number) == (3, 3)


def test_names_that_a_class_or_a_function_has_itself_are_not_those_of_the_session(
    session, tmp_path
):
    session("import socket\nx = y = z = socket\nrate = 2\n")
    main = session(
        "class A:\n    x = 1\n    z = [y for y in (1, x)]\n    rate = rate\n"
        "    def f(self, y):\n        z = y\n        return z, self.x, self.rate, self.z\n"
    )

    notebook.write_module(main.A, tmp_path / "A_cls.py")

    assert module_of(tmp_path / "A_cls.py")["A"]().f(5) == (5, 1, 2, [1, 1])


def test_a_name_that_the_session_lacks_is_warned_of(session, tmp_path):
    main = session("def f():\n    return later()\n")

    with pytest.warns(UserWarning, match="f uses later, which this session does not have"):
        notebook.write_module(main.f, tmp_path / "f_fn.py")


def test_a_file_that_the_user_wrote_is_not_replaced(session, tmp_path):
    main = session("def f():\n    return 1\n")
    path = tmp_path / "f_fn.py"
    path.write_text("mine = True\n")

    with pytest.raises(NotebookError, match="f_fn"):
        notebook.write_module(main.f, path)

    assert path.read_text() == "mine = True\n"


def test_a_file_of_an_earlier_cell_is_replaced(session, tmp_path):
    path = tmp_path / "f_fn.py"
    notebook.write_module(session("def f():\n    return 1\n").f, path)
    notebook.write_module(session("def f():\n    return 2\n").f, path)

    assert module_of(path)["f"]() == 2
    assert [item.name for item in tmp_path.iterdir()] == ["f_fn.py"]


def test_a_source_that_nobody_kept_is_said_so(monkeypatch, tmp_path):
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec("def f():\n    pass\n", vars(main))

    with pytest.raises(NotebookError, match="f cannot be found") as caught:
        notebook.write_module(main.f, tmp_path / "f_fn.py")
    assert caught.value.hint


def test_what_a_name_stands_for_may_refuse_to_be_looked_at(session, tmp_path):
    session(REFUSING)
    session("class Base:\n    registry = Refusing()\n")
    main = session("def f():\n    return Base.registry()\n")

    notebook.write_module(main.f, tmp_path / "f_fn.py")

    assert module_of(tmp_path / "f_fn.py")["f"]() == "called"


REFUSING = """
class Refusing:
    def __getattr__(self, name):
        raise RuntimeError(name)
    def __len__(self):
        raise RuntimeError("len")
    def __bool__(self):
        raise RuntimeError("bool")
    def __call__(self):
        return "called"
"""


def test_a_name_that_a_function_changes_comes_with_it(session, tmp_path):
    session("total = 3\nbase = 1")
    main = session(
        "def f():\n    global total, base\n    total += 1\n    del base\n    return total"
    )

    notebook.write_module(main.f, tmp_path / "f_fn.py")

    assert module_of(tmp_path / "f_fn.py")["f"]() == 4
