from __future__ import annotations

import pytest

from kubetorch.pod.user_process import protocol


@pytest.mark.parametrize("method", [None, "", "add", "größe", "a\0b", "x" * 70_000])
@pytest.mark.parametrize("request_id", ["", "r-1", "any\0thing\n", "\udc80"])
@pytest.mark.parametrize("chain", ["", "a-1:b-2,c-3:c-3"])
@pytest.mark.parametrize("retry_on", [[], ["builtins.OSError", "größe.Übel.Innen"]])
def test_what_is_called_survives_packing(
    method: str | None, request_id: str, chain: str, retry_on: list[str]
) -> None:
    packed = protocol.pack_call(method, request_id, chain, retry_on)
    assert protocol.unpack_call(packed) == (method, request_id, chain, retry_on)
