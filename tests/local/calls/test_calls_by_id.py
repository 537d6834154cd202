"""Spawned calls that are asked for by their id: at once, after a teardown, wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

import kubetorch as kt
from tests.local.user_project import UserProject

COMPUTE = kt.Compute(cpus="0.1")


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home: Path) -> Path:
    return shared_service_home


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    project = UserProject(tmp_path / "shop")
    project.write("waits.py", "import time\n\ndef slow(s):\n    time.sleep(s)\n    return s\n")
    monkeypatch.syspath_prepend(str(project.folder))
    import waits

    handle = kt.fn(waits.slow).to(COMPUTE)
    yield handle
    handle.teardown()
    project.forget()


def test_a_call_is_found_as_soon_as_it_was_spawned(slow) -> None:
    for _ in range(30):
        call = slow.spawn(0.01)
        assert kt.CallHandle.from_id(call.id).status() in ("running", "succeeded")
        assert kt.CallHandle.from_id(call.id).result() == 0.01


def test_what_a_call_returned_outlives_a_teardown_at_once(slow) -> None:
    call = slow.spawn(0)
    assert call.result() == 0
    slow.teardown()
    assert kt.CallHandle.from_id(call.id).result() == 0
    assert kt.CallHandle.from_id(call.id).status() == "succeeded"


@pytest.mark.parametrize(
    "wrong", [5, None, "", "short", "../../x", "a" * 65, "0" * 32 + ",", "é" * 9]
)
def test_what_is_no_id_is_named(wrong) -> None:
    with pytest.raises(kt.SpecError, match="is not the id of a call"):
        kt.CallHandle.from_id(wrong)
