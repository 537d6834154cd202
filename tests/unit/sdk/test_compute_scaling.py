"""`.autoscale` and `.distribute`: what they take, refuse and become."""

import pytest

import kubetorch as kt
from kubetorch.specs.autoscaling import HPA, KPA
from unit.manifests.users import manifests

SCALING = "autoscaling.knative.dev/"


def annotations(compute):
    return compute.pod_template["metadata"]["annotations"]


def test_autoscale_makes_a_knative_service_with_the_documented_defaults():
    compute = kt.Compute(cpus=1)

    assert compute.autoscale(max_scale=5) is compute

    assert compute.deployment_mode == "knative"
    scaling_annotations = annotations(compute)
    assert scaling_annotations[f"{SCALING}min-scale"] == "1"
    assert scaling_annotations[f"{SCALING}max-scale"] == "5"
    assert scaling_annotations[f"{SCALING}class"] == KPA
    assert scaling_annotations[f"{SCALING}scale-down-delay"] == "1m"
    assert scaling_annotations[f"{SCALING}scale-to-zero-pod-retention-period"] == "10m"
    assert scaling_annotations["serving.knative.dev/progress-deadline"] == "1080s"
    assert compute.autoscaling_config.max_scale == 5
    assert compute.replicas == 1


@pytest.mark.parametrize(
    ("timeout", "deadline"), [(900, "1080s"), (300, "10m"), (1200, "1440s"), (10, "10m")]
)
def test_the_progress_deadline_follows_the_launch_timeout(timeout, deadline):
    before = kt.Compute(launch_timeout=timeout).autoscale()
    after = kt.Compute().autoscale()
    after.launch_timeout = timeout

    assert before.autoscaling_config.progress_deadline == deadline
    assert after.autoscaling_config.progress_deadline == deadline


def test_a_progress_deadline_of_ones_own_stays_and_has_to_be_long_enough():
    compute = kt.Compute(launch_timeout=60).autoscale(progress_deadline="2m")
    compute.launch_timeout = 100

    assert compute.autoscaling_config.progress_deadline == "2m"
    with pytest.raises(kt.AutoScalingError, match="progress_deadline"):
        compute.launch_timeout = 300
    assert compute.launch_timeout == 100


def test_a_short_progress_deadline_shortens_the_launch_timeout_that_nobody_said(monkeypatch):
    compute = kt.Compute().autoscale(progress_deadline="5m")

    assert compute.launch_timeout == 300
    assert compute.autoscaling_config.progress_deadline == "5m"
    (container,) = compute.pod_spec["containers"]
    assert container["startupProbe"]["failureThreshold"] == 60
    assert kt.Compute().autoscale(progress_deadline="20m").launch_timeout == 900
    monkeypatch.setenv("KT_LAUNCH_TIMEOUT", "600")
    assert kt.Compute().autoscale(progress_deadline="5m").launch_timeout == 300


def test_a_launch_timeout_that_was_said_contradicts_a_short_progress_deadline():
    with pytest.raises(kt.AutoScalingError, match="shorter than launch_timeout, which is 900 s"):
        kt.Compute(launch_timeout=900).autoscale(progress_deadline="5m")
    compute = kt.Compute()
    compute.launch_timeout = 900
    with pytest.raises(kt.AutoScalingError, match="shorter than launch_timeout"):
        compute.autoscale(progress_deadline="5m")


def test_the_other_spellings_of_autoscale():
    spelled = kt.Compute().autoscale(min_replicas=0, max_replicas=10, target_concurrency=5)

    assert spelled == kt.Compute().autoscale(
        min_scale=0, max_scale=10, target=5, metric="concurrency"
    )
    scaling = kt.Compute().autoscale(min_scale=3, scale_to_zero_grace_period=50).autoscaling_config
    assert (scaling.min_scale, scaling.scale_to_zero_pod_retention_period) == (3, "50s")
    to_zero = kt.Compute().autoscale(scale_to_zero_grace_period=300)
    assert annotations(to_zero)[f"{SCALING}min-scale"] == "0"


def test_unknown_keywords_of_autoscale_are_annotations():
    compute = kt.Compute().autoscale(target_burst_capacity=200)

    assert annotations(compute)[f"{SCALING}target-burst-capacity"] == "200"


def test_concurrency_is_a_limit_of_the_container():
    compute = kt.Compute().autoscale(concurrency=10, metric="cpu")

    assert compute.pod_spec["containerConcurrency"] == 10
    assert compute.autoscaling_config.autoscaler_class == HPA
    compute.concurrency = 3
    assert compute.pod_spec["containerConcurrency"] == compute.concurrency == 3
    bounded = kt.Compute(concurrency=3, num_proc=2).autoscale()
    assert bounded.pod_spec["containerConcurrency"] == 6
    bounded.autoscale(concurrency=6)
    assert (bounded.concurrency, bounded.autoscaling_config.concurrency) == (3, 6)


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: kt.Compute(concurrency=0), "concurrency is 0"),
        (lambda: kt.Compute(concurrency=True), "concurrency is True"),
        (lambda: kt.Compute(max_queue=0), "max_queue is 0"),
        (lambda: kt.Compute(num_proc=0), "num_proc is 0"),
        (lambda: kt.Compute(num_proc="all"), "num_proc is 'all'"),
        (lambda: kt.Compute(num_proc=2).distribute(workers=2), "num_proc is 2, of a service"),
        (lambda: kt.Compute(concurrency=2).autoscale(concurrency=3), "2 for each process, and 3"),
        (lambda: kt.Compute(num_proc=2).autoscale(concurrency=3), "cannot share equally"),
        (lambda: kt.Compute(concurrency=2).distribute("ray"), "Ray's head"),
        (
            lambda: _set(kt.Compute.from_manifest(JOB), concurrency=2),
            "concurrency is 2; it bounds the calls of a service, and this is a job",
        ),
    ],
)
def test_bounds_that_cannot_be_kept_are_refused_where_they_are_written(declare, message):
    with pytest.raises(kt.SpecError, match=message):
        declare()


def _set(compute, *, concurrency):
    compute.concurrency = concurrency


JOB = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "work"},
    "spec": {"template": {"spec": {"containers": [{"name": "c", "image": "python"}]}}},
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_scale": 3, "max_scale": 2}, "min_scale cannot be greater than max_scale"),
        ({"window": "60"}, "window must end with s, m, or h"),
        ({"target_utilization": 101}, "target_utilization must be between 1 and 100"),
        ({"scale_down_delay": "soon"}, "scale_down_delay must be a valid duration"),
        ({"autoscaler_class": "mine"}, "autoscaler_class must be"),
        ({"min_scales": 1}, "min_scale"),
        ({"min_scale": "one"}, "min_scale is 'one'"),
        ({"target": float("nan")}, "target is nan"),
        ({"metric": "cpu", "autoscaler_class": KPA}, "needs the HPA class"),
    ],
)
def test_what_cannot_scale_is_refused(arguments, message):
    with pytest.raises(kt.AutoScalingError, match=message):
        kt.Compute().autoscale(**arguments)


def test_replicas_of_an_autoscaled_service_are_the_fewest():
    compute = kt.Compute().autoscale(max_scale=4)

    compute.replicas = 3

    assert compute.autoscaling_config.min_scale == compute.replicas == 3
    with pytest.raises(kt.AutoScalingError, match="max_scale"):
        compute.replicas = 5
    with pytest.raises(kt.SpecError, match=r"(?s)replicas is 3.*min_scale=3"):
        kt.Compute(replicas=3).autoscale()
    by_clock = kt.Compute().autoscale(min_scale={"0 8 * * *": 4, "0 20 * * *": 0}, timezone="UTC")
    assert by_clock.replicas == 0
    by_clock.replicas = 2
    assert by_clock == kt.Compute().autoscale(min_scale=2)


def test_memory_is_a_percentage_and_knative_is_given_mebibytes():
    compute = kt.Compute(memory="16Gi").autoscale(metric="memory", target=70)

    assert annotations(compute)[f"{SCALING}target"] == "11469"
    assert compute.autoscaling_config.target == 70
    manifest = kt.Compute.from_manifest({**compute.manifest, "metadata": {"name": "mine"}})
    assert manifest.autoscaling_config.target == 70
    assert annotations(kt.Compute().autoscale(metric="memory", target=70))[f"{SCALING}target"] == (
        "70"
    )


def test_bursts_have_the_annotations_of_knative():
    compute = kt.Compute().autoscale(
        activation_scale=3, panic_window_percentage=12.5, panic_threshold_percentage=150
    )

    assert {
        name: annotations(compute)[f"{SCALING}{name}"]
        for name in ("activation-scale", "panic-window-percentage", "panic-threshold-percentage")
    } == {
        "activation-scale": "3",
        "panic-window-percentage": "12.5",
        "panic-threshold-percentage": "150",
    }


# ---------------------------------------------------------------------------------- distribution


def test_distribute_asks_for_workers_and_keeps_the_deployment():
    compute = kt.Compute(launch_timeout=600)

    assert compute.distribute("pytorch", workers="4", num_proc=2) is compute

    assert compute.deployment_mode == "deployment"
    assert compute.manifest["spec"]["replicas"] == compute.replicas == 4
    assert compute.dispatch_method == "pytorch"
    assert compute.distributed_config == {
        "distribution_type": "pytorch",
        "workers": 4,
        "quorum_timeout": 600,
        "quorum_workers": 4,
        "monitor_members": True,
        "num_proc": 2,
    }


def test_distribute_without_workers_keeps_the_replicas():
    compute = kt.Compute(replicas=3).distribute()

    assert (compute.replicas, compute.distributed_config["workers"]) == (3, 3)
    compute.replicas = 5
    assert (compute.replicas, compute.distributed_config["workers"]) == (5, 5)


def test_ray_is_a_ray_cluster():
    compute = kt.Compute(cpus="2").distribute("ray", workers=2)

    assert compute.deployment_mode == "raycluster"
    assert compute.raycluster["spec"]["workerGroupSpecs"][0]["replicas"] == 1
    assert compute.replicas == 2
    assert compute.distributed_config["monitor_members"] is False


def test_the_other_spellings_of_distribute():
    spelled = kt.Compute().distribute(
        framework="pytorch", workers=4, distribution_args={"port": 1234}
    )

    assert spelled == kt.Compute().distribute("pytorch", workers=4, port=1234)
    with pytest.warns(UserWarning, match="scale_to_zero_grace_period") as caught:
        kt.Compute().distribute("pytorch", workers=4, scale_to_zero_grace_period=60)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"distribution_type": "pytroch"}, "did you mean pytorch"),
        ({"distribution_type": "Spark"}, "not supported"),
        ({"workers": 0}, "workers is 0"),
        ({"workers": [2]}, "workers is"),
        ({"workers": 2.5}, "workers is 2.5"),
        ({"worker": 2}, "did you mean workers"),
        ({"num_procs": 2}, "did you mean num_proc"),
        ({"num_proc": "all"}, "num_proc is 'all'"),
        ({"callback": print}, "callback="),
        ({"monitor_members": "no"}, "monitor_members is 'no'"),
        ({"workers": 2, "quorum_workers": 3}, "quorum_workers is 3, of 2"),
    ],
)
def test_what_cannot_be_distributed_is_refused(arguments, message):
    with pytest.raises(kt.SpecError, match=message):
        kt.Compute().distribute(**arguments)


def test_a_service_is_autoscaled_or_distributed():
    with pytest.raises(kt.SpecError, match="exclude each other"):
        kt.Compute().autoscale().distribute("pytorch")
    with pytest.raises(kt.SpecError, match="exclude each other"):
        kt.Compute().distribute("pytorch").autoscale()


def test_the_distributed_config_can_be_set_and_taken_back():
    compute = kt.Compute(replicas=2)

    compute.distributed_config = {"distribution_type": "jax", "workers": 3}
    assert (compute.dispatch_method, compute.replicas) == ("jax", 3)
    with pytest.raises(kt.SpecError, match="callback"):
        compute.distributed_config = {"callback": object()}
    compute.distributed_config = None

    assert (compute.dispatch_method, compute.distributed_config) == ("regular", None)


def test_what_a_manifest_is_decides_whether_it_can_scale_or_be_ray():
    with pytest.raises(kt.SpecError, match="needs a Knative Service; the manifest is a Job"):
        kt.Compute.from_manifest(manifests()["Job"]).autoscale()
    with pytest.raises(kt.SpecError, match="needs a RayCluster; the manifest is a Deployment"):
        kt.Compute.from_manifest(manifests()["Deployment"]).distribute("ray")
    assert kt.Compute.from_manifest(manifests()["Service"]).autoscale(max_scale=2).replicas == 1


def test_pods_that_are_there_may_be_distributed_however_many_match():
    pool = kt.Compute(selector={"app": "mine"}).distribute("pytorch", quorum_workers=3)
    assert pool.to_spec().is_selector_only
    assert pool.distributed_config["quorum_workers"] == 3
    with pytest.raises(kt.errors.SpecError, match="quorum_workers is 3, of 2 workers"):
        kt.Compute(selector={"app": "mine"}).distribute(workers=2, quorum_workers=3)


# -------------------------------------------------------------------------------------- dispatch


def test_a_call_goes_to_all_pods_unless_dispatch_says_any():
    compute = kt.Compute(replicas=3)
    assert (compute.dispatch, compute.to_spec().broadcast) == ("all", 3)
    compute.dispatch = "any"
    assert (compute.dispatch, compute.to_spec().broadcast) == ("any", None)
    compute.dispatch = None
    assert compute.dispatch == "all"
    assert kt.Compute(dispatch="any").autoscale(min_scale=2).to_spec().broadcast is None


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: kt.Compute(dispatch="one"), r"dispatch is 'one'; it must be \"all\""),
        (lambda: kt.Compute(dispatch="ANY"), "did you mean any"),
        (lambda: kt.Compute(dispatch=["any"]), r"dispatch is \['any'\]"),
        (lambda: kt.Compute(dispatch="any").distribute(workers=2), 'workers="any"'),
        (lambda: kt.Compute(dispatch="any", selector={"app": "x"}), "that a selector finds"),
    ],
)
def test_a_dispatch_that_cannot_be_is_refused_where_it_is_written(declare, message):
    with pytest.raises(kt.SpecError, match=message):
        declare()
