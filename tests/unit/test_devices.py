"""Devices: the table of them, files of one's own, and the limits that JAX sets itself."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloclab.policies.errors import InputError
from alloclab.policies.units import GIB, MIB
from alloclab.simulator.devices import Device, bytes_limit, known_devices, load_device
from alloclab.simulator.environment import read_environment

CONTRACT = (
    *("h100", "h200", "a100-40", "a100-80", "t4", "l4", "v100"),
    *("v3", "v4", "v5e", "v5p", "v6e", "v7x", "cpu"),
)


def test_the_names_that_callers_rely_on() -> None:
    names = [device.name for device in known_devices()]
    assert set(CONTRACT) <= set(names)
    for name in CONTRACT:
        assert load_device(name).name == name
    assert load_device("H100") is load_device("h100")


def test_no_name_means_two_devices() -> None:
    names = [
        name for device in known_devices() for name in (device.name, *device.aliases)
    ]  # fmt: skip
    assert len(names) == len(set(names))
    assert all(name == name.lower() for name in names)


@pytest.mark.parametrize("device", known_devices(), ids=lambda each: each.name)
def test_every_figure_has_its_source(device: Device) -> None:
    assert device.summary
    assert "memory" in device.source
    if device.kind != "cpu":
        assert device.source["memory"].startswith(("measured: ", "data sheet"))
    if device.peak or device.bandwidth:
        assert "rates" in device.source
    if device.vmem_bytes:
        assert "on_chip" in device.source
    if device.context_bytes:
        assert "context" in device.source


@pytest.mark.parametrize("device", known_devices(), ids=lambda each: each.name)
def test_what_belongs_to_a_kind(device: Device) -> None:
    assert (device.generation is not None) == (device.kind == "tpu")
    assert (device.memory_bytes is None) == (device.kind == "cpu")
    if device.kind == "tpu":
        assert device.reserved_bytes
        assert device.devices_per_chip and device.tensorcores_per_chip
        cores = device.tensorcores_per_chip // device.devices_per_chip
        assert cores == (2 if device.megacore else 1)
        assert device.scoped_vmem_limit_bytes and device.vmem_bytes
        assert device.scoped_vmem_limit_bytes <= device.vmem_bytes
    if device.kind == "gpu":
        assert device.peak["f16"] >= device.peak["f32"]
        assert device.compute_capability or device.name == "mi300x"


# As logged or reported: of an A100 with 80 GB and a T4 by "XLA backend allocating ...", of TPUs by
# out-of-memory reports (v3, v5e) and memory_stats() (v4).
@pytest.mark.parametrize(
    ("name", "jax", "limit"),
    [
        ("t4", "0.10.2", 11_882_790_912),
        ("a100-80", "0.10.2", 63_740_805_120),
        ("a100-80", "0.11.0", 63_740_837_888),
        ("v3", "0.10.2", 16_624_123_904),
        ("v4", "0.12.0.1", 33_014_415_360),
        ("v5e", "0.10.2", 16_909_336_576),
    ],
)
def test_limits_as_reported(name: str, jax: str, limit: int) -> None:
    assert bytes_limit(load_device(name), read_environment({}, jax)) == limit


def test_tpu_limits_are_what_the_reports_print() -> None:
    """The capacities in the compiler's reports, in GiB with two decimals."""
    printed = {"v2": 7.48, "v3": 15.48, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "v7x": 94.75}
    for name, gib in printed.items():
        limit = bytes_limit(load_device(name), read_environment({}))
        assert limit is not None
        assert round(limit / GIB, 2) == gib


def test_the_host_has_no_limit() -> None:
    assert bytes_limit(load_device("cpu"), read_environment({})) is None


@given(
    st.integers(min_value=MIB, max_value=1 << 45),
    st.floats(min_value=2**-7, max_value=1, width=32),
    st.sampled_from(["0.10.2", "0.11.0", "0.12.0.1"]),
)
def test_a_gpu_limit_is_the_share_of_the_total(total: int, fraction: float, jax: str) -> None:
    environment = read_environment({"XLA_CLIENT_MEM_FRACTION": repr(fraction)}, jax)
    limit = bytes_limit(Device("x", "gpu", memory_bytes=total), environment)
    assert limit is not None
    if jax == "0.10.2":
        assert limit == int(total * fraction)
    else:
        assert limit % (2 * MIB) == 0
        assert 0 <= limit - int(total * fraction) < 2 * MIB


@pytest.mark.parametrize(
    ("variables", "share"),
    [
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_CLIENT_MEM_FRACTION": "0.5"}, 1),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}, 1),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "vmm", "XLA_CLIENT_MEM_FRACTION": "0.5"}, 0.5),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, 0.75),
        ({"TF_FORCE_UNIFIED_MEMORY": "1"}, 1),
        ({"TF_FORCE_UNIFIED_MEMORY": "1", "XLA_CLIENT_MEM_FRACTION": "4.0"}, 4),
    ],
)
def test_limits_of_other_settings(variables: dict[str, str], share: float) -> None:
    device = Device("x", "gpu", memory_bytes=16 * GIB)
    assert bytes_limit(device, read_environment(variables)) == share * 16 * GIB


def test_vmm_is_not_rounded() -> None:
    device = Device("x", "gpu", memory_bytes=1000)
    environment = read_environment({"XLA_PYTHON_CLIENT_ALLOCATOR": "vmm"})
    assert bytes_limit(device, environment) == 750


def test_a_device_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        '[mine]\nkind = "gpu"\nmemory_bytes = "12GiB"\nbandwidth = 1000000000\n'
        'peak = { f32 = 1e12 }\naliases = ["my"]\nsource = { memory = "the box" }\n'
    )
    device = load_device(str(file))
    assert device == load_device(file)
    assert (device.name, device.memory_bytes, device.aliases) == ("mine", 12 * GIB, ("my",))
    assert device.bandwidth == 1e9 and device.peak == {"f32": 1e12}
    assert device.host_bandwidth is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "describes 0 devices"),
        ('[a]\nkind = "cpu"\n[b]\nkind = "cpu"', "describes 2 devices"),
        ("x = [", "not a TOML file"),
        ("x = 3", "x = 3: expected a table [x]"),
        ('[x]\nmemory_bytes = "1GiB"', "[x] kind: missing; expected gpu, tpu or cpu"),
        ('[x]\nkind = "npu"', "[x] kind = 'npu': expected gpu, tpu or cpu"),
        ('[x]\nkind = ["gpu"]', "[x] kind = ['gpu']: expected gpu, tpu or cpu"),
        ('[x]\nkind = "gpu"', "[x] memory_bytes: missing"),
        ('[x]\nkind = "gpu"\nmemory_bytes = 0', "[x] memory_bytes = 0: expected bytes"),
        ('[x]\nkind = "gpu"\nmemory_bytes = -5', "memory_bytes = -5: expected bytes"),
        ('[x]\nkind = "gpu"\nmemory_bytes = true', "memory_bytes = True: expected bytes"),
        ('[x]\nkind = "gpu"\nmemory_bytes = 1.5', "memory_bytes = 1.5: expected bytes"),
        ('[x]\nkind = "gpu"\nmemory_bytes = "lots"', "[x] memory_bytes: size 'lots'"),
        ('[x]\nkind = "cpu"\nbandwidth = nan', "bandwidth = nan: expected a number above 0"),
        ('[x]\nkind = "cpu"\nbandwidth = "fast"', "bandwidth = 'fast': expected a number"),
        ('[x]\nkind = "cpu"\nvram = 1', "[x] vram: unknown; known: kind, summary"),
        ('[x]\nkind = "cpu"\nname = "y"', "[x] name: unknown"),
        ('[x]\nkind = "cpu"\npeak = 3', "[x] peak = 3: expected a table"),
        ('[x]\nkind = "cpu"\npeak = { f32 = "x" }', "[x] peak.f32 = 'x': expected a number"),
        ('[x]\nkind = "cpu"\nsource = { a = 1 }', "[x] source.a = 1: expected text in quotes"),
        ('[x]\nkind = "cpu"\naliases = "y"', "aliases = 'y': expected a list of names"),
        ('[x]\nkind = "cpu"\nmegacore = 1', "megacore = 1: expected true or false"),
        (
            '[x]\nkind = "tpu"\nmemory_bytes = 10\nreserved_bytes = 10',
            "[x] reserved_bytes = 10: expected less than memory_bytes, 10",
        ),
    ],
)
def test_a_bad_file_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(InputError) as error:
        load_device(str(file))
    assert str(error.value).startswith(str(file))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_names_list_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'h1000' is unknown; known: .*h100.*cpu"):
        load_device("h1000")
    with pytest.raises(InputError, match="no such file"):
        load_device(str(tmp_path / "none.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(InputError, match=r"folder\.toml"):
        load_device(str(tmp_path / "folder.toml"))


def test_devices_load_neither_numpy_nor_jax() -> None:
    program = (
        "import sys; import alloclab.simulator.devices as d, alloclab.simulator.layouts; "
        "d.load_device('v5e'); sys.exit(any(m in sys.modules for m in ('numpy', 'jax')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
