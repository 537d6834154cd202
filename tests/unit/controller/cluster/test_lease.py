"""Who leads: scenarios, and never two at the same time."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kubetorch.controller.cluster.leader import Candidate, Read, Wait, Write
from kubetorch.controller.tuning import TIMING

DURATION, TENURE = TIMING.lease_seconds, TIMING.lease_tenure_seconds


class Server:
    """Keeps one lease; what is written has to be of the version that is there."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self._version = 0

    def write(self, body: dict[str, Any], *, is_new: bool) -> dict[str, Any] | None:
        if is_new is not (self.lease is None):
            return None
        known_version = body["metadata"].get("resourceVersion")
        if self.lease is not None and known_version != self.lease["metadata"]["resourceVersion"]:
            return None
        self._version += 1
        metadata = {**body["metadata"], "resourceVersion": str(self._version)}
        self.lease = {**body, "metadata": metadata}
        return self.lease


class Runner:
    """A candidate with a clock of its own, which may be cut off from the server."""

    def __init__(self, server: Server, pod: str, offset: float = 0.0, nonce: str = "1") -> None:
        self.server, self.offset = server, offset
        self.candidate = Candidate(namespace="ns", name="lease", pod=pod, nonce=nonce)
        self.is_cut_off = False

    def act(self, now: float) -> None:
        """What it does at this moment of the test's clock."""
        mine = now + self.offset
        for _ in range(4):
            step = self.candidate.step(mine, 1_000_000.0 + mine)
            if isinstance(step, Wait):
                return
            if self.is_cut_off:
                self.candidate.failed(mine)
            elif isinstance(step, Read):
                self.candidate.observe(self.server.lease, mine)
            else:
                written = self.server.write(step.body, is_new=step.is_new)
                if written is None:
                    self.candidate.conflicted(mine)
                else:
                    self.candidate.written(written, mine)

    def leads(self, now: float) -> bool:
        return self.candidate.is_leading(now + self.offset)

    def hear(self, now: float) -> None:
        """The watch tells."""
        self.candidate.observe(self.server.lease, now + self.offset)


def test_the_first_one_leads_and_the_second_one_waits() -> None:
    server = Server()
    first, second = Runner(server, "a"), Runner(server, "b", offset=-5000.0)
    first.act(0.0)
    second.act(0.0)
    assert (first.leads(0.0), second.leads(0.0)) == (True, False)
    assert second.candidate.holder == first.candidate.identity


def test_one_that_is_killed_is_followed_after_the_duration() -> None:
    server = Server()
    first, second = Runner(server, "a"), Runner(server, "b", offset=77.0)
    first.act(0.0)
    second.act(1.0)
    second.act(DURATION)
    assert not second.leads(DURATION)
    second.act(DURATION + 1.1)
    assert second.leads(DURATION + 1.1)
    assert server.lease is not None
    assert server.lease["spec"]["leaseTransitions"] == 1


def test_one_that_starts_again_where_it_ran_leads_at_once() -> None:
    server = Server()
    Runner(server, "a").act(0.0)
    restarted_runner = Runner(server, "a", nonce="2")
    restarted_runner.act(0.5)
    assert restarted_runner.leads(0.5)


def test_one_that_resigns_is_followed_at_once() -> None:
    server = Server()
    first, second = Runner(server, "a"), Runner(server, "b")
    first.act(0.0)
    second.act(0.0)
    assert server.write(first.candidate.resignation(1.0), is_new=False)
    second.hear(1.0)
    second.act(1.0)
    assert second.leads(1.0)


def test_one_that_is_cut_off_changes_nothing_after_its_tenure_and_goes_on_when_alone() -> None:
    server = Server()
    first = Runner(server, "a")
    first.act(0.0)
    first.is_cut_off = True
    first.act(TENURE)
    assert not first.leads(TENURE)
    assert not first.candidate.is_lost
    first.is_cut_off = False
    first.act(100.0)
    assert first.leads(100.0)


def test_after_everybody_was_cut_off_the_leader_has_time_to_renew() -> None:
    server = Server()
    first, second = Runner(server, "a"), Runner(server, "b")
    first.act(0.0)
    second.act(0.0)
    first.is_cut_off = second.is_cut_off = True
    for now in range(1, 31):
        second.act(float(now))
    first.is_cut_off = second.is_cut_off = False
    second.act(32.0)
    assert not second.leads(32.0)
    first.act(33.0)
    assert first.leads(33.0)


def test_one_that_finds_another_leading_has_lost() -> None:
    server = Server()
    first, second = Runner(server, "a"), Runner(server, "b")
    first.act(0.0)
    second.act(0.0)
    second.act(DURATION)
    assert second.leads(DURATION)
    first.act(DURATION)
    first.act(DURATION + 2)
    assert first.candidate.is_lost
    assert not first.leads(DURATION + 2)


def test_a_lease_that_is_deleted_is_made_again() -> None:
    server = Server()
    first = Runner(server, "a")
    first.act(0.0)
    server.lease = None
    first.hear(0.5)
    assert not first.leads(0.5)
    first.act(1.0)
    assert first.leads(1.0)


@given(
    offsets=st.lists(st.floats(-1e4, 1e4), min_size=3, max_size=3),
    events=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(["act", "act", "cut", "mend", "hear", "resign"]),
            st.floats(0.0, 6.0),
        ),
        max_size=60,
    ),
)
def test_never_do_two_lead_at_the_same_time(
    offsets: list[float], events: list[tuple[int, str, float]]
) -> None:
    server, now = Server(), 0.0
    runners = [Runner(server, str(number), offset) for number, offset in enumerate(offsets)]
    for which, action, seconds in events:
        now += seconds
        runner = runners[which]
        if action == "cut":
            runner.is_cut_off = True
        elif action == "mend":
            runner.is_cut_off = False
        elif action == "hear" and not runner.is_cut_off:
            runner.hear(now)
        elif action == "resign" and not runner.is_cut_off and runner.leads(now):
            server.write(runner.candidate.resignation(now), is_new=False)
            runner.candidate.observe(server.lease, now + runner.offset)
        else:
            runner.act(now)
        assert sum(runner.leads(now) for runner in runners) <= 1
        assert isinstance(runner.candidate.step(now + runner.offset, now), Read | Write | Wait)
