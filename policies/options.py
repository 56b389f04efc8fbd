"""Options of a policy: declared once as class attributes, used by Python, command line and docs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from alloclab.policies.errors import InputError
from alloclab.policies.units import parse_size


@dataclass(frozen=True)
class Option:
    """One option: its default (which also gives the type), what it means, and the valid values."""

    default: Any
    help: str
    choices: tuple[Any, ...] = ()
    is_size: bool = False
    name: str = ""

    def check(self, owner: str, value: Any) -> Any:
        """The value with the option's type, converted from text where it came as text.

        Raises:
            InputError: the value has the wrong type or is none of the choices.
        """
        place = f"{owner}({self.name}={value!r})"
        if isinstance(value, str):
            value = self._from_text(place, value)
        wanted = type(self.default)
        if wanted is float and type(value) is int:
            value = float(value)
        if type(value) is not wanted:
            raise InputError(f"{place}: expected {self.expected()}")
        if (self.choices and value not in self.choices) or (
            wanted in (int, float) and not value >= 0
        ):
            raise InputError(f"{place}: expected {self.expected()}")
        return value

    def _from_text(self, place: str, text: str) -> Any:
        if isinstance(self.default, bool):
            return {"true": True, "false": False}.get(text.lower(), text)
        try:
            if isinstance(self.default, int):
                return parse_size(text) if self.is_size else int(text)
            if isinstance(self.default, float):
                return float(text)
        except ValueError:
            raise InputError(f"{place}: expected {self.expected()}") from None
        return text

    def expected(self) -> str:
        """The valid values, in words."""
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        if self.is_size:
            return "a size such as 2MiB"
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
        return names[type(self.default)]


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[Any, ...] = (),
    is_size: bool = False,
) -> Any:
    """Declare an option of a policy class; the attribute then holds its value.

    >>> from alloclab.policies.base import Policy
    >>> class Padded(Policy):
    ...     padding: int = option(256, "bytes added to each request", is_size=True)
    >>> Padded.options["padding"].default
    256
    """
    return Option(default, help, choices, is_size)


def checked(owner: str, options: Mapping[str, Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every option: as given, or its default.

    Raises:
        InputError: an option is unknown or its value is not valid.
    """
    for name in given:
        if name not in options:
            known = ", ".join(options) or "none"
            raise InputError(f"{owner}({name}=...): unknown option; {owner} has {known}")
    return {
        name: each.check(owner, given[name]) if name in given else each.default
        for name, each in options.items()
    }
