"""Getting the libraries that hold the real BFC allocators.

They are parts of wheels that nobody needs to install: a library is used where it is installed in
the right version, and otherwise unpacked into a cache folder, `$ALLOCLAB_ORACLE_DIR` or that of
the user. To fill it::

    python -m alloclab.validation.oracle_fetch [NAME...]
"""

import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


class OracleUnavailable(RuntimeError):  # noqa: N818  (a state of the machine, not a mistake)
    """A real allocator cannot be had on this machine. One line that says what would help."""


@dataclass(frozen=True)
class Wheel:
    """Where a library comes from: a project's wheel, its file there, and what else is unpacked."""

    project: str
    version: str
    file: str
    headers: tuple[str, ...] = ()

    def wants(self, member: str) -> bool:
        """Whether this member of the wheel is unpacked."""
        return member == self.file or member.startswith(self.headers)


_TF_INCLUDE = "tensorflow/include/"
_PLUGIN = "jax_plugins/xla_cuda12/xla_cuda_plugin.so"

#: The libraries by name.
WHEELS = {
    "tf-2.21.0": Wheel(
        "tensorflow-cpu",
        "2.21.0",
        "tensorflow/libtensorflow_framework.so.2",
        # What xla/tsl/framework/bfc_allocator.h includes, directly or not.
        tuple(
            _TF_INCLUDE + each
            for each in ("Eigen/", "absl/", "google/protobuf/", "ml_dtypes/", "tsl/", "xla/tsl/")
        ),
    ),
    **{
        f"plugin-{version}": Wheel("jax-cuda12-pjrt", version, _PLUGIN)
        for version in ("0.10.2", "0.11.2", "0.12.0.1")
    },
}


def cache_dir() -> Path:
    """The folder of the libraries: ``$ALLOCLAB_ORACLE_DIR``, else one in the user's cache."""
    chosen = os.environ.get("ALLOCLAB_ORACLE_DIR")
    if chosen:
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "alloclab" / "oracles"


def library(name: str) -> Path:
    """The library of this name (see `WHEELS`): installed in the right version, or in the cache.

    Raises:
        OracleUnavailable: there is no such library, it is not here, or does not run here.

    >>> library("tf-1.0")
    Traceback (most recent call last):
    ...
    alloclab.validation.oracle_fetch.OracleUnavailable: oracle 'tf-1.0': unknown; there are \
tf-2.21.0, plugin-0.10.2, plugin-0.11.2, plugin-0.12.0.1
    """
    wheel = _wheel(name)
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise OracleUnavailable(f"oracle {name}: runs on x86-64 Linux only")
    found = next((each for each in _places(name, wheel) if each.is_file()), None)
    if found is None:
        raise OracleUnavailable(f"oracle {name}: not here; get it with: python -m {_MODULE} {name}")
    return found


_MODULE = "alloclab.validation.oracle_fetch"


def _wheel(name: str) -> Wheel:
    if name not in WHEELS:
        raise OracleUnavailable(f"oracle {name!r}: unknown; there are {', '.join(WHEELS)}")
    return WHEELS[name]


def _places(name: str, wheel: Wheel) -> list[Path]:
    cached = cache_dir() / name / wheel.file
    try:
        installed = metadata.distribution(wheel.project)
    except metadata.PackageNotFoundError:
        return [cached]
    if installed.version != wheel.version:
        return [cached]
    return [Path(str(installed.locate_file(wheel.file))), cached]


def fetch(name: str) -> None:
    """Download the wheel of a library with pip and unpack what is needed of it into the cache.

    Raises:
        OracleUnavailable: there is no such library, or it cannot be downloaded or written.
    """
    wheel = _wheel(name)
    folder = cache_dir() / name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as scratch:
            unpacked = Path(scratch, "unpacked")
            _unpack(_download(name, wheel, Path(scratch)), wheel, unpacked)
            if not (folder / wheel.file).is_file():  # else another process was faster
                unpacked.replace(folder)
    except (OSError, zipfile.BadZipFile) as error:
        raise OracleUnavailable(f"oracle {name}: cannot be unpacked: {error}") from error


def _download(name: str, wheel: Wheel, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    what = ["--no-deps", "--only-binary=:all:", f"{wheel.project}=={wheel.version}"]
    done = subprocess.run(
        [*pip, "--dest", str(folder), *what], capture_output=True, text=True, check=False
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise OracleUnavailable(f"oracle {name}: pip cannot download it: {why}")
    return next(folder.glob("*.whl"))


def _unpack(path: Path, wheel: Wheel, folder: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder, [each for each in archive.namelist() if wheel.wants(each)])
    path.unlink()


def main(names: list[str]) -> int:
    """Get the libraries named, or all; those that are here are skipped. Returns an exit status."""
    failed = 0
    for name in names or list(WHEELS):
        try:
            if not any(each.is_file() for each in _places(name, _wheel(name))):
                print(f"oracle {name}: downloading ...", file=sys.stderr, flush=True)
                fetch(name)
        except OracleUnavailable as error:
            print(error, file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
