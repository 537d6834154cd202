"""Sets of fields of server-side apply."""

from __future__ import annotations

from kubetorch.k8s import managed_fields
from kubetorch.k8s.managed_fields import key_of

MAIN, SIDE = key_of(name="main"), key_of(name="side")
OBJECT = {
    "replicas": 2,
    "containers": [
        {"name": "main", "image": "a", "default": 1},
        {"name": "side", "image": "b", "ports": [{"containerPort": 1, "protocol": "TCP"}]},
    ],
    "finalizers": ["x", "y"],
}


def test_values_are_those_of_the_fields_in_the_object_s_own_order() -> None:
    port = key_of(containerPort=1, protocol="TCP")  # type: ignore[arg-type]  # a number
    fields = {
        "f:containers": {
            SIDE: {".": {}, "f:ports": {port: {".": {}, "f:containerPort": {}}}},
            MAIN: {"f:image": {}},
        },
        "f:finalizers": {'v:"y"': {}, 'v:"gone"': {}},
        "f:missing": {},
    }
    assert managed_fields.values(OBJECT, fields) == {
        "containers": [
            {"name": "main", "image": "a"},
            {"name": "side", "ports": [{"containerPort": 1, "protocol": "TCP"}]},
        ],
        "finalizers": ["y"],
    }


def test_a_field_without_fields_below_is_the_whole_value() -> None:
    assert managed_fields.values(OBJECT, {"f:containers": {MAIN: {}}}) == {
        "containers": [OBJECT["containers"][0]]  # type: ignore[index]  # a list
    }


def test_fields_that_are_cut_out_are_returned() -> None:
    fields = {"f:spec": {"f:containers": {MAIN: {"f:image": {}}, SIDE: {}}}}
    remaining, taken = managed_fields.cut(fields, ["f:spec", "f:containers", MAIN])
    assert remaining == {"f:spec": {"f:containers": {SIDE: {}}}}
    assert taken == {"f:image": {}}
    assert managed_fields.cut(fields, ["f:spec", "f:other"]) == (fields, None)


def test_an_intersection_has_what_both_have() -> None:
    first = {"f:a": {"f:b": {}, "f:c": {}}, "f:d": {}}
    assert managed_fields.intersection(first, {"f:a": {"f:b": {}}, "f:d": {"f:e": {}}}) == {
        "f:a": {"f:b": {}},
        "f:d": {"f:e": {}},
    }
