"""What is known about a launch: it cannot succeed, it waits for a reason, or nothing is wrong."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kubetorch.errors import KubetorchError

#: Lines of a container's log that an error has.
LOG_LINES = 20
_LOG_CHARACTERS = 4000


@dataclass(frozen=True)
class Verdict:
    """What is known; without a reason, nothing is wrong.

    Attributes:
        error: Why it cannot succeed; `None` while it still may.
        reason: Why it waits, as one sentence for the user.
        since: When the fact came about, in seconds since the epoch, as far as that is known.
        again: Seconds after which to judge again although nothing may have changed.
        settles: Seconds for which a doom has to be one before it counts, whatever its fact's age.
        log: The container whose last lines belong to the error, see `with_log`.
        is_previous: Whether they are those of its previous run.
    """

    error: KubetorchError | None = None
    reason: str = ""
    since: float | None = None
    again: float | None = None
    settles: float = 0.0
    log: str | None = None
    is_previous: bool = False

    @property
    def is_doomed(self) -> bool:
        """Whether it cannot succeed."""
        return self.error is not None

    def with_log(self, lines: Iterable[str]) -> Verdict:
        """The same, with the last lines of its container in the error."""
        text = "\n".join(list(lines)[-LOG_LINES:])[-_LOG_CHARACTERS:].strip("\n")
        if self.error is None or not text:
            return replace(self, log=None)
        error = copy.copy(self.error)
        indented = "\n".join(f"  {line}" for line in text.splitlines())
        error.message = f"{self.error.message}; its last lines:\n{indented}"
        error.args = (error.message,)
        return replace(self, error=error, log=None)


#: Nothing is wrong.
NOTHING = Verdict()


def doomed(error: KubetorchError, since: float | None = None) -> Verdict:
    """It cannot succeed."""
    error.since = since
    return Verdict(error, error.message, since)


def waiting(reason: str, since: float | None = None, *, again: float | None = None) -> Verdict:
    """It waits."""
    return Verdict(None, reason, since, again)


def settled(verdict: Verdict, now: float, seconds: float) -> Verdict:
    """A doom that counts only once its fact is so old: what is missing may be on its way."""
    if verdict.since is None or not verdict.is_doomed or now - verdict.since >= seconds:
        return verdict
    rest = seconds - max(0.0, now - verdict.since)
    return Verdict(None, verdict.reason, verdict.since, again=rest)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The one that matters most: a doom, else the first reason; judged again as soon as any is."""
    if not verdicts:
        return NOTHING
    found = next(
        (one for one in verdicts if one.is_doomed),
        next((one for one in verdicts if one.reason), NOTHING),
    )
    pauses = [one.again for one in verdicts if one.again is not None]
    return found if found.is_doomed or not pauses else replace(found, again=min(pauses))
