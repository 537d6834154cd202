"""Services, pods and calls as JSON and as rows."""

import re
import time
from dataclasses import replace

import pytest
from msgspec.structs import replace as replaced

from kubetorch.cli import output, views
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.distribution import DistributionSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import (
    CallProgress,
    CallView,
    DeployLog,
    LostMember,
    Member,
    PodView,
    WorkloadView,
    World,
)

SPEC = WorkloadSpec(
    namespace="default",
    name="train",
    callable=CallableRef(kind="fn", name="train", module="jobs.train", qualname="train"),
    compute=ComputeSpec(cpus="0.5", gpus="2"),
)
POD = PodView(name="train-0", ordinal=0, phase="Running", is_ready=True, generation=2)
SERVICE = WorkloadView(spec=SPEC, generation=2, status="Ready", pods=(POD,), updated=1.0)


def test_the_json_of_a_service_has_every_key_even_when_there_is_nothing_to_say():
    service = views.service_json(SERVICE)
    assert service["name"] == "train"
    assert service["type"] == "deployment"
    assert service["ready_pods"] == 1
    assert service["callable"] == {"name": "train", "kind": "fn", "module": "jobs.train"}
    assert (service["memory"], service["failure"], service["url"]) == (None, None, None)
    assert (service["cpus"], service["gpus"]) == ("0.5", "2")
    assert service["pods"][0]["name"] == "train-0"


def test_the_json_of_a_service_never_has_a_token():
    service = WorkloadView(spec=SPEC, generation=1, status="Ready", token="kt1.secret")
    assert "kt1.secret" not in repr(views.service_json(service))


def test_a_row_has_a_cell_for_each_column():
    assert [list(row)[:2] for row in views.pod_cells(SERVICE)] == [["POD", "PHASE"]]
    row = views.service_cells(SERVICE)
    assert "POD NAMES" not in row
    assert views.service_cells(SERVICE, with_pods=True)["POD NAMES"] == POD.name
    shown = ("RESOURCE", "CPUs", "MEMORY", "GPUs", "# OF PODS")
    assert [row[column] for column in shown] == ["train", "0.5", "-", "2", "1"]


def test_pods_of_a_world_have_their_ranks_and_lost_ones_their_reason():
    members = tuple(
        Member(f"train-{ordinal}", ordinal, f"http://10.0.0.{ordinal}:1") for ordinal in range(3)
    )
    lost = LostMember(members[1], "OOMKilled", "it had 4Gi")
    world = World(epoch=7, generation=2, members=members, processes=4, lost=(lost,))
    compute = replace(SPEC.compute, distribution=DistributionSpec("pytorch", workers=3))
    pods = tuple(replaced(POD, name=f"train-{ordinal}", ordinal=ordinal) for ordinal in (0, 2))
    service = replaced(
        SERVICE,
        spec=replace(SPEC, compute=compute),
        world=world,
        pods=(*pods, replaced(POD, name="new")),
    )
    assert [(row["POD"], row["RANKS"]) for row in views.pod_cells(service)] == [
        ("train-0", "0-3"),
        ("train-2", "8-11"),
        ("new", "-"),
    ]
    assert views.world_words(service) == "pytorch, 12 ranks in 3 pods, epoch 7"
    assert views.lost_lines(service) == ["train-1  ranks 4-7  OOMKilled: it had 4Gi"]
    service_json = views.service_json(service)
    assert [pod["ranks"] for pod in service_json["pods"]] == [[0, 1, 2, 3], [8, 9, 10, 11], None]
    assert (service_json["world"]["epoch"], service_json["world"]["world_size"]) == (7, 12)
    assert service_json["world"]["lost"] == [
        {"pod": "train-1", "ranks": [4, 5, 6, 7], "reason": "OOMKilled", "message": "it had 4Gi"}
    ]
    assert views.service_json(SERVICE)["world"] is None


def test_a_table_on_a_narrow_terminal_does_without_dispensable_columns():
    columns, rows = ["POD", "PHASE", "CALLS"], [["train-0", "Running", "3"]]
    table = list(zip(columns, *rows, strict=True))
    assert [column[0] for column in output.narrowed(table, 80, ["PHASE"])] == columns
    narrow = output.narrowed(table, 16, ["PHASE", "CALLS"])
    assert [column[0] for column in narrow] == ["POD", "CALLS"]


def test_a_call_that_runs_has_no_result_yet():
    call = CallView(
        id="c1",
        namespace="default",
        workload="train",
        pod="train-0",
        callable="train",
        state="running",
        started=1.0,
    )
    row = views.call_cells(call)
    assert (row["STATE"], row["TOOK"], row["RESULT"]) == ("running", "-", "-")
    assert views.call_json(call)["ended"] is None


def test_the_line_about_stopped_calls_says_how_to_attach():
    assert views.stopped_line(replaced(SERVICE, pods=(POD,))) == ""
    stopped_pod = replaced(POD, stopped=1)
    line = views.stopped_line(replaced(SERVICE, pods=(stopped_pod,)))
    assert line == "1 call is stopped in a debugger: kt debug train attaches"
    line = views.stopped_line(replaced(SERVICE, pods=(stopped_pod,)), ["ann@desk"])
    assert line == "1 call is stopped in a debugger of ann@desk"
    line = views.stopped_line(replaced(SERVICE, pods=(stopped_pod, stopped_pod)))
    assert line == "2 calls are stopped in a debugger: kt debug train attaches"


def test_a_list_of_calls_fits_on_80_columns():
    call = CallView(
        id="0" * 32,
        namespace="default",
        workload="counter",
        pod="counter-0",
        callable="Counter.add",
        state="succeeded",
        started=time.time() - 86399,
        ended=time.time() - 80000,
    )
    table = list(views.call_cells(call, brief=True).items())
    shown = output.narrowed(table, 80, views.DISPENSABLE_CALL_COLUMNS)
    assert [column[0] for column in shown] == ["ID", "SERVICE", "CALLABLE", "STATE", "AGE", "TOOK"]
    assert max(map(len, output.layout(shown))) <= 80


def test_the_list_of_a_call_that_says_how_far_it_has_come_fits_too():
    call = CallView(
        id="0" * 32,
        namespace="default",
        workload="somebody-long-training",
        pod="counter-0",
        callable="Counter.add",
        state="running",
        started=time.time() - 86399,
        progress=CallProgress(4, 10, "epoch 4"),
    )
    table = list(views.call_cells(call, brief=True).items())
    shown = output.narrowed(table, 80, views.DISPENSABLE_CALL_COLUMNS)
    assert [column[1] for column in shown][1:] == [
        *("somebody-long-training", "running", "40%", "23h")
    ]
    assert views.call_cells(call)["PROGRESS"] == "40% 4/10 epoch 4"
    assert views.call_json(call)["progress"] == {"current": 4, "total": 10, "message": "epoch 4"}


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "5s"), (125, "2m"), (7300, "2h"), (700_000, "8d"), (-3, "0s")]
)
def test_an_age_is_told_in_its_largest_unit(seconds, text):
    assert views.age(1000.0, now=1000.0 + seconds) == text


def test_what_never_happened_has_no_age_and_no_moment():
    assert views.age(0.0) == views.moment(0.0) == views.moment(None) == "-"


def test_a_failure_is_shown_with_its_traceback_when_it_has_one():
    assert views.failure_lines({"error_type": "E", "message": "m", "traceback": "T\n  E: m\n"}) == [
        "T",
        "  E: m",
    ]
    assert views.failure_lines({"error_type": "E", "message": "m"}) == ["E: m"]


def test_a_loggers_line_is_shown_with_time_and_level_and_a_print_as_it_is():
    logged = DeployLog(text="ready", pod="p", source="logger", level="INFO", time=1e9)
    assert re.fullmatch(r"2001-09-0\d \d\d:\d\d:\d\d \| INFO \| ready", views.line_text(logged))
    assert views.line_text(DeployLog(text="ready", pod="p", time=1e9)) == "ready"
