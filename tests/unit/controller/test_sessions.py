"""What a controller makes of what an agent says, and of its silence."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import msgspec
import pytest

from kubetorch.controller.access import LocalAccess, PodIdentity, Principal, User
from kubetorch.controller.sessions import Session
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.errors import ForbiddenError, KubetorchError
from kubetorch.lib import websocket_protocol
from kubetorch.manifests.desired_pods import MountedNames
from kubetorch.wire import messages, versions
from kubetorch.wire.messages import Activity, CallReport, Hello, Members, Observed
from manual_clock import ManualClock

POD = PodIdentity("ns", "f", "f-1")
HELLO = Hello(
    namespace="ns",
    workload="f",
    pod="f-1",
    incarnation="i",
    url="http://127.0.0.1:1",
    protocol=versions.PROTOCOL,
    version="0",
    generation=3,
)


class Recorder:
    """Stands for a workload, the registry and the connection: notes what is done to them."""

    def __init__(self) -> None:
        self.noted: list[tuple[Any, ...]] = []
        self.sent: list[bytes] = []
        self.closed: tuple[int, str] | None = None
        self.limits: list[int] = []
        self.heard_of = 0

    def __getattr__(self, name: str) -> Any:
        if name not in (
            "connected",
            "disconnected",
            "silent",
            "silence_ended",
            "observed",
            "active",
        ):
            raise AttributeError(name)
        return lambda *arguments: self.noted.append((name, *arguments))

    def message_received(self, pod: str) -> None:
        """Each message says that the pod is there."""
        self.heard_of += 1

    def workload_of(self, pod: PodIdentity) -> Recorder | None:
        return self if pod == POD else None

    def mounted(self, pod: str) -> MountedNames:
        return MountedNames()

    def on_call(self, pod: PodIdentity, report: CallReport) -> None:
        self.noted.append(("call", pod, report))

    def on_calls(self, pod: PodIdentity, ids: Collection[str]) -> None:
        self.running = pod, ids

    def send(self, data: bytes, *, opcode: int) -> None:
        self.sent.append(data)

    def limit(self, max_message: int) -> None:
        self.limits.append(max_message)

    def close(self, code: int, reason: str) -> None:
        self.closed = (code, reason)

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.noted]


class Case:
    """A session that has begun, without a socket."""

    def __init__(self, principal: Principal = POD, *, hello: Hello | None = HELLO) -> None:
        self.world = Recorder()
        self.clock = ManualClock()
        self.ended: list[Session] = []
        self.begun: list[Session] = []
        self.greeted_sessions: list[Session] = []
        self.session = Session(
            principal,
            access=LocalAccess(
                user="", secret=b"", clock=self.clock.time, session_token_of=lambda pod: ""
            ),
            workloads=self.world,  # type: ignore[arg-type]  # it notes what a workload is told
            on_begin=lambda _workload, session: self.begun.append(session),
            on_hello=self.greeted_sessions.append,
            clock=self.clock,
            on_end=self.ended.append,
        )
        self.session.on_open(self.world)  # type: ignore[arg-type]  # it notes what is sent
        if hello is not None:
            self.say(hello)

    def say(self, message: object) -> None:
        data = message if isinstance(message, bytes) else messages.encode(message)
        self.session.on_message(websocket_protocol.TEXT, memoryview(data))


def test_hello_connects_the_pod() -> None:
    case = Case()
    assert case.world.noted == [("connected", HELLO, case.session)]
    assert case.world.closed is None


@pytest.mark.parametrize(
    ("principal", "first"), [(POD, LIMITS.pod_hello_bytes), (User(), LIMITS.hello_bytes)]
)
def test_a_session_takes_little_until_hello(principal: Principal, first: int) -> None:
    case = Case(principal, hello=None)
    assert (case.world.limits, case.greeted_sessions) == ([first], [])
    case.say(HELLO)
    assert (case.world.limits, case.greeted_sessions) == (
        [first, LIMITS.session_message_bytes],
        [case.session],
    )


def test_hello_says_which_spawned_calls_the_agent_knows() -> None:
    hello = msgspec.structs.replace(HELLO, calls=("call-0001",))
    case = Case(hello=hello)
    assert case.world.running == (POD, ("call-0001",))


def test_the_user_may_speak_for_a_pod() -> None:
    assert Case(User()).world.names == ["connected"]


@pytest.mark.parametrize(
    ("principal", "pod"),
    [
        pytest.param(PodIdentity("ns", "f", "f-2"), "f-1", id="the token of another pod"),
        pytest.param(User(), "f-9", id="a pod that is unknown"),
    ],
)
def test_hello_of_a_stranger_is_refused(principal: Principal, pod: str) -> None:
    case = Case(principal, hello=msgspec.structs.replace(HELLO, pod=pod))
    assert case.world.closed is not None
    assert case.world.closed[0] == websocket_protocol.POLICY_VIOLATION
    assert case.world.names == []


def test_an_agent_of_another_protocol_is_refused() -> None:
    case = Case(hello=msgspec.structs.replace(HELLO, protocol=99))
    assert case.world.closed is not None
    assert "make this side newer" in case.world.closed[1]


@pytest.mark.parametrize(
    "first", [b"{", b"[]", b'{"type": "nonsense"}', Activity(calls=0, last=1.0)]
)
def test_what_is_no_hello_ends_the_session(first: object) -> None:
    case = Case(hello=None)
    case.say(first)
    assert case.world.closed is not None
    assert case.world.closed[0] == websocket_protocol.PROTOCOL_ERROR


def test_a_second_hello_ends_the_session() -> None:
    case = Case()
    case.say(HELLO)
    assert case.world.closed is not None


def test_nothing_is_heard_after_the_end() -> None:
    case = Case()
    case.session.close("enough")
    case.say(Observed(generation=1, serving=1))
    assert case.world.names == ["connected"]


def test_the_silence_of_a_session_that_was_closed_means_nothing() -> None:
    case = Case()
    case.session.close("another one began")
    case.clock.advance(TIMING.session_silence_seconds)
    assert case.world.names == ["connected"]


def test_news_go_where_they_belong() -> None:
    case = Case()
    case.say(Observed(generation=4, serving=4))
    case.say(CallReport(id="c", callable="f", state="running", started=1.0))
    assert case.world.names == ["connected", "observed", "call"]


def test_a_large_message_is_put_together() -> None:
    case = Case()
    data = messages.encode(Observed(generation=4, serving=3, failure={"message": "x" * 100_000}))
    case.session.on_placed(data[:16], memoryview(data[16:]))
    assert case.world.names == ["connected", "observed"]


def test_a_connection_without_hello_is_closed() -> None:
    case = Case(hello=None)
    case.clock.advance(TIMING.session_hello_seconds)
    assert case.world.closed == (websocket_protocol.POLICY_VIOLATION, "no hello came")


def test_a_silent_pod_is_not_ready_until_it_is_heard_of_again() -> None:
    case = Case()
    case.clock.advance(TIMING.session_silence_seconds - 1)
    case.say(Activity(calls=0, last=1.0))
    case.clock.advance(TIMING.session_silence_seconds - 1)
    assert "silent" not in case.world.names
    case.clock.advance(1)
    assert case.world.noted[-1] == ("silent", "f-1")
    case.say(Activity(calls=0, last=1.0))
    assert case.world.noted[-2] == ("silence_ended", "f-1", 3)


def test_a_pod_that_is_heard_again_serves_what_it_said_last() -> None:
    case = Case()
    case.say(Observed(generation=4, serving=4))
    case.clock.advance(TIMING.session_silence_seconds)
    case.say(Activity(calls=0, last=1.0))
    assert ("silence_ended", "f-1", 4) in case.world.noted


def test_the_same_sign_of_life_is_taken_once_and_heard_each_time() -> None:
    case = Case()
    heard_count = case.world.heard_of
    for _ in range(3):
        case.say(Activity(calls=0, last=1.0))
    assert (case.world.names, case.world.heard_of) == (["connected", "active"], heard_count + 3)
    case.clock.advance(TIMING.session_silence_seconds)
    case.say(Activity(calls=0, last=1.0))
    assert case.world.names[2:] == ["silent", "silence_ended", "active"]


def test_the_end_of_the_connection_disconnects_the_pod() -> None:
    case = Case()
    case.session.on_close("gone")
    assert case.world.noted[-1] == ("disconnected", "f-1", case.session)
    assert case.ended == [case.session]
    case.clock.advance(TIMING.session_silence_seconds)
    assert case.world.names[-1] == "disconnected"


def test_nothing_is_sent_after_the_end() -> None:
    case = Case()
    case.session.send(Members(epoch=1, members=()))
    case.session.on_close("gone")
    case.session.send(Members(epoch=2, members=()))
    assert len(case.world.sent) == 1


# ----------------------------------------------------------------------------------------- mounts


class Mounting(Recorder):
    """A workload whose pods have something mounted; its pod may go while that is looked at."""

    spec, grants = None, ()

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[bool] = []
        self.is_there = True

    def mounted(self, pod: str) -> MountedNames:
        return MountedNames(secrets=("s",))

    def workload_of(self, pod: PodIdentity) -> Recorder | None:
        return self if self.is_there else None

    def read_on(self, is_wanted: bool) -> None:
        self.reads.append(is_wanted)

    def refused(self, pod: str, error: KubetorchError) -> None:
        self.noted.append(("refused", pod, error))


class PausedAccess(LocalAccess):
    """Checks mounts until a test sets the outcome of `mounts_check`."""

    def __init__(self) -> None:
        super().__init__(user="", secret=b"", clock=float, session_token_of=lambda pod: "")
        self.mounts_check: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def check_mounts(self, *_: object, is_running: bool) -> None:
        assert is_running
        await self.mounts_check


class Checked:
    """A session whose pod has said hello, and has mounts."""

    def __init__(self) -> None:
        self.world, self.access = Mounting(), PausedAccess()
        self.session = Session(
            POD,
            access=self.access,
            workloads=self.world,  # type: ignore[arg-type]  # as in `Case`
            on_begin=lambda _workload, _session: None,
            on_hello=lambda _session: None,
            clock=ManualClock(),
            on_end=lambda _session: None,
        )
        self.session.on_open(self.world)  # type: ignore[arg-type]  # as in `Case`
        self.say(HELLO)

    def say(self, message: object) -> None:
        data = memoryview(messages.encode(message))
        self.session.on_message(websocket_protocol.TEXT, data)

    async def decide(self, error: KubetorchError | None = None) -> None:
        if error is None:
            self.access.mounts_check.set_result(None)
        else:
            self.access.mounts_check.set_exception(error)
        for _ in range(3):
            await asyncio.sleep(0)


def test_what_a_pod_says_while_its_mounts_are_looked_at_is_heard_after_that() -> None:
    async def main() -> None:
        case = Checked()
        await asyncio.sleep(0)
        case.say(Observed(generation=3, serving=3))
        assert (case.world.names, case.world.reads) == ([], [False])
        await case.decide()
        assert (case.world.names, case.world.reads) == (["connected", "observed"], [False, True])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "names"),
    [(ForbiddenError("not its secret"), ["refused"]), (KubetorchError("nobody knows"), [])],
)
def test_a_pod_whose_mounts_are_not_its_own_has_no_session(
    error: KubetorchError, names: list[str]
) -> None:
    async def main() -> None:
        case = Checked()
        await asyncio.sleep(0)
        case.say(Observed(generation=3, serving=3))
        await case.decide(error)
        assert case.world.names == names
        assert case.world.closed == (websocket_protocol.POLICY_VIOLATION, str(error))

    asyncio.run(main())


def test_a_pod_that_is_gone_by_then_is_not_connected() -> None:
    async def main() -> None:
        case = Checked()
        await asyncio.sleep(0)
        case.world.is_there = False
        await case.decide()
        assert case.world.names == []

    asyncio.run(main())


def test_nobody_looks_on_when_the_connection_is_gone() -> None:
    async def main() -> None:
        case = Checked()
        await asyncio.sleep(0)
        case.session.on_close("gone")
        await asyncio.sleep(0)
        assert case.access.mounts_check.cancelled()
        assert case.world.names == []

    asyncio.run(main())
