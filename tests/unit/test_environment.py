"""What JAX makes of the environment variables for its allocators."""

import inspect
import struct
from importlib.metadata import version
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alloclab.policies.errors import InputError
from alloclab.policies.units import GIB, MIB
from alloclab.simulator.environment import AllocatorEnvironment, parse_version, read_environment

ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
FRACTION = "XLA_CLIENT_MEM_FRACTION"
OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def test_nothing_set() -> None:
    read = read_environment({})
    assert read == AllocatorEnvironment(jax=(0, 12, 0, 1))
    assert (read.allocator, read.preallocate, read.memory_fraction) == ("bfc", True, 0.75)
    assert (read.host_memory_limit_bytes, read.host_preallocate) == (64 * GIB, False)
    assert read.notes == ()


@pytest.mark.parametrize("value", ["false", "False", "0"])
def test_the_three_words_that_stop_preallocation(value: str) -> None:
    read = read_environment({PREALLOCATE: value})
    assert not read.preallocate and not read.notes
    assert read.flavour == "classic"


@pytest.mark.parametrize("value", ["FALSE", "no", "off", "false ", "True", "1"])
def test_words_that_look_as_if_they_stopped_it(value: str) -> None:
    assert read_environment({PREALLOCATE: value}).preallocate


@pytest.mark.parametrize("value", ["FALSE", "no", "off"])
def test_a_word_without_effect_is_called_out(value: str) -> None:
    (note,) = read_environment({PREALLOCATE: value}).notes
    assert f"{PREALLOCATE}={value} leaves preallocation on" in note


def test_preallocation_set_on_is_silent() -> None:
    assert read_environment({PREALLOCATE: "true"}) == read_environment({PREALLOCATE: ""})


@pytest.mark.parametrize(
    ("name", "jax", "allocator"),
    [
        ("default", "0.9.2", "bfc"),
        ("BFC", "0.12.0.1", "bfc"),
        ("cuda_async", "0.10.2", "cuda_async"),
        ("Platform", "0.10.2", "platform"),
        ("vmm", "0.10.0", "vmm"),
        ("address", "0.11.0", "platform"),
    ],
)
def test_allocators(name: str, jax: str, allocator: str) -> None:
    assert read_environment({ALLOCATOR: name}, jax).allocator == allocator


@pytest.mark.parametrize(
    ("name", "jax"),
    [("vmm", "0.9.2"), ("address", "0.10.2"), ("cuda_malloc_async", "0.12.0.1"), ("", "0.12.0.1")],
)
def test_allocators_that_jax_refuses(name: str, jax: str) -> None:
    with pytest.raises(InputError, match=rf"{ALLOCATOR}={name}: expected one of default, bfc"):
        read_environment({ALLOCATOR: name}, jax)


@pytest.mark.parametrize(
    ("jax", "variables", "flavour"),
    [
        ("0.10.2", {}, "classic"),
        ("0.11.0", {}, "spatial"),
        ("0.12.0.1", {ALLOCATOR: "bfc"}, "spatial"),
        ("0.12.0.1", {PREALLOCATE: "0"}, "classic"),
        ("0.12.0.1", {ALLOCATOR: "cuda_async"}, "classic"),
        (
            "0.12.0.1",
            {"XLA_FLAGS": "--a=1 --xla_gpu_enable_allocator_spatial_partitioning=false"},
            "classic",
        ),
        (
            "0.12.0.1",
            {
                "XLA_FLAGS": "--xla_gpu_enable_allocator_spatial_partitioning=0 "
                "--xla_gpu_enable_allocator_spatial_partitioning=true"
            },
            "spatial",
        ),
        (
            "0.12.0.1",
            {"XLA_FLAGS": "--xla_gpu_enable_allocator_spatial_partitioning_not=false"},
            "spatial",
        ),
    ],
)
def test_flavour(jax: str, variables: dict[str, str], flavour: str) -> None:
    assert read_environment(variables, jax).flavour == flavour


@given(st.floats(min_value=1e-6, max_value=1))
def test_the_fraction_is_a_32_bit_float(fraction: float) -> None:
    read = read_environment({FRACTION: repr(fraction)}).memory_fraction
    assert read == struct.unpack("f", struct.pack("f", fraction))[0]


def test_the_old_name_of_the_fraction() -> None:
    read = read_environment({OLD_FRACTION: ".5"})
    assert read.memory_fraction == 0.5
    assert any("deprecated" in note for note in read.notes)
    with pytest.raises(InputError, match="both set"):
        read_environment({OLD_FRACTION: ".5", FRACTION: ".5"})
    # Empty counts as unset.
    assert read_environment({OLD_FRACTION: "", FRACTION: ".5"}).memory_fraction == 0.5


@pytest.mark.parametrize("text", ["0", "-1", "1.01", "nan", "inf", "most", "75%"])
def test_fractions_that_make_no_sense(text: str) -> None:
    with pytest.raises(InputError, match=f"{FRACTION}={text}: expected a share"):
        read_environment({FRACTION: text})


def test_unified_memory_allows_more_than_there_is() -> None:
    read = read_environment({FRACTION: "3.5", "TF_FORCE_UNIFIED_MEMORY": "True"})
    assert read.unified_memory and read.memory_fraction == 3.5
    with pytest.raises(InputError):
        read_environment({FRACTION: "3.5", "TF_FORCE_UNIFIED_MEMORY": "0"})
    with pytest.raises(InputError):
        read_environment({FRACTION: "3.5", "TF_FORCE_UNIFIED_MEMORY": "1", ALLOCATOR: "platform"})


def test_collective_memory() -> None:
    name = "XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB"
    read = read_environment({name: "512"}, "0.10.2")
    assert read.collective_memory_bytes == 512 * MIB and not read.notes
    assert any(name in note for note in read_environment({name: "512"}, "0.11.0").notes)
    with pytest.raises(InputError, match=f"{name}=1.5: expected a whole number"):
        read_environment({name: "1.5"})


@pytest.mark.parametrize(
    ("limit", "preallocate", "expected"),
    [
        (None, None, 64),
        (None, "true", 16),
        ("8", "TRUE", 8),
        ("128", None, 128),
        ("128", "false", 128),
        ("0.5", None, 64),
        ("lots", "1", 16),
        ("8", "yes", 8),
    ],
)
def test_the_pool_of_pinned_host_memory(
    limit: str | None, preallocate: str | None, expected: int
) -> None:
    names = ("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE")
    given_ = zip(names, (limit, preallocate), strict=True)
    read = read_environment({name: value for name, value in given_ if value is not None})
    assert read.host_memory_limit_bytes == expected * GIB
    assert read.host_preallocate == (preallocate in ("true", "TRUE", "1"))
    # What XLA cannot read it logs and leaves at the default.
    odd = (limit in ("0.5", "lots")) + (preallocate == "yes")
    assert len(read.notes) == odd


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"PJRT_GPU_ENABLE_ASYNC_DISPATCH": "1"}, True),
        ({"PJRT_GPU_ENABLE_ASYNC_DISPATCH": "true"}, False),
        ({"XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT": "1"}, True),
        ({"XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT": "0"}, False),
    ],
)
def test_async_dispatch(variables: dict[str, str], expected: bool) -> None:
    assert read_environment(variables).async_dispatch == expected


@pytest.mark.parametrize(
    "name",
    ["XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT", "XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE"],
)
def test_flags_that_python_reads_are_numbers(name: str) -> None:
    with pytest.raises(InputError, match=f"{name}=true: expected 0 or 1"):
        read_environment({name: "true"})


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        ({"TF_GPU_ALLOCATOR": "cuda_malloc_async"}, "nothing reads it"),
        ({"TF_FORCE_GPU_ALLOW_GROWTH": "true"}, "TensorFlow's"),
        ({"TF_DETERMINISTIC_ALLOCATOR": "1"}, "not modelled"),
        ({ALLOCATOR: "cuda_async"}, "not limited"),
        ({ALLOCATOR: "cuda_async", PREALLOCATE: "0"}, "gives memory back"),
        ({"TF_CUDA_MALLOC_ASYNC_SUPPORTED_PREALLOC": "-1"}, "only with the cuda_async"),
        ({ALLOCATOR: "platform", FRACTION: "0.5"}, "fraction has no effect"),
        ({ALLOCATOR: "vmm", PREALLOCATE: "true"}, "no effect with the vmm"),
        ({ALLOCATOR: "vmm", "TF_FORCE_UNIFIED_MEMORY": "1"}, "no effect with the vmm"),
    ],
)
def test_traps_are_called_out(variables: dict[str, str], word: str) -> None:
    assert any(word in note for note in read_environment(variables).notes)


def test_a_reserve_that_does_not_last() -> None:
    name = "TF_CUDA_MALLOC_ASYNC_SUPPORTED_PREALLOC"
    read = read_environment({ALLOCATOR: "cuda_async", PREALLOCATE: "0", name: "-1"})
    assert any(note.startswith(name) and "next synchronisation" in note for note in read.notes)


def test_other_variables_are_nobodys_business() -> None:
    assert read_environment({"PATH": "/bin", "XLA_FLAGS": "--xla_dump_to=x"}).notes == ()


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0.10.2", (0, 10, 2)), ("0.12.0.1", (0, 12, 0, 1)), ("0.11.0.dev2026+x", (0, 11, 0))],
)
def test_versions(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_version(text) == numbers


@pytest.mark.parametrize("text", ["", "newest", "12", "0.10.", "v0.10", "0..1", "0.1\n"])
def test_no_versions(text: str) -> None:
    with pytest.raises(InputError, match="expected one such as"):
        parse_version(text)


@pytest.mark.jax
@settings(deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            ALLOCATOR: st.sampled_from(["default", "BFC", "platform", "cuda_async", "vmm", "x"]),
            PREALLOCATE: st.sampled_from(["", "false", "False", "0", "FALSE", "true", "1", "no"]),
            FRACTION: st.sampled_from(["", ".5", "0.9", "x"]),
            OLD_FRACTION: st.sampled_from(["", "0.25"]),
            "XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB": st.sampled_from(["", "64", "6.4"]),
            "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT": st.sampled_from(["0", "1", "true"]),
        },
    )
)
def test_the_installed_jax_reads_the_same(variables: dict[str, str]) -> None:
    from jaxlib import xla_client

    real: dict[str, Any] | None
    with pytest.MonkeyPatch.context() as patch:
        for name in inspect.getsource(xla_client.generate_pjrt_gpu_plugin_options).split("'"):
            if name.startswith("XLA_"):
                patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        try:
            real = dict(xla_client.generate_pjrt_gpu_plugin_options())
        except ValueError:
            real = None
    if real is None:
        with pytest.raises(InputError):
            read_environment(variables, version("jaxlib"))
        return
    ours = read_environment(variables, version("jaxlib"))
    assert ours.allocator == {"default": "bfc"}.get(real["allocator"], real["allocator"])
    assert ours.preallocate == real.get("preallocate", True)
    assert ours.memory_fraction == pytest.approx(real.get("memory_fraction", 0.75), rel=1e-7)
    assert ours.collective_memory_bytes == real.get("collective_memory_size", 0)
    assert ours.async_dispatch == real["use_tfrt_gpu_client"]
