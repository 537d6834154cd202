"""`POST /v1/run`: a step in a running pod, its lines as they come, its exit code."""

from __future__ import annotations

import asyncio

from kubetorch.lib.asgi import NDJSON, Request, Responder
from kubetorch.pod.image.images import Images
from kubetorch.wire import messages
from kubetorch.wire.running import RunEnd, RunLine, RunStepNow

#: Bytes of a request.
BODY_LIMIT = 1024 * 1024
#: Lines that wait for a slow client; further ones are dropped, and counted.
_LINES = 10_000


async def run(request: Request, respond: Responder, images: Images) -> None:
    """Run the step that a request describes. It ends when the client goes away.

    Raises:
        KubetorchError: It is refused.
    """
    order = messages.decode(RunStepNow, await request.body(BODY_LIMIT))
    lines: asyncio.Queue[RunLine | None] = asyncio.Queue(_LINES + 2)
    dropped = 0

    def on_line(text: str, source: str) -> None:
        nonlocal dropped
        if lines.qsize() < _LINES:
            lines.put_nowait(RunLine(text=text, source=source))
        else:
            dropped += 1

    running = asyncio.ensure_future(images.run_now(order, on_line))
    running.add_done_callback(lambda _: lines.put_nowait(None))
    gone = asyncio.ensure_future(request.disconnected())
    gone.add_done_callback(lambda _: running.cancel())
    try:
        while (line := await lines.get()) is not None:
            if not respond.has_begun:
                await respond.begin(200, NDJSON)
            await respond.write(messages.encode(line) + b"\n")
        if gone.done():
            return
        exit_code = await running
        if not respond.has_begun:
            await respond.begin(200, NDJSON)
        if dropped:
            last = RunLine(text=f"… {dropped} more lines", source="stderr")
            await respond.write(messages.encode(last) + b"\n")
        await respond.write(messages.encode(RunEnd(exit_code=exit_code)) + b"\n", more=False)
    finally:
        gone.cancel()
        running.cancel()
