"""What becomes of calls beside others that end their process; `tests.local.chaos` makes more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.local import chaos

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def item(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return chaos.project(tmp_path_factory.mktemp("chaotic"))


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home: Path) -> Path:
    return shared_service_home


@pytest.mark.parametrize("call_form", chaos.CALL_FORMS)
def test_with_retries_only_the_calls_that_are_the_cause_fail(item: Any, call_form: str) -> None:
    course = chaos.run(item, call_form, 8, 3, items=16, timeout=4.0)

    assert (course.lost, course.wrong) == ({}, [])
    for name, error in chaos.ERRORS.items():
        cause = course.cause(name)
        assert type(cause) is error, f"{name}: {cause!r}"
        assert name == "hang" or cause.attempts == 4


def test_one_at_a_time_each_call_has_its_own_fate_without_retries(item: Any) -> None:
    course = chaos.run(item, "spawn", 1, 0, items=8, timeout=4.0)

    assert (course.lost, course.wrong) == ({}, [])
    assert {name: type(course.cause(name)) for name in chaos.ERRORS} == chaos.ERRORS
