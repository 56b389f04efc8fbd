"""Capture: record the program trace of JAX code on the CPU backend."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from alloclab.policies.errors import InputError
from alloclab.scenarios.hooks import Hooks
from alloclab.scenarios.recorder import Recorder
from alloclab.simulator.program import MARK, ProgramTrace

_P = ParamSpec("_P")
_R = TypeVar("_R")

_active: Recorder | None = None


class Capture:
    """The result of `capture`: its ``trace`` is complete when the block has ended."""

    trace: ProgramTrace


@contextmanager
def capture(name: str = "capture") -> Iterator[Capture]:
    """Record everything that JAX does inside the block, all threads included.

    Compiled functions are compiled anew, as their caches are cleared at both ends. Arrays that
    are alive at the start are transfers at time 0. If the block raises, the trace up to there is
    kept.

    Raises:
        InputError: a capture is already running.

    >>> import jax.numpy as jnp
    >>> with capture() as run:
    ...     y = jnp.arange(8.0) * 2
    >>> int(run.trace.buffer_bytes.max())
    32
    """
    global _active  # noqa: PLW0603  there is one JAX in a process
    if _active is not None:
        raise InputError("capture: another capture is running; they cannot be nested")
    import jax
    import jaxlib.version

    found = Capture()
    recorder = Recorder()
    hooks = Hooks(recorder)
    _active = recorder
    try:
        hooks.install()
        yield found
    finally:
        _active = None
        hooks.remove()
        versions = {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__}
        with recorder.lock:
            found.trace = recorder.trace(name, versions)


def captured(function: Callable[_P, _R]) -> Callable[_P, tuple[_R, ProgramTrace]]:
    """Decorator: the function returns its result and the program trace of the call."""

    @functools.wraps(function)
    def call(*args: _P.args, **more: _P.kwargs) -> tuple[_R, ProgramTrace]:
        with capture(function.__name__) as run:
            result = function(*args, **more)
        return result, run.trace

    return call


def mark(label: str) -> None:
    """Mark a step or a phase in the running capture; does nothing outside of one."""
    recorder = _active
    if recorder is not None:
        with recorder.lock:
            recorder.add(MARK, label=str(label))
