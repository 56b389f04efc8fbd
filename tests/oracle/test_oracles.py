"""The oracles themselves: the real allocators do what is known of them, by hand-made examples."""

import shutil
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from alloclab.policies.base import Driver
from alloclab.policies.errors import InputError
from alloclab.policies.units import GIB, KIB, MIB
from alloclab.validation import oracle_fetch
from alloclab.validation.oracle import (
    FREED,
    REFUSED,
    STOPPED,
    DriverCall,
    End,
    OracleHang,
    RealBfc,
)
from alloclab.validation.oracle_fetch import WHEELS, OracleUnavailable, Wheel

ALL = tuple(WHEELS)
SPATIAL = ("plugin-0.11.2", "plugin-0.12.0.1")
LOOPS = ("tf-2.21.0", "plugin-0.10.2")


@contextmanager
def real(library: str, limit: int, **options: object) -> Iterator[RealBfc]:
    """A pool; skips where the library or a compiler is not here, but fails if they do not work."""
    try:
        oracle_fetch.library(library)
    except OracleUnavailable as error:
        pytest.skip(str(error))
    if not (shutil.which("c++") or shutil.which("g++")):
        pytest.skip("no C++ compiler")
    with RealBfc(library, limit, **options) as pool:  # type: ignore[arg-type]
        yield pool


def tiles(pool: RealBfc) -> list[tuple[int, int, str]]:
    """The chunks as (offset, size, "used" or, of a free one, its tag)."""
    return [(each.offset, each.size, "used" if each.in_use else each.tag) for each in pool.chunks()]


@pytest.mark.parametrize("library", ALL)
def test_a_pool_is_taken_at_the_first_request_that_could_fit(library: str) -> None:
    with real(library, MIB + 300) as pool:
        assert pool.alloc(0) is None
        assert pool.alloc(MIB + 257) is None
        assert (pool.chunks(), pool.driver_calls()) == ([], [])
        assert pool.stats()["pool_bytes"] == 0
        assert pool.alloc(MIB + 256) == 0
        stats = pool.stats()
        assert stats == {
            "num_allocs": 1,
            "bytes_in_use": MIB + 256,
            "peak_bytes_in_use": MIB + 256,
            "largest_alloc_size": MIB + 256,
            "bytes_limit": MIB + 300,
            "bytes_reserved": 0,
            "peak_bytes_reserved": 0,
            "bytes_reservable_limit": None,
            "largest_free_block_bytes": 0,
            "pool_bytes": MIB + 256,
            "peak_pool_bytes": MIB + 256,
        }
        assert pool.driver_calls() == [DriverCall("alloc", 0, MIB + 256)]


@pytest.mark.parametrize("library", ALL)
def test_regions_double_and_do_not_touch(library: str) -> None:
    with real(library, GIB, growth=True, driver=Driver(gap=256)) as pool:
        assert pool.next_region_bytes() == 2 * MIB
        assert pool.alloc(KIB) == 0
        assert pool.alloc(3 * MIB) == 2 * MIB + 256
        assert pool.alloc(5 * MIB) == 6 * MIB + 512
        assert [each.bytes for each in pool.driver_calls()] == [2 * MIB, 4 * MIB, 8 * MIB]
        assert pool.next_region_bytes() == 16 * MIB
        assert [each.region for each in pool.chunks()] == [0, 0, 1, 2]
        # What does not fit into twice the next size makes it jump, and it is not doubled again.
        assert pool.alloc(40 * MIB) == 14 * MIB + 768
        assert pool.next_region_bytes() == 64 * MIB


@pytest.mark.parametrize("library", ALL)
@pytest.mark.parametrize(
    ("size", "request_", "taken"),
    [
        (512, 256, 256),
        (768, 512, 768),
        (400 * MIB, 280 * MIB, 400 * MIB),
        (410 * MIB, 280 * MIB, 280 * MIB),
    ],
)
def test_a_chunk_is_split_if_enough_is_left(
    library: str, size: int, request_: int, taken: int
) -> None:
    with real(library, size) as pool:
        assert pool.alloc(request_ - 1) == 0
        assert pool.stats()["bytes_in_use"] == taken
        assert pool.chunks()[0].requested == request_ - 1
        assert pool.largest_free() == size - taken


@pytest.mark.parametrize("library", ALL)
def test_a_fraction_of_the_limit_may_be_left_over(library: str) -> None:
    with real(library, MIB, fragmentation_fraction=0.25) as pool:
        pool.alloc(700 * KIB)
        assert pool.stats()["bytes_in_use"] == 700 * KIB
    with real(library, MIB, fragmentation_fraction=0.5) as pool:
        pool.alloc(700 * KIB)
        assert pool.stats()["bytes_in_use"] == MIB


@pytest.mark.parametrize("library", ALL)
def test_best_fit_lowest_address_and_coalescing(library: str) -> None:
    with real(library, MIB) as pool:
        offsets = [pool.alloc(size) for size in (1024, 256, 512, 256, 512, 256)]
        assert offsets == [0, 1024, 1280, 1792, 2048, 2560]
        for offset in (0, 2048, 1280):
            pool.free(offset)
        assert [pool.alloc(size) for size in (512, 300, 1024)] == [1280, 2048, 0]
        for offset in (0, 1280, 1024, 2560, 1792, 2048):
            pool.free(offset)
        assert tiles(pool) == [(0, MIB, "lower")]
        assert pool.chunks()[0].bin == 12


@pytest.mark.parametrize("library", ALL)
def test_alignment_is_honoured_by_jax_only(library: str) -> None:
    with real(library, 8 * MIB) as pool:
        pool.alloc(1)
        expected = 256 if library.startswith("tf-") else 2 * MIB
        assert pool.alloc(1, alignment=2 * MIB) == expected


@pytest.mark.parametrize(
    ("library", "end", "limit", "expected"),
    [
        ("plugin-0.11.2", "lower", 400, [(0, 400, "used")]),
        ("plugin-0.11.2", "lower", 410, [(0, 280, "used"), (280, 130, "gap")]),
        ("plugin-0.11.2", "upper", 400, [(0, 120, "gap"), (120, 280, "used")]),
        ("plugin-0.12.0.1", "lower", 400, [(0, 280, "used"), (280, 120, "gap")]),
        ("plugin-0.12.0.1", "upper", 400, [(0, 400, "used")]),
        ("plugin-0.12.0.1", "upper", 410, [(0, 130, "gap"), (130, 280, "used")]),
    ],
)
def test_carving_from_the_gap(
    library: str, end: End, limit: int, expected: list[tuple[int, int, str]]
) -> None:
    with real(library, limit * MIB, spatial=True) as pool:
        pool.alloc(280 * MIB, end=end)
        assert [(at // MIB, size // MIB, what) for at, size, what in tiles(pool)] == expected


def test_ordinary_buffers_of_0_12_are_at_the_upper_end() -> None:
    with real("plugin-0.12.0.1", GIB + 12345, spatial=True) as pool:
        assert pool.ordinary_end == "upper"
        assert pool.alloc(1) == 1073753856
    with real("plugin-0.11.2", MIB, spatial=True) as pool:
        assert pool.ordinary_end == "lower"
        assert pool.alloc(1) == 0


@pytest.mark.parametrize(
    ("library", "end", "expected"),
    [
        ("plugin-0.11.2", "lower", [512, 1536]),
        ("plugin-0.11.2", "upper", [4096 - 2048, 4096 - 1024]),
        ("plugin-0.12.0.1", "lower", [512, 1536]),
        ("plugin-0.12.0.1", "upper", [4096 - 1024, 4096 - 2048]),
    ],
)
def test_of_equal_holes_the_version_decides(library: str, end: End, expected: list[int]) -> None:
    with real(library, 4096, spatial=True) as pool:
        for _ in range(5):
            pool.alloc(512, end=end)
        for hole in expected:
            pool.free(hole)
        assert [pool.alloc(512, end=end), pool.alloc(512, end=end)] == expected


@pytest.mark.parametrize(
    ("library", "end", "taken"),
    [
        ("plugin-0.11.2", "lower", 768),
        ("plugin-0.11.2", "upper", 512),
        ("plugin-0.12.0.1", "lower", 512),
        ("plugin-0.12.0.1", "upper", 768),
    ],
)
def test_whether_a_hole_is_split_exactly_depends_on_the_end(
    library: str, end: End, taken: int
) -> None:
    with real(library, 4096, spatial=True) as pool:
        for size in (768, 768, 256):
            pool.alloc(size, end=end)
        pool.free(768 if end == "lower" else 4096 - 2 * 768)
        pool.alloc(512, end=end)
        assert pool.stats()["bytes_in_use"] == 768 + taken + 256


@pytest.mark.parametrize("library", SPATIAL)
def test_holes_belong_to_an_end_and_fall_back_into_the_gap(library: str) -> None:
    with real(library, 4096, spatial=True) as pool:
        low = [pool.alloc(512, end="lower") for _ in range(3)]
        high = [pool.alloc(512, end="upper") for _ in range(3)]
        assert (low, high) == ([0, 512, 1024], [3584, 3072, 2560])
        pool.free(512)
        assert pool.alloc(1024, end="upper") == 1536  # all of the gap, not the hole
        assert pool.alloc(512, end="upper") is None  # the hole is the lower end's
        pool.free(1024)
        assert tiles(pool)[1] == (512, 1024, "gap")
        assert pool.largest_free() == 1024
        assert pool.alloc(512, end="upper") == 1024


@pytest.mark.parametrize("library", ALL)
def test_after_a_refusal_the_driver_is_asked_for_less(library: str) -> None:
    with real(library, GIB, driver=Driver(capacity=GIB - 1)) as pool:
        assert pool.alloc(1) == 0
        less = 966367488 if library == "plugin-0.12.0.1" else 966367744
        assert pool.driver_calls() == [
            DriverCall("refused", -1, GIB),
            DriverCall("alloc", 0, less),
        ]
        assert pool.stats()["pool_bytes"] == less


@pytest.mark.parametrize("library", ALL)
def test_the_driver_may_give_more_than_asked(library: str) -> None:
    with real(library, 64 * MIB, growth=True, granularity=4 * MIB) as pool:
        assert pool.alloc(1) == 0
        assert pool.stats()["pool_bytes"] == 4 * MIB
        assert pool.largest_free() == 4 * MIB - 256


@pytest.mark.parametrize("library", ALL)
def test_a_driver_that_refuses_little_makes_older_releases_loop(library: str) -> None:
    with real(library, 4096, driver=Driver(largest=512)) as pool:
        if library in LOOPS:
            with pytest.raises(OracleHang, match=r"alloc\(1\)"):
                pool.alloc(1)
            with pytest.raises(OracleHang):
                pool.alloc(1)
            assert pool.replay([1, 0], [0, 0], [1, 0]).offsets.tolist() == [STOPPED, STOPPED]
        else:
            assert pool.alloc(1) == 0
            asked = [each.bytes for each in pool.driver_calls()]
            assert asked[-4:] == [1280, 1024, 768, 512]


@pytest.mark.parametrize("library", ALL)
def test_doubling_past_the_address_space_makes_all_releases_loop(library: str) -> None:
    with real(library, MIB, growth=True, driver=Driver(largest=8000)) as pool:
        for _ in range(64 - 20):  # doublings of 1 MiB, one for each region
            assert pool.alloc(4096) is not None
        assert pool.next_region_bytes() == 0
        assert pool.alloc(MIB) is None
        pool.free(0)
        assert pool.alloc(4096) == 0
        out = pool.replay([1, 1], [0, 1], [MIB, 4096]).offsets
        assert out.tolist() == [REFUSED, STOPPED]


def test_a_second_gap_would_end_the_process_in_0_11() -> None:
    driver = Driver(largest=600 * KIB)
    with real("plugin-0.11.2", MIB, spatial=True, driver=driver) as pool:
        assert pool.alloc(100 * KIB) == 0
        with pytest.raises(OracleHang):
            pool.alloc(470 * KIB)
    with real("plugin-0.11.2", MIB, spatial=True, driver=driver) as pool:
        assert pool.alloc(300 * KIB) == 0  # all of the region, so there is no gap
        assert pool.alloc(100 * KIB) == 557824
    with real("plugin-0.12.0.1", MIB, spatial=True, driver=driver) as pool:
        pool.alloc(100 * KIB)
        assert pool.alloc(470 * KIB) is None


@pytest.mark.parametrize("library", ALL)
@pytest.mark.parametrize("spatial", [False, True])
def test_a_replay_is_the_requests_one_by_one(library: str, spatial: bool) -> None:
    if spatial and library not in SPATIAL:
        pytest.skip("has no spatial flavour")
    random = np.random.default_rng(7)
    is_alloc, ids, sizes = [], [], []
    live: list[int] = []
    for event in range(600):
        alloc = not live or random.random() < 0.6
        is_alloc.append(alloc)
        ids.append(event if alloc else live.pop(random.integers(len(live))))
        sizes.append(int(np.exp(random.uniform(0, 11))) - 1 if alloc else 0)
        if alloc:
            live.append(event)
    ends = random.integers(0, 2, 600) if spatial else np.zeros(600)
    with real(library, 512 * KIB, spatial=spatial) as pool:
        out = pool.replay(is_alloc, ids, sizes, ends=ends, trace=True)
        replayed = pool.chunks()
        assert {each.offset for each in replayed if each.in_use} == pool._live
    assert REFUSED in out.offsets
    assert out.seconds > 0
    held: dict[int, int | None] = {}
    with real(library, 512 * KIB, spatial=spatial) as pool:
        for event, row in enumerate(zip(is_alloc, ids, sizes, ends, strict=True)):
            alloc, id_, size, upper = row
            if alloc:
                held[id_] = pool.alloc(size, end="upper" if upper else "lower")
                assert out.offsets[event] == (REFUSED if held[id_] is None else held[id_])
            else:
                offset = held.pop(id_)
                if offset is not None:
                    pool.free(offset)
                assert out.offsets[event] == FREED
            stats = pool.stats()
            assert out.bytes_in_use[event] == stats["bytes_in_use"]
            assert out.pool_bytes[event] == stats["pool_bytes"]
            free = [each.size for each in pool.chunks() if not each.in_use]
            assert out.largest_free[event] == max(free, default=0)
        assert pool.chunks() == replayed


@pytest.mark.parametrize("library", ALL)
def test_bad_input_is_refused_before_the_real_code_sees_it(library: str) -> None:
    with real(library, MIB) as pool:
        with pytest.raises(InputError, match="alignment 48, expected a power of two"):
            pool.alloc(1, alignment=48)
        with pytest.raises(InputError, match="a classic pool has the lower end only"):
            pool.alloc(1, end="upper")
        with pytest.raises(InputError, match="nothing is allocated at 256"):
            pool.free(256)
        with pytest.raises(InputError, match="differ in length, expected 2"):
            pool.replay([1, 1], [0, 1], [1])
        with pytest.raises(InputError, match="a size is negative"):
            pool.replay([1], [0], [-1])
    with pytest.raises(ValueError, match="is closed"):
        pool.alloc(1)
    with pytest.raises(InputError, match="limit 0"), real(library, 0):
        pass
    with pytest.raises(InputError, match="spatial"), real(library, MIB, spatial=True, growth=True):
        pass


# --- getting the libraries -----------------------------------------------------------------


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """A wheel with a library that is none, in the only place where pip looks."""
    wheel = Wheel("toy-oracle", "1.0", "toy/lib.so", ("toy/include/",))
    index = tmp_path / "index"
    index.mkdir()
    info = "toy_oracle-1.0.dist-info"
    with zipfile.ZipFile(index / "toy_oracle-1.0-py3-none-any.whl", "w") as archive:
        for name, text in {
            wheel.file: "not a library",
            "toy/include/a.h": "",
            "toy/other.py": "",
            f"{info}/METADATA": "Metadata-Version: 2.1\nName: toy-oracle\nVersion: 1.0\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/RECORD": "",
        }.items():
            archive.writestr(name, text)
    monkeypatch.setattr(oracle_fetch, "WHEELS", {"plugin-toy": wheel})
    monkeypatch.setenv("ALLOCLAB_ORACLE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return wheel


def test_a_library_is_fetched_once_and_only_what_is_needed(
    toy: Wheel, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OracleUnavailable, match=r"python -m .*oracle_fetch plugin-toy"):
        oracle_fetch.library("plugin-toy")
    assert oracle_fetch.main([]) == 0
    cache = tmp_path / "cache"
    assert oracle_fetch.library("plugin-toy") == cache / "plugin-toy" / toy.file
    files = [each.relative_to(cache).as_posix() for each in cache.rglob("*") if each.is_file()]
    assert sorted(files) == ["plugin-toy/toy/include/a.h", "plugin-toy/toy/lib.so"]
    assert [each.name for each in cache.iterdir()] == ["plugin-toy"]
    monkeypatch.setenv("PIP_FIND_LINKS", "")  # so that another download would fail
    capsys.readouterr()
    assert oracle_fetch.main(["plugin-toy"]) == 0
    assert capsys.readouterr() == ("", "")


def test_what_cannot_be_fetched_is_one_line(
    toy: Wheel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert oracle_fetch.main(["plugin-toy", "nosuch"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "oracle plugin-toy: downloading ..."
    assert lines[1].startswith("oracle plugin-toy: pip cannot download it: ")
    assert lines[2] == "oracle 'nosuch': unknown; there are plugin-toy"
    assert len(lines) == 3


def test_a_library_that_is_none_or_no_compiler_is_one_line(
    toy: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle_fetch.fetch("plugin-toy")
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler")
        with pytest.raises(OracleUnavailable, match=r"needs a C\+\+ compiler; install g\+\+"):
            RealBfc("plugin-toy", MIB)
    with pytest.raises(OracleUnavailable, match=r"lib\.so: it has no symbol _ZN3tsl12BFCAlloc"):
        RealBfc("plugin-toy", MIB)


def test_other_platforms_are_told_so(toy: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OracleUnavailable, match="x86-64 Linux only"):
        oracle_fetch.library("plugin-toy")
