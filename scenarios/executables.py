"""What a capture keeps of a compiled computation: shapes, costs, and its buffer assignment."""

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from alloclab.simulator.assignment import assignment_of, read_assignment
from alloclab.simulator.hlo_proto import join
from alloclab.simulator.program import Allocation, Aval, BufferAssignment, Executable


class Assignments:
    """The buffer assignments of the computations that were compiled in a capture."""

    def __init__(self) -> None:
        self._dumps = Path(tempfile.mkdtemp(prefix="alloclab-"))
        self._known: dict[int, tuple[Any, BufferAssignment]] = {}  # by id, which the first keeps

    def close(self) -> None:
        """Remove the dump directories."""
        shutil.rmtree(self._dumps, ignore_errors=True)

    def compile(self, compile: Any, options: Any) -> Any:
        """Call ``compile`` with a dump directory of its own, and read what is dumped there.

        If the program dumps its compilations too, its directory gets the files.
        """
        directory = Path(tempfile.mkdtemp(dir=self._dumps))
        debug = options.executable_build_options.debug_options
        overrides = list(options.env_option_overrides)  # jit(compiler_options=...)
        usual = debug.xla_dump_to
        wanted = dict(overrides).get("xla_dump_to", usual)
        options.env_option_overrides = [each for each in overrides if each[0] != "xla_dump_to"]
        debug.xla_dump_to = str(directory)
        debug.xla_dump_hlo_as_proto = True
        if wanted:
            debug.xla_dump_hlo_as_text = True  # the default where no form is asked for
        try:
            executable = compile()
            files = sorted(directory.glob("*after_optimizations.hlo.pb"))
            if files:
                self._known[id(executable)] = (executable, read_assignment(files[-1]))
        finally:
            debug.xla_dump_to = usual
            options.env_option_overrides = overrides
            if wanted:
                shutil.copytree(directory, wanted, dirs_exist_ok=True)
            shutil.rmtree(directory, ignore_errors=True)
        return executable

    def of(self, executable: Any) -> BufferAssignment | None:
        """The assignment of an executable.

        One that was compiled before, or came from JAX's compilation cache, tells it itself, but
        without live ranges (CompiledMemoryStats, xla/pjrt/pjrt_executable.h).
        """
        if id(executable) in self._known:
            return self._known[id(executable)][1]
        proto = executable.get_compiled_memory_stats().serialized_buffer_assignment_proto
        if not proto:
            return None
        module = executable.hlo_modules()[0].as_serialized_hlo_module_proto()
        return assignment_of(join(module, proto))


def describe(
    replicated: Any,
    assignment: BufferAssignment | None,
    inputs: Sequence[Aval],
    outputs: Sequence[Aval],
) -> Executable:
    """Describe an ExecuteReplicated (jax/_src/interpreters/pxla.py)."""
    tokens = len(replicated.ordered_effects)
    if assignment is not None and tokens:
        assignment = _without_tokens(assignment, tokens)
    costs = _costs(replicated.xla_executable)
    return Executable(
        name=replicated.xla_executable.hlo_modules()[0].name,
        fingerprint=_fingerprint(replicated.xla_executable),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        targets={} if assignment is None else {"cpu": assignment},
        flops=costs.get("flops"),
        bytes_accessed=costs.get("bytes accessed"),
    )


def _fingerprint(executable: Any) -> str:
    """A hash of the module's text without its name, source lines, and large constants' values."""
    from jaxlib import _hlo  # type: ignore[attr-defined]

    text = executable.hlo_modules()[0].to_string(_hlo.HloPrintOptions.canonical())
    body = text.split(maxsplit=2)[2]  # after "HloModule jit_f, "
    return hashlib.sha256(body.encode()).hexdigest()[:16]


def _costs(executable: Any) -> dict[str, float]:
    """The compiler's cost analysis, empty if the backend has none."""
    try:
        costs = executable.cost_analysis()
    except Exception:  # unimplemented on some backends, which JAX has no type for
        return {}
    found = costs[0] if isinstance(costs, list) else costs or {}
    return {key: value for key, value in found.items() if value >= 0}  # -1 is unknown


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
