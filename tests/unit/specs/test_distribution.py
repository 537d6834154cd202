"""Distribution: frameworks, aliases, what passes through."""

import pytest

from kubetorch.errors import SpecError
from kubetorch.specs.distribution import parse


def test_spmd_is_the_default_and_keeps_the_replicas():
    spec, warnings = parse({})
    assert (spec.distribution_type, spec.workers, warnings) == ("spmd", None, [])
    assert spec.config(replicas=3, launch_timeout=900) == {
        "distribution_type": "spmd",
        "workers": 3,
        "quorum_timeout": 900,
        "quorum_workers": 3,
        "monitor_members": True,
    }


@pytest.mark.parametrize("key", ["distribution_type", "framework", "distribution"])
@pytest.mark.parametrize(("given", "meant"), [("tf", "tensorflow"), ("torch", "pytorch")])
def test_a_framework_may_be_named_in_every_documented_way(key, given, meant):
    assert parse({key: given})[0].distribution_type == meant


def test_an_unknown_framework_names_the_nearest_one():
    with pytest.raises(SpecError, match=r"'pytroch' is not supported.*\n.*'pytorch'"):
        parse({"distribution_type": "pytroch"})


def test_the_frameworks_own_options_pass_through():
    spec, _ = parse({"num_proc": 4, "nccl_flag": "x", "distribution_args": {"port": 9}})
    config = spec.config(replicas=1, launch_timeout=1)
    assert (config["num_proc"], config["nccl_flag"], config["port"]) == (4, "x", 9)


def test_a_digit_string_is_a_number_of_workers():
    assert parse({"workers": "4"})[0].workers == 4


def test_a_scale_to_zero_time_is_ignored_with_a_warning():
    spec, warnings = parse({"scale_to_zero_grace_period": 60})
    assert "scale_to_zero_grace_period" in warnings[0]
    assert "scale_to_zero" not in spec.options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "workers is 0"),
        ({"workers": "four"}, "workers is 'four'"),
        ({"workers": 1.5}, "workers is 1.5"),
        ({"workers": True}, "workers is True"),
        ({"monitor_members": "yes"}, "monitor_members is 'yes'"),
        ({"worker": 3}, "did you mean workers"),
        ({"num_procs": 3}, "did you mean num_proc"),
        ({"num_proc": 0}, "num_proc is 0"),
        ({"callback": print}, "takes values that JSON can carry"),
        ({"distribution_args": [1]}, "distribution_args is"),
        ({"distribution_type": "ray", "framework": "jax"}, "two frameworks"),
        ({"distribution_type": 5}, "5 is not supported"),
    ],
)
def test_an_impossible_value_is_named(arguments, message):
    with pytest.raises(SpecError, match=message):
        parse(arguments)


def test_two_values_of_one_argument_are_refused():
    with pytest.raises(SpecError, match="num_proc is 1, and 2 in distribution_args"):
        parse({"num_proc": 1, "distribution_args": {"num_proc": 2}})
