"""`kt.Compute`: what it takes, refuses and keeps."""

import copy
import pickle

import pytest

import kubetorch as kt
from kubetorch.specs.compute import ComputeSpec


def test_an_empty_compute_has_the_documented_defaults():
    compute = kt.Compute()

    assert compute.cpus is None
    assert compute.memory is None
    assert compute.replicas == 1
    assert compute.launch_timeout == 900
    assert compute.allowed_serialization == ["json"]
    assert compute.namespace == "default"
    assert compute.to_spec() == ComputeSpec()


def test_the_mode_of_debuggers_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("KT_DEBUG_MODE", "pdb-ui")
    assert kt.Compute().env_vars == {"KT_DEBUG_MODE": "pdb-ui"}
    chosen = kt.Compute(env_vars={"KT_DEBUG_MODE": "pdb"})
    assert chosen.env_vars == {"KT_DEBUG_MODE": "pdb"}
    assert kt.DebugConfig().mode == "pdb-ui"


@pytest.mark.parametrize(
    ("cpus", "expected_cpus"),
    [(0.25, "0.25"), (2, "2"), ("500m", "500m"), ("1.0", "1.0"), (1.0, "1")],
)
def test_cpus_are_given_as_numbers_or_text(cpus, expected_cpus):
    assert kt.Compute(cpus=cpus).cpus == expected_cpus


def test_cpus_and_memory_may_be_positional():
    assert kt.Compute("0.5", "2Gi") == kt.Compute(cpus="0.5", memory="2Gi")


def test_numbers_in_env_vars_become_text():
    assert kt.Compute(env_vars={"A": 1, "B": "x", "C": 0.5}).env_vars == {
        "A": "1",
        "B": "x",
        "C": "0.5",
    }


@pytest.mark.parametrize("replicas", [None, 0])
def test_replicas_that_are_not_given_are_one(replicas):
    assert kt.Compute(replicas=replicas).replicas == 1


def test_a_launch_timeout_may_be_text():
    assert kt.Compute(launch_timeout="1200").launch_timeout == 1200


def test_the_callers_dictionaries_are_neither_changed_nor_kept():
    env_vars, labels = {"A": "1"}, {"team": "ml"}
    compute = kt.Compute(env_vars=env_vars, labels=labels)

    env_vars["B"] = "2"
    labels.clear()
    compute.add_env_vars({"C": "3"})

    assert compute.env_vars == {"A": "1", "C": "3"}
    assert compute.user_labels == {"team": "ml"}
    assert env_vars == {"A": "1", "B": "2"}


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"cpus": "lots"}, "cpus"),
        ({"cpus": True}, "cpus"),
        ({"memory": "4GB"}, "memory"),
        ({"env_vars": ["A=1"]}, "env_vars"),
        ({"env_vars": {"1A": "x"}}, "1A"),
        ({"env_vars": {"A": None}}, "A"),
        ({"env_vars": {"A": "\0"}}, "A"),
        ({"labels": {"team": "no spaces"}}, "team"),
        ({"labels": {"bad name": "x"}}, "bad name"),
        ({"replicas": -1}, "replicas"),
        ({"replicas": 1.5}, "replicas"),
        ({"replicas": True}, "replicas"),
        ({"working_dir": "app"}, "working_dir"),
        ({"launch_timeout": "soon"}, "launch_timeout"),
        ({"launch_timeout": -1}, "launch_timeout"),
        ({"namespace": "Not_Valid"}, "namespace"),
        ({"allowed_serialization": "json"}, "allowed_serialization"),
        ({"allowed_serialization": ["yaml"]}, "yaml"),
        ({"allowed_serialization": []}, "allowed_serialization"),
        ({"logging_config": "debug"}, "logging_config"),
        ({"inactivity_ttl": "soon"}, "inactivity_ttl"),
        ({"inactivity_ttl": "5"}, "inactivity_ttl"),
    ],
)
def test_an_impossible_value_is_refused_by_the_name_of_its_parameter(arguments, names):
    with pytest.raises(kt.SpecError, match=names) as caught:
        kt.Compute(**arguments)

    assert isinstance(caught.value, ValueError)


def test_setters_check_as_the_constructor_does():
    compute = kt.Compute()

    compute.replicas = 3
    compute.working_dir = "/app/"
    with pytest.raises(kt.SpecError, match="inactivity_ttl"):
        compute.inactivity_ttl = "soon"

    assert (compute.replicas, compute.working_dir, compute.inactivity_ttl) == (3, "/app", None)


def test_an_unknown_parameter_is_a_type_error():
    with pytest.raises(TypeError, match="gpuz"):
        kt.Compute(gpuz=1)


FULL = {
    "cpus": "0.5",
    "memory": "2Gi",
    "namespace": "research",
    "labels": {"team": "ml"},
    "env_vars": {"A": "1"},
    "inactivity_ttl": "30m",
    "launch_timeout": 60,
    "working_dir": "/app",
    "allowed_serialization": ["json", "pickle"],
    "replicas": 2,
    "logging_config": kt.LoggingConfig(level="debug"),
}


def test_its_repr_makes_it_again():
    compute = kt.Compute(**FULL)
    names = {"Compute": kt.Compute, "LoggingConfig": kt.LoggingConfig}

    assert eval(repr(compute), names) == compute
    assert repr(kt.Compute()) == "Compute()"


def test_pickling_and_copying_keep_it():
    compute = kt.Compute(**FULL)

    assert pickle.loads(pickle.dumps(compute)) == compute
    assert copy.deepcopy(compute) == compute
    assert compute != kt.Compute()


def test_it_becomes_the_first_service_and_a_copy_for_the_second():
    compute = kt.Compute(cpus=1)

    first = compute.for_service("one")
    second = compute.for_service("two")

    assert first is compute
    assert first.service_name == "one"
    assert second == compute
    assert second.service_name == "two"
    with pytest.raises(kt.SpecError, match="one"):
        compute.service_name = "two"


def test_the_environment_gives_what_was_not_given(monkeypatch):
    monkeypatch.setenv("KT_LAUNCH_TIMEOUT", "120")
    monkeypatch.setenv("KT_ALLOWED_SERIALIZATION", "json, pickle")

    compute = kt.Compute()

    assert compute.launch_timeout == 120
    assert compute.allowed_serialization == ["json", "pickle"]
    assert kt.Compute(launch_timeout=5, allowed_serialization=["none"]) == kt.Compute(
        launch_timeout="5", allowed_serialization=("none",)
    )


@pytest.mark.parametrize("variable", ["KT_LAUNCH_TIMEOUT", "KT_ALLOWED_SERIALIZATION"])
def test_an_impossible_default_of_the_environment_names_its_variable(monkeypatch, variable):
    monkeypatch.setenv(variable, "abc")

    with pytest.raises(kt.SpecError, match=f"^{variable}: .*'abc'"):
        kt.Compute()
    with pytest.raises(kt.SpecError, match=r"^(launch_timeout|allowed_serialization) "):
        kt.Compute(launch_timeout="xyz", allowed_serialization=["xyz"])


def test_its_manifest_is_what_kubernetes_would_get():
    manifest = kt.Compute(cpus="0.5", memory="1Gi", namespace="research", replicas=2).manifest

    assert manifest["kind"] == "Deployment"
    assert manifest["metadata"]["namespace"] == "research"
    assert manifest["metadata"]["name"] is None
    assert manifest["spec"]["replicas"] == 2
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["requests"] == {"cpu": "0.5", "memory": "1Gi"}


@pytest.mark.parametrize(
    ("word", "meant"), [("cpu", "cpus"), ("gpu", "gpus"), ("num_gpus", "gpus"), ("env", "env_vars")]
)
def test_an_unknown_parameter_is_refused_with_the_one_that_is_meant(word, meant):
    with pytest.raises(kt.SpecError, match=f"did you mean {meant}"):
        kt.Compute(**{word: 1})
