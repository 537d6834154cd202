"""An array there and back through the pod server of the earlier release: pickle, base64, JSON.

http_bulk PORT PATH
"""

from __future__ import annotations

import base64
import http.client
import json
import pickle

import numpy

from benchmarks.programs import driving
from benchmarks.programs.answering import answer, arguments

DEADLINE = 120.0
HEADERS = {"Content-Type": "application/json", "X-Serialization": "pickle"}


def main() -> None:
    """Connect, then answer."""
    port, path = arguments()
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=DEADLINE)

    def echo(array: object) -> object:
        pickled = pickle.dumps({"args": [array], "kwargs": {}})
        body = json.dumps({"data": base64.b64encode(pickled).decode()})
        connection.request("POST", path, body, HEADERS)
        response = connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {content[:1000]!r}")
        return pickle.loads(base64.b64decode(json.loads(content)["data"]))

    def bulk(size: int, times: int) -> dict[str, float]:
        array = numpy.ones(size, dtype=numpy.uint8)
        return {"seconds": driving.median(lambda: echo(array), times)}

    answer({"bulk": bulk})


if __name__ == "__main__":
    main()
