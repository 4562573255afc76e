"""Files of a checkpoint: complete or absent, read without filling memory, and copied where they belong to a model."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from checkpoints import DOWN, files_of, weight, write, write_model

from jnvfp4.checkpoints import convert_checkpoint
from jnvfp4.checkpoints._files.companions import copy_companions
from jnvfp4.checkpoints._files.files import slices, temporary_of
from jnvfp4.checkpoints._files.safetensors import File, Planned, Writer, header_bytes


# ---------------------------------------------------------------- writing
def test_processes_have_temporary_files_of_their_own(tmp_path, monkeypatch):
    names = []
    for process in (1, 23):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        names.append(temporary_of(tmp_path / "a.json").name)
    assert names == ["a.json.tmp-1", "a.json.tmp-23"]


def recorded(monkeypatch) -> list[str]:
    """Notes what is synchronized and what is renamed, in order."""
    calls, fsync, replace = [], os.fsync, Path.replace

    def sync(descriptor):
        calls.append("fsync")
        fsync(descriptor)

    def rename(path, target):
        calls.append(Path(target).name)
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", rename)
    return calls


def test_shards_come_first_and_the_index_last(tmp_path, monkeypatch):
    """A shard is on the disk before it gets its name, and has its name before it is recorded."""
    shards = {f"model-0000{i}-of-00002.safetensors": {f"a.{i}.down_proj.weight": weight(16, 32)} for i in (1, 2)}
    model = write_model(tmp_path / "in", shards)
    (model / "tokenizer.json").write_text("{}")
    calls = recorded(monkeypatch)
    convert_checkpoint(model, tmp_path / "out")
    record = ".jnvfp4-progress.json"
    assert calls == [
        *(record, "fsync", "model-00001-of-00002.safetensors"),
        *(record, "fsync", "model-00002-of-00002.safetensors"),
        *(record, "tokenizer.json", "config.json", "hf_quant_config.json", "model.safetensors.index.json"),
    ]


def test_a_header_is_sorted(tmp_path):
    planned = [Planned(name, "U8", (2,)) for name in "cab"]
    with Writer(tmp_path / "a", planned, {}) as file:
        for i, name in enumerate("cab"):
            file.put(name, np.full(2, i, np.uint8))
    read = File(tmp_path / "a")
    assert list(read.entries) == sorted("cab")
    assert [e.begin for e in read.entries.values()] == [len(header_bytes(planned, {})) + 2 * i for i in range(3)]
    assert [int(read.array(name)[0]) for name in "abc"] == [1, 2, 0]


# ---------------------------------------------------------------- slices
@pytest.mark.parametrize("shape", [(40, 64), (16, 8), (100, 3)])
@pytest.mark.parametrize("max_bytes", [1, 2000, 3333, 1 << 20])
def test_slices_of_a_matrix_do_not_cut_tiles(shape, max_bytes):
    parts = list(slices(shape, 2, max_bytes))
    assert [i for part in parts for i in range(shape[0])[part]] == list(range(shape[0]))
    assert all(part.start % 16 == 0 for part in parts)
    row = 2 * shape[1]
    assert all(part.stop - part.start <= max(16, max_bytes // row) for part in parts)
    assert len(parts) <= -(-shape[0] // max(16, max_bytes // row // 16 * 16))


# ---------------------------------------------------------------- memory
def resident(path) -> int:
    """Bytes of a mapped file that are in this process's memory."""
    blocks = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    return sum(int(re.search(r"^Rss: +(\d+) kB", b, re.M)[1]) << 10 for b in blocks if str(path) in b.split("\n")[0])


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="reads Rss of /proc")
def test_released_tensors_are_not_in_memory(tmp_path):
    path = tmp_path / "a.safetensors"
    write(path, {"a": ("U8", np.ones(1 << 22, np.uint8)), "b": ("U8", np.ones(1 << 22, np.uint8))})
    file = File(path)
    assert all(int(file.array(name).sum()) == 1 << 22 for name in "ab")
    assert resident(path) >= 1 << 23
    file.release("a")
    assert 1 << 22 <= resident(path) < (1 << 22) + (1 << 20)
    file.release("b")
    assert resident(path) < 1 << 20
    assert int(file.array("a").sum()) == 1 << 22


# ---------------------------------------------------------------- other files
@pytest.mark.parametrize("single_file", [False, True])
def test_hidden_files_are_not_copied(tmp_path, single_file):
    model = write_model(tmp_path / "in", {"model.safetensors": {DOWN: weight(16, 32)}})
    for name in (".gitattributes", ".cache.json", "tokenizer.json"):
        (model / name).write_text("{}")
    (tmp_path / "out").mkdir()
    assert copy_companions(model, tmp_path / "out", single_file) == ()
    assert files_of(tmp_path / "out") == {"tokenizer.json": b"{}"}
