"""Products through cuBLASLt where there is no GPU: the host files of ``ffi/`` with a stand-in for the library.

They run in a process of their own: one with JAX's CUDA plugin has the real library, which would be found first.
"""

import atexit
import ctypes
import functools
import pathlib
import pickle
import shutil
import subprocess
import sys
import tempfile

import numpy as np

CPP = pathlib.Path(__file__).parent / "cpp"
FFI = CPP.parent.parent / "ffi"
SOURCES = [
    CPP / "block_scaled.cc",
    *sorted(FFI.glob("plan/*.cc")),
    *(FFI / f"cuda/matmul/{name}.cc" for name in ("launch", "cublaslt/library", "cublaslt/gemm", "cublaslt/nvfp4")),
]
FLAGS = ["-std=c++20", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{FFI}"]
# Float of ffi/core/arrays.h
FLOATS = {"float32": (0, np.uint32), "bfloat16": (1, np.uint16), "float16": (2, np.uint16)}


def compiler() -> str | None:
    return shutil.which("g++")


@functools.cache
def built() -> tuple[pathlib.Path, pathlib.Path]:
    """Builds the products and the stand-in, once; returns their paths."""
    kept = tempfile.TemporaryDirectory(prefix="jnvfp4-stand-in-")
    atexit.register(kept.cleanup)
    folder = pathlib.Path(kept.name)
    products, library = folder / "products.so", folder / "libcublasLt.so.13"
    commands = [
        [*FLAGS, f"-I{CPP / 'host_cuda'}", *map(str, SOURCES), "-ldl", "-o", str(products)],
        [*FLAGS, str(CPP / "cublaslt_stand_in.cc"), f"-Wl,-soname,{library.name}", "-ldl", "-o", str(library)],
    ]
    for command in commands:
        subprocess.run([str(compiler()), *command], check=True)
    return products, library


class Process:
    """The functions below, called in another process: ``Process(...)("multiply", ...)``."""

    def __init__(self, *paths: pathlib.Path):
        self._process = subprocess.Popen(
            [sys.executable, __file__, *map(str, paths)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __call__(self, function: str, *args):
        pickle.dump((function, args), self._process.stdin)
        self._process.stdin.flush()
        answer = pickle.load(self._process.stdout)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


@functools.cache
def started() -> Process:
    """The process that all tests share."""
    process = Process(*built())
    atexit.register(process.close)
    return process


# ---------------------------------------------------------------- in that process
class Operand(ctypes.Structure):
    _fields_ = (
        *(("data", ctypes.c_void_p), ("scale", ctypes.c_void_p), ("amax", ctypes.c_void_p)),
        *(("rows_per_amax", ctypes.c_int64), ("e4m3_max", ctypes.c_int32)),
    )


class Products:
    def __init__(self, products: str, library: str):
        self._calls, self._library = ctypes.CDLL(products), ctypes.CDLL(library)
        for name in ("find_library", "multiply", "numbers"):
            getattr(self._calls, name).restype = ctypes.c_char_p
        for name in ("first_rows_without_bijection", "tiles_bytes"):
            getattr(self._calls, name).restype = ctypes.c_int64
        if reason := self._calls.find_library(library.encode()):
            raise RuntimeError(reason.decode())

    def without_bijection(self, rows: int, cols: int) -> int:
        return self._calls.first_rows_without_bijection(ctypes.c_int64(rows), ctypes.c_int64(cols))

    def tiles(self, scale: np.ndarray) -> np.ndarray:
        matrices, rows, cols = scale.shape
        size = self._calls.tiles_bytes(ctypes.c_int64(rows), ctypes.c_int64(cols))
        out, scale = np.full((matrices, size), 0xEE, np.uint8), aligned(scale)
        sizes = (ctypes.c_int64(n) for n in (matrices, rows, cols))
        self._calls.make_tiles(pointer(scale), pointer(out), *sizes)
        return out

    def padded(self, data: np.ndarray, rows: int, pieces: int) -> np.ndarray:
        data, out = aligned(data), np.full((len(data), rows, pieces), 0xEE, np.uint64)
        sizes = (ctypes.c_int64(n) for n in (*data.shape, rows, pieces))
        self._calls.pad_codes(pointer(data), pointer(out), *sizes)
        return out

    def numbers(self) -> dict[str, int]:
        lines = self._calls.numbers().decode().splitlines()
        return {name: int(number) for name, number in (line.split("\t") for line in lines)}

    def describe(self, *args: int) -> int:
        return self._calls.describe(*args)

    def version(self) -> int:
        self._library.cublasLtGetVersion.restype = ctypes.c_size_t
        return self._library.cublasLtGetVersion()

    def reset(self, device: int) -> None:
        self._library.stand_in_reset()
        self._calls.use_device(device)
        self._calls.fail_launches(False)
        self._calls.keep_padding(False)

    def fail(self, function: str, status: int) -> None:
        if function == "launch":
            self._calls.fail_launches(True)
        else:
            self._library.stand_in_fail(function.encode(), status)

    def go_wrong(self, fault: str) -> None:
        """With "layout", "alpha", "padding" or "nan"; the padding of scales is then left as it was."""
        self._calls.keep_padding(fault == "padding")
        self._library.stand_in_fault(fault.encode())

    def use_version(self, version: int) -> None:
        self._library.stand_in_version(ctypes.c_size_t(version))

    def complaint(self) -> str:
        self._library.stand_in_complaint.restype = ctypes.c_char_p
        return self._library.stand_in_complaint().decode()

    def alive(self) -> int:
        return self._library.stand_in_alive()

    def multiply(self, a: dict, b: dict, bias, out: str, shape, capability: int, wanted: str) -> tuple:
        """Returns the bits of the result, the kernel that ran and the error; an operand is a dict of arrays."""
        batch, rows, cols, depth = shape
        kept = [aligned(part) for t in (a, b) for part in (t["data"], t["scale"], t["amax"])]
        operands = [
            Operand(*map(pointer, kept[i : i + 3]), t["rows_per_amax"], t["e4m3_max"]) for i, t in ((0, a), (3, b))
        ]
        kind, stored = FLOATS[out]
        bits, bias_kind = aligned(np.zeros((batch, rows, cols), stored)), 0
        if bias is not None:
            bias_kind, bias = FLOATS[bias[0]][0], aligned(bias[1])
        kernel = ctypes.create_string_buffer(64)
        sizes = (ctypes.c_int64(size) for size in (batch, rows, cols, depth))
        error = self._calls.multiply(
            *(ctypes.byref(operands[0]), ctypes.byref(operands[1]), pointer(bias), bias_kind, pointer(bits), kind),
            *(*sizes, capability, wanted.encode(), kernel),
        )
        return np.array(bits), kernel.value.decode(), error.decode()


def aligned(array: np.ndarray | None) -> np.ndarray | None:
    """Copies an array to where XLA would have it: at a multiple of 64 bytes."""
    if array is None:
        return None
    memory = np.zeros(array.nbytes + 64, np.uint8)
    first = -memory.ctypes.data % 64
    copy = memory[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def pointer(array: np.ndarray | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def serve() -> None:
    products = Products(*sys.argv[1:])
    while True:
        try:
            function, args = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = getattr(products, function)(*args)
        except Exception as error:
            answer = error
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
