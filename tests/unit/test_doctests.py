"""Every example in a docstring runs and prints what it says."""

import doctest
import pkgutil
from importlib import import_module

import pytest

import alloclab

MODULES = sorted(
    each.name
    for each in pkgutil.walk_packages(alloclab.__path__, "alloclab.")
    if not each.ispkg and each.name.split(".")[1] not in {"tests", "docs", "examples", "benchmarks"}
)


def test_every_module_is_found() -> None:
    assert "alloclab.policies.base" in MODULES


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    if name == "alloclab.__main__":
        return
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(import_module(name), optionflags=flags).failed == 0
