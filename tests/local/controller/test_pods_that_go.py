"""Pods that go away: callers learn which pod and why, and nobody lists it any more."""

import resource

import pytest
from msgspec.structs import replace

import kubetorch as kt
from kubetorch.controller import views
from kubetorch.controller.backends.base import PodStatus
from kubetorch.controller.rollout import Rollout
from kubetorch.controller.views import PodReport
from kubetorch.errors import CallRefusedError
from kubetorch.sdk.calls.attempts import Target
from kubetorch.sdk.calls.caller import Caller
from kubetorch.sdk.calls.options import CallOptions
from kubetorch.sdk.calls.route import Location
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.messages import Ending, PodView
from tests.local.calling import InThread, caller, route_to, until
from tests.local.scripted_agent import ScriptedAgent

EVICTED = Ending(reason="Evicted", message="make room", time=1.0)


async def never(call):
    await call.is_cancelled.wait()


@pytest.mark.parametrize("codec", ["json", "pickle"])
def test_arguments_over_the_limit_are_refused_before_they_are_encoded(codec):
    with ScriptedAgent() as agent, route_to(agent.locate) as route:
        echo = caller(route, "echo", serialization=codec)
        large = bytes(
            wire_tuning.LIMITS.arguments_bytes + 1
        )  # of which the system makes nothing until it is read
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for argument in (large, memoryview(large), {"rows": [1, (large,)]}):
            with pytest.raises(
                CallRefusedError, match=rf"{len(large)} bytes; {wire_tuning.LIMITS.arguments_bytes}"
            ):
                echo(argument, lambda: "neither codec carries this")
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
        assert grown * 1024 < wire_tuning.LIMITS.arguments_bytes / 2, "it was read"
        assert echo(1) == [1]


def test_a_pod_is_listed_while_its_agent_is_connected():
    up = PodStatus("f-a", 0, "Running", "http://127.0.0.1:1")
    ending = replace(up, phase="Terminating", ending=EVICTED)
    foreign = replace(up, is_ours=False)  # which has no agent

    def phase_and_end(pod, report=None):
        view = views.pod_view(pod, report, Rollout(), is_ready=False)
        return view.phase, view.ended

    assert phase_and_end(up, PodReport()) == phase_and_end(foreign) == ("Running", None)
    assert phase_and_end(up) == ("Unknown", None)
    assert phase_and_end(ending, PodReport()) == ("Terminating", None)
    assert phase_and_end(ending) == ("Terminating", EVICTED)


def test_a_call_says_which_pod_does_not_come_back_and_why():
    evicted = PodView(name="f-b", ordinal=1, phase="Gone", ended=EVICTED)
    with ScriptedAgent() as agent:
        location = Location(
            (agent.url,),
            "token",
            (0,),
            pods={evicted.name: evicted},
            reason="the quota 'q' is full",
        )
        with route_to(lambda: location) as route:
            target = Target("default", "service", "echo", broadcast=(0, 1))
            with pytest.raises(kt.CallTimeoutError) as caught:
                Caller(target, route, CallOptions(timeout=3))(1)
    refused = caught.value.__cause__
    assert isinstance(refused, CallRefusedError)
    assert refused.pod_name == caught.value.pod_name == "f-b"
    assert "pod f-b: Evicted (make room); the quota 'q' is full" in str(refused)


def test_what_ended_a_pod_is_asked_for_until_the_controller_knows():
    agent, views = ScriptedAgent(never=never), []

    def locate():
        if not views:
            return agent.locate()
        # The kubelet says it later.
        return Location((), "token", pods={agent.pod: views.pop() if views[1:] else views[0]})

    with agent, route_to(locate) as route:
        call = InThread(caller(route, "never"))
        until(lambda: agent.opened)
        views.append(PodView(name=agent.pod, ordinal=0, phase="Gone", ended=EVICTED))
        views.extend(PodView(name=agent.pod, ordinal=0, phase="Unknown") for _ in range(4))
        agent.__exit__()
        error = call.join().error
    assert isinstance(error, kt.PodTerminatedError)
    assert (error.pod_name, error.reason, error.evicted) == (agent.pod, "Evicted", True)
    assert error.events == [{"timestamp": 1.0, "reason": "Evicted", "message": "make room"}]


def test_a_call_whose_pod_ends_before_its_service_is_gone_says_why():
    agent, is_torn_down = ScriptedAgent(never=never), []

    def locate():
        return Location((), "token", is_torn_down=True) if is_torn_down else agent.locate()

    with agent, route_to(locate) as route:
        call = InThread(caller(route, "never"))
        until(lambda: agent.opened)
        is_torn_down.append(True)
        agent.__exit__()
        error = call.join().error
    assert isinstance(error, kt.ServiceNotFoundError)
    assert "torn down while it was called" in str(error)
