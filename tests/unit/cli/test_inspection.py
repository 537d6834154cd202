"""How to call a service, read off the page of its pod."""

import ast
import json
import shlex

import pytest

from kubetorch.cli import inspection
from kubetorch.pod.http import openapi
from kubetorch.specs.callable import AppSpec, CallableRef
from kubetorch.specs.workload import WorkloadSpec

FUNCTION = CallableRef(
    kind="fn", name="train", module="jobs", qualname="train", source_file="jobs.py"
)
CLASS = CallableRef(
    kind="cls", name="Counter", module="jobs", qualname="Counter", source_file="jobs.py"
)


SOURCE = """
def train(steps: int, tags: list[str], mode: str | None, other, lr=0.1):
    ...

class Counter:
    def add(self, k): ...
    def reset(self): ...
    def _private(self): ...
"""


def spec_of(callable_):
    return WorkloadSpec("default", "service", callable_)


def page(callable_, tmp_path):
    """What the pod says of a callable in `SOURCE`."""
    (tmp_path / "jobs.py").write_text(SOURCE)
    return openapi.document(callable_, "service", openapi.operations(spec_of(callable_), tmp_path))


def test_an_example_has_a_fitting_value_for_each_parameter_without_default(tmp_path):
    (operation,) = inspection.read_operations(page(FUNCTION, tmp_path), FUNCTION)
    assert operation.method is None
    assert operation.example == {"steps": 1, "tags": [], "mode": "text", "other": 1}
    assert operation.signature.startswith("def train(steps: int, ")


def test_each_public_method_of_a_class_is_found(tmp_path):
    operations = inspection.read_operations(page(CLASS, tmp_path), CLASS)
    assert [(operation.method, operation.example) for operation in operations] == [
        ("add", {"k": 1}),
        ("reset", {}),
    ]


@pytest.mark.parametrize(
    "bad",
    [
        None,
        {},
        [],
        {"paths": None},
        {"paths": {"/train": None}},
        {"paths": {"/other": {"post": {"summary": "x"}}}},
        {"paths": {"/train/method": {"post": {"summary": "x"}}}},
    ],
)
def test_a_page_that_says_nothing_of_the_callable_has_no_operations(bad):
    assert inspection.read_operations(bad, FUNCTION) == []


def test_a_class_whose_source_the_pod_cannot_read_has_no_operations(tmp_path):
    unread = openapi.document(CLASS, "service", openapi.operations(spec_of(CLASS), None))
    assert inspection.read_operations(unread, CLASS) == []


def test_a_class_whose_methods_are_unknown_has_a_placeholder():
    assert inspection.unknown_operation(CLASS).method == "METHOD_OR_CLS_NAME"
    assert inspection.unknown_operation(FUNCTION).method is None


def test_the_curl_line_is_one_shell_command_whose_body_is_json():
    call = inspection.Operation(None, "train(mode)", {"mode": "it's", "steps": 1})
    address = inspection.Address("train", "research", "http://127.0.0.1:4000")
    line = inspection.call_by_curl(address, FUNCTION, call)
    words = shlex.split(line)
    assert words[:4] == ["curl", "-X", "POST", "http://127.0.0.1:4000/train"]
    assert "Authorization: Bearer $(kt token train -n research)" in words
    assert json.loads(words[words.index("-d") + 1]) == {"args": [], "kwargs": dict(call.example)}


def test_where_a_port_has_to_be_forwarded_the_curl_line_waits_for_it():
    forward = "kt port-forward train 8080 -n research &"
    address = inspection.Address("train", "research", "http://localhost:8080", (forward,))
    lines = inspection.call_by_curl(
        address, FUNCTION, inspection.Operation(None, "train()", {})
    ).splitlines()
    assert lines[0] == forward
    assert lines[1].startswith("curl --retry 9 --retry-connrefused -X POST http://localhost:8080/")


@pytest.mark.parametrize("namespace", [None, "research"])
def test_the_python_lines_are_a_program(namespace):
    call = inspection.Operation("add", "add(k, name)", {"k": 1, "name": "it's"})
    program = inspection.call_by_python("my-counter", namespace, CLASS, call)
    ast.parse(program)
    assert program.endswith('print(my_counter.add(k=1, name="it\'s"))')
    assert ("research" in program) == (namespace is not None)


@pytest.mark.parametrize(
    ("call", "more", "expected"),
    [
        (inspection.Operation(None, "", {"c": 1}, (2, "x")), {}, "print(train(2, 'x', c=1))"),
        (
            inspection.Operation(None, "", {}, is_generator=True),
            {},
            "for value in train():\n    print(value)",
        ),
        (
            inspection.Operation(None, "", {}, is_generator=True),
            {"is_broadcast": True},
            "for values in train():\n    print(*values)",
        ),
        (inspection.Operation("name", "", {}), {"is_hidden": True}, 'print(train["name"]())'),
        (inspection.Operation("__call__", "", {"k": 1}), {"is_hidden": True}, "print(train(k=1))"),
    ],
)
def test_the_python_lines_fit_what_is_called(call, more, expected):
    program = inspection.call_by_python(
        "train", None, CLASS if call.method else FUNCTION, call, **more
    )
    ast.parse(program)
    assert program.endswith(f"\n{expected}")


@pytest.mark.parametrize("service", ["class", "2nd"])
def test_a_service_whose_name_is_no_identifier_gets_one(service):
    ast.parse(
        inspection.call_by_python(service, None, FUNCTION, inspection.Operation(None, "", {}))
    )


@pytest.mark.parametrize("public", [True, False])
def test_the_lines_for_an_app_ask_it_with_a_token_if_it_needs_one(public):
    app = AppSpec("uvicorn main:app", port=8000, health_check="/health", public=public)
    address = inspection.Address("web", "default", "http://here")
    words = shlex.split(inspection.app_by_curl(address, app))
    program = inspection.app_by_python(address, app)

    assert words[:2] == ["curl", "http://here/http/health"]
    assert ("-H" in words) is not public
    ast.parse(program)
    assert ("kt" in program) is not public


def test_the_lines_for_a_script_show_what_it_writes():
    app = AppSpec("python train.py")
    address = inspection.Address("work", "default", "")
    assert inspection.app_by_curl(address, app) == "kt logs work -n default -f"
    ast.parse(inspection.app_by_python(address, app))


def test_a_service_without_an_ingress_says_where_pods_reach_it():
    address = inspection.Address("train", "team", "http://localhost:8080", ("kt port-forward …",))

    assert inspection.without_ingress(address)[-1] == "http://train.team.svc.cluster.local/"
