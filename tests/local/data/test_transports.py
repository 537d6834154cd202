"""Tensors of a window from process to process, past the store; and back to the store by faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kubetorch.sdk import backend
from tests.local.tensor_members import Member, get, is_direct, put

pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(300)  # torch is imported by several processes


@pytest.fixture(scope="module")
def members(
    shared_service_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Member]]:
    """A putter and two getters."""
    backend.session().controller()  # the local service runs
    folder = tmp_path_factory.mktemp("members")
    members = [Member(folder, f"member{number}") for number in range(3)]
    try:
        for member in members:
            assert member.answer() == "ready"
        yield members
    finally:
        for member in members:
            member.end()
        backend.close_all()


@pytest.fixture
def victim(members: list[Member], tmp_path: Path) -> Iterator[Member]:
    """A further getter, which may die."""
    victim = Member(tmp_path, "victim")
    try:
        assert victim.answer() == "ready"
        yield victim
    finally:
        victim.end()


@pytest.mark.parametrize("options", ["", ", pack=True"], ids=["frames", "packed"])
def test_getters_get_the_bits_of_the_putter(members: list[Member], options: str) -> None:
    putter, *getters = members
    key = f"bits{len(options)}"
    for getter in getters:
        get(getter, key, 1, 3)
    put(putter, key, 1, 3, options)
    assert [getter.answer() for getter in getters] == [True, True]
    putter.answer()
    assert all(map(is_direct, getters))


def test_a_destination_of_any_strides_is_filled_in_place(members: list[Member]) -> None:
    putter, *getters = members
    for getter in getters:
        getter.tell(
            """
            dest = weights(0)
            dest["model"]["layers.0"] = target = torch.zeros(2048, 1024).t()
            dest["model"]["eighth"] = torch.zeros(1024, 4096).to(torch.float8_e4m3fn)[:, ::2]
            dest["model"]["norm"] = torch.nn.Parameter(torch.zeros(17))
            is_dest = get("strides", 3, dest=dest) is dest and dest["model"]["layers.0"] is target
            answer = is_dest and target.stride() == (1, 1024) and is_version(dest, 5)
            """
        )
    put(putter, "strides", 5, 3)
    assert [getter.answer() for getter in getters] == [True, True]
    putter.answer()
    assert all(map(is_direct, getters))


def test_the_next_window_of_the_same_members_has_their_communicator(members: list[Member]) -> None:
    putter, *getters = members
    names = []
    for seed in (1, 2):
        for getter in getters:
            get(getter, "policy", seed, 3)
        put(putter, "policy", seed, 3)
        assert [getter.answer() for getter in getters] == [True, True]
        putter.answer()
        assert all(map(is_direct, getters))
        names.append([member.ask("answer = groups()") for member in members])
    assert names[0] == names[1]
    assert names[0][0]
    # Other members have another one.
    get(getters[0], "policy", 3, 2)
    put(putter, "policy", 3, 2)
    assert getters[0].answer() is True
    putter.answer()
    assert is_direct(getters[0])
    assert set(putter.ask("answer = groups()")) > set(names[1][0])
    assert getters[1].ask("answer = groups()") == names[1][2]
    # A child of a fork has none, and ends.
    getters[1].tell(
        """
        child = os.fork() or os._exit(len(groups()))
        answer = os.waitpid(child, 0)[1]
        """
    )
    assert getters[1].answer() == 0


def test_threads_of_a_process_are_members_of_their_own(members: list[Member]) -> None:
    member = members[0]
    for seed in (1, 2):
        member.tell(
            f"""
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(3) as pool:
                gets = [pool.submit(get, "threads", 3) for _ in range(2)]
                kt.put("threads", src=weights({seed}), broadcast=window(3))
                answer = [is_version(pending.result(), {seed}) for pending in gets]
            """
        )
        assert member.answer() == [True, True]
        assert is_direct(member)


def test_tensors_that_change_while_they_are_put_come_from_the_store(members: list[Member]) -> None:
    putter, getter, _ = members
    putter.ask(
        """
        value = weights(7)
        options = {"src": value, "broadcast": window(2)}
        thread = threading.Thread(target=kt.put, args=("torn",), kwargs=options)
        thread.start()
        while find_key(backend.session(), "default", "torn") is None:
            pass
        value["model"]["layers.1"].add_(1)
        """
    )
    get(getter, "torn", 7, 2)
    assert getter.answer() is True
    assert putter.ask("thread.join(60); answer = thread.is_alive()") is False
    assert "the bytes that came are not those of the version" in getter.news()


def test_a_part_and_a_small_value_come_from_the_store_without_a_word(members: list[Member]) -> None:
    putter, getter, _ = members
    getter.tell("answer = get('part', 2, only=['model.norm'])['model']['norm'].shape")
    put(putter, "part", 1, 2)
    assert getter.answer() == [17]
    putter.answer()
    getter.tell("answer = get('small', 2)['w'].shape")
    putter.tell("kt.put('small', src={'w': torch.zeros(5)}, broadcast=window(2))")
    assert getter.answer() == [5]
    putter.answer()
    assert "from pods" not in (news := getter.news())
    assert "process to process" not in news + putter.news()


def test_two_versions_of_a_key_in_a_window_come_from_the_store(members: list[Member]) -> None:
    *putters, getter = members
    getter.tell("value = get('both', 3); answer = is_version(value, 1) or is_version(value, 2)")
    for seed, putter in enumerate(putters, 1):
        put(putter, "both", seed, 3)
    assert getter.answer() is True
    for putter in putters:
        putter.answer()
    assert "from pods" not in getter.news()


@pytest.mark.faults
def test_who_does_not_find_the_putter_gets_it_from_the_store(members: list[Member]) -> None:
    putter, getter, _ = members
    get(getter, "gone", 4, 2)
    putter.ask(
        """
        progress = Progress("storing", "gone")
        version = tensors.put(backend.session(), "default", "gone", weights(4), progress)
        with direct.Source(backend.session(), version, is_packed=False) as source:
            assert source.offer
        wait("gone", 2, source)  # nobody listens any more, as if it had died
        """
    )
    assert getter.answer() is True
    assert not is_direct(getter)


@pytest.mark.faults
def test_a_getter_that_died_before_the_rendezvous_is_left_out(
    members: list[Member], victim: Member
) -> None:
    putter, getter, _ = members
    victim.tell(
        """
        wait("early", 3, direct.Sink(backend.session(), "early", None, ()))
        os._exit(1)
        """
    )
    get(getter, "early", 1, 3)
    put(putter, "early", 1, 3)
    assert getter.answer() is True
    putter.answer()
    assert is_direct(getter)


@pytest.mark.faults
@pytest.mark.parametrize("steps", [0, 1, 2], ids=["at the start", "in the group", "in between"])
def test_who_loses_a_member_gets_it_from_the_store(
    members: list[Member], victim: Member, steps: int
) -> None:
    putter, *getters = members
    key = f"lost{steps}"
    victim.tell(
        f"""
        sink = direct.Sink(backend.session(), "{key}", None, ())
        sink.meet(wait("{key}", 4, sink))
        sink._link.send(Ready())
        start = sink._link.receive(Start, 60)
        group = ProcessGroup(("gloo", "cpu"), start, "127.0.0.1")
        # Frames as the putter's, of which it takes the first: each step but the first has one.
        frames = [torch.empty(8 * 1024**2, dtype=torch.uint8) for _ in range(4)]
        parts = group.receive(frames[: {steps} - 1])
        for _ in range({steps}):
            next(parts)
        os._exit(1)
        """
    )
    for getter in getters:
        get(getter, key, 1, 4)
    put(putter, key, 1, 4)
    assert [getter.answer() for getter in getters] == [True, True]
    putter.answer()
    assert "getters get it from the store" in putter.news()
    # Once there is a group, a getter for which the member did nothing may have got all.
    assert [is_direct(getter) for getter in getters] == [False, False] or steps


@pytest.mark.faults
def test_getters_of_a_putter_that_dies_get_it_from_the_store(
    members: list[Member], victim: Member
) -> None:
    *getters, _ = members
    victim.tell(
        """
        progress = Progress("storing", "widow")
        version = tensors.put(backend.session(), "default", "widow", weights(1), progress)
        source = direct.Source(backend.session(), version, is_packed=False)
        plan = direct.plans.plan(wait("widow", 3, source).offers, "widow")
        links = direct.rendezvous.gather(source._listener, plan.offer.token, plan.getters)
        answer = len(links)
        """
    )
    for getter in getters:
        get(getter, "widow", 1, 3)
    assert victim.answer() == 2
    victim.end()
    assert [getter.answer() for getter in getters] == [True, True]
    assert [is_direct(getter) for getter in getters] == [False, False]


@pytest.mark.faults
def test_a_member_that_stands_still_holds_up_nobody_for_long(
    members: list[Member], victim: Member
) -> None:
    putter, *getters = members
    victim.tell(
        """
        sink = direct.Sink(backend.session(), "still", None, ())
        sink.meet(wait("still", 4, sink))
        sink._link.send(Ready())
        sink._link.receive(Start, 60)
        """
    )
    for getter in getters:
        get(getter, "still", 1, 4)
    put(putter, "still", 1, 4)
    assert [getter.answer() for getter in getters] == [True, True]
    putter.answer()
    for getter in getters:
        assert not is_direct(getter)
