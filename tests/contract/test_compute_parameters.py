"""What a parameter of `kt.Compute` is stands in one table; all other places agree with it."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

import kubetorch as kt
from kubetorch.manifests import parameters as in_manifests
from kubetorch.sdk.compute import ComputeArguments
from kubetorch.sdk.compute_parameters import NO_PARAMETERS, PARAMETERS
from kubetorch.specs.compute import ComputeSpec

SIGNATURE = inspect.signature(kt.Compute).parameters
ARGUMENTS = [name for name, parameter in PARAMETERS.items() if parameter.is_argument]
SPEC_FIELDS = {item.name for item in fields(ComputeSpec)}
#: Fields that shape the object as a whole, or are no part of it.
NO_FIELDS_OF_MANIFESTS = [
    "concurrency",
    "data",
    "dispatch",
    "distribution",
    "endpoint",
    "manifest",
    "max_queue",
    "num_proc",
    "pod_template_path",
    "selector",
    "service_template",
]


def test_the_constructor_takes_the_parameters_in_the_order_of_the_table() -> None:
    names_outside_the_table = ("_skip_template_init", "unknown")
    assert [name for name in SIGNATURE if name not in names_outside_the_table] == ARGUMENTS


def test_the_docstring_has_each_parameter_in_the_order_of_the_table() -> None:
    section = inspect.cleandoc(str(kt.Compute.__doc__)).partition("\nArgs:\n")[2]
    documented_names = re.findall(r"^    (\w+): ", section.partition("\n\n")[0], flags=re.MULTILINE)
    assert [name for name in documented_names if name != "_skip_template_init"] == ARGUMENTS


def test_each_attribute_has_the_words_of_the_docstring() -> None:
    assert kt.Compute.gpus.__doc__ == "Whole GPUs that each pod asks for, and gets."
    assert all(getattr(kt.Compute, name).__doc__ for name in ARGUMENTS)


def test_keyword_arguments_have_the_types_of_the_constructor() -> None:
    assert {name: SIGNATURE[name].annotation for name in ARGUMENTS} == {
        name: annotation.__forward_arg__
        for name, annotation in ComputeArguments.__annotations__.items()
    }


def test_each_parameter_is_an_attribute_and_a_field_of_the_spec() -> None:
    assert all(hasattr(kt.Compute, name) for name in PARAMETERS)
    by_parameters = {parameter.field for parameter in PARAMETERS.values()} - {None}
    assert by_parameters | set(NO_PARAMETERS) == SPEC_FIELDS
    assert by_parameters.isdisjoint(NO_PARAMETERS)


def test_each_field_of_the_spec_is_known_to_manifests() -> None:
    written = [parameter.name for parameter in in_manifests.PARAMETERS]
    assert sorted([*written, *NO_FIELDS_OF_MANIFESTS]) == sorted(SPEC_FIELDS)
