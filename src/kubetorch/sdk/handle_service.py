"""`kt.service`: the attributes of a handle, also where a method of the user has the same name."""

from __future__ import annotations

from typing import Any

from kubetorch.errors import SpecError
from kubetorch.sdk.cls import OF_COMPUTE
from kubetorch.sdk.module import Module
from kubetorch.specs import hints
from kubetorch.specs.callable import OVERRIDABLE_METHODS
from kubetorch.wire import introspection


class Service:
    """The service of a handle; `kt.service(handle)` gives it.

    Its attributes are the ones that `kt.Module` documents, and `ssh`, `run_bash` and `rsync` of the
    service's compute; a method of the user hides none of them.
    """

    __slots__ = ("_module",)

    def __init__(self, module: Module[Any]) -> None:
        object.__setattr__(self, "_module", module)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # what the handle has
        module: Module[Any] = object.__getattribute__(self, "_module")
        if name in OF_COMPUTE:
            if module.compute is None:
                raise SpecError(
                    f"{module.name} has no compute", hint="deploy it with .to(kt.Compute(...))"
                )
            return getattr(module.compute, name)
        if name in OVERRIDABLE_METHODS:
            return getattr(Module, name).__get__(module)
        if not name.startswith("_") and hasattr(type(module), name):
            return object.__getattribute__(module, name)
        raise hints.no_attribute("handle", self, name, "service", module.service_name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._module, name, value)

    def __dir__(self) -> list[str]:
        ours = (name for name in dir(type(self._module)) if not name.startswith("_"))
        return sorted({*ours, *OF_COMPUTE})

    def __repr__(self) -> str:
        return f"Service({self._module.service_name!r}, namespace={self._module.namespace!r})"


def service(handle: object) -> Service:
    """Everything that is Kubetorch's own on a handle, whatever names the user's class has.

    Args:
        handle: What `kt.fn`, `kt.cls`, `kt.app` or a deploy returned.

    Raises:
        TypeError: It is no handle.

    Example:
        >>> kt.service(remote).ssh()  # also where the class of `remote` has a method `ssh`
    """
    if not isinstance(handle, Module):
        raise TypeError(f"kt.service takes a handle; this is {introspection.shown(handle)}")
    return Service(handle)
