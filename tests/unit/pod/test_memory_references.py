"""Which values of references an agent keeps, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from kubetorch.errors import (
    CallRefusedError,
    KubetorchError,
    ReferenceLostError,
    SerializationError,
)
from kubetorch.pod.memory_references import References
from kubetorch.pod.payloads import OwnedPayload
from kubetorch.pod.tuning import LIMITS
from kubetorch.pod.user_process.tuning import LIMITS as WORKER_LIMITS

SIZE = 100


def name_of(number: int) -> str:
    return f"reference-{number:020d}"


class Agent:
    """References of an agent that has room for three."""

    def __init__(self) -> None:
        self.references = References()
        self.references.limit_bytes = 3 * SIZE
        self.dropped: list[str] = []
        self.references.on_drop.append(lambda reference: self.dropped.append(reference.identity))

    def bring(self, number: int, stream: object) -> bool:
        is_new = self.references.expect(name_of(number), (SIZE,), SIZE, stream)
        if is_new:
            payload = OwnedPayload(bytes([number]) * SIZE)
            self.references.receive(name_of(number), payload, stream, lambda _: None)
        return is_new

    def has(self, number: int) -> bool:
        return any(True for _ in self.references.present([name_of(number)]))


@pytest.fixture
def agent() -> Agent:
    return Agent()


def ends_of(agent: Agent, *numbers: int) -> tuple[list[KubetorchError | None], Callable[[], None]]:
    """Where a call that uses references notes that they are there; and what ends the call."""
    ends: list[KubetorchError | None] = []
    use = agent.references.use(map(name_of, numbers))
    use.when_present(ends.append)
    return ends, use.end


def test_a_value_stays_until_its_last_stream_releases_it(agent: Agent) -> None:
    assert agent.bring(1, "a")
    assert not agent.bring(1, "b")
    agent.references.release(name_of(1), "a")
    assert agent.has(1)
    agent.references.end_stream("b")
    assert agent.dropped == [name_of(1)]


def test_a_call_keeps_what_it_uses_when_the_client_is_gone(agent: Agent) -> None:
    agent.bring(1, "a")
    _, end = ends_of(agent, 1)
    agent.references.end_stream("a")
    assert agent.has(1)
    end()
    assert not agent.has(1)


def test_a_call_waits_for_a_value_that_is_under_way(agent: Agent) -> None:
    agent.bring(1, "a")
    agent.references.expect(name_of(2), (SIZE,), SIZE, "a")
    ends, _ = ends_of(agent, 1, 2)
    assert ends == []
    agent.references.receive(name_of(2), OwnedPayload(bytes(SIZE)), "a", ends.append)
    assert ends == [None, None]


def test_a_call_fails_when_the_only_stream_that_brings_a_value_ends(agent: Agent) -> None:
    agent.references.expect(name_of(1), (SIZE,), SIZE, "a")
    agent.references.expect(name_of(1), (SIZE,), SIZE, "b")
    ends, _ = ends_of(agent, 1)
    agent.references.end_stream("a")
    assert ends == []
    agent.references.end_stream("b")
    [error] = ends
    assert isinstance(error, ReferenceLostError)
    assert error.reference == name_of(1)


def test_an_unknown_reference_is_lost(agent: Agent) -> None:
    agent.bring(1, "a")
    with pytest.raises(ReferenceLostError, match=f"{name_of(2)[:8]}… is not in this pod"):
        agent.references.use([name_of(1), name_of(2)])
    agent.references.end_stream("a")
    assert not agent.has(1)


def test_the_value_used_longest_ago_makes_room_unless_a_call_uses_it(agent: Agent) -> None:
    for number in (1, 2, 3):
        agent.bring(number, "a")
    _, end = ends_of(agent, 1)
    agent.bring(4, "a")
    assert agent.dropped == [name_of(2)]
    end()
    agent.bring(5, "a")
    assert agent.dropped == [name_of(2), name_of(3)]
    assert agent.bring(2, "a")


def test_a_value_without_room_is_refused_and_nothing_is_dropped_for_it(agent: Agent) -> None:
    agent.bring(1, "a")
    with pytest.raises(CallRefusedError, match=r"no room for the reference .* of 301 bytes"):
        agent.references.expect(name_of(2), (301,), 301, "a")
    assert agent.has(1)


@pytest.mark.parametrize(
    ("identity", "sizes", "size"),
    [
        ("short", (1,), 1),
        ("../" * 10, (1,), 1),
        (name_of(1), (), 0),
        (name_of(1), (-1, 1), 1),
        (name_of(1), (10,), 9),
    ],
)
def test_what_no_client_of_ours_sends_is_refused(
    agent: Agent, identity: str, sizes: tuple[int, ...], size: int
) -> None:
    with pytest.raises(SerializationError):
        agent.references.expect(identity, sizes, size, "a")


def test_a_second_value_for_a_reference_does_not_replace_the_first(agent: Agent) -> None:
    agent.bring(1, "a")
    assert not agent.references.expect(name_of(1), (5,), 5, "b")
    [reference] = agent.references.present([name_of(1)])
    assert reference.memory == bytes([1]) * SIZE


@pytest.mark.faults
def test_a_call_fails_whose_value_cannot_be_kept_for_lack_of_a_thread(agent: Agent) -> None:
    size = WORKER_LIMITS.inline_bytes + 1
    agent.references.limit_bytes = size
    threads = ThreadPoolExecutor(1)
    threads.shutdown()

    async def scenario() -> None:
        asyncio.get_running_loop().set_default_executor(threads)
        agent.references.expect(name_of(1), (size,), size, "a")
        ends, _ = ends_of(agent, 1)
        agent.references.receive(name_of(1), OwnedPayload(bytes(size)), "a", ends.append)
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
        assert [str(error) for error in ends if error is not None] == [str(ends[0])] * 2
        assert "this pod cannot keep a reference of" in str(ends[0])

    asyncio.run(scenario())


def test_a_value_that_no_stream_brings_any_more_is_lost(agent: Agent) -> None:
    agent.references.expect(name_of(1), (SIZE,), SIZE, "a")
    agent.references.expect(name_of(1), (5,), 5, "b")
    agent.references.end_stream("a")
    with pytest.raises(ReferenceLostError):
        agent.references.use([name_of(1)])


def test_the_refusal_of_too_many_references_names_their_number(agent: Agent) -> None:
    agent.references.limit_bytes = LIMITS.references + 1
    for number in range(LIMITS.references):
        agent.references.expect(name_of(number), (1,), 1, "a")
    with pytest.raises(CallRefusedError, match="keeps at most 1000 references"):
        agent.references.expect(name_of(LIMITS.references), (1,), 1, "a")
