"""An ASGI server as an app. Edit GREETING, run this again: it is live."""

import os
import socket
import sys
import urllib.request
from pathlib import Path

import kubetorch as kt

GREETING = "hello"


async def app(scope, receive, send):
    """What uvicorn serves: any framework's application would do."""
    if scope["type"] == "http":
        print("asked for", scope["path"])
        headers = [(b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": GREETING.encode()})


if __name__ == "__main__":
    os.chdir(Path(__file__).parent)  # an app runs in the folder in which its program does
    # Without a cluster, pods share the ports of the machine, so a free one is taken.
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = f"{Path(sys.executable).name} -m uvicorn app_asgi:app --port {port} --lifespan off"
    compute = kt.Compute(cpus="0.1", image=kt.Image().pip_install(["uvicorn"]))
    served = kt.app(command, port=port).to(compute, stream_logs=False)
    request = urllib.request.Request(served.endpoint("/greeting"), headers=served.request_headers)
    with urllib.request.urlopen(request) as answer:
        print(answer.status, answer.read().decode())
