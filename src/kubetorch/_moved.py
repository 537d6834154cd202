"""Where classes lie now that an earlier version pickled under another path.

A pickle names a class by the module and the name that the class had when the pickle was made. The
import system asks `find_spec` for modules of `kubetorch` that no file has any more; such a module
consists of the classes that `_MOVED` names. `tests/contract/test_earlier.py` loads them all.
"""

from __future__ import annotations

from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

#: The path in a pickle, and the path of the same class now.
_MOVED = {
    "kubetorch.sdk.apps.app.App": "kubetorch.sdk.app.App",
    "kubetorch.sdk.calls.handles_broadcast.BroadcastHandle": (
        "kubetorch.sdk.calls.handles.BroadcastHandle"
    ),
    "kubetorch.sdk.secrets.credentials.Credentials": "kubetorch.sdk.credentials.Credentials",
    "kubetorch.sdk.secrets.secret.Secret": "kubetorch.sdk.secret.Secret",
    "kubetorch.specs.app.AppSpec": "kubetorch.specs.callable.AppSpec",
    "kubetorch.wire.failures.Failure": "kubetorch.wire.exceptions.Failure",
    "kubetorch.wire.raw.RawBytes": "kubetorch.wire.codecs.RawBytes",
    "kubetorch.wire.raw.RawText": "kubetorch.wire.codecs.RawText",
    "kubetorch.wire.rebuilding.StandIn": "kubetorch.wire.exceptions.StandIn",
    "kubetorch.wire.rebuilding.make_telling": "kubetorch.wire.exceptions.with_text",
}
PATHS = tuple(_MOVED)


class _Loader(Loader):
    """Fills a module with the classes that were there."""

    def exec_module(self, module: ModuleType) -> None:
        def get(name: str) -> object:
            now = _MOVED.get(f"{module.__name__}.{name}")
            if now is None:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            place, _, found = now.rpartition(".")
            return getattr(import_module(place), found)

        vars(module)["__getattr__"] = get


def find_spec(name: str) -> ModuleSpec | None:
    """The module or package of an earlier version, if classes of it have moved."""
    if not any(path.startswith(f"{name}.") for path in PATHS):
        return None
    return ModuleSpec(name, _Loader(), is_package=True)
