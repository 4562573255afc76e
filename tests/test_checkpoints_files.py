"""Files of a checkpoint: complete or absent, read without filling memory, and copied where they belong to a model."""

import os
import re
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from checkpoints import DOWN, files_of, model_of, weight, write, write_model

from jnvfp4.checkpoints import (
    CheckpointError,
    ConvertOptions,
    convert_checkpoint,
    dequantize_checkpoint,
    repack_checkpoint,
)
from jnvfp4.checkpoints._files.files import remove_temporaries, slices, temporary_of
from jnvfp4.checkpoints._files.safetensors import File, Planned, header_bytes, writing


# ---------------------------------------------------------------- writing
def test_writers_have_temporary_files_of_their_own(tmp_path):
    """Also two threads of one process. Those of other files, which another command may write, stay."""
    paths = {temporary_of(tmp_path / "a.json") for _ in range(20)}
    assert len(paths) == 20
    for path in paths:
        path.write_text("part")
    other = temporary_of(tmp_path / "b.json")
    other.write_text("part")
    remove_temporaries(tmp_path, {"a.json"})
    assert files_of(tmp_path) == {other.name: b"part"}


def test_shards_come_first_and_the_index_last(tmp_path, monkeypatch):
    """A shard is on the disk before it gets its name, and has its name before it is recorded."""
    shards = {f"model-0000{i}-of-00002.safetensors": {f"a.{i}.down_proj.weight": weight(16, 32)} for i in (1, 2)}
    model = write_model(tmp_path / "in", shards)
    (model / "tokenizer.json").write_text("{}")
    calls, fsync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync") or fsync(descriptor))
    monkeypatch.setattr(Path, "replace", lambda path, to: calls.append(Path(to).name) or replace(path, to))
    convert_checkpoint(model, tmp_path / "out")
    record = ".jnvfp4-progress.json"
    assert calls == [
        *(record, "fsync", "model-00001-of-00002.safetensors"),
        *(record, "fsync", "model-00002-of-00002.safetensors"),
        *(record, "tokenizer.json", "config.json", "hf_quant_config.json", "model.safetensors.index.json"),
    ]


def test_a_header_is_sorted(tmp_path):
    planned = [Planned(name, "U8", (2,)) for name in "cab"]
    with writing(tmp_path / "a", planned, {}) as file:
        for i, name in enumerate("cab"):
            file.put(name, np.full(2, i, np.uint8))
    read = File(tmp_path / "a")
    assert list(read.entries) == sorted("cab")
    assert [e.begin for e in read.entries.values()] == [len(header_bytes(planned, {})) + 2 * i for i in range(3)]
    assert [int(read.array(name)[0]) for name in "abc"] == [1, 2, 0]


# ---------------------------------------------------------------- reading
def test_what_is_read_is_what_is_viewed(tmp_path, monkeypatch):
    """A read may also be short."""
    tensors = {"a": weight(5, 3), "empty": ("F32", np.zeros((0, 4), np.float32)), "one": ("F64", np.float64(3)),
               "stack": ("U8", np.arange(24, dtype=np.uint8).reshape(2, 3, 4))}  # fmt: skip
    write(tmp_path / "a.safetensors", tensors)
    file, preadv = File(tmp_path / "a.safetensors"), os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, parts, at: preadv(descriptor, [parts[0][:7]], at))
    for name in tensors:
        got, want = file.read(name), file.array(name)
        assert (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, want.tobytes())
    for rows in (slice(1, 3), slice(4, 9), slice(2, 2)):
        assert file.read("a", rows).tobytes() == file.array("a")[rows].tobytes()
    assert file.read("stack", slice(1, 2)).tobytes() == bytes(range(12, 24))


def test_a_file_is_closed_with_its_object(tmp_path):
    write(tmp_path / "a.safetensors", {"a": weight(1, 1)})
    before = len(os.listdir("/dev/fd"))
    file = File(tmp_path / "a.safetensors")
    assert file.array("a").shape == (1, 1)
    assert len(os.listdir("/dev/fd")) > before
    del file
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize("how", ["array", "read"])
def test_a_file_that_was_truncated_before_it_is_used(tmp_path, how):
    write(tmp_path / "a.safetensors", {"a": weight(16, 32)})
    file = File(tmp_path / "a.safetensors")
    os.truncate(file.path, 300)
    with pytest.raises(CheckpointError, match=r"a.safetensors: has changed while it was read \(truncated\)"):
        getattr(file, how)("a")


def test_a_file_that_cannot_be_read_is_not_called_the_output(tmp_path, monkeypatch):
    model = model_of(tmp_path / "in", {DOWN: weight(16, 32)})

    monkeypatch.setattr(os, "preadv", mock.Mock(side_effect=OSError(116, "Stale file handle")))
    with pytest.raises(CheckpointError, match=r"in/model.safetensors: cannot be read \(Stale file handle\)$") as error:
        convert_checkpoint(model, tmp_path / "out")
    assert error.value.code == 6


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
def with_a_template(directory) -> None:
    (directory / "additional_chat_templates" / "more").mkdir(parents=True)
    for name in ("tool.jinja", "more/rag.jinja"):
        (directory / "additional_chat_templates" / name).write_text(name)


@pytest.mark.parametrize("inside", [False, True])
def test_folders_of_text_are_copied(tmp_path, inside):
    """Also if the output is in the model, whose other folders are copied and not the output into itself."""
    model = model_of(tmp_path / "in", {DOWN: weight(16, 32)})
    with_a_template(model)
    out = model / "out" if inside else tmp_path / "out"
    result = convert_checkpoint(model, out, ConvertOptions(weight_only=True))
    assert result.warnings == ()
    assert sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()) == [
        "additional_chat_templates/more/rag.jinja",
        "additional_chat_templates/tool.jinja",
        "config.json",
        "hf_quant_config.json",
        "model.safetensors",
    ]
    assert (out / "additional_chat_templates" / "tool.jinja").read_text() == "tool.jinja"


WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "a.pt", "b.pth", "c.gguf", ".hidden", ".cache.json")
KNOWN = ("tokenizer.json", "tokenizer.model", "merges.txt", "chat.jinja", "modeling.py", "README.md", "LICENSE-MODEL")
MADE = ("config.json", "hf_quant_config.json", "model.safetensors", "additional_chat_templates")
WRITERS = {"convert": partial(convert_checkpoint, options=ConvertOptions(weight_only=True)),
           "dequantize": dequantize_checkpoint, "repack": partial(repack_checkpoint, layout="modelopt")}  # fmt: skip


@pytest.mark.parametrize("single_file", [False, True], ids=["folder", "file"])
@pytest.mark.parametrize("writer", WRITERS)
def test_other_files_are_copied_or_have_a_warning(tmp_path, writer, single_file):
    """Links are copied as files. What is beside a single file may be of something else."""
    model = model_of(tmp_path / "in", {DOWN: weight(16, 32)})
    if writer != "convert":
        convert_checkpoint(model, model := tmp_path / "nvfp4", ConvertOptions(weight_only=True))
    with_a_template(model)
    for name in (*WEIGHTS, *KNOWN, "notes.tar"):
        (model / name).write_text(name)
    for name in ("onnx", "empty", "linked", "old.bin"):
        (model / name).mkdir()
    (model / "onnx" / "model.onnx").write_bytes(b"x")
    (model / "onnx" / "config.json").write_text("{}")
    (tmp_path / "secret.txt").write_text("x")
    inside = {"there": "onnx", "null.txt": "/dev/null", "inner.json": "tokenizer.json", "dangling.json": "no.json"}
    for link, target in {**inside, **dict.fromkeys(("linked/x.txt", "outer.json"), tmp_path / "secret.txt")}.items():
        (model / link).symlink_to(target)
    os.mkfifo(model / "pipe")
    found = []
    arguments = (model / "model.safetensors" if single_file else model, tmp_path / "out")
    if writer == "convert":
        found += WRITERS[writer](*arguments).warnings
    else:
        WRITERS[writer](*arguments, warn=found.append)
    of_folders = {
        "empty": "an empty folder",
        "linked": "a folder with linked/x.txt, a link out of the directory",
        "old.bin": "an empty folder",
        "onnx": "a folder with onnx/model.onnx, whose name is not a text file's",
        "pipe": "no regular file",
        "there": "a link to a folder",
    }
    reasons = {
        "dangling.json": "a link to nothing",
        "null.txt": "a link to something that is no file",
        "outer.json": "a link out of the directory",
        **({} if single_file else of_folders),
    }
    assert found == [f"{model / name}: {reason}, not copied" for name, reason in sorted(reasons.items())]
    copied = {p.name: p.read_text() for p in (tmp_path / "out").iterdir() if p.name not in MADE}
    assert copied.pop("inner.json") == "tokenizer.json"
    assert copied == {name: name for name in (KNOWN if single_file else (*KNOWN, "notes.tar"))}
    assert (tmp_path / "out" / "additional_chat_templates").exists() != single_file
    assert not (tmp_path / "out" / "inner.json").is_symlink()


def test_parts_of_copies_in_folders_are_removed(tmp_path):
    """A killed run leaves them."""
    model = model_of(tmp_path / "in", {DOWN: weight(16, 32)})
    with_a_template(model)
    folder = tmp_path / "out" / "additional_chat_templates"
    folder.mkdir(parents=True)
    (folder / "tool.jinja.tmp-12").write_text("to")
    convert_checkpoint(model, tmp_path / "out", overwrite=True)
    assert {p.name for p in folder.iterdir()} == {"tool.jinja", "more"}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_folder_with_the_name_of_a_config_is_not_called_missing(tmp_path, name):
    model = model_of(tmp_path / "in", {DOWN: weight(16, 32)})
    (model / name).unlink(missing_ok=True)
    (model / name).mkdir()
    with pytest.raises(CheckpointError, match=f"{name}: is no regular file; expected a JSON file"):
        convert_checkpoint(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
