"""Distribution: frameworks, aliases, what passes through."""

import pytest

from kubetorch.errors import SpecError
from kubetorch.specs.distribution import DistributionSpec, parse


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


@pytest.mark.parametrize(
    ("arguments", "gpus", "processes"),
    [
        ({}, None, 1),
        ({}, "8", 1),
        ({"distribution_type": "pytorch"}, "8", 8),
        ({"distribution_type": "jax", "num_proc": "auto"}, "4", 4),
        ({"distribution_type": "tensorflow"}, None, 1),
        ({"distribution_type": "pytorch", "num_proc": 2}, "8", 2),
        ({"num_proc": "3"}, None, 3),
        ({"num_processes": 3}, None, 3),
        ({"distribution_type": "ray"}, "8", 1),
        ({"distribution_type": "monarch"}, "8", 1),
    ],
)
def test_ranks_of_a_pod_are_those_declared_or_one_for_each_gpu(arguments, gpus, processes):
    assert parse(arguments)[0].processes(gpus) == processes


@pytest.mark.parametrize(
    ("arguments", "port", "is_declared", "has_each"),
    [
        ({}, 12345, False, False),
        ({"distribution_type": "pytorch"}, 12345, False, False),
        ({"distribution_type": "jax"}, 1234, False, False),
        ({"distribution_type": "tf"}, 2222, False, True),
        ({"distribution_type": "monarch"}, 26600, False, True),
        ({"distribution_type": "pytorch", "port": 4000}, 4000, True, False),
    ],
)
def test_ranks_meet_on_the_port_that_is_declared_or_the_frameworks(
    arguments, port, is_declared, has_each
):
    spec = parse(arguments)[0]
    assert (spec.port, spec.is_port_declared, spec.has_port_each) == (port, is_declared, has_each)


@pytest.mark.parametrize("key", ["distribution_type", "framework", "distribution"])
@pytest.mark.parametrize(("spelling", "meant"), [("tf", "tensorflow"), ("torch", "pytorch")])
def test_a_framework_may_be_named_in_every_documented_way(key, spelling, meant):
    assert parse({key: spelling})[0].distribution_type == meant


def test_an_unknown_framework_names_the_nearest_one():
    with pytest.raises(SpecError, match=r"'pytroch' is not supported.*\n.*did you mean pytorch"):
        parse({"distribution_type": "pytroch"})


def test_the_frameworks_own_options_pass_through():
    spec, _ = parse({"num_proc": 4, "nccl_flag": "x", "distribution_args": {"port": 9}})
    config = spec.config(replicas=1, launch_timeout=1)
    assert (config["num_proc"], config["nccl_flag"], config["port"]) == (4, "x", 9)


def test_what_nothing_here_knows_is_kept_with_a_warning():
    spec, warnings = parse({"num_proc": 4, "nccl_flag": "x", "zeta": 1})
    assert spec.config(replicas=1, launch_timeout=1)["nccl_flag"] == "x"
    [warning] = warnings
    assert "does not know nccl_flag, zeta" in warning


def test_a_digit_string_is_a_number_of_workers():
    assert parse({"workers": "4"})[0].workers == 4


def test_the_hosts_of_monarch_are_its_workers():
    spec, _ = parse({"distribution_type": "monarch", "monarch_hosts": 3})
    assert (spec.workers, spec.options) == (3, "{}")


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
        ({"num_proc": -2}, "num_proc is -2"),
        ({"num_proc": 2.5}, "num_proc is 2.5"),
        ({"num_proc": True}, "num_proc is True"),
        ({"num_proc": "many"}, "num_proc is 'many'.*\n.*\"auto\" is one for each GPU"),
        ({"num_proc": 1025}, "num_proc is 1025; it must be a whole number, from 1 to 1024"),
        ({"num_processes": "5000"}, "num_proc is 5000"),
        ({"callback": print}, "takes values that JSON can carry"),
        ({"distribution_args": [1]}, "distribution_args is"),
        ({"distribution_type": "ray", "framework": "jax"}, "two frameworks"),
        ({"distribution_type": 5}, "5 is not supported"),
        ({"monarch_hosts": 2}, "monarch_hosts is 2, of spmd"),
        ({"framework": "monarch", "monarch_hosts": 2, "workers": 3}, "on 3 workers"),
        ({"framework": "monarch", "monarch_host": 2}, "did you mean monarch_hosts"),
    ],
)
def test_an_impossible_value_is_named(arguments, message):
    with pytest.raises(SpecError, match=message):
        parse(arguments)


def test_two_values_of_one_argument_are_refused():
    with pytest.raises(SpecError, match="num_proc is 1, and 2 in distribution_args"):
        parse({"num_proc": 1, "distribution_args": {"num_proc": 2}})


@pytest.mark.parametrize(
    "spec",
    [
        DistributionSpec("nonsense"),
        DistributionSpec(workers=0),
        DistributionSpec(options="{"),
        DistributionSpec(options="[1]"),
        DistributionSpec(options='{"num_proc": "many"}'),
        DistributionSpec(options='{"num_proc": 1000000000}'),
        DistributionSpec(options='{"port": 70000}'),
    ],
)
def test_ranks_that_were_written_by_hand_are_checked_as_well(spec):
    with pytest.raises(SpecError):
        spec.check()


def test_ranks_that_were_declared_are_possible():
    parse({"distribution_type": "tf", "workers": 4, "num_proc": "auto", "port": 4000})[0].check()


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({"port": 99_999}, "port is 99999"),
        ({"port": 32_300}, "not 32300, where pods answer"),
        ({"port": "x"}, "port is 'x'"),
        ({"tree_fanout": 0}, "tree_fanout is 0"),
        ({"max_threads_per_proc": 2.5}, "max_threads_per_proc is 2.5"),
    ],
)
def test_ranks_that_cannot_be_as_declared_are_refused(arguments, wrong):
    with pytest.raises(SpecError, match=wrong):
        parse(arguments)


def test_ranks_of_no_type_are_spmd_and_run_as_many_calls_as_declared():
    spec, warnings = parse({"distribution_type": "", "max_threads_per_proc": 4, "tree_minimum": 9})
    assert (spec.distribution_type, spec.threads) == ("spmd", 4)
    assert len(warnings) == 1
    assert "ignores tree_minimum" in warnings[0]


@pytest.mark.parametrize(
    ("framework", "is_monitored"),
    [("pytorch", True), ("jax", True), ("ray", False), ("monarch", False)],
)
def test_frameworks_that_notice_losses_themselves_are_not_monitored(framework, is_monitored):
    assert DistributionSpec(framework).is_monitored is is_monitored
    assert DistributionSpec(framework, monitor_members=True).is_monitored
