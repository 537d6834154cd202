"""Training that loses a pod at step 20, and goes on from its checkpoint with the pods there are.

The first pod keeps the checkpoint in its working directory, which stays when processes start again.
"""

import os
import signal
import time
from pathlib import Path

import kubetorch as kt

CHECKPOINT = Path("elastic.pt")


def fail() -> None:
    """What a machine that fails does to a pod: its agent ends, and all that it started."""
    agent = int(Path(f"/proc/{os.getppid()}/stat").read_text().split()[3])
    os.kill(agent, signal.SIGKILL if agent > 1 else signal.SIGTERM)
    time.sleep(60)  # this process lives for a moment longer, and trains no more


def train(steps: int, fails_at: int | None = None) -> tuple[int, float]:
    """The step that the training began with, and its last loss."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    targets = inputs @ torch.arange(8.0).unsqueeze(1)
    linear = torch.nn.Linear(8, 1)
    checkpoint = [(0, linear.state_dict())]
    if dist.get_rank() == 0 and CHECKPOINT.exists():
        checkpoint = [torch.load(CHECKPOINT)]
    dist.broadcast_object_list(checkpoint, src=0)
    begin, weights = checkpoint[0]
    linear.load_state_dict(weights)
    model = DistributedDataParallel(linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rank, world = dist.get_rank(), dist.get_world_size()
    loss = torch.zeros(())
    for step in range(begin, steps):
        if step == fails_at and os.environ["NODE_RANK"] == "1":
            fail()
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs[rank::world]), targets[rank::world])
        loss.backward()
        optimizer.step()
        if rank == 0:
            torch.save((step + 1, linear.state_dict()), CHECKPOINT.with_suffix(".new"))
            CHECKPOINT.with_suffix(".new").replace(CHECKPOINT)
        dist.barrier()  # nobody goes on before the checkpoint is there
    return begin, loss.item()


if __name__ == "__main__":
    image = kt.Image().pip_install(["torch==2.13.0", "numpy"])
    compute = kt.Compute(cpus="0.1", memory="512Mi", image=image, inactivity_ttl="30m")
    # Two pods suffice to go on, should the third stay away.
    compute.distribute("pytorch", workers=3, quorum_workers=2)
    service = kt.fn(train, name="elastic-ddp").to(compute)
    try:
        service(40, fails_at=20)
    except kt.WorkerMembershipChanged as change:
        print("lost a pod:", len(change.reasons))
    results = service(40, restart_procs=True)
    print("went on at step:", results[0][0], "loss is small:", results[0][1] < 1.0)
    service.teardown()
