"""Programs for 0.5 import its modules, whose names are in other modules now."""

from __future__ import annotations

import importlib
import sys

import pytest

import kubetorch as kt
from kubetorch import _moved
from kubetorch.sdk import backend


@pytest.mark.parametrize("module", sorted(_moved._EARLIER_MODULES))
def test_a_module_of_0_5_has_the_names_that_there_are(module: str) -> None:
    sys.modules.pop(module, None)
    with pytest.warns(
        DeprecationWarning, match=rf"{module} is a module of kubetorch 0\.5"
    ) as warned:
        earlier_module = importlib.import_module(module)
    assert warned[0].filename != _moved.__file__
    for name in _moved._EARLIER_MODULES[module].keys() - {"*"}:
        assert getattr(earlier_module, name) is not None
    with pytest.raises(ImportError):
        exec(f"from {module} import never_there", {})


def test_what_is_set_in_a_module_of_0_5_is_set() -> None:
    with pytest.warns(DeprecationWarning):
        sys.modules.pop("kubetorch.globals", None)
        globals_ = importlib.import_module("kubetorch.globals")
    assert globals_.config is kt.config
    assert globals_.controller_client is backend.controller_client
    try:
        globals_.disable_decorators = True
        assert backend.disable_decorators is True
    finally:
        globals_.disable_decorators = False
    assert backend.disable_decorators is False
