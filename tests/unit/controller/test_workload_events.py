from __future__ import annotations

from typing import Any

from kubetorch.controller.backends.base import EventLine, PodStatus, Trouble
from kubetorch.controller.workload import PodEventReporter
from kubetorch.wire.exceptions import Failure
from kubetorch.wire.messages import Stage


def pod(number: int, reason: str = "", failure: Failure | None = None) -> PodStatus:
    name = f"web-{number}"
    return PodStatus(name, number, "Pending", "", reason=reason, failure=failure)


class StageRecorder:
    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.telling = PodEventReporter(self.stages.append)

    def after(self, *pods: PodStatus, reason: str = "", news: list[EventLine] | None = None) -> Any:
        self.stages.clear()
        self.telling.report(pods, Trouble(reason), news or [])
        return [(stage.pod, stage.message) for stage in self.stages]


def test_a_reason_is_told_when_it_is_new() -> None:
    recorder = StageRecorder()
    assert recorder.after(pod(0, "no node")) == [("web-0", "no node")]
    assert recorder.after(pod(0, "no node")) == []
    assert recorder.after(pod(0)) == []
    assert recorder.after(pod(0, "no node")) == [("web-0", "no node")]


def test_what_many_pods_wait_for_is_told_once() -> None:
    recorder = StageRecorder()
    assert recorder.after(pod(0, "no node"), pod(1, "no node")) == [("web-0", "no node")]
    assert recorder.after(pod(0), pod(1, "no node"), pod(2, "no node")) == []


def test_what_keeps_pods_from_being_made_is_nobodys_in_particular() -> None:
    recorder = StageRecorder()
    assert recorder.after(reason="the quota is full") == [(None, "the quota is full")]
    assert recorder.after(reason="the quota is full") == []


def test_what_fails_a_deploy_is_not_told() -> None:
    assert StageRecorder().after(pod(0, "no image", {"error_type": "ImagePullError"})) == []


def test_news_are_told_as_they_come() -> None:
    recorder = StageRecorder()
    assert recorder.after(pod(0), news=[EventLine("Pulling: web:1", "web-0", is_warning=True)]) == [
        ("web-0", "Pulling: web:1")
    ]
    assert recorder.stages[0].warning


def test_an_event_that_a_reason_explains_is_told_as_that_reason() -> None:
    recorder = StageRecorder()
    news = [EventLine("FailedMount: no volume", "web-0", is_warning=True)]
    reason = "a volume is not there yet: no volume"
    assert recorder.after(pod(0, reason), news=news) == [("web-0", reason)]
    assert recorder.stages[0].warning
    assert recorder.after(pod(0, reason), news=news) == []
