"""What one call comes to: on one pod its own outcome, on several a list of theirs, in pod order.

A broadcast fails as soon as it fails on one pod. The calls on the others are cancelled then; those
that fail at the same time are given a moment, so that which error is raised does not depend on
which came first.
"""

from __future__ import annotations

from collections.abc import Sequence

from kubetorch.errors import CallCancelledError
from kubetorch.sdk.calls.driver import Running
from kubetorch.sdk.calls.invocation import Done
from kubetorch.wire import guarding

#: Said to the pods whose calls are cancelled.
RECALLED = "the call failed on another pod"


class Group:
    """One call, of one part or of one for each pod.

    Args:
        number: Which call it is, for its owner.
        parts: Its parts, in pod order.
    """

    __slots__ = ("_left", "_outcomes", "number", "parts")

    def __init__(self, number: int, parts: Sequence[Running]) -> None:
        self.number = number
        self.parts = parts
        self._outcomes: list[Done | None] = [None] * len(parts)
        self._left = len(parts)

    def complete(self, running: Running, done: Done) -> Done | None:
        """A part ended; how the call ended, if this was the last one."""
        if running.invocation.target.broadcast is None:
            return done
        self._outcomes[self.parts.index(running)] = done
        self._left -= 1
        if done.error is not None:
            for part in self.parts:
                if not part.is_over and part.recalled_until is None:
                    part.recall(RECALLED)
        return None if self._left else combine([one for one in self._outcomes if one is not None])


def combine(outcomes: Sequence[Done]) -> Done:
    """The outcome of a broadcast.

    Its error is the first one in pod order; those of the other pods are its `other_errors`. An end
    that is only the consequence of another pod's error is not counted.

    Args:
        outcomes: How each pod's call ended, in pod order.
    """
    failed = [(pod, one.error) for pod, one in enumerate(outcomes) if one.error is not None]
    if not failed:
        return Done([one.value for one in outcomes])
    own = [one for one in failed if not isinstance(one[1], CallCancelledError)]
    (pod, first), *others = own or failed
    note = f"raised in {_named(pod, first)}; the call went to {len(outcomes)} pods"
    lines = [note, *(f"also in {_named(*one)}: {_short(one[1])}" for one in others)]
    guarding.put(first, "other_errors", tuple(error for _, error in others))
    # What `add_note` of Python 3.11 does.
    notes: list[str] = guarding.take(lambda: [*getattr(first, "__notes__", ())], [])
    guarding.put(first, "__notes__", [*notes, "\n".join(lines)])
    return Done(None, first)


def _named(pod: int, error: Exception) -> str:
    name = guarding.take(lambda: getattr(error, "pod_name", None), None)
    return f"pod {pod} ({name})" if name else f"pod {pod}"


def _short(error: Exception) -> str:
    return guarding.said(error).partition("\n")[0]
