"""What a deploy shows."""

import pytest

import kubetorch as kt
from kubetorch.sdk.deploys import deploy
from kubetorch.sdk.deploys.deploy import LaunchLines
from kubetorch.sdk.logs import CallLines, Screen
from kubetorch.specs.callable import AppSpec, CallableRef
from kubetorch.specs.logging import LoggingConfig
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import frames
from kubetorch.wire.messages import DeployLog, Stage
from unit.manifests.users import manifests

PRINTED = DeployLog(text="loading", pod="svc-0", time=1.0)
DEBUG = DeployLog(text="detail", pod="svc-0", source="logger", level="DEBUG", time=2.0)
EVENT = Stage(stage="event", message="Pulling image", pod="svc-0")
WARNING = Stage(stage="preloading", message="numpy is unfit", pod="svc-0", warning=True)


@pytest.fixture
def shown(capsys):
    """The lines that a deploy with these settings shows for all of the above."""

    def show(*events, stream_logs=True, **config):
        lines = LaunchLines(Screen(), "svc", LoggingConfig(**config), stream_logs=stream_logs)
        for event in events or (PRINTED, DEBUG, EVENT, WARNING):
            lines.log(event) if isinstance(event, DeployLog) else lines.stage(event)
        printed = capsys.readouterr()
        return [*printed.out.splitlines(), *printed.err.splitlines()]

    return show


def test_only_what_the_users_code_prints_goes_to_stdout(capsys):
    lines = LaunchLines(Screen(), "svc", LoggingConfig(level="debug"), stream_logs=True)
    step = DeployLog(text="Collecting torch", pod="svc-0", source=frames.IMAGE)
    more = DeployLog(text="there are more lines", pod="svc-0", source=frames.KUBETORCH)
    for line in (PRINTED, DEBUG, step, more):
        lines.log(line)
    lines.stage(EVENT)
    lines.stage(WARNING)
    lines.warn("a deploy replaces the one before")
    out, err = capsys.readouterr()
    assert [line.partition(" ")[2][:7] for line in out.splitlines()] == ["loading", "DEBUG |"]
    error_lines = err.splitlines()
    assert error_lines[:2] == ["(svc) Collecting torch", "(svc) there are more lines"]
    assert error_lines[2].startswith("(svc events) ")
    assert [line.rpartition(" | ")[2] for line in error_lines[3:]] == [
        "numpy is unfit",
        "a deploy replaces the one before",
    ]


def test_what_a_call_prints_goes_to_stdout_and_what_is_said_of_its_lines_does_not(capsys):
    lines = CallLines(Screen(), LoggingConfig())
    lines.log(frames.Log("hello", "svc-0"))
    lines.log(frames.Log("wrong", "svc-0", "stderr"))
    lines.log(frames.Log("3 lines left out", "svc-0", frames.KUBETORCH))
    assert capsys.readouterr() == ("(svc-0) hello\n(svc-0) wrong\n", "(svc-0) 3 lines left out\n")


def test_lines_of_loading_code_carry_the_services_name(shown):
    assert shown(PRINTED) == ["(svc) loading"]
    assert shown(PRINTED, include_name=False) == ["loading"]


def test_loggers_are_filtered_by_level_and_prints_are_not(shown):
    assert len(shown(PRINTED, DEBUG)) == 1
    assert "DEBUG | 1970" in shown(PRINTED, DEBUG, level="debug")[1]


def test_events_are_shown_unless_the_level_or_the_user_leaves_them_out(shown):
    (line,) = shown(EVENT)
    assert line.startswith("(svc events) ")
    assert line.endswith("Pulling image")
    assert shown(EVENT, level="warning") == []
    assert shown(EVENT, include_events=False) == []


def test_without_streaming_only_warnings_are_shown(shown):
    (line,) = shown(stream_logs=False)

    assert "WARNING" in line
    assert "numpy is unfit" in line


def test_events_that_are_told_again_are_shown_once(shown):
    assert len(shown(PRINTED, EVENT, PRINTED, EVENT)) == 2


def test_the_same_line_printed_twice_is_shown_twice(shown):
    later = DeployLog(text="loading", pod="svc-0", time=1.5)

    assert shown(PRINTED, later) == ["(svc) loading"] * 2


def test_the_bar_shows_the_pod_that_is_not_as_far_as_the_others():
    lines = LaunchLines(Screen(), "svc", LoggingConfig(), stream_logs=False)
    lines.accepted(2)
    for pod, step in [("svc-0", 1), ("svc-1", 1), ("svc-0", 2), ("svc-1", 2)]:
        lines.stage(Stage("image", "RUN x", pod, step=step, steps=2))
        assert lines.bar.share == (0.5 if (pod, step) == ("svc-1", 2) else 0.0)
    lines.stage(Stage("importing", "", "svc-0"))
    assert lines.bar.doing.endswith("step 2/2: RUN x")


def declared(name, compute, kind="fn", app=None):
    ref = CallableRef(kind, name, "module", name, app=app)
    return WorkloadSpec("default", name, ref, compute.to_spec())


@pytest.mark.parametrize(
    "compute",
    [
        kt.Compute(replicas=3),
        kt.Compute().autoscale(max_scale=2),
        kt.Compute().distribute("jax", workers=2),
        kt.Compute.from_manifest(manifests()["RayCluster"]),
        kt.Compute.from_manifest(manifests()["Deployment"]).distribute("pytorch", workers=2),
    ],
)
def test_other_services_can_be_launched(compute):
    deploy.check_launchable(declared("train", compute))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (declared("C", kt.Compute(num_proc="auto"), "cls"), "unknown number of instances"),
        (declared("a", kt.Compute(num_proc=2), "app", AppSpec("serve", 80)), "num_proc is 2"),
        (declared("a", kt.Compute(concurrency=2), "app", AppSpec("run")), "without a port"),
    ],
)
def test_bounds_and_processes_that_nothing_keeps_are_refused(spec, message):
    with pytest.raises(kt.SpecError, match=message):
        deploy.check_launchable(spec)


def test_an_endpoint_that_calls_cannot_go_to_is_refused():
    compute = kt.Compute(endpoint=kt.Endpoint(url="https://example.com"))
    with pytest.raises(kt.SpecError, match=r"https://example\.com"):
        deploy.check_launchable(declared("f", compute))
    inside = kt.Compute(endpoint=kt.Endpoint(url="example.com:80"))
    deploy.check_launchable(declared("f", inside))
