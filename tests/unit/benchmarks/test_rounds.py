from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks import __main__ as command
from benchmarks import figures
from benchmarks.figures import Figure, Limit, Margin, Row
from benchmarks.rounds import Side, compare
from benchmarks.venvs import UnavailableError

LATENCY = Figure("call", "p50", "ms", {"echo": Limit(1.6), "Ray": Limit(0.4)}, scale=1e3)


def side(name: str, kind: str, values: list[float], order: list[str] | None = None) -> Side:
    @contextmanager
    def start() -> Iterator[object]:
        remaining = iter(values)

        def measure() -> dict[str, float]:
            if order is not None:
                order.append(name)
            return {"p50": next(remaining)}

        yield measure

    return Side(name, kind, start)


def unavailable(name: str) -> Side:
    @contextmanager
    def start() -> Iterator[object]:
        raise UnavailableError("no wheel for this machine")
        yield

    return Side(name, "peer", start)


def rows(ours: list[float], echo: list[float], ray: Side) -> list[Row]:
    sides = [side("ours", "ours", ours), side("echo", "floor", echo), ray]
    return compare([LATENCY], sides, len(ours))


def test_the_ratio_is_that_of_the_medians() -> None:
    [echo, ray] = rows(
        [0.001, 0.003, 0.002], [0.001, 0.001, 0.009], side("Ray", "peer", [0.01] * 3)
    )
    assert (echo.ours, echo.theirs, echo.ratio, echo.kept) == (2.0, 1.0, 2.0, False)
    assert (ray.ratio, ray.kept) == (0.2, True)


def test_every_round_begins_with_another_side() -> None:
    order: list[str] = []
    sides = [
        side("ours", "ours", [1.0] * 3, order),
        side("echo", "floor", [1.0] * 3, order),
        side("Ray", "peer", [1.0] * 3, order),
    ]
    compare([LATENCY], sides, 3)
    assert order[::3] == ["ours", "echo", "Ray"]
    assert [sorted(order[i : i + 3]) for i in (0, 3, 6)] == [["Ray", "echo", "ours"]] * 3


def test_a_peer_that_cannot_be_had_is_named_and_misses_no_budget() -> None:
    [_, ray] = rows([0.001], [0.001], unavailable("Ray"))
    assert (ray.theirs, ray.ratio, ray.kept) == (None, None, None)
    assert "no wheel for this machine" in figures.table([ray])


def test_the_table_marks_what_missed_its_budget() -> None:
    [echo, ray] = rows([0.002], [0.001], side("Ray", "peer", [0.1]))
    lines = figures.table([echo, ray]).splitlines()
    assert "MISSED" in lines[2] and "≤ 1.6" in lines[2]
    assert "MISSED" not in lines[3]


@pytest.mark.parametrize(("ratio", "is_within_budget"), [(0.59, False), (0.6, True), (3.0, True)])
def test_a_rate_has_to_reach_its_budget(ratio: float, is_within_budget: bool) -> None:
    assert Limit(0.6, at_least=True).allows(ratio, 1.0) is is_within_budget


@pytest.mark.parametrize(
    ("ours", "is_within_budget"), [(0.0006, True), (0.0016, False), (0.0001, True)]
)
def test_a_budget_may_say_how_much_more_than_the_floor_is_allowed(
    ours: float, is_within_budget: bool
) -> None:
    figure = Figure("call", "p50", "ms", {"echo": Margin(0.5)}, scale=1e3)
    sides = [side("ours", "ours", [ours]), side("echo", "floor", [0.0002])]
    [row] = compare([figure], sides, 1)
    assert row.kept is is_within_budget
    assert row.budget == "≤ +0.5 ms"


def test_the_table_says_how_much_above_a_margin_is_measured() -> None:
    figure = Figure("call", "p50", "ms", {"echo": Margin(0.5)}, scale=1e3)
    for ours, shown in ((0.0005, "+0.3 ms"), (0.0001, "-0.1 ms")):
        [row] = compare(
            [figure], [side("ours", "ours", [ours]), side("echo", "floor", [0.0002])], 1
        )
        assert shown in figures.table([row])


def test_a_check_of_few_rounds_is_refused() -> None:
    with pytest.raises(SystemExit):
        command.main(["calls", "--check", "--rounds", "4"])


def test_an_unknown_benchmark_is_refused() -> None:
    with pytest.raises(SystemExit):
        command.main(["colours"])


def test_a_cluster_that_is_not_there_is_no_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    assert command.main(["cluster"]) == 1
    output = capsys.readouterr()
    assert "cluster cannot be measured here: no KUBECONFIG" in output.err
    assert output.out == ""


def status(row: Row, *options: str) -> int:
    return command.main(["calls", *options], run=lambda name, rounds: [row])


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [(0.001, 0.001, 0), (0.002, 0.001, 1), (0.001, 0.0, 1), (0.0, 0.001, 1)],
    ids=["kept", "missed", "nothing to compare with", "nothing measured"],
)
def test_a_check_succeeds_only_with_budgets_that_are_known_to_be_kept(
    ours: float, theirs: float, expected: int
) -> None:
    figure = Figure("call", "p50", "ms", {"echo": Limit(1.6)}, scale=1e3)
    [row] = compare([figure], [side("ours", "ours", [ours]), side("echo", "floor", [theirs])], 1)
    assert status(row) == 0
    assert status(row, "--check") == expected


def test_a_check_without_a_peer_says_what_it_did_not_check(
    capsys: pytest.CaptureFixture[str],
) -> None:
    [_, ray] = rows([0.001], [0.001], unavailable("Ray"))
    assert status(ray, "--check") == 1
    output = capsys.readouterr()
    assert "not checked: call (Ray)" in output.err
    assert "NOT CHECKED" in output.out


def test_what_has_no_budget_needs_no_peer() -> None:
    figure = Figure("call", "p50", "ms", {"Ray": None}, scale=1e3)
    [row] = compare([figure], [side("ours", "ours", [0.001]), unavailable("Ray")], 1)
    assert status(row, "--check") == 0


def test_a_difference_may_be_nothing() -> None:
    figure = Figure("import", "p50", "ms", {"echo": Limit(1.0)}, difference=True)
    for ours in (0.0, -0.1):
        sides = [side("ours", "ours", [ours]), side("echo", "floor", [1.0])]
        [row] = compare([figure], sides, 1)
        assert row.kept is True


def test_without_ours_nothing_is_measured_and_the_reason_is_shown() -> None:
    order: list[str] = []
    figure = Figure("call", "p50", "ms", {"echo": Limit(1.0)}, scale=1e3)
    sides = [
        Side("ours", "ours", unavailable("Ray").start),
        side("echo", "floor", [1.0], order),
    ]
    [row] = compare([figure], sides, 5)
    assert (row.ours, row.kept, order) == (None, None, [])
    assert "no wheel for this machine" in figures.table([row])
    assert status(row, "--check") == 1


def test_a_side_does_not_always_run_after_the_same_one() -> None:
    order: list[str] = []
    sides = [side(name, "floor", [1.0] * 4, order) for name in ("echo", "Ray")]
    compare([LATENCY], [side("ours", "ours", [1.0] * 4, order), *sides], 4)
    turns = [order[begin : begin + 3] for begin in range(0, 12, 3)]
    before = [turn[turn.index("ours") - 1] for turn in turns if turn[0] != "ours"]
    assert set(before) == {"echo", "Ray"}


def test_all_is_every_benchmark_that_needs_no_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []
    command.main(["all", "calls"], run=lambda name, rounds: ran.append(name) or [])
    assert ran == [name for name in command.NAMES if name not in ("cluster", "knative", "all")]


@pytest.mark.parametrize("options", [[], ["--check"]])
def test_groups_that_worked_are_printed_when_another_fails(capsys, options):
    def fails():
        raise OSError("the pod did not start")

    row, _ = rows([0.001], [0.001], side("Ray", "peer", [0.005]))

    def run(name, rounds):
        return figures.measured({"inside": lambda: [row], "edits": fails, "memory": lambda: [row]})

    assert command.main(["cluster", *options], run=run) == 1
    out, err = capsys.readouterr()
    assert out.count("echo: ") == 2
    assert "of cluster could not be measured: edits" in err
    assert "the pod did not start" in err
