"""Versions agree, a wrong build is one readable ImportError, and a build says which GPUs it leaves out."""

import importlib.metadata
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tomllib
from types import SimpleNamespace

import jax
import pytest
from conftest import skip_or_fail

import jnvfp4
from jnvfp4._native import load, plans
from jnvfp4._native.source_hash import source_hash
from jnvfp4._reports.support import no_kernels

ROOT = pathlib.Path(__file__).parents[1]


def test_versions_agree():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert jnvfp4.__version__ == declared == importlib.metadata.version("jnvfp4")


def test_the_build_pins_the_oldest_supported_headers():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    oldest = next(d for d in project["project"]["dependencies"] if d.startswith("jaxlib>=")).removeprefix("jaxlib>=")
    assert f"jaxlib=={oldest}" in project["build-system"]["requires"]


def test_the_package_is_typed():
    assert (pathlib.Path(jnvfp4.__file__).parent / "py.typed").is_file()


def test_older_headers_are_accepted_and_newer_ones_refused_before_anything_is_registered():
    for built in ((0, 3), (0, 1)):
        load.check_ffi_api(built, (0, 3))
    for major, minor in ((0, 5), (1, 0), (1, 9)):
        text = f"built with XLA FFI {major}.{minor}, but the installed jaxlib provides 0.4; upgrade jax"
        with pytest.raises(ImportError, match=re.escape(text)):
            load.check_ffi_api((major, minor), (0, 4))
    with pytest.raises(
        ImportError, match=re.escape("XLA FFI 0.3, but the installed jaxlib provides 1.0; upgrade jnvfp4, ")
    ):
        load.check_ffi_api((0, 3), (1, 0))


def test_a_jax_that_is_too_old_is_refused(monkeypatch):
    """Installers refuse it too; without them import would succeed, and ``linear`` fail with jax 0.9.2."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest = next(d for d in dependencies if d.startswith("jax>=")).removeprefix("jax>=")
    monkeypatch.setattr(jax, "__version__", "0.9.2")
    monkeypatch.setattr(jax, "__version_info__", (0, 9, 2))
    text = f"jnvfp4: jax must be {oldest} or newer, got 0.9.2; upgrade jax and jaxlib"
    with pytest.raises(ImportError, match=re.escape(text)):
        load.extensions.__wrapped__()


def test_this_build_fits_this_jaxlib():
    running = load.runtime_ffi_api()
    for module in load.extensions().values():
        load.check_ffi_api(module.ffi_api, running)
        assert module.ffi_api <= running


def _checkout(folder, text):
    (folder / "ffi").mkdir()
    (folder / "ffi" / "numerics.h").write_text(text)
    (folder / "CMakeLists.txt").write_text("")
    return source_hash(folder / "ffi")


def test_an_extension_of_other_sources_is_refused_where_there_are_sources(tmp_path):
    load.check_source_hash("_cpu", "0" * 16, tmp_path)  # as where the package is installed
    current = _checkout(tmp_path, "int x;")
    load.check_source_hash("_cpu", current, tmp_path)
    with pytest.raises(ImportError, match=r"extension _cpu was built from other sources \(0+\) than .*pip install"):
        load.check_source_hash("_cpu", "0" * 16, tmp_path)


def test_source_hash_follows_names_and_contents(tmp_path):
    first = _checkout(tmp_path, "int x;")
    (tmp_path / "ffi" / "notes.txt").write_text("not a source")
    assert source_hash(tmp_path / "ffi") == first
    (tmp_path / "ffi" / "numerics.h").write_text("int y;")
    second = source_hash(tmp_path / "ffi")
    (tmp_path / "ffi" / "numerics.h").rename(tmp_path / "ffi" / "other.h")
    assert len({first, second, source_hash(tmp_path / "ffi")}) == 3


# ---------------------------------------------------------------- which GPUs a build is for
def _program(folder, name, text):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def _cmake(*args, path):
    cmake = shutil.which("cmake")
    if cmake is None:
        skip_or_fail("cmake", "no cmake on PATH")
    env = {name: value for name, value in os.environ.items() if name not in ("CUDACXX", "CUDAFLAGS", "CMAKE_ARGS")}
    env["PATH"] = f"{path}{os.pathsep}{env['PATH']}"
    done = subprocess.run([cmake, *map(str, args)], capture_output=True, text=True, env=env)
    # Without the line breaks that CMake puts into warnings and errors.
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def _choose(tmp_path, targets, capabilities=None, compiler="exit 1", version="13.0.88"):
    """Runs cmake/targets.cmake with an nvidia-smi that lists GPUs, or fails, and a CUDA compiler."""
    answer = "exit 9" if capabilities is None else f"printf '{capabilities}'"
    programs = _program(tmp_path / "bin", "nvidia-smi", answer).parent
    nvcc = _program(programs, "nvcc", compiler)
    script = tmp_path / "choose.cmake"
    script.write_text(
        "cmake_minimum_required(VERSION 3.25)\n"
        f"""include("{ROOT}/cmake/targets.cmake")
jnvfp4_wanted_targets(targets)
message("wanted=${{targets}}.")
jnvfp4_known_targets(targets ptx "{nvcc}" "${{targets}}")
jnvfp4_generic_flags(flags "${{targets}}")
jnvfp4_e2m1_flags(e2m1 "${{targets}}" {version})
message("known=${{targets}}. ptx=${{ptx}}. flags=${{flags}}. e2m1=${{e2m1}}.")
"""
    )
    return _cmake(f"-DJNVFP4_CUDA_TARGETS={targets}", "-P", script, path=programs)


@pytest.mark.parametrize(
    ("capabilities", "targets"),
    [
        ("9.0\\n", "90a"),
        ("8.9\\n", "89"),
        ("9.0\\n9.0\\n", "90a"),
        ("8.0\\n9.0\\n", "80;90a"),
        ("10.0\\n10.3\\n12.1\\n", "100f;120f"),
        ("11.0\\n", "110f"),
        ("7.5\\n", "90a;100f;120f"),
        ("7.5\\n8.6\\n", "86"),
        ("[N/A]\\n", "90a;100f;120f"),
        ("", "90a;100f;120f"),
        (None, "90a;100f;120f"),
    ],
)
def test_auto_builds_for_the_gpus_of_the_machine(tmp_path, capabilities, targets):
    status, text = _choose(tmp_path, "auto", capabilities)
    assert status == 0, text
    assert f"wanted={targets}." in text


def test_named_targets_are_built_whatever_the_gpus_are(tmp_path):
    assert "wanted=100f;89." in _choose(tmp_path, "100f;89", "9.0\\n")[1]


@pytest.mark.parametrize("target", ["hopper", "sm_90", "9.0", "75"])
def test_a_target_that_is_none_is_an_error(tmp_path, target):
    status, text = _choose(tmp_path, target)
    assert status == 1
    assert f"or compute capabilities from 80 on, such as 90a;100f, got {target}" in text


OLD_NVCC = """case "$1" in
  --list-gpu-code) printf 'sm_80\\nsm_90\\n';;
  --list-gpu-arch) printf 'compute_80\\ncompute_90\\n';;
  *) exec {nvcc} "$@";;
esac"""


def test_targets_that_the_compiler_does_not_know_are_left_out(tmp_path):
    status, text = _choose(tmp_path, "auto", compiler=OLD_NVCC)
    assert status == 0, text
    assert "nvcc does not know sm_100, building without it" in text
    assert "nvcc does not know sm_120, building without it" in text
    assert "known=90a. ptx=ON." in text
    assert "code=compute_80;SHELL:-gencode arch=compute_90,code=[sm_90]." in text


def test_modern_targets_share_one_pass_and_older_ones_have_their_own(tmp_path):
    names = "; ".join(f"echo {kind}_{n}" for kind in ("sm", "compute") for n in (80, 89, 90, 100, 120))
    text = _choose(tmp_path, "89;90a;100f;120f", compiler=names)[1]
    passes = ["compute_80,code=compute_80", "compute_89,code=sm_89", "compute_90,code=[sm_90,sm_100,sm_120]"]
    assert "flags=" + ";".join(f"SHELL:-gencode arch={p}" for p in passes) + "." in text


@pytest.mark.parametrize(
    ("targets", "version", "shared", "own"),
    [
        ("90a;100f;120f", "13.0.88", "sm_90", "100f 120f"),
        ("90a;100a", "12.8.61", "sm_90", "100a"),
        ("90a;100f", "12.8.61", "sm_90,sm_100", ""),
        ("120;100a", "12.7", "sm_120,sm_100", ""),
    ],
)
def test_targets_that_convert_to_e2m1_have_a_pass_of_their_own(tmp_path, targets, version, shared, own):
    names = "; ".join(f"echo {kind}_{n}" for kind in ("sm", "compute") for n in (80, 90, 100, 120))
    text = _choose(tmp_path, targets, compiler=names, version=version)[1]
    passes = ["compute_80,code=compute_80", f"compute_90,code=[{shared}]"]
    passes += [f"compute_{target},code=sm_{target}" for target in own.split()]
    assert "e2m1=" + ";".join(f"SHELL:-gencode arch={p}" for p in passes) + "." in text


def _configure(tmp_path, nvcc, *options):
    """Configures the project as a build does, with a program called nvcc on PATH."""
    pytest.importorskip("nanobind", reason="needs the build requirement nanobind")
    folder = _program(tmp_path / "bin", "nvcc", nvcc).parent
    build = ("-S", ROOT, "-B", tmp_path / "build", f"-DPython_EXECUTABLE={sys.executable}")
    return _cmake(*build, *options, path=folder)


def _real_nvcc():
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        skip_or_fail("cuda", "no nvcc on PATH")
    return nvcc


# ---------------------------------------------------------------- kernels of Hopper
SPILLED = {
    "sm90/f16_grouped.cu": 140,
    "sm90/bf16_grouped.cu": 140,
}  # bytes: tiles of half the rows are code beside the others
HOPPER = [f"sm90/{name}.cu" for name in ("f16_fused", "bf16_fused", "small_m", "grouped_small_m", "windows", "pinned")]


def _registers(cubin):
    """Of each kernel of a cubin, an ELF file: what a thread has when it is launched, attribute REGCOUNT of .nv.info."""
    data = cubin.read_bytes()

    def text(at):
        return data[at : data.index(b"\0", at)].decode()

    table, size, count, names = (*struct.unpack_from("<Q", data, 40), *struct.unpack_from("<3H", data, 58))
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    at = {text(headers[names][4] + h[0]): h[4:] for h in headers}  # where a section is, and its size
    found, (i, length) = {}, at[".nv.info"]
    end = i + length
    while i < end:
        form, attribute, value = struct.unpack_from("<BBH", data, i)
        if (form, attribute) == (4, 0x2F):
            symbol, registers = struct.unpack_from("<II", data, i + 4)
            name = struct.unpack_from("<I", data, at[".symtab"][0] + 24 * symbol)[0]
            found[text(at[".strtab"][0] + name)] = registers
        i += 4 + (value if form == 4 else 0)
    return found


def _setmaxnreg(ptx):
    """Of each kernel that moves registers: its threads, what a warpgroup gives and what the others take."""
    for entry in re.split(r"\.visible \.entry |\.entry ", ptx)[1:]:
        found = dict(re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+)", entry))
        if found:
            yield entry[: entry.index("(")], int(re.search(r"\.maxntid (\d+)", entry)[1]), found["dec"], found["inc"]


@pytest.mark.long
@pytest.mark.parametrize("source", [*HOPPER, *SPILLED])
def test_ptxas_neither_spills_nor_waits_in_kernels_of_hopper(tmp_path, source):
    """Its messages C75xx say that it has put waits between instructions wgmma.

    And warps that take registers would wait for ever if the others had given too few: a warpgroup gives some of those
    that the machine code says it is launched with, and all others take no more in all.
    """
    flags = ["-std=c++20", "-O3", "-fmad=false", "-arch=sm_90a", "-Xptxas", "-v", "-keep", "-keep-dir", tmp_path]
    file = ROOT / "ffi" / "cuda" / "matmul" / source
    done = subprocess.run([_real_nvcc(), *flags, "-cubin", "-o", tmp_path / "x", file], capture_output=True, text=True)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    assert max(int(n) for pair in spills for n in pair) <= SPILLED.get(source, 0), text
    assert not re.search(r"C75\d\d|warning|setmaxnreg", text), text
    launched, moved = _registers(tmp_path / "x"), list(_setmaxnreg((tmp_path / f"{file.stem}.ptx").read_text()))
    assert bool(moved) == ("small_m" not in source)
    for kernel, threads, given, taken in moved:
        assert int(given) <= launched[kernel] <= int(taken)
        assert 128 * int(given) + (threads - 128) * int(taken) <= threads * launched[kernel]


def test_a_compiler_that_fails_leaves_the_cpu_module(tmp_path):
    status, text = _configure(tmp_path, "exit 1", "-DJNVFP4_CUDA=auto")
    assert status == 0, text
    assert "jnvfp4: no CUDA compiler that works was found, building for the CPU only" in text
    status, text = _configure(tmp_path, "exit 1", "-DJNVFP4_CUDA=on")
    assert status == 1
    assert "JNVFP4_CUDA=on, but no CUDA compiler that works was found: put nvcc on PATH" in text


@pytest.mark.long
def test_a_compiler_that_is_too_old_leaves_the_cpu_module(tmp_path):
    (tmp_path / "old.h").write_text("#undef __CUDACC_VER_MAJOR__\n#define __CUDACC_VER_MAJOR__ 11\n")
    status, text = _configure(tmp_path, f'exec {_real_nvcc()} -include {tmp_path}/old.h "$@"')
    assert status == 0, text
    assert re.search(r"jnvfp4: nvcc 11[0-9.]* is older than 12.0, building for the CPU only", text), text


@pytest.mark.long
def test_a_compiler_of_fewer_targets_builds_what_it_can(tmp_path):
    old = OLD_NVCC.replace("{nvcc}", _real_nvcc())
    status, text = _configure(tmp_path, old, "-DJNVFP4_CUDA_TARGETS=90a;100f")
    assert status == 0, text
    assert "nvcc does not know sm_100, building without it" in text
    assert "jnvfp4: building CUDA kernels for sm_90a compute_80" in text
    assert "`pip install -C cmake.define.JNVFP4_CUDA=off` builds for the CPU alone" in text


# ---------------------------------------------------------------- what a module needs
# Of glibc, and libgcc, which jaxlib needs too; older glibc has functions of libc.so in further libraries.
LIBRARIES = ["libc.so.6", "libm.so.6", "libgcc_s.so.1", "libdl.so.2", "librt.so.1", "libpthread.so.0"]
LIBRARIES += ["ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"]
linux = pytest.mark.skipif(sys.platform != "linux", reason="the modules are linked so on Linux")


def needed(module: pathlib.Path) -> set[str]:
    readelf = shutil.which("readelf")
    if readelf is None:
        skip_or_fail("readelf", "no readelf on PATH")
    done = subprocess.run([readelf, "-dW", module], capture_output=True, text=True, check=True)
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", done.stdout))


@linux
def test_the_modules_bring_their_libraries():
    """Their C++ library and the CUDA runtime; cuBLASLt is looked up when it is called."""
    for module in load.extensions().values():
        assert "libc.so.6" in needed(pathlib.Path(module.__file__)) <= set(LIBRARIES)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="nanobind has a stable ABI from Python 3.12 on")
@pytest.mark.skipif(bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="it has none without a GIL")
def test_the_modules_keep_to_the_stable_abi():
    """One wheel is then for every Python from 3.12 on."""
    for module in load.extensions().values():
        assert module.__file__.endswith((".abi3.so", ".pyd"))
        pytest.importorskip("abi3audit", reason="no abi3audit")
        command = [sys.executable, "-m", "abi3audit", "--strict", "--assume-minimum-abi3", "3.12", module.__file__]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_cuda_module_is_small():
    """Its machine code for all targets is compressed."""
    if "cuda" not in load.extensions():
        skip_or_fail("cuda", "no CUDA kernels in this build")
    assert pathlib.Path(load.extensions()["cuda"].__file__).stat().st_size <= 45e6


# ---------------------------------------------------------------- a driver that is too old
@pytest.mark.parametrize("driver", [None, 0, 13000, 13020, 14000])
def test_a_driver_of_the_same_or_a_newer_cuda_runs_the_kernels(driver):
    assert load.old_driver(13000, driver) == ""


def test_kernels_are_refused_before_a_driver_that_is_too_old_fails(monkeypatch):
    module = SimpleNamespace(ffi_api=load.runtime_ffi_api(), source_hash="", cuda_version=13000, targets={"x": None})
    cpu = SimpleNamespace(ffi_api=load.runtime_ffi_api(), source_hash="", targets={})
    monkeypatch.setattr(load, "_load", lambda name: {"_cuda": module, "_cpu": cpu}[name])
    monkeypatch.setattr(load, "check_source_hash", lambda *_: None)
    monkeypatch.setattr(load, "refused", {})
    monkeypatch.setattr(load.compat, "cuda_versions", lambda: (12080, 12080))
    text = "the CUDA kernels must have a driver for CUDA 13, got one for CUDA 12; install a newer driver, or build "
    with pytest.warns(RuntimeWarning, match=re.escape(text) + "jnvfp4 with nvcc 12; the reference is used on GPUs"):
        found = load.extensions.__wrapped__()
    assert found == {"cpu": cpu}
    monkeypatch.setattr(load, "extensions", lambda: found)
    gpu = SimpleNamespace(platform="gpu", compute_capability="9.0")
    assert no_kernels(gpu).startswith(text)
    assert plans.cublaslt().reason.startswith(text)
