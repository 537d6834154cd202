"""Debuggers of code in pods, as a program uses them: breakpoints, a terminal, a page."""
