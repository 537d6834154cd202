"""`kt.distributed` and `kt.on_preempt` where there is no pod, and what they do not take."""

from __future__ import annotations

import pytest

import kubetorch as kt


@pytest.fixture(autouse=True)
def nowhere(monkeypatch):
    for name in ("LOCAL_IPS", "KT_MEMBERS_FILE", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)


def test_outside_of_pods_the_addresses_are_those_that_are_named(monkeypatch):
    assert kt.distributed.pod_ips() == []
    monkeypatch.setenv("LOCAL_IPS", "10.0.0.2, 10.0.0.1,")
    assert kt.distributed.pod_ips(5) == ["10.0.0.1", "10.0.0.2"]


def test_a_pod_of_somebody_else_is_an_error_that_names_what_is_missing(monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    with pytest.raises(RuntimeError, match="KT_MEMBERS_FILE is not set"):
        kt.distributed.pod_ips()


def test_no_file_yet_means_no_pods_yet(monkeypatch, tmp_path):
    monkeypatch.setenv("KT_MEMBERS_FILE", str(tmp_path / "members"))
    assert kt.distributed.pod_ips() == []


@pytest.mark.parametrize("value", [0, -1, 2.5, "many", True])
def test_an_impossible_quorum_is_refused(value):
    with pytest.raises(kt.SpecError, match="quorum_workers is"):
        kt.distributed.pod_ips(value)


@pytest.mark.parametrize("value", [-1, "soon", float("inf"), float("nan"), None, True])
def test_an_impossible_time_is_refused(value):
    with pytest.raises(kt.SpecError, match="quorum_timeout is"):
        kt.distributed.pod_ips(1, value)


def test_on_preempt_does_nothing_here_and_is_a_decorator():
    def save(): ...

    assert kt.on_preempt(save) is save


async def save_async(): ...


@pytest.mark.parametrize("value", [None, "save", save_async])
def test_on_preempt_refuses_what_a_thread_cannot_run(value):
    with pytest.raises(kt.SpecError, match="on_preempt was given"):
        kt.on_preempt(value)
