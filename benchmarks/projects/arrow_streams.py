"""Values as streams of Arrow's IPC format, as a user would write and read them."""

from __future__ import annotations

from typing import Any

import pyarrow


def write(kind: str, value: Any) -> bytes:  # noqa: ANN401  # an array or a frame
    """The stream."""
    if kind == "array":
        table = pyarrow.table({"values": value})
    elif kind == "pandas":
        table = pyarrow.Table.from_pandas(value)
    else:
        table = value.to_arrow() if kind == "polars" else value
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def read(kind: str, data: bytes) -> Any:  # noqa: ANN401  # an array or a frame
    """What it was made of."""
    table = pyarrow.ipc.open_stream(pyarrow.py_buffer(data)).read_all()
    if kind == "array":
        return table["values"].combine_chunks().to_numpy()
    if kind == "pandas":
        return table.to_pandas()
    if kind == "polars":
        import polars  # noqa: PLC0415  # only where it is measured

        return polars.from_arrow(table)
    return table


def echo(kind: str, data: bytes) -> bytes:
    """Give a value back that came as a stream, which `kind` is made of."""
    return write(kind, read(kind, data))
