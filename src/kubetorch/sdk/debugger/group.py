"""One prompt for several stopped programs, such as all ranks of a call."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping

from kubetorch.lib import terminal
from kubetorch.sdk.debugger.terminal import DebugTerminal, show_answers

_PROMPT = "(Pdb, all) "


class TerminalGroup:
    """Sends each command to all programs of a group, and shows their answers with their labels.

    Args:
        terminals: The connections to the programs, by label.
    """

    def __init__(self, terminals: Mapping[str, DebugTerminal]) -> None:
        self._terminals = terminals

    def run(self, commands: Iterable[str]) -> None:
        """Run these commands, or fewer if all programs run to their end; then all go on."""
        try:
            show_answers(self._terminals)
            for command in commands:
                waiting_terminals = self._waiting_terminals()
                for debug_terminal in waiting_terminals.values():
                    debug_terminal.answer(command)
                show_answers(waiting_terminals)
                if not self._waiting_terminals():
                    break
        except KeyboardInterrupt:  # while a command runs
            terminal.say("the debugger is left: the calls go on")
        finally:
            for debug_terminal in self._terminals.values():
                debug_terminal.leave()

    def _waiting_terminals(self) -> dict[str, DebugTerminal]:
        return {label: each for label, each in self._terminals.items() if not each.is_over}


def commands_of_user() -> Iterator[str]:
    """The commands that the user types, up to the end of the input or Ctrl-C."""
    while True:
        try:
            yield input(_PROMPT)
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return
