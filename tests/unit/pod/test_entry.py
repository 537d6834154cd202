"""`python -m kubetorch.pod`."""

from kubetorch.pod import __main__ as entry
from kubetorch.wire import podenv


def test_the_variable_of_the_backend_is_that_of_a_pod() -> None:
    assert entry._BACKEND_VARIABLE == podenv.BACKEND
