"""Every example in a docstring runs and prints what it says."""

import doctest
import pkgutil
from importlib import import_module

import pytest

HOUSE = ("policies", "simulator", "scenarios", "validation")
MODULES = ["alloclab.api", "alloclab.cli", "alloclab.commands"] + [
    f"alloclab.{folder}.{each.name}"
    for folder in HOUSE
    for each in pkgutil.iter_modules(import_module(f"alloclab.{folder}").__path__)
]


def test_every_module_is_found() -> None:
    assert "alloclab.policies.base" in MODULES


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(import_module(name), optionflags=flags).failed == 0
