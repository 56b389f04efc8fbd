"""The base class catches every way in which a policy can cheat."""

import pytest

from alloclab.policies.base import Driver, Placement, Policy, Region, Request
from alloclab.policies.errors import InputError, PolicyError
from alloclab.policies.ideal import Ideal
from alloclab.policies.options import option


class Scripted(Policy):
    """Answers with what it is told, from a pool of 4096 bytes."""

    def setup(self) -> None:
        self.answers: list[Placement | None] = []
        self.released: list[Placement] = []
        if self.limit is not None:
            self.reserve(4096)

    def place(self, request: Request) -> Placement | None:
        return self.answers.pop(0)

    def release(self, address: int, size: int) -> None:
        self.released.append((address, size))


def scripted(*answers: Placement | None) -> Scripted:
    policy = Scripted().start(limit=8192)
    policy.answers = list(answers)
    return policy


@pytest.mark.parametrize(
    ("answers", "rule"),
    [
        ([(0, 99)], "gets only 99 bytes"),
        ([(32, 100)], "not a multiple of 64"),
        ([(4096, 128)], "not inside one region"),
        ([(4032, 128)], "not inside one region"),
        ([(-64, 128)], "not inside one region"),
        ([(0, 128), (64, 128)], "overlaps a live allocation"),
        ([(64, 128), (0, 128)], "overlaps a live allocation"),
        ([(64, 128), (64, 128)], "overlaps a live allocation"),
        ([(64, 128), (0, 512)], "overlaps a live allocation"),
    ],
)
def test_broken_answers_are_named(answers: list[Placement], rule: str) -> None:
    policy = scripted(*answers)
    for number, _ in enumerate(answers[:-1]):
        policy.allocate(Request(100, id=number, alignment=64))
    before = policy.stats.bytes_in_use
    with pytest.raises(PolicyError, match=rule):
        policy.allocate(Request(100, id=99, alignment=64))
    assert policy.stats.bytes_in_use == before


def test_an_id_is_live_once() -> None:
    policy = scripted((0, 128), (128, 128))
    policy.allocate(Request(100, id=1))
    with pytest.raises(PolicyError, match="still live"):
        policy.allocate(Request(100, id=1))


def test_accounting_counts_what_is_taken() -> None:
    policy = scripted((0, 256), (256, 512), None)
    policy.allocate(Request(100, id=1))
    policy.allocate(Request(500, id=2))
    assert policy.allocate(Request(500, id=3)) is None
    policy.free(1)
    policy.free(3)  # refused: nothing to free
    stats = policy.stats
    assert (stats.num_allocs, stats.bytes_in_use, stats.peak_bytes_in_use) == (2, 512, 768)
    assert stats.largest_alloc_size == 512
    assert policy.released == [(0, 256)]


def test_zero_bytes_never_reach_the_policy() -> None:
    policy = scripted()
    assert policy.allocate(Request(0, id=1)) is None
    policy.free(1)
    assert policy.stats.num_allocs == 0


def test_regions_respect_limit_and_driver() -> None:
    policy = Scripted().start(limit=10_000, driver=Driver(capacity=9_000, largest=5_000, gap=100))
    assert policy.reserve(5_001) is None  # larger than the driver grants at once
    assert policy.reserve(4_905) is None  # more than its capacity in total
    assert policy.reserve(4_904) == 4352  # 4096 and a gap of 100, aligned to 256
    assert policy.stats.pool_bytes == 9_000
    policy.give_back(4352)
    assert policy.stats.pool_bytes == 4096
    assert policy.stats.peak_pool_bytes == 9_000
    assert policy.regions[1] == Region(4352, 4_904, 0, 0)
    with pytest.raises(PolicyError, match="does not hold"):
        policy.give_back(4352)


def test_a_region_with_live_allocations_stays() -> None:
    policy = scripted((1024, 128))
    policy.allocate(Request(100, id=1))
    with pytest.raises(PolicyError, match="live allocations"):
        policy.give_back(0)


def test_an_allocation_lies_in_one_region_unless_it_was_extended() -> None:
    apart = scripted((4032, 128))
    apart.reserve(4096)
    with pytest.raises(PolicyError, match="not inside one region"):
        apart.allocate(Request(100))
    joined = scripted((4032, 128))
    assert joined.extend(4096) == 4096
    assert joined.allocate(Request(100)) == (4032, 128)


def test_a_region_goes_back_with_its_extensions() -> None:
    policy = Scripted().start(limit=1 << 20)
    policy.extend(100)
    assert policy.stats.pool_bytes == 4196
    policy.give_back(0)
    assert policy.stats.pool_bytes == 0
    assert [each.given_back for each in policy.regions] == [0, 0]


def test_a_name_belongs_to_one_class() -> None:
    assert Ideal.name == "ideal"
    with pytest.raises(PolicyError, match="already registered"):

        class Impostor(Policy):
            name = "ideal"


def test_what_the_base_class_owns_cannot_be_replaced() -> None:
    with pytest.raises(PolicyError, match="'free' belongs to Policy"):

        class Shadows(Policy):
            def free(self, id: int) -> None: ...

    class ShadowsLater(Policy):
        def setup(self) -> None:
            self.free = []  # type: ignore[method-assign, assignment]

    with pytest.raises(PolicyError, match="'free' belongs to Policy"):
        ShadowsLater()


class Optional(Policy):
    """Has one option of each type."""

    grow: bool = option(False, "whether it grows")
    step: int = option(256, "bytes", is_size=True)
    share: float = option(0.5, "a share")
    kind: str = option("a", "which", choices=("a", "b"))


def test_options_take_python_values_and_text() -> None:
    policy = Optional(grow="true", step="2MiB", share=1, kind="b")
    assert (policy.grow, policy.step, policy.share, policy.kind) == (True, 2 << 20, 1.0, "b")
    assert str(policy) == "Optional(grow=true,step=2097152,share=1.0,kind=b)"
    assert str(Optional()) == "Optional"


@pytest.mark.parametrize(
    "wrong",
    [
        {"grow": "yes"},
        {"grow": 1},
        {"step": "many"},
        {"step": -1},
        {"step": True},
        {"share": "nan"},
        {"share": -0.5},
        {"kind": "c"},
        {"unknown": 1},
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"^Optional\("):
        Optional(**wrong)
