"""`AutoscalingConfig` at the path that it had in 0.5."""

import dataclasses
import importlib
import pickle

import pytest

import kubetorch as kt

with pytest.warns(DeprecationWarning):
    AutoscalingConfig = importlib.import_module(
        "kubetorch.provisioning.autoscaling"
    ).AutoscalingConfig


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"min_scale": 3, "max_scale": 1}, "min_scale cannot be greater than max_scale"),
        ({"window": "60"}, "window must end with s, m, or h"),
        ({"target_utilization": 101}, "target_utilization must be between 1 and 100"),
        ({"scale_down_delay": "soon"}, "scale_down_delay must be a valid duration"),
        ({"autoscaler_class": "own"}, "autoscaler_class must be"),
    ],
)
def test_an_impossible_value_is_refused(values, words):
    with pytest.raises(kt.AutoScalingError, match=words):
        AutoscalingConfig(**values)


def test_it_becomes_the_annotations_of_knative():
    config = AutoscalingConfig(min_scale=1, max_scale=5, target=10, window="30s", concurrency=3)

    assert (config.min_scale, config.scale_down_delay) == (1, None)
    assert config.convert_to_annotations() == {
        "autoscaling.knative.dev/class": "kpa.autoscaling.knative.dev",
        "autoscaling.knative.dev/target": "10",
        "autoscaling.knative.dev/min-scale": "1",
        "autoscaling.knative.dev/max-scale": "5",
        "autoscaling.knative.dev/window": "30s",
    }


def test_that_of_a_compute_is_of_the_same_class():
    compute = kt.Compute().autoscale(
        target=10, max_scale=5, activation_scale=2, buffer=1, target_burst_capacity=0
    )
    config = compute.autoscaling_config
    assert isinstance(config, AutoscalingConfig)
    assert (config.target, config.scale_down_delay) == (10, "1m")
    assert (config.activation_scale, config.buffer) == (2, 1)
    assert config.extra_annotations == (("target-burst-capacity", "0"),)
    assert config == compute.autoscaling_config
    assert pickle.loads(pickle.dumps(config)) == config
    annotations = config.convert_to_annotations()
    assert annotations["autoscaling.knative.dev/target"] == "10"
    assert annotations["autoscaling.knative.dev/activation-scale"] == "2"
    assert annotations["autoscaling.knative.dev/target-burst-capacity"] == "0"
    assert annotations["autoscaling.knative.dev/scale-down-delay"] == "1m"
    assert kt.Compute().autoscaling_config is None


def test_it_has_the_keywords_of_autoscale_and_can_be_replaced_in_part():
    config = AutoscalingConfig(scale_to_zero_grace_period=30)
    assert (config.min_scale, config.scale_to_zero_pod_retention_period) == (0, "30s")
    declared = kt.Compute().autoscale(
        min_scale={"0 8 * * *": 4}, timezone="Europe/Berlin", target_burst_capacity=0
    )
    bounded = dataclasses.replace(declared.autoscaling_config, max_scale=5)
    assert (bounded.min_schedule, bounded.max_scale) == ((("0 8 * * *", 4),), 5)
    assert bounded.extra_annotations == (("target-burst-capacity", "0"),)
    assert dataclasses.replace(bounded, max_scale=None) == declared.autoscaling_config
