"""What a call of a generator returns: an iterator over values that are made as they are taken."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

from kubetorch.sdk.calls.attempts import Attempts
from kubetorch.sdk.calls.invocation import Done, Yielded


class RemoteIterator(Iterator[Any]):
    """The values of a generator that runs in a pod.

    It computes ahead by what fits into the window of flow control and then waits for this end.
    Closing the iterator, or forgetting it, ends the generator there; so does leaving a `with`
    block. What the generator returns is the `value` of the `StopIteration`, as with a local one.

    Args:
        attempts: The call, which has been started.
        first: What has arrived of it: its first value, or its end.
    """

    def __init__(self, attempts: Attempts, first: Done | Yielded | None = None) -> None:
        self._attempts = attempts
        self._first = first

    def __next__(self) -> Any:  # noqa: ANN401  # the user's own value
        step, self._first = self._first, None
        if step is None:
            if self._attempts.is_over:
                raise StopIteration
            step = self._attempts.next()
        if isinstance(step, Yielded):
            return step.value
        if step.error is not None:
            raise step.error
        raise StopIteration(step.value)

    def close(self) -> None:
        """End the generator, if it has not ended."""
        self._first = None
        if not self._attempts.is_over:
            self._attempts.cancel()

    def __enter__(self) -> RemoteIterator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
