"""Comparing arrays bit for bit."""

import jax
import ml_dtypes
import numpy as np

_WIDTH = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits(a) -> np.ndarray:
    """The array's bit patterns, as unsigned integers."""
    a = np.asarray(a)
    return np.ascontiguousarray(a).view(_WIDTH[a.dtype.itemsize]) if a.ndim else a.reshape(1).view(_WIDTH[a.dtype.itemsize])


def assert_bitwise(got, want, what: str = "array") -> None:
    """Equal shapes, dtypes and bits; the message locates the first difference."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    g, w = bits(got).reshape(-1), bits(want).reshape(-1)
    wrong = np.flatnonzero(g != w)
    if wrong.size:
        at = tuple(int(i) for i in np.unravel_index(wrong[0], got.shape)) if got.ndim else ()
        raise AssertionError(
            f"{what}: {wrong.size} of {g.size} elements differ, first at {at}: "
            f"got {g[wrong[0]]:#x}, expected {w[wrong[0]]:#x}"
        )


def assert_same_tensor(got, want, what: str = "tensor") -> None:
    """Two NVFP4Tensors (or any pytrees of arrays) with the same structure and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want), what
    paths = jax.tree_util.tree_leaves_with_path(want)
    for leaf, (path, other) in zip(jax.tree.leaves(got), paths, strict=True):
        assert_bitwise(leaf, other, what + jax.tree_util.keystr(path))


def unpack_codes(data) -> np.ndarray:
    """uint8 [..., K/2] -> E2M1 codes [..., K]."""
    data = np.asarray(data)
    return np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], 2 * data.shape[-1])


def from_storage(a: np.ndarray, dtype: str) -> np.ndarray:
    """bfloat16 is stored as uint16 bits in .npz files."""
    return a.view(ml_dtypes.bfloat16) if dtype == "bfloat16" and a.dtype == np.uint16 else a
