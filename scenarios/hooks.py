"""Patches of JAX's Python dispatch path that tell a `Recorder` what runs; undone at the end.

For jax 0.10 to 0.12. The C++ fast paths of `jax.jit` and of compiled functions are switched off, so
that every execution goes through `ExecuteReplicated.__call__` (jax/_src/interpreters/pxla.py);
compilations get a dump directory of their own; transfers, views, deletions and host reads are seen
where Python code does them.

What stays unseen: NumPy functions that read an array in C through the buffer protocol, such as
``np.add(x, 1)``, which only the CPU backend's arrays have. Host callbacks belong to the host:
nothing that they do counts.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from alloclab.scenarios.arrays import placed, plain, pointers
from alloclab.scenarios.executables import Assignments, describe
from alloclab.scenarios.recorder import Placed, Recorder, Span
from alloclab.simulator.program import EXECUTE, TRANSFER_IN, TRANSFER_OUT

now = time.perf_counter


class _Launch(NamedTuple):
    """What every call of one executable shares."""

    replicated: Any  # kept, so that its id stays its own
    number: int
    aliases: tuple[tuple[int, int], ...]  # (parameter, output) that share memory
    results: tuple[Placed, ...]
    devices: tuple[int, ...]


class _Inputs(NamedTuple):
    """The arguments of an execution as given and as arrays on the devices."""

    given: Sequence[Any]
    arrays: Sequence[Any]
    span: Span


class _Thread(threading.local):
    """What the current thread is in the middle of."""

    busy = False  # in a call whose parts are not events of their own
    host = False  # in a host callback
    inputs: _Inputs | None = None


class Hooks:
    """Install with `install`, undo with `remove`.

    Modules that were imported meanwhile may hold a patched function for good; it then does what
    the original does.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.assignments = Assignments()
        self.on = False
        self.saved: list[tuple[Any, str, Any]] = []
        self.launches: dict[int, _Launch] = {}
        self.thread = _Thread()

    def install(self) -> None:
        """Patch JAX. Caches are cleared, so that compiled functions come by again.

        Arrays that are alive already are transfers at the start.
        """
        import jax
        import numpy as np
        from jax._src import array, callback, compiler, debugging, dispatch, pjit, stages
        from jax._src import xla_bridge as bridge
        from jax._src.interpreters import pxla

        self.array = array.ArrayImpl
        jax.clear_caches()
        if bridge.backends_are_initialized():  # to ask for arrays would start them
            for each in jax.live_arrays():
                array_ = plain(each)
                if isinstance(array_, self.array) and array_.nbytes and not array_.is_deleted():
                    self.arrived(array_, None, Span(self.recorder.started, float("nan")))
        self.on = True
        self.patch(pjit, "_get_fastpath_data", lambda original: lambda *a, **k: None)
        self.patch(stages.Compiled, "__call__", self.call_compiled)
        self.patch(pxla.ExecuteReplicated, "__call__", self.execute)
        self.patch(pxla.InputsHandler, "__call__", self.place_inputs)
        self.patch(compiler, "backend_compile_and_load", self.compile)
        self.patch(dispatch, "_batched_device_put_impl", self.put_many)
        self.patch(pxla, "batched_device_put", self.put_shards)
        self.patch(self.array, "__init__", self.assemble)
        self.patch(self.array, "addressable_data", self.view)
        self.patch(self.array, "addressable_shards", self.view_shards)
        self.patch(self.array, "delete", self.delete)
        self.patch(self.array, "_value", self.read)
        # On the CPU NumPy reads an array through the buffer protocol, unseen by its methods.
        for name in ("array", "asarray", "asanyarray", "ascontiguousarray"):
            self.patch(np, name, self.convert)
        self.patch(callback, "pure_callback_impl", self.on_the_host)
        self.patch(callback, "io_callback_impl", self.on_the_host)
        self.patch(debugging, "debug_callback_impl", self.on_the_host)

    def remove(self) -> None:
        """Put everything back, in reverse order."""
        import jax

        self.on = False
        for owner, name, original in reversed(self.saved):
            setattr(owner, name, original)
        self.saved.clear()
        self.assignments.close()
        jax.clear_caches()

    def patch(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replace an attribute by what ``wrap`` makes of it."""
        original = getattr(owner, name)
        self.saved.append((owner, name, original))
        setattr(owner, name, wrap(original))

    @property
    def watching(self) -> bool:
        """Whether what this thread does now is an event of its own."""
        return self.on and not self.thread.busy

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """What this thread does inside is no event of its own, but for executions."""
        before, self.thread.busy = self.thread.busy, True
        try:
            yield
        finally:
            self.thread.busy = before

    # --- executions -----------------------------------------------------------------------

    def execute(self, original: Any) -> Any:
        """ExecuteReplicated.__call__: note operands, donated operands and results."""
        thread = self.thread

        def call(replicated: Any, *args: Any) -> Any:
            if not self.on or thread.host:
                return original(replicated, *args)
            outer, thread.inputs = thread.inputs, None
            try:
                with self.as_one():
                    out = original(replicated, *args)
                ended = now()
                if thread.inputs is not None:
                    self.executed(replicated, thread.inputs, _results(replicated, args, out), ended)
            finally:
                thread.inputs = outer
            return out

        return call

    def place_inputs(self, original: Any) -> Any:
        """InputsHandler.__call__: the arguments of an execution, put onto the devices."""

        def call(handler: Any, given: Any) -> Any:
            if not self.on or self.thread.host:
                return original(handler, given)
            began = now()
            arrays = original(handler, given)
            self.thread.inputs = _Inputs(given, arrays, Span(began, now()))
            return arrays

        return call

    def executed(self, replicated: Any, inputs: _Inputs, out: list[Any], ended: float) -> None:
        """Append an execution; arguments that were not on the device came there just before."""
        recorder, arrays = self.recorder, inputs.arrays
        operands = tuple(
            recorder.buffers_of(array) or self.arrived(array, _source(given, array), inputs.span)
            for given, array in zip(inputs.given, arrays, strict=True)
        )
        with recorder.lock:
            launch = self.launches.get(id(replicated)) or self.launch(replicated, arrays, out)
            donated = [False] * len(operands)
            taken = {}
            for parameter, output in launch.aliases:
                array = arrays[parameter]
                if array is out[output] or array.is_deleted():  # a mutable reference, or donated
                    donated[parameter] = True
                    taken[output] = operands[parameter]
            results = tuple(
                recorder.track(array, launch.results[number], alias_of=taken.get(number, ()))
                for number, array in enumerate(out)
            )
            recorder.add(
                EXECUTE,
                Span(inputs.span.ended, ended),
                executable=launch.number,
                operands=operands,
                donated=tuple(donated),
                results=results,
                devices=launch.devices,
            )

    def launch(self, replicated: Any, arrays: Sequence[Any], out: Sequence[Any]) -> _Launch:
        """Describe an executable at its first call."""
        results = tuple(placed(each) for each in out)
        executable = describe(
            replicated,
            self.assignments.of(replicated.xla_executable),
            [placed(each).aval for each in arrays],
            [each.aval for each in results],
        )
        found = _Launch(
            replicated,
            len(self.recorder.executables),
            tuple(
                (each.parameter, each.output)
                for assignment in executable.targets.values()
                for each in assignment.allocations
                if each.parameter is not None and each.output is not None
            ),
            results,
            tuple(device.id for device in replicated._local_devices),
        )
        self.recorder.executables.append(executable)
        self.launches[id(replicated)] = found
        return found

    def compile(self, original: Any) -> Any:
        """compiler.backend_compile_and_load: dump each compilation apart."""

        def call(
            backend: Any, module: Any, devices: Any, options: Any, *rest: Any, **more: Any
        ) -> Any:
            def go() -> Any:
                return original(backend, module, devices, options, *rest, **more)

            return self.assignments.compile(go, options) if self.on else go()

        return call

    def call_compiled(self, original: Any) -> Any:
        """stages.Compiled.__call__: as where it has no C++ fast path."""

        def call(compiled: Any, *args: Any, **more: Any) -> Any:
            return type(compiled).call(compiled._params, *args, **more)[0]

        return call

    def on_the_host(self, original: Any) -> Any:
        """The body of a host callback, which runs in whatever thread."""
        thread = self.thread

        def call(*args: Any, **more: Any) -> Any:
            before, thread.host = thread.host, True
            try:
                with self.as_one():
                    return original(*args, **more)
            finally:
                thread.host = before

        return call

    # --- transfers to the device, and views -----------------------------------------------

    def arrived(
        self, array: Any, sources: Sequence[Any] | None, span: Span | None = None
    ) -> tuple[int, ...]:
        """The buffers of an array seen for the first time: new ones, or those of other arrays.

        Args:
            sources: arrays that it may share buffers with: none if its data came from the host;
                None if it is unknown where it is from.
        """
        recorder = self.recorder
        if sources is None:
            sources = [each() for each in list(recorder.arrays.values())]
        here = placed(array)
        with self.as_one():
            shared = self.shared(array, here.nbytes, sources) if sources and here.nbytes else {}
        with recorder.lock:
            if known := recorder.buffers_of(array):
                return known  # another thread was faster
            buffers = recorder.track(array, here, shared)
            new = tuple(each for each in buffers if recorder.device_of(each) not in shared)
            if new:
                recorder.add(TRANSFER_IN, span, results=(new,))
        return buffers

    def shared(self, array: Any, nbytes: int, sources: Sequence[Any]) -> dict[int, int]:
        """By device the buffers that an array has in common with others, by their addresses.

        A smaller one at the same address is none of them: on the CPU a piece of an array that
        went through the host may lie in the array.
        """
        recorder = self.recorder
        addresses = pointers(array)
        found = {}
        for other in sources:
            buffers = () if other is None else recorder.buffers_of(other) or ()
            theirs = {
                recorder.device_of(each): each
                for each in buffers
                if recorder.bytes_of(each) == nbytes
            }
            if not theirs.keys() & addresses.keys():
                continue
            for device, address in pointers(other).items():
                if addresses.get(device) == address and device in theirs:
                    found[device] = theirs[device]
        return found

    def put_many(self, original: Any) -> Any:
        """dispatch._batched_device_put_impl, which is jax.device_put."""

        def call(*args: Any, **more: Any) -> Any:
            if not self.watching:
                return original(*args, **more)
            began = now()
            with self.as_one():
                out = original(*args, **more)
            span = Span(began, now())
            for given, each in zip(args, out, strict=True):
                self.put(plain(each), _source(given, each), span)
            return out

        return call

    def put_shards(self, original: Any) -> Any:
        """pxla.batched_device_put: an array from one piece of data for each device."""

        def call(aval: Any, sharding: Any, pieces: Any, *args: Any, **more: Any) -> Any:
            if not self.watching:
                return original(aval, sharding, pieces, *args, **more)
            began = now()
            with self.as_one():
                out = original(aval, sharding, pieces, *args, **more)
            sources = [each for each in map(plain, pieces) if isinstance(each, self.array)]
            self.put(plain(out), sources, Span(began, now()))
            return out

        return call

    def put(self, array: Any, sources: Sequence[Any] | None, span: Span) -> None:
        """Note an array that a transfer made."""
        if isinstance(array, self.array) and not self.recorder.buffers_of(array):
            self.arrived(array, sources, span)

    def assemble(self, original: Any) -> Any:
        """ArrayImpl.__init__: a new array over those of single devices."""

        def init(array: Any, aval: Any, sharding: Any, arrays: Any, *args: Any, **more: Any) -> Any:
            original(array, aval, sharding, arrays, *args, **more)
            if self.watching:
                self.put(array, arrays, Span(now(), float("nan")))

        return init

    def view(self, original: Any) -> Any:
        """ArrayImpl.addressable_data: a new array over one shard."""

        def call(array: Any, index: int) -> Any:
            found = original(array, index)
            self.viewed(array, [found])
            return found

        return call

    def view_shards(self, original: Any) -> Any:
        """ArrayImpl.addressable_shards: new arrays over every shard."""

        def shards(array: Any) -> Any:
            found = original.fget(array)
            self.viewed(array, [each.data for each in found])
            return found

        return property(shards)

    def viewed(self, array: Any, parts: list[Any]) -> None:
        """Note arrays that are views of another."""
        if self.watching:
            for each in parts:
                if not self.recorder.buffers_of(each) and not each.is_deleted():
                    if not self.recorder.buffers_of(array):
                        self.arrived(array, None)
                    self.arrived(each, [array])

    # --- deletions and reads --------------------------------------------------------------

    def delete(self, original: Any) -> Any:
        """ArrayImpl.delete: the memory goes, whatever other arrays lie over it."""

        def call(array: Any) -> None:
            original(array)
            with self.recorder.lock:
                self.recorder.forget(array)

        return call

    def read(self, original: Any) -> Any:
        """ArrayImpl._value: the host copy, made at the first use."""
        return property(lambda array: self.out([array], lambda: original.fget(array)))

    def convert(self, original: Any) -> Any:
        """NumPy's conversions of a JAX array, or of a list of them."""

        def call(*args: Any, **more: Any) -> Any:
            given = args[0] if args else None
            if type(given) is self.array:
                return self.out([given], lambda: original(*args, **more))
            if type(given) in (list, tuple) and given and type(given[0]) is self.array:
                arrays = [each for each in given if type(each) is self.array]
                return self.out(arrays, lambda: original(*args, **more))
            return original(*args, **more)

        return call

    def out(self, arrays: Sequence[Any], read: Callable[[], Any]) -> Any:
        """Read arrays to the host, and note each array's first time; it keeps its copy then."""
        if not self.watching:
            return read()
        recorder = self.recorder
        began = now()
        with self.as_one():
            value = read()
            span = Span(began, now())
            for each in arrays:
                if not recorder.buffers_of(each):
                    self.arrived(each, None)
        with recorder.lock:
            for each in arrays:
                tracked = recorder.tracked(each)
                if tracked is not None and not tracked.read:
                    tracked.read = True
                    recorder.add(TRANSFER_OUT, span, operands=(tracked.buffers,))
        return value


def _source(given: Any, array: Any) -> Sequence[Any]:
    """What an array can share memory with that was made from an argument.

    Data of the host is never shared: that the CPU backend reads some NumPy arrays where they are
    is a matter of the CPU.
    """
    given = plain(given)
    return [given] if type(given) is type(plain(array)) else []


def _results(replicated: Any, args: Sequence[Any], out: Sequence[Any]) -> list[Any]:
    """The results of an executable in order, with those that went into mutable references."""
    if replicated.mut is None:
        return [plain(each) for each in out]
    kept = [each for number, each in enumerate(args) if number in replicated.kept_var_idx]
    references = [*kept, *replicated.mut.in_mut]
    rest = iter(out)
    return [
        plain(next(rest) if number is None else references[number])
        for number in replicated.mut.out_mut
    ]
