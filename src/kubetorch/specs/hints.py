"""What to write instead of a word of another tool: the hint of the error that it causes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kubetorch.specs.foreign_words import Subject


def hint(subject: Subject, word: str, name: str = "f", service: str = "f") -> str | None:
    """What to write instead of a foreign word; `None` if it is none.

    Args:
        subject: What was asked.
        word: The word.
        name: The name of what was asked, as the program may call it.
        service: Its service.
    """
    from kubetorch.specs import foreign_words  # noqa: PLC0415  # for mistakes only

    text = foreign_words.WORDS[subject].get(word)
    return text and text.replace("{name}", name).replace("{service}", service)


def no_attribute(
    subject: Subject, owner: object, word: str, name: str = "f", service: str = "f"
) -> AttributeError:
    """The error of an attribute that an object does not have; see `hint`."""
    kind = owner.__name__ if isinstance(owner, type) else type(owner).__name__
    message = f"{kind!r} object has no attribute {word!r}"
    meant = hint(subject, word, name, service)
    if meant is not None:
        return AttributeError(f"{message}\nhint: {meant}")
    # Python itself suggests an attribute that is called like it.
    return AttributeError(message, name=word, obj=owner)
