"""A checkpoint that one service writes and another one loads, through the data store."""

import json
from pathlib import Path

import kubetorch as kt

KEY = "models/shared-checkpoint"


def train(steps: int) -> int:
    """Write a checkpoint after each step; a put sends what changed."""
    folder = Path("ckpt")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"layers": 3}))
    (folder / "tokens.txt").write_text("a b c")
    for step in range(1, steps + 1):
        (folder / "weights.json").write_text(json.dumps({"step": step, "weights": [0.5] * 3}))
        kt.put(KEY, folder, contents=True)
    return len(list(folder.iterdir()))


def load() -> str:
    """Get the newest version, whole."""
    kt.get(KEY, "models")
    state = json.loads(Path("models/shared-checkpoint/weights.json").read_text())
    return f"{len(state['weights'])} weights of step {state['step']}"


if __name__ == "__main__":
    compute = kt.Compute(cpus="0.1")
    trainer = kt.fn(train).to(compute)
    server = kt.fn(load).to(compute)
    print("trained:", trainer(2), "files")
    print("loaded:", server())
    kt.rm(KEY, recursive=True)
    trainer.teardown()
    server.teardown()
