"""What the commands do, behind the command line's names and options."""

import contextlib
import csv
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from alloclab.api import policy_defaults, replays, requests_on
from alloclab.cli import NO, emit
from alloclab.policies.base import Policy
from alloclab.policies.errors import InputError
from alloclab.policies.registry import known_policies, parse_policies
from alloclab.policies.units import format_size, parse_size
from alloclab.simulator.atomic import atomic_write
from alloclab.simulator.devices import Device, bytes_limit, known_devices, load_device
from alloclab.simulator.environment import NEWEST_JAX, AllocatorEnvironment, read_environment
from alloclab.simulator.replay import ReplayResult
from alloclab.simulator.trace_files import form_of, load_trace, save_trace


def run_capture(script: Path, args: Sequence[str], output: Path, *, as_json: bool) -> int:
    """Record a script's program trace; the script's own error is shown after saving it."""
    from alloclab.scenarios.script import capture_script

    if form_of(output)[0] == ".csv":  # found out now, not after the run
        raise InputError(f"{output}: CSV holds request traces only; use .jsonl or .parquet")
    if not output.resolve().parent.is_dir():
        raise InputError(f"{output}: there is no folder {output.parent}")
    with _stdout_to_stderr(as_json):
        trace, error = capture_script(script, args)
        if error is not None:
            traceback.print_exception(error)
    save_trace(trace, output)
    found = {
        "file": str(output),
        "events": len(trace),
        "executables": len(trace.executables),
        "buffers": len(trace.buffer_bytes),
        "script_error": None if error is None else f"{type(error).__name__}: {error}",
    }
    if as_json:
        emit(found)
    else:
        click.echo(
            f"{output}: {found['events']} events, {found['executables']} executables, "
            f"{found['buffers']} buffers"
        )
    return 0 if error is None else NO


@contextlib.contextmanager
def _stdout_to_stderr(wanted: bool) -> Iterator[None]:
    """Let everything that the script prints, in C too, go to stderr, so stdout stays clean."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def run_replay(
    trace: Path,
    policies: str,
    devices: str | None,
    limit: str | None,
    jax_version: str | None,
    variables: Sequence[str],
    placements: Path | None,
    as_json: bool,
) -> int:
    """Replay every policy on every device and print one row each."""
    setup = _setup(policies, devices, limit, jax_version, variables)
    if placements is not None and len(setup.policies) * len(setup.devices) > 1:
        raise InputError("--placements: give one policy and one device")
    loaded = load_trace(trace)
    with _status(f"replaying {trace}"):
        results = list(replays(loaded, *setup))
    if placements is not None:
        _write_placements(results[0], placements)
    notes = _notes(setup, results)
    if as_json:
        rows = [each.to_json() for each in results]
        emit({"trace": str(trace), "results": rows, "notes": notes})
    else:
        _print_replays(results)
        for note in notes:
            click.echo(f"note: {note}")
    return NO if any(each.oom for each in results) else 0


#: How `alloclab.simulator.runtime.lower` marks a trace made with another target's assignment.
_ESTIMATE = "(estimate: "

if TYPE_CHECKING:
    from alloclab.simulator.plot_style import XAxis
    from alloclab.simulator.plots import Kind


class _Setup(NamedTuple):
    """What to replay under, as the arguments of `alloclab.api.replays`."""

    policies: list[Policy]
    devices: list[Device | None]
    limit: int | None
    settings: AllocatorEnvironment


def _notes(setup: _Setup, results: Sequence[ReplayResult]) -> list[str]:
    """What limits the answer, in words."""
    notes = list(setup.settings.notes)
    guessed = {
        each.device or "the device": None for each in results if _ESTIMATE in each.trace.name
    }
    if guessed:
        notes.append(
            f"an estimate for {', '.join(guessed)}: the trace has no buffer assignment compiled "
            "for it, so the captured one is used"
        )
    if "bfc" in (each.name for each in setup.policies) and any(
        each is not None and each.kind == "tpu" for each in setup.devices
    ):
        notes.append("bfc is the allocator of JAX on GPUs; a TPU's runtime has one of its own")
    return notes


def _setup(
    policies: str,
    devices: str | None,
    limit: str | None,
    jax_version: str | None,
    variables: Sequence[str],
) -> _Setup:
    jax = jax_version or NEWEST_JAX
    settings = read_environment(_variables(variables), jax)
    if settings.allocator not in known_policies():
        raise InputError(
            f"--env XLA_PYTHON_CLIENT_ALLOCATOR={settings.allocator}: no policy models it; "
            f"known policies: {', '.join(sorted(known_policies()))}"
        )
    return _Setup(
        parse_policies(policies, policy_defaults(settings, jax)),
        [load_device(name.strip()) for name in devices.split(",")] if devices else [None],
        None if limit is None else parse_size(limit),
        settings,
    )


def _variables(pairs: Sequence[str]) -> dict[str, str]:
    split = [pair.partition("=") for pair in pairs]
    if bad := [name for name, equals, _ in split if not (name and equals)]:
        raise InputError(f"--env {bad[0]}: expected NAME=VALUE")
    return {name: value for name, _, value in split}


def _status(text: str) -> contextlib.AbstractContextManager[Any]:
    """A spinner on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        return contextlib.nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(text)


def _write_placements(result: ReplayResult, path: Path) -> None:
    ids = result.trace.id[result.trace.alloc_events]
    with atomic_write(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["id", "offset"])
        writer.writerows(zip(ids.tolist(), result.placements.tolist(), strict=True))


def _print_replays(results: Sequence[ReplayResult]) -> None:
    headings: dict[str, None] = {}
    for each in results:
        trace = each.trace
        headings[
            f"{trace.name.partition(' on ')[0] or 'trace'}: {trace.num_allocs} allocations in "
            f"{len(trace)} events, at most {format_size(trace.lower_bound_bytes)} live at once"
        ] = None
    click.echo("\n".join(headings))
    rows = []
    for each in results:
        oom = each.oom
        verdict = "fits"
        if oom is not None:
            verdict = (
                f"no: event {oom.event} asks {format_size(oom.request_bytes)}, "
                f"{format_size(oom.free_bytes)} free, "
                f"largest block {format_size(oom.largest_free_bytes)} ({oom.cause})"
            )
        rows.append(
            [
                each.device or "-",
                "-" if each.limit is None else format_size(each.limit),
                each.policy,
                format_size(each.stats.peak_bytes_in_use),
                format_size(each.stats.peak_pool_bytes),
                f"{each.external_fragmentation_at_peak:.1%}",
                format_size(each.internal_waste_at_peak),
                "-" if each.min_limit_bytes is None else format_size(each.min_limit_bytes),
                verdict,
            ]
        )
    _print_table(
        [
            "device",
            "limit",
            "policy",
            "peak in use",
            "peak pool",
            "fragmentation",
            "waste",
            "fits from",
            "verdict",
        ],
        rows,
        numbers=range(3, 8),
    )


def _print_table(names: Sequence[str], rows: Sequence[Sequence[str]], numbers: Any = ()) -> None:
    """A table as wide as the terminal; wide enough for everything where there is none."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for at, name in enumerate(names):
        table.add_column(name, justify="right" if at in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        wide = Console(width=10_000)
        console = Console(width=wide.measure(table).maximum)
    console.print(table)


def run_plot(
    trace: Path,
    output: Path,
    policies: str,
    devices: str | None,
    limit: str | None,
    kind: "Kind",
    x_axis: "XAxis",
    jax_version: str | None,
    variables: Sequence[str],
    as_json: bool,
) -> int:
    """Draw a replay of the trace."""
    setup = _setup(policies, devices, limit, jax_version, variables)
    results = list(replays(load_trace(trace), *setup, search_limit=False))
    from alloclab.simulator.plots import draw, save_figure

    save_figure(draw(results, kind, x_axis), output)
    if as_json:
        emit({"file": str(output)})
    else:
        click.echo(f"{output}")
    return 0


def run_validate(
    tiers: Sequence[str], configurations: int, seed: int, traces: Sequence[Path], as_json: bool
) -> int:
    """Compare predictions with the real thing and print a row per quantity."""
    from alloclab.validation.tiers import TIERS, run_tiers

    unknown = [each for each in tiers if each not in TIERS]
    if unknown:
        raise InputError(f"--tier {unknown[0]}: unknown; known: {', '.join(TIERS)}")
    settings = read_environment({}, NEWEST_JAX)
    requests = [requests_on(load_trace(path), None, settings) for path in traces]
    with _status("validating"):
        rows, missing = run_tiers(tiers or tuple(TIERS), configurations, seed, requests)
    if as_json:
        emit({"rows": rows, "not_measured": missing})
    else:
        names = ["tier", "source", "scenario", "quantity", "predicted", "actual", "error"]
        _print_table(names, [[str(row[name]) for name in names] for row in rows], range(4, 7))
        for name, why in missing.items():
            click.echo(f"not measured: {name}: {why}")
        differ = sum(bool(row["error"]) for row in rows)
        click.echo(f"{len(rows)} rows, {differ} with an error")
    if not rows:
        raise InputError("validate: nothing could be measured; see above for what is missing")
    return NO if any(row["error"] for row in rows) else 0


def list_policies(*, as_json: bool) -> int:
    """Name, summary and options of every policy."""
    known = sorted(known_policies().items())
    if as_json:
        emit([
            {
                "name": name,
                "summary": policy.summary(),
                "options": [
                    {"name": key, "default": each.default, "help": each.help,
                     "choices": list(each.choices)}
                    for key, each in policy.options.items()
                ],
            }
            for name, policy in known
        ])  # fmt: skip
        return 0
    _print_table(
        ["policy", "summary", "options"],
        [
            [
                name,
                policy.summary(),
                "\n".join(
                    f"{key}={each.default}: {each.help}" for key, each in policy.options.items()
                ),
            ]
            for name, policy in known
        ],
    )
    return 0


def list_devices(*, as_json: bool) -> int:
    """Name, kind, memory and limit of every device."""
    settings = read_environment({}, NEWEST_JAX)
    rows = [(device, bytes_limit(device, settings)) for device in known_devices()]
    if as_json:
        emit([
            {
                "name": device.name,
                "summary": device.summary,
                "kind": device.kind,
                "aliases": list(device.aliases),
                "memory_bytes": device.memory_bytes,
                "limit_bytes": limit,
                "context_bytes": device.context_bytes,
            }
            for device, limit in rows
        ])  # fmt: skip
        return 0
    _print_table(
        ["device", "memory", "limit", "summary"],
        [
            [
                ", ".join((device.name, *device.aliases)),
                "-" if device.memory_bytes is None else format_size(device.memory_bytes),
                "-" if limit is None else format_size(limit),
                device.summary,
            ]
            for device, limit in rows
        ],
        numbers=(1, 2),
    )
    return 0
