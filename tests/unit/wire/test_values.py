"""The codec `values`: what goes in comes out, or an error says where what cannot travel is."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import json
import math
import pathlib
import sys
import threading
import types
import zoneinfo
from typing import Any, NamedTuple

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kubetorch as kt
from kubetorch.errors import SerializationError
from kubetorch.wire import codecs, values

UTC = datetime.timezone.utc


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 1


class Mode(str, enum.Enum):
    FAST = "fast"


class Right(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    name: str
    size: tuple[int, ...] = ()


class Pair(NamedTuple):
    left: Any
    right: Any = None


class Row(tuple[int, ...]):
    __slots__ = ()


class Model(pydantic.BaseModel):
    count: int
    tags: tuple[str, ...] = ()
    _secret: int = pydantic.PrivateAttr(default=3)


def sent(value: Any, modules: dict[str, str] | None = None) -> Any:
    """A value as it arrives."""
    segments = codecs.encode("values", value)
    sizes = [len(segment) for segment in segments]
    payload = b"".join(codecs.join(segments))
    return codecs.decode("values", codecs.split(memoryview(payload), sizes), modules=modules)


def is_same(first: Any, second: Any) -> bool:
    """Whether two values are the same, of the same types all the way down; NaN is itself."""
    if type(first) is not type(second):
        return False
    if isinstance(first, float):
        if first != first:
            return second != second
        return first == second and math.copysign(1, first) == math.copysign(1, second)
    if isinstance(first, complex):
        return is_same([first.real, first.imag], [second.real, second.imag])
    if isinstance(first, decimal.Decimal):
        return first.as_tuple() == second.as_tuple()
    if isinstance(first, dict):
        return is_same(list(first.items()), list(second.items()))
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(is_same, first, second))
    if dataclasses.is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first)]
        return all(is_same(getattr(first, name), getattr(second, name)) for name in names)
    if isinstance(first, (set, frozenset)):
        return first == second and {type(item) for item in first} == {type(item) for item in second}
    if isinstance(first, datetime.datetime):
        return first.isoformat() == second.isoformat() and first.fold == second.fold
    return bool(first == second)


#: Any text of Python, lone surrogates among it.
texts = st.text(st.characters(exclude_categories=()))
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
keys = st.recursive(
    plain
    | st.binary()
    | st.dates()
    | st.uuids()
    | st.sampled_from([Color.RED, Level.LOW, Mode.FAST, Right.READ | Right.WRITE])
    | st.decimals(allow_nan=False),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
scalars = (
    keys
    | st.floats()
    | st.integers(-40, 40).map(lambda power: (-3) ** abs(power * 500))
    | st.complex_numbers()
    | st.datetimes(timezones=st.none() | st.timezones())
    | st.times()
    | st.timedeltas()
    | st.decimals()
    | st.binary(min_size=4000, max_size=9000)
    | st.binary().map(bytearray)
    | st.sampled_from(
        [
            pathlib.Path("/a/b"),
            pathlib.PurePosixPath("x"),
            pathlib.PureWindowsPath("c:/x"),
            datetime.timezone(datetime.timedelta(hours=-3), "X"),
            zoneinfo.ZoneInfo("Europe/Berlin"),
        ]
    )
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(keys, inner)
        | st.dictionaries(st.sampled_from(["$", "$$", "a"]), inner)
        | st.sets(keys)
        | st.builds(Point, inner, st.tuples(inner))
        | st.builds(Slotted, texts, st.tuples(st.integers()))
    ),
    max_leaves=15,
)


def _untupled(value: Any) -> Any:
    """As a value arrives: tuples are lists but in keys, in sets and in fields of classes."""
    if isinstance(value, tuple):
        return [_untupled(item) for item in value]
    if isinstance(value, list):
        return [_untupled(item) for item in value]
    if isinstance(value, dict):
        return {key: _untupled(item) for key, item in value.items()}
    return value


@given(trees)
def test_every_value_arrives_as_it_was_sent(value: Any) -> None:
    assert is_same(sent(value), _untupled(value))


json_values = st.recursive(
    plain, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=20
)


@given(json_values)
def test_every_value_of_json_arrives_exactly(value: Any) -> None:
    assert is_same(sent(value), value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.text().filter(lambda text: text != "$"), inner)
        ),
    )
)
def test_what_json_carries_is_text_that_every_end_reads(value: Any) -> None:
    (segment,) = codecs.encode("values", value)
    assert is_same(json.loads(bytes(segment)), value)
    assert codecs.is_plain("values", bytes(segment))


@pytest.mark.parametrize(
    "value", [{1: 2}, {True: 1}, {None: 1, "null": 2}, {1.5: "a"}, {1: {2: 3}}]
)
def test_keys_stay_what_they_are(value: dict[Any, Any]) -> None:
    assert is_same(sent(value), value)


def test_a_dictionary_with_the_key_of_tags_is_not_taken_for_a_tag() -> None:
    for value in ({"$": ["int", "0x1"]}, {"$": 1}, {"a": {"$": ["bytes", [0, 9]]}, "$": {"$": 2}}):
        assert sent(value) == value


def test_tuples_arrive_as_lists_but_in_keys_in_sets_and_in_fields() -> None:
    assert is_same(sent((1, (2, 3))), [1, [2, 3]])
    assert is_same(sent({(1, (2,)): (3,)}), {(1, (2,)): [3]})
    assert is_same(sent({(1, 2)}), {(1, 2)})
    assert is_same(sent(Point((1, [(2,)]), {"a": (3,)})), Point((1, [(2,)]), {"a": (3,)}))
    assert is_same(sent(Point(Pair(1, (2,)))), Point(Pair(1, (2,))))


@pytest.mark.parametrize("value", [Color.RED, Level.LOW, Mode.FAST, Right.READ | Right.WRITE])
def test_members_of_enumerations_arrive_as_themselves(value: Any) -> None:
    arrived_values = sent([value, {value: value}])
    assert arrived_values[0] is value
    assert next(iter(arrived_values[1])) is value


def test_a_model_arrives_with_what_was_set_and_what_is_private() -> None:
    model = Model(count=1)
    model._secret = 5
    arrived_model = sent(model)
    assert arrived_model == model
    assert arrived_model._secret == 5
    assert arrived_model.model_fields_set == {"count"}


def test_nothing_of_a_class_runs_when_it_arrives() -> None:
    arrived_model = sent(Strict.model_construct(count=-1))
    assert arrived_model.count == -1
    assert sent(Counted(1)).n == 1
    assert Counted.constructed_count == 1


class Strict(pydantic.BaseModel):
    count: int

    @pydantic.field_validator("count")
    @classmethod
    def positive(cls, value: int) -> int:
        raise AssertionError("a validator runs")


@dataclasses.dataclass
class Counted:
    constructed_count = 0
    n: int

    def __post_init__(self) -> None:
        type(self).constructed_count += 1


@dataclasses.dataclass
class Grown:
    a: int

    def __post_init__(self) -> None:
        self.later = (self.a, self.a)


def test_what_a_class_sets_beside_its_fields_arrives_too() -> None:
    assert sent(Grown(2)).later == (2, 2)


def test_classes_of_json_are_what_they_are_without_their_class() -> None:
    class Name(str):
        pass

    assert is_same(sent(Name("x")), "x")


@pytest.mark.parametrize(
    "value",
    [
        Pair(1, (2, [Pair(3)])),
        collections.OrderedDict({"b": 1, (1, 2): [3]}),
        collections.Counter("aab"),
        collections.defaultdict(None, a=1),
        collections.defaultdict(list, a=[1]),
        collections.defaultdict(Point),
        collections.deque([1, Pair(2, 3)]),
        collections.deque("abc", maxlen=2),
    ],
    ids=repr,
)
def test_containers_of_the_standard_library_arrive_as_themselves(value: Any) -> None:
    (container,) = sent([value])
    assert type(container) is type(value)
    assert container == value
    assert list(container) == list(value)
    for name in ("default_factory", "maxlen"):
        assert getattr(container, name, None) is getattr(value, name, None)


def test_a_function_that_makes_defaults_does_not_travel() -> None:
    nested = collections.defaultdict(lambda: collections.defaultdict(int))
    nested["a"]["b"] += 1
    arrived_mapping = sent(nested)
    assert type(arrived_mapping) is dict
    assert arrived_mapping["a"]["new"] == 0


def test_a_class_that_may_run_anything_makes_no_defaults() -> None:
    for module, name in (("subprocess", "Popen"), ("builtins", "type"), ("threading", "Thread")):
        text = f'${{"$":["defaultdict",["{module}","{name}"],{{}}]}}'
        with pytest.raises(SerializationError, match="is no class to make values by"):
            codecs.decode("values", [text.encode()])


def test_a_named_tuple_without_a_name_is_a_list() -> None:
    class Local(NamedTuple):
        a: int

    assert is_same(sent([Local(1)]), [[1]])


def test_a_handle_arrives_as_one_of_the_same_service_whose_answers_are_not_unpickled() -> None:
    handle = kt.Cls("counter")
    handle.service_name, handle.serialization = "alice-counter", "pickle"
    handle._declare_options({"retries": 2, "retry_on": OSError, "stream_logs": False})
    arrived_handle = sent({"of": handle})["of"]
    assert type(arrived_handle) is kt.Cls
    assert (arrived_handle.name, arrived_handle.service_name, arrived_handle.namespace) == (
        *("counter", "alice-counter", "default"),
    )
    assert (arrived_handle.serialization, arrived_handle.stream_logs) == ("json", False)
    assert arrived_handle._options.retry_names == ("builtins.OSError",)


def test_a_tuple_of_a_class_without_names_is_a_tuple() -> None:
    assert is_same(sent(Point(Row((1, 2)))), Point((1, 2)))
    assert is_same(sent({Row((1, 2)): 3}), {(1, 2): 3})


# --------------------------------------------------------------------------------- classes by name


def _in_module(name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    for key, member in members.items():
        member.__module__, member.__qualname__ = name, key
        setattr(module, key, member)
    sys.modules[name] = module


def test_the_module_of_a_script_is_another_one_here() -> None:
    @dataclasses.dataclass
    class Item:
        a: int

    _in_module("kt_there", Item=Item)
    segments = [bytes(segment) for segment in codecs.encode("values", Item(1))]
    sys.modules["kt_here"] = sys.modules.pop("kt_there")
    try:
        assert codecs.decode("values", segments, modules={"kt_there": "kt_here"}) == Item(1)
    finally:
        del sys.modules["kt_here"]


def _sent_without(value: Any, module: str) -> Any:
    segments = [bytes(segment) for segment in codecs.encode("values", value)]
    del sys.modules[module]
    return codecs.decode("values", segments)


def test_without_its_class_a_value_is_the_json_that_it_always_was() -> None:
    class Number(enum.IntEnum):
        ONE = 1

    class Word(str, enum.Enum):
        A = "a"

    _in_module("kt_gone", Number=Number, Word=Word)
    value = {"n": [Number.ONE], "w": Word.A}
    assert is_same(_sent_without(value, "kt_gone"), {"n": [1], "w": "a"})


def test_without_its_class_a_value_that_was_no_json_is_an_error_that_names_the_class() -> None:
    @dataclasses.dataclass
    class Item:
        a: int

    class Kind(enum.Enum):
        A = 1

    _in_module("kt_gone", Item=Item)
    with pytest.raises(SerializationError, match="class Item is not in the module kt_gone here"):
        _sent_without(Item(1), "kt_gone")
    _in_module("kt_gone", Kind=Kind)
    with pytest.raises(SerializationError, match=r"Kind\.A is not in the module kt_gone here"):
        _sent_without(Kind.A, "kt_gone")


def test_a_class_that_no_module_has_is_refused_where_it_is_sent() -> None:
    @dataclasses.dataclass
    class Local:
        a: int

    class Number(enum.IntEnum):
        ONE = 1

    with pytest.raises(
        SerializationError, match=r"result\[0\] is a .*Local, and there is no class"
    ):
        codecs.encode("values", [Local(1)])
    assert is_same(sent(Number.ONE), 1)


def test_an_instance_of_a_class_that_was_defined_anew_is_refused_as_such() -> None:
    def define() -> type:
        redefined_class = dataclasses.make_dataclass("Redefined", ["a"])
        redefined_class.__module__ = "kt_cells"
        return redefined_class

    old, new = define(), define()
    _in_module("kt_cells", Redefined=new)
    with pytest.raises(
        SerializationError, match="of an earlier definition of the class, which kt_cells has anew"
    ) as raised:
        codecs.encode("values", old(1))
    assert "make the value again" in str(raised.value.hint)
    codecs.encode("values", new(1))


# ------------------------------------------------------------------------------- what cannot travel


class Opaque:
    pass


@dataclasses.dataclass
class Holder:
    model: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: int


@pytest.mark.parametrize(
    ("value", "expected_message"),
    [
        ({"rows": [0, 1, 2, Holder(Opaque())]}, r'result\["rows"\]\[3\]\.model is a .*Opaque'),
        ([threading.Lock()], r"result\[0\] is a _thread\.lock"),
        (lambda: 1, "result is a function"),
        ({"a": {(1, Frozen(1)): 2}}, r'result\["a"\] \(a key\)\[1\] is a .*Frozen, whose class'),
        ({"a": {Frozen(1)}}, r'result\["a"\] \(an element\) is a .*Frozen, whose class'),
        ({1: [object]}, r"result\[1\]\[0\] is a type"),
        (Model.model_construct(count=Opaque()), r"result\.count is a .*Opaque"),
        ([(i for i in ())], r"result\[0\] is a generator"),
        ([Pair(1, Opaque())], r"result\[0\]\.right is a .*Opaque"),
    ],
)  # fmt: skip
def test_what_cannot_travel_is_named_with_its_path(value: Any, expected_message: str) -> None:
    with pytest.raises(SerializationError, match=expected_message) as caught:
        codecs.encode("values", value)
    assert caught.value.hint


def test_arguments_are_named_as_the_caller_wrote_them() -> None:
    with pytest.raises(SerializationError, match=r'^args\[1\]\["x"\] is a '):
        codecs.encode("values", {"args": (1, {"x": Opaque()}), "kwargs": {}}, "")
    with pytest.raises(SerializationError, match=r'^kwargs\["lr"\] is a '):
        codecs.encode("values", {"args": (), "kwargs": {"lr": Opaque()}}, "")


def test_a_value_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(SerializationError, match="contains itself, or it is nested too deep"):
        codecs.encode("values", endless)


def test_a_key_whose_class_hashes_it_itself_is_refused() -> None:
    class Odd(enum.Enum):
        A = 1

        def __hash__(self) -> int:
            return 1

    _in_module("kt_odd", Odd=Odd)
    assert sent([Odd.A]) == [Odd.A]
    with pytest.raises(SerializationError, match="__hash__ or __eq__ of its own"):
        codecs.encode("values", {Odd.A: 1})
    del sys.modules["kt_odd"]


def test_a_program_with_another_limit_of_digits_is_understood() -> None:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        segments = codecs.encode("values", [10**6000])
    finally:
        sys.set_int_max_str_digits(limit)
    assert codecs.decode("values", segments) == [10**6000]


# -------------------------------------------------------------------------------------- the codec


def test_values_are_allowed_where_json_is() -> None:
    codecs.check_allowed("values", ["json"])
    with pytest.raises(SerializationError, match="not allowed"):
        codecs.check_allowed("values", ["pickle"])


def test_users_name_it_json() -> None:
    assert "values" not in codecs.CODECS


def test_a_pickle_that_nobody_asked_for_is_not_read() -> None:
    codecs.check_answer("pickle", "pickle")
    codecs.check_answer("json", "values")
    with pytest.raises(SerializationError, match="has not asked for"):
        codecs.check_answer("pickle", "values")


def test_large_buffers_are_not_copied() -> None:
    data = bytes(1_000_000)
    _, area = codecs.encode("values", {"a": data, "b": 1})
    assert isinstance(area, values.GatheredSegment)
    assert any(isinstance(part, memoryview) and part.obj is data for part in area.parts)


@pytest.mark.parametrize("kind", [argparse.Namespace, types.SimpleNamespace])
def test_a_namespace_is_refused_with_its_way_out(kind: type) -> None:
    with pytest.raises(SerializationError) as raised:
        codecs.encode("values", {"args": kind(lr=1)})
    assert raised.value.hint == "send vars(...) of it"


def test_what_pickle_may_not_carry_either_has_a_hint_of_its_own() -> None:
    with open(__file__) as file:  # noqa: PTH123  # what a user would have
        for refused_value, expected_hint in (
            (lambda: 1, "top level of a module"),
            (file, "send its path"),
        ):
            with pytest.raises(SerializationError) as refused:
                values.encode(refused_value)
            assert expected_hint in (refused.value.hint or "")
