"""Real TPU layouts and sizes, from the TPU's own compiler and without a TPU.

    pip install libtpu                       # the version that matches jax
    python -m alloclab.validation.tpu_layouts -o tests/unit/data/tpu_layouts.csv

Compiles programs with many parameters ahead of time for every TPU generation, and writes down the
layout that the compiler gave each parameter and the bytes that its buffer assignment holds for it.
Then says for how many of the cases `alloclab.simulator.layouts` gives the same.
"""

import argparse
import csv
import importlib.metadata
import math
import os
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alloclab.policies.errors import InputError
from alloclab.simulator.atomic import atomic_write
from alloclab.simulator.devices import load_device
from alloclab.simulator.layouts import default_tpu_layout, layout_bytes, parse_shape
from alloclab.validation.libtpu import HOST_WITHOUT_TPU

#: Name of the device -> topology of libtpu.
TOPOLOGIES = {
    "v2": "v2:2x2",
    "v3": "v3:2x2",
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "v7x": "tpu7x:2x2x1",
}

#: jax on the CPU with 64-bit types, and libtpu without a TPU.
_ENVIRONMENT = HOST_WITHOUT_TPU | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}

#: JAX's names; the first of each width also gets the random shapes.
_DTYPES = (
    ("float32", "int32", "uint32"),
    ("bfloat16", "float16", "int16", "uint16"),
    ("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"),
    ("int4", "uint4", "float4_e2m1fn"),
    ("int2", "uint2"),
    ("int64", "float64", "complex64"),
    ("complex128",),
)

_SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 40, 64, 100, 127, 128, 129, 200, 256, 384, 1000)
_VECTORS = (0, 1, 127, 128, 129, 256, 257, 512, 513, 1000, 1024, 1025, 2049, 10000)
_FIXED = (
    (), (1, 1), (2, 1), (1, 5), (5, 1), (3, 2), (1000, 3), (3, 1000), (8, 5), (2, 5), (17, 129),
    (129, 17), (64, 64), (128, 128), (0, 3), (300, 200), (256, 300), (4096, 2050), (7, 5, 9),
    (16, 1280, 40), (5, 0, 7), (1, 1, 1), (16, 24, 128), (16, 8, 255), (3, 3, 64, 128),
    (16, 33, 35, 3), (1, 128, 1, 128), (1048576, 8, 4), (65536, 512), (2, 3, 4, 5, 6),
)  # fmt: skip
_RANDOM = {2: 12, 3: 18, 4: 14, 5: 8, 6: 3}

#: Elements of a random shape, and parameters of one program: both fit the smallest TPU's memory.
_MOST_ELEMENTS = 1 << 20
_AT_ONCE = 60


@dataclass(frozen=True)
class LayoutCase:
    """One parameter as the compiler laid it out.

    Attributes:
        shape: type and dimensions in XLA's form, such as ``f32[1000,3]``.
        devices: short names of the TPUs that it is so on.
        layout: in XLA's form, such as ``{0,1:T(4,128)}``.
        bytes: size of the parameter's allocation.
    """

    shape: str
    devices: tuple[str, ...]
    layout: str
    bytes: int


def read_cases(path: str | Path) -> list[LayoutCase]:
    """The cases in a file that this module wrote; lines that begin with # are comments."""
    with Path(path).open(newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return [
            LayoutCase(
                row["shape"], tuple(row["devices"].split()), row["layout"], int(row["bytes"])
            )
            for row in rows
        ]


def disagreements(cases: list[LayoutCase]) -> tuple[int, list[str]]:
    """How many (shape, device) cases there are, and a line for each that our rules get wrong."""
    count = 0
    wrong = []
    for case in cases:
        shape = parse_shape(case.shape)
        real = case.shape + case.layout
        for name in case.devices:
            count += 1
            generation = load_device(name).generation
            assert generation is not None
            ours = default_tpu_layout(shape.dtype, shape.dims, generation)
            sizes = {layout_bytes(real), layout_bytes(ours)}
            if ours != parse_shape(real) or sizes != {case.bytes}:
                wrong.append(f"{name}: {real} of {case.bytes} bytes; ours: {ours} of {sizes}")
    return count, wrong


def shapes() -> dict[str, list[tuple[int, ...]]]:
    """Dimensions to compile, by JAX's name of the type; the same at every call."""
    chosen: dict[str, list[tuple[int, ...]]] = {}
    for number, (first, *others) in enumerate(_DTYPES):
        dice = random.Random(number)
        drawn: list[tuple[int, ...]] = []
        for rank, count in _RANDOM.items():
            while sum(len(each) == rank for each in drawn) < count:
                dims = tuple(dice.choice(_SIZES) for _ in range(rank))
                if math.prod(dims) <= _MOST_ELEMENTS:
                    drawn.append(dims)
        chosen[first] = list(dict.fromkeys((*_FIXED, *((n,) for n in _VECTORS), *drawn)))
        for other in others:
            chosen[other] = [*_FIXED[:12], *((n,) for n in _VECTORS[::3]), *drawn[::5]]
    return chosen


def compile_cases() -> list[LayoutCase]:
    """Compile every shape for every TPU, in a process that has not used jax before.

    Raises:
        InputError: libtpu is not installed.
    """
    try:
        importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        raise InputError("no libtpu found: pip install libtpu, as old as this jax") from None
    os.environ |= _ENVIRONMENT
    from jax.experimental import topologies

    found: dict[tuple[str, str, int], list[str]] = {}
    for name, topology in TOPOLOGIES.items():
        device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
        for dtype, dims in shapes().items():
            for start in range(0, len(dims), _AT_ONCE):
                for shape, layout, size in _compile(device, dtype, dims[start : start + _AT_ONCE]):
                    found.setdefault((shape, layout, size), []).append(name)
    return [
        LayoutCase(shape, tuple(names), layout, size)
        for (shape, layout, size), names in found.items()
    ]


def _compile(
    device: Any, dtype: str, dims: list[tuple[int, ...]]
) -> Iterator[tuple[str, str, int]]:
    """Shape, layout and bytes of each parameter of a program that does not use them."""
    import jax
    import jax.numpy as jnp

    from alloclab.simulator.assignment import read_assignment

    sharding = jax.sharding.SingleDeviceSharding(device)
    arguments = [jax.ShapeDtypeStruct(each, jnp.dtype(dtype), sharding=sharding) for each in dims]
    program = jax.jit(lambda *_: jnp.float32(0), keep_unused=True)
    with tempfile.TemporaryDirectory() as folder:
        compiled = (
            program.trace(*arguments)
            .lower(lowering_platforms=("tpu",))
            .compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_proto": True})
        )
        (dump,) = Path(folder).glob("*after_optimizations.hlo.pb")
        assignment = read_assignment(dump)
    text = compiled.as_text()
    signature = re.search(r"entry_computation_layout=\{(\(.*?\))->", text)
    assert signature is not None
    parameters = parse_shape(signature[1]).elements
    sizes = {
        each.parameter: each.size for each in assignment.allocations if each.kind == "parameter"
    }
    if len(parameters) != len(dims) or len(sizes) != len(dims):
        raise RuntimeError(f"{len(dims)} parameters went in, {len(parameters)} came out")
    for number, parameter in enumerate(parameters):
        shape, brace, layout = str(parameter).partition("{")
        yield shape, brace + layout, sizes[number]


def write_cases(path: str | Path, cases: list[LayoutCase]) -> None:
    """Write the cases as CSV, under a comment that says what compiled them."""
    versions = " ".join(
        f"{package} {importlib.metadata.version(package)}" for package in ("jax", "libtpu")
    )
    with atomic_write(path) as file:
        file.write(f"# Parameters as compiled ahead of time by {versions}; remade by\n")
        file.write("# python -m alloclab.validation.tpu_layouts\n")
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["shape", "devices", "layout", "bytes"])
        for case in cases:
            rows.writerow([case.shape, " ".join(case.devices), case.layout, case.bytes])


def main(arguments: list[str] | None = None) -> int:
    """The command line; exits 0 if our rules agree with every case, 1 if not, 2 on bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m alloclab.validation.tpu_layouts",
        description="Layouts of arrays on TPUs, from the real compiler.",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the cases here, as CSV")
    options = parser.parse_args(arguments)
    try:
        cases = compile_cases()
        if options.output:
            write_cases(options.output, cases)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    count, wrong = disagreements(cases)
    print(f"{count - len(wrong)} of {count} cases agree")
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
