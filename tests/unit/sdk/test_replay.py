"""Whose calls may be replayed where, and with which arguments."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from kubetorch.datastore import trees
from kubetorch.errors import SerializationError, SpecError, UnauthorizedError
from kubetorch.sdk.replay import Replay
from kubetorch.sdk.transport.session import Session
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.image import CopyStep, ImageSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.calls import Record
from kubetorch.wire.messages import CallView, Creator, RecordView

SPEC = WorkloadSpec("ns", "f", CallableRef("fn", "f", "jobs", "f"))
RECORD = Record("f", None, "json", (2,), b"{}")


class ClusterSession:
    is_local = False


class LocalSession:
    is_local = True


def replay(
    *, is_own: bool, codec: str = "json", session: object = None, method: str | None = None
) -> Replay:
    call = CallView(
        id="c", namespace="ns", workload="f", pod="p", callable="f", state="failed", started=1.0
    )
    view = RecordView(call=call, spec=SPEC, creator=Creator("ada"), is_own=is_own, expires=2.0)
    record = msgspec.structs.replace(RECORD, codec=codec, method=method)
    return Replay(cast("Session", session or ClusterSession()), view, record)


@pytest.mark.security
@pytest.mark.parametrize(("trust", "has_terminal"), [(False, True), (True, False), (False, False)])
def test_the_code_of_another_user_does_not_run_here_unasked(
    trust: bool, has_terminal: bool
) -> None:
    with pytest.raises(UnauthorizedError, match=r"(?s)a call of ada.*--in-pod"):
        replay(is_own=False).check(in_pod=False, trust=trust, has_terminal=has_terminal)


@pytest.mark.security
def test_it_runs_here_when_it_is_trusted_at_a_terminal_and_in_pods_always() -> None:
    replay(is_own=False).check(in_pod=False, trust=True, has_terminal=True)
    replay(is_own=False).check(in_pod=True, trust=False, has_terminal=False)
    replay(is_own=True).check(in_pod=False, trust=False, has_terminal=False)


@pytest.mark.security
def test_a_pickle_that_a_cluster_got_does_not_run_here_unasked() -> None:
    pickled = replay(is_own=True, codec="pickle")
    with pytest.raises(UnauthorizedError, match=r"(?s)pickled arguments.*--in-pod.*--trust"):
        pickled.check(in_pod=False, trust=False, has_terminal=True)
    with pytest.raises(UnauthorizedError, match="at a terminal"):
        pickled.check(in_pod=False, trust=True, has_terminal=False)
    pickled.check(in_pod=False, trust=True, has_terminal=True)
    pickled.check(in_pod=True, trust=False, has_terminal=False)
    local = replay(is_own=False, codec="pickle", session=LocalSession())
    local.check(in_pod=False, trust=False, has_terminal=False)


def test_a_record_of_another_method_than_the_list_of_calls_shows_is_refused() -> None:
    with pytest.raises(UnauthorizedError, match=r"a call of f; its record calls f\.delete"):
        replay(is_own=True, method="delete").check(in_pod=True, trust=True, has_terminal=True)


class ControllerWithCode:
    """Has an empty project."""

    def get_blob(self, digest: str, namespace: str) -> bytes:
        return trees.build([]).encoded

    def get_blobs(self, digests: object, namespace: str) -> dict[str, bytes]:
        return {}


class SessionWithCode(LocalSession):
    def ask(self, question: Callable[[object], object]) -> object:
        return question(ControllerWithCode())


def test_code_is_fetched_into_a_folder_that_a_project_does_not_choose(tmp_path: Path) -> None:
    replayed = replay(is_own=True, session=SessionWithCode())
    spec = replayed.view.spec
    ref = replace(spec.callable, project=str(tmp_path / "shop"))
    view = msgspec.structs.replace(replayed.view, spec=replace(spec, callable=ref, tree="ab" * 32))
    with contextlib.ExitStack() as stack:
        folder = replace(replayed, view=view)._fetch_code(stack)
        assert folder.name == "shop"
        assert not (tmp_path / "shop").exists()


CODE = """
from typing import overload

@overload
def f(text: str) -> str: ...
@overload
def f(number: int, more: int) -> int: ...
def f(value, lr=0.5): ...

class Base:
    def run(self, value): ...

class Trainer(Base):
    def fit(self, value, lr=0.5): ...
"""
TRAINER = CallableRef("cls", "trainer", "jobs", "Trainer")


def changed(
    folder: Path,
    changes: dict[str, Any],
    *,
    ref: CallableRef = SPEC.callable,
    method: str | None = None,
) -> dict[str, Any]:
    """The arguments of a call with one argument by position, after changes of them."""
    (folder / "jobs.py").write_text(CODE)
    arguments = json.dumps({"args": [1], "kwargs": {}}).encode()
    record = Record("f", method, "json", (len(arguments),), arguments)
    recorded = replay(is_own=True)
    view = msgspec.structs.replace(recorded.view, spec=replace(SPEC, callable=ref))
    (head,) = replace(recorded, view=view, record=record)._arguments(changes, folder / "jobs.py")
    document: dict[str, Any] = json.loads(bytes(head))
    return document


def test_the_parameters_are_those_of_the_definition_that_runs(tmp_path: Path) -> None:
    assert changed(tmp_path, {"value": 2, "lr": 0.1}) == {"args": [2], "kwargs": {"lr": 0.1}}
    fitted = changed(tmp_path, {"value": 2}, ref=TRAINER, method="fit")
    assert fitted == {"args": [2], "kwargs": {}}


def test_a_change_of_an_inherited_method_says_that_it_may_be_inherited(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"jobs.py does not define it: it may be inherited"):
        changed(tmp_path, {"value": 2}, ref=TRAINER, method="run")


def test_a_new_argument_that_is_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SerializationError, match=r"changes of value are no JSON: .*complex"):
        changed(tmp_path, {"value": 1j})


def test_a_copied_file_whose_path_cannot_be_looked_up_is_missing() -> None:
    path = "/" + "x" * 5000
    image = ImageSpec(steps=(CopyStep(path, "/data"),))
    recorded = replay(is_own=True)
    spec = replace(SPEC, compute=ComputeSpec(image=image))
    view = msgspec.structs.replace(recorded.view, spec=spec)
    parts = replace(recorded, view=view).missing_parts(in_pod=False)
    assert f"copied files that are not here: {path}" in parts
