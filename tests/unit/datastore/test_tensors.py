"""Tensors of torch and NumPy into the chunks of a store and back."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kubetorch.datastore import safetensors, weights
from kubetorch.datastore.blobs import BlobStore, digest_of, poisoned
from kubetorch.datastore.chunks import cut
from kubetorch.datastore.manifests import Chunk, Entry, Manifest
from kubetorch.datastore.tensors import Contents, TensorFile
from kubetorch.datastore.tuning import LIMITS
from kubetorch.errors import DataStoreError, SpecError

torch = pytest.importorskip("torch")


def put(store: BlobStore, value: object) -> Manifest:
    file = TensorFile(value)
    manifest = weights.manifest_of(file, [digest_of(c) for c in chunks_of(file)])
    for chunk in (file.encoded_header, *chunks_of(file)):
        store.put(digest_of(chunk), chunk)
    return manifest


def chunks_of(file: TensorFile) -> list[memoryview | bytes]:
    return [file.chunk(number) for number in range(len(file.header.cuts))]


def get(store: BlobStore, manifest: Manifest, dest: Any = None, only: tuple[str, ...] = ()) -> Any:
    stored = weights.StoredTensors(manifest, store.read)
    contents = Contents(stored.header, only)
    destination = contents.new_destination() if dest is None else contents.destination(dest)
    if damaged := weights.damaged(store, stored.blob_sizes(contents.tensors)):
        raise poisoned(damaged[0], "damaged")
    stored.fill(destination, contents, store)
    return contents.value(destination) if dest is None else dest


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path)


def same(a: Any, b: Any) -> bool:
    """Equal dtype, shape and bytes."""
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        a, b = a.detach().resolve_conj().resolve_neg(), b.detach()
        if not a.numel():
            return True
        return bool(torch.equal(flat_bytes(a), flat_bytes(b)))
    return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


def flat_bytes(tensor: Any) -> Any:
    if tensor.dim() and tensor.stride(-1) != 1:  # `contiguous` leaves it where its size is 1
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return tensor.contiguous().reshape(-1).view(torch.uint8)


_TORCH_DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
    },
    key=str,
)


def random_tensor(dtype: Any, shape: tuple[int, ...]) -> Any:
    size = int(numpy.prod(shape)) * dtype.itemsize
    content = bytearray(random.Random(size).randbytes(size))
    if dtype is torch.bool:
        content = bytearray(byte & 1 for byte in content)
    data = (
        torch.frombuffer(content, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
    )
    return data.view(dtype).view(shape)


@pytest.mark.parametrize("dtype", _TORCH_DTYPES, ids=str)
def test_every_dtype_of_torch_comes_back(store: BlobStore, dtype: Any) -> None:
    value = {"a": random_tensor(dtype, (3, 5)), "b": random_tensor(dtype, (0, 2))}
    back = get(store, put(store, value))
    assert same(value["a"], back["a"])
    assert same(value["b"], back["b"])


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.int64, torch.uint8]),
    permutation=st.randoms(use_true_random=False),
    step=st.integers(1, 3),
    start=st.integers(0, 2),
)
def test_views_of_any_strides_and_offset_come_back_and_take_values(
    tmp_path_factory: pytest.TempPathFactory,
    shape: tuple[int, ...],
    dtype: Any,
    permutation: random.Random,
    step: int,
    start: int,
) -> None:
    axes = list(range(len(shape)))
    permutation.shuffle(axes)
    base = random_tensor(dtype, tuple(size + 2 for size in shape))
    view = base.permute(axes)[tuple(slice(start, None, step) for _ in shape)]
    store = BlobStore(tmp_path_factory.mktemp("store"))
    manifest = put(store, {"nested": {"view": view}})
    assert same(view, get(store, manifest)["nested"]["view"])
    other = torch.zeros_like(base)
    target = other.permute(axes)[tuple(slice(start, None, step) for _ in shape)]
    get(store, manifest, {"nested": {"view": target}})
    assert same(view, target)
    untouched = torch.ones(base.shape, dtype=torch.bool)
    untouched.permute(axes)[tuple(slice(start, None, step) for _ in shape)] = False
    assert not other[untouched].float().any()


@pytest.mark.parametrize(
    "array",
    [
        numpy.arange(6, dtype=">i4").reshape(2, 3),
        numpy.array(["2024-01-01", "NaT"], dtype="datetime64[ns]"),
        numpy.array([(1, 2.0)], dtype=[("a", "i2"), ("b", "f8")]),
        numpy.array(["text", ""]),
        numpy.array([1 + 2j], dtype=numpy.complex128),
        numpy.asfortranarray(numpy.arange(12.0).reshape(3, 4)),
        numpy.arange(12, dtype=numpy.float16)[::-2],
        numpy.array(3.5),
        numpy.bool_(True),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_of_numpy_come_back(store: BlobStore, array: Any) -> None:
    back = get(store, put(store, {"a": array}))["a"]
    assert isinstance(back, numpy.ndarray)
    assert same(numpy.asarray(array), back)


def test_a_checkpoint_comes_back_with_its_numbers_and_texts(store: BlobStore) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    value = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 7,
        "name": "é",
        "scale": torch.tensor(2.0),
        "pair": (torch.ones(1), [numpy.ones(2)]),
        "empty": {},
    }
    back = get(store, put(store, value))
    assert back["optimizer"]["param_groups"] == value["optimizer"]["param_groups"]
    assert same(value["optimizer"]["state"][0]["exp_avg"], back["optimizer"]["state"][0]["exp_avg"])
    assert (back["step"], back["name"], back["empty"]) == (7, "é", {})
    assert isinstance(back["pair"], tuple)
    assert isinstance(back["pair"][1][0], numpy.ndarray)
    dest = {**value, "scale": torch.tensor(0.0), "step": 0}
    assert get(store, put(store, value), dest)["step"] == 7
    assert dest["scale"].item() == 2.0


def test_a_plain_state_dict_is_a_plain_file_of_safetensors(store: BlobStore) -> None:
    manifest = put(store, torch.nn.Linear(4, 3).state_dict())
    content = b"".join(store.read(c.digest) for c in manifest.entries[0].chunks)
    header = safetensors.parse(content, len(content))
    assert header.metadata == {}
    assert set(header.tensors) == {"weight", "bias"}


def test_a_model_is_filled_in_place(store: BlobStore) -> None:
    source, target = torch.nn.Linear(40, 30), torch.nn.Linear(40, 30)
    get(store, put(store, source.state_dict()), target.state_dict())
    assert torch.equal(source.weight, target.weight)
    assert target.weight.requires_grad


def test_tied_weights_share_their_chunks(store: BlobStore) -> None:
    weight = torch.randn(1024, 2048)
    manifest = put(store, {"embed": weight, "head": weight})
    assert len(manifest.digests()) == 1 + weight.nbytes // LIMITS.tensor_chunk_bytes
    back = get(store, manifest)
    assert same(weight, back["embed"])
    assert same(weight, back["head"])


def test_chunks_begin_at_tensors_so_that_an_inserted_tensor_moves_no_others(
    store: BlobStore,
) -> None:
    large = {f"layers.{index}": torch.randn(1100, 1024) for index in range(3)}
    before = put(store, large)
    after = put(store, {**large, "layers.0a": torch.randn(7)})
    new = set(after.digests()) - set(before.digests())
    assert len(new) == 2  # the header and the new tensor


def test_only_some_tensors_are_read_from_their_chunks_alone(store: BlobStore) -> None:
    value = {
        "layers": [{"w": torch.randn(1100, 1024)} for _ in range(3)],
        "bias": torch.ones(1),
    }
    manifest = put(store, value)
    stored = weights.StoredTensors(manifest, store.read)
    needed = stored.blob_sizes(Contents(stored.header, ["layers.1.*"]).tensors)
    for digest in manifest.digests()[1:]:
        if digest not in needed:
            store.delete(digest)
    back = get(store, manifest, only=("layers.1.*",))
    assert list(back) == ["layers"]
    assert same(back["layers"][0]["w"], value["layers"][1]["w"])
    target = {"layers": [{"w": torch.zeros(1100, 1024)} for _ in range(3)]}
    get(store, manifest, target, only=("layers.1.*",))
    assert not target["layers"][0]["w"].any()
    assert same(target["layers"][1]["w"], value["layers"][1]["w"])
    with pytest.raises(DataStoreError, match=r"no tensor matches .*head"):
        get(store, manifest, only=("head.*",))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"a": torch.zeros(2, 3)}, "lacks b"),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(2), "c": torch.zeros(1)}, "only .* has c"),
        ({"a": torch.zeros(3, 2), "b": torch.zeros(2)}, r"a is \[2, 3\] in the store and \[3, 2\]"),
        ({"a": torch.zeros(2, 3).half(), "b": torch.zeros(2)}, "float32 .* and float16"),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(1).expand(2)}, "expanded"),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(2, device="meta")}, "meta"),
        ({"a": torch.zeros(2, 3), "b": numpy.broadcast_to(numpy.float32(0), (2,))}, "expanded"),
    ],
)
def test_a_destination_that_does_not_fit_is_as_before(
    store: BlobStore, change: dict[str, Any], fault: str
) -> None:
    manifest = put(store, {"a": torch.ones(2, 3), "b": torch.ones(2)})
    with pytest.raises(DataStoreError, match=fault):
        get(store, manifest, change)
    assert not any(
        t.any() for t in change.values() if getattr(t, "device", None) != torch.device("meta")
    )


def test_an_array_takes_what_a_tensor_was(store: BlobStore) -> None:
    dest = {"a": numpy.zeros((3, 2), numpy.float32).T}
    get(store, put(store, {"a": torch.arange(6.0).view(2, 3)}), dest)
    assert dest["a"].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ({"a": torch.ones(1), "f": object()}, "f is a object"),
        ({"a": numpy.array([None])}, "no bytes of its own"),
        ({"a": torch.ones(2).to_sparse()}, "sparse"),
        ({"a": torch.ones(2, device="meta")}, "meta"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "two tensors have the name 'a.b'"),
        ({1.5: torch.ones(1)}, "neither a text nor an int"),
        ({"__metadata__": torch.ones(1)}, "reserved"),
        ({"a": numpy.ma.array([1], mask=[True])}, "masked"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_its_name(value: object, fault: str) -> None:
    with pytest.raises(SpecError, match=fault):
        TensorFile(value)


def test_a_flipped_bit_is_noticed_and_its_blob_removed(store: BlobStore) -> None:
    manifest = put(store, {"a": torch.ones(3_000_000)})
    damaged = manifest.entries[0].chunks[-1].digest
    with store.path(damaged).open("r+b") as file:
        file.seek(1000)
        file.write(b"\x01")
    assert weights.damaged(store, manifest.digests()) == [damaged]
    assert not store.has(damaged)


# ------------------------------------------------------------------------------- hostile headers


def file_of(fields: object, data: bytes = b"\0" * 16) -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text + data


def described(dtype: object = "U8", shape: object = (16,), offsets: object = (0, 16)) -> Any:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "header has 0 bytes"),
        (b"\xff" * 8, "the file 8"),
        ((2**40).to_bytes(8, "little") + b"{", "the file 9"),
        (file_of(b"[]"), "no object"),
        (file_of(b"{" * 100_000), "."),
        (file_of(b"[" * 100_000), "."),
        (file_of(b"\xff\xfe"), "."),
        (file_of({"a": described(offsets=(0, 17))}), "16.* in 17"),
        (file_of({"a": described(shape=(32,), offsets=(0, 32))}), "32 bytes, the file has 16"),
        (file_of({"a": described(offsets=(2**62, 2**62 + 16))}), "gap"),
        (file_of({"a": described(offsets=(-16, 0))}), "none"),
        (file_of({"a": described(offsets=(16, 0))}), "offsets"),
        (file_of({"a": described(), "b": described()}), "overlaps"),
        (file_of({"a": described(shape=(8,), offsets=(8, 16))}), "gap"),
        (file_of({"a": described(shape=(8,), offsets=(0, 8))}), "8 bytes, the file has 16"),
        (file_of({"a": described(dtype="U7")}), "U7"),
        (file_of({"a": described(dtype=["U8"])}), "unknown"),
        (file_of({"a": described(shape=(True, 16))}), "none"),
        (file_of({"a": described(shape=(2**40, 2**40, 0), offsets=(0, 0))}), "no array can have"),
        (file_of({"a": described(shape=(1,) * 65, offsets=(0, 1))}), "no lists"),
        (file_of({"a": {**described(), "more": 1}}), "has not"),
        (file_of({"a": described(), "__metadata__": {"a": 1}}), "no texts"),
        (file_of(b'{"a":{"dtype":"U8","shape":[16],"data_offsets":[0,16]},"a":{}}'), "twice"),
        (file_of(b'{"a": ' + b"9" * 5000 + b"}"), "."),
    ],
)
def test_a_hostile_header_is_refused(content: bytes, fault: str) -> None:
    with pytest.raises(DataStoreError, match=f"no file of safetensors.*{fault}"):
        safetensors.parse(content, len(content))


def test_a_header_that_claims_much_takes_no_memory() -> None:
    tracemalloc.start()
    with pytest.raises(DataStoreError, match="are allowed"):
        safetensors.parse((2**35).to_bytes(8, "little"), 2**40)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize(
    "metadata",
    [
        "nonsense",
        "[]",
        '{"structure": ["d", []], "dtypes": {}}',
        '{"structure": ["t", "b"], "dtypes": {}}',
        '{"structure": ["x", "a"], "dtypes": {}}',
        '{"structure": ["t", "a"], "dtypes": {"a": 5}}',
        '{"structure": ["t", "a"], "dtypes": {"b": "float32"}}',
        '{"structure": ["d", [[["a"], ["t", "a"]]]], "dtypes": {}}',
        '{"structure": ["t", "a"], "dtypes": {"a": "nonsense"}}',
        '{"structure": ["t", "a"], "dtypes": {"a": "float64"}}',
        '{"structure": ["t", "a"], "dtypes": {"a": "qint8"}}',
        '{"structure": ["n", "a"], "dtypes": {"a": ["|O8"]}}',
        '{"structure": ["n", "a"], "dtypes": {"a": "<nonsense"}}',
        '{"structure": ["n", "a"], "dtypes": {"a": "__doc__"}}',
        '{"structure": ["n", "a"], "dtypes": {"a": ["<U9999"]}}',
    ],
)
def test_a_hostile_structure_is_refused(metadata: str) -> None:
    content = file_of({"a": described(), "__metadata__": {"kubetorch": metadata}})
    with pytest.raises(DataStoreError):
        Contents(safetensors.parse(content, len(content))).new_destination()


def test_a_file_of_another_writer_is_read() -> None:
    fields = {"b": described("F16", (4,), (0, 8)), "a": described("U8", (2, 4), (8, 16))}
    content = file_of({**fields, "__metadata__": {"format": "pt"}})
    contents = Contents(safetensors.parse(content, len(content)))
    arrays = contents.new_destination().arrays
    assert {name: (t.dtype, tuple(t.shape)) for name, t in arrays.items()} == {
        "a": (torch.uint8, (2, 4)),
        "b": (torch.float16, (4,)),
    }


def test_a_file_of_safetensors_is_cut_at_its_tensors_and_read_as_tensors(
    tmp_path: Path, store: BlobStore
) -> None:
    value = {f"layers.{index}": torch.randn(1100, 1024) for index in range(2)}
    file = TensorFile(value)
    path = tmp_path / "model.bin"
    path.write_bytes(b"".join([file.encoded_header, *chunks_of(file)]))
    with path.open("rb") as opened:
        cuts = list(cut(opened.fileno(), file.size))
    digests = [digest_of(piece.data or b"") for piece in cuts]
    assert digests == [digest_of(c) for c in (file.encoded_header, *chunks_of(file))]
    whole = path.read_bytes()
    store.put(digest_of(whole), whole)
    entry = Entry("", chunks=(Chunk(digest_of(whole), len(whole)),))
    assert same(get(store, Manifest("file", (entry,)))["layers.1"], value["layers.1"])


def test_a_file_that_only_begins_like_safetensors_is_cut_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes((100).to_bytes(8, "little") + b"{" + random.Random(1).randbytes(3_000_000))
    with path.open("rb") as opened:
        assert safetensors.chunk_sizes(lambda a, b: path.read_bytes()[a:b], 3_000_009) == []
        pieces = list(cut(opened.fileno(), 3_000_009))
    assert sum(piece.size for piece in pieces) == 3_000_009
