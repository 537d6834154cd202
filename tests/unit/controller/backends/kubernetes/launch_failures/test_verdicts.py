"""What a launch lacks, in words."""

from __future__ import annotations

import pytest

from kubetorch.controller.backends.kubernetes.launch_failures import verdicts
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import NO_TROUBLE, Verdict
from kubetorch.controller.tuning import LIMITS
from kubetorch.errors import StartupError


@pytest.mark.parametrize(
    ("cluster_message", "kind", "message", "hint"),
    [
        (
            'secret "token" not found',
            "Secret",
            "there is no Secret 'token' in namespace 'team'",
            "kt secrets",
        ),
        (
            'storageclass.storage.k8s.io "fast" not found',
            "StorageClass",
            "there is no StorageClass 'fast'",
            "correct storage_class",
        ),
        (
            "no PriorityClass with name high was found",
            "PriorityClass",
            "there is no PriorityClass 'high'",
            "correct priority_class_name",
        ),
        (
            "couldn't find key PASSWORD in Secret team/token",
            "Secret",
            "the Secret 'token' in namespace 'team' has no key 'PASSWORD'",
            "add the key, or correct its name",
        ),
        (
            "references non-existent secret key: password",
            "Secret",
            "a Secret that is mounted has no key 'password': "
            "references non-existent secret key: password",
            "add the key, or correct its name",
        ),
        (
            "references non-existent config key: app.toml",
            "ConfigMap",
            "a ConfigMap that is mounted has no key 'app.toml': "
            "references non-existent config key: app.toml",
            "add the key, or correct its name",
        ),
    ],
)
def test_what_is_missing_is_named_with_the_next_step(
    cluster_message: str, kind: str, message: str, hint: str
) -> None:
    error = verdicts.missing_object_in(cluster_message, namespace="team")
    assert error is not None
    assert error.kind == kind
    assert error.message == message
    assert hint in (error.hint or "")


def test_what_is_said_of_something_else_is_nothing_missing() -> None:
    assert verdicts.missing_object_in("the node is not ready", namespace="team") is None


def test_the_worst_of_several_verdicts_counts() -> None:
    doomed = Verdict(StartupError("it cannot start"), "it cannot start")
    waits, sooner = (
        Verdict(reason="first", recheck_seconds=9.0),
        Verdict(reason="second", recheck_seconds=2.0),
    )
    assert verdicts.worst([]) == NO_TROUBLE
    assert verdicts.worst([NO_TROUBLE, waits, doomed]) == doomed
    worst_verdict = verdicts.worst([NO_TROUBLE, waits, sooner])
    assert (worst_verdict.reason, worst_verdict.recheck_seconds) == ("first", 2.0)


def test_the_last_lines_of_a_container_are_part_of_the_error() -> None:
    verdict = Verdict(StartupError("it ended"), "it ended", log_container="0")
    lines = [f"line {number}" for number in range(LIMITS.container_log_lines + 5)]
    verdict_with_log = verdict.with_log(lines)
    assert verdict_with_log.error is not None
    assert verdict_with_log.error.message.startswith("it ended; its last lines:\n  line 5\n")
    assert str(verdict_with_log.error).count("  line ") == LIMITS.container_log_lines
    assert verdict.error is not None
    assert verdict.error.message == "it ended"
    assert verdict.with_log([]).error == verdict.error
