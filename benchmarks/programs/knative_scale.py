"""Bare Knative services that scale: from zero, and under the step of load that ours have.

knative_scale NAMESPACE IMAGE INGRESS
"""

from __future__ import annotations

import http.client
import itertools
import json
from urllib.parse import urlsplit

from benchmarks import kubectl, ours
from benchmarks.programs import driving
from benchmarks.programs.answering import answer, arguments
from benchmarks.programs.stepping import CONCURRENCY, DEADLINE, PODS, Call, step

APP = ours.PROJECTS / "nap_app.py"
PREFIX = "autoscaling.knative.dev/"


class Services:
    """Applies Knative services of one app, and measures them."""

    def __init__(self, namespace: str, image: str, ingress: str) -> None:
        self._namespace = namespace
        self._image = image
        self._address = urlsplit(ingress).netloc
        self._numbers = itertools.count()
        self._at_zero: list[str] = []

    def sleep(self, count: int) -> dict[str, float]:
        """Have so many services at zero, each of which had a pod."""
        quick = {"min-scale": "0", "max-scale": "1", "window": "6s"}
        quick["scale-to-zero-pod-retention-period"] = "0s"
        self._at_zero = [self._apply(quick) for _ in range(count)]
        for name in self._at_zero:
            self._wait_for_pods(name, 0, "{.spec.replicas}")
        return {}

    def wake(self) -> dict[str, float]:
        """Call a service that has no pod."""
        name = self._at_zero.pop()
        seconds = driving.clock(lambda: self._caller(name)(1, 0.0))
        self._delete(name)
        return {"seconds": seconds}

    def step(self) -> dict[str, float]:
        """Call a service of one pod from ever more threads."""
        name = self._apply({"min-scale": "1", "max-scale": str(PODS)})
        try:
            seconds, _ = step(
                lambda: self._caller(name),
                lambda: self._wait_for_pods(name, PODS, "{.status.readyReplicas}"),
            )
        finally:
            self._delete(name)
        return {"seconds": seconds}

    def _apply(self, annotations: dict[str, str]) -> str:
        name = f"bare-{next(self._numbers)}"
        container = {
            "image": self._image,
            "imagePullPolicy": "IfNotPresent",
            "command": ["/kubetorch/bin/python", "-c", APP.read_text()],
            "resources": {"requests": {"cpu": "0.01"}},
        }
        template = {
            "metadata": {"annotations": {PREFIX + key: annotations[key] for key in annotations}},
            "spec": {"containerConcurrency": CONCURRENCY, "containers": [container]},
        }
        service = {
            "apiVersion": "serving.knative.dev/v1",
            "kind": "Service",
            "metadata": {"name": name, "namespace": self._namespace},
            "spec": {"template": template},
        }
        kubectl.run("apply", "-f", "-", stdin_object=service)
        timeout = f"--timeout={DEADLINE:.0f}s"
        kubectl.run("wait", "--for=condition=Ready", timeout, f"ksvc/{name}", "-n", self._namespace)
        return name

    def _delete(self, name: str) -> None:
        kubectl.run("delete", "ksvc", name, "-n", self._namespace, "--wait=false")

    def _wait_for_pods(self, name: str, pods: int, path: str) -> None:
        """Wait until the Deployment of a service says so many pods at a path of it."""
        kubectl.run(
            "wait",
            f"--for=jsonpath={path}={pods}",
            f"--timeout={DEADLINE:.0f}s",
            "deployment",
            "-n",
            self._namespace,
            "-l",
            f"serving.knative.dev/service={name}",
        )

    def _caller(self, name: str) -> Call:
        """A caller with a connection of its own, which it keeps."""
        host = urlsplit(self._url(name)).netloc
        connection = http.client.HTTPConnection(self._address, timeout=DEADLINE)

        def call(number: int, seconds: float) -> int:
            path = f"/?number={number}&seconds={seconds}"
            connection.request("GET", path, headers={"Host": host})
            response = connection.getresponse()
            body = response.read()
            assert response.status == 200, f"{response.status}: {body[:200]!r}"
            return int(body)

        return call

    def _url(self, name: str) -> str:
        service = json.loads(kubectl.run("get", "ksvc", name, "-n", self._namespace, "-o", "json"))
        return str(service["status"]["url"])


def main() -> None:
    """Answer; each measurement applies the services that it needs."""
    services = Services(*arguments())
    answer({question: getattr(services, question) for question in ("sleep", "wake", "step")})


if __name__ == "__main__":
    main()
