"""What XLA's own planner did to a set of programs, from its dumps and without a device.

    pip install libtpu                                            # for tpu: as old as this jax
    pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt       # for cuda: likewise
    python -m alloclab.validation.heap_goldens -o tests/oracle/data/heap --target cpu

Compiles each program for the target, keeps the heaps of the dump, and says how many of them
`alloclab.simulator.heap_planner` places as XLA did.
"""

import argparse
import gzip
import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from alloclab.policies.errors import InputError
from alloclab.simulator.atomic import atomic_write
from alloclab.simulator.heap_dump import (
    DumpedAllocation,
    DumpedHeap,
    HeapDump,
    Piece,
    read_heap_dump,
)
from alloclab.simulator.heap_trace import HeapTrace
from alloclab.validation.heap_agreement import heap_agreement, table
from alloclab.validation.libtpu import HOST_WITHOUT_TPU

if TYPE_CHECKING:
    from alloclab.validation.libtpu import HOST_WITHOUT_TPU
from alloclab.validation.heap_programs import Program

FORMAT = 1

#: GpuTargetConfigProto of an H100 SXM (openxla/xla, xla/backends/gpu/target_config/specs).
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclass(frozen=True)
class Target:
    """What to compile for.

    Attributes:
        name: as in `alloclab.simulator.heap_combine.heap_rule`.
        topology: arguments of `jax.experimental.topologies.get_topology_desc`; empty for the CPU
            that is here.
        packages: what the compiler is in; the last one's version is the compiler's.
        options: compiler options that are needed to compile without a device.
        scales: how wide the programs are.
    """

    name: str
    topology: Mapping[str, Any]
    packages: tuple[str, ...]
    options: Mapping[str, Any]
    scales: tuple[int, ...]


#: libtpu keeps the values of small programs in VMEM, so its HBM heaps need large ones too; one of
#: these leaves so little HBM that the planner's fallback shows. Without a device CUDA cannot ask
#: CUB how much scratch its radix sort takes.
TARGETS = {
    "cpu": Target("cpu", {}, ("jaxlib",), {}, (1,)),
    "cuda": Target(
        "cuda:h100",
        {"platform": "cuda", "topology_name": "", "target_config": H100, "topology": "1x1x1"},
        ("jax-cuda12-plugin", "jax-cuda12-pjrt"),
        {"xla_gpu_enable_cub_radix_sort": False},
        (1,),
    ),
    "tpu": Target(
        "tpu:v5e", {"platform": "tpu", "topology_name": "v5e:2x2"}, ("libtpu",), {}, (1, 32)
    ),
}


def compile_heaps(program: "Program", target: str, name: str = "") -> HeapDump:
    """Compile a program for a target and read the heaps from the compiler's dump.

    The first call decides what JAX runs on: it must be the CPU.
    """
    import jax

    chosen = TARGETS[target]
    arguments = program.arguments
    if chosen.topology:
        from jax.experimental import topologies

        device = topologies.get_topology_desc(**chosen.topology).devices[0]
        sharding = jax.sharding.SingleDeviceSharding(device)
        arguments = jax.tree.map(
            lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding),
            arguments,
        )
    traced = jax.jit(program.function, donate_argnums=program.donated).trace(*arguments)
    lowered = traced.lower(lowering_platforms=(target,))
    with tempfile.TemporaryDirectory() as folder:
        lowered.compile(
            compiler_options={
                "xla_dump_to": folder,
                "xla_dump_hlo_as_proto": True,
                **chosen.options,
            }
        )
        (path,) = Path(folder).glob("*after_optimizations.hlo.pb")
        return read_heap_dump(path, name)


def golden_dumps(target: str) -> Iterator[HeapDump]:
    """Compile every program for a target, at each of its scales."""
    from alloclab.validation.heap_programs import programs

    for scale in TARGETS[target].scales:
        for name, program in programs(scale).items():
            yield compile_heaps(program, target, name if scale == 1 else f"{name}_x{scale}")


def versions(target: str) -> dict[str, str]:
    """The versions of what compiles for a target."""
    packages = dict.fromkeys(("jax", "jaxlib", *TARGETS[target].packages))
    return {each: importlib.metadata.version(each) for each in packages}


def write_goldens(
    path: str | Path, target: str, versions: Mapping[str, str], dumps: list[HeapDump]
) -> None:
    """Write dumps as compressed JSON: the same bytes for the same dumps."""
    document = {
        "format": FORMAT,
        "target": target,
        "versions": dict(versions),
        "programs": [_to_json(each) for each in dumps],
    }
    text = json.dumps(document, separators=(",", ":"))
    with atomic_write(path, binary=True) as file:
        file.write(gzip.compress(text.encode(), mtime=0))


def read_goldens(path: str | Path) -> tuple[str, dict[str, str], list[HeapDump]]:
    """The target, versions and dumps of a file that `write_goldens` wrote.

    Raises:
        InputError: not such a file.
    """
    try:
        document = json.loads(gzip.decompress(Path(path).read_bytes()))
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as compressed JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InputError(f"{path}: is not a file of heaps in format {FORMAT}")
    dumps = [_from_json(each) for each in document["programs"]]
    return document["target"], document["versions"], dumps


def _to_json(dump: HeapDump) -> dict[str, Any]:
    return {
        "name": dump.name,
        "allocations": [
            [each.size, each.color, each.role, each.position, each.pieces]
            for each in dump.allocations
        ],
        "heaps": [
            {
                "color": heap.color,
                "allocation": heap.allocation,
                "whole_module": heap.whole_module,
                "kind": heap.trace.kind.tolist(),
                "event_buffer": heap.trace.buffer.tolist(),
                "share_with": heap.trace.share_with.tolist(),
                "buffer": heap.buffer.tolist(),
                "size": heap.size.tolist(),
                "offset": heap.offset.tolist(),
            }
            for heap in dump.heaps
        ],
    }


def _from_json(dump: dict[str, Any]) -> HeapDump:
    def integers(values: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array(values, dtype=np.int64)

    return HeapDump(
        dump["name"],
        tuple(
            DumpedAllocation(size, color, role, position, tuple(Piece(*each) for each in pieces))
            for size, color, role, position, pieces in dump["allocations"]
        ),
        tuple(
            DumpedHeap(
                heap["color"],
                heap["allocation"],
                heap["whole_module"],
                HeapTrace(
                    np.array(heap["kind"], dtype=np.uint8),
                    integers(heap["event_buffer"]),
                    integers(heap["share_with"]),
                ),
                integers(heap["buffer"]),
                integers(heap["size"]),
                integers(heap["offset"]),
            )
            for heap in dump["heaps"]
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m alloclab.validation.heap_goldens",
        description="The heaps of small programs, as XLA's compilers place them.",
    )
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="DIR")
    parser.add_argument("--target", required=True, choices=TARGETS)
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    if options.target == "tpu":
        os.environ.update(HOST_WITHOUT_TPU)
    chosen = TARGETS[options.target]
    try:
        found = versions(options.target)
    except importlib.metadata.PackageNotFoundError as error:
        sys.exit(f"error: {error.name} is not installed; it compiles for {chosen.name}")
    dumps = []
    for dump in golden_dumps(options.target):
        print(f"{dump.name}: {len(dump.heaps)} heaps", file=sys.stderr)
        dumps.append(dump)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{options.target}-{found[chosen.packages[-1]]}.json.gz"
    write_goldens(path, chosen.name, found, dumps)
    print(f"{path}: {len(dumps)} programs")
    print(table([row for dump in dumps for row in heap_agreement(dump, chosen.name)]))


if __name__ == "__main__":
    main()
