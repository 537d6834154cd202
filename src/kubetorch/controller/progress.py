"""The events of one deploy, for everybody who waits for it.

Events are kept until the deploy is over, so whoever joins late sees all of them; a client that goes
away changes nothing. They are bounded: a user's import may print without end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from kubetorch.lib.changes import Changes
from kubetorch.wire.messages import DeployEvent, DeployLog, Failed, Ready, Stage

#: Lines of loading code that one deploy carries, and their characters; logs have the others.
LOG_LIMIT = 10_000
LOG_CHARACTERS = 2 * 1024 * 1024
#: The same for messages about progress.
STAGE_LIMIT = 10_000


class Progress:
    """The events of the deploy of one generation.

    Attributes:
        generation: The generation.
    """

    def __init__(self, generation: int, *first: DeployEvent) -> None:
        self.generation = generation
        self._events = list(first)
        self._logs = 0
        self._characters = 0
        self._stages = 0
        self._changes = Changes()

    @property
    def is_over(self) -> bool:
        """Whether the last event is there."""
        return bool(self._events) and isinstance(self._events[-1], (Ready, Failed))

    def add(self, event: DeployEvent) -> None:
        """Something happened; after the last event nothing does."""
        if self.is_over or self._is_too_much(event):
            return
        self._events.append(event)
        self._changes.notify()

    async def follow(self, *, logs: bool = True) -> AsyncIterator[DeployEvent]:
        """All events from the first to the last, as they come.

        Args:
            logs: Whether lines that the user's code wrote are wanted.
        """
        at = 0
        while True:
            while at < len(self._events):
                event = self._events[at]
                at += 1
                if logs or not isinstance(event, DeployLog):
                    yield event
            if self.is_over:
                return
            await self._changes.wait()

    def _is_too_much(self, event: DeployEvent) -> bool:
        if isinstance(event, DeployLog):
            return self._is_line_too_much(event)
        if isinstance(event, Stage):
            self._stages += 1
            return self._stages > STAGE_LIMIT
        return False

    def _is_line_too_much(self, event: DeployLog) -> bool:
        if self._logs >= LOG_LIMIT:
            return True
        self._logs += 1
        self._characters += len(event.text)
        if self._logs < LOG_LIMIT and self._characters <= LOG_CHARACTERS:
            return False
        self._logs = LOG_LIMIT
        text = "… there are more lines; kt logs has them"
        self._events.append(DeployLog(text=text, pod=event.pod, source="stderr"))
        return True
