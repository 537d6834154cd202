"""Fixtures for every test: an environment of its own, homes for local services, the leak check."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

import leaks

# How long an example takes says nothing on a machine that does other things too.
settings.register_profile("kubetorch", deadline=None)
settings.load_profile("kubetorch")

# A shell that starts this in the background has it ignore Ctrl-C, and all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
#: Variables of a developer's machine or of a CI runner that change what a test sees.
FOREIGN = (
    "GITHUB_HEAD_REF",
    "GITHUB_REF_NAME",
    "CI_COMMIT_REF_NAME",
    "CIRCLE_BRANCH",
    "KUBERNETES_SERVICE_HOST",
    "PYTHONPATH",
)


@pytest.fixture(scope="session", autouse=True)
def _environment() -> Iterator[None]:
    """No test reads the user's settings, finds the user's service, or writes into the user's home.

    `KUBECONFIG` stays: tests of the tier `cluster` are given theirs by it, and `KT_BACKEND` keeps
    all others away from it.
    """
    with pytest.MonkeyPatch.context() as patch, _folder() as folder:
        temporary = folder / "tmp"
        temporary.mkdir()
        # Tools that the tests start (pyright, uv) keep what they downloaded.
        patch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME", _user_cache()))
        for name in [*FOREIGN, *(name for name in os.environ if name.startswith("KT_"))]:
            patch.delenv(name, raising=False)
        patch.setenv("TMPDIR", str(temporary))
        patch.setattr(tempfile, "tempdir", str(temporary))
        patch.setenv("KT_BACKEND", "local")
        _point_home_at(folder, patch)
        yield


@pytest.fixture(autouse=True)
def _leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test that may start pods: nothing that it started or made is left."""
    if not any(request.path.is_relative_to(TESTS / tier) for tier in ("local", "seeds")):
        yield
        return
    before = leaks.Census.take()
    yield
    left = before.leaks_since()
    if left:
        pytest.fail("left behind:\n" + "\n".join(left), pytrace=False)


@pytest.fixture
def service_home() -> Iterator[Path]:
    """An empty home, `KT_LOCAL_DIR`, whose local service is stopped after the test."""
    with _service_home() as home:
        yield home


@pytest.fixture(scope="module")
def shared_service_home() -> Iterator[Path]:
    """As `service_home`, for all tests of a file, which then cost no start of a service each."""
    with _service_home() as home:
        yield home


@contextmanager
def _service_home() -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch, _folder() as folder:
        home = _point_home_at(folder, patch)
        try:
            yield home
        finally:
            _stop_service(home)
        left = leaks.processes_left_of(home)
    if left:
        pytest.fail("left running by the local service:\n" + "\n".join(left), pytrace=False)


def _point_home_at(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    local = folder / "local"
    patch.setenv("HOME", str(folder))
    patch.setenv("KT_LOCAL_DIR", str(local))
    patch.setenv("KT_CONFIG_FILE", str(folder / "config.yaml"))
    return local


def _stop_service(home: Path) -> None:
    if home.exists():
        from kubetorch.local import lifetime

        lifetime.stop()


@contextmanager
def _folder() -> Iterator[Path]:
    # Short, and outside of the folder that the leak check watches: paths of sockets have a limit.
    folder = Path(tempfile.mkdtemp(prefix="kt-", dir="/tmp")).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _user_cache() -> str:
    return str(Path.home() / ".cache")
