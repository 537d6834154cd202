import json
from dataclasses import replace

import pytest

from kubetorch.pod.http import openapi
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec


def ref(kind: str = "fn", name: str = "f", source_file: str | None = "m.py") -> CallableRef:
    return CallableRef(kind, name, "m", name, project="p", source_file=source_file)


def spec(**more) -> WorkloadSpec:
    return WorkloadSpec("default", "demo", ref(**more))


def operations(tmp_path, source: str, **more):
    (tmp_path / "m.py").write_text(source)
    return openapi.operations(spec(**more), tmp_path)


def schema(tmp_path, annotation: str):
    (found,) = operations(tmp_path, f"def f(x: {annotation}): pass\n")
    return found.parameters[0].schema


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
    (found,) = operations(tmp_path, source)
    assert found.signature == "async def f(a, /, b: int=3, *rest, c: str='x', d, **more) -> bool"
    assert [(p.name, p.is_required, p.default) for p in found.parameters] == [
        ("a", True, None),
        ("b", False, "3"),
        ("c", False, "'x'"),
        ("d", True, None),
    ]
    assert found.is_open
    assert found.summary.startswith("Does it.")
    assert found.result == {"type": "boolean"}


def test_the_public_methods_of_a_class_without_their_self(tmp_path):
    source = (
        "class C:\n"
        "    def __init__(self, x): pass\n"
        "    def _hidden(self): pass\n"
        "    def one(self, a): pass\n"
        "    @staticmethod\n    def two(b): pass\n"
        "    @classmethod\n    async def three(cls, c): pass\n"
    )
    found = operations(tmp_path, source, kind="cls", name="C")
    names = {op.method: [p.name for p in op.parameters] for op in found}
    assert names == {"one": ["a"], "two": ["b"], "three": ["c"]}


def test_nested_definitions_and_redefinitions_are_found(tmp_path):
    source = (
        "class A:\n    class B:\n        def m(self, x): pass\ndef f(a): pass\ndef f(b): pass\n"
    )
    (found,) = operations(tmp_path, source, kind="cls", name="A.B")
    assert found.method == "m"
    (found,) = operations(tmp_path, source)
    assert found.parameters[0].name == "b"


@pytest.mark.parametrize("source", ["def g(): pass\n", "def f(:\n", "f = 3\n", "\0"])
def test_without_a_definition_in_the_source_it_only_says_that_it_can_be_called(tmp_path, source):
    (found,) = operations(tmp_path, source)
    assert (found.signature, found.parameters, found.is_open) == ("f(...)", (), True)
    (tmp_path / "m.py").unlink()
    assert openapi.operations(spec(), tmp_path) == [found]
    assert openapi.operations(spec(), None) == [found]


def test_the_document_names_a_path_for_each_method(tmp_path):
    source = "class C:\n    def m(self, a: int, b=2): pass\n"
    found = operations(tmp_path, source, kind="cls", name="C")
    document = openapi.document(ref("cls", "C"), "demo", found)
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
    several = replace(spec(), compute=ComputeSpec(replicas=3))
    (found,) = openapi.operations(several, tmp_path)
    assert found.result == {
        "type": "array",
        "items": {"type": "integer"},
        "minItems": 3,
        "maxItems": 3,
    }
