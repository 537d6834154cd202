"""Go's `text/template` with helm's functions, as far as our chart needs them. Pure.

    lexing (text → tokens) ──► parsing (tokens → nodes) ──► evaluating (nodes → text)
                                                                 └── functions

Whatever lies outside the subset is an error that names the file and the line, never a guess.
"""
