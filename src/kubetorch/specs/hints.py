"""Hints for words of other tools, as parts of the errors that these words cause."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kubetorch.specs.foreign_words import Subject


def hint(subject: Subject, word: str, name: str = "f", service: str = "f") -> str | None:
    """The hint for a foreign word; `None` if the word is of no tool that is listed.

    Args:
        subject: The object or command that the program used the word with.
        word: The word.
        name: The name of the object in the program.
        service: The name of its service.
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
    suggestion = hint(subject, word, name, service)
    if suggestion is not None:
        # Python itself would suggest an attribute of the owner behind our hint.
        return AttributeError(f"{message}\nhint: {suggestion}", name=word, obj=None)
    # Python itself suggests an attribute with a similar name.
    return AttributeError(message, name=word, obj=owner)
