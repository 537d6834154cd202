"""Lines of a pipe, read until its last writer has closed it."""

from __future__ import annotations

import asyncio
import os

from kubetorch.lib.process_watch import Output


def test_a_program_that_writes_without_end_does_not_keep_the_reader() -> None:
    async def main() -> list[str]:
        reader, writer = os.pipe()
        lines: list[str] = []

        def answer(line: str) -> None:
            lines.append(line)
            os.write(writer, b"more\n")

        output = Output(reader, answer)
        os.write(writer, b"first\n")
        output.drain()
        output.close()
        os.close(writer)
        return lines

    assert asyncio.run(main()) == ["first", "more"]


def test_a_line_without_an_end_is_delivered_with_the_end_of_the_pipe() -> None:
    async def main() -> list[str]:
        reader, writer = os.pipe()
        lines: list[str] = []
        output = Output(reader, lines.append)
        os.write(writer, b"whole\npart")
        os.close(writer)
        output.drain()
        return lines

    assert asyncio.run(main()) == ["whole", "part"]
