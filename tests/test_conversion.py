"""The conversion to E2M1: by the instruction of Blackwell, by that to E4M3, and by the rule, all the same codes.

tests/cpp/codes.cc runs ffi/cuda/quantize/codes.cuh on the CPU, once as compiled for Hopper and once with a model of
Blackwell's instruction. nvcc and nvdisasm show what the compiler makes of the quantizers for Blackwell, where none of
this has run.
"""

import functools
import importlib.util
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CPP = Path(__file__).parent / "cpp"
FFI = CPP.parent.parent / "ffi"
CONVERSION = "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C"


# ---------------------------------------------------------------- on a CPU
HOST = ["g++", "-std=c++20", "-O2", "-ffp-contract=off", "-pthread", f"-I{CPP}"]
MODEL = ['-DJNVFP4_E2M1_MODEL="e2m1_model.h"']


def codes(folder, flags, ffi=FFI):
    if not shutil.which("g++"):
        pytest.skip("no g++")
    program = folder / "codes"
    subprocess.run([*HOST, *flags, f"-I{ffi}", str(CPP / "codes.cc"), "-o", str(program)], check=True)
    return subprocess.run([str(program), "quick"], capture_output=True, text=True)


@functools.cache
def cuda_headers() -> Path | None:
    """The include folder of a CUDA toolkit that has cuda_fp4.h."""
    nvcc = shutil.which("nvcc")
    if not nvcc:
        return None
    done = subprocess.run([nvcc, "--dryrun", "-E", "-x", "cu", "/dev/null"], capture_output=True, text=True)
    top = re.search(r"TOP=(\S+)", done.stderr)
    folders = [Path(top[1])] if top else []
    return next((f / "include" for f in folders if (f / "include/cuda_fp4.h").is_file()), None)


@pytest.mark.parametrize("flags", [[], MODEL], ids=["e4m3", "e2m1"])
def test_codes_are_those_of_the_rule(tmp_path, flags):
    done = codes(tmp_path, flags)
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_the_model_is_that_of_nvidia(tmp_path):
    """cuda_fp4.h has what the instruction computes also for CPUs, NaN and the sign of zero included."""
    if not cuda_headers():
        pytest.skip("no CUDA toolkit with cuda_fp4.h")
    done = codes(tmp_path, [*MODEL, "-DJNVFP4_CUDA_FP4", f"-I{cuda_headers()}"])
    assert done.returncode == 0, done.stdout
    assert "model, against cuda_fp4.h: 0 of" in done.stdout


MISTAKES = {
    "scaled": ("kE2M1 ? 1.0f : 64.0f", "kE2M1 ? 2.0f : 64.0f", MODEL),
    "NaN": ("scale == kScaleNan ?", "false ?", MODEL),
    "last bit": ("kLast = 0x11111111u", "kLast = 0x22222222u", MODEL),
    "quarters": ("(word[0] >> 2) + 4 * word[2]", "(word[0] >> 2) + 4 * word[1]", []),
    "saturation": ("(c | static_cast<uint32_t>(sevens)) & 0x77777777u", "c", []),
}


@pytest.mark.long
@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_mistakes_are_found(tmp_path, mistake):
    right, wrong, flags = MISTAKES[mistake]
    shutil.copytree(FFI, tmp_path / "ffi")
    file = tmp_path / "ffi/cuda/quantize/codes.cuh"
    text = file.read_text()
    assert text.count(right) == 1
    file.write_text(text.replace(right, wrong))
    done = codes(tmp_path, flags, tmp_path / "ffi")
    assert done.returncode == 1, done.stdout


# ---------------------------------------------------------------- machine code
FLAGS = ["-std=c++20", "-fmad=false", "-Xptxas=-v", f"-I{FFI}"]


def nvdisasm() -> str:
    """nvdisasm of a toolkit, or of the wheel nvidia-cuda-nvdisasm."""
    found = shutil.which("nvdisasm")
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations or []) if spec else []
    wheels = [file for folder in folders for file in Path(folder).glob("*/bin/nvdisasm")]
    if not found and not wheels:
        pytest.skip("no nvdisasm (pip install nvidia-cuda-nvdisasm)")
    return found or str(wheels[0])


def compiled(source, target, folder) -> tuple[dict[str, list[str]], dict[str, tuple[int, int]]]:
    """Of each kernel its instructions, and the bytes that it spills: stores and loads."""
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc")
    disassembler, cubin = nvdisasm(), folder / "x.cubin"
    target_flag = f"-gencode=arch=compute_{target},code=sm_{target}"
    command = ["nvcc", *FLAGS, target_flag, "-cubin", str(source), "-o", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "Unsupported gpu architecture" in done.stderr:
        pytest.skip(f"this nvcc does not know {target}")
    assert done.returncode == 0, done.stderr
    text = subprocess.run([disassembler, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    parts = re.split(r"^\s*\.section\s+\.text\.([\w$]+).*$", text, flags=re.M)
    code = {
        name: re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", body, flags=re.M)
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }
    spilled = re.findall(
        r"Compiling entry function '(\S+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr, flags=re.S
    )
    return code, {name: (int(stores), int(loads)) for name, stores, loads in spilled}


EIGHT = """
#include "cuda/quantize/codes.cuh"
__global__ void eight(const float* a, unsigned* codes) { codes[threadIdx.x] = jnvfp4::e2m1_codes(a + 8 * threadIdx.x); }
"""
WITH = ["100a", "100f", "103a", "103f", "110f", "120a", "120f", "121a", "121f"]
WITHOUT = ["90a", "100", "120"]


@pytest.mark.parametrize(
    "target", [t if t in ("90a", "100f") else pytest.param(t, marks=pytest.mark.long) for t in WITH + WITHOUT]
)
def test_targets_with_the_instruction_use_it(tmp_path, target):
    """Eight codes take four instructions, each of which adds its pair of codes to the word of the one before."""
    (tmp_path / "eight.cu").write_text(EIGHT)
    code = compiled(tmp_path / "eight.cu", target, tmp_path)[0].popitem()[1]
    conversions = [i.split(maxsplit=1)[1].replace(".reuse", "").split(", ") for i in code if i.startswith(CONVERSION)]
    assert len(conversions) == (4 if target in WITH else 0)
    if conversions:
        chain = [(into, before) for into, _, _, before in conversions]
        assert chain[0][1] == "RZ"
        assert all(before == into for (into, _), (_, before) in itertools.pairwise(chain))


# Kernels of bfloat16 with an amax that is given or one of a window: what recipes call.
HOT = re.compile(r"quantize_with_(shared_scales|row_amax|window_amax)_kernel.*4Bf16E")


@pytest.mark.long
@pytest.mark.parametrize("target", ["100f", "120f"])
def test_quantizers_along_rows_convert_by_the_instruction_and_do_not_spill(tmp_path, target, record_property):
    """Every kernel has at least the eight conversions of a block. Those that spill, none of them hot, are recorded."""
    code, spilled = compiled(FFI / "cuda/quantize/rows.cu", target, tmp_path)
    assert set(code) == set(spilled)
    few = [name for name, instructions in code.items() if sum(CONVERSION in i for i in instructions) < 8]
    assert not few
    spilling = {name: found for name, found in spilled.items() if found != (0, 0)}
    record_property("spilling", spilling)
    assert sum(bool(HOT.search(name)) for name in code) == 14
    assert not [name for name in spilling if HOT.search(name)], spilling
