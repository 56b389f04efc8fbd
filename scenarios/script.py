"""Capture a script: run it unchanged, as Python would, and record its program trace."""

import importlib.machinery
import importlib.util
import os
import runpy
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from alloclab.policies.errors import InputError
from alloclab.scenarios.capture import Capture, capture
from alloclab.simulator.program import ProgramTrace


def capture_script(
    path: Path, args: Sequence[str] = ()
) -> tuple[ProgramTrace, BaseException | None]:
    """Run a script as ``__main__`` on the CPU backend: its trace, and what it raised.

    JAX is patched at the moment when the script imports it, so that whatever the script sets
    before that import still counts. A script that never imports JAX has an empty trace.

    Raises:
        InputError: there is no such script.
    """
    if not path.is_file():
        raise InputError(f"{path}: there is no such script")
    error: BaseException | None = None
    with ExitStack() as stack:
        stack.enter_context(_as_main(path, args))
        runs: list[Capture] = []
        running = threading.enumerate()
        recording = stack.enter_context(ExitStack())

        def start() -> None:
            runs.append(recording.enter_context(capture(path.stem)))

        if "jax" in sys.modules:
            start()
        else:
            stack.enter_context(_on_import("jax", start))
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as exit_:
            error = None if exit_.code in (None, 0) else exit_
        except BaseException as raised:
            error = raised
        for each in threading.enumerate():  # Python waits for them before it exits
            if each not in running and not each.daemon:
                each.join()
        if not runs:
            start()
        recording.close()
    return runs[0].trace, error


@contextmanager
def _as_main(path: Path, args: Sequence[str]) -> Iterator[None]:
    """The process looks to the script as if Python had started it, on the CPU backend."""
    argv, first, platforms = sys.argv, sys.path[0], os.environ.get("JAX_PLATFORMS")
    sys.argv = [str(path), *args]
    sys.path[0] = str(path.resolve().parent)
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        yield
    finally:
        sys.argv = argv
        sys.path[0] = first
        if platforms is None:
            del os.environ["JAX_PLATFORMS"]
        else:
            os.environ["JAX_PLATFORMS"] = platforms


@contextmanager
def _on_import(name: str, act: Any) -> Iterator[None]:
    """Call ``act`` once, right after the module is imported for the first time."""

    class Finder:
        @staticmethod
        def find_spec(
            wanted: str, path: Any = None, target: Any = None
        ) -> importlib.machinery.ModuleSpec | None:
            if wanted != name:
                return None
            sys.meta_path.remove(finder)
            spec = importlib.util.find_spec(wanted)
            if spec is not None and spec.loader is not None:
                load = spec.loader.exec_module

                def load_and_act(module: Any) -> None:
                    load(module)
                    act()

                spec.loader.exec_module = load_and_act  # type: ignore[method-assign]
            return spec

    finder: Any = Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
