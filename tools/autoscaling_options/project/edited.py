"""A function that an edit changes."""


def word():
    return "before"
