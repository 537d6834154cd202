from __future__ import annotations

from typing import Any

import pytest

from kubetorch.controller.backends.kubernetes.launch_failures import image_pulls
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import Verdict
from kubetorch.errors import ImagePullError

POD: dict[str, Any] = {"metadata": {"name": "web", "namespace": "team"}, "spec": {}}
_HUB = 'failed to resolve reference "docker.io/team/web:1": '

#: As containerd, CRI-O, Docker and registries put it.
FINAL = [
    f"{_HUB}docker.io/team/web:1: not found",
    f"{_HUB}pull access denied, repository does not exist or may require authorization: server "
    "message: insufficient_scope: authorization failed",
    f"{_HUB}failed to authorize: failed to fetch anonymous token: unexpected status from GET "
    "request to https://auth.docker.io/token?scope=repository: 401 Unauthorized",
    f"{_HUB}unexpected status from HEAD request to https://ghcr.io/v2/team/web/manifests/1: "
    "403 Forbidden",
    "reading manifest 1 in docker.io/team/web: manifest unknown",
    "initializing source docker://team/web:1: reading manifest 1: name unknown: repository",
    "Error response from daemon: manifest for team/web:1 not found: manifest unknown",
    "no match for platform in manifest: not found",
    "Error response from daemon: Head: no basic auth credentials",
]
PASSING = [
    f"{_HUB}failed to do request: Head: dial tcp: lookup docker.io: no such host",
    f"{_HUB}failed to do request: Head: dial tcp 10.0.0.1:443: i/o timeout",
    f"{_HUB}failed to do request: Head: net/http: TLS handshake timeout",
    f"{_HUB}dial tcp 10.0.0.1:443: connect: connection refused",
    f"{_HUB}unexpected status from HEAD request: 503 Service Unavailable",
    "429 Too Many Requests - Server message: toomanyrequests: You have reached your rate limit",
    "toomanyrequests: denied: retry-after: 1s, allowed: 44000/minute",
    "write /var/lib/containerd/tmp: no space left on device",
    "failed to copy: httpReadSeeker: failed open: unexpected EOF",
    "x509: certificate signed by unknown authority",
]


def judge(text: str, image: str = "team/web:1", **more: Any) -> Verdict:
    waiting = {"reason": "ErrImagePull", "message": text, **more}
    return image_pulls.judge(POD, waiting, image, [])


@pytest.mark.parametrize("text", FINAL)
def test_not_found_and_denied_are_final(text: str) -> None:
    verdict = judge(text)
    assert isinstance(verdict.error, ImagePullError)
    assert "failed to pull" in verdict.error.message  # programs look for it
    assert verdict.error.hint


@pytest.mark.parametrize("text", PASSING)
def test_a_registry_that_is_away_or_busy_is_waited_for(text: str) -> None:
    verdict = judge(text)
    assert verdict.error is None
    assert "team/web:1" in verdict.reason


def test_a_name_that_looks_like_a_cause_is_none() -> None:
    image = "registry.example/timeout/denied:503"
    text = f'failed to resolve reference "{image}": {image}: not found'
    assert judge(text, image).is_doomed
    text = (
        f'failed to resolve reference "{image}": dial tcp 10.0.0.1:443: connect: refused by {image}'
    )
    assert not judge(text, image).is_doomed


def test_what_is_denied_names_the_pull_secrets_that_are_missing() -> None:
    event = {
        "reason": "FailedToRetrieveImagePullSecret",
        "message": "Unable to retrieve some image pull secrets (regcred); attempting to pull the "
        "image may not succeed.",
        "involvedObject": {"kind": "Pod", "name": "web"},
        "metadata": {"name": "web.1"},
    }
    state = {"reason": "ErrImagePull", "message": "401 Unauthorized"}
    verdict = image_pulls.judge(POD, state, "team/web:1", [event])
    assert verdict.error is not None
    assert "regcred" in str(verdict.error.hint)


def test_an_older_kubelet_says_why_only_in_an_event() -> None:
    state = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "a:1"'}
    assert not image_pulls.judge(POD, state, "a:1", []).is_doomed
    event = {
        "reason": "Failed",
        "message": 'Failed to pull image "a:1": rpc error: code = NotFound desc = a:1: not found',
        "involvedObject": {"kind": "Pod", "name": "web"},
        "metadata": {"name": "web.1"},
    }
    assert image_pulls.judge(POD, state, "a:1", [event]).is_doomed


def test_knative_looks_images_up_itself() -> None:
    message = (
        'Unable to fetch image "team/web:1": failed to resolve image to digest: HEAD '
        "https://index.docker.io/v2/team/web/manifests/1: unexpected status code 404 Not Found"
    )
    assert image_pulls.judge_digest(message, None).is_doomed
    busy = 'Unable to fetch image "team/web:1": 429 Too Many Requests'
    assert not image_pulls.judge_digest(busy, None).is_doomed


@pytest.mark.parametrize("image", ["nowhere.example/web:1", "localhost/web:1"])
def test_knatives_own_reason_is_the_error_and_no_guess_of_ours(image: str) -> None:
    why = "failed to resolve image to digest: dial tcp: lookup nowhere.example: no such host"
    verdict = image_pulls.judge_digest(f'Unable to fetch image "{image}": {why}', None)
    assert verdict.error is not None
    assert f"Knative cannot look up the image {image}: {why}" in verdict.error.message
