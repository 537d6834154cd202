"""Requirements as users write them, as words of a shell command. Pure."""

from __future__ import annotations

import re

_VERSION = r"[<>=!~]=?=?\s*[vV]?[\d$][\w.*+!${}\-]*"
_MARKER = r"(?:python|os|sys|platform|implementation|extra)\w*(?:(?!\s+-)[^`&|])*"
#: What is quoted already, or a requirement, whose comparisons a shell would take for redirections
#: and the `;` before its marker for the end of the command.
_WORD = re.compile(
    r"(?P<quoted>'[^']*'|\"(?:\\.|[^\"\\])*\")|"
    r"(?<!\S)[A-Za-z0-9][\w.\-]*(?:\[[\w.,\- ]*\])?"
    rf"(?:\s*{_VERSION}(?:\s*,\s*{_VERSION})*)?(?:\s*;[\s(]*{_MARKER})?(?!\S)"
)


def quoted(text: str) -> str:
    """A fragment of a shell command, with those requirements quoted that need it.

    Args:
        text: Requirements and flags; what is quoted already stays as it is, and all of it where it
            is more than words.
    """

    def marked(match: re.Match[str]) -> str:
        word = match[0]
        if match["quoted"] or not re.search("[<>;]", word):
            return word
        # In double quotes a variable is expanded, as it is without any.
        mark = '"' if re.search("['$]", word) else "'"
        return f"{mark}{word}{mark}"

    plain = text.strip()
    is_script = re.search("[&|`;]", _WORD.sub("", plain))
    return text if is_script else _WORD.sub(marked, plain)
