"""Arguments of constructors: what a call may be given, a constructor may be given."""

import argparse
import importlib
import math
import sys

import pytest

import kubetorch as kt
from kubetorch.sdk import backend

TRAINER = """
import collections
from dataclasses import dataclass
from typing import NamedTuple

@dataclass
class Settings:
    rate: float = 0.1
    sizes: tuple = ()

class Shape(NamedTuple):
    width: int
    height: int

class Trainer:
    def __init__(self, settings, more=None):
        self.settings, self.more = settings, more

    def look(self):
        return [type(self.settings).__name__, self.settings, self.more]

    def ask(self, handle):
        return [type(handle).__name__, handle(2), self.more(3) if self.more else None]

def double(value):
    return 2 * value

def collect(value):
    return [type(value).__name__, value]
"""


@pytest.fixture(scope="module")
def trainer(shared_service_home, tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    (folder / "pyproject.toml").touch()
    (folder / "trainer_module.py").write_text(TRAINER)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("trainer_module")
    sys.path.remove(str(folder))
    del sys.modules["trainer_module"]
    for name in ("trainer", "double", "collect"):
        backend.route(backend.session(), "default", name).close()


def deployed(trainer, **init_args):
    return kt.cls(trainer.Trainer).to(kt.Compute(cpus="0.1"), init_args=init_args)


def test_a_constructor_gets_the_values_that_a_call_gets(trainer):
    settings = trainer.Settings(0.5, (1, 2))
    more = {1: math.inf, "shape": trainer.Shape(1, 2)}
    handle = deployed(trainer, settings=settings, more=more)
    kind, same, received_more = handle.look()
    assert (kind, same, received_more) == ("Settings", settings, more)
    assert type(received_more["shape"]) is trainer.Shape


def test_what_was_given_is_known_to_a_handle_by_name(trainer):
    deployed(trainer, settings=trainer.Settings(0.25))
    assert kt.cls(name="trainer").init_args == {"settings": trainer.Settings(0.25)}


def test_arguments_that_are_plain_stay_a_json_object(trainer):
    handle = deployed(trainer, settings=[1, "a"])
    view = backend.session().ask(lambda session: session.get_workload("default", "trainer"))
    stored = backend.session().ask(lambda session: session.get_blob(view.spec.init_args, "default"))
    assert stored == b'{"settings":[1,"a"]}'
    assert handle.look() == ["list", [1, "a"], None]


def test_what_cannot_travel_is_refused_before_anything_is_deployed(trainer):
    with pytest.raises(
        kt.SpecError, match=r"init_args.*settings.* is an argparse\.Namespace"
    ) as it:
        deployed(trainer, settings=argparse.Namespace(rate=1))
    assert "vars(...)" in str(it.value.hint)


def test_handles_travel_as_arguments_of_calls_and_of_constructors(trainer):
    double = kt.fn(trainer.double).to(kt.Compute(cpus="0.1"))
    handle = deployed(trainer, settings=None, more=double)
    assert handle.ask(double) == ["Fn", 4, 6]


def test_named_tuples_travel_to_a_function_and_back(trainer):
    collect = kt.fn(trainer.collect).to(kt.Compute(cpus="0.1"))
    name, shape = collect(trainer.Shape(1, 2))
    assert (name, shape) == ("Shape", trainer.Shape(1, 2))
    assert type(shape) is trainer.Shape
