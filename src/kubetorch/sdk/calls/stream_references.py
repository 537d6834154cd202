"""The references whose values a pod got on one stream.

A value goes once, ahead of the first call that names it. A pod that has it no more, since it was
started again or needed the room, refuses a call that names it; the call is then made once more,
with the value ahead of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial

from kubetorch.sdk.calls.stream_writer import LOST, Event, Frame, message
from kubetorch.wire import exceptions, frames
from kubetorch.wire.frames import Kind
from kubetorch.wire.references import Content, Named


class StreamReferences:
    """Sends values by `send`, whose events `on_event` gets, and frames by `submit`."""

    def __init__(
        self,
        send: Callable[[Content, Callable[[Event], None]], None],
        submit: Callable[[Frame], None],
    ) -> None:
        self._send = send
        self._submit = submit
        self._sent: set[str] = set()
        # Why the pod did not take a value, by identity.
        self._refusals: dict[str, Exception] = {}

    def send_missing(self, named: Iterable[Named]) -> None:
        """Send the values that the pod did not get yet."""
        for identity, content in named:
            if identity in self._sent or content is None:
                continue
            self._sent.add(identity)
            self._refusals.pop(identity, None)
            # By destructors, in any thread at any moment: nothing here takes a lock.
            release = partial(_release, weakref.ref(self), identity)
            weakref.finalize(content, release).atexit = False
            self._send(content, partial(self._on_event, identity))

    def forget(self, named: Iterable[Named]) -> None:
        """Send the values once more with the next call: the pod lacks some."""
        for identity, _ in named:
            self._sent.discard(identity)

    def forget_all(self) -> None:
        self._sent.clear()

    def refusal(self, named: Iterable[Named]) -> Exception | None:
        """Why the pod did not take one of these values."""
        refusals = (self._refusals.get(identity) for identity, _ in named)
        return next(filter(None, refusals), None)

    def _on_event(self, identity: str, event: Event) -> None:
        if event.kind == Kind.ERROR:
            failure = exceptions.parse_json(bytes(event.payload or b""))
            self._refusals[identity] = exceptions.rebuild(failure, modules={})
        if event.kind in (Kind.ERROR, LOST):
            self._sent.discard(identity)

    def _on_released(self, identity: str) -> None:
        self._refusals.pop(identity, None)
        if identity in self._sent:
            self._sent.discard(identity)
            meta = frames.Release((identity,))
            self._submit(Frame(message(frames.encode(Kind.RELEASE, 0, meta))))


def _release(stream: weakref.ref[StreamReferences], identity: str) -> None:
    references = stream()
    if references is not None:
        references._on_released(identity)
