"""XLA shapes with layouts: how many bytes an array takes, and how a TPU lays it out.

A TPU stores arrays in tiles, so shapes that do not fill their tiles take more memory than their
elements. The text form is XLA's own: ``f32[1000,3]{0,1:T(4,128)}``.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

from alloclab.policies.errors import InputError
from alloclab.simulator.devices import Device

#: XLA's name of each array type -> bits and JAX's name (xla/primitive_util.h; xla_data.proto).
_TYPES: dict[str, tuple[int, str]] = {
    "pred": (8, "bool"),
    **{f"{kind}{bits}": (bits, f"{name}{bits}") for kind, name in (("s", "int"), ("u", "uint"))
       for bits in (1, 2, 4, 8, 16, 32, 64)},
    "bf16": (16, "bfloat16"),
    "f16": (16, "float16"),
    "f32": (32, "float32"),
    "f64": (64, "float64"),
    "c64": (64, "complex64"),
    "c128": (128, "complex128"),
    **{f"f8{kind}": (8, f"float8_{kind}") for kind in (
        "e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")},
    "f4e2m1fn": (4, "float4_e2m1fn"),
}  # fmt: skip
_FROM_JAX = {name: xla for xla, (_, name) in _TYPES.items()}

#: Bytes of types that are no arrays (ShapeUtil::ByteSizeOf, a pointer being 8 bytes).
_SPECIAL = {"token": 0, "opaque": 8}

TUPLE = "tuple"

#: ``*`` in a tile: the dimension is merged into the next more minor one (Tile::kCombineDimension).
COMBINE = -1

Tile = tuple[int, ...]


@dataclass(frozen=True)
class Shape:
    """The shape of one array, or a tuple of shapes, with its layout.

    Attributes:
        dtype: XLA's name of the type, such as ``f32``; ``tuple`` for a tuple.
        dims: sizes, outermost first as written; for a bounded dynamic dimension its bound.
        minor_to_major: the dimensions, the one that varies fastest in memory first.
        tiles: the levels of tiling, each outermost dimension first; empty without tiling.
        memory_space: 0 is the device's ordinary memory, 5 the host's; on a TPU 1 is VMEM.
        element_bits: bits that one element is stored in, where the layout says so.
        dynamic: the dimensions of which the size is only a bound.
        tail_alignment: the array is padded at its end to a multiple of so many elements.
        metadata_bytes: room before the array for its dynamic sizes.
        elements: of a tuple.

    >>> shape = parse_shape("bf16[1000,3]{0,1:T(4,128)(2,1)S(1)}")
    >>> shape.dims, shape.minor_to_major, shape.tiles, shape.memory_space
    ((1000, 3), (0, 1), ((4, 128), (2, 1)), 1)
    >>> str(shape)
    'bf16[1000,3]{0,1:T(4,128)(2,1)S(1)}'
    """

    dtype: str
    dims: tuple[int, ...] = ()
    minor_to_major: tuple[int, ...] = ()
    tiles: tuple[Tile, ...] = ()
    memory_space: int = 0
    element_bits: int | None = None
    dynamic: frozenset[int] = frozenset()
    tail_alignment: int = 1
    metadata_bytes: int = 0
    elements: tuple["Shape", ...] = ()

    def __str__(self) -> str:
        if self.dtype == TUPLE:
            return f"({', '.join(map(str, self.elements))})"
        dims = ",".join(f"<={n}" if i in self.dynamic else f"{n}" for i, n in enumerate(self.dims))
        order = ",".join(map(str, self.minor_to_major))
        properties = "".join(self._properties())
        layout = f"{{{order}{':' if properties else ''}{properties}}}"
        return f"{self.dtype}[{dims}]{'' if layout == '{}' else layout}"

    def _properties(self) -> Iterator[str]:
        """In the order of Layout::Print (xla/layout.cc)."""
        for level, tile in enumerate(self.tiles):
            sizes = ",".join("*" if size == COMBINE else f"{size}" for size in tile)
            yield f"({sizes})" if level else f"T({sizes})"
        if self.tail_alignment != 1:
            yield f"L({self.tail_alignment})"
        if self.element_bits is not None:
            yield f"E({self.element_bits})"
        if self.memory_space:
            yield f"S({self.memory_space})"
        if self.metadata_bytes:
            yield f"M({self.metadata_bytes})"


#: What the numbers in a layout's properties set.
_NUMBERS = {
    "L": "tail_alignment",
    "E": "element_bits",
    "S": "memory_space",
    "M": "metadata_bytes",
}

#: Far beyond any program's tuples, and within Python's recursion limit.
_DEEPEST = 100

_T = TypeVar("_T")


class _Reader:
    """Reads a shape from text, left to right (the grammar of xla/hlo/parser/hlo_parser.cc)."""

    def __init__(self, text: str) -> None:
        # XLA numbers the elements of long tuples in comments; same length, so places stay right.
        self.text = re.sub(r"/\*.*?\*/", lambda match: " " * len(match[0]), text)
        self.source = text
        self.at = 0
        self.depth = 0

    def whole(self) -> Shape:
        shape = self.shape()
        self.skip()
        if self.at < len(self.text):
            self.fail("expected the end of the shape")
        return shape

    def shape(self) -> Shape:
        if self.accept(r"\("):
            self.depth += 1
            if self.depth > _DEEPEST:
                self.fail(f"expected tuples at most {_DEEPEST} deep")
            elements = self.listed(self.shape, r"\)")
            self.depth -= 1
            return Shape(TUPLE, elements=elements)
        start = self.at
        dtype = self.need(r"[a-z][a-z0-9]*", "a type such as f32, or ( of a tuple")
        if dtype not in _TYPES and dtype not in _SPECIAL:
            self.at = start
            self.fail(f"type {dtype!r} is unknown; known: {', '.join((*_TYPES, *_SPECIAL))}")
        self.need(r"\[", "[ and the dimensions")
        sizes = self.listed(self.dimension, r"\]")
        dims = tuple(size for size, _ in sizes)
        dynamic = frozenset(i for i, (_, bounded) in enumerate(sizes) if bounded)
        shape = Shape(dtype, dims, _row_major(len(dims)), dynamic=dynamic)
        return self.layout(shape) if self.accept(r"\{") else shape

    def dimension(self) -> tuple[int, bool]:
        bounded = self.accept("<=") is not None
        return self.number("the size of a dimension"), bounded

    def layout(self, shape: Shape) -> Shape:
        start = self.at
        order = self.listed(lambda: self.number("a dimension's number"), r"(?=[:}])")
        rank = len(shape.dims)
        if sorted(order) != list(range(rank)):
            self.at = start
            self.fail(f"expected each of the {rank} dimensions of the shape once, minor to major")
        shape = replace(shape, minor_to_major=order)
        if self.accept(":"):
            shape = self.properties(shape)
        self.need(r"\}", "} or a property of the layout: T (tiles), L, E, S or M")
        return shape

    def properties(self, shape: Shape) -> Shape:
        if self.accept("T"):
            tiles = []
            while self.accept(r"\("):
                tiles.append(self.listed(self.tile_size, r"\)"))
            if not tiles:
                self.fail("expected ( and the sizes of a tile")
            shape = replace(shape, tiles=tuple(tiles))
        # XLA prints the others in this order, each at most once.
        for key, name in _NUMBERS.items():
            if self.accept(key):
                self.need(r"\(", f"( after {key}")
                value = self.positive("a number of at least 1")
                self.need(r"\)", ")")
                changes: dict[str, Any] = {name: value}
                shape = replace(shape, **changes)
        return shape

    def tile_size(self) -> int:
        if self.accept(r"\*"):
            return COMBINE
        return self.positive("the size of a tile, at least 1, or *")

    def positive(self, what: str) -> int:
        return int(self.need(r"[1-9][0-9]{0,17}(?![0-9])", what))

    def number(self, what: str) -> int:
        return int(self.need(r"[0-9]{1,18}(?![0-9])", what))

    def listed(self, item: Callable[[], _T], end: str) -> tuple[_T, ...]:
        """Items with commas between them, up to the end, which is taken too."""
        items: list[_T] = []
        while self.accept(end) is None:
            if items:
                self.need(",", "a comma, or the end of the list")
            items.append(item())
        return tuple(items)

    def skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def accept(self, pattern: str) -> str | None:
        self.skip()
        match = re.compile(pattern).match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match[0]

    def need(self, pattern: str, what: str) -> str:
        found = self.accept(pattern)
        if found is None:
            self.fail(f"expected {what}")
        return found

    def fail(self, why: str) -> NoReturn:
        found = repr(self.text[self.at : self.at + 12]) if self.at < len(self.text) else "the end"
        source = self.source if len(self.source) <= 100 else self.source[:97] + "..."
        raise InputError(f"shape {source!r}: at character {self.at + 1}, {found}: {why}")


def parse_shape(text: str) -> Shape:
    """The shape that a text in XLA's form describes; without a layout it is row-major.

    Raises:
        InputError: the text is no shape; the message names the place.

    >>> parse_shape("f32[7,<=5]").minor_to_major
    (1, 0)
    >>> parse_shape("f32[7,5]{1}")
    Traceback (most recent call last):
    alloclab.policies.errors.InputError: shape 'f32[7,5]{1}': at character 10, '1}': expected each of the 2 dimensions of the shape once, minor to major
    """  # noqa: E501
    return _Reader(text).whole()


def layout_bytes(shape: str | Shape) -> int:
    """Bytes that a buffer of this shape takes, with the padding of its tiles.

    Only the outermost level of tiling pads, as in ``ShapeUtil::ArraySize`` (xla/shape_util.cc).
    Types below 8 bits take a byte an element unless the layout packs them, ``E(4)``. Dynamic
    dimensions count with their bound, and their metadata does not. A tuple is the sum of its
    leaves: each is a buffer of its own, and the table that points to them (8 bytes an element) is
    another one, not counted here.

    Raises:
        InputError: the text is no shape.

    >>> layout_bytes("f32[1000,3]"), layout_bytes("f32[1000,3]{0,1:T(4,128)}")
    (12000, 16384)
    >>> layout_bytes("(s4[10]{0:E(4)}, s4[10], /*index=2*/token[])")
    15
    """
    if isinstance(shape, str):
        shape = parse_shape(shape)
    if shape.dtype == TUPLE:
        return sum(map(layout_bytes, shape.elements))
    if shape.dtype in _SPECIAL:
        return _SPECIAL[shape.dtype]
    count = _stored_elements(shape)
    bits = shape.element_bits or max(_TYPES[shape.dtype][0], 8)
    return -(-count * bits // 8)


def unpadded_bytes(shape: str | Shape) -> int:
    """Bytes of the elements alone, stored as the layout says but without tiles.

    >>> unpadded_bytes("f32[1000,3]{0,1:T(4,128)}")
    12000
    """
    if isinstance(shape, str):
        shape = parse_shape(shape)
    if shape.dtype == TUPLE:
        return sum(map(unpadded_bytes, shape.elements))
    return layout_bytes(replace(shape, tiles=(), tail_alignment=1))


def _stored_elements(shape: Shape) -> int:
    sizes = [shape.dims[dim] for dim in shape.minor_to_major]
    if shape.tiles:
        sizes = _tiled(sizes, shape.tiles[0])
    count = math.prod(sizes)
    return _round_up(count, shape.tail_alignment)


def _tiled(sizes: list[int], tile: Tile) -> list[int]:
    """The sizes, minor first, rounded up to a tile (given outermost dimension first)."""
    sizes = sizes + [1] * (len(tile) - len(sizes))
    rounded = []
    merged = 1
    # Outermost tiled dimension first, so that a merged one meets the next more minor.
    for size, step in zip(reversed(sizes[: len(tile)]), tile, strict=True):
        merged *= size
        if step != COMBINE:
            rounded.append(_round_up(merged, step))
            merged = 1
    return [*rounded, merged, *sizes[len(tile) :]]


#: A TPU's vector registers: 8 rows (sublanes) of 128 lanes of 32 bits (jax/_src/tpu_info.py).
LANES, SUBLANES = 128, 8

#: First generation with single rows as tiles, and with types below 8 bits packed in memory.
_COMPACT_GENERATION = 4


def default_tpu_layout(dtype: str, dims: Sequence[int], generation: int) -> Shape:
    """The layout that XLA gives a program's parameter or result on a TPU.

    It follows from the shape alone, whatever the program does with the array. The compiler is
    closed; the rule here agrees with all of the ahead-of-time compiles in
    ``tests/unit/data/tpu_layouts.csv`` (libtpu 0.0.42.1 and 0.0.50.1, remade by
    `alloclab.validation.tpu_layouts`):

    1. An array of two or more dimensions is tiled over its two minor dimensions, by rows of 128
       lanes. Rows: the least power of two that holds the second-minor dimension, at most 8, and
       at least one 32-bit word's worth of elements (twice that before generation 4). Generation
       4 and later take 8 words' worth for types of 8 bits and less where that divides the
       dimension.
    2. Of all choices of the two minor dimensions the one that pads least is taken; then the one
       with the later minor dimension, then the later second-minor. The others stay in order.
    3. A vector is one row of tiles: the least power of two of rows of 128 that holds it, up to 8.
    4. Types of less than 32 bits are packed across rows, ``(2,1)``. Those of less than 8 bits are
       stored in a byte each before generation 4, and packed from then on.

    Args:
        dtype: XLA's or JAX's name of the type, ``bf16`` or ``bfloat16``.
        dims: sizes, outermost first.
        generation: of the TPU: 2 for v2 ... 7 for v7x.

    Raises:
        InputError: no such type.

    >>> print(default_tpu_layout("bf16", (1000, 3), 5))
    bf16[1000,3]{0,1:T(4,128)(2,1)}
    >>> print(default_tpu_layout("float32", (7, 5, 9), 5), default_tpu_layout("s4", (100,), 5))
    f32[7,5,9]{2,0,1:T(8,128)} s4[100]{0:T(1024)(128)(8,1)E(4)}
    """
    shape = Shape(_xla_type(dtype), tuple(dims), _row_major(len(dims)))
    bits = _TYPES[shape.dtype][0]
    compact = generation >= _COMPACT_GENERATION
    if bits < 8 and compact:
        shape = replace(shape, element_bits=bits)
    if not math.prod(dims):
        return shape
    word = max(32 // bits, 1)  # elements of the type in 32 bits
    packed = word if compact else min(word, 4)  # ... as stored
    least = packed if compact else 2 * packed
    deeper = ((packed, 1),) if packed > 1 else ()
    if len(dims) < 2:
        size = _doubled(least, max(SUBLANES, word), -(-math.prod(dims) // LANES)) * LANES
        below = ((LANES,), *deeper) if deeper and dims else ()
        return replace(shape, tiles=((size,), *below))

    def rows(size: int) -> int:
        if compact and bits <= 8 and size % (SUBLANES * word) == 0:
            return SUBLANES * word
        return _doubled(max(least, word), SUBLANES, size)

    def cost(pair: tuple[int, int]) -> tuple[int, bool, int, int]:
        minor, second = pair
        # Tiles of 16 rows (2-bit types) count as 8 here, so for these the choice is not always
        # the one that pads least; a pair without padding wins all the same.
        padded = _round_up(dims[minor], LANES) * _round_up(
            dims[second], min(rows(dims[second]), SUBLANES)
        )
        pads = dims[minor] % LANES != 0 or dims[second] % rows(dims[second]) != 0
        others = math.prod(dims) // (dims[minor] * dims[second])
        return padded * others, pads, -minor, -second

    minor, second = min(itertools.permutations(range(len(dims)), 2), key=cost)
    rest = (dim for dim in _row_major(len(dims)) if dim not in (minor, second))
    return replace(
        shape,
        minor_to_major=(minor, second, *rest),
        tiles=((rows(dims[second]), LANES), *deeper),
    )


def tpu_bytes(dtype: str, dims: Sequence[int], device: Device) -> int:
    """Bytes that a parameter or result takes on a TPU; see `default_tpu_layout`.

    Raises:
        InputError: no such type, or the device is no TPU.

    >>> from alloclab.simulator.devices import load_device
    >>> tpu_bytes("float32", (1000, 3), load_device("v5e")), 1000 * 3 * 4
    (16384, 12000)
    """
    if device.generation is None:
        raise InputError(f"device {device.name}: no TPU generation; expected a TPU such as v5e")
    return layout_bytes(default_tpu_layout(dtype, dims, device.generation))


def _xla_type(dtype: str) -> str:
    name = _FROM_JAX.get(dtype, dtype)
    if name not in _TYPES:
        known = ", ".join((*_TYPES, *_FROM_JAX))
        raise InputError(f"type {dtype!r} is unknown; known: {known}")
    return name


def _row_major(rank: int) -> tuple[int, ...]:
    return tuple(reversed(range(rank)))


def _doubled(start: int, most: int, need: int) -> int:
    """``start`` doubled until it reaches ``need`` or ``most``."""
    while start < min(need, most):
        start *= 2
    return start


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
