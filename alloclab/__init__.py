"""alloclab: simulate, explain and teach the memory allocators behind JAX.

    import alloclab

    with alloclab.capture() as run:      # record what a JAX program does
        train()
    result = alloclab.replay(run.trace, policy="bfc", device="h100")
    result.memory_stats()

Importing alloclab is light: every name is loaded when it is first used, and JAX only for capture.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alloclab.api import replay as replay
    from alloclab.policies.base import Driver as Driver
    from alloclab.policies.base import Policy as Policy
    from alloclab.policies.base import Request as Request
    from alloclab.policies.errors import InputError as InputError
    from alloclab.policies.errors import PolicyError as PolicyError
    from alloclab.policies.options import option as option
    from alloclab.policies.registry import known_policies as known_policies
    from alloclab.scenarios.capture import capture as capture
    from alloclab.scenarios.capture import captured as captured
    from alloclab.scenarios.capture import mark as mark
    from alloclab.simulator.devices import known_devices as known_devices
    from alloclab.simulator.devices import load_device as load_device
    from alloclab.simulator.layouts import layout_bytes as layout_bytes
    from alloclab.simulator.program import ProgramTrace as ProgramTrace
    from alloclab.simulator.replay import ReplayResult as ReplayResult
    from alloclab.simulator.requests import RequestTrace as RequestTrace
    from alloclab.simulator.trace_files import load_trace as load_trace
    from alloclab.simulator.trace_files import save_trace as save_trace

_HOMES = {
    "api": ["replay"],
    "policies.base": ["Driver", "Policy", "Request"],
    "policies.errors": ["InputError", "PolicyError"],
    "policies.options": ["option"],
    "policies.registry": ["known_policies"],
    "scenarios.capture": ["capture", "captured", "mark"],
    "simulator.devices": ["known_devices", "load_device"],
    "simulator.layouts": ["layout_bytes"],
    "simulator.program": ["ProgramTrace"],
    "simulator.replay": ["ReplayResult"],
    "simulator.requests": ["RequestTrace"],
    "simulator.trace_files": ["load_trace", "save_trace"],
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

# In the root of a checkout, Python finds this folder before the installed package; the others of
# the house then lie beside it.
_house = Path(__file__).parent.parent
if not Path(__file__).with_name("policies").exists() and (_house / "policies").is_dir():
    __path__.append(str(_house))

__all__ = sorted(_HOME)  # noqa: PLE0605
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'alloclab' has no attribute {name!r}")
    return getattr(import_module(f"alloclab.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
