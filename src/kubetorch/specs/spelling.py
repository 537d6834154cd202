"""What a user may have meant by a word that is not known."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(given: str, known: Iterable[str], *, likeness: float = 0.8) -> str | None:
    """The known word that is most like `given`.

    Args:
        given: The word.
        known: Those that there are.
        likeness: How alike they must be, from 0 to 1.
    """
    import difflib  # noqa: PLC0415  # 8 ms, for mistakes only

    found = difflib.get_close_matches(given, list(known), n=1, cutoff=likeness)
    return found[0] if found else None
