"""Autoscaling: spellings, defaults, contradictions."""

import pytest

from kubetorch.errors import AutoScalingError
from kubetorch.specs.autoscaling import HPA, KPA, parse


def scaled(launch_timeout=900, **arguments):
    return parse(arguments, launch_timeout=launch_timeout)


@pytest.mark.parametrize(
    ("timeout", "deadline"), [(900, "1080s"), (300, "10m"), (1200, "1440s"), (500, "10m")]
)
def test_the_progress_deadline_leaves_room_after_the_launch_timeout(timeout, deadline):
    assert scaled(timeout).progress_deadline == deadline


def test_timing_has_defaults_for_machine_learning():
    spec = scaled()
    assert spec.scale_down_delay == "1m"
    assert spec.scale_to_zero_pod_retention_period == "10m"
    assert spec.autoscaler_class == KPA


def test_the_spellings_of_all_documents_mean_the_same():
    spec = scaled(min_replicas=1, max_replicas=9, initial_replicas=2, target_concurrency=5)
    assert (spec.min_scale, spec.max_scale, spec.initial_scale) == (1, 9, 2)
    assert (spec.target, spec.metric) == (5, "concurrency")


def test_two_spellings_that_contradict_each_other_are_refused():
    with pytest.raises(AutoScalingError, match="min_scale says 2, another spelling 1"):
        scaled(min_replicas=1, min_scale=2)


def test_a_grace_period_allows_zero_only_where_no_minimum_was_given():
    assert scaled(scale_to_zero_grace_period=300).min_scale == 0
    scaling = scaled(scale_to_zero_grace_period=50, min_scale=3)
    assert (scaling.min_scale, scaling.scale_to_zero_pod_retention_period) == (3, "50s")


def test_a_max_scale_of_zero_is_no_limit():
    assert scaled(min_scale=5, max_scale=0).max_scale == 0


@pytest.mark.parametrize("metric", ["cpu", "memory", "queue-depth"])
def test_a_metric_that_requests_do_not_have_selects_the_hpa_class(metric):
    assert scaled(metric=metric, target=80).autoscaler_class == HPA


def test_a_class_and_a_metric_that_do_not_go_together_are_refused():
    with pytest.raises(AutoScalingError, match="needs the HPA class"):
        scaled(metric="cpu", autoscaler_class=KPA)
    with pytest.raises(AutoScalingError, match="needs the KPA class"):
        scaled(metric="rps", autoscaler_class=HPA)


def test_an_unknown_keyword_becomes_an_annotation_and_a_near_miss_an_error():
    assert scaled(panic_window_percentage=20).extra_annotations == (
        ("panic-window-percentage", "20"),
    )
    with pytest.raises(AutoScalingError, match="did you mean min_scale"):
        scaled(min_scal=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_scale": 3, "max_scale": 2}, "min_scale cannot be greater than max_scale"),
        ({"window": "60"}, "window must end with s, m, or h"),
        ({"window": "xs"}, "window must be a valid duration"),
        ({"target_utilization": 0}, "target_utilization must be between 1 and 100"),
        ({"target_utilization": 101}, "target_utilization must be between 1 and 100"),
        ({"target_utilization": True}, "target_utilization must be between 1 and 100"),
        ({"scale_down_delay": "5"}, "scale_down_delay must be a valid duration"),
        ({"progress_deadline": "10 m"}, "progress_deadline must be a valid duration"),
        ({"progress_deadline": "0s"}, "Knative takes 1 s or more"),
        ({"autoscaler_class": "vpa"}, "autoscaler_class must be"),
        ({"min_scale": -1}, "min_scale is -1"),
        ({"min_scale": "2"}, "min_scale is '2'"),
        ({"min_scale": True}, "min_scale is True"),
        ({"target": 0}, "target is 0"),
        ({"target": float("nan")}, "target is nan"),
        ({"target": "many"}, "target is 'many'"),
        ({"metric": 3}, "metric is 3"),
        ({"initial_scale": 5, "max_scale": 2}, "initial_scale cannot be greater"),
        ({"scale_to_zero_grace_period": "1m"}, "scale_to_zero_grace_period is '1m'"),
    ],
)
def test_an_impossible_value_is_named(arguments, message):
    with pytest.raises(AutoScalingError, match=message):
        scaled(**arguments)


@pytest.mark.parametrize("window", ["1s", "2h", "61m"])
def test_a_window_that_knative_refuses_is_refused(window):
    with pytest.raises(AutoScalingError, match="6 s to 1 h"):
        parse({"window": window}, launch_timeout=900)


def test_an_empty_metric_is_refused():
    with pytest.raises(AutoScalingError, match="metric is ''"):
        parse({"metric": ""}, launch_timeout=900)


@pytest.mark.parametrize("name", ["scale_to_zero_pod_retention_period", "scale_down_delay"])
def test_times_that_knative_refuses_are_refused_when_they_are_declared(name):
    assert getattr(scaled(**{name: "1h"}), name) == "1h"
    assert getattr(scaled(**{name: "0s"}), name) == "0s"
    with pytest.raises(AutoScalingError, match=f"{name} is '61m'; Knative takes 0 s to 1 h"):
        scaled(**{name: "61m"})


@pytest.mark.parametrize("name", ["min_scale", "initial_scale"])
def test_only_requests_can_scale_from_zero(name):
    assert getattr(scaled(**{name: 0}), name) == 0
    for more in ({"metric": "cpu"}, {"autoscaler_class": HPA}):
        with pytest.raises(AutoScalingError, match=f"{name} is 0; the HPA class always has a pod"):
            scaled(**{name: 0}, **more)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("minScale", "min_scale"),
        ("min_pods", "min_replicas"),
        ("max_concurrency", "concurrency"),
        ("stable_window", "window"),
        ("utilization", "target_utilization"),
        ("scale_to_zero_period", "scale_to_zero_grace_period"),
        ("timeout", "progress_deadline"),
        ("idle_timeout", "scale_to_zero_pod_retention_period"),
        ("requestTimeout", "launch_timeout"),
    ],
)
def test_a_word_that_is_like_a_known_one_is_an_error(word, meant):
    with pytest.raises(AutoScalingError, match=f"no '{word}'") as caught:
        scaled(**{word: 1})
    assert meant in str(caught.value.hint)


@pytest.mark.parametrize(
    "word",
    [
        "activation_scale",
        "panic_threshold_percentage",
        "panic_window_percentage",
        "target_burst_capacity",
        "anything",
    ],
)
def test_further_words_of_knative_are_annotations(word):
    assert scaled(**{word: 1}).extra_annotations == ((word.replace("_", "-"), "1"),)
