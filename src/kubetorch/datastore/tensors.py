"""Tensors of torch and arrays of NumPy as a file of safetensors, and back.

A value is a tensor, an array, or dicts and lists of them, with numbers and texts in between, as
`model.state_dict()` or a checkpoint with an optimiser. The name of a tensor in the file is its path
with dots: `layers.0.weight`. What the format cannot say lies in its metadata under `kubetorch`: how
dicts and lists are nested, the numbers and texts, which tensors were arrays of NumPy, and dtypes
that the format lacks (complex128, dates, records), whose tensors are bytes in the file.

A tensor is stored as its values, one behind the other: views, slices and transposed tensors lose
their strides, and tensors that share memory no longer share it. A destination may have any strides.

The module imports neither torch nor NumPy: who puts tensors has loaded the library, and who gets
tensors gets them in the library of the putter, if it is installed, else in the other.
"""

from __future__ import annotations

import fnmatch
import importlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kubetorch.datastore import safetensors
from kubetorch.errors import DataStoreError, SpecError
from kubetorch.wire import dtypes

#: A tensor of torch, an array of NumPy.
Array = Any

#: The name of the only tensor of a value that is no dict.
SINGLE = "tensor"
_METADATA = "kubetorch"
_LEVELS = 64

#: dtype of the format: dtype of torch, dtype of NumPy (or of `ml_dtypes`, by its name there).
_DTYPES = {
    "BOOL": ("bool", "|b1"),
    "U8": ("uint8", "|u1"),
    "I8": ("int8", "|i1"),
    "U16": ("uint16", "<u2"),
    "I16": ("int16", "<i2"),
    "U32": ("uint32", "<u4"),
    "I32": ("int32", "<i4"),
    "U64": ("uint64", "<u8"),
    "I64": ("int64", "<i8"),
    "F16": ("float16", "<f2"),
    "F32": ("float32", "<f4"),
    "F64": ("float64", "<f8"),
    "C64": ("complex64", "<c8"),
    "BF16": ("bfloat16", "bfloat16"),
    "F8_E5M2": ("float8_e5m2", "float8_e5m2"),
    "F8_E4M3": ("float8_e4m3fn", "float8_e4m3fn"),
    "F8_E8M0": ("float8_e8m0fnu", "float8_e8m0fnu"),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", "float8_e5m2fnuz"),
}
_BY_TORCH = {torch_name: name for name, (torch_name, _) in _DTYPES.items()}
_BY_NUMPY = {numpy_name: name for name, (_, numpy_name) in _DTYPES.items()}
#: The dtype without a name in the format that torch and NumPy have in common.
_COMPLEX = "complex128"
_PLAIN = (str, int, float, bool, type(None))


def is_tensor(value: object) -> bool:
    """True for a tensor of torch or an array of NumPy."""
    return _is_torch(value) or _is_numpy(value)


def holds_tensors(value: object) -> bool:
    """True for what `kt.put` stores as tensors: a tensor, or a dict or list that has one inside."""
    if isinstance(value, dict):
        return any(map(holds_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(holds_tensors, value))
    return is_tensor(value)


def _is_torch(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_numpy(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


@dataclass
class Flat:
    """A value taken apart.

    Attributes:
        arrays: Its tensors and arrays by name.
        structure: How they are nested, as JSON.
        setters: For each number or text of a dict or list, by name: puts another in its stead.
    """

    arrays: dict[str, Array] = field(default_factory=dict)
    structure: Any = None
    setters: dict[str, Callable[[Any], None]] = field(default_factory=dict)


def flatten(value: object) -> Flat:
    """Take a value apart.

    Raises:
        SpecError: It has something else than tensors, numbers and texts, or two tensors of a name.
    """
    flat = Flat()
    flat.structure = _flatten(value, "", flat, 0)
    return flat


def _flatten(value: Any, name: str, flat: Flat, level: int) -> list[Any]:  # noqa: ANN401
    if level > _LEVELS:
        raise SpecError(f"{name[:80]!r} is nested more than {_LEVELS} levels deep")
    if isinstance(value, Mapping):
        entries: list[Any] = []
        for key, item in value.items():
            if type(key) not in (str, int):
                raise SpecError(
                    f"{key!r:.80} in {name or 'the dict'} is neither a text nor an int, as the "
                    "names of tensors are"
                )
            entries.append([key, _flatten(item, _join(name, key), flat, level + 1)])
            _add_setter(flat, value, key, item, _join(name, key))
        return ["d", entries]
    if isinstance(value, (list, tuple)):
        items = []
        for index, item in enumerate(value):
            items.append(_flatten(item, _join(name, index), flat, level + 1))
            _add_setter(flat, value, index, item, _join(name, index))
        return ["l" if isinstance(value, list) else "u", items]
    if is_tensor(value):
        name = name or SINGLE
        if name in flat.arrays or name == "__metadata__":
            raise SpecError(
                f"two tensors have the name {name!r}, or it is reserved",
                hint="a name is the path in the dict with dots: rename a key",
            )
        flat.arrays[name] = value
        return ["t" if _is_torch(value) else "n", name]
    if isinstance(value, _PLAIN):
        return ["v", value]
    raise SpecError(
        f"{name or 'the value'} is a {type(value).__name__}, which is no tensor, number or text",
        hint="kt.put stores tensors of torch, arrays of NumPy, and dicts and lists of them",
    )


def _add_setter(flat: Flat, container: Any, key: Any, item: object, name: str) -> None:  # noqa: ANN401
    if isinstance(item, _PLAIN) and hasattr(container, "__setitem__"):
        flat.setters[name] = lambda new: container.__setitem__(key, new)


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


# ---------------------------------------------------------------------------------- a file of them


@dataclass(frozen=True)
class _Dtype:
    """A dtype as the file has it: the format's name, or bytes and what they are."""

    name: str
    #: A dtype of torch by name, or of NumPy as `wire.dtypes` describes it.
    escaped: Any = None


class TensorFile:
    """A file of safetensors that is made of a value, chunk by chunk."""

    def __init__(self, value: object) -> None:
        self._flat = flat = flatten(value)
        dtypes_by_name = {name: _dtype(name, array) for name, array in flat.arrays.items()}
        # As other writers: dtypes with large elements first, so that all are aligned.
        names = sorted(
            flat.arrays, key=lambda name: (-safetensors.DTYPE_BITS[dtypes_by_name[name].name], name)
        )
        tensors, end = [], 0
        for name in names:
            dtype, array = dtypes_by_name[name], flat.arrays[name]
            shape = tuple(map(int, array.shape))
            if dtype.escaped is not None:
                shape = (*shape, _item_bytes(array))
            begin, end = end, end + safetensors.bits(dtype.name, shape) // 8
            tensors.append(safetensors.Tensor(name, dtype.name, shape, begin, end))
        escaped = {
            name: dtype.escaped
            for name, dtype in dtypes_by_name.items()
            if dtype.escaped is not None
        }
        self.header = safetensors.Header(tensors, _metadata(flat.structure, escaped))
        self.encoded_header = self.header.encode()
        self._tensors = tensors
        #: The tensor whose bytes were made last: its pieces follow each other.
        self._last: tuple[str, memoryview] = ("", memoryview(b""))

    @property
    def size(self) -> int:
        return len(self.encoded_header) + self.header.size

    @property
    def arrays(self) -> dict[str, Array]:
        """The tensors by name."""
        return self._flat.arrays

    def chunk(self, number: int) -> memoryview | bytes:
        """The bytes of a chunk behind the header."""
        cut = self.header.cuts[number]
        first = self.header.tensors[cut.name]
        if cut.end <= first.end:
            return self._bytes(cut.name)[cut.offset : cut.offset + cut.end - cut.begin]
        return b"".join(
            self._bytes(tensor.name)
            for tensor in self._tensors
            if cut.begin <= tensor.begin < tensor.end <= cut.end
        )

    def _bytes(self, name: str) -> memoryview:
        last_name, memory = self._last
        if last_name != name:
            memory = host_bytes(self._flat.arrays[name])
            self._last = name, memory
        return memory


def _metadata(structure: Any, escaped: dict[str, Any]) -> dict[str, str]:  # noqa: ANN401
    """The texts that a header needs; none for a dict of tensors of torch."""
    kind, entries = structure
    if (
        kind == "d"
        and not escaped
        and all(node[0] == "t" and type(key) is str for key, node in entries)
    ):
        return {}
    return {_METADATA: json.dumps({"structure": structure, "dtypes": escaped})}


def _item_bytes(array: Array) -> int:
    return int(array.element_size() if _is_torch(array) else array.dtype.itemsize)


def _dtype(name: str, array: Array) -> _Dtype:
    """The dtype of a tensor in the file; refuses tensors that are no plain memory."""
    if _is_torch(array):
        torch = sys.modules["torch"]
        is_foreign = type(array).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        is_plain = array.layout is torch.strided and not array.is_quantized and not array.is_meta
        if is_foreign or not is_plain:
            raise SpecError(
                f"{name} is a {type(array).__name__} of {array.layout} on {array.device} without "
                "plain memory: sparse, quantized, distributed or on the device meta",
                hint="store tensor.to_dense(), or its parts",
            )
        torch_name = str(array.dtype).removeprefix("torch.")
        if torch_name in _BY_TORCH:
            return _Dtype(_BY_TORCH[torch_name])
        return _Dtype("U8", torch_name)
    dtype = array.dtype
    if isinstance(array, sys.modules["numpy"].ma.MaskedArray):
        raise SpecError(f"{name} is a masked array", hint="store its .data and its .mask")
    if dtype.hasobject or dtype.kind == "T":
        raise SpecError(
            f"{name} is an array of {dtype}, which has no bytes of its own",
            hint="convert it first: array.astype(numpy.float32), for example",
        )
    if dtype.name in _BY_NUMPY or (dtype.isbuiltin == 1 and dtype.str in _BY_NUMPY):
        return _Dtype(_BY_NUMPY.get(dtype.name) or _BY_NUMPY[dtype.str])
    if dtype.str == "<c16":
        return _Dtype("U8", _COMPLEX)
    try:
        return _Dtype("U8", [dtypes.describe(dtype)])
    except (ValueError, TypeError) as error:
        raise SpecError(
            f"{name} is an array of {dtype}, which cannot be stored: {error}",
            hint="convert it first: array.astype(numpy.float32), for example",
        ) from error


def host_bytes(array: Array) -> memoryview:
    """The values of a tensor, one behind the other, in the memory of the host.

    A view of the tensor's own memory where its values lie so, else of a copy.
    """
    if _is_torch(array):
        return _torch_bytes(array.detach().resolve_conj().resolve_neg().cpu().contiguous())
    numpy = sys.modules["numpy"]
    flat = numpy.ascontiguousarray(numpy.asarray(array)).reshape(-1)
    return memoryview(flat.view("u1")) if flat.nbytes else memoryview(b"")


def _torch_bytes(tensor: Array) -> memoryview:
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    # Not by NumPy, without which torch may run.
    import ctypes  # noqa: PLC0415  # torch has imported it

    memory = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    memory.tensor = tensor  # the tensor lives as long as the memory
    return memoryview(memory).cast("B")


# ------------------------------------------------------------------------------- a value of a file


class Contents:
    """What a file of safetensors holds, and a value to fill with it.

    A destination is checked whole before a byte of it is written.
    """

    def __init__(self, header: safetensors.Header, only: Sequence[str] = ()) -> None:
        self._header = header
        self._structure, self._escaped = _parse_metadata(header)
        self._only = only
        self._tensors = {
            name: tensor for name, tensor in header.tensors.items() if self._is_selected(name)
        }
        if only and not self._tensors:
            raise DataStoreError(
                f"no tensor matches {list(only)}",
                hint=f"it has {_some(header.tensors)}",
            )

    def _is_selected(self, name: str) -> bool:
        return not self._only or any(fnmatch.fnmatchcase(name, part) for part in self._only)

    @property
    def tensors(self) -> list[safetensors.Tensor]:
        """The tensors to read."""
        return list(self._tensors.values())

    def destination(self, dest: object) -> Destination:
        """The memory of a value that has these tensors.

        Raises:
            DataStoreError: A name, dtype, shape or device does not fit. Nothing is written.
        """
        flat = flatten(dest)
        arrays = {name: array for name, array in flat.arrays.items() if self._is_selected(name)}
        faults = []
        if missing := self._tensors.keys() - arrays.keys():
            faults.append(f"the destination lacks {_some(missing)}")
        if unknown := arrays.keys() - self._tensors.keys():
            faults.append(f"only the destination has {_some(unknown)}")
        faults += [
            fault
            for name in arrays.keys() & self._tensors.keys()
            if (fault := self._fault(name, arrays[name]))
        ]
        if faults:
            raise DataStoreError(
                f"the destination does not fit, and is as before: {'; '.join(sorted(faults)[:5])}"
                + (f"; and {len(faults) - 5} more" if len(faults) > 5 else ""),
                hint="kt.get without dest= gives the tensors as they were stored; "
                "only=[...] gets some of them",
            )
        return Destination(arrays, flat.setters, self._values())

    def _fault(self, name: str, array: Array) -> str:
        tensor, escaped = self._tensors[name], self._escaped.get(name)
        try:
            dtype = _dtype(name, array)
        except SpecError as error:
            return error.message
        if (dtype.name, dtype.escaped) != (tensor.dtype, escaped):
            stored = escaped or _DTYPES.get(tensor.dtype, (tensor.dtype,))[0]
            actual = str(array.dtype).removeprefix("torch.")
            return f"{name} is {stored} in the store and {actual} in the destination"
        shape = tensor.shape if escaped is None else tensor.shape[:-1]
        if tuple(array.shape) != shape:
            return f"{name} is {list(shape)} in the store and {list(array.shape)} here"
        strides = array.stride() if _is_torch(array) else array.strides
        if any(not stride and size > 1 for stride, size in zip(strides, shape, strict=True)):
            return f"{name} is expanded in the destination: several elements share their memory"
        if not _is_torch(array) and not (hasattr(array, "flags") and array.flags.writeable):
            return f"{name} is read-only in the destination"
        return ""

    def new_destination(self) -> Destination:
        """New memory for these tensors, in the library of the putter if it is installed."""
        leaves = dict(_leaves(self._structure))
        arrays: dict[str, Array] = {}
        for name, tensor in self._tensors.items():
            try:
                arrays[name] = self._new_array(tensor, leaves[name])
            except (MemoryError, RuntimeError) as error:  # NumPy's, torch's
                size = tensor.end - tensor.begin
                raise DataStoreError(
                    f"there is no memory for {name:.80} of {size:,} bytes: {error}",
                    hint="only=[...] gets some tensors, kt.get(key, dest='folder/') the file",
                ) from error
        return Destination(arrays, {}, {})

    def _new_array(self, tensor: safetensors.Tensor, library: str) -> Array:
        escaped = self._escaped.get(tensor.name)
        shape = tensor.shape if escaped is None else tensor.shape[:-1]
        torch = None if isinstance(escaped, list) else self._torch(library)
        if torch is not None:
            torch_dtype = getattr(torch, escaped or _names(tensor)[0], None)
            if not isinstance(torch_dtype, torch.dtype) or str(torch_dtype).startswith("torch.q"):
                raise _no_dtype(tensor.name, escaped or tensor.dtype, "this torch")
            if escaped is not None and torch_dtype.itemsize != tensor.shape[-1]:
                raise DataStoreError(f"{tensor.name} is no {escaped}: {tensor.shape[-1]} bytes")
            size = tensor.end - tensor.begin  # torch warns if a rare dtype is made at once
            return torch.empty(size, dtype=torch.uint8).view(torch_dtype).view(shape)
        numpy = _installed("numpy")
        if numpy is None:
            raise DataStoreError(
                f"{tensor.name} is a tensor, and neither torch nor NumPy is installed",
                hint="install one of them, or get the file: kt.get(key, dest='folder/')",
            )
        dtype = self._numpy_dtype(tensor, escaped)
        if escaped is not None and dtype.itemsize != tensor.shape[-1]:
            raise DataStoreError(f"{tensor.name} is no {dtype}: it has {tensor.shape[-1]} bytes")
        return numpy.empty(shape, dtype)

    def _torch(self, library: str) -> Any:  # noqa: ANN401  # a module, or `None`
        """The module if the putter had a tensor, or had an array and there is no NumPy."""
        return _installed("torch") if library == "t" or _installed("numpy") is None else None

    def _numpy_dtype(self, tensor: safetensors.Tensor, escaped: Any) -> Any:  # noqa: ANN401
        if isinstance(escaped, list):
            try:
                return dtypes.parse(escaped[0])
            except (ValueError, TypeError, KeyError) as error:
                raise _no_dtype(tensor.name, escaped[0], f"NumPy ({error})") from error
        name = escaped or _names(tensor)[1]
        try:
            if name[0] in "<|":
                return dtypes.plain_dtype(name)
            if name == _COMPLEX:
                return dtypes.plain_dtype("<c16")
            dtype = sys.modules["numpy"].dtype(getattr(_installed("ml_dtypes"), name))
        except (AttributeError, ValueError, TypeError) as error:
            raise _no_dtype(tensor.name, name, "NumPy", "install torch, or ml_dtypes") from error
        if dtype.hasobject:  # of a class that is no dtype: its bytes would be addresses
            raise _no_dtype(tensor.name, name, "NumPy")
        return dtype

    def value(self, destination: Destination) -> Any:  # noqa: ANN401  # the putter's
        """The value that the putter had, of the arrays of a new destination."""
        return _restored(self._structure, destination.arrays, bool(self._only))

    def _values(self) -> dict[str, Any]:
        """The numbers and texts by name."""
        return {} if self._only else dict(_plain_values(self._structure, ""))


def _names(tensor: safetensors.Tensor) -> tuple[str, str]:
    if tensor.dtype not in _DTYPES:
        raise _no_dtype(tensor.name, tensor.dtype, "torch or NumPy")
    return _DTYPES[tensor.dtype]


def _no_dtype(name: str, dtype: object, library: str, first_step: str = "") -> DataStoreError:
    return DataStoreError(
        f"{name} has the dtype {dtype!s:.80}, which {library} lacks",
        hint=f"{first_step + ', ' if first_step else ''}or get the file: "
        "kt.get(key, dest='folder/')",
    )


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(f"{name:.80}" for name in ordered[:3]) + more


def _installed(library: str) -> Any:  # noqa: ANN401  # a module
    try:
        return importlib.import_module(library)
    except ImportError:
        return None


class Destination:
    """Memory for tensors.

    `buffer` is where the bytes of a tensor are to be written: the tensor's own memory where its
    values lie one behind the other, else a copy that `finish` brings to its place.
    """

    def __init__(
        self,
        arrays: dict[str, Array],
        setters: dict[str, Callable[[Any], None]],
        values: dict[str, Any],
    ) -> None:
        self.arrays = arrays
        self._setters = setters
        self._values = values

    def is_direct(self, name: str) -> bool:
        """True if the tensor's own memory can take its bytes."""
        array = self.arrays[name]
        if _is_torch(array):
            return (
                array.device.type == "cpu"
                and array.is_contiguous()
                and not array.is_conj()
                and not array.is_neg()
            )
        return bool(array.flags.c_contiguous)

    def buffer(self, name: str) -> tuple[memoryview, Array]:
        """The memory for a tensor, and the array that has it."""
        array = self.arrays[name]
        if _is_torch(array):
            torch = sys.modules["torch"]
            array = array.detach()
            if not self.is_direct(name):
                array = torch.empty(array.shape, dtype=array.dtype)
            return _torch_bytes(array), array
        numpy = sys.modules["numpy"]
        if not array.flags.c_contiguous:
            array = numpy.empty(array.shape, array.dtype)
        return host_bytes(array), array

    def finish(self, name: str, array: Array) -> None:
        """Bring a copy that was filled to its place."""
        target = self.arrays[name]
        if _is_torch(target):
            target.detach().copy_(array)
        else:
            target[...] = array

    def set_values(self) -> None:
        """Write the numbers and texts that the destination has, too."""
        for name in self._setters.keys() & self._values.keys():
            self._setters[name](self._values[name])


# ----------------------------------------------------------------------------------- the structure


def _parse_metadata(header: safetensors.Header) -> tuple[Any, dict[str, Any]]:
    text = header.metadata.get(_METADATA)
    if text is None:  # a dict of tensors of torch, or a file of another writer
        return ["d", [[name, ["t", name]] for name in header.tensors]], {}
    try:
        described = json.loads(text)
        structure, escaped = described["structure"], described["dtypes"]
        names = [name for name, _ in _leaves(structure)]
        if sorted(names) != sorted(header.tensors):
            raise ValueError("its names are not those of the tensors")
        for name, dtype in escaped.items():
            tensor = header.tensors[name]
            if tensor.dtype != "U8" or not tensor.shape or not isinstance(dtype, (str, list)):
                raise ValueError(f"{name} has a dtype that does not fit")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataStoreError(
            f"the metadata of these tensors is malformed: {error!r:.200}"
        ) from error
    return structure, escaped


def _leaves(node: Any, level: int = 0) -> Iterable[tuple[str, str]]:  # noqa: ANN401
    """Name and library (`t` or `n`) of each tensor; checks the structure on the way."""
    kind, content = node
    if level > _LEVELS + 1:
        raise ValueError("nested too deep")
    if kind in ("t", "n"):
        yield content, kind
    elif kind == "d":
        for key, child in content:
            if type(key) not in (str, int):
                raise ValueError(f"the key {key!r:.80}")
            yield from _leaves(child, level + 1)
    elif kind in ("l", "u"):
        for child in content:
            yield from _leaves(child, level + 1)
    elif kind != "v" or not isinstance(content, _PLAIN):
        raise ValueError(f"the part {kind!r:.80}")


def _plain_values(node: Any, name: str) -> Iterable[tuple[str, Any]]:  # noqa: ANN401
    kind, content = node
    if kind == "v":
        yield name, content
    elif kind == "d":
        for key, child in content:
            yield from _plain_values(child, _join(name, key))
    elif kind in ("l", "u"):
        for index, child in enumerate(content):
            yield from _plain_values(child, _join(name, index))


def _restored(node: Any, arrays: Mapping[str, Array], is_part: bool) -> Any:  # noqa: ANN401
    """The value; of a part of the tensors the dicts and lists that have some of them."""
    kind, content = node
    if kind in ("t", "n"):
        return arrays[content]
    if kind == "v":
        return content
    if kind == "d":
        children = [(key, child) for key, child in content if _remains(child, arrays, is_part)]
        return {key: _restored(child, arrays, is_part) for key, child in children}
    items = [
        _restored(child, arrays, is_part) for child in content if _remains(child, arrays, is_part)
    ]
    return items if kind == "l" else tuple(items)


def _remains(node: Any, arrays: Mapping[str, Array], is_part: bool) -> bool:  # noqa: ANN401
    return not is_part or any(name in arrays for name, _ in _leaves(node))
