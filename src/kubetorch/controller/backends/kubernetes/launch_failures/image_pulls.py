"""Images that cannot be pulled: final errors, and errors of a registry that may pass.

The patterns match messages of containerd, CRI-O and Docker as kubelets pass them on; the test data
has the observed messages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kubetorch.controller.backends.kubernetes.launch_failures import snapshot
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import (
    NO_TROUBLE,
    Verdict,
    doomed,
    waiting,
)
from kubetorch.errors import ImagePullError
from kubetorch.k8s.resources import Object

#: Reasons of a waiting container that are about its image.
REASONS = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
    "SignatureValidationFailed",
)
# These patterns come first: an overloaded registry may say "denied" as well.
_TRANSIENT = re.compile(
    r"toomanyrequests|too many requests|\b429\b|\b50[0234]\b|time-?out|timed out|deadline exceeded"
    r"|no such host|connection (?:refused|reset)|no route to host|network is unreachable"
    r"|temporary failure|server misbehaving|\beof\b|broken pipe|no space left",
    re.IGNORECASE,
)
_DENIED = re.compile(
    r"pull access denied|insufficient_scope|authorization failed|unauthorized|forbidden"
    r"|\bdenied\b|no basic auth credentials|authentication (?:is )?required|\b40[13]\b",
    re.IGNORECASE,
)
_MISSING = re.compile(
    r"not ?found|manifest unknown|name unknown|does not exist|\b404\b", re.IGNORECASE
)
_PLATFORM = re.compile(r"no match for platform|does not match the specified platform", re.I)
#: Prefix of the names of images that are loaded into nodes, without a registry.
_LOCAL_PREFIX = "localhost/"


def judge(pod: Object, state: Object, image: str, events: Sequence[Object]) -> Verdict:
    reason = state.get("reason", "")
    text = _kubelet_message(pod, str(state.get("message") or ""), image, events)
    failures = snapshot.events_of(
        events, "Pod", pod["metadata"]["name"], "Failed", "InspectFailed", "ErrImageNeverPull"
    )
    since = min(map(snapshot.first_time, failures), default=None)
    if reason == "InvalidImageName":
        return _fatal(
            f"{image!r} is no name of an image: {_last_cause(text)}",
            "names are lower case: [registry/]repository[:tag]",
            since,
        )
    if reason == "ErrImageNeverPull":
        return _fatal(
            f"the image {image} is not on the node and its pull policy is Never",
            "load it into every node, or leave image_pull_policy out",
            since,
        )
    if reason == "SignatureValidationFailed":
        hint = "sign it as the nodes' policy asks, or use another image"
        return _fatal(f"the signature of the image {image} is not accepted: {text}", hint, since)
    if not text:
        # An older kubelet says why only in an event, which follows.
        return waiting(f"the image {image} is not pulled yet", since) if reason else NO_TROUBLE
    return _judge_text(image, text, _pull_secrets(pod, events), since)


def judge_digest(error_text: str, since: float | None) -> Verdict:
    """Judge the error of Knative about an image, which it looks up before it makes pods.

    Knative has failed the Revision then. An overloaded registry may recover; a registry without an
    address, as one whose name is misspelled, will not.
    """
    match = re.search(r'Unable to fetch image "([^"]+)": (.*)$', error_text, re.DOTALL)
    image, text = (match[1], match[2]) if match else ("of the container", error_text)
    message = f"Knative cannot look up the image {image}: {text}"
    bare = _without_names(image, text)
    if _TRANSIENT.search(bare) and "no such host" not in bare:
        return waiting(message, since)
    hint = (
        "check the name; a private image needs imagePullSecrets, on the service account or in "
        "service_template"
        if _DENIED.search(bare)
        else "check its name and tag, and that it was pushed; then deploy again"
    )
    return _fatal(message, hint, since)


def _without_names(image: str, text: str) -> str:
    """The text without names that the user chose: an image may be called `timeout`."""
    text = re.sub(r'\\?"[^"]*"', "", text).replace(image, "")
    return text.replace(image.partition("@")[0], "")


def _judge_text(image: str, text: str, secrets: str, since: float | None) -> Verdict:
    bare = _without_names(image, text)
    if image.startswith(_LOCAL_PREFIX):
        return _fatal(
            f"the image {image} is on no registry, and the node does not have it, or may not use "
            "what it has (image_pull_policy)",
            "load it into every node, or push it to a registry that the nodes reach",
            since,
        )
    if _PLATFORM.search(bare):
        hint = "build it for the nodes' architecture, or choose other nodes with node_selector"
        return _fatal(
            f"the image {image} does not exist for this node: {_last_cause(text)}", hint, since
        )
    if _TRANSIENT.search(bare):
        return waiting(f"the registry of {image} does not answer: {_last_cause(text)}", since)
    if _DENIED.search(bare):
        hint = (
            f"the pod's image pull secrets cannot be read: {secrets}"
            if secrets
            else "check the name; a private image needs imagePullSecrets, on the service account "
            "or in service_template"
        )
        return _fatal(f"the registry denies the image {image}: {_last_cause(text)}", hint, since)
    if _MISSING.search(bare):
        return _fatal(
            f"there is no image {image}: {_last_cause(text)}",
            "check its name and tag, and that it was pushed",
            since,
        )
    return waiting(f"the image {image} cannot be pulled: {_last_cause(text)}", since)


def _fatal(message: str, hint: str, since: float | None) -> Verdict:
    return doomed(ImagePullError(f"failed to pull: {message}", hint=hint), since)


def _kubelet_message(pod: Object, message: str, image: str, events: Sequence[Object]) -> str:
    _, separator, text = message.partition("ErrImagePull: ")
    if separator:
        return text
    if message and not message.startswith("Back-off pulling image"):
        return message
    for event in reversed(snapshot.events_of(events, "Pod", pod["metadata"]["name"], "Failed")):
        prefix = f'Failed to pull image "{image}": '
        if str(event.get("message", "")).startswith(prefix):
            return str(event["message"])[len(prefix) :]
    return ""


def _pull_secrets(pod: Object, events: Sequence[Object]) -> str:
    name = pod["metadata"]["name"]
    secret_events = snapshot.events_of(events, "Pod", name, "FailedToRetrieveImagePullSecret")
    match = (
        re.search(r"\(([^)]*)\)", str(secret_events[-1].get("message"))) if secret_events else None
    )
    return match[1] if match else ""


def _last_cause(text: str) -> str:
    """The last cause in a chain of messages, which says what happened."""
    shortened = text
    for prefix in (r"rpc error: code = \w+ desc = ", r'failed to [a-z ]+ "[^"]*": '):
        shortened = re.sub(f"(?:{prefix})", "", shortened)
    return shortened.strip() or text
