from __future__ import annotations

import pytest

from kubetorch.wire.frames import Ancestor, Chain


def test_a_chain_travels_as_a_text() -> None:
    chain = Chain(
        (Ancestor("a-1", "a-2", "pod-0"), Ancestor("b-1", "b-1"), Ancestor("c", "d", "e"))
    )
    assert Chain.parse(chain.render()) == chain
    assert chain.pods == ("e", "pod-0")
    assert Chain.parse("") == Chain()


@pytest.mark.parametrize("text", ["?", ":", "a::pod", ":b:pod", "a:b:c:d", ","])
def test_malformed_parts_of_a_chain_are_left_out(text: str) -> None:
    assert Chain.parse(f"{text},a:b") == (Ancestor("a", "b"),)
