"""The command line. Each command imports what it needs when it runs, so that all start fast."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from alloclab import __version__
from alloclab.policies.errors import InputError, PolicyError

#: Exit codes: the answer is "does not fit" or "differs"; the input is bad.
NO, BAD_INPUT = 1, 2

Command = Callable[..., Any]


def main() -> None:
    """Run the command line: bad input ends with one line on stderr and exit code 2."""
    try:
        code = cli.main(standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        click.echo(f"alloclab: {error.format_message()}", err=True)
        code = BAD_INPUT
    except (InputError, PolicyError) as error:
        click.echo(f"alloclab: {error}", err=True)
        code = BAD_INPUT
    except (click.Abort, KeyboardInterrupt):
        click.echo("alloclab: interrupted", err=True)
        code = 130
    except BrokenPipeError:  # the reader of our output went away
        sys.stderr.close()
        code = 141
    sys.exit(code)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="alloclab")
def cli() -> None:
    """Simulate, explain and teach the memory allocators behind JAX.

    Start with `alloclab capture train.py -o run.jsonl`, then `alloclab replay run.jsonl --device
    h100`. Every command takes --json. Exit code 1 means "does not fit" or "differs", 2 bad input.
    """


def json_option(command: Command) -> Command:
    """The option --json, the same for every command."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(command)


def replay_options(command: Command) -> Command:
    """What to replay under: the same for every command that replays."""
    parts = (
        click.argument("trace", type=click.Path(path_type=Path)),
        click.option(
            "-p",
            "--policy",
            "policies",
            default="bfc",
            show_default=True,
            help="Policies, such as bfc,first_fit or 'bfc(growth=true)' or my.py:Mine.",
        ),
        click.option("-d", "--device", "devices", help="Devices, such as h100 or t4,a100-40."),
        click.option("--limit", help="Memory limit instead of a device's, such as 16GiB."),
        click.option(
            "--jax", "jax_version", help="The jax whose allocator rules apply; else the newest."
        ),
        click.option(
            "--env",
            "variables",
            multiple=True,
            metavar="NAME=VALUE",
            help="A variable that JAX reads, such as XLA_PYTHON_CLIENT_PREALLOCATE=false.",
        ),
    )
    for part in reversed(parts):
        command = part(command)
    return command


def emit(document: Any) -> None:
    """Print one JSON document on stdout; unknown is null, never NaN."""
    click.echo(json.dumps(document, indent=2, allow_nan=False))


@cli.command(context_settings={"ignore_unknown_options": True})
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="Trace file to write: .jsonl or .parquet, .jsonl.gz or .jsonl.zst.",
)
@json_option
def capture(script: Path, args: tuple[str, ...], output: Path, as_json: bool) -> int:
    """Run a JAX script unchanged on the CPU and record its program trace.

    Arguments after -- go to the script: alloclab capture train.py -o run.jsonl -- --steps 10
    """
    from alloclab.commands import run_capture

    return run_capture(script, args, output, as_json=as_json)


@cli.command()
@replay_options
@click.option(
    "--placements",
    type=click.Path(path_type=Path),
    help="Write id,offset of every allocation to this CSV file, -1 where refused.",
)
@json_option
def replay(**options: Any) -> int:
    """Replay a trace under allocator policies, for devices or a memory limit.

    Exit code 1 if a request was refused.
    """
    from alloclab.commands import run_replay

    return run_replay(**options)


@cli.command()
@replay_options
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="Figure to write: .png, .svg or .pdf.",
)
@click.option(
    "--kind",
    type=click.Choice(["overview", "memory", "addresses", "fragmentation"]),
    default="overview",
    show_default=True,
    help="What to draw over time.",
)
@click.option(
    "--x",
    "x_axis",
    type=click.Choice(["event", "time"]),
    default="event",
    show_default=True,
    help="Horizontal axis: the event's number or the time.",
)
@json_option
def plot(**options: Any) -> int:
    """Draw a replay: memory, the address space and fragmentation over time.

    The kinds memory and fragmentation take several policies, the others one.
    """
    from alloclab.commands import run_plot

    return run_plot(**options)


@cli.command()
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    help="bfc: the real allocator code; runtime: the real CPU runtime; planner: XLA's own "
    "placement of temps in recorded compilations. Default: all.",
)
@click.option(
    "--configurations",
    default=300,
    show_default=True,
    type=click.IntRange(1),
    help="Random pools and traces per real allocator and flavour.",
)
@click.option("--seed", default=0, show_default=True, help="Of the random pools.")
@click.option(
    "--trace",
    "traces",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Also replay this trace through every real allocator.",
)
@json_option
def validate(**options: Any) -> int:
    """Compare predictions with real allocators and the real runtime.

    Exit code 1 if anything differs. The libraries come with: python -m
    alloclab.validation.oracle_fetch
    """
    from alloclab.commands import run_validate

    return run_validate(**options)


@cli.command()
@json_option
def policies(as_json: bool) -> int:
    """List the allocator policies and their options."""
    from alloclab.commands import list_policies

    return list_policies(as_json=as_json)


@cli.command()
@json_option
def devices(as_json: bool) -> int:
    """List the devices and their memory."""
    from alloclab.commands import list_devices

    return list_devices(as_json=as_json)


if __name__ == "__main__":
    main()
