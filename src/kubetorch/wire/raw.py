"""What a call in `none` returned that is no JSON: text, bytes, or the body of a web response.

A function that returns text or bytes has them arrive as such. With them comes what a web client
would see of them: `.text`, `.content`, `.content_type`.
"""

from __future__ import annotations

import json


class RawText(str):
    """Text that a pod answered with.

    Attributes:
        content: Its bytes.
        content_type: What the pod says that they are, such as `text/html`.
    """

    content: bytes
    content_type: str

    @property
    def text(self) -> str:
        """The text itself."""
        return str(self)


class RawBytes(bytes):
    """Bytes that a pod answered with.

    Attributes:
        content_type: What the pod says that they are, such as `image/png`.
    """

    content_type: str

    @property
    def content(self) -> bytes:
        """The bytes themselves."""
        return bytes(self)

    @property
    def text(self) -> str:
        """The bytes as UTF-8; what is none is replaced."""
        return self.decode(errors="replace")


def decode(content: bytes, content_type: str) -> object:
    """The value of content that is JSON; else text or bytes, by what its type says."""
    kind, _, parameters = content_type.partition(";")
    kind = kind.strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            pass  # what it is all the same can be looked at
    if not kind.startswith(("text/", "application/json")):
        data = RawBytes(content)
        data.content_type = content_type
        return data
    text = RawText(_text(content, parameters.lower().rpartition("charset=")[2].strip(' "')))
    text.content = content
    text.content_type = content_type
    return text


def _text(content: bytes, charset: str) -> str:
    try:
        # As the worker encodes text that has surrogates.
        return content.decode(charset or "utf-8", "surrogatepass")
    except (LookupError, ValueError):
        return content.decode(errors="replace")
