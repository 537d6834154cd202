"""`kt logs`, `kt ssh` and `kt port-forward`: the pods of a service."""

from __future__ import annotations

import shlex
import signal
import threading
from typing import Annotated

import typer

from kubetorch.cli import views
from kubetorch.cli.args import AsJson, AsRaw, ExactMatch, Namespace, ServiceName
from kubetorch.cli.output import Output
from kubetorch.cli.services import Services, choose_pod
from kubetorch.errors import KubetorchError, ServiceNotFoundError, SpecError
from kubetorch.sdk import shells
from kubetorch.sdk.logs import pod_label
from kubetorch.sdk.transport import local_port
from kubetorch.wire import messages, routes
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.messages import WorkerStacks

Rank = Annotated[
    int | None, typer.Option("--rank", min=0, help="Only this rank of a distributed service.")
]
OnlyPod = Annotated[
    str | None, typer.Option("-p", "--pod", help="Only this pod: its name, or its index.")
]
ThisPod = Annotated[
    str | None, typer.Option("-p", "--pod", help="This pod: its name, or its index.")
]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("logs")
def logs(  # noqa: PLR0913  # its options
    name: ServiceName,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Follow new lines until Ctrl-C.")
    ] = False,
    tail: Annotated[
        int,
        typer.Option(
            "-t",
            "--tail",
            min=0,
            max=wire_tuning.LIMITS.log_tail_lines,
            help="Number of earlier lines to show first.",
        ),
    ] = 100,
    pod: OnlyPod = None,
    rank: Rank = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
    as_raw: AsRaw = False,
) -> None:
    """Show the log of a service.

    On a terminal, control characters are made visible, but for colours and those of progress bars.
    """
    output = Output(as_json=as_json, is_raw=as_raw)
    services = Services(namespace, output)
    output.note(f"Looking for service {name}...")
    service = services.find(name)
    if rank is not None and service.spec.compute.distribution is None:
        raise SpecError(
            f"{service.spec.name} has no ranks, because it is not distributed",
            hint=f"kt logs {service.spec.name} shows all lines",
        )
    world = service.world
    if rank is not None and world is not None and rank >= len(world.members) * world.processes:
        raise SpecError(
            f"{service.spec.name} has no rank {rank}",
            hint=f"its ranks are 0 to {len(world.members) * world.processes - 1}",
        )
    chosen = choose_pod(service, pod) if pod is not None else None
    prefixed = chosen is None and len(service.pods) > 1
    for line in services.logs(service, tail=tail, follow=follow, pod=chosen, rank=rank):
        if as_json:
            output.record(views.line_json(line))
        else:
            text = views.line_text(line)
            is_named = prefixed or line.rank is not None
            output.text(f"({pod_label(line.pod, line.rank)}) {text}" if is_named else text)


@app.command("stacks")
def stacks(
    name: ServiceName,
    pod: OnlyPod = None,
    rank: Rank = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Show what the workers of a service do at this moment.

    Of each thread that runs code of the user, the stack is shown, most recent call first. Workers
    answer while they hold the interpreter, too. What an `async def` awaits is not shown. Of an app,
    each Python process is shown, with all of its threads.
    """
    output = Output(as_json=as_json)
    services = Services(namespace, output)
    service = services.find(name)
    chosen_pods = [choose_pod(service, pod)] if pod is not None else service.pods
    path = routes.STACKS if rank is None else f"{routes.STACKS}?rank={rank}"
    worker_stacks: list[WorkerStacks] = []
    for chosen_pod in chosen_pods:
        try:
            answer = services.ask_pod(service, chosen_pod, path)
        except KubetorchError as error:
            output.warn(f"{chosen_pod.name} does not answer: {error}")
            continue
        worker_stacks += messages.decode(list[WorkerStacks], answer)
    worker_stacks.sort(
        key=lambda stacks: (stacks.rank is None, stacks.rank or 0, stacks.pod, stacks.pid)
    )
    if rank is not None and not worker_stacks:
        raise SpecError(f"{name} has no rank {rank}", hint=f"kt stacks {name} shows all ranks")
    if as_json:
        output.value([views.stacks_json(worker) for worker in worker_stacks])
        return
    for worker in worker_stacks:
        where = pod_label(worker.pod, worker.rank)
        output.text(f"{where}: process {worker.pid}, generation {worker.generation}")
        output.text("".join(f"    {line}\n" for line in worker.text.splitlines()))


@app.command("ssh", context_settings={"ignore_unknown_options": True})
def ssh(
    name: ServiceName,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND...]", help="A command instead of a shell."),
    ] = None,
    pod: ThisPod = None,
    exact_match: ExactMatch = False,
    namespace: Namespace = None,
) -> None:
    """Open a shell in a pod, or run a command there.

    The pod is the oldest one, unless another is named. With a command after -- that is run instead,
    without a terminal; its exit code is that of kt.
    """
    services = Services(namespace, Output(), is_changing=True)
    service = services.find_to_change(name, exact_match=exact_match)
    chosen = local_port.choose(service) if pod is None else choose_pod(service, pod)
    command = None
    if words:
        command = words[0] if len(words) == 1 else shlex.join(words)
    raise typer.Exit(shells.run(services.session, service, chosen, command))


_Port = Annotated[int, typer.Argument(min=1, max=65535, help="Port of this machine.")]
_Remote = Annotated[
    int, typer.Argument(min=1, max=65535, help="Port of the pod (32300), or of its app.")
]


@app.command("port-forward")
def port_forward(
    name: ServiceName,
    local: _Port = local_port.SERVER_PORT,
    remote: _Remote = local_port.SERVER_PORT,
    pod: ThisPod = None,
    namespace: Namespace = None,
) -> None:
    """Connect a port of this machine with a pod, or its app.

    It does so until interrupted. Whoever asks there needs a token, as at the pod: kt token NAME
    prints one.
    """
    output = Output()
    services = Services(namespace, output)
    service = services.find(name)
    services.session.own_token(service)  # to forward ports takes the right of a shell
    is_scaled = pod is None and bool(services.session.scaler(service))
    chosen = None
    if not is_scaled:
        chosen = local_port.choose(service) if pod is None else choose_pod(service, pod)
    inside = local_port.inside(service, remote)

    def find() -> str:
        view = services.get(service.spec.name)
        if view is None:
            raise ServiceNotFoundError(f"the service {name} is gone")
        if chosen is None:
            return services.session.scaler(view)
        target_pod = local_port.choose(view, None if pod is None else chosen.name)
        return services.session.address(view, target_pod)

    done = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: done.set())
    opened = local_port.LocalPort(
        find,
        services.session.transport,
        inside=inside,
        port=local,
        service=(service.spec.namespace, service.spec.name),
    )
    leads_to = service.spec.name if chosen is None else chosen.name
    try:
        output.report(f"Forwarding http://127.0.0.1:{local} -> {leads_to}:{remote}")
        output.report(f"Requests need a token: kt token {service.spec.name}")
        done.wait()
    finally:
        opened.close()
