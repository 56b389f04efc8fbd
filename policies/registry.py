"""Policies by name, by path and by package: one registry for command line, docs and tests."""

import hashlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType

import alloclab.policies.bfc
import alloclab.policies.fits
import alloclab.policies.ideal  # noqa: F401
from alloclab.policies.base import Policy
from alloclab.policies.errors import InputError

_TOKEN = re.compile(r"\s*([(),=]|[^\s(),=]+)")


def known_policies() -> dict[str, type[Policy]]:
    """All policies by name: built in, and those of packages (entry points ``alloclab.policies``).

    >>> sorted(known_policies())[:2]
    ['best_fit', 'bfc']
    """
    for entry in entry_points(group="alloclab.policies"):
        entry.load()
    return dict(Policy.registry)


def parse_policies(text: str, defaults: Mapping[str, str] = MappingProxyType({})) -> list[Policy]:
    """Read ``bfc,first_fit`` or ``bfc(flavour=classic,growth=true),my.py:Mine``.

    ``defaults`` are values for options that a policy has and the text leaves out.

    Raises:
        InputError: the text cannot be read, or a policy or an option is unknown.

    >>> [str(each) for each in parse_policies("bfc(growth=true), ideal")]
    ['bfc(growth=true)', 'ideal']
    """
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != "".join(text.split()):
        raise InputError(f"policy {text!r}: cannot be read; write name or name(option=value,...)")
    found = []
    while True:
        found.append(_policy(tokens, text, defaults))
        if not tokens:
            return found
        _expect(tokens, ",", text)


def parse_policy(text: str, defaults: Mapping[str, str] = MappingProxyType({})) -> Policy:
    """Read exactly one policy; see `parse_policies`."""
    found = parse_policies(text, defaults)
    if len(found) != 1:
        raise InputError(f"policy {text!r}: expected one policy, found {len(found)}")
    return found[0]


def _policy(tokens: list[str], text: str, defaults: Mapping[str, str]) -> Policy:
    name = _word(tokens, text)
    options: dict[str, str] = {}
    if tokens and tokens[0] == "(":
        tokens.pop(0)
        while tokens and tokens[0] != ")":
            option = _word(tokens, text)
            _expect(tokens, "=", text)
            if option in options:
                raise InputError(f"policy {text!r}: option {option} is given twice")
            options[option] = _word(tokens, text)
            if tokens and tokens[0] != ")":
                _expect(tokens, ",", text)
        _expect(tokens, ")", text)
    policy = _find(name)
    return policy(**{key: defaults[key] for key in defaults if key in policy.options} | options)


def _word(tokens: list[str], text: str) -> str:
    if not tokens or tokens[0] in "(),=":
        found = repr(tokens[0]) if tokens else "the end"
        raise InputError(f"policy {text!r}: found {found}, expected a name or a value")
    return tokens.pop(0)


def _expect(tokens: list[str], token: str, text: str) -> None:
    if not tokens or tokens.pop(0) != token:
        raise InputError(f"policy {text!r}: expected {token!r}; write name(option=value,...)")


def _find(name: str) -> type[Policy]:
    path, colon, attribute = name.rpartition(":")
    if colon and path.endswith(".py"):
        return _load(Path(path), attribute)
    known = known_policies()
    if name not in known:
        raise InputError(
            f"policy {name!r} is unknown; known: {', '.join(sorted(known))}, or FILE.py:CLASS"
        )
    return known[name]


def _load(path: Path, attribute: str) -> type[Policy]:
    """The policy class of that name in a Python file."""
    if not path.is_file():
        raise InputError(f"policy {path}:{attribute}: there is no file {path}")
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    name = f"alloclab_policy_{path.stem}_{digest}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise InputError(f"policy {path}: {type(error).__name__}: {error}") from error
    found = getattr(sys.modules[name], attribute, None)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise InputError(f"policy {path}:{attribute}: the file has no policy class {attribute}")
    return found
