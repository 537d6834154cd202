"""Fixtures of the tests with real sockets and processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from tests.local.user_project import UserProject


@pytest.fixture
def project(tmp_path: Path) -> Iterator[UserProject]:
    """A user's project, whose modules this process forgets at the end."""
    project = UserProject(tmp_path / "shop")
    yield project
    project.forget()


@pytest.fixture(params=["asyncio", "uvloop"])
def runs(request):
    """Runs a scenario on each kind of loop."""

    def run(scenario) -> None:
        if request.param == "uvloop":
            uvloop.run(scenario())
        else:
            asyncio.run(scenario())

    return run
