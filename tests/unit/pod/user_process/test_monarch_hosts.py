"""How a callable gets the hosts of Monarch, with a module that stands for Monarch."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from kubetorch.errors import SpecError
from kubetorch.pod.user_process.frameworks import MONARCH_HOSTS, MonarchHosts, check_allocators


class Monarch(ModuleType):
    """Attaches to hosts."""

    def __init__(self) -> None:
        super().__init__("monarch.actor")
        self.transport = ""

    def enable_transport(self, address):
        self.transport = address

    def attach_to_workers(self, *, ca, workers):
        assert ca == "trust_all_connections"
        return SimpleNamespace(hosts=workers)


@pytest.fixture(autouse=True)
def monarch(monkeypatch):
    fake_monarch = Monarch()
    monkeypatch.setitem(sys.modules, "monarch.actor", fake_monarch)
    monkeypatch.setenv(MONARCH_HOSTS, "tcp://10.0.0.9:1,tcp://10.0.0.8:2")
    monkeypatch.setenv("RANK", "0")
    return fake_monarch


def test_a_function_gets_the_hosts_that_it_was_not_given(monarch):
    def train(steps, host_mesh=None):
        """Wants them."""

    hosts, arguments = MonarchHosts(), {}
    hosts.give(train, [3], arguments)

    assert arguments["host_mesh"].hosts == ["tcp://10.0.0.9:1", "tcp://10.0.0.8:2"]
    assert monarch.transport == "tcp://10.0.0.9:0"
    for args, kwargs in (([3, "mine"], {}), ([3], {"host_mesh": "mine"})):
        before = dict(kwargs)
        hosts.give(train, args, kwargs)
        assert kwargs == before


def test_who_does_not_take_the_hosts_is_not_connected(monarch):
    def train(steps):
        """Does without."""

    hosts, arguments = MonarchHosts(), {}
    hosts.give(train, [3], arguments)

    assert (arguments, monarch.transport) == ({}, "")


def test_methods_and_the_constructor_of_a_class_get_them_too():
    class Trainer:
        def __init__(self, host_mesh):
            self.hosts = host_mesh.hosts

        def step(self, host_mesh):
            return host_mesh.hosts == self.hosts

    hosts, arguments = MonarchHosts(), {}
    hosts.give(Trainer, (), arguments)
    trainer = Trainer(**arguments)
    hosts.give(trainer.step, (), step_arguments := {})

    assert trainer.step(**step_arguments)


def test_other_ranks_have_none(monarch, monkeypatch):
    monkeypatch.setenv("RANK", "1")

    def train(host_mesh):
        """Runs on the first rank alone."""

    hosts, arguments = MonarchHosts(), {}
    hosts.give(train, (), arguments)

    assert (arguments, monarch.transport) == ({"host_mesh": None}, "")


def test_an_allocator_is_refused_by_its_name():
    class Trainer:
        def step(self, allocator):
            """As with Monarch 0.1."""

    def train(host_mesh):
        """As with Monarch 0.7."""

    check_allocators(train)
    for target in (Trainer, Trainer.step):
        with pytest.raises(SpecError, match=r"Trainer.step has a parameter 'allocator'"):
            check_allocators(target)


def test_a_callable_without_a_signature_takes_none():
    hosts, arguments = MonarchHosts(), {}
    hosts.give(type, (1,), arguments)
    check_allocators(type)
    assert arguments == {}
