"""The requests planned from a buffer assignment are those of the real CPU runtime."""

import pytest

from alloclab.validation.cpu_runtime import observe
from alloclab.validation.oracle_fetch import OracleUnavailable

pytestmark = pytest.mark.jax
pytest.importorskip("optax")


def test_the_runtime_asks_for_what_was_planned() -> None:
    try:
        found = observe()
    except OracleUnavailable as error:
        pytest.skip(str(error))
    assert {each.program: each.seen for each in found} == {
        each.program: each.planned for each in found
    }
    by_name = {each.program: each.planned for each in found}
    assert len(by_name) >= 12
    # Both kinds are really there: a plain step returns its state in new memory, a donated one
    # does not; several outputs come with a table of pointers.
    assert len(by_name["adam step"]) > 10 > len(by_name["adam step, donated"])
    assert 8 * 4 in by_name["several outputs"]
