"""Patches of JAX's Python dispatch path that tell a `Recorder` what runs; undone on exit.

For jax 0.10 to 0.12. The C++ fast path of `jax.jit` is switched off, so that every execution goes
through `ExecuteReplicated.__call__` (jax/_src/interpreters/pxla.py); compilations get a dump
directory of their own; transfers, deletions and host reads are seen where Python code does them.
"""

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from alloclab.scenarios.recorder import SPACE_OF_KIND, Placed, Recorder
from alloclab.simulator.program import (
    EXECUTE,
    TRANSFER_IN,
    TRANSFER_OUT,
    Allocation,
    Aval,
    BufferAssignment,
    Executable,
)


class _Launch(NamedTuple):
    """What every call of one executable shares."""

    replicated: Any  # kept, so that its id stays its own
    number: int
    aliases: tuple[tuple[int, int], ...]  # (parameter, output) that share memory
    results: tuple[Placed, ...]


class Hooks:
    """Install with `install`, undo with `remove`."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.saved: list[tuple[Any, str, Any]] = []
        self.launches: dict[int, _Launch] = {}
        self.wrapped: set[int] = set()
        self.local = threading.local()

    def install(self) -> None:
        """Patch JAX. Caches are cleared, so that compiled functions come by again."""
        import jax
        import numpy as np
        from jax._src import array, compiler, dispatch, pjit
        from jax._src.interpreters import pxla

        jax.clear_caches()
        self.array = array.ArrayImpl
        self.patch(pjit, "_get_fastpath_data", lambda original: lambda *a, **k: None)
        self.patch(pxla.ExecuteReplicated, "__call__", self.execute)
        self.patch(compiler, "backend_compile_and_load", self.compile)
        self.patch(dispatch, "_batched_device_put_impl", self.transfer)
        self.patch(pxla, "batched_device_put", self.transfer)
        self.patch(array.ArrayImpl, "delete", self.delete)
        self.patch(array.ArrayImpl, "_value", self.read)
        # On the CPU NumPy reads an array through the buffer protocol, unseen by its methods.
        self.patch(np, "asarray", self.convert)
        self.patch(np, "array", self.convert)

    def remove(self) -> None:
        """Put everything back, in reverse order."""
        import jax

        for owner, name, original in reversed(self.saved):
            setattr(owner, name, original)
        self.saved.clear()
        jax.clear_caches()

    def patch(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replace an attribute by what ``wrap`` makes of it."""
        original = getattr(owner, name)
        self.saved.append((owner, name, original))
        setattr(owner, name, wrap(original))

    # --- executions -----------------------------------------------------------------------

    def execute(self, original: Any) -> Any:
        """ExecuteReplicated.__call__: note operands, donated operands and results."""
        recorder, local = self.recorder, self.local

        def call(replicated: Any, *args: Any) -> Any:
            if id(replicated) not in self.wrapped:
                self.watch_inputs(replicated)
            outer = getattr(local, "inputs", None)
            local.inputs = None
            local.depth = getattr(local, "depth", 0) + 1
            try:
                out = original(replicated, *args)
                arrays = local.inputs or []
                began = getattr(local, "began", time.perf_counter())
            finally:
                local.depth -= 1
                local.inputs = outer
            with recorder.lock:
                self.record(replicated, arrays, [_plain(each) for each in out], began)
            return out

        return call

    def watch_inputs(self, replicated: Any) -> None:
        """Have the handler that shards the arguments tell what it made of them."""
        handler, local = replicated.in_handler, self.local
        self.wrapped.add(id(replicated))
        self.saved.append((replicated, "in_handler", handler))

        def watched(args: Any) -> Any:
            arrays = handler(args)
            local.inputs = arrays
            local.began = time.perf_counter()
            return arrays

        replicated.in_handler = watched

    def record(self, replicated: Any, arrays: list[Any], out: list[Any], began: float) -> None:
        """Append an execution; arrays never seen before came to the device just now."""
        recorder = self.recorder
        operands = tuple(recorder.buffers_of(each) or self.arrived(each, began) for each in arrays)
        launch = self.launches.get(id(replicated)) or self.launch(replicated, arrays, out)
        taken = {}
        donated = [False] * len(operands)
        for parameter, output in launch.aliases:
            if arrays[parameter].is_deleted():
                donated[parameter] = True
                taken[output] = operands[parameter]
        results = []
        for number, each in enumerate(out):
            known = recorder.buffers_of(each) if number not in taken else None
            results.append(
                known or recorder.track(each, launch.results[number], taken.get(number, ()))
            )
        for parameter, flag in enumerate(donated):
            if flag:
                tracked = recorder.arrays.pop(id(arrays[parameter]), None)
                if tracked is not None and tracked() is not arrays[parameter]:
                    recorder.arrays[tracked.key] = tracked
        recorder.add(
            EXECUTE,
            began=began,
            executable=launch.number,
            operands=operands,
            donated=tuple(donated),
            results=tuple(results),
        )

    def launch(self, replicated: Any, arrays: list[Any], out: list[Any]) -> _Launch:
        """Describe an executable at its first call."""
        recorder, executable = self.recorder, replicated.xla_executable
        assignment = recorder.assignment_of(executable)
        tokens = len(replicated.ordered_effects)
        if assignment is not None and tokens:
            assignment = _without_tokens(assignment, tokens)
        results = tuple(self.placed(each) for each in out)
        module = executable.hlo_modules()[0].as_serialized_hlo_module_proto()
        costs = _costs(executable)
        index = len(recorder.executables)
        recorder.executables.append(
            Executable(
                name=replicated.name,
                fingerprint=hashlib.sha256(module).hexdigest()[:16],
                inputs=tuple(self.placed(each).aval for each in arrays),
                outputs=tuple(each.aval for each in results),
                targets={} if assignment is None else {"cpu": assignment},
                flops=costs.get("flops"),
                bytes_accessed=costs.get("bytes accessed"),
            )
        )
        aliases = tuple(
            (each.parameter, each.output)
            for each in (assignment.allocations if assignment else ())
            if each.parameter is not None and each.output is not None
        )
        found = _Launch(replicated, index, aliases, results)
        self.launches[id(replicated)] = found
        return found

    def compile(self, original: Any) -> Any:
        """compiler.backend_compile_and_load: dump each compilation apart, then read it."""
        recorder = self.recorder

        def call(
            backend: Any, module: Any, devices: Any, options: Any, *rest: Any, **more: Any
        ) -> Any:
            directory = recorder.dump_directory()
            debug = options.executable_build_options.debug_options
            debug.xla_dump_to = str(directory)
            debug.xla_dump_hlo_as_proto = True
            executable = original(backend, module, devices, options, *rest, **more)
            with recorder.lock:
                recorder.compiled(executable, directory)
            return executable

        return call

    # --- arrays ---------------------------------------------------------------------------

    def placed(self, array: Any) -> Placed:
        """Shape, bytes per shard, devices and memory space of an array."""
        sharding = array.sharding
        shape = tuple(sharding.shard_shape(array.shape))
        items = 1
        for each in shape:
            items *= each
        devices = tuple(device.id for device in sharding._device_assignment)
        bits = _bits(array.dtype)
        space = SPACE_OF_KIND.get(sharding.memory_kind or "", 0)
        return Placed(Aval(shape, str(array.dtype)), (items * bits + 7) // 8, devices, space)

    def arrived(self, array: Any, began: float | None = None) -> tuple[int, ...]:
        """The buffers of an array seen for the first time: new ones, or those of another array."""
        recorder = self.recorder
        here = _pointers(array)
        known: dict[tuple[int, int], int] = {}
        for tracked in list(recorder.arrays.values()):
            other = tracked()
            if other is not None and other.nbytes == array.nbytes and not other.is_deleted():
                known.update(zip(_pointers(other), tracked.buffers, strict=False))
        if here and all(each in known for each in here):
            return recorder.share(array, tuple(known[each] for each in here))
        buffers = recorder.track(array, self.placed(array))
        recorder.add(TRANSFER_IN, began=began, results=(buffers,))
        return buffers

    def transfer(self, original: Any) -> Any:
        """device_put in its two forms: what comes out is on the device."""
        local = self.local

        def call(*args: Any, **more: Any) -> Any:
            if getattr(local, "depth", 0):
                return original(*args, **more)
            began = time.perf_counter()
            local.depth = 1
            try:
                out = original(*args, **more)
            finally:
                local.depth = 0
            with self.recorder.lock:
                for each in out if isinstance(out, list | tuple) else [out]:
                    array = _plain(each)
                    if isinstance(array, self.array) and not self.recorder.buffers_of(array):
                        self.arrived(array, began)
            return out

        return call

    def delete(self, original: Any) -> Any:
        """ArrayImpl.delete."""

        def call(array: Any) -> None:
            original(array)
            with self.recorder.lock:
                self.recorder.forget(array)

        return call

    def read(self, original: Any) -> Any:
        """ArrayImpl._value: the host copy, made at the first use."""

        def value(array: Any) -> Any:
            if array._npy_value is not None:
                return original.fget(array)
            return self.out(array, lambda: original.fget(array))

        return property(value)

    def convert(self, original: Any) -> Any:
        """numpy.asarray and numpy.array of a JAX array."""

        def call(*args: Any, **more: Any) -> Any:
            if args and type(args[0]) is self.array:
                return self.out(args[0], lambda: original(*args, **more))
            return original(*args, **more)

        return call

    def out(self, array: Any, read: Callable[[], Any]) -> Any:
        """Read an array to the host and note it once."""
        local = self.local
        if getattr(local, "reading", False) or getattr(local, "depth", 0):
            return read()
        began = time.perf_counter()
        local.reading = True
        try:
            value = read()
        finally:
            local.reading = False
        with self.recorder.lock:
            buffers = self.recorder.buffers_of(array) or self.arrived(array, began)
            self.recorder.add(TRANSFER_OUT, began=began, operands=(buffers,))
        return value


def _plain(array: Any) -> Any:
    """The array under an array of PRNG keys."""
    return getattr(array, "_base_array", array)


def _bits(dtype: Any) -> int:
    """Bits of one element; the small types are packed (xla::ShapeUtil::ByteSizeOfElements)."""
    import jax.numpy as jnp

    name = dtype.name
    if name in ("int4", "uint4", "float4_e2m1fn"):
        return 4
    if name in ("int2", "uint2"):
        return 2
    return int(jnp.dtype(dtype).itemsize) * 8


def _pointers(array: Any) -> list[tuple[int, int]]:
    """Device and address of every shard; empty for memory that has no address."""
    try:
        return [
            (shard.device.id, shard.data.unsafe_buffer_pointer())
            for shard in array.addressable_shards
        ]
    except Exception:  # a deleted array, or a backend without addresses
        return []


def _costs(executable: Any) -> dict[str, float]:
    """The compiler's cost analysis, empty if the backend has none."""
    try:
        costs = executable.cost_analysis()
    except Exception:  # unimplemented on some backends
        return {}
    return dict(costs[0] if isinstance(costs, list) else costs or {})


def _without_tokens(assignment: BufferAssignment, tokens: int) -> BufferAssignment:
    """Parameters and outputs counted without the tokens of ordered effects, which come first."""

    def count(each: Allocation) -> Allocation:
        output = None if each.output is None or each.output < tokens else each.output - tokens
        if each.parameter is None:
            return replace(each, output=output)
        if each.parameter < tokens:  # no memory, and not the caller's: as good as a constant
            return replace(each, kind="constant", parameter=None, output=None)
        return replace(each, parameter=each.parameter - tokens, output=output)

    return replace(assignment, allocations=tuple(map(count, assignment.allocations)))
