"""Which pods are the world of a distributed service."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from kubetorch.controller import world
from kubetorch.controller.backends.base import PodStatus
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.controller.world import (
    Announce,
    Connected,
    Disconnected,
    Effect,
    Event,
    Formed,
    NotFormed,
    OrderProbe,
    Plan,
    PlanChanged,
    PodsChanged,
    Probed,
    Refuse,
    Regroup,
    Rendezvous,
    SendWorld,
    Stopping,
    Tick,
)
from kubetorch.errors import QuorumError, ResourceNotAvailableError, SpecError
from kubetorch.wire.messages import Ending, Member, World

TIMEOUT = 60.0


def pod(name: str, **fields: object) -> PodStatus:
    status = PodStatus(name, int(name[1:]), "Running", f"http://{name}", uid=f"uid-{name}")
    return replace(status, **fields)  # type: ignore[arg-type]  # its own fields


class Case:
    """A rendezvous, its time, and what came of what happened."""

    def __init__(self, *stored_worlds: World) -> None:
        self.now = 1000.0
        self.ports: tuple[int, ...] | ResourceNotAvailableError = (12345,)
        self.state = Rendezvous(
            "train", ports=self._choose, now=self.now, stored_worlds=stored_worlds
        )
        self.effects: list[Effect] = []
        self.speaking: set[str] = set()
        self.pods: list[PodStatus] = []

    def _choose(self, plan: Plan, members: Sequence[Member]) -> tuple[int, ...]:
        if isinstance(self.ports, ResourceNotAvailableError):
            raise self.ports
        return self.ports

    def tell(self, *events: Event) -> list[Effect]:
        """What follows from these."""
        effects = [effect for event in events for effect in self.state.handle(event, self.now)]
        self.effects += effects
        return effects

    def have(self, *pods: str | PodStatus) -> list[Effect]:
        self.pods = [
            pod(pod_or_name) if isinstance(pod_or_name, str) else pod_or_name
            for pod_or_name in pods
        ]
        return self.tell(PodsChanged(self.pods))

    def want(
        self, workers: int, *, number: int = 1, good: int = 0, quorum: int = 0
    ) -> list[Effect]:
        plan = Plan(number, workers, quorum or workers, TIMEOUT, good=good)
        return self.tell(PlanChanged(plan, frozenset(status.name for status in self.pods)))

    def connect(self, *names: str, incarnation: str = "i") -> list[Effect]:
        self.speaking |= set(names)
        return self.tell(*(Connected(name, f"http://{name}", incarnation) for name in names))

    def disconnect(self, name: str) -> list[Effect]:
        self.speaking.discard(name)
        return self.tell(Disconnected(name))

    def pass_time(self, seconds: float, *, silent: Sequence[str] = ()) -> list[Effect]:
        """Let time pass, in which pods give signs of life."""
        effects = []
        for _ in range(round(seconds / TIMING.world_tick_seconds)):
            self.now += TIMING.world_tick_seconds
            for name in self.speaking - set(silent):
                self.state.message_received(name, self.now)
            effects += self.tell(Tick())
        return effects

    @property
    def world(self) -> World:
        assert self.state.world is not None
        return self.state.world

    @property
    def members(self) -> list[str]:
        return [member.pod for member in self.world.members]

    @property
    def lost(self) -> dict[str, str]:
        return {loss.member.pod: loss.reason for loss in self.world.lost}


def launched(*names: str, quorum: int = 0) -> Case:
    """A case whose world is formed, and served by all."""
    case = Case()
    case.have(*names)
    case.want(len(names), quorum=quorum)
    case.connect(*names)
    case.want(len(names), good=1, quorum=quorum)
    case.pass_time(TIMING.world_start_grace_seconds)
    case.effects.clear()
    return case


# -------------------------------------------------------------------------------------- forming


def test_a_world_is_formed_when_the_last_pod_is_connected() -> None:
    case = Case()
    case.have("a0", "a1")
    assert case.want(2) == []
    assert case.connect("a1") == []
    (formed,) = case.connect("a0")
    assert formed == Formed(case.world)
    assert case.world == World(
        epoch=1,
        generation=1,
        members=(Member("a0", 0, "http://a0", "i"), Member("a1", 1, "http://a1", "i")),
        ports=(12345,),
    )


def test_pods_that_are_connected_already_are_a_world_at_once() -> None:
    case = Case()
    case.have("a0", "a1")
    case.connect("a0", "a1")
    assert [type(effect) for effect in case.want(2)] == [Formed]


def test_node_ranks_have_no_gaps() -> None:
    case = Case()
    case.have("a7", "a2", "a5")
    case.connect("a7", "a2", "a5")
    case.want(3)
    assert case.members == ["a2", "a5", "a7"]


def test_no_more_pods_than_workers_are_in_it() -> None:
    case = Case()
    case.have("a0", "a1", "a2")
    case.connect("a2", "a1", "a0")
    case.want(2)
    assert case.members == ["a0", "a1"]


def test_a_service_that_is_not_distributed_has_none() -> None:
    case = Case()
    case.have("a0")
    case.connect("a0")
    assert case.tell(PlanChanged(None, frozenset())) == []
    assert case.state.world is None


def test_a_service_that_is_not_distributed_any_more_has_none_either() -> None:
    case = launched("a0", "a1")
    case.tell(Regroup("a0", "r1", 1, is_quorum_awaited=True))
    assert case.tell(PlanChanged(None, frozenset())) == [Announce()]
    assert case.state.world is None
    case.want(2, number=3, good=2)
    assert case.world.epoch == 3


def test_pods_that_are_to_serve_another_generation_are_not_in_it() -> None:
    case = Case()
    case.have("a0", "a1")
    case.connect("a0", "a1")
    case.tell(PlanChanged(Plan(1, 1, 1, TIMEOUT), frozenset({"a1"})))
    assert case.members == ["a1"]


def test_a_quorum_waits_a_moment_for_the_others() -> None:
    case = Case()
    case.have("a0", "a1", "a2")
    case.want(3, quorum=2)
    assert case.connect("a0", "a1") == []
    assert case.pass_time(TIMING.quorum_settle_seconds - TIMING.world_tick_seconds) == []
    assert [type(effect) for effect in case.pass_time(TIMING.world_tick_seconds)] == [Formed]
    assert case.members == ["a0", "a1"]


def test_all_pods_need_no_moment() -> None:
    case = Case()
    case.have("a0", "a1", "a2")
    case.want(3, quorum=2)
    assert [type(effect) for effect in case.connect("a0", "a1", "a2")] == [Formed]
    assert len(case.members) == 3


def test_a_quorum_that_is_lost_again_is_none() -> None:
    case = Case()
    case.have("a0", "a1", "a2")
    case.want(3, quorum=2)
    case.connect("a0", "a1")
    case.disconnect("a1")
    assert case.pass_time(TIMING.quorum_settle_seconds * 2) == []
    assert case.connect("a1") == []
    assert [type(effect) for effect in case.pass_time(TIMING.quorum_settle_seconds)] == [Formed]


def test_those_that_are_in_the_world_of_a_quorum_have_to_serve() -> None:
    case = Case()
    case.have("a0", "a1", "a2")
    case.want(3)
    assert case.state.needed is None
    assert not case.state.can_do_without(1)
    case.want(3, number=2, quorum=2)
    assert case.state.needed == frozenset()
    assert case.state.can_do_without(1)
    assert not case.state.can_do_without(2)
    case.connect("a0", "a2")
    case.pass_time(TIMING.quorum_settle_seconds)
    assert case.state.needed == {"a0", "a2"}


def test_why_a_generation_has_no_world_is_known_until_it_has() -> None:
    case = Case()
    case.have("a0")
    case.want(1)
    assert case.state.no_quorum(2) is None
    assert "pod a0: its agent has not connected" in str(case.state.no_quorum(1))
    case.connect("a0")
    assert case.state.no_quorum(1) is None


def test_pods_that_come_later_are_not_in_it() -> None:
    case = launched("a0", "a1")
    assert case.have("a0", "a1", "a2") == []
    assert case.want(2, good=1) == []
    assert case.connect("a2") == []
    assert case.members == ["a0", "a1"]


def test_a_generation_without_a_quorum_is_given_up() -> None:
    case = Case()
    case.have("a0", pod("a1", reason="no node is free"))
    case.want(3)
    case.connect("a0")
    case.state.trouble = "the quota 'q' is full"
    assert case.pass_time(TIMEOUT - TIMING.world_tick_seconds) == []
    (missed,) = case.pass_time(TIMING.world_tick_seconds)
    assert isinstance(missed, NotFormed)
    assert missed.generation == 1
    assert isinstance(missed.error, QuorumError)
    message = str(missed.error)
    assert "1 of the 3 pods that it needs after 60 s: pod a1: no node is free; 1 of" in message
    assert case.pass_time(TIMEOUT) == []
    assert "1 of the pods is not there yet: the quota 'q' is full" in message


def test_pods_that_come_too_late_are_a_world_all_the_same() -> None:
    case = Case()
    case.have("a0", "a1")
    case.want(2)
    case.connect("a0")
    case.pass_time(TIMEOUT)
    assert [type(effect) for effect in case.connect("a1")] == [Formed]


def test_a_port_that_is_taken_ends_the_launch() -> None:
    case = Case()
    case.ports = ResourceNotAvailableError("taken")
    case.have("a0")
    case.connect("a0")
    assert case.want(1) == [NotFormed(1, case.ports)]
    assert case.state.world is None


# --------------------------------------------------------------------------------------- epochs


def test_a_new_generation_has_a_new_world_and_a_higher_epoch() -> None:
    case = launched("a0", "a1")
    assert [type(effect) for effect in case.want(2, number=2, good=1)] == [Formed]
    assert (case.world.epoch, case.world.generation) == (2, 2)


def test_the_world_before_is_told_again_when_the_new_generation_is_given_up() -> None:
    case = launched("a0", "a1")
    before = case.world
    case.want(2, number=2, good=1)
    assert case.want(2, number=1, good=1) == [Announce()]
    assert case.world == before


def test_the_world_before_is_told_until_there_is_a_new_one() -> None:
    case = launched("a0", "a1")
    case.have("a0", "a1", "a2")
    case.want(3, number=2, good=1)
    assert case.world.generation == 1
    case.connect("a2")
    assert case.world.generation == 2


def test_losses_meanwhile_are_known_of_the_world_before() -> None:
    case = launched("a0", "a1")
    case.want(2, number=2, good=1)
    case.have("a0")
    case.want(2, number=1, good=1)
    assert case.lost == {"a1": "Deleted"}


def test_a_member_that_is_lost_before_the_generation_served_has_it_formed_again() -> None:
    case = Case()
    case.have("a0", "a1")
    case.want(2)
    case.connect("a0", "a1")
    effects = case.connect("a1", incarnation="j")
    assert effects[-1] == Formed(case.world)
    assert (case.world.epoch, case.world.lost) == (2, ())
    assert case.world.members[1].incarnation == "j"


def test_a_world_of_which_nobody_is_left_is_formed_again() -> None:
    case = launched("a0", "a1")
    assert case.connect("a0", incarnation="j") == [Announce()]
    effects = case.connect("a1", incarnation="j")
    assert effects == [Announce(), Formed(case.world)]
    assert (case.world.epoch, case.world.lost) == (2, ())


# --------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        pytest.param(None, "Deleted", id="gone"),
        pytest.param(pod("a1", uid="other"), "Deleted", id="another pod of its name"),
        pytest.param(pod("a1", phase="Terminating"), "Deleted", id="being deleted"),
        pytest.param(
            pod("a1", phase="Terminating", ending=Ending(reason="Evicted")),
            "Evicted",
            id="being evicted",
        ),
        pytest.param(pod("a1", phase="Pending", is_down=True), "AgentDied", id="killed"),
        pytest.param(
            pod("a1", is_down=True, ending=Ending(reason="OOMKilled")), "OOMKilled", id="memory"
        ),
        pytest.param(pod("a1", phase="Failed"), "AgentDied", id="failed"),
    ],
)
def test_a_member_is_lost_with_a_reason(now: PodStatus | None, reason: str) -> None:
    case = launched("a0", "a1")
    after = ["a0"] if now is None else ["a0", now]
    assert case.have(*after) == [Announce()]
    assert case.lost == {"a1": reason}
    assert case.members == ["a0", "a1"]
    assert case.have(*after) == []


def test_what_is_told_late_of_the_agent_before_is_no_loss_of_the_next_one() -> None:
    case = launched("a0", "a1")
    case.disconnect("a1")
    case.have("a0", pod("a1", is_down=True))
    assert case.lost == {"a1": "AgentDied"}
    case.tell(Regroup("a0", "r1", 1))
    case.connect("a1", incarnation="j")
    assert (case.members, case.lost) == (["a0", "a1"], {})
    assert case.have("a0", pod("a1", is_down=True, reason="it ended with exit code 137")) == []
    assert case.have("a0", pod("a1", restarts=1)) == []
    case.disconnect("a1")
    case.have("a0", pod("a1", restarts=1, is_down=True))
    assert case.lost == {"a1": "AgentDied"}


def test_an_agent_that_ends_soon_after_it_began_is_lost_with_its_session() -> None:
    case = launched("a0", "a1")
    case.connect("a1", incarnation="j")
    case.tell(Regroup("a0", "r1", 1))
    assert case.lost == {}
    case.have("a0", pod("a1", is_down=True))
    assert case.disconnect("a1") == [Announce()]
    assert case.lost == {"a1": "AgentDied"}


def test_what_was_known_of_a_pod_is_the_reason_once_it_is_gone() -> None:
    case = launched("a0", "a1")
    case.have("a0", pod("a1", ending=Ending(reason="Preempted")))
    case.have("a0")
    assert case.lost == {"a1": "Preempted"}


def test_a_pod_that_is_replaced_but_still_serves_is_no_loss() -> None:
    case = launched("a0", "a1")
    assert case.have("a0", pod("a1", is_retiring=True)) == []


def test_no_world_is_formed_of_pods_that_are_about_to_end() -> None:
    case = launched("a0", "a1", "a2")
    ending = [pod(name, phase="Terminating") for name in ("a0", "a1")]
    assert case.have(*ending) == [Announce()]
    assert case.have(*ending, "a3") == []  # nobody is left, but those are connected still
    assert not any(isinstance(effect, Formed) for effect in case.connect("a3", "a4", "a5"))
    case.have(*ending, "a3", "a4", "a5")
    assert case.want(3, good=1)[-1] == Formed(case.world)
    assert case.members == ["a3", "a4", "a5"]


def test_an_agent_that_was_started_again_is_lost() -> None:
    case = launched("a0", "a1")
    assert case.connect("a1", incarnation="j") == [Announce()]
    assert case.lost == {"a1": "AgentRestarted"}
    assert case.connect("a1", incarnation="j") == []


def test_an_agent_that_connects_again_is_the_same() -> None:
    case = launched("a0", "a1")
    case.disconnect("a1")
    assert case.connect("a1") == []
    assert case.lost == {}


def test_many_losses_are_said_once() -> None:
    names = [f"a{number}" for number in range(100)]
    case = launched(*names)
    assert case.have(*names[:50]) == [Announce()]
    assert len(case.lost) == 50


def test_a_reason_is_put_right_when_more_is_known() -> None:
    case = launched("a0", "a1")
    case.have("a0", pod("a1", is_down=True))
    assert case.lost == {"a1": "AgentDied"}
    assert case.have("a0", pod("a1", is_down=True, ending=Ending(reason="OOMKilled"))) == [
        Announce()
    ]
    assert case.lost == {"a1": "OOMKilled"}
    assert case.have("a0") == []


@pytest.mark.parametrize(("restarts", "reason"), [(1, "OOMKilled"), (2, "AgentRestarted")])
def test_why_the_agent_before_ended_is_the_reason_of_the_member_that_it_was(
    restarts: int, reason: str
) -> None:
    case = launched("a0", "a1")
    case.connect("a1", incarnation="j")
    assert case.lost == {"a1": "AgentRestarted"}
    case.have("a0", pod("a1", restarts=restarts, last_ending=Ending(reason="OOMKilled")))
    assert case.lost == {"a1": reason}


def test_what_happens_to_the_agent_that_came_after_is_no_reason() -> None:
    case = launched("a0", "a1")
    case.connect("a1", incarnation="j")
    assert case.have("a0", pod("a1", phase="Terminating", ending=Ending(reason="Evicted"))) == []
    assert case.lost == {"a1": "AgentRestarted"}


# ------------------------------------------------------------------------------------- requests


def test_a_request_forms_the_world_again() -> None:
    case = launched("a0", "a1")
    assert case.tell(Regroup("a0", "r1", 1)) == [Formed(case.world)]
    assert case.world.epoch == 2
    assert case.tell(Regroup("a0", "r2", 2)) == [Formed(case.world)]
    assert case.world.epoch == 3


@pytest.mark.parametrize("id", ["r1", "r2"])
def test_a_request_of_an_epoch_before_gets_the_world_that_was_formed_since(id: str) -> None:
    case = launched("a0", "a1")
    case.tell(Regroup("a0", "r1", 1))
    assert case.tell(Regroup("a1", id, 1)) == [SendWorld("a1")]
    assert case.world.epoch == 2


def test_a_request_of_an_epoch_before_gets_no_world_that_has_lost_a_member() -> None:
    case = launched("a0", "a1")
    case.tell(Regroup("a0", "r1", 1))
    case.have("a0")
    late_request = Regroup("a0", "r2", 1, is_quorum_awaited=False)
    assert case.tell(late_request) == [Formed(case.world)]
    assert (case.world.epoch, case.members) == (3, ["a0"])


def test_requests_that_wait_are_answered_by_one_world() -> None:
    case = launched("a0", "a1")
    case.have("a0")
    assert case.tell(Regroup("a0", "r1", 1), Regroup("a0", "r2", 1), Regroup("a0", "r1", 1)) == []
    case.have("a0", "a2")
    case.want(2, good=1)
    assert case.connect("a2") == [Formed(case.world)]
    assert (case.members, case.world.epoch) == (["a0", "a2"], 2)


def test_who_does_not_await_a_quorum_gets_those_who_are_there() -> None:
    case = launched("a0", "a1", "a2")
    case.have("a0", "a2")
    case.want(3, good=1)
    assert case.tell(Regroup("a0", "r1", 1, is_quorum_awaited=False)) == [Formed(case.world)]
    assert case.members == ["a0", "a2"]


def test_a_request_whose_quorum_does_not_come_is_refused() -> None:
    case = launched("a0", "a1")
    case.have("a0")
    case.want(2, good=1)
    case.tell(Regroup("a0", "r1", 1))
    assert case.pass_time(TIMEOUT - TIMING.world_tick_seconds) == []
    assert case.tell(Regroup("a0", "r1", 1)) == []
    (refused,) = case.pass_time(TIMING.world_tick_seconds)
    assert isinstance(refused, Refuse)
    assert (refused.pod, refused.id) == ("a0", "r1")
    assert isinstance(refused.error, QuorumError)
    assert case.world.epoch == 1


def test_a_request_to_a_service_without_ranks_is_refused() -> None:
    case = Case()
    case.have("a0")
    case.connect("a0")
    (refused,) = case.tell(Regroup("a0", "r1", 1))
    assert isinstance(refused, Refuse)
    assert isinstance(refused.error, SpecError)


# ------------------------------------------------------------------------------------ suspicion


def test_a_silent_member_that_nobody_reaches_is_lost_within_three_seconds() -> None:
    case = launched("a0", "a1")
    began = case.now
    effects = case.pass_time(
        TIMING.member_silence_seconds + TIMING.world_tick_seconds, silent=["a1"]
    )
    (ask,) = effects
    assert isinstance(ask, OrderProbe)
    assert (ask.pod, ask.url) == ("a0", "http://a1")
    case.now += 1.0  # as long as it may take to say so
    assert case.tell(Probed("a0", ask.id, is_reached=False)) == [Announce()]
    assert case.lost == {"a1": "unreachable"}
    assert case.now - began <= 3.0


def test_a_silent_member_that_another_one_reaches_is_not_lost() -> None:
    case = launched("a0", "a1")
    (ask,) = case.pass_time(
        TIMING.member_silence_seconds + TIMING.world_tick_seconds, silent=["a1"]
    )
    assert isinstance(ask, OrderProbe)
    case.tell(Probed("a0", ask.id, is_reached=True))
    assert case.pass_time(TIMING.member_silence_seconds, silent=["a1"]) == []
    (second_probe,) = case.pass_time(TIMING.world_tick_seconds, silent=["a1"])
    assert isinstance(second_probe, OrderProbe)
    assert second_probe.id != ask.id
    assert case.lost == {}


def test_a_member_whose_session_ended_is_tried_at_once() -> None:
    case = launched("a0", "a1")
    (ask,) = case.disconnect("a1")
    assert isinstance(ask, OrderProbe)
    assert case.tell(Probed("a0", ask.id, is_reached=False)) == []
    assert case.pass_time(TIMING.backend_report_seconds - TIMING.world_tick_seconds) == []
    assert case.pass_time(TIMING.world_tick_seconds) == [Announce()]
    assert case.lost == {"a1": "AgentDied"}


def test_the_backend_is_given_a_moment_to_say_why_a_session_ended() -> None:
    case = launched("a0", "a1")
    (ask,) = case.disconnect("a1")
    assert isinstance(ask, OrderProbe)
    case.tell(Probed("a0", ask.id, is_reached=False))
    case.pass_time(TIMING.world_tick_seconds)
    ending = Ending(reason="OOMKilled")
    assert case.have("a0", pod("a1", is_down=True, ending=ending)) == [Announce()]
    assert case.lost == {"a1": "OOMKilled"}
    assert case.pass_time(TIMING.backend_report_seconds) == []


def test_one_that_was_only_cut_off_from_the_controller_is_asked_about_again() -> None:
    case = launched("a0", "a1")
    (ask,) = case.disconnect("a1")
    assert isinstance(ask, OrderProbe)
    case.tell(Probed("a0", ask.id, is_reached=True))
    assert case.pass_time(TIMING.member_silence_seconds) == []
    assert [type(effect) for effect in case.pass_time(TIMING.world_tick_seconds)] == [OrderProbe]


def test_one_that_speaks_again_meanwhile_is_not_lost() -> None:
    case = launched("a0", "a1")
    (ask,) = case.pass_time(
        TIMING.member_silence_seconds + TIMING.world_tick_seconds, silent=["a1"]
    )
    assert isinstance(ask, OrderProbe)
    case.state.message_received("a1", case.now)
    assert case.tell(Probed("a0", ask.id, is_reached=False)) == []
    assert case.lost == {}


def test_nobody_is_lost_while_there_is_nobody_to_ask() -> None:
    case = launched("a0", "a1")
    assert case.pass_time(60.0, silent=["a0", "a1"]) == []
    alone = launched("a0")
    assert alone.pass_time(60.0, silent=["a0"]) == []


def test_one_of_several_who_reaches_it_is_enough() -> None:
    case = launched("a0", "a1", "a2", "a3", "a4")
    effects = case.pass_time(
        TIMING.member_silence_seconds + TIMING.world_tick_seconds, silent=["a1"]
    )
    assert (
        len({effect.pod for effect in effects if isinstance(effect, OrderProbe)} - {"a1"})
        == LIMITS.probing_pods
    )
    first, second, _ = (effect for effect in effects if isinstance(effect, OrderProbe))
    case.tell(Probed(first.pod, first.id, is_reached=False))
    case.tell(Probed(second.pod, second.id, is_reached=True))
    assert case.lost == {}


def test_who_does_not_answer_does_not_keep_a_suspect_alive() -> None:
    case = launched("a0", "a1", "a2")
    first, _ = case.pass_time(
        TIMING.member_silence_seconds + TIMING.world_tick_seconds, silent=["a1"]
    )
    assert isinstance(first, OrderProbe)
    case.tell(Probed(first.pod, first.id, is_reached=False))
    assert case.pass_time(
        TIMING.suspect_probe_seconds + TIMING.world_tick_seconds, silent=["a1"]
    ) == [Announce()]
    assert case.lost == {"a1": "unreachable"}


def test_others_are_asked_when_nobody_answers() -> None:
    case = launched(*(f"a{number}" for number in range(9)))
    first = case.pass_time(TIMING.member_silence_seconds + TIMING.world_tick_seconds, silent=["a1"])
    second = case.pass_time(TIMING.suspect_probe_seconds + TIMING.world_tick_seconds, silent=["a1"])
    (before, now) = (
        {effect.pod for effect in effects if isinstance(effect, OrderProbe)}
        for effects in (first, second)
    )
    assert len(now) == LIMITS.probing_pods
    assert before != now
    late = first[0]
    assert isinstance(late, OrderProbe)
    for prober in now:  # what is said about the first attempt is no answer to the second
        case.tell(Probed(prober, late.id, is_reached=False))
    assert case.lost == {}


def test_the_silence_of_thousands_takes_little_time() -> None:
    names = [f"a{number}" for number in range(5000)]
    case = launched(*names)
    began = time.process_time()
    effects = case.pass_time(2.0, silent=names[100:])
    assert time.process_time() - began < 2.0
    assert effects


def test_a_stranger_cannot_have_a_member_lost() -> None:
    case = launched("a0", "a1", "a2")
    (ask, *_) = case.pass_time(
        TIMING.member_silence_seconds + TIMING.world_tick_seconds, silent=["a1"]
    )
    assert isinstance(ask, OrderProbe)
    assert case.tell(Probed("a1", ask.id, is_reached=False)) == []
    assert case.tell(Probed("a9", ask.id, is_reached=False)) == []
    assert case.tell(Probed("a0", "nonsense", is_reached=False)) == []
    case.pass_time(TIMING.suspect_probe_seconds + TIMING.world_tick_seconds, silent=["a1"])
    assert case.lost == {}


def test_a_time_in_which_the_controller_did_not_run_says_nothing() -> None:
    case = launched("a0", "a1")
    case.now += 3600.0
    assert case.tell(Tick()) == []
    assert case.tell(Disconnected("a1")) == []
    assert case.pass_time(TIMING.world_resume_grace_seconds - TIMING.world_tick_seconds) == []


def test_a_probe_from_before_a_stall_says_nothing() -> None:
    case = launched("a0", "a1", "a2")
    first, second = case.pass_time(
        TIMING.member_silence_seconds + TIMING.world_tick_seconds, silent=["a1"]
    )
    assert isinstance(first, OrderProbe)
    assert isinstance(second, OrderProbe)
    case.tell(Probed(first.pod, first.id, is_reached=False))
    case.now += 30.0
    assert case.tell(Tick()) == []
    assert case.tell(Probed(second.pod, second.id, is_reached=False)) == []
    assert case.lost == {}


def test_one_that_nobody_reached_is_in_the_next_world_only_when_it_speaks_again() -> None:
    case = launched("a0", "a1")
    (ask,) = case.pass_time(
        TIMING.member_silence_seconds + TIMING.world_tick_seconds, silent=["a1"]
    )
    assert isinstance(ask, OrderProbe)
    case.tell(Probed("a0", ask.id, is_reached=False))
    assert case.tell(Regroup("a0", "r1", 1, is_quorum_awaited=False)) == [Formed(case.world)]
    assert case.members == ["a0"]
    case.state.message_received("a1", case.now)
    case.tell(Regroup("a0", "r2", 2))
    assert case.members == ["a0", "a1"]


def test_one_that_stops_ends_its_calls_and_is_in_no_later_world() -> None:
    case = launched("a0", "a1", "a2", quorum=2)
    assert case.tell(Stopping("a1")) == []
    assert case.lost == {}
    case.tell(Regroup("a0", "r1", 1))
    case.pass_time(TIMING.quorum_settle_seconds + TIMING.world_tick_seconds)
    assert case.members == ["a0", "a2"]
    case.connect("a1", incarnation="j")
    case.tell(Regroup("a0", "r2", 2))
    assert case.members == ["a0", "a1", "a2"]


# --------------------------------------------------------------------------------------- restart


def test_a_controller_takes_up_the_world_of_the_one_before() -> None:
    before = launched("a0", "a1").state
    case = Case(*world.unpack(world.pack(before.worlds)))
    case.have("a0", "a1")
    case.want(2, good=1)
    case.connect("a0", "a1")
    assert case.world == before.world
    assert not [effect for effect in case.effects if isinstance(effect, Formed)]


def test_members_that_have_not_connected_yet_are_not_lost() -> None:
    before = launched("a0", "a1").state
    case = Case(*before.worlds)
    case.have("a0", "a1")
    case.want(2, good=1)
    case.connect("a0")
    case.pass_time(TIMING.world_start_grace_seconds - TIMING.world_tick_seconds)
    assert case.lost == {}
    (ask,) = case.pass_time(TIMING.world_tick_seconds * 2)
    assert isinstance(ask, OrderProbe)
    case.tell(Probed("a0", ask.id, is_reached=True))
    assert case.lost == {}


def test_what_was_lost_meanwhile_is_found_out() -> None:
    before = launched("a0", "a1", "a2").state
    case = Case(*before.worlds)
    case.have("a0", "a1")
    case.want(3, good=1)
    case.connect("a0")
    case.connect("a1", incarnation="j")
    assert case.lost == {"a2": "Deleted", "a1": "AgentRestarted"}


def test_epochs_go_on_after_a_restart() -> None:
    before = launched("a0").state
    case = Case(*before.worlds)
    case.have("a0")
    case.connect("a0")
    case.want(1, number=2, good=1)
    assert case.world.epoch == 2


@pytest.mark.parametrize("text", ["", "nonsense", "c$}?n0RR91", "\N{SNOWMAN}"])
def test_what_is_damaged_is_no_world(text: str) -> None:
    assert world.unpack(text) == ()


def test_five_thousand_worlds_are_kept_in_little() -> None:
    members = tuple(
        Member(f"train-5f6b7-{number:05d}", number, f"http://10.0.{number % 250}.7:32300", "ab" * 8)
        for number in range(5000)
    )
    assert len(world.pack([World(epoch=1, generation=1, members=members)])) < 200_000
