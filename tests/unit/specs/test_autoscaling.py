"""Autoscaling: spellings, defaults, contradictions."""

import pytest

from kubetorch.errors import AutoScalingError
from kubetorch.specs.autoscaling import (
    HPA,
    KPA,
    beyond_knative,
    changed,
    merge_changes,
    parse,
    parse_config,
    seconds,
)


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
    with pytest.raises(AutoScalingError, match="min_scale is 2, min_replicas is 1"):
        scaled(min_replicas=1, min_scale=2)


def test_a_grace_period_allows_zero_only_where_no_minimum_was_given():
    assert scaled(scale_to_zero_grace_period=300).min_scale == 0
    scaling = scaled(scale_to_zero_grace_period=50, min_scale=3)
    assert (scaling.min_scale, scaling.scale_to_zero_pod_retention_period) == (3, "50s")


def test_a_max_scale_of_zero_is_no_limit():
    assert scaled(min_scale=5, max_scale=0).max_scale == 0


@pytest.mark.parametrize("metric", ["cpu", "memory"])
def test_a_metric_that_requests_do_not_have_selects_the_hpa_class(metric):
    assert scaled(metric=metric).autoscaler_class == HPA


def test_the_hpa_class_without_a_metric_is_that_of_cpu():
    assert scaled(autoscaler_class="hpa").metric == "cpu"


def test_a_metric_of_the_users_own_has_no_class_unless_it_is_said():
    assert scaled(metric="queue", target=8).autoscaler_class is None
    assert scaled(metric="queue", target=8, min_scale=0).fewest_pods == 0
    assert scaled(metric="queue", target=8, autoscaler_class=HPA).autoscaler_class == HPA
    with pytest.raises(AutoScalingError, match="metric 'queue' needs the HPA class") as refusal:
        scaled(metric="queue", target=8, autoscaler_class=KPA)
    assert "or none for the metric of kt.metric('queue', ...)" in str(refusal.value.hint)
    with pytest.raises(AutoScalingError, match="metric 'queue' needs a target"):
        scaled(metric="queue")


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ({"activation_scale": 2, "metric": "rps", "buffer": 0}, ""),
        ({"metric": "cpu", "target": 50}, ""),
        ({"metric": "queue", "target": 5, "autoscaler_class": HPA}, ""),
        ({"metric": "queue", "target": 5}, "metric='queue' of kt.metric"),
        (
            {"buffer": 2, "min_scale": {"0 8 * * *": 1}},
            "buffer=2, min_scale by the clock",
        ),
    ],
)
def test_what_knative_cannot_do_has_a_name(arguments, options):
    assert beyond_knative(scaled(**arguments)) == options


def test_a_class_and_a_metric_that_do_not_go_together_are_refused():
    with pytest.raises(AutoScalingError, match="needs the HPA class"):
        scaled(metric="cpu", autoscaler_class=KPA)
    with pytest.raises(AutoScalingError, match="needs the KPA class"):
        scaled(metric="rps", autoscaler_class=HPA)


def test_an_unknown_keyword_becomes_an_annotation_and_a_near_miss_an_error():
    assert scaled(target_burst_capacity=20).extra_annotations == (("target-burst-capacity", "20"),)
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
        ({"max_scale": 2_000_000}, "max_scale is 2000000; .* from 0 to 1,000,000"),
        ({"scale_down_delay": "30s\n"}, "scale_down_delay must be a valid duration"),
        ({"scale_down_delay": "5"}, "scale_down_delay must be a valid duration"),
        ({"progress_deadline": "10 m"}, "progress_deadline must be a valid duration"),
        ({"progress_deadline": "0s"}, "Knative takes 1 s or more"),
        ({"autoscaler_class": "vpa"}, "autoscaler_class must be"),
        ({"min_scale": -1}, "min_scale is -1"),
        ({"min_scale": "2"}, "min_scale is '2'"),
        ({"min_scale": True}, "min_scale is True"),
        ({"target": 0}, "target is 0"),
        ({"target": float("nan")}, "target is nan"),
        ({"target": float("inf")}, "target is inf"),
        ({"target": "many"}, "target is 'many'"),
        ({"metric": 3}, "metric is 3"),
        ({"initial_scale": 5, "max_scale": 2}, "initial_scale cannot be greater"),
        ({"activation_scale": 5, "max_scale": 2}, "activation_scale cannot be greater"),
        ({"buffer": 5, "max_scale": 2}, "buffer cannot be greater than max_scale: 5 > 2"),
        ({"buffer": -1}, "buffer is -1; it must be a whole number from 0 to 1,000,000"),
        ({"buffer": 1.5}, "buffer is 1.5"),
        ({"activation_scale": 0}, "activation_scale is 0; it must be a whole number from 1 to"),
        ({"panic_window_percentage": 0.5}, "panic_window_percentage must be between 1 and 100"),
        ({"panic_threshold_percentage": 100}, "must be between 110 and 1000, not 100"),
        ({"panic_threshold_percentage": "200"}, "must be between 110 and 1000, not '200'"),
        ({"min_scale": {}}, "min_scale has 0 cron expressions"),
        ({"min_scale": {"0 8 * * *": 5}, "max_scale": 2}, "'0 8 . . .' cannot be greater"),
        ({"min_scale": {"0 8 * * *": -1}}, "min_scale at '0 8 . . .' is -1"),
        ({"min_scale": {"0 8 * * *": 4, "0 20 * * *": None}}, "min_scale at '0 20 . . .' is None"),
        ({"min_scale": {"@daily": 1}}, "'@daily', which is no cron expression: .* 5 fields"),
        ({"min_scale": {"* * * * * *": 1}}, "no cron expression: it must have 5 fields"),
        ({"min_scale": {"61 8 * * *": 1}}, "no cron expression: Bad minute"),
        ({"min_scale": {"0 0 */30 2 MON#5": 1}}, "no cron expression: it never comes"),
        ({"min_scale": {"0 8 * * *": 1}, "min_replicas": 2}, "min_replicas is 2, min_scale is"),
        ({"timezone": "Europe/Berlin"}, "timezone is 'Europe/Berlin', and there is no schedule"),
        ({"timezone": "Europe/Berlin", "min_scale": 1}, "there is no schedule"),
        ({"timezone": "Mars", "min_scale": {"0 8 * * *": 1}}, "timezone 'Mars' is not known"),
        ({"timezone": 3, "min_scale": {"0 8 * * *": 1}}, "timezone 3 is not known"),
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
        with pytest.raises(
            AutoScalingError, match=f"{name} is 0; the HPA class keeps at least one"
        ):
            scaled(**{name: 0}, **more)
    with pytest.raises(AutoScalingError, match=r"Kubernetes 1\.37 .* object and external metrics"):
        scaled(metric="cpu", min_scale={"0 8 * * *": 1, "0 20 * * *": 0})


def test_the_fewest_pods_follow_the_clock():
    expressions = {"0 8 * * 1-5": 4, "0 20 * * *": 2}
    spec = scaled(min_scale=expressions, timezone="Europe/Berlin", max_scale=4)
    assert (spec.min_scale, spec.min_schedule) == (None, (("0 20 * * *", 2), ("0 8 * * 1-5", 4)))
    assert (spec.fewest_pods, spec.timezone) == (2, "Europe/Berlin")
    assert scaled(min_scale=dict(reversed(expressions.items()))) == scaled(min_scale=expressions)
    assert parse_config({"min_scale": expressions}).fewest_pods == 2
    # The time of the last pod says nothing of the schedule.
    assert scaled(min_scale=expressions, scale_to_zero_grace_period=5).fewest_pods == 2


def test_a_number_replaces_a_schedule_and_its_time_zone():
    declared = scaled(min_scale={"0 8 * * *": 4}, timezone="Europe/Berlin")
    fixed = changed(declared, {"min_scale": 2})
    assert (fixed.min_scale, fixed.min_schedule, fixed.timezone) == (2, (), None)
    other = changed(declared, {"min_scale": {"0 9 * * *": 3}})
    assert (other.fewest_pods, other.timezone) == (3, "Europe/Berlin")
    with pytest.raises(AutoScalingError, match="there is no schedule"):
        changed(declared, {"min_scale": 2, "timezone": "Asia/Tokyo"})


def test_a_smaller_maximum_outweighs_how_many_pods_there_were_to_begin_with():
    declared = scaled(initial_scale=4, max_scale=8)
    assert changed(declared, {"max_scale": 2}).max_scale == 2
    assert changed(declared, {"max_scale": 6}).initial_scale == 4


@pytest.mark.parametrize("metric", ["cpu", "memory"])
def test_pods_that_do_not_measure_a_metric_cannot_be_scaled_by_it(metric):
    with pytest.raises(AutoScalingError, match=f"metric cannot become '{metric}' while"):
        changed(scaled(), {"metric": metric, "target": 50})
    declared = scaled(metric="cpu", target=50, min_scale=1)
    assert changed(declared, {"metric": "memory"}).metric == "memory"


@pytest.mark.parametrize("word", ["initial_scale", "initial_replicas"])
def test_what_only_a_deploy_can_change_is_refused_by_each_of_its_names(word):
    with pytest.raises(AutoScalingError, match=f"{word} cannot be changed while"):
        changed(scaled(), {word: 2})


@pytest.mark.parametrize("word", ["min_scale", "min_replicas"])
@pytest.mark.parametrize("number", [2, None])
def test_a_change_replaces_an_earlier_one_of_the_same_field(word, number):
    former = {"min_scale": {"0 8 * * *": 4}, "timezone": "Europe/Berlin", "max_scale": 9}
    settings = merge_changes(former, {word: number})
    assert settings == {"max_scale": 9} | ({} if number is None else {word: number})


def test_target_concurrency_of_none_is_not_given():
    assert scaled(metric="cpu", target=70, target_concurrency=None).metric == "cpu"


def test_a_timezone_that_is_like_a_known_one_is_named():
    with pytest.raises(AutoScalingError, match="not known") as refusal:
        scaled(min_scale={"0 8 * * *": 1}, timezone="europe/berlin")
    assert refusal.value.hint == "did you mean Europe/Berlin?"


@pytest.mark.parametrize(
    ("duration", "number"), [("1m30s", 90), ("1h", 3600), ("90.5s", 91), ("1500ms", 2), ("0s", 0)]
)
def test_a_duration_of_a_manifest_is_a_number_of_seconds(duration, number):
    assert seconds(duration) == number


@pytest.mark.parametrize("text", ["", "60", "s", "1d", "-1s", "1m 30s"])
def test_other_text_is_no_duration(text):
    with pytest.raises(ValueError, match="is no duration"):
        seconds(text)


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
        ("activationScale", "activation_scale"),
        ("panic_window", "panic_window_percentage"),
        ("time_zone", "timezone"),
        ("min_schedule", 'min_scale={"0 8 * * 1-5": 4'),
    ],
)
def test_a_word_that_is_like_a_known_one_is_an_error(word, meant):
    with pytest.raises(AutoScalingError, match=f"no '{word}'") as caught:
        scaled(**{word: 1})
    assert meant in str(caught.value.hint)


@pytest.mark.parametrize(
    "word",
    [
        "target_burst_capacity",
        "anything",
    ],
)
def test_further_words_of_knative_are_annotations(word):
    assert scaled(**{word: 1}).extra_annotations == ((word.replace("_", "-"), "1"),)
