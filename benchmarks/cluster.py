"""A real cluster: calls from outside and inside, edits, deploys, cold starts, the controller.

What is measured is the installation that `KUBECONFIG` leads to, in a namespace of the benchmark's
own. Each group of figures is measured by itself: a pod that starts would be part of a call's time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from benchmarks import kubectl, ours, processes, reload, sessions
from benchmarks.calls import BODY
from benchmarks.figures import Figure, Limit, Margin, Row, measured
from benchmarks.programs import driving
from benchmarks.projects import echo
from benchmarks.rounds import OURS, STATED, Measure, Side, compare, stated

FORWARD, KUBECTL_FORWARD = "port-forward echo", "kubectl port-forward echo"
HTTP_ECHO, TCP_ECHO = "HTTP echo between pods", "TCP echo between pods"
EXEC, APPLY, RUN = "kubectl exec", "kubectl apply", "kubectl run"
SECONDS = 1.0
REPLICAS = (1, 4)
WORKLOADS = 100
#: What the budgets are in seconds. They are checked as ratios: `docs/performance.md` says how.
_STATED = {**{f"edit-{replicas}": 0.4 for replicas in REPLICAS}, "unchanged": 0.15}

OUTSIDE = (
    Figure(
        "call from outside, p50",
        "p50",
        "ms",
        {FORWARD: Margin(0.5), KUBECTL_FORWARD: None},
        scale=1e3,
    ),
    Figure("call from outside, p99", "p99", "ms", {FORWARD: None, KUBECTL_FORWARD: None}, 1e3),
)
INSIDE = (
    Figure("call between pods, p50", "p50", "ms", {HTTP_ECHO: Limit(2.0), TCP_ECHO: None}, 1e3),
    Figure("call between pods, p99", "p99", "ms", {HTTP_ECHO: None, TCP_ECHO: None}, scale=1e3),
)
EDITS = (
    *(
        Figure(
            f"edit to first line, {replicas} pod{'s' * (replicas > 1)}",
            f"edit-{replicas}",
            "ms",
            {EXEC: Limit(3.0), STATED: None},
            scale=1e3,
        )
        for replicas in REPLICAS
    ),
    Figure(
        f"deploy of nothing new, {reload.FILES:,} files",
        "unchanged",
        "ms",
        {APPLY: Limit(1.5), STATED: None},
        scale=1e3,
    ),
)
STARTS = (
    Figure("cold start, first result", "seconds", "s", {RUN: Margin(1.5)}),
    Figure("cold start, deployed", "deployed", "s", {RUN: None}),
)
MEMORY = (
    Figure(
        f"memory of the controller, {WORKLOADS} workloads",
        "bytes",
        "MB",
        {STATED: Limit(1.0)},
        scale=1e-6,
    ),
)


def run(rounds: int) -> list[Row]:
    """Measure each group, whatever becomes of the others.

    Raises:
        UnavailableError: There is no cluster with Kubetorch.
        GroupsFailedError: Some could not be measured; it has the rows of the others.
    """
    kubectl.check()
    with kubectl.namespace() as namespace:
        return measured(
            {
                "outside": lambda: _outside(namespace, rounds),
                "inside": lambda: _inside(namespace, rounds),
                "edits": lambda: _edits(namespace, rounds),
                "starts": lambda: _starts(namespace, rounds),
                "sessions": lambda: sessions.run(rounds),
                # Last: a hundred pods that end go on taking time for a while.
                "memory": lambda: _memory(namespace, rounds),
            }
        )


def _outside(namespace: str, rounds: int) -> list[Row]:
    """The caller is on this machine, on the far side of the API server."""
    source = (ours.PROJECTS / "echo.py").read_text()

    @contextmanager
    def calls() -> Iterator[Measure]:
        with program(namespace, "kubetorch_calls") as client:
            yield lambda: client.ask("latency", seconds=SECONDS)

    @contextmanager
    def forward() -> Iterator[Measure]:
        arguments = (namespace, "echo", str(echo.TCP_PORT), str(len(BODY)))
        with processes.program("forwarded_echo", *arguments) as client:
            yield lambda: client.ask("latency", seconds=SECONDS)

    @contextmanager
    def kubectl_forward() -> Iterator[Measure]:
        with (
            kubectl.forward(namespace, "echo", echo.TCP_PORT) as port,
            processes.program("socket_echo", str(port), str(len(BODY))) as client,
        ):
            yield lambda: client.ask("latency", seconds=SECONDS)

    with kubectl.pod(namespace, "echo", source, port=echo.TCP_PORT):
        sides = [
            Side(OURS, "ours", calls),
            Side(FORWARD, "floor", forward),
            Side(KUBECTL_FORWARD, "peer", kubectl_forward),
        ]
        return compare(OUTSIDE, sides, rounds)


def _inside(namespace: str, rounds: int) -> list[Row]:
    """Both are measured by a function in the same pod, and end in pods on the same other node."""
    caller_node, server_node = kubectl.two_nodes()
    source = (ours.PROJECTS / "echo.py").read_text()
    with (
        kubectl.pod(
            namespace, "echo-inside", source, port=echo.HTTP_PORT, node=server_node
        ) as address,
        program(namespace, "kubetorch_inside", caller_node, server_node) as client,
    ):

        def calls() -> dict[str, float]:
            return client.ask("calls", seconds=SECONDS)

        def http() -> dict[str, float]:
            return client.ask("http", host=address, port=echo.HTTP_PORT, seconds=SECONDS)

        def tcp() -> dict[str, float]:
            return client.ask("tcp", host=address, port=echo.TCP_PORT, seconds=SECONDS)

        sides = [
            Side(OURS, "ours", lambda: nullcontext(calls)),
            Side(HTTP_ECHO, "floor", lambda: nullcontext(http)),
            Side(TCP_ECHO, "floor", lambda: nullcontext(tcp)),
        ]
        return compare(INSIDE, sides, rounds)


def _edits(namespace: str, rounds: int) -> list[Row]:
    @contextmanager
    def edits() -> Iterator[Measure]:
        with (
            ours.project() as root,
            ours.project() as large,
            _started(namespace, "kubetorch_reload", str(root), "import os") as client,
            _started(
                namespace, "kubetorch_reload", str(large), "import os", user="l"
            ) as large_client,
        ):
            reload.fill(large)

            def measure() -> dict[str, float]:
                times = {f"edit-{n}": client.ask("reload", replicas=n)["seconds"] for n in REPLICAS}
                unchanged = large_client.ask("unchanged", replicas=1, times=5)["seconds"]
                return {**times, "unchanged": unchanged}

            yield measure

    sides = [
        Side(OURS, "ours", edits),
        Side(EXEC, "floor", lambda: _exec(namespace)),
        Side(APPLY, "peer", lambda: _apply(namespace)),
        stated(_STATED),
    ]
    return compare(EDITS, sides, rounds)


@contextmanager
def _exec(namespace: str) -> Iterator[Measure]:
    """What one has without any of this: running the edited text in a pod that runs already."""
    edits = itertools.count()

    def first_line() -> float:
        began = time.perf_counter()
        command = ["kubectl", "exec", "-n", namespace, "edited", "--", "python3", "-c"]
        program = f'import os\nprint("edit {next(edits)}", flush=True)'
        with processes.speaking([*command, program], deadline=kubectl.DEADLINE):
            return time.perf_counter() - began

    with kubectl.pod(namespace, "edited", "import time; time.sleep(3600)"):
        yield lambda: dict.fromkeys((f"edit-{replicas}" for replicas in REPLICAS), first_line())


@contextmanager
def _apply(namespace: str) -> Iterator[Measure]:
    """A server-side apply of a Deployment that is as it is."""
    labels = {"app": "unchanged"}
    container = {"name": "unchanged", "image": kubectl.default_image()}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "unchanged", "namespace": namespace},
        "spec": {"replicas": 0, "selector": {"matchLabels": labels}, "template": template},
    }

    def apply() -> None:
        kubectl.run("apply", "--server-side", "-f", "-", stdin_object=deployment)

    apply()
    yield lambda: {"unchanged": driving.median(apply, 5)}


def _starts(namespace: str, rounds: int) -> list[Row]:
    numbers, image = itertools.count(), kubectl.default_image()

    def start() -> dict[str, float]:
        with program(namespace, "kubetorch_start", f"start-{next(numbers)}") as client:
            return client.ask("start")

    def bare() -> dict[str, float]:
        name = f"bare-{next(numbers)}"
        seconds = driving.clock(lambda: kubectl.start(namespace, name, image))
        kubectl.delete(namespace, name)
        return {"seconds": seconds, "deployed": seconds}

    sides = [
        Side(OURS, "ours", lambda: nullcontext(start)),
        Side(RUN, "peer", lambda: nullcontext(bare)),
    ]
    return compare(STARTS, sides, rounds)


def _memory(namespace: str, rounds: int) -> list[Row]:
    @contextmanager
    def controller() -> Iterator[Measure]:
        with program(namespace, "kubetorch_many", str(WORKLOADS)):
            yield lambda: {"bytes": kubectl.controller_memory()}

    sides = [
        Side(OURS, "ours", controller),
        stated({"bytes": 120e6}),
    ]
    return compare(MEMORY, sides, rounds)


@contextmanager
def program(
    namespace: str, name: str, *arguments: str, modules: Sequence[str] = ("caller.py",)
) -> Iterator[processes.Program]:
    """A program with a project of its own that deploys into the namespace."""
    with (
        ours.project(modules) as root,
        _started(namespace, name, str(root), *arguments) as client,
    ):
        yield client


def _started(
    namespace: str, name: str, *arguments: str, user: str = ""
) -> AbstractContextManager[processes.Program]:
    """A program whose services' names begin with that of a user, if one is given.

    Each has a project of its own, and may replace the services of the one before it.
    """
    env = {
        "KT_BACKEND": "kubernetes",
        "KT_NAMESPACE": namespace,
        "KT_USERNAME": user,
        "KT_REPLACE": "1",
    }
    return processes.program(name, *arguments, env=env)
