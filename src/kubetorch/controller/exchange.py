"""One HTTP request to the controller and its answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from kubetorch.controller.access import Asker
from kubetorch.errors import ControllerError, ProtocolError
from kubetorch.lib import asgi
from kubetorch.lib.asgi import JSON, Receive, Request, Responder, Scope, Send
from kubetorch.wire import messages, routes

#: Bytes that the body of a request may have, where nothing else is said.
BODY_LIMIT = 4 * 1024 * 1024

_T = TypeVar("_T")


class Exchange(Request):
    """A request, and the means to answer it.

    Attributes:
        request_id: Its name in logs and in its answer.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope, receive)
        given = self.headers.get(routes.REQUEST_ID.lower(), "")
        # The audit log of a cluster is to find each of them again, years later.
        self.request_id = asgi.request_id(given, size=16)
        self._responder = Responder(send, {routes.REQUEST_ID.lower(): self.request_id})
        self._asker: Asker | None = None

    @property
    def asker(self) -> Asker:
        """Who sends it."""
        if self._asker is None:
            raise ControllerError(f"{self.method} {self.path} was let in by nobody")
        return self._asker

    @asker.setter
    def asker(self, asker: Asker) -> None:
        self._asker = asker

    # ----------------------------------------------------------------------------- the request

    def flag(self, name: str) -> bool:
        """A parameter that is `true` or `false`, which it is when it is missing.

        Raises:
            ProtocolError: It is something else.
        """
        value = self.query(name, "false").lower()
        if value not in ("true", "false", "1", "0"):
            raise ProtocolError(f"{name} is {value!r}; it must be true or false")
        return value in ("true", "1")

    def number(self, name: str, default: float, *, least: float, most: float) -> float:
        """A parameter that is a number within bounds.

        Raises:
            ProtocolError: It is not.
        """
        text = self.query(name)
        try:
            value = float(text) if text else default
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            raise ProtocolError(f"{name} is {text!r}; it must be a number from {least} to {most}")
        return value

    async def message(self, kind: type[_T]) -> _T:
        """The body as a message of this type; an empty one is `{}`.

        Raises:
            ProtocolError: It is not one.
        """
        return messages.decode(kind, await self.body(BODY_LIMIT) or b"{}")

    # ------------------------------------------------------------------------------ the answer

    @property
    def has_begun(self) -> bool:
        """Whether the head of the answer was sent."""
        return self._responder.has_begun

    def passed_on(self) -> None:
        """Somebody else has begun to answer."""
        self._responder.has_begun = True

    def on_status(self, callback: Callable[[int], None]) -> None:
        """Tell this one the status of the answer before it is sent."""
        self._responder.on_status = callback

    async def respond(self, body: bytes, *, status: int = 200, content_type: str = JSON) -> None:
        """Answer with a body."""
        await self._responder.answer(status, body, content_type)

    async def respond_message(self, message: object, *, status: int = 200) -> None:
        """Answer with a message, or a list of them."""
        await self.respond(messages.encode(message), status=status)

    async def respond_stream(self, chunks: AsyncIterator[bytes], *, content_type: str) -> None:
        """Answer with chunks as they come; they are closed when the client goes away."""
        await self._responder.stream(chunks, content_type, self.disconnected())

    async def refuse(self, status: int, failure: bytes) -> None:
        """Answer with the one envelope that all errors have."""
        await self._responder.refuse(status, failure)
