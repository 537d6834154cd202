"""Tensors from GPU to GPU: by CUDA IPC on one machine, and by NCCL where that is not possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kubetorch.sdk import backend
from tests.local.tensor_members import Member, is_direct

torch = pytest.importorskip("torch")
GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(GPUS < 1, reason="this machine has no GPU that torch can use"),
]
needs_two = pytest.mark.skipif(GPUS < 2, reason="NCCL needs two GPUs, a rank for each of them")


@pytest.fixture
def new_member(shared_service_home: Path, tmp_path: Path) -> Iterator[Callable[..., Member]]:
    """Starts a process that sees some GPUs, of which it uses the first."""
    backend.session().controller()  # the local service runs
    members: list[Member] = []

    def new(visible: str) -> Member:
        member = Member(tmp_path, f"member{len(members)}", CUDA_VISIBLE_DEVICES=visible)
        members.append(member)
        assert member.answer() == "ready"
        return member

    try:
        yield new
    finally:
        for member in members:
            member.end()
        backend.close_all()


def fill(getter: Member, key: str, seed: int, size: int) -> None:
    getter.tell(
        f"""
        dest = weights(0, "cuda")
        answer = get("{key}", {size}, dest=dest) is dest and is_version(dest, {seed})
        """
    )


def pass_on(putter: Member, getters: list[Member], key: str, seed: int, options: str = "") -> None:
    """Put from the putter's GPU; all getters have it afterwards, and none of it from the store."""
    size = len(getters) + 1
    for getter in getters:
        fill(getter, key, seed, size)
    putter.tell(f"kt.put('{key}', src=weights({seed}, 'cuda'), broadcast=window({size}{options}))")
    assert [getter.answer() for getter in getters] == [True] * len(getters)
    putter.answer()
    assert all(map(is_direct, getters))


@pytest.mark.parametrize("options", ["", ", pack=True"], ids=["frames", "packed"])
def test_processes_of_one_gpu_get_the_bits_by_cuda_ipc(
    new_member: Callable[..., Member], options: str
) -> None:
    putter, *getters = (new_member("0") for _ in range(3))
    for seed in (1, 2):
        pass_on(putter, getters, "policy", seed, options)
    assert putter.ask("answer = groups('nccl', 'cuda:0')") == []


@needs_two
def test_processes_that_see_each_others_gpus_get_the_bits_by_cuda_ipc(
    new_member: Callable[..., Member],
) -> None:
    pass_on(new_member("0,1"), [new_member("1,0")], "peers", 1)


@needs_two
@pytest.mark.parametrize("options", ["", ", pack=True"], ids=["frames", "packed"])
def test_processes_that_do_not_see_each_others_gpus_get_the_bits_by_nccl(
    new_member: Callable[..., Member], options: str
) -> None:
    putter, getter = new_member("0"), new_member("1")
    names = []
    for seed in (1, 2):
        pass_on(putter, [getter], "policy", seed, options)
        names.append(putter.ask("answer = groups('nccl', 'cuda:0')"))
    assert len(names[0]) == 1
    assert names[0] == names[1]


@needs_two
@pytest.mark.faults
def test_a_member_that_dies_ends_no_other_process(new_member: Callable[..., Member]) -> None:
    putter, victim = new_member("0"), new_member("1")
    victim.tell(
        """
        sink = direct.Sink(backend.session(), "lost", weights(0, "cuda"), ())
        sink.meet(wait("lost", 2, sink))
        sink._link.send(Ready())
        sink._link.receive(Start, 60)
        os._exit(1)
        """
    )
    putter.tell("kt.put('lost', src=weights(1, 'cuda'), broadcast=window(2))")
    putter.answer()
    assert "getters get it from the store" in putter.news()
    # It can use its GPU, and the next window.
    pass_on(putter, [new_member("1")], "lost", 2)


def test_a_cpu_in_the_window_of_a_gpu_gets_it_from_the_store(
    new_member: Callable[..., Member],
) -> None:
    putter, getter = new_member("0"), new_member("0")
    getter.tell("answer = is_version(get('mixed', 2), 1)")
    putter.tell("kt.put('mixed', src=weights(1, 'cuda'), broadcast=window(2))")
    assert getter.answer() is True
    putter.answer()
    assert "from pods" not in getter.news()
