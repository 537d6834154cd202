"""`kt list`, `kt status`, `kt describe` and `kt scale`: the services of a namespace, and each.

`kt describe` reads the OpenAPI page of a pod, and prints calls as lines that can be pasted.
"""

from __future__ import annotations

import contextlib
import json
import keyword
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from kubetorch.cli import views
from kubetorch.cli.args import AllNamespaces, AsJson, ExactMatch, Namespace, ServiceName
from kubetorch.cli.output import Output, Style
from kubetorch.cli.services import Services
from kubetorch.config.settings import config
from kubetorch.errors import KubetorchError, SpecError
from kubetorch.lib import private_sockets
from kubetorch.sdk import backend
from kubetorch.sdk.cls import OF_COMPUTE, Cls
from kubetorch.sdk.transport import pod_transport
from kubetorch.specs.callable import AppSpec, CallableRef
from kubetorch.specs.data import DataMount
from kubetorch.wire import messages, routes
from kubetorch.wire.messages import WorkloadView, called_together

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("list")
def list_services(
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    sort: Annotated[
        bool, typer.Option("-s", "--sort", help="Latest status change first, not by name.")
    ] = False,
    tag: Annotated[
        str | None, typer.Option("-t", "--tag", help="Only services whose name contains this.")
    ] = None,
    pods: Annotated[
        bool, typer.Option("-p", "--pods", help="Show the names and ranks of pods too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the services of a namespace."""
    output = Output(as_json=as_json)
    services = Services(namespace, output)
    everything = services.all(all_namespaces=all_namespaces)
    shown_services = [service for service in everything if tag is None or tag in service.spec.name]
    if sort:
        shown_services.sort(key=lambda service: service.updated, reverse=True)
    else:
        shown_services.sort(key=lambda service: (service.spec.namespace, service.spec.name))
    if as_json:
        output.value([views.service_json(service) for service in shown_services])
        return
    if not shown_services:
        where = "any" if all_namespaces else services.namespace
        output.report(f"No services found in {where} namespace")
        return
    rows = [
        views.service_cells(service, with_namespace=all_namespaces, with_pods=pods)
        for service in shown_services
    ]
    output.table(rows, dispensable=views.DISPENSABLE_SERVICE_COLUMNS)


@app.command("status")
def status(name: ServiceName, namespace: Namespace = None, as_json: AsJson = False) -> None:
    """Show the pods of a service and its last failure."""
    output = Output(as_json=as_json)
    services = Services(namespace, output)
    service = services.find(name)
    if as_json:
        output.value(views.service_json(service))
        return
    show(service, output, _debugger_users(services, service))
    failed = [call for call in services.calls_of(service.spec.name) if call.state == "failed"]
    for call in [call for call in failed if call.is_replayable][:_SHOWN_FAILURES]:
        output.report(f"{call.callable} failed {views.age(call.started)} ago: kt replay {call.id}")


def _debugger_users(services: Services, service: WorkloadView) -> list[str]:
    """The users whose terminals are attached to stopped calls of a service."""
    from kubetorch.sdk.debugger import terminal  # noqa: PLC0415  # where a call has stopped alone

    users = []
    for pod in service.pods:
        with contextlib.suppress(KubetorchError):
            stops = terminal.stops_of(services.session, service, pod) if pod.stopped else []
            users += [stop.user for stop in stops if stop.user]
    return users


def show(service: WorkloadView, output: Output, debugger_users: Sequence[str] = ()) -> None:
    """Show a line about the service, the table of its pods, and its failure, if it failed."""
    ready, pods = views.ready_pods(service), service.pods_wanted or len(service.pods)
    waiting = sum(pod.queue.waiting for pod in service.pods if pod.queue is not None)
    calls = sum(pod.calls for pod in service.pods) - waiting
    waits = f", {waiting} waiting" if waiting else ""
    style: Style = "green" if service.status == "Ready" else "yellow"
    output.report(
        f"{service.spec.name}: {service.status}, generation {service.generation}, "
        f"{ready}/{pods} pods ready, {calls} {'call' if calls == 1 else 'calls'} running{waits}",
        "red" if service.failure is not None else style,
    )
    world = views.world_words(service)
    if world is not None:
        output.report(f"world: {world}")
    for label, line in zip(("scaling", "reason"), views.scaling_lines(service), strict=False):
        output.report(f"{label}: {line}")
    if service.spec.compute.inactivity_ttl is not None:
        output.report(f"idle stop: {views.ttl_words(service)}")
    if service.pods:
        output.table(views.pod_cells(service), dispensable=views.DISPENSABLE_POD_COLUMNS)
    for line, is_waiting in views.queue_lines(service, time.time()):
        output.report(line, "yellow" if is_waiting else "plain")
    if stopped := views.stopped_line(service, debugger_users):
        output.report(stopped, "yellow")
    show_decisions(service, output, most=_SHOWN_DECISIONS)
    for line in views.lost_lines(service):
        output.report(f"lost: {line}", "yellow")
    if service.failure is not None:
        output.panel("Last failure", views.failure_lines(service.failure), style="red")


def show_decisions(service: WorkloadView, output: Output, *, most: int) -> None:
    """Show the last decisions on the number of pods, if there are any."""
    cells = views.decision_cells(service, now=time.time(), most=most)
    if cells:
        output.table(cells, dispensable=views.DISPENSABLE_DECISION_COLUMNS)


#: Failed calls that `kt status` shows.
_SHOWN_FAILURES = 3
#: Decisions on the number of pods that `kt status` shows.
_SHOWN_DECISIONS = 5
# A port of this machine, where one is needed.
_PORT = 8080
# The separator of the lines of one fact, which stand below each other.
_NEXT_LINE = "\n" + " " * 12


@app.command("describe")
def describe(name: ServiceName, namespace: Namespace = None, as_json: AsJson = False) -> None:
    """Show a service, and how to call it.

    The lines of both panels work as they stand; values of arguments are examples.
    """
    output = Output(as_json=as_json)
    services = Services(namespace, output)
    service = services.find(name)
    spec, app = service.spec, service.spec.callable.app
    operations: list[Operation] = []
    address = _address_of(services, service)
    if app is not None:
        curl = app_by_curl(address, app)
        python = app_by_python(address, app)
    else:
        operations = _operations(services, service, output)
        call = operations[0]
        curl = call_by_curl(address, spec.callable, call)
        elsewhere = None if spec.namespace == config.namespace else spec.namespace
        python = call_by_python(
            spec.name,
            elsewhere,
            spec.callable,
            call,
            is_hidden=call.method in OF_COMPUTE or call.method in dir(Cls("handle")),
            is_broadcast=called_together(spec, service.pool) is not None,
        )
    data = _data(services, service)
    if as_json:
        signatures = [operation.signature for operation in operations]
        more = {
            "data": [views.data_json(mount) for mount in data],
            "signatures": signatures,
            "curl": curl,
            "python": python,
        }
        output.value(views.service_json(service) | more)
        return
    _show_facts(service, operations, data, output)
    if service.failure is not None:
        output.panel("Last failure", views.failure_lines(service.failure), style="red")
    if service.notes:
        output.panel("Not honoured", [f"• {note}" for note in service.notes], style="yellow")
    is_served = app is None or app.port is not None
    if is_served and address.before:
        output.panel("No ingress found", without_ingress(address), style="yellow")
    output.panel("With Curl" if is_served else "Its output", curl.splitlines())
    output.panel("With Python", python.splitlines())


def _operations(services: Services, service: WorkloadView, output: Output) -> list[Operation]:
    """The operations that the first ready pod describes."""
    callable_ = service.spec.callable
    for pod in service.pods:
        if pod.is_ready:
            try:
                page = json.loads(services.ask_pod(service, pod, routes.OPENAPI))
            except (KubetorchError, ValueError) as error:
                output.warn(f"{pod.name} does not say what can be called: {error}")
                continue
            operations = read_operations(page, callable_)
            if operations:
                return operations
    return [unknown_operation(callable_)]


def _address_of(services: Services, service: WorkloadView) -> Address:
    name, namespace = service.spec.name, service.spec.namespace
    url = backend.known_url(services.session, service)
    if url is not None:
        url = url or "http://SERVICE_IS_NOT_READY"
        return Address(name, namespace, url, app_url=pod_transport.app_url(url, service))
    forwarding = f"kt port-forward {name} {_PORT} -n {namespace} &"
    return Address(name, namespace, f"http://localhost:{_PORT}", (forwarding,))


def without_ingress(address: Address) -> list[str]:
    """The ways to reach a service whose URL only the pods of its cluster reach."""
    return [
        "From outside of the cluster a forwarded port leads to it, as below; in its pods it is",
        f"http://{address.service}.{address.namespace}.svc.cluster.local/",
    ]


def _access(app: AppSpec | None) -> str | None:
    """The users who reach the port of an app, in words."""
    if app is None or app.port is None:
        return None
    return "public" if app.public else "with a token"


def _pods(service: WorkloadView) -> str:
    if service.scaling is None:
        return f"{views.ready_pods(service)} of {views.pods_wanted(service)} ready"
    if views.is_at_zero(service):
        return "none: scaled to zero, a call makes one"
    return f"{views.ready_pods(service)} ready, as many as calls need"


def _data(services: Services, service: WorkloadView) -> list[DataMount]:
    """The data of a service, with the versions that its first pod has, if that says so."""
    mounts = list(service.spec.compute.data)
    pod = next((pod for pod in service.pods if pod.is_ready), None)
    if mounts and pod is not None:
        with contextlib.suppress(KubetorchError):
            answer = services.ask_pod(service, pod, routes.DATA)
            return messages.decode(list[DataMount], answer) or mounts
    return mounts


def _show_facts(
    service: WorkloadView, operations: list[Operation], data: Iterable[DataMount], output: Output
) -> None:
    spec, compute = service.spec, service.spec.compute
    app = spec.callable.app
    facts: dict[str, Any] = {
        "Name": spec.name,
        "Namespace": spec.namespace,
        "Type": views.mode(service),
        "Callable": _callable(spec.callable),
        "Command": None if app is None else app.command,
        "Port": None if app is None else app.port,
        "Access": _access(app),
        "Status": service.status,
        "Generation": service.generation,
        "Pods": _pods(service),
        "Scaling": "\n".join(views.scaling_lines(service)) or None,
        "World": views.world_words(service),
        "Answers": _answers(service),
        "Values": _large_values(service),
        "CPUs": compute.cpus,
        "Memory": compute.memory,
        "Volumes": ", ".join(f"{volume.name} at {volume.mount_path}" for volume in compute.volumes),
        "Data": "\n".join(map(str, data)),
        "Secrets": ", ".join(secret.name for secret in compute.secrets),
        "TTL": views.ttl_words(service),
        "Creator": views.creator(service),
        "Project": None if spec.origin is None else spec.origin,
        "Created": f"{views.moment(service.created)} ({views.age(service.created)} ago)",
        "URL": service.url,
    }
    for key, value in facts.items():
        if value not in (None, "", "-"):
            lines = str(value).replace("\n", _NEXT_LINE)
            output.report(f"{key + ':':<12}{lines}")
    if operations:
        signatures = _NEXT_LINE.join(operation.signature for operation in operations)
        output.report(f"{'Calls:':<12}{signatures}")
    ranks = views.ranks_of_pods(service)
    for pod in service.pods:
        pod_ranks = ranks.get(pod.name)
        words = (
            views.app_words(pod.app)
            if pod_ranks is None
            else f"ranks {views.rank_words(pod_ranks)}"
        )
        output.report(f"{'Pod:':<12}{pod.name}  {pod.phase}  {pod.url}  {words}".rstrip())
    for line in views.lost_lines(service):
        output.report(f"{'Lost:':<12}{line}")
    output.report("")


def _callable(ref: CallableRef) -> str | None:
    if ref.kind == "app":
        return None
    return f"{'class' if ref.kind == 'cls' else 'function'} {ref.qualname} of {ref.module}"


def _answers(service: WorkloadView) -> str | None:
    """The result of a call in words, if it is no plain value."""
    together, compute = called_together(service.spec, service.pool), service.spec.compute
    if service.spec.callable.kind == "app":
        return None
    if together is not None:
        return f"a list, one value of each of {len(together)} pods"
    is_any = compute.dispatch == "any" and compute.pods > 1
    return f"a value of the least busy of {compute.pods} pods" if is_any else None


def _large_values(service: WorkloadView) -> str | None:
    """How large arguments and results pass between this machine and the pods."""
    pods = [pod for pod in service.pods if pod.is_ready]
    if not pods or service.spec.callable.kind == "app":
        return None
    if all(private_sockets.is_reachable(Path(pod.memory_socket)) for pod in pods):
        return "above 256 KB in memory files, from this machine"
    if not any(pod.memory_socket for pod in pods):
        why = "the system of the pods has no memory files"
    else:
        why = "the pods are not on this machine, or belong to another user"
    return f"on the stream: {why}"


@app.command("scale")
def scale(  # noqa: PLR0913  # the options of the command
    name: ServiceName,
    min_scale: Annotated[
        int | None, typer.Option("--min", help="Fewest pods; 0 allows none.")
    ] = None,
    max_scale: Annotated[
        int | None, typer.Option("--max", help="Most pods; 0 is no limit.")
    ] = None,
    target: Annotated[
        float | None, typer.Option("--target", help="Load per pod, in units of the metric.")
    ] = None,
    buffer: Annotated[
        int | None, typer.Option("--buffer", help="Free pods beyond those that work.")
    ] = None,
    window: Annotated[
        str | None, typer.Option("--window", help="Time of the averages, such as 30s.")
    ] = None,
    scale_down_delay: Annotated[
        str | None, typer.Option("--scale-down-delay", help="Time until a pod goes, such as 5m.")
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="As deployed again, before the other options.")
    ] = False,
    exact_match: ExactMatch = False,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Show or change how an autoscaled service scales.

    A change holds until the next deploy with other numbers. Without options kt scale shows the
    state and the last decisions.
    """
    output = Output(as_json=as_json)
    options: dict[str, Any] = {
        "min_scale": min_scale,
        "max_scale": max_scale,
        "target": target,
        "buffer": buffer,
        "window": window,
        "scale_down_delay": scale_down_delay,
    }
    changes = {option: value for option, value in options.items() if value is not None}
    is_changing = bool(changes or reset)
    services = Services(namespace, output, is_changing=is_changing)
    service = (
        services.find_to_change(name, exact_match=exact_match)
        if is_changing
        else services.find(name)
    )
    if service.scaling is None:
        raise SpecError(
            f"{service.spec.name} has a fixed number of pods",
            hint=f"{service.spec.name}.to(kt.Compute(...).autoscale(min_scale=1, max_scale=4))",
        )
    if is_changing:
        former = dict.fromkeys(service.scaling.settings) if reset else {}
        service = services.scale(service, {**former, **changes})
    if as_json:
        output.value(views.scaling_json(service))
        return
    _show_scaling(service, output)


def _show_scaling(service: WorkloadView, output: Output) -> None:
    labels = (service.spec.name, "reason")
    for label, line in zip(labels, views.scaling_lines(service), strict=False):
        output.report(f"{label}: {line}")
    assert service.scaling is not None
    if service.scaling.settings:
        changes = ", ".join(f"{name}={value}" for name, value in service.scaling.settings.items())
        output.report(f"changed since the deploy: {changes}")
    show_decisions(service, output, most=len(service.scaling.decisions))


# ------------------------------------------------------------------ how a service is called

#: Stands for a method where the methods of the service are unknown.
PLACEHOLDER = "METHOD_OR_CLS_NAME"


Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Operation:
    method: str | None
    signature: str
    example: Mapping[str, Any]
    args: tuple[Any, ...] = ()
    is_generator: bool = False


def read_operations(page: object, callable_: CallableRef) -> list[Operation]:
    """Read the operations of a pod's OpenAPI page; none if the page cannot be read."""
    operations = []
    base = routes.callable_path(callable_.name)
    for path, item in _mapping(_mapping(page).get("paths")).items():
        post = _mapping(_mapping(item).get("post"))
        method = path[len(base) + 1 :] or None
        if not (path == base or path.startswith(f"{base}/")):
            continue
        if post and (method is not None) == (callable_.kind == "cls"):
            arguments = _arguments(post)
            operations.append(
                Operation(
                    method,
                    str(post.get("summary", "")),
                    _example(arguments),
                    _positional(arguments),
                    post.get("x-generator") is True,
                )
            )
    return operations


def unknown_operation(callable_: CallableRef) -> Operation:
    """The operation to show when the page cannot be read."""
    method = PLACEHOLDER if callable_.kind == "cls" else None
    return Operation(method, f"{method or callable_.name}(...)", {})


def _arguments(post: Schema) -> Schema:
    schema = _mapping(post.get("requestBody"))
    for step in ("content", "application/json", "schema", "properties"):
        schema = _mapping(schema.get(step))
    return schema


def _positional(arguments: Schema) -> tuple[Any, ...]:
    """A fitting value for each positional parameter without a default."""
    args = _mapping(arguments.get("args"))
    items, count = args.get("prefixItems"), args.get("minItems")
    if not isinstance(items, list) or not isinstance(count, int):
        return ()
    return tuple(_value(_mapping(schema)) for schema in items[:count])


def _example(arguments: Schema) -> dict[str, Any]:
    """A fitting value for each keyword parameter without a default."""
    parameters = _mapping(_mapping(arguments.get("kwargs")).get("properties"))
    return {
        name: _value(_mapping(schema))
        for name, schema in parameters.items()
        if not str(_mapping(schema).get("description", "")).startswith("default:")
    }


def _mapping(value: object) -> Schema:
    return value if isinstance(value, Mapping) else {}


_EXAMPLES: Mapping[str, Any] = {
    "integer": 1,
    "number": 1.0,
    "string": "text",
    "boolean": True,
    "array": [],
    "object": {},
    "null": None,
}


def _value(schema: Schema) -> Any:  # noqa: ANN401  # any JSON value
    """A value that a schema allows; 1 for a schema without a type."""
    choices = schema.get("anyOf")
    if isinstance(choices, list) and choices:
        return _value(_mapping(choices[0]))
    return _EXAMPLES.get(str(schema.get("type")), 1)


class Address(NamedTuple):
    service: str
    namespace: str
    url: str
    before: tuple[str, ...] = ()
    app_url: str = ""

    @property
    def curl(self) -> str:
        """The command; a forwarding program takes a moment until it listens."""
        return "curl --retry 9 --retry-connrefused" if self.before else "curl"

    @property
    def authorization(self) -> str:
        return f'"Authorization: Bearer $(kt token {self.service} -n {self.namespace})"'


def call_by_curl(address: Address, callable_: CallableRef, call: Operation) -> str:
    path = routes.callable_path(callable_.name, call.method)
    body = json.dumps({"args": call.args, "kwargs": call.example}).replace("'", "'\\''")
    return "\n".join(
        (
            *address.before,
            f"{address.curl} -X POST {address.url}{path} \\",
            f"  -H {address.authorization} \\",
            '  -H "Content-Type: application/json" \\',
            f"  -d '{body}'",
        )
    )


def call_by_python(
    service: str,
    namespace: str | None,
    callable_: CallableRef,
    call: Operation,
    *,
    is_hidden: bool = False,
    is_broadcast: bool = False,
) -> str:
    kind = callable_.kind
    handle_text = (
        f'kt.{kind}(name="{service}")'
        if namespace is None
        else f'kt.{kind.capitalize()}.from_name("{service}", namespace="{namespace}")'
    )
    variable = _identifier(service)
    called = variable
    if call.method not in (None, "__call__"):
        called += f'["{call.method}"]' if is_hidden else f".{call.method}"
    named = (f"{name}={value!r}" for name, value in call.example.items())
    call_text = f"{called}({', '.join((*map(repr, call.args), *named))})"
    shown = f"print({call_text})"
    if call.is_generator and is_broadcast:
        shown = f"for values in {call_text}:\n    print(*values)"
    elif call.is_generator:
        shown = f"for value in {call_text}:\n    print(value)"
    return f"import kubetorch as kt\n\n{variable} = {handle_text}\n{shown}"


def _identifier(service: str) -> str:
    name = service.replace("-", "_")
    return name if name.isidentifier() and not keyword.iskeyword(name) else f"service_{name}"


def app_by_curl(address: Address, app: AppSpec) -> str:
    """The shell command that requests an app; without a port, that shows the app's output."""
    if app.port is None:
        return f"kt logs {address.service} -n {address.namespace} -f"
    request = (
        f"{address.curl} {address.app_url or address.url + routes.APP}{app.health_check or '/'}"
    )
    if not app.public:
        request = f"{request} \\\n  -H {address.authorization}"
    return "\n".join((*address.before, request))


def app_by_python(address: Address, app: AppSpec) -> str:
    service, namespace = address.service, address.namespace
    if app.port is None:
        shown = f'["kt", "logs", "{service}", "-n", "{namespace}"]'
        return f"import subprocess\n\nsubprocess.run({shown}, check=True)"
    target = f'"{address.app_url or address.url + routes.APP}{app.health_check or "/"}"'
    begin = "import urllib.request\n\n"
    if app.public:
        return f"{begin}print(urllib.request.urlopen({target}).read())"
    return (
        f"import subprocess\n{begin}"
        f'command = ["kt", "token", "{service}", "-n", "{namespace}"]\n'
        "token = subprocess.check_output(command, text=True).strip()\n"
        f'headers = {{"Authorization": f"Bearer {{token}}"}}\n'
        f"request = urllib.request.Request({target}, headers=headers)\n"
        "print(urllib.request.urlopen(request).read())"
    )
