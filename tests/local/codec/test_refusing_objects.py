"""Objects that raise whatever they are asked are kept, passed and raised as any others."""

import pytest

import kubetorch as kt
from tests.local.user_project import UserProject

#: A class whose instances can be called and pickled, and nothing else.
REFUSING = """
class Asked(BaseException):
    pass

def refuse(name):
    def method(self, *args, **kwargs):
        raise Asked(name)
    return method

ASKED = ("bool", "len", "eq", "ne", "lt", "hash", "repr", "str", "format", "iter", "contains",
         "getitem", "index", "int", "float", "sizeof", "getattr", "dir")
METHODS = {f"__{name}__": refuse(f"__{name}__") for name in ASKED}

def call(self, *args):
    return "called"

Refusing = type("Refusing", (), METHODS | {
    "__call__": call, "__reduce_ex__": lambda self, protocol: (Refusing, ()),
})
RefusingError = type("RefusingError", (Exception,), METHODS)
"""

CALLS = """
import sys
import kubetorch as kt
from refusing import Refusing, RefusingError

DEFAULT = Refusing()

def takes(x=DEFAULT, *, y=DEFAULT):
    return type(x).__name__, type(y).__name__

def gives():
    return Refusing()

def yields():
    yield Refusing()
    yield Refusing()

def raises():
    raise RefusingError("the text")

def raises_with_argument():
    raise ValueError(Refusing())

if __name__ == "__main__":
    codec = sys.argv[1]
    compute = kt.Compute(cpus="0.1", allowed_serialization=["json", "pickle"])
    one = Refusing()

    def outcome(call):
        try:
            return call()
        except Exception as error:
            return type(error).__name__

    remote = {}
    for function in (takes, gives, yields, raises, raises_with_argument):
        remote[function.__name__] = kt.fn(function).to(compute).options(serialization=codec)
    print(outcome(lambda: remote["takes"]()))
    print(outcome(lambda: remote["takes"](one, y=one)))
    print(outcome(lambda: remote["takes"].spawn(one).result()))
    print(outcome(lambda: list(remote["takes"].map([one, one]))))
    print(outcome(lambda: type(remote["gives"]()).__name__))
    print(outcome(lambda: [type(value).__name__ for value in remote["yields"]()]))
    print(outcome(lambda: remote["raises"]()))
    print(outcome(lambda: remote["raises_with_argument"]()))
"""

INSTANCES = """
import functools
import kubetorch as kt
from refusing import Refusing

class Model:
    shared = Refusing()

    class Described:
        def __get__(self, instance, owner):
            raise RuntimeError("outside of a request")
    described = Described()

    def __init__(self, x=Refusing()):
        self.compiled = Refusing()
        self.x = x
        vars(self)[3] = "a name that is no text"

    def add(self, x, y=Refusing()):
        return x + 1

    def run(self):
        return self.compiled()

class Closed(Refusing):
    def __init__(self):
        pass

    def add(self, x):
        return x + 1

    async def add_async(self, x):
        return x + 2

def registered():
    done = []
    callback = Refusing()
    for other in (callback, Refusing(), callback, done.clear):
        kt.on_preempt(other)
    from kubetorch.pod.user_process.current_call import callbacks
    return sum(len(known) for known in callbacks._by_call.values())

if __name__ == "__main__":
    compute = kt.Compute(cpus="0.1")
    model = kt.cls(Model).to(compute)
    print(model.add(1), model.run(), model.compiled())
    try:
        model.nothing()
    except AttributeError as error:
        print(" ".join(str(error).split()))
    closed = kt.cls(Closed).to(compute)
    print(closed.add(1), closed.add_async(1))
    print(kt.fn(registered).to(compute)())
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture
def run(tmp_path):
    project = UserProject(tmp_path / "shop")
    project.write("refusing.py", REFUSING)

    def run(source, *arguments):
        completed = project.run(project.write("program.py", source), *arguments, timeout=300)
        assert completed.returncode == 0, completed.stderr
        return completed.stdout.splitlines()

    yield run
    for view in kt.globals.controller_client().list_workloads():
        kt.Module.from_name(view.spec.name, view.spec.namespace).teardown()


def test_pickle_carries_what_refuses_to_be_looked_at(run):
    assert run(CALLS, "pickle") == [
        "('Refusing', 'Refusing')",
        "('Refusing', 'Refusing')",
        "('Refusing', 'Refusing')",
        "[('Refusing', 'Refusing'), ('Refusing', 'Refusing')]",
        "Refusing",
        "['Refusing', 'Refusing']",
        "RefusingError",
        "ValueError",
    ]


def test_json_refuses_what_it_cannot_carry_without_looking_at_it(run):
    assert run(CALLS, "json") == [
        "['Refusing', 'Refusing']",
        *["SerializationError"] * 5,
        "RefusingError",
        "ValueError",
    ]


def test_an_instance_may_keep_what_refuses_to_be_looked_at(run):
    sums, names, closed, registered = run(INSTANCES)

    assert sums == "2 called called"
    assert names.endswith("it has Described, add, compiled, run, shared, x")
    assert closed == "2 3"
    assert registered == "3"
