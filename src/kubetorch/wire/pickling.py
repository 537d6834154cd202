"""The codec `pickle`: protocol 5, whose buffers travel as segments of their own.

Standard library only, as `kubetorch.wire.codecs`, which imports this when there is something to
pickle.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kubetorch.errors import SerializationError
from kubetorch.wire import guarding

if TYPE_CHECKING:
    from kubetorch.wire.codecs import Segment


def encode(value: object) -> list[Segment]:
    """The pickle stream, then one segment for each buffer of the value.

    Raises:
        SerializationError: It cannot be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    try:
        stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        return [stream, *(buffer.raw() for buffer in buffers)]
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise SerializationError(
            f"a value of type {guarding.name_of(type(value))} cannot be pickled: "
            f"{guarding.said(error)}"
        ) from error


def decode(segments: Sequence[Segment], modules: Mapping[str, str]) -> object:
    """The value of what `encode` made, its buffers used in place.

    Args:
        segments: The stream and the buffers.
        modules: Modules to look up under another name.

    Raises:
        SerializationError: It is no pickle, or its classes cannot be had here.
    """
    if not segments:
        raise SerializationError("the body of a pickled value is empty")
    try:
        if modules:
            return _Unpickler(bytes(segments[0]), segments[1:], modules).load()
        return pickle.loads(segments[0], buffers=segments[1:])
    except (SerializationError, *guarding.INTERRUPTS):
        raise
    except BaseException as error:  # unpickling runs code of the user's classes
        raise SerializationError(
            f"the pickled value cannot be rebuilt here: {guarding.said(error)}",
            hint="both ends need the same classes and compatible versions of their libraries",
        ) from error


class _Unpickler(pickle.Unpickler):
    """Finds classes under the module names of this process."""

    def __init__(self, stream: bytes, buffers: Sequence[Segment], modules: Mapping[str, str]):
        super().__init__(io.BytesIO(stream), buffers=iter(buffers))
        self._modules = modules

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401  # as the base has it
        return super().find_class(self._modules.get(module, module), name)
