"""Compile the kernels of `pinned_rows.cu` at first use, for the devices at hand, and register them with XLA.

The library stays in a cache, by a digest of all that decides it: source, command and version of jaxlib.
"""

import ctypes
import functools
import hashlib
import itertools
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import jax

SOURCE = Path(__file__).with_name("pinned_rows.cu")
_TARGETS = "jaxrec_read_rows", "jaxrec_put_rows", "jaxrec_begin_read", "jaxrec_end_read", "jaxrec_begin_put"
_REMEDY = "or keep the rows in HostTables, which are copied by the host (--tables host)"


def load(device: jax.Device) -> ctypes.CDLL:
    """Return the kernels for the kind of a device, compiled if need be, so that programs can call them.

    Args:
      device: a CPU, or a GPU of NVIDIA.

    Raises:
      OSError: there is no compiler, or it failed.
      NotImplementedError: another kind of device.
    """
    return _load(device.platform, getattr(device, "compute_capability", ""))


@functools.cache
def _load(kind: str, capability: str) -> ctypes.CDLL:
    if kind == "cpu":
        library = ctypes.CDLL(str(compiled(cpu_command())))
    elif kind == "gpu":
        command = gpu_command(capability)
        path = compiled(command)
        ctypes.CDLL(_runtime(), ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(path))
    else:
        raise NotImplementedError(
            f"pinned rows are for CPUs and NVIDIA's GPUs, and the devices are {kind}: use others, {_REMEDY}."
        )
    library.jaxrec_register.restype = ctypes.c_char_p
    library.jaxrec_register.argtypes = ctypes.c_void_p, ctypes.c_uint64
    library.jaxrec_unregister.argtypes = (ctypes.c_void_p,)
    library.jaxrec_wait.argtypes = (ctypes.c_int,)
    for name in _TARGETS:
        jax.ffi.register_ffi_target(
            name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu" if kind == "cpu" else "CUDA"
        )
    return library


def wait_for_puts(library: ctypes.CDLL, mesh: jax.sharding.Mesh) -> None:
    """Wait until the reads and puts that programs have begun on the devices of a mesh have ended."""
    for device in mesh.local_devices:
        library.jaxrec_wait(device.local_hardware_id or 0)


def cpu_command() -> list[str]:
    """Return the command of the C++ compiler, without its output."""
    compiler = next(filter(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++")), None)
    if compiler is None:
        raise OSError(
            f"pinned rows on a CPU are compiled at first use, and there is no C++ compiler: install g++, {_REMEDY}."
        )
    return [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", *_includes(), "-x", "c++", str(SOURCE)]


def gpu_command(capability: str) -> list[str]:
    """Return the command of nvcc for GPUs of a compute capability, such as "9.0", without its output."""
    nvcc = next(filter(shutil.which, [*_nvccs()]), None)
    if nvcc is None:
        raise OSError(
            f"pinned rows are compiled at first use, and there is no nvcc: pip install 'jax[cuda13]', {_REMEDY}."
        )
    if shutil.which("g++") is None:
        raise OSError(f"pinned rows are compiled at first use, and nvcc needs g++: install it, {_REMEDY}.")
    arch = f"-arch=sm_{capability.replace('.', '')}"
    # CUDA's runtime is loaded beforehand: wheels have no static one.
    fixed = ["-std=c++17", "-O3", arch, "-shared", "-Xcompiler", "-fPIC", "-cudart", "none"]
    return [nvcc, *fixed, *_includes(), str(SOURCE)]


def _includes():
    return ["-isystem", jax.ffi.include_dir()]


def _nvccs():
    for packages in dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib")):
        yield from map(str, sorted(Path(packages).glob("nvidia/cu*/bin/nvcc"), reverse=True))
    yield from ("nvcc", "/usr/local/cuda/bin/nvcc")


def _runtime() -> str:
    """Return CUDA's runtime: that which JAX has loaded, else one beside an nvcc."""
    loaded = [line.split()[-1] for line in open("/proc/self/maps") if "libcudart.so" in line]
    roots = [Path(nvcc).resolve().parents[1] for nvcc in map(shutil.which, _nvccs()) if nvcc]
    places = itertools.product(roots, ("lib", "lib64", "targets/*/lib"))
    beside = (str(path) for root, place in places for path in root.glob(f"{place}/libcudart.so.*"))
    if path := next(itertools.chain(loaded, beside), None):
        return path
    raise OSError(
        f"pinned rows need libcudart.so, which JAX has not loaded and no nvcc has beside it: pip install "
        f"'jax[cuda13]', {_REMEDY}."
    )


def compiled(command: list[str]) -> Path:
    """Return the library that a command makes of the source, from the cache if it is there.

    Safe in several processes at once, and if one is killed: each compiles beside the cache and renames the result.
    """
    text = "\0".join([SOURCE.read_text(), jax.lib.__version__, platform.machine(), *command])
    directory = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxrec"
    library = directory / f"pinned_rows-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as beside:
            made = Path(beside) / library.name
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
            if done.returncode:
                raise OSError(f"{' '.join(command)} failed: {done.stderr[-2000:].strip()}\nMend that, {_REMEDY}.")
            os.replace(made, library)
    return library
