import json
from dataclasses import replace

import pytest

from kubetorch.pod.http import openapi
from kubetorch.specs.callable import BatchedMethod, CallableRef
from kubetorch.specs.workload import WorkloadSpec


def ref(kind: str = "fn", name: str = "f", source_file: str | None = "m.py") -> CallableRef:
    return CallableRef(kind, name, "m", name, project="p", source_file=source_file)


def spec(**more) -> WorkloadSpec:
    return WorkloadSpec("default", "demo", ref(**more))


def operations(tmp_path, source: str, **more):
    (tmp_path / "m.py").write_text(source)
    return openapi.operations(spec(**more), tmp_path)


def schema(tmp_path, annotation: str):
    (operation,) = operations(tmp_path, f"def f(x: {annotation}): pass\n")
    return operation.parameters[0].schema


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        ("int", {"type": "integer"}),
        ("'float'", {"type": "number"}),
        ("None", {"type": "null"}),
        ("list[str]", {"type": "array", "items": {"type": "string"}}),
        ("typing.List[int]", {"type": "array", "items": {"type": "integer"}}),
        ("dict[str, int]", {"type": "object", "additionalProperties": {"type": "integer"}}),
        ("int | None", {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        ("Optional[str]", {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ("Union[int, str]", {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        ("int | Own", {}),
        ("Own", {}),
        ("'not python ('", {}),
        ("tuple[int, ...]", {"type": "array"}),
        ("lambda: 0", {}),
    ],
)
def test_simple_annotations_become_json_schema_and_others_allow_anything(
    tmp_path, annotation, expected
):
    assert schema(tmp_path, annotation) == expected


def test_the_parameters_of_a_function(tmp_path):
    source = (
        "async def f(a, /, b: int = 3, *rest, c: str = 'x', d, **more) -> bool:\n"
        '    """Does it.\n\n    At length."""\n'
    )
    (operation,) = operations(tmp_path, source)
    assert (
        operation.signature == "async def f(a, /, b: int=3, *rest, c: str='x', d, **more) -> bool"
    )
    assert [(p.name, p.is_required, p.default) for p in operation.parameters] == [
        ("a", True, None),
        ("b", False, "3"),
        ("c", False, "'x'"),
        ("d", True, None),
    ]
    assert operation.is_open
    assert operation.summary.startswith("Does it.")
    assert operation.result == {"type": "boolean"}


def test_the_public_methods_of_a_class_without_their_self(tmp_path):
    source = (
        "class C:\n"
        "    def __init__(self, x): pass\n"
        "    def _hidden(self): pass\n"
        "    def one(self, a): pass\n"
        "    @staticmethod\n    def two(b): pass\n"
        "    @classmethod\n    async def three(cls, c): pass\n"
    )
    public_methods = operations(tmp_path, source, kind="cls", name="C")
    names = {op.method: [p.name for p in op.parameters] for op in public_methods}
    assert names == {"one": ["a"], "two": ["b"], "three": ["c"]}


def test_nested_definitions_and_redefinitions_are_found(tmp_path):
    source = (
        "class A:\n    class B:\n        def m(self, x): pass\ndef f(a): pass\ndef f(b): pass\n"
    )
    (operation,) = operations(tmp_path, source, kind="cls", name="A.B")
    assert operation.method == "m"
    (operation,) = operations(tmp_path, source)
    assert operation.parameters[0].name == "b"


@pytest.mark.parametrize("source", ["def g(): pass\n", "def f(:\n", "f = 3\n", "\0"])
def test_without_a_definition_in_the_source_it_only_says_that_it_can_be_called(tmp_path, source):
    (operation,) = operations(tmp_path, source)
    assert (operation.signature, operation.parameters, operation.is_open) == ("f(...)", (), True)
    (tmp_path / "m.py").unlink()
    assert openapi.operations(spec(), tmp_path) == [operation]
    assert openapi.operations(spec(), None) == [operation]


def test_the_document_names_a_path_for_each_method(tmp_path):
    source = "class C:\n    def m(self, a: int, b=2): pass\n"
    operations_of_class = operations(tmp_path, source, kind="cls", name="C")
    document = openapi.document(ref("cls", "C"), "demo", operations_of_class)
    post = document["paths"]["/C/m"]["post"]
    kwargs = post["requestBody"]["content"]["application/json"]["schema"]["properties"]["kwargs"]
    assert kwargs["properties"] == {"a": {"type": "integer"}, "b": {"description": "default: 2"}}
    assert kwargs["additionalProperties"] is False
    json.dumps(document)


def test_the_page_escapes_what_comes_from_the_source(tmp_path):
    source = 'def f(a="<script>"):\n    """</p><img src=x>"""\n'
    page = openapi.page(ref(), "demo", operations(tmp_path, source), "http://localhost:1")
    assert "<script>" not in page
    assert "<img" not in page
    assert "curl -X POST http://localhost:1/f" in page


def test_a_service_of_several_pods_answers_with_a_list(tmp_path):
    (tmp_path / "m.py").write_text("def f(x) -> int: pass\n")
    (operation,) = openapi.operations(spec(), tmp_path, together=range(3))
    assert operation.result == {
        "type": "array",
        "items": {"type": "integer"},
        "minItems": 3,
        "maxItems": 3,
    }


def methods(tmp_path, source: str, **more) -> list[str | None]:
    return [
        operation.method for operation in operations(tmp_path, source, kind="cls", name="C", **more)
    ]


def test_what_cannot_be_called_is_no_operation(tmp_path):
    source = (
        "class C:\n"
        "    @property\n    def size(self): pass\n"
        "    @size.setter\n    def size(self, value): pass\n"
        "    @functools.cached_property\n    def length(self): pass\n"
        "    class Inner: pass\n"
        "    def one(self): pass\n"
        "    def gone(self): pass\n"
        "    gone = None\n"
        "    if True:\n        def two(self): pass\n"
        "    try:\n        def three(self): pass\n    except ImportError:\n        pass\n"
        "    def __call__(self): pass\n"
    )
    assert methods(tmp_path, source) == ["one", "two", "three", "__call__"]


@pytest.mark.parametrize(
    "bases",
    [
        "from below.base import Base\nclass C(Base[int]): pass\n",
        "from below.base import Base as B\nclass C(B): pass\n",
        "from below import Base\nclass C(Base): pass\n",
        "from below import *\nclass C(Base): pass\n",
        "import below.base\nclass C(below.base.Base): pass\n",
        "import below.base as b\nclass C(b.Base): pass\n",
        "from .below import base\nclass C(base.Base): pass\n",
        "class Base:\n    def far(self): pass\n    def near(self, x): pass\nclass C(Base): pass\n",
        "class Out:\n    class In:\n        def far(self): pass\n        def near(self): pass\n"
        "class C(Out.In): pass\n",
    ],
)
def test_methods_are_inherited_from_classes_of_the_project(tmp_path, bases):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "__init__.py").write_text("from .base import Base\n")
    (tmp_path / "below" / "base.py").write_text(
        "import typing\n"
        "class Far(typing.Generic[T]):\n    def far(self): pass\n"
        "class Base(Far):\n    def near(self, x): pass\n"
    )
    assert sorted(methods(tmp_path, bases)) == ["far", "near"]


def test_the_nearest_definition_of_a_method_counts(tmp_path):
    source = (
        "class A:\n    def m(self, a): pass\n    def n(self, a): pass\n    def k(self): pass\n"
        "class B(A):\n    def n(self, b): pass\n"
        "class D(A):\n    def m(self, d): pass\n    k = 3\n"
        "class C(B, D):\n    def own(self): pass\n"
    )
    operations_of_class = operations(tmp_path, source, kind="cls", name="C")
    assert {
        operation.method: [p.name for p in operation.parameters]
        for operation in operations_of_class
    } == {
        "own": [],
        "n": ["b"],
        "m": ["d"],
    }


@pytest.mark.parametrize(
    "source",
    [
        "from torch import Module\nclass C(Module): pass\n",
        "class C(C): pass\n",
        "from m import C as C\nclass C(make()): pass\n",
        "from .. import x\nclass C(x.Y): pass\n",
        "from m import B\nclass C(B): pass\n",
    ],
)
def test_bases_that_cannot_be_found_have_no_methods(tmp_path, source):
    assert methods(tmp_path, source) == []


def test_parameters_without_a_name_for_callers_are_given_by_args(tmp_path):
    operations_of_function = operations(tmp_path, "def f(a: int, b=2, /, c=3): pass\n")
    post = openapi.document(ref(), "demo", operations_of_function)["paths"]["/f"]["post"]
    body_properties = post["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert body_properties["args"]["prefixItems"] == [
        {"title": "a", "type": "integer"},
        {"title": "b", "description": "default: 2"},
    ]
    assert body_properties["args"]["minItems"] == 1
    assert set(body_properties["kwargs"]["properties"]) == {"c"}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("yield 1", True),
        ("x = yield", True),
        ("for i in g(): yield from i", True),
        ("return [(yield_ for yield_ in ())]", False),
        ("def inner(): yield 1", False),
        ("return lambda: (yield)", False),
    ],
)
def test_a_generator_is_told_from_a_function(tmp_path, body, expected):
    (operation,) = operations(tmp_path, f"def f():\n    {body}\n")
    assert operation.is_generator is expected
    post = openapi.document(ref(), "demo", [operation])["paths"]["/f"]["post"]
    assert post.get("x-generator", False) is expected


def test_a_batched_function_takes_an_item_of_its_list_and_gives_a_result(tmp_path):
    (tmp_path / "m.py").write_text("def f(texts: list[str], n: int = 1) -> list[int]: ...")
    batched = replace(ref(), batched=(BatchedMethod("", 8),))
    [operation] = openapi.operations(WorkloadSpec("default", "demo", batched), tmp_path)
    assert operation.signature.startswith("@kt.batched def f(texts: list[str]")
    assert [(p.name, p.schema) for p in operation.parameters] == [("texts", {"type": "string"})]
    assert operation.result == {"type": "integer"}
