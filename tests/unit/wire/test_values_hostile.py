"""Whatever arrives as `values`: no code of a class runs, nothing is imported, little is made."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import struct
import sys
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any, ClassVar, NoReturn

import numpy
import pandas
import polars
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kubetorch.errors import SerializationError
from kubetorch.wire import arrow_streams, codecs, values

pytestmark = pytest.mark.security

#: Names of the methods that ran.
RAN: list[str] = []


def _run(*_: object, **__: object) -> NoReturn:
    RAN.append(sys._getframe(1).f_code.co_name)
    raise AssertionError("code of the class runs")


class Meta(type):
    """A metaclass with code of its own."""

    __call__ = __getattribute__ = __getattr__ = __setattr__ = __instancecheck__ = _run  # type: ignore[assignment]
    __subclasscheck__ = __bool__ = __repr__ = __str__ = __iter__ = __len__ = __contains__ = _run


_METHODS = [
    "__new__", "__init__", "__post_init__", "__setattr__", "__getattr__", "__getattribute__",
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__repr__", "__str__",
    "__format__", "__bool__", "__len__", "__iter__", "__contains__", "__getitem__", "__call__",
    "__int__", "__float__", "__index__", "__array__", "__fspath__", "__reduce__", "__reduce_ex__",
    "__setstate__", "__getstate__", "__copy__", "__deepcopy__", "__enter__", "__add__", "__radd__",
    "__instancecheck__", "__subclasscheck__", "__arrow_array__", "__arrow_c_array__", "__buffer__",
    "__array_interface__", "__array_struct__", "__dataframe__", "__class_getitem__",
]  # fmt: skip


class Bomb(metaclass=Meta):
    """A dataclass of which each method says that it ran."""

    __dataclass_fields__: ClassVar[dict[str, Any]] = {}
    ndim = shape = dtype = tz = freq = property(_run)
    __dict__ = property(_run)  # type: ignore[assignment]


for _name in _METHODS:
    type.__setattr__(Bomb, _name, _run)


class Crate(dict, metaclass=Meta):  # type: ignore[type-arg,misc]
    """A dictionary that is a dataclass, of which each method says that it ran."""

    __dataclass_fields__: ClassVar[dict[str, Any]] = {}


for _name in {*_METHODS, "__setitem__", "update", "items", "keys", "values", "get"}:
    type.__setattr__(Crate, _name, _run)


class Safe(enum.Enum):
    A = 1


@dataclasses.dataclass
class Final:
    path: str

    def __del__(self) -> None:
        RAN.append("__del__")


class Odd(enum.Enum):
    """An enumeration with code of its own."""

    A = 1

    def __hash__(self) -> int:
        RAN.append("Odd.__hash__")
        return 1

    @classmethod
    def _missing_(cls, value: object) -> Any:
        RAN.append("_missing_")
        return cls.A


MODULE = __name__
BOMB = {"$": ["object", MODULE, "Bomb", {}]}
FINAL = {"$": ["object", MODULE, "Final", {"path": "/"}]}
ODD = {"$": ["enum", MODULE, "Odd", "A"]}


def _decode(value: object, area: bytes = b"") -> Any:
    text = b"$" + (value if isinstance(value, bytes) else json.dumps(value).encode())
    return codecs.decode("values", [text, area] if area else [text])


def _try(value: object, area: bytes = b"") -> None:
    try:
        decoded_value = _decode(value, area)
    except SerializationError:
        return
    assert decoded_value is not NotImplemented


@pytest.fixture(autouse=True)
def _nothing_runs() -> Iterator[None]:
    RAN.clear()
    before = set(sys.modules)
    yield
    assert RAN == []
    # `tzdata` has the time zones of Python where the system has none.
    allowed_prefixes = tuple(
        f"{name}." for name in (*values.LIBRARIES, "kubetorch", "hypothesis", "tzdata")
    )
    imported = {
        name for name in set(sys.modules) - before if not f"{name}.".startswith(allowed_prefixes)
    }
    assert {
        name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names
    } == set()


def test_an_instance_is_made_without_any_of_its_code() -> None:
    decoded_values = _decode([BOMB])
    assert type(decoded_values[0]) is Bomb


#: A place for a buffer of eight bytes.
BUFFER_SPAN = [0, 8]
TAGS: dict[str, list[Any]] = {
    "dict": [[["a", 1]]],
    "tuple": [[1]],
    "set": [[1]],
    "frozenset": [[1]],
    "again": [0],
    "int": ["0x1"],
    "str": ["61"],
    "bytes": [BUFFER_SPAN],
    "bytearray": [BUFFER_SPAN],
    "complex": [1.0, 1.0],
    "date": ["2020-01-01"],
    "time": ["00:00:00", 0, None],
    "datetime": ["2020-01-01T00:00:00", 0, None],
    "timedelta": [1, 2, 3],
    "timezone": [{"$": ["timedelta", 0, 60, 0]}, "x"],
    "zone": ["UTC"],
    "decimal": ["1.0"],
    "uuid": ["0" * 32],
    "path": ["PosixPath", "/"],
    "enum": [MODULE, "Safe", "A", 1],
    "named": [MODULE, "Safe", [1]],
    "object": [MODULE, "Bomb", {"a": 1}],
    "container": [MODULE, "Crate", {"a": 1}, {"b": 2}],
    "ordered": [{"a": 1}],
    "counter": [{"a": 1}],
    "defaultdict": [[MODULE, "Bomb"], {"a": 1}],
    "deque": [[1, 2], 2],
    "handle": [
        "cls",
        {
            "name": "a",
            "service": "u-a",
            "namespace": "ns",
            "options": {"retries": 1, "timeout": 1.5, "retry_on": {"$": ["tuple", ["a.b"]]}},
        },
    ],
    "ref": ["r" * 22, "laptop", 8, [8], BUFFER_SPAN],
    "np.array": ["<f8", [1], "C", BUFFER_SPAN],
    "np.scalar": ["<f8", "0" * 16, 0.0],
    "np.list": ["<f8", BUFFER_SPAN],
    "np.str": ["a"],
    "np.bytes": [BUFFER_SPAN],
    "np.objects": [[2], ["a", 1]],
    "np.strings": [[1], ["a"], [0, 0]],
    "pd.frame": [
        [["array", {"$": ["np.array", "<f8", [1], "C", BUFFER_SPAN]}]],
        ["range", 0, 1, 1, None],
        ["range", 0, 1, 1, None],
        None,
        {"a": 1},
    ],
    "pd.series": [
        ["masked", {"$": ["np.array", "<i8", [1], "C", BUFFER_SPAN]}, BOMB, "Int64"],
        ["range", 0, 1, 1, None],
        "a",
    ],
    "pd.index": [["multi", [["range", 0, 1, 1, None]], [BOMB], ["a"]]],
    "pd.Timestamp": [{"$": ["np.scalar", "<M8[ns]", "0" * 16]}, {"$": ["zone", "UTC"]}],
    "pd.Timedelta": [{"$": ["np.scalar", "<m8[ns]", "0" * 16]}],
    "pd.missing": ["NA"],
    "pa.Table": [BUFFER_SPAN],
    "pa.RecordBatch": [BUFFER_SPAN],
    "pa.ChunkedArray": [BUFFER_SPAN],
    "pa.Array": [BUFFER_SPAN],
    "pl.DataFrame": [BUFFER_SPAN],
    "pl.Series": [BUFFER_SPAN],
}


def test_each_kind_of_tag_is_attacked_here() -> None:
    assert values.UNPACKERS.keys() - {"torch.tensor"} == TAGS.keys()


def _replaced(value: Any, node_number: int, replacement: Any) -> tuple[Any, int]:
    """A copy of a tree where the node number `at` is another one; how many are left to count."""
    if node_number == 0:
        return replacement, -1
    node_number -= 1
    if isinstance(value, list):
        copied_items: list[Any] = []
        for item in value:
            new, node_number = (
                _replaced(item, node_number, replacement)
                if node_number >= 0
                else (item, node_number)
            )
            copied_items.append(new)
        return copied_items, node_number
    if isinstance(value, dict):
        copy = {}
        for key, item in value.items():
            copy[key], node_number = (
                _replaced(item, node_number, replacement)
                if node_number >= 0
                else (item, node_number)
            )
        return copy, node_number
    return value, node_number


STRANGE = [BOMB, FINAL, ODD, None, True, -1, 2**63, 1e308, "", "O", "x" * 50, [], [[]], {}, [BOMB]]


@pytest.mark.parametrize("kind", TAGS)
def test_no_part_of_a_tag_is_taken_for_what_it_is_not(kind: str) -> None:
    tag = {"$": [kind, *TAGS[kind]]}
    for strange_value in STRANGE:
        for node_number in range(40):
            new, nodes_left = _replaced(tag, node_number, strange_value)
            if nodes_left >= 0:
                break
            _try(new, bytes(8))


@pytest.mark.parametrize("kind", TAGS)
def test_tags_of_other_lengths_are_refused(kind: str) -> None:
    parts = TAGS[kind]
    for wrong_parts in ([], parts[:-1], [*parts, 1], [*parts, BOMB], [*parts, None, None, None]):
        _try({"$": [kind, *wrong_parts]}, bytes(8))


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(
        [BOMB, ODD, FINAL, "<f8", "O", MODULE, "Bomb", "range", "array", [0, 8], "UTC"]
    ),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3) | st.just("$"), inner, max_size=2)
        | st.builds(
            lambda kind, parts: {"$": [kind, *parts]},
            st.sampled_from([*TAGS]),
            st.lists(inner, max_size=6),
        )
    ),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(junk, st.binary(max_size=64))
def test_any_tree_is_a_value_or_refused(value: Any, area: bytes) -> None:
    _try(value, area)


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_refused(data: bytes) -> None:
    _try(data)
    for segments in ([data], [b"$" + data, data]):
        try:
            codecs.decode("values", segments)
        except SerializationError:
            continue


# ------------------------------------------------------------------------------------- by name


@pytest.mark.parametrize(
    "key", [BOMB, ODD, {"$": ["tuple", [1, ODD]]}, {"$": ["frozenset", [BOMB]]}]
)
def test_nothing_is_hashed_that_has_code_for_it(key: object) -> None:
    for value in ({"$": ["dict", [[key, 1]]]}, {"$": ["set", [key]]}, {"$": ["frozenset", [key]]}):
        with pytest.raises(SerializationError, match="to hash"):
            _decode(value)
    array = {"$": ["np.objects", [1], [key]]}
    for index in (["values", ["array", array], None, None], ["range", 0, 1, 1, key]):
        with pytest.raises(SerializationError, match="to hash"):
            _decode({"$": ["pd.index", index]})


def test_a_class_with_a_finaliser_is_not_made() -> None:
    with pytest.raises(SerializationError, match="no dataclass or pydantic model"):
        _decode(FINAL)


@pytest.mark.parametrize(
    "name",
    [
        ("os", "system"),
        ("subprocess", "Popen"),
        ("builtins", "int"),
        ("builtins", "type"),
        ("kubetorch.errors", "KubetorchError"),
        (MODULE, "Safe"),
        (MODULE, "Bomb.ndim"),
        (MODULE, "sys"),
        ("json", "JSONDecoder"),
        ("pandas", "DataFrame"),
    ],
)
def test_nothing_but_a_dataclass_or_a_model_is_made(name: tuple[str, str]) -> None:
    with pytest.raises(SerializationError):
        _decode({"$": ["object", *name, {}]})


def test_no_module_is_imported_for_a_class() -> None:
    assert "antigravity" not in sys.modules
    for kind in ("object", "named"):
        _try({"$": [kind, "antigravity", "A", {}]})
        _try({"$": [kind, "this.is.none", "A", []]})
    _try({"$": ["enum", "antigravity", "A", "B"]})
    assert "antigravity" not in sys.modules


def test_a_module_that_makes_names_up_is_not_asked() -> None:
    import types

    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            RAN.append(name)
            return Bomb

    sys.modules["kt_lazy"] = Lazy("kt_lazy")
    try:
        with pytest.raises(SerializationError, match="not in the module"):
            _decode({"$": ["object", "kt_lazy", "Anything", {}]})
    finally:
        del sys.modules["kt_lazy"]


def test_an_enumeration_is_not_asked_for_what_it_has_not() -> None:
    with pytest.raises(SerializationError):
        _decode({"$": ["enum", MODULE, "Odd", "B"]})
    with pytest.raises(SerializationError):
        _decode({"$": ["enum", MODULE, "Odd", 7]})


# ------------------------------------------------------------------------------------- how much


def _peak(value: object, area: bytes = b"") -> int:
    data = b"$" + json.dumps(value).encode()
    tracemalloc.start()
    try:
        codecs.decode("values", [data, memoryview(bytearray(area))])
    except SerializationError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


HUGE = 10**12


@pytest.mark.parametrize(
    "value",
    [
        [{"$": ["bytes", [0, 100_000]]}] * 1000,
        [{"$": ["bytearray", [0, 100_000]]}] * 1000,
        [{"$": ["np.array", "<f8", [12_500], "C", [0, 100_000]]}] * 1000,
        {"$": ["np.array", "<f8", [HUGE], "C", [0, 0]]},
        {"$": ["np.array", "|V0", [HUGE], "C", [0, 0]]},
        {"$": ["np.array", "|S1000000000", [], "C", [0, 0]]},
        {"$": ["np.array", "<f8", [0, HUGE], "C", [0, 0]]},
        {"$": ["np.array", ["<f8", [HUGE]], [1], "C", [0, 100_000]]},
        {"$": ["np.scalar", "|S1000000000", "00"]},
        {"$": ["np.objects", [HUGE], []]},
        {"$": ["np.objects", [0, HUGE], []]},
        {"$": ["pd.index", ["range", 0, HUGE, 1, None]]},
        {
            "$": [
                "pd.series",
                ["array", {"$": ["np.objects", [0], []]}],
                ["range", 0, HUGE, 1, None],
                None,
            ]
        },
        {"$": ["pd.frame", [], ["range", 0, HUGE, 1, None], ["range", 0, HUGE, 1, None], None]},
        {
            "$": [
                "pd.frame",
                [{"$": ["np.array", "<f8", [0, HUGE], "C", [0, 0]]}] * 2,
                ["range", 0, HUGE, 1, None],
                ["range", 0, 0, 1, None],
                None,
            ]
        },
        {"$": ["decimal", "1E+999999999"]},
    ],
)  # fmt: skip
def test_no_more_is_made_than_there_are_bytes(value: object) -> None:
    assert _peak(value, bytes(100_000)) < 5_000_000


def _series(*column: Any) -> dict[str, Any]:
    return {"$": ["pd.series", [*column], ["range", 0, HUGE, 1, None], None]}


LONG = ["range", 0, 100_000_000, 1, None]
CODES = {"$": ["np.array", "<i1", [1], "C", [0, 1]]}
MOMENTS = {"$": ["np.array", "<M8[ns]", [2], "C", [0, 16]]}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (_series("interval", LONG, LONG, "left"), "a range of"),
        ({"$": ["pd.index", ["values", ["category", CODES, LONG, True], None, None]]}, "a range"),
        ({"$": ["pd.index", ["multi", [LONG], [CODES], [None]]]}, "a range of"),
        ({"$": ["pd.index", ["values", ["array", MOMENTS], None, "1" * 10**6]]}, "a frequency"),
        (_series("period", CODES, f"period[{'1D' * 10**5}]"), "a frequency"),
        ({"$": ["np.array", "<f8", [2**62] * 200_000, "C", [0, 8]]}, "dimensions"),
        ({"$": ["np.objects", [2] * 200_000, []]}, "dimensions"),
        ({"$": ["np.array", ["<f8", [10**4000] * 2000], [1], "C", [0, 8]]}, "dimensions"),
    ],
    ids=["interval", "category", "multi", "freq", "period", "shape", "objects", "subarray"],
)
def test_what_takes_long_or_much_is_refused_before(value: object, why: str) -> None:
    begin = time.process_time()
    with pytest.raises(SerializationError, match=why):
        _decode(value, bytes(16))
    assert time.process_time() - begin < 5


#: What all integers hash modulo.
MODULUS = sys.hash_info.modulus


@pytest.mark.parametrize(
    "value",
    [
        {"$": ["dict", [[n * MODULUS, 1] for n in range(20_000)]]},
        {"$": ["set", [n * MODULUS for n in range(20_000)]]},
        {"$": ["frozenset", [{"$": ["tuple", [n * MODULUS]]} for n in range(20_000)]]},
        {
            "$": [
                "pd.index",
                [
                    "values",
                    [
                        "array",
                        {"$": ["np.objects", [20_000], [n * MODULUS for n in range(20_000)]]},
                    ],
                    None,
                    None,
                ],
            ]
        },
    ],
    ids=["dict", "set", "frozenset", "index"],
)
def test_keys_that_hash_to_the_same_are_not_compared_with_each_other(value: object) -> None:
    begin = time.process_time()
    with pytest.raises(SerializationError, match="of one hash"):
        _decode(value)
    assert time.process_time() - begin < 5


def test_keys_that_happen_to_collide_arrive() -> None:
    for keys in ({2**n for n in range(5000)}, {-1, -2}, {n * MODULUS for n in range(900)}):
        segments = codecs.encode("values", keys)
        assert codecs.decode("values", [bytes(segments[0])]) == keys  # type: ignore[arg-type]


def test_classes_that_are_missing_do_not_slow_down_keys() -> None:
    missing = [{"$": ["enum", MODULE, f"Missing{n}", "A", n]} for n in range(15_000)]
    begin = time.process_time()
    assert len(_decode([missing, {"$": ["set", missing]}])[1]) == 15_000
    assert time.process_time() - begin < 5


def _array(offset: int, size: int = 8) -> dict[str, Any]:
    return {"$": ["np.array", "|u1", [size], "C", [offset, size]]}


def test_no_two_values_lie_on_the_same_bytes() -> None:
    data = _stream(TABLE)
    table = {"$": ["pa.Table", [0, len(data)]]}
    for value in ([_array(0), _array(4)], [_array(8), _array(0), _array(1, 2)]):
        with pytest.raises(SerializationError, match="two values have the bytes"):
            _decode(value, bytes(64))
    # A checked table, whose offsets the array would change.
    with pytest.raises(SerializationError, match="two values have the bytes"):
        _decode([table, _array(0, len(data))], data + bytes(len(data)))
    first_array, second_array, first_array_again = _decode(
        [_array(0), _array(8), {"$": ["again", 0]}], bytes(16)
    )
    first_array += 1
    assert first_array_again is first_array
    assert second_array.tolist() == [0] * 8


def test_torch_is_not_asked_for_numbers_that_it_dies_of() -> None:
    torch = pytest.importorskip("torch")
    kinds = {
        name: member for name, member in vars(torch).items() if isinstance(member, torch.dtype)
    }
    for name, dtype in kinds.items():
        size = 8 * dtype.itemsize
        _try({"$": ["torch.tensor", name, [8], [0], False, False, [0, size]]}, bytes(size))


def test_text_that_is_nested_without_end_is_refused() -> None:
    for data in (b"[" * 200_000, b'{"$":["tuple",[' * 50_000, b'{"a":' * 100_000):
        for head in (b"", b"$"):
            with pytest.raises(SerializationError):
                codecs.decode("values", [head + data])


# --------------------------------------------------------------------------------------- Arrow


def _stream(table: pyarrow.Table, **options: Any) -> bytes:
    sink = pyarrow.BufferOutputStream()
    given = pyarrow.ipc.IpcWriteOptions(**options)
    with pyarrow.ipc.new_stream(sink, table.schema, options=given) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


TABLE = pyarrow.table(
    {"a": ["x" * 50] * 200, "b": pyarrow.array(["u", "v"] * 100).dictionary_encode()}
)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_compressed_stream_is_refused(codec: str) -> None:
    data = _stream(TABLE, compression=codec)
    for kind in ("pa.Table", "pl.DataFrame"):
        with pytest.raises(SerializationError, match="compressed"):
            _decode({"$": [kind, [0, len(data)]]}, data)


def test_a_stream_whose_parts_cannot_be_looked_at_is_refused() -> None:
    data = _stream(TABLE, use_legacy_format=True)
    for kind in ("pa.Table", "pl.DataFrame"):
        with pytest.raises(SerializationError, match="in an old format"):
            _decode({"$": [kind, [0, len(data)]]}, data)


class Registered(pyarrow.ExtensionType):
    def __init__(self) -> None:
        super().__init__(pyarrow.int64(), "kt.registered")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: Any, serialized: bytes) -> Registered:
        RAN.append("__arrow_ext_deserialize__")
        return cls()


def test_a_registered_extension_type_is_not_asked() -> None:
    array = pyarrow.ExtensionArray.from_storage(Registered(), pyarrow.array([1]))
    table = pyarrow.table({"a": array})
    with pytest.raises(SerializationError, match="extension types"):
        codecs.encode("values", table)
    data = _stream(table)
    pyarrow.register_extension_type(Registered())
    try:
        for kind in ("pa.Table", "pa.Array", "pl.DataFrame", "pl.Series"):
            with pytest.raises(SerializationError, match="extension type"):
                _decode({"$": [kind, [0, len(data)]]}, data)
    finally:
        pyarrow.unregister_extension_type("kt.registered")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_stream_that_was_changed_is_a_table_or_refused(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["pa.Table", "pl.DataFrame"]))
    stream = bytearray(STREAMS[kind])
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(stream) - 1))
        stream[position] = data.draw(st.integers(0, 255))
    stream = stream[: data.draw(st.integers(len(stream) // 2, len(stream)))]
    try:
        decoded_table = _decode({"$": [kind, [0, len(stream)]]}, bytes(stream))
    except SerializationError:
        return
    repr(decoded_table)


VIEWS = pyarrow.array(["x" * 100_000] * 3, pyarrow.string_view())
DICTIONARY = pyarrow.array(["x" * 100_000] * 3).dictionary_encode()


@pytest.mark.parametrize("size", [-1, 13, 65_535, 2**31 - 1])
@pytest.mark.parametrize("wrap", ["plain", "list", "struct", "dictionary"])
def test_a_view_of_a_row_that_is_null_lies_within_its_data(size: int, wrap: str) -> None:
    marker = struct.pack("<i", 9) + b"unlikely!"
    views = pyarrow.array(["y" * 20, None, "unlikely!"], pyarrow.string_view())
    # The last row is made null too: its view has a size that is changed below.
    validity = pyarrow.py_buffer(b"\x01")
    views = pyarrow.Array.from_buffers(views.type, 3, [validity, *views.buffers()[1:]])
    array = {
        "plain": lambda: views,
        "list": lambda: pyarrow.ListArray.from_arrays([0, 3], views),
        "struct": lambda: pyarrow.StructArray.from_arrays([views], ["a"]),
        "dictionary": lambda: pyarrow.DictionaryArray.from_arrays([0, 2], views),
    }[wrap]()
    stream = _stream(pyarrow.table({"": array}))
    assert stream.count(marker) == 1
    assert len(_decode({"$": ["pa.Array", [0, len(stream)]]}, stream)) == len(array)
    changed = stream.replace(marker, struct.pack("<i", size) + marker[4:])
    with pytest.raises(SerializationError, match="a view outside of its data"):
        _decode({"$": ["pa.Array", [0, len(changed)]]}, changed)


@pytest.mark.parametrize("array", [pyarrow.nulls(2**20), VIEWS, DICTIONARY])
def test_text_that_would_be_larger_than_its_stream_is_refused(array: pyarrow.Array) -> None:
    data = _stream(pyarrow.table({"": array}))
    with pytest.raises(SerializationError, match=r"texts that are|more than \d+ rows"):
        _decode(_series("string", [0, len(data)], "NA"), data)


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()])
@pytest.mark.parametrize("text", ["plain", "größer"])
def test_text_is_checked_whether_or_not_it_is_ascii(kind: Any, text: str) -> None:
    form, content = "<3i" if kind == pyarrow.string() else "<3q", text.encode()
    size = len(content)
    for offsets, data in [
        ((0, size, size + 100), content),
        ((0, size, 1), content),
        ((-50, 1, size), content),
        ((0, 1, size), b"\xff" + content[1:]),
        ((0, 3, size), "größer".encode()),  # within a letter
    ]:
        valid = pyarrow.array(["x" * len(data), ""], kind)
        stream = _stream(pyarrow.table({"": valid}))
        offset_bytes = struct.pack(form, 0, len(data), len(data))
        assert offset_bytes in stream
        stream = stream.replace(offset_bytes, struct.pack(form, *offsets))
        stream = stream.replace(b"x" * len(data), data)
        for tag in (
            _series("string", [0, len(stream)], "NA"),
            {"$": ["pa.Table", [0, len(stream)]]},
        ):
            with pytest.raises(SerializationError, match="ArrowInvalid"):
                _decode(tag, stream)


def test_an_index_of_arrow_is_not_looked_through_for_keys() -> None:
    rows = pyarrow.array(numpy.zeros(2**24, "i1"))
    data = _stream(pyarrow.table({"": rows}))
    index = {"$": ["pd.index", ["values", ["arrow", [0, len(data)]], None, None]]}
    assert _peak(index, data) < 2**25


def _nested(levels: int, *, doubles: bool) -> bytes:
    """A stream without rows, whose column has so many levels; each field may be there twice."""
    kind = pyarrow.int8()
    for _ in range(levels):
        kind = pyarrow.struct([("a", kind), ("b", pyarrow.int8())])
    data = bytearray(_stream(pyarrow.schema([("", kind)]).empty_table()))
    message = memoryview(data)[8:]
    _, schema, _ = arrow_streams._parse_message(message)
    fields = [*schema.tables(1)]
    while doubles and fields and fields[0].field(5):
        offset = fields[0].offset(5) + 4
        struct.pack_into(
            "<I", message, offset + 4, struct.unpack_from("<I", message, offset)[0] - 4
        )
        fields = [*fields[0].tables(5)]
        if not fields[0].field(5) or not struct.unpack_from("<I", message, fields[0].offset(5))[0]:
            break
    return bytes(data)


def test_polars_is_not_given_what_ends_the_process() -> None:
    lists = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 20_000, pyarrow.int8()), pyarrow.array([[1] * 20_000])
    )
    for data, why in [
        (_stream(pyarrow.table({"": lists})), "other values than texts"),
        (_nested(60, doubles=True), "without end"),
        (_nested(150, doubles=False), "without end"),
    ]:
        with pytest.raises(SerializationError, match=why):
            _decode({"$": ["pl.DataFrame", [0, len(data)]]}, data)
    data = _nested(50, doubles=False)
    assert len(_decode({"$": ["pl.DataFrame", [0, len(data)]]}, data)) == 0


def test_buffers_of_a_stream_that_lie_on_each_other_are_refused() -> None:
    table = pyarrow.table({"a": [1, 2], "b": [3, 4]})
    data = bytearray(_stream(table))
    # Where the second column lies: after the first, whose end Arrow pads or not, and as long.
    places = {step: data.rfind(struct.pack("<qq", step, 16)) for step in (16, 64)}
    step, offset = max(places.items(), key=lambda step_and_offset: step_and_offset[1])
    struct.pack_into("<qq", data, offset, 0, 2 * step)
    for kind in ("pa.Table", "pl.DataFrame"):
        with pytest.raises(SerializationError, match="a buffer that is not there"):
            _decode({"$": [kind, [0, len(data)]]}, bytes(data))


def test_a_dictionary_is_not_checked_again_for_batches_without_end() -> None:
    text = pyarrow.array(["x" * 60_000_000])
    rows = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0], pyarrow.int8()), text)
    batch = pyarrow.record_batch([rows], names=["a"])
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        for _ in range(2000):
            writer.write_batch(batch)
    data = bytes(sink.getvalue())
    for kind in ("pa.Table", "pl.DataFrame"):
        with pytest.raises(SerializationError, match="too many batches"):
            _decode({"$": [kind, [0, len(data)]]}, data)


def _polars_stream() -> bytes:
    import io

    stream = io.BytesIO()
    polars.from_arrow(TABLE).write_ipc_stream(stream, compression="uncompressed")  # type: ignore[union-attr]
    return stream.getvalue()


STREAMS = {"pa.Table": _stream(TABLE), "pl.DataFrame": _polars_stream()}


# ----------------------------------------------------------------------------- after it was sent


frame = pandas.DataFrame(
    {"a": [1, 2], "b": ["x", None], "c": pandas.Categorical(["u", "v"]), "d": [1.5, None]},
    index=pandas.MultiIndex.from_tuples([("p", 1), ("q", 2)], names=["k", "l"]),
)
SENT = [
    {"a": numpy.arange(6).reshape(2, 3), "b": {1: (2,), None: b"x" * 5000}, "c": {1.5, "a"}},
    frame,
    [Safe.A, numpy.array([1, "x", None], object), numpy.zeros(3, [("a", "i4"), ("b", "f8", (2,))])],
]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_value_that_was_changed_on_its_way_is_another_one_or_refused(data: st.DataObject) -> None:
    head, *rest = codecs.encode("values", data.draw(st.sampled_from(SENT)))
    text = bytearray(bytes(head))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(1, len(text) - 1))
        text[position : position + 1] = data.draw(
            st.binary(max_size=2) | st.sampled_from([b"9", b"[", b'"', b"$"])
        )
    area = bytearray(b"".join(codecs.join(rest)))
    try:
        codecs.decode("values", [bytes(text), memoryview(area)])
    except SerializationError:
        return


# ------------------------------------------------------------------------------------ metaclasses


class Watching(type):
    """Says when somebody looks at its classes."""

    def __getattribute__(cls, name: str) -> Any:
        RAN.append(name)
        return type.__getattribute__(cls, name)


class Watched(metaclass=Watching):
    __dataclass_fields__: ClassVar[dict[str, Any]] = {}
    __slots__ = ("a",)


class Undecodable(metaclass=Watching):
    pass


class WatchingFlags(enum.EnumMeta):
    def __getattribute__(cls, name: str) -> Any:
        RAN.append(name)
        return enum.EnumMeta.__getattribute__(cls, name)


class Flags(enum.Flag, metaclass=WatchingFlags):
    A = 1
    B = 2


class Apart(enum.Flag):
    """Nothing here combines its members."""

    A = 1
    B = 2


def test_flags_arrive_together_where_nobody_has_combined_them_before() -> None:
    decoded_flags = _decode(
        [{"$": ["enum", MODULE, "Apart", 3]}, {"$": ["enum", "re", "RegexFlag", 282, 282]}]
    )
    assert [type(flags) for flags in decoded_flags] == [Apart, re.RegexFlag]
    assert decoded_flags[0] is Apart.A | Apart.B
    assert decoded_flags[1] is re.I | re.M | re.S | re.A
    with pytest.raises(SerializationError, match=r"Apart\.8 is not in the module"):
        _decode({"$": ["enum", MODULE, "Apart", 8]})


@pytest.mark.security
@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"$": ["object", MODULE, "Watched", {"__x": 1}]}, "a Watched has no __x"),
        ({"$": ["object", MODULE, "Undecodable", {"a": 1}]}, "Undecodable is no dataclass"),
        ({"$": ["set", [{"$": ["object", MODULE, "Watched", {"a": 1}]}]]}, "Watched to hash"),
        (
            {"$": ["bytes", {"$": ["object", MODULE, "Watched", {}]}]},
            "a Watched where a list should",
        ),
        ({"$": ["enum", MODULE, "Flags", 3]}, r"Flags\.3 is not in the module"),
        ({"$": ["enum", MODULE, "Flags", "C"]}, r"Flags\.C is not in the module"),
    ],
)
def test_no_code_of_a_metaclass_runs_for_what_is_refused(value: object, why: str) -> None:
    with pytest.raises(SerializationError, match=why):
        _decode(value)


@pytest.mark.security
def test_no_code_of_a_metaclass_runs_for_what_is_decoded_or_described() -> None:
    decoded_values = _decode(
        [{"$": ["object", MODULE, "Watched", {"a": 1}]}, {"$": ["enum", MODULE, "Flags", "A"]}]
    )
    assert type(decoded_values[0]) is Watched
    assert object.__getattribute__(decoded_values[0], "a") == 1
    with pytest.raises(SerializationError, match=r"is a .*Undecodable, which cannot travel"):
        codecs.encode("values", object.__new__(Undecodable))
