"""The options of `autoscale()`, each with what it should do and a function that tries it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import kubetorch as kt
from kubetorch.errors import AutoScalingError, KubetorchError, ServiceTimeoutError
from tools.autoscaling_options.engine import (
    Engine,
    UnlikeError,
    expect,
    load,
    pace,
    pods_for,
    seconds_until,
    seconds_until_pods,
    together,
)


@dataclass(frozen=True)
class Option:
    """An option, what it should do, and what tries it and returns what it did.

    Attributes:
        name: The option, as a program writes it.
        expectation: A sentence.
        attempt: Tries it; raises if it does something else.
        knative: The part of the message by which Knative's clusters refuse it; empty if they
            have it.
    """

    name: str
    expectation: str
    attempt: Callable[[Engine], str]
    knative: str = ""

    def on(self, engine: Engine) -> str:
        """What the option does on an engine.

        Raises:
            UnlikeError: It is something else than it should be.
        """
        if not (engine.is_knative and self.knative):
            return self.attempt(engine)
        try:
            observation = self.attempt(engine)
        except AutoScalingError as error:
            expect(self.knative in str(error), str(error))
            return f"AutoScalingError: {error}"
        raise UnlikeError(f"it is not refused: {observation}")


OPTIONS: list[Option] = []


def option(
    name: str, expectation: str, *, knative: str = ""
) -> Callable[[Callable[[Engine], str]], Callable[[Engine], str]]:
    """Add the function below to `OPTIONS`."""

    def add(attempt: Callable[[Engine], str]) -> Callable[[Engine], str]:
        OPTIONS.append(Option(name, expectation, attempt, knative))
        return attempt

    return add


# ---------------------------------------------------------------------------------------- bounds


@option("min_scale=2", "two pods without a call")
def _min_scale(engine: Engine) -> str:
    with engine.service(min_scale=2) as service:
        seconds_until_pods(service, 2)
        counts = pods_for(service, 8)
        return expect(counts == [2], f"{counts} pods in 8 s without a call")


@option("max_scale=2", "six calls, where each needs a pod, have two pods")
def _max_scale(engine: Engine) -> str:
    with engine.service(max_scale=2, target=1) as service, load(service, 6):
        seconds_until_pods(service, 2)
        counts = pods_for(service, 5)
        return expect(counts == [2], f"{counts} pods with 6 calls")


@option("min_scale=0", "no pod without calls; the next call starts one and has its answer")
def _zero(engine: Engine) -> str:
    with engine.service(engine.functions.work, min_scale=0, max_scale=2) as service:
        seconds_until(lambda: not service.stats().pods, "no pods")
        begin = time.monotonic()
        pod = service()
        return expect(pod, f"no pod, then an answer after {time.monotonic() - begin:.1f} s")


@option("min_scale=0, new code", "new code for a service without pods starts none")
def _new_code(engine: Engine) -> str:
    settings: dict[str, Any] = {"min_scale": 0, "max_scale": 2}
    with engine.service(engine.edited.word, **settings) as service:
        seconds_until(lambda: not service.stats().pods, "no pods")
        file = Path(engine.edited.__file__ or "")
        file.write_text(file.read_text().replace("before", "after"))
        service.to(engine.compute(**settings))
        stats = service.stats()
        word = service()
        return expect(not stats.pods and word == "after", f"{stats.pods} pods, then {word!r}")


@option("min_scale=0, plain HTTP", "a request without our client starts a pod and has its answer")
def _plain_http(engine: Engine) -> str:
    with engine.service(engine.functions.work, min_scale=0, max_scale=2) as service:
        seconds_until(lambda: not service.stats().pods, "no pods")
        body = json.dumps({"args": [0.0]}).encode()
        request = urllib.request.Request(service.endpoint(), body, dict(service.request_headers))
        begin = time.monotonic()
        with urllib.request.urlopen(request, timeout=90) as answer:
            pod = json.loads(answer.read())
        return expect(pod, f"an answer after {time.monotonic() - begin:.1f} s")


@option("initial_scale=2, min_scale=1", "two pods prove the code, and one stays")
def _initial_scale(engine: Engine) -> str:
    with engine.service(initial_scale=2, min_scale=1, max_scale=3) as service:
        # One of them may leave already.
        count = service.stats().pods
        seconds_until_pods(service, 1)
        return expect(count == 2, f"{count} pods after the deploy, then 1")


@option("initial_scale=0, min_scale=0", "the deploy starts no pod; where Knative forbids it, one")
def _initial_zero(engine: Engine) -> str:
    with engine.service(initial_scale=0, min_scale=0, max_scale=2) as service:
        count = service.stats().pods
        warned = "initial_scale" in engine.lines(service)
        words = f"{count} pods after the deploy" + (", and a warning" if warned else "")
        return expect(warned if count else not warned, words)


@option("activation_scale=2", "a call of a service without pods starts two")
def _activation_scale(engine: Engine) -> str:
    with engine.service(min_scale=0, max_scale=3, activation_scale=2) as service:
        seconds_until(lambda: not service.stats().pods, "no pods")
        with load(service, 1):
            seconds_until_pods(service, 2)
        return "one call, 2 pods"


# --------------------------------------------------------------------------------------- metrics


@option('metric="concurrency", target=10', "at 70 % of the target: 7 calls have a pod, 8 have two")
def _metric_concurrency(engine: Engine) -> str:
    with engine.service(
        metric="concurrency", target=10, target_utilization=70, max_scale=3
    ) as service:
        with load(service, 7):
            counts = pods_for(service, 8)
            expect(counts == [1], f"{counts} pods for 7 calls")
            with load(service, 1):
                seconds_until_pods(service, 2)
        return "7 calls: 1 pod, 8 calls: 2 pods"


@option("target=2, target_utilization=100", "four calls have two pods")
def _target(engine: Engine) -> str:
    with engine.service(target=2, target_utilization=100, max_scale=6) as service:
        with load(service, 4):
            seconds_until_pods(service, 2)
            counts = pods_for(service, 5)
        return expect(counts == [2], f"{counts} pods with 4 calls")


@option("target=2, target_utilization=50", "four calls have four pods")
def _target_utilization(engine: Engine) -> str:
    with engine.service(target=2, target_utilization=50, max_scale=6) as service:
        with load(service, 4):
            seconds_until_pods(service, 4)
            counts = pods_for(service, 5)
        return expect(counts == [4], f"{counts} pods with 4 calls")


@option('metric="rps", target=2', "five calls per second have three pods")
def _rps(engine: Engine) -> str:
    with (
        engine.service(
            engine.functions.work, metric="rps", target=2, target_utilization=100, max_scale=3
        ) as service,
        pace(service, 5.0),
    ):
        return f"3 pods after {seconds_until_pods(service, 3):.0f} s of 5 calls per second"


@option('metric="cpu", target=50', "a pod that computes without end gets a second")
def _cpu(engine: Engine) -> str:
    with engine.service(
        engine.functions.compute, {"cpus": "0.1"}, metric="cpu", target=50, max_scale=2
    ) as service:
        call = service.spawn(100)
        seconds = seconds_until_pods(service, 2)
        call.cancel()
        return f"2 pods after {seconds:.0f} s"


@option('metric="memory", target=40', "a pod that takes 60 % of its memory request gets a second")
def _memory(engine: Engine) -> str:
    memory = {"memory": "1Gi"}
    with engine.service(
        engine.functions.fill, memory, metric="memory", target=40, max_scale=2
    ) as service:
        before = service.stats().pods_ready
        service(500)
        seconds = seconds_until_pods(service, 2)
        return expect(before == 1, f"{before} pod, then 2 after {seconds:.0f} s")


@option("concurrency=1", "three calls of 1 s on one pod take 3 s")
def _concurrency(engine: Engine) -> str:
    with engine.service(engine.functions.work, concurrency=1, max_scale=1) as service:
        service(0.0)  # Knative leads no call to the first pod for some seconds
        begin = time.monotonic()
        with ThreadPoolExecutor(3) as pool:
            pods = {*pool.map(service, [1.0] * 3)}
        seconds = time.monotonic() - begin
        return expect(len(pods) == 1 and seconds >= 3, f"{seconds:.1f} s on {len(pods)} pod")


# ----------------------------------------------------------------------------------------- times


def _seconds_to_shrink(engine: Engine, to: int = 1, **settings: Any) -> float:  # noqa: ANN401  # those of `autoscale()`
    """How long pods stay after the load has ended."""
    with engine.service(target=1, target_utilization=100, max_scale=2, **settings) as service:
        with load(service, 2):
            seconds_until_pods(service, 2)
        return seconds_until_pods(service, to)


def _difference(engine: Engine, least: float, values: dict[str, dict[str, Any]]) -> str:
    """The seconds to shrink with two values of an option, which differ by this at least."""
    names = list(values)
    seconds = together(
        *(lambda value=value: _seconds_to_shrink(engine, **value) for value in values.values())
    )
    words = ", ".join(f"{name}: {took:.0f} s" for name, took in zip(names, seconds, strict=True))
    return expect(seconds[1] - seconds[0] >= least, words)


@option('window="20s"', "pods follow a load that ends later than with 6s")
def _window(engine: Engine) -> str:
    values: dict[str, dict[str, Any]] = {text: {"window": text} for text in ("6s", "20s")}
    return _difference(engine, 8.0, values)


@option('scale_down_delay="20s"', "pods that are not needed any more stay longer than with 0s")
def _scale_down_delay(engine: Engine) -> str:
    values: dict[str, dict[str, Any]] = {text: {"scale_down_delay": text} for text in ("0s", "20s")}
    return _difference(engine, 8.0, values)


@option('scale_to_zero_pod_retention_period="30s"', "the last pod stays longer than with 0s")
def _retention(engine: Engine) -> str:
    return _difference(
        engine,
        6.0,
        {
            text: {"min_scale": 0, "to": 0, "scale_to_zero_pod_retention_period": text}
            for text in ("0s", "30s")
        },
    )


@option("scale_to_zero_grace_period=15", "as the retention period, and min_scale is 0")
def _grace(engine: Engine) -> str:
    # It says the period unless the period is said.
    grace = kt.Compute(cpus="0.01").autoscale(scale_to_zero_grace_period=15)
    period = kt.Compute(cpus="0.01").autoscale(
        scale_to_zero_pod_retention_period="15s", min_scale=0
    )
    expect(grace.autoscaling_config == period.autoscaling_config, str(grace.autoscaling_config))
    quiet: dict[str, Any] = {"scale_to_zero_pod_retention_period": None, "to": 0}
    seconds = _seconds_to_shrink(engine, scale_to_zero_grace_period=15, **quiet)
    return expect(seconds >= 15, f"the last pod went after {seconds:.0f} s")


def _seconds_to_grow(engine: Engine, **settings: Any) -> float:  # noqa: ANN401  # those of `autoscale()`
    """How long a burst lasts until it has its pods, after a window with a call."""
    with (
        engine.service(
            target=1, target_utilization=100, max_scale=3, window="20s", **settings
        ) as service,
        load(service, 1),
    ):
        pods_for(service, 22)
        with load(service, 2):
            # How long a pod takes to start says nothing here.
            return seconds_until(lambda: service.stats().pods == 3, "3 pods")


def _bursts(engine: Engine, **settings: Any) -> str:  # noqa: ANN401  # those of `autoscale()`
    [number] = settings.values()
    quick, slow = together(
        lambda: _seconds_to_grow(engine), lambda: _seconds_to_grow(engine, **settings)
    )
    return expect(slow - quick >= 3, f"default: {quick:.1f} s, {number}: {slow:.1f} s")


@option("panic_window_percentage=100", "a burst over a steady load has its pods later than with 10")
def _panic_window(engine: Engine) -> str:
    return _bursts(engine, panic_window_percentage=100)


@option("panic_threshold_percentage=1000", "a burst of three times the load is no panic")
def _panic_threshold(engine: Engine) -> str:
    return _bursts(engine, panic_threshold_percentage=1000)


@option('progress_deadline="8s"', "a deploy whose pods are not ready by then fails")
def _progress_deadline(engine: Engine) -> str:
    unsaid: dict[str, Any] = {"launch_timeout": None}
    begin = time.monotonic()
    try:
        with engine.service(engine.functions.Slow, unsaid, progress_deadline="8s"):
            pass
    except ServiceTimeoutError:
        seconds = time.monotonic() - begin
        return expect(seconds >= 8, f"ServiceTimeoutError after {seconds:.0f} s")
    raise UnlikeError("it did not fail")


# -------------------------------------------------------------------- annotations and impossible


@option('target_burst_capacity="0"', "any other word of Knative is an annotation")
def _annotation(engine: Engine) -> str:
    annotation = "autoscaling.knative.dev/target-burst-capacity"
    with engine.service(target_burst_capacity="0") as service:
        if engine.is_knative:
            manifest = engine.kubectl("get", "ksvc", service.service_name)
            annotations = manifest["spec"]["template"]["metadata"]["annotations"]
            return expect(annotations.get(annotation) == "0", "on the Knative Service")
        warned = annotation in engine.lines(service)
        return expect(warned, "a warning names it, and it stays in the manifest")


def _refusal(make: Callable[[], object], error_type: type[KubetorchError], words: str) -> str:
    try:
        make()
    except error_type as error:
        return expect(words in str(error), f"{type(error).__name__}: {error.message}")
    raise UnlikeError("it is not refused")


def _impossible(settings: dict[str, Any], words: str) -> Callable[[Engine], str]:
    return lambda engine: _refusal(
        lambda: kt.fn(engine.functions.work).to(kt.Compute(cpus="0.01").autoscale(**settings)),
        AutoScalingError,
        words,
    )


for _name, _settings, _words in (
    ("min_scale=3, max_scale=2", {"min_scale": 3, "max_scale": 2}, "3 > 2"),
    (
        'scale_to_zero_pod_retention_period="2h"',
        {"scale_to_zero_pod_retention_period": "2h"},
        "1 h",
    ),
    ('window="5s"', {"window": "5s"}, "6 s"),
    (
        'autoscaler_class="hpa…", min_scale=0',
        {"autoscaler_class": "hpa.autoscaling.knative.dev", "min_scale": 0},
        "1.37",
    ),
    ('metric="queue" without a target', {"metric": "queue"}, "needs a target"),
):
    option(_name, "refused where it is declared")(_impossible(_settings, _words))


@option(".distribute() with .autoscale()", "refused where it is declared")
def _distributed(engine: Engine) -> str:
    def declare() -> None:
        compute = kt.Compute(cpus="0.01").autoscale(max_scale=2)
        kt.fn(engine.functions.work).to(compute.distribute("pytorch", workers=2))

    return _refusal(declare, KubetorchError, "autoscal")


# -------------------------------------------------------------------------------- beyond Knative


@option("buffer=1", "a call has a pod, and one more is free while it runs", knative="buffer=1")
def _buffer(engine: Engine) -> str:
    with engine.service(target=1, buffer=1, max_scale=4, target_utilization=100) as service:
        seconds_until_pods(service, 1)
        with load(service, 1):
            seconds_until_pods(service, 2)
            counts = pods_for(service, 4)
        seconds_until_pods(service, 1)
        return expect(counts == [2], f"{counts} pods with a call, 1 without")


@option(
    'metric="queue", target=10',
    'kt.metric("queue", 25) has three pods, which stay when it is not reported any more',
    knative="kt.metric",
)
def _own_metric(engine: Engine) -> str:
    with engine.service(engine.functions.queue, metric="queue", target=10, max_scale=5) as service:
        service(25)
        seconds_until_pods(service, 3)
        reason = "no pod has reported queue"
        seconds_until(lambda: reason in service.stats().reason, "the reason says so")
        counts = pods_for(service, 3)
        return expect(counts == [3], f"3 pods, later {counts} pods: {service.stats().reason}")


@option('metric="queue" of its name "cpu"', "kt.metric refuses the names of other metrics")
def _metric_name(engine: Engine) -> str:
    del engine
    return _refusal(lambda: kt.metric("cpu", 1.0), KubetorchError, "cpu")


@option(
    'min_scale={"30 8 * * *": 2, …}, timezone="Asia/Kolkata"',
    "the expression that fired last says the number",
    knative="min_scale by the clock",
)
def _clock(engine: Engine) -> str:
    zone = ZoneInfo("Asia/Kolkata")
    minute = datetime.now(zone).replace(second=0, microsecond=0) + timedelta(seconds=60)
    if (minute - datetime.now(zone)).total_seconds() < 25:
        minute += timedelta(seconds=60)
    schedule = {
        f"{time.minute} {time.hour} * * *": number
        for time, number in ((minute - timedelta(hours=1), 1), (minute, 2))
    }
    with engine.service(min_scale=schedule, timezone="Asia/Kolkata", max_scale=3) as service:
        seconds_until_pods(service, 1)
        seconds_until_pods(service, 2)
        late = (datetime.now(zone) - minute).total_seconds()
        return expect(0 <= late < 20, f"1 pod, and 2 pods {late:.1f} s after the minute")


@option(
    "handle.autoscale(min_scale=2)",
    "two pods without a deploy; a deploy with other numbers says that it overrides them",
    knative="is not decided by Kubetorch's own scaler",
)
def _live(engine: Engine) -> str:
    with engine.service(min_scale=1, max_scale=3) as service:
        state = service.autoscale(min_scale=2)
        expect(state.min_scale == 2, repr(state))
        seconds = seconds_until_pods(service, 2)
        service.to(engine.compute(min_scale=1, max_scale=4))
        expect("min_scale=2" in engine.lines(service), engine.lines(service))
        seconds_until_pods(service, 1)
        return f"2 pods after {seconds:.1f} s; 1 after the deploy, which says it"


@option(
    "kt scale NAME --min 2 --max 3",
    "two pods without a deploy, and the state is shown",
    knative="is not decided by Kubetorch's own scaler",
)
def _command(engine: Engine) -> str:
    with engine.service(min_scale=1, max_scale=2) as service:
        name = service.service_name
        command = [sys.executable, "-m", "kubetorch", "scale", name, "--min", "2", "--max", "3"]
        completed = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
        words = " ".join((completed.stdout + completed.stderr).split())
        if completed.returncode:
            raise AutoScalingError(words)
        seconds_until_pods(service, 2)
        expect("2 pods wanted, 2 to 3 allowed" in words, words)
        return words[: words.index(" changed since")]


@option("handle.stats()", "the pods, the calls that run and wait, the last decisions")
def _stats(engine: Engine) -> str:
    with engine.service(concurrency=1, max_scale=1) as service, load(service, 3):
        if engine.is_knative:
            # Its queue-proxy holds what the pod has no room for.
            seconds_until(lambda: service.stats().calls_running == 1, "1 call runs")
        else:
            seconds_until(lambda: service.stats().calls_waiting == 2, "2 calls wait")
        stats = service.stats()
        decisions = len(stats.decisions)
        observation = (
            f"{stats.pods_ready} pod, {stats.calls_running} calls run, "
            f"{stats.calls_waiting} wait, {decisions} decisions, by {stats.engine}"
        )
        expect(stats.pods_ready == stats.calls_running == 1, observation)
        return expect(decisions or engine.is_knative, observation)


@option(
    "@kt.batched(max_size=8)",
    "24 callers have few batches, each in a slot; an item that fails does so alone",
)
def _batched(engine: Engine) -> str:
    numbers = [*range(23), -1]
    with engine.service(engine.functions.halve, concurrency=1, max_scale=1) as service:

        def call(number: int) -> Any:  # noqa: ANN401  # a result or an exception
            try:
                return service(number)
            except ValueError as error:
                return error

        begin = time.monotonic()
        with ThreadPoolExecutor(len(numbers)) as pool:
            results = list(pool.map(call, numbers))
        seconds = time.monotonic() - begin
        *halves, error = results
        expect(isinstance(error, ValueError), repr(error))
        expect([half for half, _ in halves] == [n / 2 for n in range(23)], repr(halves))
        largest = max(size for _, size in halves)
        return expect(
            1 < largest <= 8 and 3 <= seconds < 24,
            f"24 calls in {seconds:.1f} s, at most {largest} at once, 1 failed",
        )
