"""The cache of tensors on disk."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kubetorch.datastore.blobs import BlobStore
from kubetorch.sdk.data.tensor_cache import shrink
from kubetorch.sdk.tuning import TIMING


def test_a_cache_loses_what_was_used_longest_ago_and_nothing_that_gets_may_be_reading(
    tmp_path: Path,
) -> None:
    cache = BlobStore(tmp_path)
    oldest, older, young = (cache.add(bytes([number]) * 1000) for number in range(3))
    now = time.time()
    for digest, age in ((oldest, 3), (older, 2), (young, 0.5)):
        modified = now - age * TIMING.young_chunk_seconds
        os.utime(cache.path(digest), (modified, modified))

    shrink(cache, limit_bytes=2000)
    assert [cache.has(digest) for digest in (oldest, older, young)] == [False, True, True]

    shrink(cache, limit_bytes=0)
    assert [cache.has(digest) for digest in (oldest, older, young)] == [False, False, True]
