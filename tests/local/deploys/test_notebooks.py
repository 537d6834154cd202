"""Cells of a notebook use helpers and constants of other cells, in a real kernel."""

import re

import pytest

import notebooks
from notebooks import DEPLOY


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The project of the notebooks, which have services of one name."""
    return tmp_path_factory.mktemp("notebooks")


@pytest.fixture(scope="module")
def notebook(folder, service):
    with notebooks.kernel_in(folder) as kernel:
        yield lambda *sources: notebooks.run(folder, *sources, kernel=kernel)


@pytest.fixture
def new_notebook(folder):
    """In a kernel of its own: for numbers of cells, and for what a reset does not undo."""
    return lambda *sources: notebooks.run(folder, *sources)


def test_a_function_uses_what_other_cells_define(notebook):
    shown = notebook(
        DEPLOY,
        "import math as m, os.path\nfrom collections import Counter as Tally\nfrom math import pi",
        "RATES = {1: 0.5, 'two': (2, b'x'), None: {float('inf')}}\nlimit = 3",
        "!true\n%time waste = 1",
        "def helper(x):\n    return limited(x) * RATES[1]\n",
        "def limited(x):\n    return min(x, limit)\n",
        "square = lambda x: x * x\nOPERATIONS = {'square': limited, 'sqrt': helper}",
        "class Base:\n    def scale(self):\n        return helper(10)\n",
        "class Derived(Base):\n    factor = limit\n    @property\n    def all(self):\n"
        "        return self.scale() * self.factor\n",
        "def f(x, y=limit) -> Tally:\n"
        "    found = [Derived().all, m.floor(pi), square(x), y, OPERATIONS['square'](9)]\n"
        "    return [*found, RATES['two'][0], os.path.basename('a/b'), Tally('aab')['a']]\n",
        "deployed(f)(5)",
    )

    assert shown[-1] == "[4.5, 3, 25, 3, 3, 2, 'b', 2]"


def test_what_a_name_was_bound_to_last_counts(notebook):
    shown = notebook(
        DEPLOY,
        "def helper():\n    return 'first'\n",
        "def f():\n    return [helper(), RATE]\n",
        "RATE = 1\ndef helper():\n    return 'second'\n",
        "RATE += 1",
        "remote = deployed(f)\nremote()",
        "def helper():\n    return 'first'\n",
        "RATE = 7",
        "remote = deployed(f)\nremote()",
    )

    assert shown[5] == "['second', 2]"
    assert shown[8] == "['first', 7]"


def test_a_cell_that_was_edited_is_an_edit_of_the_live_service(notebook):
    shown = notebook(
        DEPLOY,
        "import os",
        "def helper():\n    return 1\n",
        "def f():\n    return [helper(), os.environ['POD_NAME']]\n",
        "before = deployed(f)()",
        "def helper():\n    return 2\n",
        "after = deployed(f)()",
        "before[0], after[0], before[1] == after[1]",
    )

    assert shown[-1] == "(1, 2, True)"


def test_decorated_functions_generators_and_methods_travel(notebook):
    shown = notebook(
        DEPLOY,
        "import functools\nfrom dataclasses import dataclass",
        "def twice(function):\n    @functools.wraps(function)\n    def wrapper(*a):\n"
        "        return 2 * function(*a)\n    return wrapper\n",
        "def silent(function):\n    return lambda *a: function(*a) + RATE\nRATE = 0.25",
        "@twice\n@functools.lru_cache\ndef cached(x):\n    return x + 1\n",
        "@silent\ndef mute(x):\n    return x\n",
        "@dataclass\nclass Point:\n    x: int\n    y: int = 0\n    @staticmethod\n"
        "    def total(points):\n        return sum(p.x + p.y + cached(1) for p in points)\n",
        "def f():\n    return [cached(1), mute(1), Point.total([Point(1), Point(2, 3)])]\n",
        "deployed(f)()",
        "class Tool:\n    @staticmethod\n    def run(x):\n        return cached(x)\n",
        "deployed(Tool.run)(4)",
        "def numbers(n):\n    yield from map(cached, range(n))\n",
        "list(deployed(numbers)(3))",
        "class Counter:\n    def __init__(self):\n        self.n = cached(0)\n"
        "    def add(self, k):\n        self.n += cached(k)\n        return self.n\n",
        "kt.cls(Counter).to(compute).add(1)",
    )

    assert [shown[8], shown[10], shown[12], shown[14]] == ["[4, 1.25, 14]", "10", "[2, 4, 6]", "6"]


def test_what_is_declared_and_other_services_are_there_too(notebook):
    shown = notebook(
        DEPLOY,
        "import re, logging, threading, typing, collections, functools, enum",
        "WORD = re.compile(r'\\w+')\nlog = logging.getLogger('mine')\nlock = threading.Lock()\n"
        "T = typing.TypeVar('T')\nPoint = collections.namedtuple('Point', 'x y')\n"
        "Vector = list[int]\n",
        "def double(x):\n    return 2 * x\n",
        "doubled = deployed(double)",
        "double = doubled",
        "def scale(factor, x):\n    return factor * x\nhalf = functools.partial(scale, 0.5)",
        "class Color(enum.Enum):\n    RED = 1\n",
        "def f(found: Vector, other: T = None):\n    with lock:\n        log.info('called')\n"
        "        return [WORD.findall('a b'), Point(1, 2).y, double(4), half(3), Color.RED.name]\n",
        "deployed(f)([])",
    )

    assert shown[-1] == "[['a', 'b'], 2, 8, 1.5, 'RED']"


def test_values_arrive_as_they_are(notebook):
    shown = notebook(
        DEPLOY,
        "import datetime, decimal, enum, pathlib, numpy, pandas\nfrom dataclasses import dataclass",
        "class Color(enum.Enum):\n    RED = 1\n"
        "@dataclass\nclass Point:\n    x: int\n    color: Color = Color.RED\n",
        "array = numpy.arange(6.0).reshape(2, 3)\nframe = pandas.DataFrame({'a': [1, 2]})\n"
        "day, price = datetime.date(2026, 1, 2), decimal.Decimal('1.10')\n"
        "points = {(1, 2): [Point(3)]}\npairs = [(n, str(n)) for n in range(5000)]\n"
        "path = pathlib.Path('/tmp') / 'a'\nnan = float('nan')\n",
        "def f():\n    array[0, 0] = 7\n"
        "    return [array.sum().item(), frame['a'].sum().item(), day.isoformat(), str(price),\n"
        "            points[1, 2][0].color is Color.RED, type(pairs[-1]).__name__, pairs[-1][0],\n"
        "            path.name, nan != nan]\n",
        "deployed(f)()",
    )

    assert shown[-1] == "[22.0, 3, '2026-01-02', '1.10', True, 'tuple', 4999, 'a', True]"


def test_annotations_of_cells_that_postpone_them_need_no_value(new_notebook):
    shown = new_notebook(
        DEPLOY,
        "from __future__ import annotations",
        "import socket\nopen_socket = socket.socket()",
        "def f(x: open_socket, y: NotThere = 1) -> Later:\n    return x + y\n",
        "class Later:\n    pass\n",
        "deployed(f)(1)",
    )

    assert shown[-1] == "2"


def refused(notebook, *cells):
    with notebooks.a_cell_fails() as caught:
        notebook(DEPLOY, *cells)
    return re.sub(r"\x1b\[[\d;]*m", "", str(caught.value)).partition("NotebookError: ")[2]


def test_what_cannot_travel_is_named_with_its_cell_and_a_way_out(new_notebook):
    message = refused(
        new_notebook,
        "import socket\nclient = socket.socket()",
        "def load():\n    return client\n",
        "def f():\n    return load()\n",
        "deployed(f)",
    )

    assert "f uses load, which uses client of cell [2], which is what cannot travel" in message
    assert "client is a socket.socket" in message
    assert "pass it to f as an argument" in message


KINDS = {
    "def made():\n    return lambda: 1\nx = made()": "a function that made() made",
    "x = {'a': [1, open('/dev/null')]}": 'x["a"][1] is a _io.TextIOWrapper',
    "import threading\nx = threading.Thread()": "what cannot travel: x is a threading.Thread",
    "import numpy\nx = numpy.zeros(3 << 20)": "24 MiB large; at most 16 MiB travel with code",
    "class x:\n    pass\nx.more = lambda self: 1": "changed below its definition: more was added",
    "class x:\n    pass\nclass x(x):\n    pass": "made from an earlier x",
    "import functools\n@functools.singledispatch\ndef x(a):\n    pass\n"
    "@x.register\ndef _(a: int):\n    pass": "functions were registered",
}


def test_each_kind_of_what_cannot_travel_says_what_it_is(new_notebook):
    attempt = "try:\n    deployed(f)\nexcept kt.NotebookError as error:\n    print(error)"
    cells = [cell for kind in KINDS for cell in (kind, attempt)]

    shown = new_notebook(DEPLOY, "def f():\n    return x\n", *cells)[3::2]

    for number, (reason, message) in enumerate(zip(KINDS.values(), shown, strict=True)):
        assert f"f uses x of cell [{3 + 2 * number}], which is " in message
        assert reason in message


def test_a_value_of_a_class_that_a_cell_defined_anew_is_named(notebook):
    cell = "import dataclasses\n@dataclasses.dataclass\nclass Config:\n    lr: float = 0.1\n"
    message = refused(
        notebook, cell, "USUAL = Config()", cell, "def f():\n    return USUAL.lr\ndeployed(f)"
    )
    assert "USUAL is a __main__.Config of an earlier definition of the class" in message
    assert "make the value again" in message


def test_magics_in_a_function_are_passed_over_and_their_values_refused(notebook):
    shown = notebook(
        DEPLOY,
        "def f():\n    !echo hello\n    %time 1 + 1\n    return 1\n",
        "deployed(f)()",
        "%%time\ndef g():\n    return f() + 1\n",
        "deployed(g)()",
    )
    assert shown[2].endswith("1")
    assert "f runs without the magics" in shown[2]
    assert shown[4].endswith("2")

    message = refused(notebook, "def f():\n    files = !ls\n    return files\n", "deployed(f)")
    assert "f uses get_ipython, which is of the notebook alone" in message
    assert "subprocess" in message
