"""Values that are changed on their way, with a fixed seed; `value_fuzzer` runs without an end."""

from __future__ import annotations

import pytest

from shared import WHOLE
from tests.local import value_fuzzer

#: 3,000 are tried in 20 s of a processor.
INPUTS = 3000 if WHOLE else 600


@pytest.mark.security
@pytest.mark.timeout(600)
def test_whatever_is_decoded_can_be_used_or_was_refused() -> None:
    assert list(value_fuzzer.run(1, 0, INPUTS)) == []
