"""The BFC policy by hand: each rule on the smallest pool that shows it."""

import pytest

from alloclab.policies.base import Driver, Request
from alloclab.policies.bfc import Bfc
from alloclab.policies.bfc_versions import RULES, rules_of
from alloclab.policies.bfc_views import chunk_map, fragmentation, largest_free_block
from alloclab.policies.errors import InputError
from alloclab.policies.units import GIB, KIB, MIB

CLASSIC, GROWTH, SPATIAL = Bfc(flavour="classic"), Bfc(growth=True), Bfc()


def pool(policy: Bfc, limit: int, driver: Driver = Driver()) -> Bfc:  # noqa: B008
    return policy.start(limit, driver)


def allocate(policy: Bfc, *sizes: int, space: str = "device", alignment: int = 64) -> list[int]:
    """The addresses of new allocations, -1 where refused; their ids are counted on."""
    first = len(policy.chunks) * 1000
    found = [
        policy.allocate(Request(size, first + number, alignment, space=space))
        for number, size in enumerate(sizes)
    ]
    return [-1 if each is None else each[0] for each in found]


def free(policy: Bfc, *addresses: int) -> None:
    for address in addresses:
        policy.free(next(each for each, placed in policy._live.items() if placed[0] == address))


def tiles(policy: Bfc) -> list[tuple[int, int, str]]:
    return [
        (each.address, each.size, "used" if each.in_use else each.tag) for each in chunk_map(policy)
    ]


def test_the_region_is_taken_at_the_first_request_that_can_fit() -> None:
    policy = pool(CLASSIC, MIB + 300)
    assert allocate(policy, 0, 2 * MIB) == [-1, -1]
    assert (policy.stats.pool_bytes, policy.stats.driver_calls) == (0, 0)
    assert allocate(policy, 1) == [0]
    assert policy.stats.pool_bytes == MIB + 256
    assert policy.next_region == 2 * (MIB + 512)


@pytest.mark.parametrize(
    ("size", "request_", "taken"),
    [
        (512, 256, 256),  # twice the request: split
        (768, 512, 768),
        (400 * MIB, 280 * MIB, 400 * MIB),
        (410 * MIB, 280 * MIB, 280 * MIB),  # 128 MiB would be left: split
        (408 * MIB, 280 * MIB, 280 * MIB),
        (408 * MIB - 256, 280 * MIB, 408 * MIB - 256),
    ],
)
def test_a_chunk_is_split_if_enough_is_left(size: int, request_: int, taken: int) -> None:
    policy = pool(CLASSIC, size)
    assert allocate(policy, request_ - 1) == [0]
    assert policy.stats.bytes_in_use == policy.stats.largest_alloc_size == taken


def test_a_share_of_the_limit_may_be_left_over() -> None:
    policy = pool(Bfc(flavour="classic", fragmentation_fraction=0.25), MIB)
    allocate(policy, 700 * KIB)
    assert policy.stats.bytes_in_use == 700 * KIB


def test_best_fit_lowest_address_and_coalescing() -> None:
    policy = pool(CLASSIC, MIB)
    assert allocate(policy, 1024, 256, 512, 256, 512, 256) == [0, 1024, 1280, 1792, 2048, 2560]
    free(policy, 0, 2048, 1280)
    assert [each.bin for each in chunk_map(policy) if not each.in_use] == [2, 1, 1, 11]
    assert allocate(policy, 512, 300, 1024) == [1280, 2048, 0]
    free(policy, 0, 1280, 1024, 2560, 1792, 2048)
    assert tiles(policy) == [(0, MIB, "lower")]


def test_regions_double_and_do_not_coalesce() -> None:
    policy = pool(GROWTH, GIB, Driver(gap=256))
    assert allocate(policy, KIB, 3 * MIB, 5 * MIB) == [0, 2 * MIB + 256, 6 * MIB + 512]
    assert [each.size for each in policy.regions] == [2 * MIB, 4 * MIB, 8 * MIB]
    assert allocate(policy, 40 * MIB) == [14 * MIB + 768]
    assert (policy.regions[-1].size, policy.next_region) == (64 * MIB, 64 * MIB)
    touching = pool(GROWTH, 6 * MIB)
    assert allocate(touching, 2 * MIB, 4 * MIB) == [0, 2 * MIB]
    free(touching, 0, 2 * MIB)
    assert tiles(touching) == [(0, 2 * MIB, "lower"), (2 * MIB, 4 * MIB, "lower")]


def test_the_last_region_is_what_the_limit_leaves() -> None:
    policy = pool(GROWTH, 5 * MIB + 100)
    assert allocate(policy, 2 * MIB, 2 * MIB, 2 * MIB) == [0, 2 * MIB, -1]
    assert [each.size for each in policy.regions] == [2 * MIB, 3 * MIB]


@pytest.mark.parametrize(
    ("jax", "given"), [("0.10.2", 966367744), ("0.11.2", 966367744), ("0.12.0.1", 966367488)]
)
def test_after_a_refusal_the_driver_is_asked_for_less(jax: str, given: int) -> None:
    policy = pool(Bfc(jax=jax), GIB, Driver(capacity=GIB - 1))
    allocate(policy, 1)
    assert (policy.stats.pool_bytes, policy.stats.driver_calls) == (given, 2)


@pytest.mark.parametrize(("jax", "address"), [("0.10.2", -1), ("0.11.2", 0), ("0.12", 0)])
def test_a_driver_that_refuses_little_makes_older_releases_loop(jax: str, address: int) -> None:
    policy = pool(Bfc(jax=jax, flavour="classic"), 4096, Driver(largest=512))
    assert allocate(policy, 1) == [address]


def test_a_region_size_that_overflows_is_refused() -> None:
    policy = pool(GROWTH, MIB, Driver(largest=8000))
    assert -1 not in allocate(policy, *[4096] * (64 - 20))
    assert policy.next_region == 0
    assert allocate(policy, 4096) == [-1]


def test_a_spatial_pool_is_not_extended() -> None:
    policy = pool(SPATIAL, MIB, Driver(largest=600 * KIB))
    allocate(policy, 100 * KIB)
    assert allocate(policy, 470 * KIB) == [-1]


@pytest.mark.parametrize(
    ("jax", "space", "limit", "expected"),
    [
        ("0.11.2", "device", 400, [(0, 400, "used")]),
        ("0.11.2", "device", 410, [(0, 280, "used"), (280, 130, "gap")]),
        ("0.11.2", "collective", 400, [(0, 120, "gap"), (120, 280, "used")]),
        ("0.12.0.1", "collective", 400, [(0, 280, "used"), (280, 120, "gap")]),
        ("0.12.0.1", "device", 400, [(0, 400, "used")]),
        ("0.12.0.1", "device", 410, [(0, 130, "gap"), (130, 280, "used")]),
    ],
)
def test_carving_from_the_gap(
    jax: str, space: str, limit: int, expected: list[tuple[int, int, str]]
) -> None:
    policy = pool(Bfc(jax=jax), limit * MIB)
    allocate(policy, 280 * MIB, space=space)
    assert [(at // MIB, size // MIB, what) for at, size, what in tiles(policy)] == expected


def test_of_equal_holes_the_version_decides() -> None:
    old, new = pool(Bfc(jax="0.11.2"), 4096), pool(SPATIAL, 4096)
    assert allocate(old, *[512] * 5) == [0, 512, 1024, 1536, 2048]
    assert allocate(new, *[512] * 5) == [3584, 3072, 2560, 2048, 1536]
    free(old, 1536, 512)
    free(new, 2048, 3072)
    assert allocate(old, 512, 512) == [512, 1536]
    assert allocate(new, 512, 512) == [3072, 2048]


def test_holes_belong_to_an_end_and_fall_back_into_the_gap() -> None:
    policy = pool(SPATIAL, 4096)
    assert allocate(policy, 512, 512, 512, space="collective") == [0, 512, 1024]
    assert allocate(policy, 512, 512, 512) == [3584, 3072, 2560]
    free(policy, 512)
    assert allocate(policy, 1024) == [1536]  # all of the gap, not the hole
    assert allocate(policy, 512) == [-1]  # the hole is the lower end's
    free(policy, 1024)
    assert tiles(policy)[1] == (512, 1024, "gap")
    assert largest_free_block(policy) == 1024


def test_alignment_leaves_a_hole_below() -> None:
    policy = pool(CLASSIC, 8 * MIB)
    assert allocate(policy, 1) == [0]
    assert allocate(policy, 1, alignment=2 * MIB) == [2 * MIB]
    assert tiles(policy)[1] == (256, 2 * MIB - 256, "lower")
    spatial = pool(Bfc(jax="0.11.2"), 8 * MIB - 256)
    assert allocate(spatial, 3 * 256, space="collective", alignment=MIB) == [7 * MIB]
    assert tiles(spatial)[-1] == (7 * MIB + 768, MIB - 1024, "upper")


def test_fragmentation_is_what_one_block_cannot_give() -> None:
    policy = pool(CLASSIC, 4096)
    assert fragmentation(policy) == 0.0
    allocate(policy, *[512] * 8)
    assert fragmentation(policy) == 0.0  # nothing is free
    free(policy, 0, 1024, 1536)
    assert fragmentation(policy) == pytest.approx(1 - 1024 / 1536)


def test_statistics_as_the_version_reports_them() -> None:
    for jax, reported in (("0.10.2", 0), ("0.12.0.1", MIB - 256)):
        policy = pool(Bfc(jax=jax), MIB + 5)
        allocate(policy, 100)
        assert policy.memory_stats(policy.stats, policy.limit, largest_free_block(policy)) == {
            "num_allocs": 1,
            "bytes_in_use": 256,
            "peak_bytes_in_use": 256,
            "largest_alloc_size": 256,
            "bytes_limit": MIB + 5,
            "bytes_reserved": 0,
            "peak_bytes_reserved": 0,
            "largest_free_block_bytes": reported,
            "pool_bytes": MIB,
            "peak_pool_bytes": MIB,
        }


def test_versions_between_and_after_those_known() -> None:
    assert rules_of("0.4.31") is rules_of("0.10.2") is RULES[0, 0]
    assert rules_of("0.11.9") is RULES[0, 11]
    assert rules_of("0.12") is rules_of("0.13.1") is rules_of("1.0") is RULES[0, 12]
    for wrong in ("newest", "", "12"):
        with pytest.raises(InputError, match="expected numbers such as"):
            rules_of(wrong)


@pytest.mark.parametrize(
    ("options", "spatial"),
    [
        ({}, True),
        ({"growth": True}, False),
        ({"jax": "0.10.2"}, False),
        ({"flavour": "classic"}, False),
        ({"flavour": "spatial", "jax": "0.11.2"}, True),
    ],
)
def test_the_flavour_is_what_jax_chooses(options: dict[str, object], spatial: bool) -> None:
    assert Bfc(**options).spatial is spatial


def test_what_the_real_allocator_refuses_to_be() -> None:
    with pytest.raises(InputError, match="spatial flavour cannot grow"):
        Bfc(flavour="spatial", growth=True)
    with pytest.raises(InputError, match=r"new in jax 0\.11"):
        Bfc(flavour="spatial", jax="0.10.2")
    with pytest.raises(InputError, match="rounds to 0"):
        Bfc(fragmentation_fraction=1e-6).start(limit=MIB // 2)
    with pytest.raises(InputError, match="needs a limit"):
        Bfc().allocate(Request(1))
