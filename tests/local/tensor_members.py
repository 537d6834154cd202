"""Processes with tensors, as pods of a cluster, that run the statements which they are told."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

#: A pod of a cluster, as far as the data store sees it.
PROGRAM = """
import json
import os
import sys
import threading

import torch
import torch.distributed

import kubetorch as kt
from kubetorch.datastore.transports.process_group import ProcessGroup
from kubetorch.sdk import backend
from kubetorch.sdk.data import direct, tensors, windows
from kubetorch.sdk.data.client import find_key
from kubetorch.sdk.data.progress import Progress
from kubetorch.wire.transports import Ready, Start

torch.set_num_threads(1)
backend.session().is_local = False  # the store is afar
SHAPES = {"layers.0": (1024, 2048), "layers.1": (1024, 2048), "norm": (17,), "scalar": ()}

def weights(seed, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator, dtype=torch.float32)
        for name, shape in SHAPES.items()
    }
    tensors["half"] = tensors["layers.0"].to(torch.bfloat16)
    tensors["eighth"] = tensors["layers.1"].to(torch.float8_e4m3fn)
    tensors["transposed"] = torch.randn((30, 40), generator=generator).t()
    tensors["none"] = torch.empty((0, 3))
    return {
        "model": {name: tensor.to(device) for name, tensor in tensors.items()}, "step": seed
    }

def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )

def is_version(value, seed):
    expected = weights(seed)["model"]
    return value["step"] == seed and expected.keys() == value["model"].keys() and all(
        same(value["model"][name].cpu(), tensor) for name, tensor in expected.items()
    )

def window(members, **options):
    return kt.BroadcastWindow(world_size=members, **options)

def get(key, members, **options):
    return kt.get(key, broadcast=window(members), verbose=True, **options)

def groups(*kind):
    names = direct._PROCESS.groups.names
    kind = kind or ("gloo", "cpu")
    return sorted(names(kind) | names(kind, of_putter=True))

def wait(key, members, party):
    return windows.wait(backend.session(), "default", window(members), [key], party.offer)

print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    answer = None
    exec(json.loads(line), globals())
    print(json.dumps(answer), flush=True)
"""


class Member:
    """One of these processes."""

    def __init__(self, folder: Path, name: str, **variables: str) -> None:
        self.errors = folder / f"{name}-errors"
        program = folder / "member.py"
        program.write_text(PROGRAM)
        environ = {"POD_IP": "127.0.0.1", "KT_CACHE_DIR": str(folder / f"{name}-cache")}
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(
                (sys.executable, str(program)),
                env={**os.environ, **environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=folder,
            )

    def tell(self, statements: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(textwrap.dedent(statements)).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """What the last statements have assigned to `answer`."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(120), self.errors.read_text()
        line = self.process.stdout.readline()
        assert line, self.errors.read_text()
        return json.loads(line)

    def ask(self, statements: str) -> Any:
        self.tell(statements)
        return self.answer()

    def news(self) -> str:
        """What it has written since the last question."""
        text = self.errors.read_text()
        self.errors.write_text("")
        return text

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        self.process.wait(timeout=60)


def put(member: Member, key: str, seed: int, size: int, options: str = "") -> None:
    member.tell(f"kt.put('{key}', src=weights({seed}), broadcast=window({size}{options}))")


def get(member: Member, key: str, seed: int, size: int) -> None:
    """Get a key; the answer is whether it is what was put."""
    member.tell(f"answer = is_version(get('{key}', {size}), {seed})")


def is_direct(member: Member) -> bool:
    """Whether the last get got all from the putter; it has said why if not."""
    news = member.news()
    assert ("from pods" in news) != ("comes from the store" in news), news
    return "from pods" in news
