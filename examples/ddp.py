"""Data-parallel training with PyTorch: four processes in two pods learn what one process learns.

Each rank takes its part of the same global batch, and DistributedDataParallel averages the
gradients, so the loss of every step is that of the single process.
"""

import os

import kubetorch as kt

STEPS, BATCH = 20, 64


def train(steps: int) -> list[float]:
    """The loss over the global batch, step by step."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    inputs = torch.randn(BATCH, 8)
    targets = inputs @ torch.arange(8.0).unsqueeze(1)
    model: torch.nn.Module = torch.nn.Linear(8, 1)
    is_distributed = "RANK" in os.environ
    rank, world = 0, 1
    if is_distributed:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs[rank::world]), targets[rank::world])
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if is_distributed:
            dist.all_reduce(mean)
        losses.append(mean.item() / world)
    return losses


if __name__ == "__main__":
    image = kt.Image().pip_install(["torch==2.13.0", "numpy"])
    compute = kt.Compute(cpus="0.1", memory="512Mi", image=image, inactivity_ttl="30m")
    ranks = kt.fn(train, name="ddp").to(compute.distribute("pytorch", workers=2, num_proc=2))
    single = kt.fn(train, name="ddp-alone").to(kt.Compute(cpus="0.1", memory="512Mi", image=image))

    together, alone = ranks(STEPS), single(STEPS)
    print("ranks:", len(together), "loss falls:", together[0][-1] < together[0][0] / 10)
    same = max(abs(a - b) for losses in together for a, b in zip(losses, alone, strict=True))
    print("same as one process:", same < 1e-5 * alone[0])
    ranks.teardown()
    single.teardown()
