"""Fixtures of the tests with real sockets and processes."""

from __future__ import annotations

import asyncio

import pytest
import uvloop


@pytest.fixture(params=["asyncio", "uvloop"])
def runs(request):
    """Runs a scenario on each kind of loop."""

    def run(scenario) -> None:
        if request.param == "uvloop":
            uvloop.run(scenario())
        else:
            asyncio.run(scenario())

    return run
