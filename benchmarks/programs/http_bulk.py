"""An array there and back through the pod server of the earlier release: pickle, base64, JSON.

http_bulk PORT PATH
"""

from __future__ import annotations

import base64
import json
import pickle

import numpy

from benchmarks.programs import driving, posting
from benchmarks.programs.answering import answer, arguments

HEADERS = {**posting.JSON, "X-Serialization": "pickle"}


def main() -> None:
    """Connect, then answer."""
    port, path = arguments()
    post = posting.connect(int(port))

    def echo(array: object) -> object:
        pickled = pickle.dumps({"args": [array], "kwargs": {}})
        body = json.dumps({"data": base64.b64encode(pickled).decode()})
        content = post(path, body.encode(), HEADERS)
        return pickle.loads(base64.b64decode(json.loads(content)["data"]))

    def bulk(size: int, times: int) -> dict[str, float]:
        array = numpy.ones(size, dtype=numpy.uint8)
        return {"seconds": driving.median(lambda: echo(array), times)}

    answer({"bulk": bulk})


if __name__ == "__main__":
    main()
