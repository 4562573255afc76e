"""Weights of a conversion: amaxes and codes by slices, whatever their shape, and workers that stop."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from checkpoints import DOWN, model_of, weight

import jnvfp4
from jnvfp4.checkpoints import ConvertOptions, convert_checkpoint, open_checkpoint, verify_checkpoint
from jnvfp4.checkpoints._convert import encode
from jnvfp4.checkpoints._convert.shards import in_order

SPECS = {
    "nvfp4": jnvfp4.NVFP4,
    "16x16": jnvfp4.NVFP4_2D,
    "4over6, 16x16": jnvfp4.spec.four_over_six(block_rows=16),
    "4over6 fast": jnvfp4.spec.four_over_six("mse", fast=True),
    "row": jnvfp4.ROW_SCALED,
    "4over6, row": jnvfp4.spec.four_over_six(amax_scope="row"),
    "search": jnvfp4.QuantSpec(select="search"),
    "search, row": jnvfp4.QuantSpec(jnvfp4.Format("row"), select="search"),
}


@pytest.mark.parametrize("rows", [20, 40])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_codes_are_those_of_quantize(tmp_path, spec, rows):
    """Slices of 16 rows, the last of which is no whole tile."""
    tag, w = weight(rows, 64)
    model = model_of(tmp_path / "in", {DOWN: (tag, w)})
    options = ConvertOptions(layout="te", spec=spec, chunk_bytes=1)
    convert_checkpoint(model, tmp_path / "out", options)
    got = open_checkpoint(tmp_path / "out")[DOWN]
    padded = np.concatenate([w, np.zeros((-rows % spec.block_rows, 64), w.dtype)])
    want = jnvfp4.quantize(padded, spec)
    np.testing.assert_array_equal(got.data, want.data[:rows])
    np.testing.assert_array_equal(np.asarray(got.scale).view(np.uint8), np.asarray(want.scale)[:rows].view(np.uint8))
    np.testing.assert_array_equal(got.amax, want.amax[:rows] if want.amax.ndim else want.amax)
    assert got.format == spec.format
    (record,) = verify_checkpoint(model, tmp_path / "out")
    assert record.error.relative_error < 0.12


def test_codes_of_a_slice_have_no_row_of_padding():
    device = jax.local_devices(backend="cpu")[0]
    parts = list(encode.encode(np.ones((20, 32), np.float32), np.float32(1), jnvfp4.NVFP4_2D, device, 1))
    assert [(first, codes.shape, scales.shape) for first, codes, scales in parts] == [
        (0, (16, 16), (16, 2)),
        (16, (4, 16), (4, 2)),
    ]


def test_what_is_not_finite_is_found_in_any_slice(monkeypatch):
    monkeypatch.setattr(encode, "_AMAX_BYTES", 1)  # 16 rows
    x = np.ones((64, 32), np.float32)
    x[35, 7], x[35, 3], x[60, 0] = np.inf, np.nan, -np.inf
    found = encode.find_amax(x, False)
    assert (found.not_finite, found.first) == (3, (35, 3))
    x[35] = 2
    x[60] = 1
    x[50, 1] = -3
    found = encode.find_amax(x, True)
    assert (found.not_finite, found.first) == (0, None)
    np.testing.assert_array_equal(found.value, np.abs(x).max(axis=1))


# ---------------------------------------------------------------- workers
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_are_in_the_order_of_the_tasks(workers):
    """The first task ends last, if there is a worker for another one."""
    second = threading.Event()

    def work(task):
        if task == 0 and workers > 1:
            assert second.wait(60)
        second.set()
        return task

    assert list(in_order(work, range(5), workers)) == list(range(5))


@pytest.mark.parametrize("interrupted", ["work", "loop"])
@pytest.mark.parametrize("workers", [1, 2])
def test_tasks_that_have_not_started_are_cancelled(workers, interrupted, monkeypatch):
    """The first task, or the loop over the results, is interrupted; the others end when the executor shuts down."""
    started, stopping = [], threading.Event()
    shutdown = ThreadPoolExecutor.shutdown

    def stop(executor, wait=True, *, cancel_futures=False):
        stopping.set()
        shutdown(executor, wait, cancel_futures=cancel_futures)

    def work(task):
        started.append(task)
        if task > 0:
            assert stopping.wait(60)
        elif interrupted == "work":
            raise KeyboardInterrupt

    def loop():
        for _ in in_order(work, range(100), workers):
            raise KeyboardInterrupt

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", stop)
    with pytest.raises(KeyboardInterrupt):
        loop()
    assert len(started) <= (1 if workers == 1 else 3)
