"""Tokens that are not what they were: of a clock that is off, of an account that was made anew."""

from __future__ import annotations

import base64
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.conftest import Installed, Kubectl
from cluster.faults import Client, pods, replace_controllers
from kubetorch.manifests.agent_container import SERVICE_ACCOUNT
from kubetorch.wire import tokens
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.tokens import Claims

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400), pytest.mark.faults]

HOUR = 3600.0
#: This machine reaches pods by their addresses, and no proxy does.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
Start = Callable[[str], Client]
DEPLOY = """
    print("result", kt.fn(service.echo, name="{0}").to(kt.Compute(cpus="0.01"))(1), flush=True)
"""


def address(kubectl: Kubectl, namespace: str, selector: str) -> str:
    """The address of the one pod with these labels that is not about to end."""
    ended = time.monotonic() + 60
    while True:
        listing = json.loads(kubectl("get", "pods", "-n", namespace, "-l", selector, "-o", "json"))
        running_pods = [
            pod for pod in listing["items"] if "deletionTimestamp" not in pod["metadata"]
        ]
        # An agent answers sooner than its kubelet says where it is.
        addresses = [pod["status"]["podIP"] for pod in running_pods if "podIP" in pod["status"]]
        if len(addresses) == len(running_pods) == 1:
            return str(addresses[0])
        assert time.monotonic() < ended, listing
        time.sleep(0.5)


def ask(url: str, token: str) -> tuple[int, str]:
    """Call `echo` over HTTP: the status, and what was answered."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    body = json.dumps({"args": [5]}).encode()
    request = urllib.request.Request(url, body, headers)
    try:
        with DIRECT.open(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_token_of_a_clock_that_is_off_is_refused_by_more_than_a_minute(
    client: Start, kubectl: Kubectl, installed: Installed
) -> None:
    client(DEPLOY.format("skewed")).line("result 1")
    secret_object = json.loads(
        kubectl("get", "secret", "kubetorch-installation", "-n", "kubetorch", "-o", "json")
    )
    secret = bytes.fromhex(base64.b64decode(secret_object["data"]["secret"]).decode())
    audience = tokens.audience(installed.namespace, "skewed")
    agent = address(kubectl, installed.namespace, "kubetorch.com/service=skewed")
    leader = address(kubectl, "kubetorch", "kubetorch.com/leads")
    urls = {
        "pod": f"http://{agent}:32300/echo",
        "controller": f"http://{leader}:8080/{installed.namespace}/skewed/echo",
    }

    def of_clock(ahead: float) -> str:
        """A token for an hour, as a controller whose clock is off would make it."""
        now = time.time() + ahead
        claims = Claims(audience, now + HOUR, issued=now)
        return tokens.sign(tokens.workload_key(secret, audience), claims)

    for transport, url in urls.items():
        for ahead in (
            0.0,
            wire_tuning.TIMING.clock_skew_seconds - 10,
            50 - wire_tuning.TIMING.clock_skew_seconds - HOUR,
        ):
            assert ask(url, of_clock(ahead)) == (200, "5"), (transport, ahead)
        for ahead, words in (
            (wire_tuning.TIMING.clock_skew_seconds + 130, "not valid yet: it was issued 1"),
            (-HOUR - wire_tuning.TIMING.clock_skew_seconds - 60, "expired 1"),
        ):
            status, text = ask(url, of_clock(ahead))
            assert status == 401, (transport, text)
            assert "UnauthorizedError" in text
            assert words in text
            assert "clock" in text and "NTP" in text


class Mounted:
    """The token of a pod's agent, in the file that its kubelet keeps."""

    def __init__(self, kubectl: Kubectl, namespace: str, pod: str) -> None:
        live_pod = json.loads(kubectl("get", "pod", pod, "-n", namespace, "-o", "json"))
        uid = live_pod["metadata"]["uid"]
        volumes = f"node*/kubelet/pods/{uid}/volumes/kubernetes.io~projected"
        cluster = Path(os.environ["KUBECONFIG"]).parent
        [self._file] = cluster.glob(f"{volumes}/kubetorch-token/token")
        self._kubectl = kubectl
        self._create_token = (
            "create",
            "token",
            SERVICE_ACCOUNT,
            "-n",
            namespace,
            "--audience=kubetorch",
        )
        self._bound = (f"--bound-object-name={pod}", f"--bound-object-uid={uid}")

    def is_void(self) -> bool:
        """Whether the API server does not take it any more."""
        review = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "metadata": {"name": "review"},
            "spec": {"token": self._file.read_text(), "audiences": ["kubetorch"]},
        }
        printed = self._kubectl("create", "-o", "json", "-f", "-", manifests=[review])
        return not json.loads(printed)["status"].get("authenticated")

    def rotate(self) -> None:
        """Put a new one there, as the kubelet does long before the old one ends."""
        token = self._kubectl(*self._create_token, "--bound-object-kind=Pod", *self._bound)
        self._file.resolve().write_text(token.strip())


@pytest.mark.alone
def test_a_pod_reads_its_token_again_when_its_account_was_made_anew(
    client: Start, kubectl: Kubectl, installed: Installed, kit: Path
) -> None:
    client(DEPLOY.format("rotated")).line("result 1")
    before = pods(kubectl, installed.namespace, "rotated")
    mounted = Mounted(kubectl, installed.namespace, before[0])
    for verb in ("delete", "create"):
        kubectl(verb, "serviceaccount", SERVICE_ACCOUNT, "-n", installed.namespace)
    # The API server remembers for ten seconds whom it let in.
    ended = time.monotonic() + 40
    while not mounted.is_void():
        assert time.monotonic() < ended
        time.sleep(1)
    replace_controllers(kubectl)

    time.sleep(3)  # for the pod to find the new controller, and be refused
    view = json.loads(installed.run("kt", "describe", "rotated", "--json"))
    assert view["status"] != "Ready", "nobody asked for the token"
    ended = time.monotonic() + 40
    while view["status"] != "Ready":
        view = json.loads(installed.run("kt", "describe", "rotated", "--json"))
        assert time.monotonic() < ended, view
        # The kubelet may put back what it has, which it takes for good.
        mounted.rotate()
        time.sleep(1)
    assert pods(kubectl, installed.namespace, "rotated") == before
    client(DEPLOY.format("rotated").replace("(1)", "(2)")).line("result 2")
