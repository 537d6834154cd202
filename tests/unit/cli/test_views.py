"""Services, pods and calls as JSON and as rows."""

import re

import pytest

from kubetorch.cli import views
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import CallView, DeployLog, PodView, WorkloadView

SPEC = WorkloadSpec(
    namespace="default",
    name="train",
    callable=CallableRef(kind="fn", name="train", module="jobs.train", qualname="train"),
    compute=ComputeSpec(cpus="0.5", gpus="2"),
)
POD = PodView(name="train-0", ordinal=0, phase="Running", is_ready=True, generation=2)
SERVICE = WorkloadView(spec=SPEC, generation=2, status="Ready", pods=(POD,), updated=1.0)


def test_the_json_of_a_service_has_every_key_even_when_there_is_nothing_to_say():
    found = views.service_json(SERVICE)
    assert found["name"] == "train"
    assert found["type"] == "deployment"
    assert found["ready_pods"] == 1
    assert found["callable"] == {"name": "train", "kind": "fn", "module": "jobs.train"}
    assert (found["memory"], found["failure"], found["url"]) == (None, None, None)
    assert (found["cpus"], found["gpus"]) == ("0.5", "2")
    assert found["pods"][0]["name"] == "train-0"


def test_the_json_of_a_service_never_has_a_token():
    service = WorkloadView(spec=SPEC, generation=1, status="Ready", token="kt1.secret")
    assert "kt1.secret" not in repr(views.service_json(service))


def test_a_row_has_a_cell_for_each_column():
    assert len(views.service_row(SERVICE)) == len(views.SERVICE_COLUMNS)
    assert len(views.pod_row(POD)) == len(views.POD_COLUMNS)
    row = dict(zip(views.SERVICE_COLUMNS, views.service_row(SERVICE), strict=True))
    shown = ("RESOURCE", "CPUs", "MEMORY", "GPUs", "# OF PODS")
    assert [row[column] for column in shown] == ["train", "0.5", "-", "2", "1"]


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
    row = dict(zip(views.CALL_COLUMNS, views.call_row(call), strict=True))
    assert (row["STATE"], row["TOOK"], row["RESULT"]) == ("running", "-", "-")
    assert views.call_json(call)["ended"] is None


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
