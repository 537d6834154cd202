"""Who may deploy over a service that is there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kubetorch.controller.workloads import check_owner
from kubetorch.errors import ServiceTakenError
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import Origin, WorkloadSpec
from kubetorch.wire import versions
from kubetorch.wire.messages import Creator, Deploy

MINE = Origin("1111", "github.com/acme/shop", "train.py:train")
OTHER_PROJECT = replace(MINE, project="2222", name="kiwi:~/lab")
OTHER_CALLABLE = replace(MINE, callable="serve.py:train")
SPEC = WorkloadSpec("team", "train", CallableRef("fn", "train", "train", "train"), origin=MINE)
ANN, BOB = Creator("ann"), Creator("bob", "bobby")


def deploy(origin: Origin | None, *, is_named: bool = False, replaces: bool = False) -> Deploy:
    return Deploy(
        id="1",
        spec=replace(SPEC, origin=origin),
        protocol=versions.PROTOCOL,
        version="0",
        is_named=is_named,
        replace=replaces,
    )


def test_trust_the_same_creator_project_and_callable_is_an_edit() -> None:
    assert check_owner(SPEC, ANN, deploy(MINE), ANN) == ""


def test_trust_what_never_served_is_nothing_that_its_creator_could_lose() -> None:
    other = deploy(OTHER_PROJECT)
    assert check_owner(SPEC, ANN, other, ANN, never_served=True) == ""
    with pytest.raises(ServiceTakenError):
        check_owner(SPEC, ANN, other, BOB, never_served=True)


@pytest.mark.parametrize(
    ("origin", "by", "said"),
    [
        pytest.param(MINE, BOB, ("belongs to user ann", "by bobby (user bob)"), id="creator"),
        pytest.param(MINE, Creator("ann", "lab"), ("user ann", "by lab (user ann)"), id="username"),
        pytest.param(OTHER_PROJECT, ANN, ("github.com/acme/shop", "kiwi:~/lab"), id="project"),
        pytest.param(OTHER_CALLABLE, ANN, ("train.py:train", "serve.py:train"), id="callable"),
        pytest.param(None, BOB, ("belongs to user ann",), id="an earlier client"),
    ],
)
def test_trust_a_deploy_over_anything_else_is_refused_and_says_whose_it_is(
    origin: Origin | None, by: Creator, said: tuple[str, ...]
) -> None:
    with pytest.raises(ServiceTakenError) as refused:
        check_owner(SPEC, ANN, deploy(origin), by)
    error = refused.value
    assert all(text in error.message for text in ("train in namespace team", *said))
    assert (error.creator, error.project, error.callable) == ("ann", MINE.name, MINE.callable)
    ways_out = ("name=", "KT_USERNAME", "replace=True", "--replace", "KT_REPLACE=1", "kt teardown")
    assert all(way in (error.hint or "") for way in ways_out)
    assert "train.py:train" in check_owner(SPEC, ANN, deploy(origin, replaces=True), by)


def test_trust_a_chosen_name_replaces_another_callable_of_ones_own_project_alone() -> None:
    said = check_owner(SPEC, ANN, deploy(OTHER_CALLABLE, is_named=True), ANN)
    assert "train in namespace team ran train.py:train of project github.com/acme/shop" in said
    for origin, by in ((OTHER_PROJECT, ANN), (OTHER_CALLABLE, BOB)):
        with pytest.raises(ServiceTakenError):
            check_owner(SPEC, ANN, deploy(origin, is_named=True), by)


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(replace(SPEC, origin=None), id="deployed before there was a record"),
        pytest.param(
            replace(SPEC, compute=ComputeSpec(selector=(("app", "x"),))), id="selects pods alone"
        ),
    ],
)
def test_trust_some_services_are_anybodys(before: WorkloadSpec) -> None:
    assert check_owner(before, ANN, deploy(OTHER_PROJECT), BOB) == ""


def test_trust_an_earlier_client_deploys_over_its_own_service() -> None:
    assert check_owner(SPEC, ANN, deploy(None), ANN) == ""


def test_a_folder_of_two_homes_is_told_apart_where_all_else_is_the_same() -> None:
    other_home = replace(MINE, project="2222")
    with pytest.raises(ServiceTakenError, match="another machine or home") as refused:
        check_owner(SPEC, ANN, deploy(other_home), ANN)
    assert "project 2222, not 1111" in refused.value.message
