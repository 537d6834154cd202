"""What the programs of `examples/` print, on whichever backend they run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import documents

EXAMPLES = Path(__file__).parents[1] / "examples"

#: The last line of `edit_loop.py`.
EDITS = re.compile(r"20 edits, p50 from an edit to its result: \d\.\d{3} s\n")

#: What `autoscale.py` prints: the picture has a line for each second.
PICTURE = re.compile(
    r"calls: 206 sum: 1373155\n"
    r" +s  calls  pods\n( +\d+ +\d+  #*\n)+"
    r"several pods: True none at the end: True\nagain, from nothing: 81\n"
)

#: The identity of a call, as `long_run.py` prints it.
STARTED = re.compile(r"started (\w+)\n")

EXPECTED = {
    **{
        name: documents.printed(name)
        for name in (
            "sweep.py",
            "batched.py",
            "serve_model.py",
            "files_in_and_out.py",
            "shared_checkpoint.py",
        )
    },
    "bucket_folder.py": "words: 6\ndifferent ones: ['be', 'not', 'or', 'to']\n"
    "in the store: ['corpus/', 'results/']\n",
    "dataset_map.py": "words: 1560\nversions: {'/plays': '2'}\nwords: 1485\n",
    "from_modal_and_ray.py": "9\n[1, 4, 9]\n16\n2 5\n",
    "app_asgi.py": "200 hello\n",
    "app_script.py": "step 1 of 3\nstep 2 of 3\nstep 3 of 3\nexit code: 0\n",
    "everything.py": "",  # its manifests are in tests/contract/manifests
    "hello_world.py": "(train) step 10\n{'loss': 0.05}\n7 10\n",
    "stateful_class.py": "values: 1 2\na = 1\nrefused: the cache is full: 2 values\n"
    "still there: b = 2\ndeployed again: 1 value\n",
    "async_fan_out.py": "page 0 … page 19\n20 calls of 1 s each took less than 10 s: True\n",
    "generator_progress.py": "".join(
        f"{{'epoch': {epoch}, 'loss': {0.5**epoch}}}\n" for epoch in range(1, 6)
    ),
    "secret_and_volume.py": "Secret(name='dataset-token', env_vars=['DATASET_TOKEN'], "
    "override=True)\nfetched numbers with a token of 16 characters\ntotal: 6\n"
    "the volume is still there: True\n",
    "weight_sync.py": "trained until step 3\nsteps of the services: [3, 3]\n"
    "trained until step 5\nsteps of the services: [5, 5]\nlargest weight of the first layer: 5.0\n",
    "map_200.py": "results: 200 of which failed: 1 13 is not scored\n"
    "first: [0, 1, 4, 9, 16] last: 39601\n"
    f"sum: {sum(n * n for n in range(200) if n != 13)}\n",
    "map_pods.py": "in order: [0, 1, 4, 9, 16] sum: 2646700\n"
    "several pods took part: True items: 200\n",
    "three_replicas.py": "thrown: [20000, 20000, 20000]\nthrown: [40000, 40000, 40000]\n"
    "pi is between 3.1 and 3.2: True\nfailed: the darts fell in pod 1\n",
    "batch_size_search.py": "between 900 and 1100: True\ntoo much, on one of the ranks: True\n",
    "spmd.py": "pi is 3.1416, from 4 ranks\n"
    "node and local rank: [[0, 0], [0, 1], [1, 0], [1, 1]]\n"
    "of the second pod: [[1, 0], [1, 1]]\n",
    "idle_stop.py": "a call of 7 s: done\n2 s later: slow is there\n"
    "stopped after 5 s without a call: True\n",
    "memory_limit.py": "within the limit: 10485760\ntoo much: 314572800 True\n"
    "a new worker serves: 10485760\n",
}

#: Of programs that need a framework: its module, and the last lines.
FRAMEWORKS = {
    "ddp.py": ("torch", ["ranks: 4 loss falls: True", "same as one process: True"]),
    "elastic_ddp.py": (
        "torch",
        ["lost a pod: 1", "went on at step: 20 loss is small: True"],
    ),
    "jax_pmap.py": ("jax", ["processes and sum: [[2, 3.0], [2, 3.0]]"]),
    "monarch_mesh.py": (
        "monarch",
        ["hosts and squares: [[0, 1], [0, 4], [1, 9], [1, 16]]"],
    ),
    "ray_tune.py": ("ray", ["best rate and nodes: [0.3, 2]"]),
    "tf_multiworker.py": (
        "tensorflow",
        ["workers and whether the weight is right: [[2, True], [2, True]]"],
    ),
}


def run(*command, cwd, timeout=100, **environ):
    """What a program prints, with the names of its pods cut."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return re.sub(r"^\(([a-z]+)-[^)]*\)", r"(\1)", done.stdout, flags=re.MULTILINE)
