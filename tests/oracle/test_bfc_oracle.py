"""The simulated BFC against the real ones: every address, refusal, statistic and driver call."""

from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from alloclab.policies import bfc_versions
from alloclab.policies.base import Driver, Request
from alloclab.policies.bfc import Bfc
from alloclab.policies.bfc_versions import EndRules, Rules
from alloclab.policies.bfc_views import chunk_map, largest_free_block
from alloclab.policies.units import KIB, MIB
from alloclab.validation.bfc_tier import (
    LIBRARIES,
    Configuration,
    Flavour,
    compare,
    main,
    random_case,
    run_tier,
)
from alloclab.validation.oracle_fetch import OracleUnavailable, library

JOBS: list[tuple[str, Flavour]] = [
    (name, flavour) for name, known in LIBRARIES.items() for flavour in known.flavours
]
#: Of each real allocator and flavour; at least 300 per flavour.
CONFIGURATIONS = 150


def have(name: str) -> None:
    try:
        library(name)
    except OracleUnavailable as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize(("name", "flavour"), JOBS)
def test_random_pools_agree(name: str, flavour: Flavour) -> None:
    have(name)
    for number in range(CONFIGURATIONS):
        config, trace = random_case(name, flavour, f"test {number}")
        assert compare(name, config, trace) == [], (number, config)


@pytest.mark.slow
def test_ten_thousand_random_pools_agree() -> None:
    for name in LIBRARIES:
        have(name)
    assert main(["--configurations", "10000", "--seed", "1"]) == 0


def test_the_tier_is_a_table_of_totals() -> None:
    have("plugin-0.12.0.1")
    seen: list[tuple[int, int]] = []
    _, trace = random_case("plugin-0.12.0.1", "spatial", "given")
    rows = run_tier(
        2, ["plugin-0.12.0.1"], progress=lambda *pair: seen.append(pair), traces=[trace]
    )
    assert seen[-1] == (9, 9)
    assert {row["scenario"] for row in rows} == {
        f"{flavour}, 3 pools" for flavour in ("classic", "growth", "spatial")
    }
    for row in rows:
        assert list(row) == [
            "tier",
            "source",
            "version",
            "scenario",
            "quantity",
            "predicted",
            "actual",
            "error",
        ]
        assert (row["tier"], row["error"]) == ("bfc", 0)
        assert row["predicted"] == row["actual"] > 0


# Each of these is one rule of the version, wrong.
WRONG: list[tuple[str, Flavour, Rules]] = [
    ("plugin-0.12.0.1", "spatial", Rules({"lower": EndRules(), "upper": EndRules()}, "upper")),
    (
        "plugin-0.12.0.1",
        "spatial",
        Rules({"lower": EndRules(False, True, True), "upper": EndRules()}, "upper", True),
    ),
    (
        "plugin-0.11.2",
        "spatial",
        Rules({"lower": EndRules(False, False, True), "upper": EndRules(False, True, True)}),
    ),
    ("plugin-0.12.0.1", "growth", Rules({}, backs_off_down=False)),
    ("plugin-0.10.2", "growth", Rules({}, backs_off_always=False, reports_largest_free=True)),
    ("plugin-0.11.2", "growth", Rules({}, backs_off_always=False)),
]


@pytest.mark.parametrize(("name", "flavour", "wrong"), WRONG)
def test_a_wrong_rule_is_caught(
    name: str, flavour: Flavour, wrong: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(name)
    monkeypatch.setattr(bfc_versions, "RULES", {(0, 0): wrong})
    cases = (random_case(name, flavour, f"test {number}") for number in range(CONFIGURATIONS))
    assert any(compare(name, config, trace) for config, trace in cases)


@pytest.mark.parametrize("method", ["find", "carve", "release", "split"])
def test_a_wrong_step_is_caught(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    have("tf-2.21.0")
    right = getattr(Bfc, method)

    def first_fit(self: Bfc, size: int, alignment: int, end: Any) -> Any:
        holes = [c for c in self.chunks.values() if not c.requested and c.size >= size]
        return min(holes, key=lambda chunk: chunk.address, default=None)

    def never_wastes(self: Bfc, *request: Any) -> Any:
        self.max_waste = 1
        return right(self, *request)

    def keeps_apart(self: Bfc, address: int, size: int) -> None:
        chunk = self.chunks[address]
        chunk.requested = 0
        self.insert(chunk)

    def upper_part(self: Bfc, chunk: Any, size: int) -> Any:
        return right(self, chunk, size + 256 if chunk.size > size + 512 else size)

    wrong = {
        "find": first_fit,
        "carve": never_wastes,
        "release": keeps_apart,
        "split": upper_part,
    }
    monkeypatch.setattr(Bfc, method, wrong[method])
    cases = (random_case("tf-2.21.0", "classic", f"test {number}") for number in range(50))
    assert any(compare("tf-2.21.0", config, trace) for config, trace in cases)


class Together(RuleBasedStateMachine):
    """Steps both allocators with the same requests; Hypothesis shrinks what differs."""

    name, flavour = JOBS[0]

    @initialize(
        limit=st.sampled_from([4096, 64 * KIB, 3 * MIB, 512 * MIB]),
        more=st.integers(0, 600),
        fraction=st.sampled_from([0.0, 0.3]),
        largest=st.sampled_from([None, 4096, 40 * KIB, 2 * MIB]),
        gap=st.sampled_from([0, 4096]),
    )
    def make(self, limit: int, more: int, fraction: float, largest: int | None, gap: int) -> None:
        if self.flavour == "spatial" and self.name == "plugin-0.11.2":
            largest = None  # it may end the process when the driver gives less
        driver = Driver(largest=largest, gap=gap)
        config = Configuration(limit + more, self.flavour, fraction, driver)
        known = LIBRARIES[self.name]
        self.aligns = known.aligns
        self.policy = config.policy(known.jax).start(config.limit, driver)
        self.real = config.real(self.name)
        self.live: list[tuple[int, int]] = []
        self.sizes = [256]
        self.count = 0

    @rule(
        scale=st.sampled_from([0, 256, 1024, 64 * KIB, MIB, 64 * MIB, 128 * MIB]),
        factor=st.integers(1, 5),
        more=st.sampled_from([0, 1, -1, 256, -256]),
        alignment=st.sampled_from([64, 64, 512, 4096, 2 * MIB]),
        collective=st.booleans(),
    )
    def allocate(
        self, scale: int, factor: int, more: int, alignment: int, collective: bool
    ) -> None:
        self._allocate(max(0, scale * factor + more), alignment, collective)

    @rule(pick=st.integers(0, 1 << 16), share=st.sampled_from([1, 2, 3]), collective=st.booleans())
    def allocate_a_part(self, pick: int, share: int, collective: bool) -> None:
        """A size that a chunk of the pool, or a half or a third of it, has exactly."""
        sizes = [each.size for each in chunk_map(self.policy)] or [self.policy.limit or 0]
        self._allocate(sizes[pick % len(sizes)] // share, 64, collective)

    def _allocate(self, size: int, alignment: int, collective: bool) -> None:
        alignment = alignment if self.aligns else 64
        collective = collective and self.flavour == "spatial"
        space = "collective" if collective else "device"
        self.count += 1
        mine = self.policy.allocate(Request(size, self.count, alignment, space=space))
        end = self.policy.collective if collective else self.policy.ordinary
        theirs = self.real.alloc(size, alignment, "upper" if end == "upper" else "lower")
        assert (mine and mine[0]) == theirs
        if mine is not None:
            self.live.append((self.count, mine[0]))

    @rule(units=st.integers(1, 4), count=st.integers(2, 6))
    def make_equal_holes(self, units: int, count: int) -> None:
        """Every other one of a row of equal chunks is freed."""
        first = len(self.live)
        for _ in range(2 * count):
            self._allocate(256 * units, 64, False)
        for pick in range(len(self.live) - 2, first, -2):
            self._free(pick)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 1 << 16))
    def free(self, pick: int) -> None:
        self._free(pick % len(self.live))

    def _free(self, pick: int) -> None:
        id_, address = self.live.pop(pick)
        self.policy.free(id_)
        self.real.free(address)

    @precondition(lambda self: hasattr(self, "real"))
    @invariant()
    def agree(self) -> None:
        policy, stats = self.policy, self.real.stats()
        free = largest_free_block(policy)
        predicted = policy.memory_stats(policy.stats, policy.limit, free)
        assert predicted == {key: stats[key] for key in predicted}
        assert free == self.real.largest_free()
        assert policy.next_region == self.real.next_region_bytes()
        assert [tuple(each) for each in chunk_map(policy)] == [
            tuple(each[1:]) for each in self.real.chunks()
        ]

    def teardown(self) -> None:
        if hasattr(self, "real"):
            self.real.close()


def step_together(
    name: str, flavour: Flavour, examples: int, phases: Collection[Phase] = tuple(Phase)
) -> None:
    machine: Any = type("Machine", (Together,), {"name": name, "flavour": flavour})
    machine.TestCase.settings = settings(
        max_examples=examples,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=phases,
    )
    machine.TestCase().runTest()


@pytest.mark.parametrize(("name", "flavour"), JOBS)
def test_step_by_step(name: str, flavour: Flavour) -> None:
    have(name)
    step_together(name, flavour, 60)


@pytest.mark.parametrize(("name", "flavour", "wrong"), WRONG[:3])
def test_stepping_finds_a_wrong_rule(
    name: str, flavour: Flavour, wrong: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(name)
    monkeypatch.setattr(bfc_versions, "RULES", {(0, 0): wrong})
    with pytest.raises(AssertionError):
        step_together(name, flavour, 1000, [Phase.generate])
