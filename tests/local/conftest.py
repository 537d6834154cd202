"""Fixtures of the tests with real sockets and processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from kubetorch.errors import ServiceNotFoundError
from kubetorch.lib.http_client import HttpClient
from kubetorch.local import lifetime
from kubetorch.sdk import backend
from kubetorch.sdk.controller import Controller
from kubetorch.sdk.data.client import DataClient
from kubetorch.wire.data import RemovePath
from tests.local import commands
from tests.local.service_harness import FAKE, Service
from tests.local.user_project import UserProject


@pytest.fixture
def emptied_home(shared_service_home: Path) -> Iterator[Path]:
    """As `shared_service_home`, where nothing is that an earlier test deployed or stored.

    What stays of it is the history: calls that ended, versions of keys, numbers of ports. A test
    that ends the service, or is about the user's home, has `service_home`.
    """
    yield shared_service_home
    backend.close_all()
    empty(shared_service_home)


@pytest.fixture(scope="module")
def _fake_service(shared_service_home: Path) -> Iterator[Service]:
    service = Service(shared_service_home, FAKE).start()
    yield service
    service.terminate()


@pytest.fixture
def fake_service(_fake_service: Service, emptied_home: Path) -> Service:
    """The service of `emptied_home`, whose agents only speak the protocol; no test may end it."""
    return _fake_service


def empty(home: Path) -> None:
    """Delete what the service of a home has, if it runs: of all namespaces, at once."""
    endpoint = lifetime.find(home)
    if endpoint is None:
        return
    with contextlib.closing(Controller(HttpClient(endpoint.url, endpoint.token))) as controller:
        workloads = controller.list_workloads()
        for workload in workloads:
            with contextlib.suppress(ServiceNotFoundError):  # it was idle, or an app that ended
                controller.delete_workload(workload.spec.namespace, workload.spec.name, grace=0)
        for secret in controller.secrets.list():
            controller.secrets.delete(secret.namespace, secret.object_name)
        for volume in controller.volumes.list():
            controller.volumes.delete(volume.namespace, volume.claim, wait=60, is_forced=True)
        for namespace in {"default", *(workload.spec.namespace for workload in workloads)}:
            data = DataClient(controller, namespace)
            for path in data.list(""):
                data.remove(RemovePath(path=path.name, recursive=True))


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


@pytest.fixture(scope="session", autouse=True)
def _commands(_environment: None) -> Iterator[None]:
    """The processes that `kt` and programs are forked from import while the first tests run."""
    with commands.serving():
        yield


@pytest.fixture(scope="module", autouse=True)
def _first_program() -> None:
    commands.begin_file()
