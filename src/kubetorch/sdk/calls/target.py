"""Describes the callable of a service for calls, from its view and the code of this program."""

from __future__ import annotations

import sys
from pathlib import PurePath
from types import FunctionType
from typing import Literal

from kubetorch.lib import modules
from kubetorch.sdk import batching, inpod
from kubetorch.sdk.calls import options
from kubetorch.sdk.calls.attempts import Target
from kubetorch.sdk.deploys.source import Source
from kubetorch.sdk.tuning import LIMITS
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.logging import LoggingConfig
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import exceptions, introspection
from kubetorch.wire.messages import WorkloadView, called_together

# Flags of a function's code, as in `inspect`, whose import costs 10 ms.
_GENERATOR, _ASYNC_GENERATOR = 0x20, 0x200


def describe(
    view: WorkloadView, method: str | None, source: Source | None, logging: LoggingConfig
) -> Target:
    spec = view.spec
    definition = None if source is None else source.callable_object
    function: object = definition
    if definition is not None and spec.callable.kind == "cls":
        function = introspection.attribute(definition, method or "__call__")
    return Target(
        namespace=spec.namespace,
        service=spec.name,
        callable=spec.callable.name,
        method=method,
        kind=kind_of(function),
        declared=spec.callable.options_of(method)
        if definition is None
        else options.declared_parameters(function),
        modules=local_modules(spec.callable, is_script=source is not None and source.is_script),
        allowed=spec.compute.allowed_serialization,
        logging=logging,
        broadcast=called_together(spec, view.pool),
        is_balanced=spec.compute.is_balanced,
        pods=() if view.scaler or view.scaling else tuple(range(spec.compute.pods)),
        is_bounded=spec.compute.concurrency is not None,
        is_distributed=spec.compute.distribution is not None,
        pod_items=_pod_items(spec, method, function, is_known=definition is not None),
        origin=None if spec.origin is None else spec.origin.key,
        project=None if source is None or inpod.is_worker() else source.locate(),
    )


def _pod_items(spec: WorkloadSpec, method: str | None, function: object, *, is_known: bool) -> int:
    batch = batching.spec_of(function)
    size = spec.callable.batch_size_of(method)
    if is_known:
        size = 0 if batch is None else batch.max_size
    return LIMITS.offered_batches * size * (spec.compute.processes or 1)


def kind_of(function: object) -> Literal["function", "generator", "async_generator"]:
    if isinstance(function, FunctionType):
        if function.__code__.co_flags & _ASYNC_GENERATOR:
            return "async_generator"
        if function.__code__.co_flags & _GENERATOR:
            return "generator"
    return "function"


def local_modules(ref: CallableRef, *, is_script: bool = False) -> dict[str, str]:
    """The modules of a service that have another name here: its script may be `__main__`."""
    file = modules.file_of(sys.modules.get("__main__"))
    is_same = file is not None and PurePath(file).stem == ref.module.rpartition(".")[2]
    return {ref.module: "__main__"} if ref.is_script and (is_script or is_same) else {}


def is_served(view: WorkloadView) -> bool:
    """True if a pod of the service takes calls, or one will be made for them."""
    if view.scaler or any(pod.is_ready for pod in view.pods):
        return True
    return view.scaling is not None and view.status != "Failed"


def is_failed(view: WorkloadView) -> bool:
    """True if the service failed and no pod takes calls."""
    return view.status == "Failed" and view.failure is not None and not is_served(view)


def failure_of(view: WorkloadView, source: Source | None) -> Exception:
    """The error of the deploy because of which a service serves no calls."""
    is_script = source is not None and source.is_script
    modules = local_modules(view.spec.callable, is_script=is_script)
    return exceptions.rebuild(exceptions.parse(view.failure or {}), modules=modules)
