"""Replay from Python: any trace, any policy, any device."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from alloclab.policies.base import Driver, Policy
from alloclab.policies.registry import parse_policy
from alloclab.policies.units import parse_size
from alloclab.simulator.devices import Device, bytes_limit, load_device
from alloclab.simulator.environment import NEWEST_JAX, AllocatorEnvironment, read_environment
from alloclab.simulator.program import ProgramTrace
from alloclab.simulator.replay import ReplayResult, replay_requests
from alloclab.simulator.requests import RequestTrace
from alloclab.simulator.trace_files import load_trace

AnyTrace = RequestTrace | ProgramTrace | str | Path


def replay(
    trace: AnyTrace,
    policy: str | Policy = "bfc",
    device: str | Device | None = None,
    *,
    limit: int | str | None = None,
    jax: str = NEWEST_JAX,
    environment: Mapping[str, str] = MappingProxyType({}),
    driver: Driver = Driver(),  # noqa: B008
    search_limit: bool = True,
) -> ReplayResult:
    """Replay a trace under one policy on one device.

    Args:
        trace: a request trace, a program trace (lowered for the device first), or a trace file.
        policy: as on the command line, or a policy of your own.
        device: a short name such as ``h100`` or a device file; it gives the limit.
        limit: bytes, or text such as ``16GiB``; wins over the device's.
        jax: the version whose allocator rules apply.
        environment: variables that JAX reads, such as ``XLA_PYTHON_CLIENT_MEM_FRACTION``.
        driver: the memory below the allocator, where it refuses or leaves gaps.
        search_limit: also search the smallest limit that fits.

    Raises:
        InputError: a name, a file or a value is not valid.
        PolicyError: the policy broke the contract.

    >>> from alloclab import RequestTrace, replay
    >>> trace = RequestTrace.from_arrays([1, 1, 0], [0, 1, 0], [1000, 2000, 0])
    >>> replay(trace, policy="first_fit", limit="1MiB").placements.tolist()
    [0, 1024]
    """
    settings = read_environment(environment, jax)
    if isinstance(policy, str):
        policy = parse_policy(policy, policy_defaults(settings, jax))
    if isinstance(device, str):
        device = load_device(device)
    if isinstance(limit, str):
        limit = parse_size(limit)
    if isinstance(trace, str | Path):
        trace = load_trace(trace)
    return next(
        replays(
            trace, [policy], [device], limit, settings, driver=driver, search_limit=search_limit
        )
    )


def replays(
    trace: RequestTrace | ProgramTrace,
    policies: Sequence[Policy],
    devices: Sequence[Device | None],
    limit: int | None,
    settings: AllocatorEnvironment,
    *,
    driver: Driver = Driver(),  # noqa: B008
    search_limit: bool = True,
) -> Iterator[ReplayResult]:
    """Replay a trace under every policy on every device; see `replay`."""
    for device in devices:
        requests = requests_on(trace, device, settings)
        size = bytes_limit(device, settings) if limit is None and device is not None else limit
        for policy in policies:
            yield replay_requests(
                requests,
                policy,
                limit=size,
                device=None if device is None else device.name,
                driver=driver,
                search_limit=search_limit,
            )


def requests_on(
    trace: RequestTrace | ProgramTrace, device: Device | None, settings: AllocatorEnvironment
) -> RequestTrace:
    """What the device's allocator is asked; a request trace is that already."""
    if isinstance(trace, RequestTrace):
        return trace
    from alloclab.simulator.runtime import AS_CAPTURED, lower
    from alloclab.simulator.runtime_plan import Machine

    return lower(trace, AS_CAPTURED if device is None else Machine.of(device, settings))


def policy_defaults(settings: AllocatorEnvironment, jax: str) -> dict[str, str]:
    """Policy options that follow from the jax version and the environment."""
    growth = "false" if settings.preallocate else "true"
    flavour = "classic" if settings.flavour == "classic" else "auto"
    return {"jax": jax, "growth": growth, "flavour": flavour}
