"""XLA shapes with layouts: their text, their bytes, and the layouts that a TPU gives."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloclab.policies.errors import InputError
from alloclab.simulator.devices import load_device
from alloclab.simulator.layouts import (
    COMBINE,
    Shape,
    default_tpu_layout,
    layout_bytes,
    parse_shape,
    tpu_bytes,
    unpadded_bytes,
)
from alloclab.validation.tpu_layouts import TOPOLOGIES, disagreements, read_cases

CASES = read_cases(Path(__file__).parent / "data" / "tpu_layouts.csv")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[1000,3]", 12000),
        ("f32[]", 4),
        ("pred[10]", 10),
        ("bf16[3]{0}", 6),
        ("c64[2,2]{0,1}", 32),
        ("c128[2]", 32),
        ("f8e4m3fn[7]", 7),
        ("f8e8m0fnu[7]", 7),
        ("f64[0,5]", 0),
        # Types below a byte take one each unless the layout packs them.
        ("s4[11]", 11),
        ("s4[11]{0:E(4)}", 6),
        ("u2[9]{0:E(2)}", 3),
        ("f4e2m1fn[3]{0:E(4)}", 2),
        ("pred[9]{0:E(32)}", 36),
        # The tiled examples that XLA's documentation and TPU compile reports show.
        ("f32[3,5]{1,0:T(2,2)}", 4 * 6 * 4),
        ("f32[2,7,8,11,10]{4,3,2,1,0:T(*,*,2,*,3)}", 112 * 111 * 4),
        ("f32[1000,3]{0,1:T(4,128)}", 16384),
        ("bf16[1000,3]{0,1:T(4,128)(2,1)}", 8192),
        ("f32[]{:T(128)}", 512),
        ("f32[1000]{0:T(1024)}", 4096),
        ("f32[7,5,9]{2,0,1:T(8,128)}", 20480),
        ("bf16[16,1280,40]{2,1,0:T(8,128)(2,1)}", 5242880),
        ("bf16[16,1280,40]{1,2,0:T(8,128)(2,1)}", 1638400),
        ("u32[12582912,1]{1,0:T(8,128)}", 6 << 30),
        ("bf16[8,2048,128]{2,1,0:T(16,128)(2,1)S(1)}", 4 << 20),
        # A tile of more dimensions than the array; padding at the end; a bound.
        ("f32[5]{0:T(8,128)}", 4096),
        ("f32[5]{0:L(8)}", 32),
        ("f32[<=10,3]", 120),
        ("f32[<=10]{0:T(128)M(16)}", 512),
        ("token[]", 0),
        ("opaque[]", 8),
        ("()", 0),
        ("(f32[2], (s32[3]{0:T(128)}, token[]), /*index=5*/pred[])", 8 + 512 + 1),
    ],
)
def test_bytes(text: str, size: int) -> None:
    assert layout_bytes(text) == size
    assert layout_bytes(parse_shape(text)) == size
    assert layout_bytes(str(parse_shape(text))) == size


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("", "at character 1, the end", "expected a type"),
        ("f33[1]", "at character 1, 'f33[1]'", "type 'f33' is unknown; known: pred"),
        ("F32[1]", "at character 1,", "expected a type"),
        ("f32", "at character 4, the end", "expected ["),
        ("f32[10,x]", "at character 8, 'x]'", "the size of a dimension"),
        ("f32[10,]", "at character 8, ']'", "the size of a dimension"),
        ("f32[-1]", "at character 5,", "the size of a dimension"),
        ("f32[1 2]", "at character 7,", "a comma"),
        ("f32[9999999999999999999]", "at character 5,", "the size of a dimension"),
        ("f32[3]{0", "at character 9, the end", "a comma, or the end"),
        ("f32[3]{1}", "at character 8, '1}'", "each of the 1 dimensions"),
        ("f32[3,3]{0}", "at character 10, '0}'", "each of the 2 dimensions"),
        ("f32[3,3]{0,0}", "at character 10, '0,0}'", "each of the 2 dimensions"),
        ("f32[3]{0:T}", "at character 11, '}'", "( and the sizes of a tile"),
        ("f32[3]{0:T(0)}", "at character 12, '0)}'", "a tile, at least 1"),
        ("f32[3]{0:T(8,128}", "at character 17, '}'", "a comma"),
        ("f32[3]{0:E(0)}", "at character 12, '0)}'", "a number of at least 1"),
        ("f32[3]{0:S(1)T(8)}", "at character 14, 'T(8)}'", "a property of the layout"),
        ("f32[3]{0:Q(1)}", "at character 10, 'Q(1)}'", "a property of the layout"),
        ("f32[3] f32[3]", "at character 8, 'f32[3]'", "the end of the shape"),
        ("(f32[3]", "at character 8, the end", "a comma"),
        ("(f32[3],)", "at character 9, ')'", "a type"),
        ("(" * 5000, "at character 102,", "at most 100 deep"),
    ],
)
def test_bad_text_is_pointed_at(text: str, place: str, expected: str) -> None:
    with pytest.raises(InputError) as error:
        layout_bytes(text)
    assert place in str(error.value)
    assert expected in str(error.value)


DTYPES = ["pred", "s2", "u4", "s8", "u16", "bf16", "f32", "s64", "c128", "f8e5m2", "f4e2m1fn"]
DIMS = st.lists(st.integers(0, 300), max_size=5).map(tuple)


@st.composite
def arrays(draw: st.DrawFn) -> Shape:
    dims = draw(DIMS)
    tile = st.lists(st.just(COMBINE) | st.integers(1, 256), max_size=3).map(tuple)
    tiles = st.lists(st.tuples(tile, st.integers(1, 128)).map(lambda t: (*t[0], t[1])), max_size=3)
    return Shape(
        draw(st.sampled_from(DTYPES)),
        dims,
        tuple(draw(st.permutations(range(len(dims))))),
        tuple(draw(tiles)),
        memory_space=draw(st.integers(0, 6)),
        element_bits=draw(st.none() | st.sampled_from([1, 2, 4, 8, 32])),
        dynamic=frozenset(i for i in range(len(dims)) if draw(st.booleans())),
        tail_alignment=draw(st.sampled_from([1, 2, 1024])),
        metadata_bytes=draw(st.sampled_from([0, 16])),
    )


SHAPES = st.recursive(
    arrays(),
    lambda inner: st.lists(inner, max_size=4).map(lambda e: Shape("tuple", elements=tuple(e))),
    max_leaves=8,
)


@given(SHAPES)
def test_text_and_back(shape: Shape) -> None:
    assert parse_shape(str(shape)) == shape


@given(SHAPES)
def test_tiles_only_add(shape: Shape) -> None:
    assert layout_bytes(shape) >= unpadded_bytes(shape)


@given(arrays())
def test_a_tile_of_one_element_changes_nothing(shape: Shape) -> None:
    plain = Shape(shape.dtype, shape.dims, shape.minor_to_major)
    tiled = Shape(shape.dtype, shape.dims, shape.minor_to_major, ((1, 1),))
    assert layout_bytes(plain) == layout_bytes(tiled) == unpadded_bytes(tiled)


@given(st.text(alphabet="f32bs[](){},:*<=/TLESM 0123456789", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        shape = parse_shape(text)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert layout_bytes(shape) >= 0


def test_every_tpu_was_compiled_for() -> None:
    named = {name for case in CASES for name in case.devices}
    assert named == set(TOPOLOGIES)
    assert {name for name in TOPOLOGIES if load_device(name).kind == "tpu"} == named


def test_our_layouts_are_the_compilers() -> None:
    count, wrong = disagreements(CASES)
    assert count > 7000
    assert wrong == []


@pytest.mark.parametrize("case", [case for case in CASES if case.shape.startswith("f32[7,")])
def test_bytes_by_device(case: object) -> None:
    assert isinstance(case, type(CASES[0]))
    shape = parse_shape(case.shape)
    for name in case.devices:
        assert tpu_bytes("float32", shape.dims, load_device(name)) == case.bytes


@given(st.sampled_from(DTYPES), DIMS, st.sampled_from([2, 3, 4, 5, 6, 7]))
def test_a_tpu_never_takes_less_than_the_elements(
    dtype: str, dims: tuple[int, ...], generation: int
) -> None:
    shape = default_tpu_layout(dtype, dims, generation)
    size = layout_bytes(shape)
    assert sorted(shape.minor_to_major) == list(range(len(dims)))
    assert unpadded_bytes(shape) <= size
    # Buffers are whole rows of 128 words, the granule of the TPU's allocator.
    assert size % 512 == 0
    assert bool(size) == bool(math.prod(dims))


@given(st.sampled_from(["float32", "bfloat16", "int8", "int64"]), DIMS)
def test_no_other_order_pads_less(dtype: str, dims: tuple[int, ...]) -> None:
    best = layout_bytes(default_tpu_layout(dtype, dims, 5))
    for minor in range(len(dims)):
        turned = (*dims[:minor], *dims[minor + 1 :], dims[minor])
        assert layout_bytes(default_tpu_layout(dtype, turned, 5)) == best


def test_names_of_types() -> None:
    assert default_tpu_layout("bool", (3,), 5) == default_tpu_layout("pred", (3,), 5)
    with pytest.raises(InputError, match="type 'float128' is unknown; known: pred"):
        default_tpu_layout("float128", (3,), 5)
    with pytest.raises(InputError, match="device h100: no TPU generation"):
        tpu_bytes("float32", (3,), load_device("h100"))
