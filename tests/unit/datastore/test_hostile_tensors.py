"""Headers of tensors that claim what is not there: they cost an error, and no memory."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy
import pytest

from kubetorch.datastore import safetensors, weights
from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.datastore.manifests import Chunk, Entry, Manifest
from kubetorch.datastore.tensors import Contents
from kubetorch.datastore.tuning import LIMITS
from kubetorch.errors import DataStoreError


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path)


def header_of(fields: object) -> bytes:
    text = json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text


def tensor_of(*shape: int) -> dict[str, Any]:
    """The only tensor of a file, of bytes."""
    return {"a": {"dtype": "U8", "shape": shape, "data_offsets": (0, math.prod(shape))}}


def test_a_dtype_whose_bytes_would_be_addresses_is_refused() -> None:
    pytest.importorskip("ml_dtypes")
    text = '{"structure": ["n", "a"], "dtypes": {"a": "finfo"}}'
    content = header_of({**tensor_of(2, 8), "__metadata__": {"kubetorch": text}}) + bytes(16)
    with pytest.raises(DataStoreError, match="finfo, which NumPy lacks"):
        Contents(safetensors.parse(content, len(content))).new_destination()


def stored_with_hole(store: BlobStore, fields: object, hole_bytes: int) -> weights.StoredTensors:
    """A file with a header, behind which nothing was written."""
    header = header_of(fields)
    store.put(digest_of(header), header)
    chunks = (Chunk(digest_of(header), len(header)), Chunk("", hole_bytes))
    return weights.StoredTensors(Manifest("tensors", (Entry("", chunks=chunks),)), store.read)


def test_a_tensor_that_claims_much_and_is_a_hole_costs_an_error_and_no_memory(
    store: BlobStore,
) -> None:
    size = 2**59
    tracemalloc.start()
    stored = stored_with_hole(store, tensor_of(size), size)
    with pytest.raises(DataStoreError, match="are allowed"):
        _ = stored.header.cuts
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000
    with pytest.raises(DataStoreError, match=f"no memory for a of {size:,} bytes"):
        Contents(stored.header).new_destination()


def test_a_header_that_would_lie_in_a_hole_is_refused_without_its_memory(store: BlobStore) -> None:
    entry = Entry("", chunks=(Chunk("", 2**50),))
    tracemalloc.start()
    with pytest.raises(DataStoreError, match="no file of safetensors"):
        weights.StoredTensors(Manifest("tensors", (entry,)), store.read)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * LIMITS.tensor_header_bytes


def test_a_hole_in_tensors_is_zeros(store: BlobStore) -> None:
    size = LIMITS.tensor_chunk_bytes + 8
    stored = stored_with_hole(store, tensor_of(size), size)
    contents = Contents(stored.header)
    ones = {"a": numpy.ones(size, "u1")}
    stored.fill(contents.destination(ones), contents, store)
    assert not ones["a"].any()
