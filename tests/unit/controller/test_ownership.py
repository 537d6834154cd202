"""Who may deploy over a service that is there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from kubetorch.controller.ownership import Use, check_owner
from kubetorch.errors import ServiceTakenError
from kubetorch.specs.callable import CallableKind, CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import Origin, WorkloadSpec
from kubetorch.wire import versions
from kubetorch.wire.messages import Creator, Deploy

MINE = Origin("1111", "github.com/acme/shop", "train.py:train", "laptop")
OTHER_PROJECT = replace(MINE, project="2222", name="kiwi:~/lab")
OTHER_CALLABLE = replace(MINE, callable="serve.py:train")
SPEC = WorkloadSpec("team", "train", CallableRef("fn", "train", "train", "train"), origin=MINE)
LOCAL, CLUSTER = Use(is_local=True), Use(is_local=False)
USED = Use(is_local=True, reason="a call runs on it")
ANN, BOB = Creator("ann"), Creator("bob", "bobby")


def deploy(origin: Origin | None, *, replaces: bool = False, renames: str = "") -> Deploy:
    return Deploy(
        id="1",
        spec=replace(SPEC, origin=origin),
        protocol=versions.PROTOCOL,
        version="0",
        replace=replaces,
        renames=renames,
    )


def test_the_same_creator_project_and_callable_is_an_edit() -> None:
    assert check_owner(SPEC, ANN, deploy(MINE), ANN, USED) == ""


def test_what_never_served_is_nothing_that_its_creator_could_lose() -> None:
    other_deploy = deploy(OTHER_PROJECT)
    failed = structs.replace(USED, never_served=True)
    assert check_owner(SPEC, ANN, other_deploy, ANN, failed) == ""
    with pytest.raises(ServiceTakenError):
        check_owner(SPEC, ANN, other_deploy, BOB, failed)


@pytest.mark.parametrize(
    ("origin", "by", "phrases"),
    [
        pytest.param(MINE, BOB, ("belongs to user ann", "by bobby (user bob)"), id="creator"),
        pytest.param(MINE, Creator("ann", "lab"), ("user ann", "by lab (user ann)"), id="username"),
        pytest.param(OTHER_PROJECT, ANN, ("github.com/acme/shop", "kiwi:~/lab"), id="project"),
        pytest.param(OTHER_CALLABLE, ANN, ("train.py:train", "serve.py:train"), id="callable"),
        pytest.param(None, BOB, ("belongs to user ann",), id="no origin"),
    ],
)
def test_a_deploy_over_what_is_used_or_somebody_elses_is_refused_and_says_whose_it_is(
    origin: Origin | None, by: Creator, phrases: tuple[str, ...]
) -> None:
    with pytest.raises(ServiceTakenError) as refused:
        check_owner(SPEC, ANN, deploy(origin), by, USED)
    error = refused.value
    assert all(phrase in error.message for phrase in ("train in namespace team", *phrases))
    assert (error.creator, error.project, error.callable) == ("ann", MINE.name, MINE.callable)
    ways_out = ("name=", "KT_USERNAME", "replace=True", "--replace", "KT_REPLACE=1", "kt teardown")
    assert all(hint in (error.hint or "") for hint in ways_out)
    assert "train.py:train" in check_owner(SPEC, ANN, deploy(origin, replaces=True), by, USED)


def test_a_chosen_name_replaces_another_callable_of_ones_own_project_alone() -> None:
    named = replace(OTHER_CALLABLE, is_named=True)
    note = check_owner(SPEC, ANN, deploy(named), ANN, USED)
    assert "train in namespace team ran train.py:train of project github.com/acme/shop" in note
    for origin, by in ((replace(OTHER_PROJECT, is_named=True), ANN), (named, BOB)):
        with pytest.raises(ServiceTakenError):
            check_owner(SPEC, ANN, deploy(origin), by, USED)


# ------------------------------------------------------------------------- what nobody uses


@pytest.mark.parametrize("origin", [OTHER_PROJECT, OTHER_CALLABLE], ids=["project", "callable"])
@pytest.mark.parametrize("kind", ["fn", "cls", "app"])
def test_ones_own_service_that_nobody_uses_is_replaced_on_this_machine(
    origin: Origin, kind: CallableKind
) -> None:
    service = replace(SPEC, callable=replace(SPEC.callable, kind=kind))
    note = check_owner(service, ANN, deploy(origin), ANN, structs.replace(LOCAL, idle=180.0))
    assert note == (
        "the service train in namespace team ran train.py:train of project github.com/acme/shop, "
        "last used 3 minutes ago; this deploy replaces the service; another name would keep both"
    )


@pytest.mark.parametrize(
    ("idle", "words"),
    [
        (None, "never used"),
        (1.0, "1 s"),
        (125.0, "2 minutes"),
        (8000.0, "2 hours"),
        (1e6, "11 days"),
    ],
)
def test_what_is_replaced_says_when_it_was_last_used(idle: float | None, words: str) -> None:
    assert words in structs.replace(LOCAL, idle=idle).last_in_words


def test_the_service_of_another_creator_is_refused_on_this_machine_too() -> None:
    with pytest.raises(ServiceTakenError):
        check_owner(SPEC, ANN, deploy(MINE), BOB, LOCAL)


def test_on_a_cluster_it_is_replaced_for_the_same_machine() -> None:
    for origin in (OTHER_PROJECT, OTHER_CALLABLE):
        assert "this deploy replaces" in check_owner(SPEC, ANN, deploy(origin), ANN, CLUSTER)


@pytest.mark.parametrize(
    ("service", "origin", "use", "reason"),
    [
        pytest.param(
            SPEC, replace(OTHER_PROJECT, machine="vm"), CLUSTER, "another machine", id="machine"
        ),
        pytest.param(
            replace(SPEC, origin=replace(MINE, machine="")),
            OTHER_CALLABLE,
            CLUSTER,
            "another machine",
            id="a machine that is not known",
        ),
        pytest.param(
            replace(SPEC, callable=replace(SPEC.callable, kind="cls")),
            OTHER_CALLABLE,
            CLUSTER,
            "a class has a state",
            id="class",
        ),
        pytest.param(
            replace(SPEC, origin=replace(MINE, is_named=True)),
            OTHER_PROJECT,
            CLUSTER,
            "its name was chosen",
            id="a chosen name of another project",
        ),
        pytest.param(
            SPEC,
            OTHER_CALLABLE,
            structs.replace(CLUSTER, reason="it may be used"),
            "may be used",
            id="use",
        ),
    ],
)
def test_on_a_cluster_it_is_refused_for_anything_else(
    service: WorkloadSpec, origin: Origin, use: Use, reason: str
) -> None:
    with pytest.raises(ServiceTakenError, match=reason):
        check_owner(service, ANN, deploy(origin), ANN, use)


# ------------------------------------------------------------------------------ names that are one

NAMESAKE = replace(MINE, callable="train.py:tr_ain")


@pytest.mark.parametrize("use", [LOCAL, CLUSTER], ids=["local", "cluster"])
def test_two_callables_whose_names_are_one_for_a_service_are_refused_by_name(use: Use) -> None:
    with pytest.raises(
        ServiceTakenError, match=r"train.py:tr_ain would be the service train, whi"
    ) as e:
        check_owner(SPEC, ANN, deploy(NAMESAKE), ANN, use)
    assert "such as kt.fn(tr_ain, name=" in (e.value.hint or "")
    # In another project it has nothing to do with this one.
    elsewhere = replace(NAMESAKE, project="2222")
    assert "replaces" in check_owner(SPEC, ANN, deploy(elsewhere), ANN, use)


def test_a_callable_that_is_in_its_file_no_more_was_renamed() -> None:
    renamed = deploy(NAMESAKE, renames="train.py:train")
    assert "ran train.py:train" in check_owner(SPEC, ANN, renamed, ANN, LOCAL)
    with pytest.raises(ServiceTakenError, match="a call runs on it"):
        check_owner(SPEC, ANN, renamed, ANN, USED)
    with pytest.raises(ServiceTakenError, match="would be the service"):
        check_owner(SPEC, ANN, deploy(NAMESAKE, renames="train.py:before"), ANN, LOCAL)


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(replace(SPEC, origin=None), id="no origin"),
        pytest.param(
            replace(SPEC, compute=ComputeSpec(selector=(("app", "x"),))), id="selects pods alone"
        ),
    ],
)
def test_some_services_are_anybodys(before: WorkloadSpec) -> None:
    assert check_owner(before, ANN, deploy(OTHER_PROJECT), BOB, USED) == ""


def test_a_deploy_without_an_origin_is_an_edit_of_its_own_service() -> None:
    assert check_owner(SPEC, ANN, deploy(None), ANN, USED) == ""


def test_a_folder_of_two_homes_is_told_apart_where_all_else_is_the_same() -> None:
    other_home = replace(MINE, project="2222")
    with pytest.raises(ServiceTakenError, match="another machine or home") as refused:
        check_owner(SPEC, ANN, deploy(other_home), ANN, USED)
    assert "project 2222, not 1111" in refused.value.message
