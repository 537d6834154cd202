"""An ASGI server as an app (pip install uvicorn). Edit GREETING, run this again: it is live."""

import os
import sys
import urllib.request
from pathlib import Path

import kubetorch as kt

GREETING = "hello"
PORT = 18080


async def app(scope, receive, send):
    """What uvicorn serves: any framework's application would do."""
    if scope["type"] == "http":
        print("asked for", scope["path"])
        headers = [(b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": GREETING.encode()})


if __name__ == "__main__":
    os.chdir(Path(__file__).parent)  # an app runs in the folder in which its program does
    command = f"{Path(sys.executable).name} -m uvicorn app_asgi:app --port {PORT} --lifespan off"
    served = kt.app(command, port=PORT).to(kt.Compute(cpus="0.1"), stream_logs=False)
    request = urllib.request.Request(served.endpoint("/greeting"), headers=served.request_headers)
    with urllib.request.urlopen(request) as answer:
        print(answer.status, answer.read().decode())
