"""Bad input of the converter: the exit code, a line that names file and tensor, and nothing left behind."""

import errno
import json
import os
import pickle
import re
import shutil
import types
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from checkpoints import (
    DOWN,
    GATE,
    INDEX,
    UP,
    damaged_header,
    files_of,
    header_of,
    model_of,
    refused,
    weight,
    with_header,
    write,
    write_model,
)

from jnvfp4.checkpoints import (
    CheckpointError,
    ConvertOptions,
    convert_checkpoint,
    dequantize_checkpoint,
    diff,
    inspect,
    lint,
    open_checkpoint,
    repack_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from jnvfp4.checkpoints._convert.plan import make_plan
from jnvfp4.checkpoints._files import companions
from jnvfp4.checkpoints._files.safetensors import DTYPES
from jnvfp4.checkpoints._files.source import open_source
from jnvfp4.checkpoints._layouts.stored import open_stored
from jnvfp4.cli import main

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NORM = "model.norm.weight"
SHARDS = {
    A: {GATE: weight(32, 64), UP: weight(32, 64, 1)},
    B: {DOWN: weight(64, 32, 2), NORM: ("F32", np.ones(64, np.float32))},
}


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "in", SHARDS)


def converted(directory, tmp_path, *arguments, out="out") -> dict[str, bytes]:
    assert main(["convert", str(directory), str(tmp_path / out), *arguments]) == 0
    return files_of(tmp_path / out)


# ---------------------------------------------------------------- index and shards
def edit_map(change):
    def edit(model):
        index = json.loads((model / INDEX).read_text())
        change(index["weight_map"])
        (model / INDEX).write_text(json.dumps(index))

    return edit


def rewrite(name, text):
    return lambda model: (model / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def gate_twice(model):
    write(model / B, {**SHARDS[B], GATE: SHARDS[A][GATE]})


FILES = {
    "missing shard": (lambda m: (m / B).unlink(), rf"{B}: is missing; expected a file"),
    "missing shard, link": (lambda m: ((m / B).unlink(), (m / B).symlink_to("no")), rf"{B}: is a link that leads"),
    "loop of links": (lambda m: ((m / B).unlink(), (m / B).symlink_to(B)), rf"{B}: is a link that leads to no file"),
    "shard that is a folder": (lambda m: ((m / B).unlink(), (m / B).mkdir()), rf"{B}: is no regular file"),
    "shard that is a FIFO": (lambda m: ((m / B).unlink(), os.mkfifo(m / B)), rf"{B}: is no regular file"),
    "named shard missing": (edit_map(lambda w: w.update({NORM: "model-9.safetensors"})), "model-9.*is missing"),
    "key absent in shard": (edit_map(lambda w: w.update(nothing=A)), rf"{INDEX}: .*'nothing'.*{A}, .*no such tensor"),
    "key absent in index": (edit_map(lambda w: w.pop(NORM)), rf"{INDEX}: tensor '{NORM}'.*in {B}, .*not in the index"),
    "key in another shard": (edit_map(lambda w: w.update({NORM: A})), rf"{INDEX}: .*{NORM}.*in {A}, but is in {B}"),
    "key in two shards": (gate_twice, rf"tensor '{GATE}': is in {A} and in {B}"),
    "nothing": (shutil.rmtree, "in: does not exist; expected a directory or a file"),
    "empty folder": (lambda m: [p.unlink() for p in m.iterdir()], r"in: has no \*\.safetensors file$"),
    "no tensor": (lambda m: (shutil.rmtree(m), model_of(m, {})), "in: has no tensor; expected a model"),
    "key in two shards, no index": (
        lambda m: (gate_twice(m), (m / INDEX).unlink()), rf"tensor '{GATE}': is in {A} and in {B}"),
    "path up": (edit_map(lambda w: w.update({NORM: f"../in/{B}"})), rf"{NORM}.*'../in/{B}'; expected a name without a"),
    "dots": (edit_map(lambda w: w.update({NORM: ".."})), r"'\.\.'; expected a name that ends in .safetensors"),
    "absolute path": (edit_map(lambda w: w.update({NORM: "/etc/passwd"})), "'/etc/passwd'; expected a name without"),
    "backslash": (edit_map(lambda w: w.update({NORM: "..\\x"})), "expected a name without a folder"),
    "zero byte": (edit_map(lambda w: w.update({NORM: "a\0b.safetensors"})), "expected a name without a folder or NUL"),
    "long name": (edit_map(lambda w: w.update({NORM: "x" * 5000 + ".safetensors"})), "is missing"),
    "surrogate": (edit_map(lambda w: w.update({NORM: "\ud800"})), rf"{INDEX}: is not valid JSON .*surrogates"),
    "number": (edit_map(lambda w: w.update({NORM: 1})), rf"{INDEX}: has no weight_map"),
    "no map": (rewrite(INDEX, "{}"), rf"{INDEX}: has no weight_map"),
    "list": (rewrite(INDEX, '{"weight_map": []}'), rf"{INDEX}: has no weight_map"),
    "empty map": (rewrite(INDEX, '{"weight_map": {}}'), r"in: has no \*\.safetensors file"),
    "no object": (rewrite(INDEX, "[]"), rf"{INDEX}: is a JSON list; expected an object"),
    "no JSON": (rewrite(INDEX, '{"weight_map"'), rf"{INDEX}: is not valid JSON"),
    "no UTF-8": (rewrite(INDEX, b'{"weight_map": {"\xff": "a"}}'), rf"{INDEX}: is not valid JSON .*utf-8"),
    "key twice": (rewrite(INDEX, '{"weight_map": {"a": "b", "a": "b"}}'), rf"{INDEX}: .*key 'a' appears twice"),
    "nested": (rewrite(INDEX, '{"weight_map": {}, "a": ' + "[" * 99 + "]" * 99 + "}"), "is nested deeper than 64"),
    "nested deep": (rewrite(INDEX, "[" * 200_000), rf"{INDEX}: is not valid JSON"),
    "file name in bytes": (
        lambda m: ((m / INDEX).unlink(), os.rename(m / A, os.fsencode(m) + b"/\xff.safetensors")),
        r"in: has a file '\\udcff.safetensors'; expected names in UTF-8"),
    "key twice in config": (rewrite("config.json", '{"a": 1, "a": 1}'), "config.json: .*key 'a' appears twice"),
    "nested config": (rewrite("config.json", '{"a": ' + "[" * 99 + "]" * 99 + "}"), "config.json: .*nested deeper"),
    "surrogate in config": (rewrite("config.json", r'{"a": "\ud800"}'), "config.json: .*surrogates"),
}  # fmt: skip


# ---------------------------------------------------------------- headers
def first(header):
    return next(v for k, v in header.items() if k != "__metadata__")


def offsets(begin, end):
    """Moves begin and end of the first tensor by so many bytes."""
    return lambda h: first(h).update(data_offsets=[begin, first(h)["data_offsets"][1] + end])


def overlap(header):
    header["other"] = dict(first(header))


def fields(**values):
    return lambda h: first(h).update(values)


HEADERS = {
    "dtype": (fields(dtype="F3"), rf"{A}: tensor '{GATE}': dtype is 'F3'; expected one of BOOL, U8"),
    "dtype is a number": (fields(dtype=3), "dtype is 3; expected one of"),
    "gap at the start": (offsets(2, 2), rf"'{GATE}': begins at byte \d+ and leaves a gap before it; expected byte"),
    "gap": (fields(shape=[31, 64], data_offsets=[0, 31 * 128]), rf"'{UP}': begins at byte \d+ and leaves a gap"),
    "overlap": (overlap, rf"{A}: tensor 'other': begins at byte \d+ and overlaps the tensor before it; expected byte"),
    "size": (fields(shape=[1, 1]), r"has 4096 bytes; expected 2, as BF16 \[1, 1\] needs"),
    "negative": (fields(shape=[-1, 2]), "not negative"),
    "fraction": (fields(shape=[32.0, 64]), "not negative"),
    "huge": (fields(shape=[1 << 62, 2]), "not negative"),
    "empty but huge": (fields(shape=[0, 1 << 61], data_offsets=[0, 0]), "less than"),
    "many axes": (fields(shape=[1] * 100_000 + [32, 64]), "has 100002 axes; expected at most 32"),
    "many huge axes": (fields(shape=[(1 << 61)] * 100_000), "has 100000 axes"),
    "shape is text": (fields(shape="32"), "shape is '32'"),
    "one offset": (fields(data_offsets=[0]), r"data_offsets are \[0\]; expected two"),
    "offsets turned": (fields(data_offsets=[4096, 0]), "is at bytes .* expected bytes within the file"),
    "offsets outside": (fields(data_offsets=[0, 1 << 61]), "is at bytes .* expected bytes within the file"),
    "field": (lambda h: first(h).pop("shape") and None, "described by .*; expected dtype, shape and data_offsets"),
    "further field": (fields(more=1), "described by"),
    "no entry": (lambda h: h.update(x=None), "tensor 'x': is described by None"),
    "metadata": (lambda h: h.update(__metadata__={"a": 1}), "__metadata__ is {'a': 1}; expected strings by name"),
    "name twice": (lambda h: '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{}}', "key 'a' appears twice"),
    "long name twice": (lambda h: "{" + ",".join(['"' + "a" * 10**6 + '":{}'] * 2) + "}", "key 'a{199} appears twice"),
    "field twice": (lambda h: '{"a":{"dtype":"U8","dtype":"U8"}}', "key 'dtype' appears twice"),
    "surrogate": (lambda h: r'{"\ud800":{}}', "header is not valid JSON .*surrogates"),
    "not UTF-8": (lambda h: b'{"\xff":{}}', "header is not valid JSON .*utf-8"),
    "number": (lambda h: '{"a":%s}' % ("9" * 5000), "header is not valid JSON"),
    "nested": (lambda h: '{"a":' * 100_000, "header is not valid JSON"),
    "not JSON": (lambda h: "{", rf"{A}: header is not valid JSON"),
    "list": (lambda h: "[]", "header is a JSON list; expected an object"),
    "empty": (lambda h: "", "header is not valid JSON"),
}  # fmt: skip


def of_bytes(change):
    return lambda model: (model / A).write_bytes(change((model / A).read_bytes()))


def with_length(length):
    return of_bytes(lambda data: length.to_bytes(8, "little") + data[8:])


LENGTHS = {
    **{f"{n} bytes": (of_bytes(lambda data, n=n: data[:n]), f"{A}: .*{n}") for n in (0, 4, 8, 100, 1000)},
    "all but one": (of_bytes(lambda data: data[:-1]), f"{A}: .*SHORTER"),
    "one more": (of_bytes(lambda data: data + b"x"), f"{A}: has 1 bytes behind its tensors, which end at byte SIZE"),
    "2^63": (with_length(1 << 63), "header length is 9223372036854775808; expected at most 100000000"),
    "above the limit": (with_length(100_000_001), "header length is 100000001; expected at most 100000000"),
    "limit": (with_length(100_000_000), "header length is 100000000, but the file is SIZE bytes long"),
    "0": (with_length(0), "header is not valid JSON"),
    "5": (with_length(5), "header is not valid JSON"),
}


DAMAGES = {
    **FILES,
    **LENGTHS,
    **{
        f"header, {name}": (lambda m, c=change: damaged_header(m / A, c), text)
        for name, (change, text) in HEADERS.items()
    },
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_model_is_refused(model, tmp_path, case, capsys):
    (damage, text), size = DAMAGES[case], (model / A).stat().st_size
    damage(model)
    for word, n in (("SHORTER", -1), ("LONGER", 1), ("SIZE", 0)):
        text = text.replace(word, str(size + n))
    assert len(refused(model, tmp_path, text, 3, capsys=capsys)) < 1500


ADAPTER = "an adapter: ignored"


def test_tensors_outside_the_index_are_carried_with_a_warning(model, tmp_path, capsys):
    """Files that have tensors of the model, or that cannot be read, are ignored with a warning."""
    mtp = {"mtp.fc.weight": weight(32, 64), "mtp.layers.0.mlp.down_proj.weight": weight(64, 32)}
    write(model / "mtp.safetensors", mtp)
    write(model / "copy.safetensors", {**SHARDS[B], "copy.weight": weight(16, 32)})
    write(model / "consolidated.safetensors", {"layers.0.feed_forward.w2.weight": SHARDS[B][DOWN]})
    write(model / "adapter_model.safetensors", {"base_model.x.lora_A.weight": weight(16, 32)})
    write(tmp_path / "outside", {"outside.weight": weight(16, 32)})
    (model / "linked.safetensors").symlink_to(tmp_path / "outside")
    (model / "broken.safetensors").write_bytes(b"")
    (model / "folder.safetensors").mkdir()
    files = converted(model, tmp_path, "--weight-only")
    lines = [line.removeprefix("warning: ").split(", ", 1) for line in capsys.readouterr().err.splitlines()]
    warnings = {name: text for name, text in lines if name.endswith("index")}
    ignored = {
        "copy": f"but has '{DOWN}', which is: ignored",
        "consolidated": "a copy of the model for other loaders: ignored",
        "adapter_model": ADAPTER,
        "linked": "a link out of the directory: ignored",
        "broken": "is 0 bytes long; expected a header length of 8 bytes: ignored",
        "folder": "no regular file: ignored",
    }
    expected = {f"{name}.safetensors: not in the index": text for name, text in ignored.items()}
    assert warnings == expected | {"mtp.safetensors: not in the index": "its tensors are taken into the output: 2"}
    assert sorted(name for name in files if name.endswith(".safetensors")) == [A, B, "mtp.safetensors"]
    assert json.loads(files[INDEX])["weight_map"]["mtp.fc.weight"] == "mtp.safetensors"
    with_mtp = open_source(tmp_path / "out")
    assert all(with_mtp.array(name).tobytes() == w.tobytes() for name, (_, w) in mtp.items())
    assert main(["verify", str(model), str(tmp_path / "out")]) == 0
    (model / "config.json").unlink()  # which is no warning about files
    with pytest.warns(UserWarning, match="not in the index") as warned:
        open_checkpoint(model)
    out, told = tmp_path / "out", []
    verify_checkpoint(model, out, warn=told.append)
    assert [str(w.message) for w in warned] == told == [f"{name}, {text}" for name, text in sorted(warnings.items())]
    shutil.copy(model / "adapter_model.safetensors", out)
    repack = partial(repack_checkpoint, out, tmp_path / "repacked", "compressed-tensors")
    decode = partial(dequantize_checkpoint, out, tmp_path / "decoded")
    for call in (partial(lint, out), partial(diff, out, out), repack, decode):
        told.clear()
        call(warn=told.append)
        assert f"adapter_model.safetensors: not in the index, {ADAPTER}" in told


def test_a_second_copy_of_the_model_is_ignored_with_a_warning(tmp_path, capsys):
    """Mistral's, under other names, without an index; alone it is the model."""
    other = {"layers.0.feed_forward.w2.weight": weight(64, 32, 2)}
    directory = model_of(tmp_path / "in", {DOWN: weight(64, 32, 2)})
    want = converted(directory, tmp_path, "--weight-only", out="want")
    write(directory / "consolidated.safetensors", other)
    capsys.readouterr()
    assert converted(directory, tmp_path, "--weight-only") == want
    text = "warning: consolidated.safetensors: a copy of the model for other loaders, beside model.safetensors: ignored"
    assert capsys.readouterr().err.splitlines() == [text]
    assert main(["verify", str(directory), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().err.splitlines() == [text]
    for name in ("adapter_model", "other"):
        write(directory / f"{name}.safetensors", {f"{name}.weight": weight(64, 32, 3)})
    main(["inspect", str(directory)])
    told = capsys.readouterr().out
    assert "adapter_model.safetensors: an adapter, beside model.safetensors: ignored" in told
    assert "other.safetensors: beside model.safetensors, without an index: its tensors are part of the model" in told
    for name in ("adapter_model", "other"):
        (directory / f"{name}.safetensors").unlink()
    (directory / "model.safetensors").unlink()
    assert "consolidated.safetensors" in converted(directory, tmp_path, "--weight-only", out="alone")
    assert not capsys.readouterr().err


# A file of tensors under each of these names is none that other readers open, or one that the converter writes itself.
NO_SHARDS = ("hf_quant_config.json", ".jnvfp4-progress.json", "config.json", INDEX, "shard.dat", "weights.txt",
             "x.safetensors.tmp-5", "X.SAFETENSORS", "safetensors")  # fmt: skip


@pytest.mark.parametrize("name", NO_SHARDS)
def test_shards_are_called_safetensors(model, tmp_path, name, capsys):
    """Others would be overwritten by what the converter writes, or converted to files that nothing opens."""
    edit_map(lambda w: w.update({DOWN: name, NORM: name}))(model)
    is_config = (model / name).exists()
    if not is_config:
        (model / B).rename(model / name)
    before = files_of(model)
    of_index = f"tensor '{DOWN}': names the file '{re.escape(name)}'; expected a name that ends in"
    text = rf"{INDEX}: {of_index} \.safetensors"
    of_file = rf"in/{re.escape(name)}: is no checkpoint; expected a file whose name ends in \.safetensors"
    if name == ".jnvfp4-progress.json":
        text = of_file = "in: is an unfinished output"
    refused(model, tmp_path, text, 3, capsys=capsys)
    if not is_config:
        refused(model / name, tmp_path, of_file, 3, capsys=capsys)
    assert files_of(model) == before


@pytest.mark.parametrize("stem", ["diffusion_pytorch_model", "consolidated"])
def test_an_index_has_the_name_of_its_files(tmp_path, stem, capsys):
    """Loaders of diffusers and of Mistral look for no other."""
    shards = {name.replace("model", stem): tensors for name, tensors in SHARDS.items()}
    model, index = write_model(tmp_path / "in", shards), f"{stem}.safetensors.index.json"
    (model / INDEX).rename(model / index)
    edit = json.loads((model / index).read_text())
    files = converted(model, tmp_path, out="kept")
    assert {*shards, index} <= files.keys()
    assert json.loads(files[index])["weight_map"].keys() == open_source(tmp_path / "kept").places.keys()
    cut = converted(model, tmp_path, "--max-shard-size", "1000", out="cut")
    assert sum(name.startswith(f"{stem}-0000") for name in cut) > 2
    assert not any(name.startswith("model") for name in (*files, *cut))
    assert index in cut
    one = converted(model, tmp_path, "--max-shard-size", "1GB", out="one")
    assert f"{stem}.safetensors" in one
    repack_checkpoint(tmp_path / "cut", tmp_path / "repacked", "compressed-tensors")
    assert index in files_of(tmp_path / "repacked")
    converted(model, tmp_path, "--overwrite", "--max-shard-size", "1GB", out="cut")
    assert index not in files_of(tmp_path / "cut")
    edit["weight_map"]["nothing"] = next(iter(shards))
    (model / index).write_text(json.dumps(edit))
    refused(model, tmp_path, rf"{index}: .*'nothing'", 3, capsys=capsys)


def test_a_single_file_keeps_its_name(tmp_path):
    directory = write_model(tmp_path / "in", {"any name.safetensors": {DOWN: weight(16, 32)}})
    assert "any name.safetensors" in converted(directory / "any name.safetensors", tmp_path)


def test_pickle_is_refused(tmp_path, capsys):
    class Opened:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "opened"),))

    for name in ("pytorch_model.bin", "model.pt", "model.pth"):
        directory = tmp_path / name / "in"
        directory.mkdir(parents=True)
        (directory / name).write_bytes(pickle.dumps(Opened()))
        refused(directory, tmp_path, f"hint: pickle files such as {name} are not read", 3, capsys=capsys)
        text = f"{name}: is no checkpoint; .*\nhint: pickle files such as {name} are not read"
        refused(directory / name, tmp_path, text, 3, capsys=capsys)
    assert not (tmp_path / "opened").exists()


# ---------------------------------------------------------------- links
@pytest.mark.parametrize("name", [B, INDEX, "config.json"])
def test_the_model_is_no_link_out_of_the_directory(model, tmp_path, name, capsys):
    (model / name).rename(tmp_path / "moved")
    (model / name).symlink_to(tmp_path / "moved")
    refused(model, tmp_path, f"{name}: is a link out of the directory; expected a file in it", 3, capsys=capsys)


@pytest.mark.parametrize("folder", ["", "text_encoder", "a/b"])
def test_a_snapshot_links_to_the_blobs_beside_it(model, tmp_path, folder):
    want = converted(model, tmp_path, out="want")
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "0123", tmp_path / "hub" / "blobs"
    (snapshot / folder).mkdir(parents=True)
    model.rename(blobs)
    for path in blobs.iterdir():
        (snapshot / folder / path.name).symlink_to(os.path.relpath(path, snapshot / folder))
    assert converted(snapshot, tmp_path, *["--subfolder", folder] * bool(folder)) == want
    (tmp_path / "outside").mkdir()
    (snapshot / folder / B).unlink()
    (blobs / B).rename(tmp_path / "outside" / B)
    (snapshot / folder / B).symlink_to(tmp_path / "outside" / B)
    with pytest.raises(CheckpointError, match=f"{B}: is a link out of the directory"):
        open_source(snapshot / folder)


def test_tensors_at_odd_bytes_are_read(model, tmp_path):
    want = converted(model, tmp_path, out="want")
    for name in (A, B):
        header, data = header_of((model / name).read_bytes())
        text = json.dumps(header)
        (model / name).write_bytes(with_header(text + " " * (7 - len(text) % 8), data))
    assert open_source(model).entry(NORM).begin % 2
    assert converted(model, tmp_path) == want


# ---------------------------------------------------------------- weights
def unfit(dtype, shape):
    return dtype, np.ones(shape, DTYPES[dtype])


UNFIT = {
    "I32": (unfit("I32", (16, 32)), "dtype I32", "has dtype I32; expected a float dtype"),
    "I8": (unfit("I8", (16, 32)), "dtype I8", "has dtype I8"),
    "U8": (unfit("U8", (16, 32)), "dtype U8", "has dtype U8"),
    "FP8": (unfit("F8_E4M3", (16, 32)), "dtype F8_E4M3", "has dtype F8_E4M3"),
    "F64": (unfit("F64", (16, 32)), "dtype F64", "has dtype F64"),
    "rank 0": (unfit("BF16", ()), "rank 0", "has rank 0; expected rank 2"),
    "rank 1": (unfit("BF16", (32,)), "rank 1", "has rank 1; expected rank 2"),
    "rank 4": (unfit("BF16", (2, 2, 3, 16)), "rank 4", "has rank 4; expected rank 2"),
    "no rows": (unfit("BF16", (0, 32)), r"shape \[0, 32\]", r"has shape \[0, 32\]; expected no empty axis"),
    "no columns": (unfit("BF16", (16, 0)), r"shape \[16, 0\]", r"has shape \[16, 0\]; expected no empty axis"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_weights_that_are_unfit(tmp_path, case, capsys):
    """They are kept with a reason, and refused where they are asked for."""
    tensor, reason, text = UNFIT[case]
    name = "model.layers.0.mlp.odd.weight"
    directory = model_of(tmp_path / "in", {name: tensor, DOWN: weight(16, 32)})
    refused(directory, tmp_path, f"'{name}': {text}.*\nhint: .*--targets", 3, "--targets", "*.odd", capsys=capsys)
    assert main(["convert", str(directory), str(tmp_path / "out"), "--dry-run", "--json"]) == 0
    plan = {t["name"]: t for t in json.loads(capsys.readouterr().out)["tensors"]}
    assert plan[name]["action"] == "keep"
    np.testing.assert_string_equal(plan[name]["reason"], reason.replace("\\", ""))
    converted(directory, tmp_path)
    entry = open_source(tmp_path / "out").entry(name)
    assert (entry.tag, entry.shape) == (tensor[0], tensor[1].shape)


def test_weights_that_only_their_dtype_keeps_have_a_warning(tmp_path, capsys):
    kept = ("mlp.gate.weight", "lm_head.weight", "ids", "vision.fc.weight", "ignored.k_proj.weight")
    tensors = {DOWN: weight(16, 32), **dict.fromkeys((*kept, "y.o_proj.weight"), unfit("I8", (16, 32)))}
    tensors |= {"mlp.experts.w1": unfit("I8", (2, 16, 32)), "z.o_proj.weight": unfit("F8_E4M3", (16, 32))}
    model = model_of(tmp_path / "in", tensors)
    assert main(["convert", str(model), str(tmp_path / "out"), "--weight-only", "--ignore", "ignored"]) == 0
    text = "warning: weights of dtype {} are kept, as only BF16, F16, F32 are quantized: {}"
    named = [("I8", "mlp.experts.w1, y.o_proj.weight"), ("F8_E4M3", "z.o_proj.weight")]
    assert capsys.readouterr().err.splitlines() == [text.format(*two) for two in named]


def test_k_must_be_a_multiple_of_16(tmp_path, capsys):
    directory = model_of(tmp_path / "in", {DOWN: weight(16, 24), "a.o_proj.weight": weight(16, 32)})
    module = DOWN.removesuffix(".weight")
    text = f"'{DOWN}': K is 24; expected a multiple of 16\nhint: --ignore {module}, or --on-bad-shape keep"
    refused(directory, tmp_path, text, 3, capsys=capsys)
    kept = converted(directory, tmp_path, "--on-bad-shape", "keep")
    assert converted(directory, tmp_path, "--ignore", module, out="ignored") == kept
    assert open_stored(tmp_path / "out").modules == ["a.o_proj"]


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_values_that_are_not_finite_are_refused(tmp_path, dtype, capsys):
    x = np.ones((40, 32), DTYPES[dtype])
    x[17, 5], x[17, 6], x[39, 0] = np.inf, np.nan, -np.inf
    if dtype == "BF16":
        x.view(np.uint16)[17, 6] = 0x7F81  # a signalling NaN
    directory = model_of(tmp_path / "in", {DOWN: x})
    text = rf"'{DOWN}': has 3 values that are not finite, the first at \(17, 5\).*\nhint: --on-nonfinite skip"
    refused(directory, tmp_path, text, 3, capsys=capsys)


def test_the_first_value_of_a_stack_that_is_not_finite_is_named(tmp_path, capsys):
    x = np.ones((3, 16, 32), np.float32)
    x[1, 7, 5] = x[2, 0, 0] = np.nan
    directory = model_of(tmp_path / "in", {"mlp.experts.down_proj": x}, {"model_type": "qwen3_moe"})
    refused(directory, tmp_path, r"has 2 values that are not finite, the first at \(1, 7, 5\)", 3, capsys=capsys)


def test_what_is_not_finite_keeps_its_group(tmp_path):
    tensors = {GATE: ("F32", np.ones((16, 32), np.float32)), UP: weight(16, 32, 1), DOWN: weight(16, 32, 2)}
    tensors[GATE][1][3, 4] = np.inf
    directory = model_of(tmp_path / "in", tensors)
    converted(directory, tmp_path, "--on-nonfinite", "skip")
    out = open_stored(tmp_path / "out")
    assert out.modules == [DOWN.removesuffix(".weight")]
    for name in (GATE, UP):
        assert out.source.array(name).tobytes() == tensors[name][1].tobytes()
        assert name.removesuffix(".weight") in out.source.config["quantization_config"]["ignore"]


GROUPS = {
    "no up": ({GATE: weight(16, 32)}, "module 'model.layers.0.mlp' has gate_proj but no up_proj"),
    "no gate": (
        {UP: weight(16, 32), **{n.replace("0", "1"): weight(16, 32) for n in (GATE, UP)}},
        "module 'model.layers.0.mlp' has up_proj but no gate_proj"),
    "no gate of an expert": (
        {f"mlp.experts.{e}.{r}_proj.weight": weight(16, 32) for e, r in ((0, "gate"), (0, "up"), (1, "up"))},
        "module 'mlp.experts.1' has up_proj but no gate_proj"),
    "no w3": ({"model.layers.0.mlp.experts.0.w1.weight": weight(16, 32)}, "has w1 but no w3; expected both"),
    "K": ({GATE: weight(16, 32), UP: weight(16, 48)}, f"'{GATE}': K is 32, but '{UP}' has K = 48; expected one K"),
    "Conv1D": (
        {f"h.0.{r}.weight": weight(*shape) for r, shape in
         (("attn.c_attn", (32, 96)), ("attn.c_proj", (32, 32)), ("mlp.c_fc", (32, 128)), ("mlp.c_proj", (128, 32)))},
        r"tensor 'h.0.attn.c_attn.weight': is \[K, N\] = \[32, 96\], .* Conv1D.*; expected .*\n.*--ignore"),
    "square Conv1D": (
        {"h.0.attn.c_proj.weight": weight(32, 32), "h.0.mlp.c_fc.weight": weight(32, 128)}, "'h.0.attn.c_proj.weight'"),
    "float64": ({DOWN: ("F64", np.ones((16, 32)))}, "no tensor is quantized", 2),
    "one name": (
        {DOWN: weight(16, 32), f"{DOWN}_packed": ("F32", np.ones((), np.float32))},
        f"tensor '{DOWN}_packed': '{DOWN}_packed' and '{DOWN}' both become it", 3, "--format", "compressed-tensors"),
}  # fmt: skip


@pytest.mark.parametrize("case", GROUPS)
def test_tensors_that_do_not_fit_each_other(tmp_path, case, capsys):
    tensors, text, *code_and_options = GROUPS[case]
    refused(model_of(tmp_path / "in", tensors), tmp_path, text, *(code_and_options or [3]), capsys=capsys)


def test_stacks_of_other_names_are_reported_and_listed(tmp_path, capsys):
    """Granite, Step 3.5, Aria, DBRX: kept, and left in 16 bits by loaders, which look up all experts of a layer."""
    moe = "model.layers.0.block_sparse_moe"
    stacks = [f"{moe}.input_linear.weight", f"{moe}.output_linear.weight", "a.moe.gate_proj.weight"]
    stacks += ["b.mlp.experts.fc1.weight", "f.mlp.gate_up_proj", "c.ffn.experts.mlp.w1"]
    shapes = dict.fromkeys(stacks, (2, 64, 32)) | {stacks[-1]: (128, 32)}
    others = {"d.conv.weight": (64, 32, 32), "d.mixer.taps.weight": (64, 1, 4), "e.experts.down_proj_bias": (16, 32)}
    tensors = {n: weight(64, 32)[1] for n in [DOWN]} | {n: np.ones(s, np.float32) for n, s in (shapes | others).items()}
    directory = model_of(tmp_path / "in", tensors)
    containers = {"a.moe.experts", "b.mlp.experts", "c.ffn.experts", "f.mlp.experts", f"{moe}.experts"}
    listed = containers | {s.removesuffix(".weight") for s in stacks} | {"lm_head"}
    for layout in ("modelopt", "compressed-tensors"):
        converted(directory, tmp_path, "--weight-only", "--format", layout, out=layout)
        assert capsys.readouterr().err.splitlines() == [
            f"warning: stacks of experts that no reader has in NVFP4 are kept: {', '.join(sorted(stacks))}"
        ]
        ignored = open_stored(tmp_path / layout).source.config["quantization_config"]["ignore"]
        assert set(ignored) == listed if layout == "compressed-tensors" else containers < set(ignored)
        assert [f for f in lint(tmp_path / layout) if not f.note] == []


# ---------------------------------------------------------------- config
def test_without_a_config(model, tmp_path, capsys):
    (model / "config.json").unlink()
    text = "config.json has no num_hidden_layers"
    refused(model, tmp_path, text, 3, "--num-layers-at-start-in-bf16", "1", capsys=capsys)
    refused(model, tmp_path, text, 3, "--num-layers-at-end-in-bf16", "1", capsys=capsys)
    files = converted(model, tmp_path)
    assert "config.json: missing" in capsys.readouterr().err
    assert list(json.loads(files["config.json"])) == ["quantization_config"]


QUANTIZED_PARAMS = {"dim": 64, "quantization": {"qformat_weight": "fp8_e4m3"}}


@pytest.mark.parametrize("hollow", [None, {}, {"torch_dtype": "bfloat16"}], ids=["no config", "empty", "dtype"])
def test_the_config_of_mistral(tmp_path, capsys, hollow):
    """Beside params.json a config.json that describes no model is none: vLLM reads params.json then."""
    directory = model_of(tmp_path / "in", {"layers.0.feed_forward.w2.weight": weight(64, 32)}, hollow or {})
    if hollow is None:
        (directory / "config.json").unlink()
    (directory / "params.json").write_text(json.dumps({"dim": 64}))
    quantization = {}
    for layout in ("modelopt", "compressed-tensors"):
        files = converted(directory, tmp_path, "--weight-only", "--format", layout, out=layout)
        assert ("config.json" in files, "hf_quant_config.json" in files) == (False, layout == "modelopt")
        quantization[layout] = json.loads(files["params.json"])
        assert [f for f in lint(tmp_path / layout) if not f.note] == []
    assert quantization["modelopt"] == {"dim": 64}
    assert quantization["compressed-tensors"].pop("quantization")["quant_method"] == "compressed-tensors"
    assert quantization["compressed-tensors"] == {"dim": 64}
    assert list(json.loads(converted(directory, tmp_path, "--format=te", out="te")["config.json"])) == [
        *(hollow or []),
        "quantization_config",
    ]
    repack_checkpoint(tmp_path / "compressed-tensors", tmp_path / "again", "modelopt")
    assert files_of(tmp_path / "again").keys() == files_of(tmp_path / "modelopt").keys()
    dequantize_checkpoint(tmp_path / "compressed-tensors", tmp_path / "back")
    for out in ("again", "back"):
        assert json.loads((tmp_path / out / "params.json").read_text()) == {"dim": 64}
    assert not (tmp_path / "back" / "config.json").exists()
    (directory / "params.json").write_text(json.dumps(QUANTIZED_PARAMS))
    text = r"params.json: is quantized already \(fp8_e4m3\); expected a model in high precision"
    refused(directory, tmp_path, text, 3, capsys=capsys)


@pytest.mark.parametrize("text_config", ["text", [], 3, None])
def test_text_configs_that_are_no_object_are_ignored(model, tmp_path, text_config):
    (model / "config.json").write_text(json.dumps({"text_config": text_config}))
    converted(model, tmp_path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_has_not_are_not_copied(model, tmp_path, capsys, number):
    """Python's parser reads them, so that a checkpoint with them is read; no output gets them."""
    repack = partial(repack_checkpoint, layout="modelopt")
    converted(model, tmp_path, out="nvfp4")
    for directory in (model, tmp_path / "nvfp4"):
        text = (directory / "config.json").read_text().rstrip().removesuffix("}")
        (directory / "config.json").write_text(f'{text}, "text_config": {{"time_step_limit": [0.0, {number}]}}}}')
    word = number.replace("1e999", "Infinity")
    wrong = rf"config.json: text_config.time_step_limit.1 is {word}; expected a finite number.*\nhint: write a large"
    refused(model, tmp_path, wrong, 3, capsys=capsys)
    refused(model, tmp_path, wrong, 3, "--dry-run", capsys=capsys)
    for work in (repack, dequantize_checkpoint):
        with pytest.raises(CheckpointError, match=wrong):
            work(tmp_path / "nvfp4", tmp_path / "out")
    assert inspect(tmp_path / "nvfp4")["layout"] == "modelopt"
    with pytest.raises(CheckpointError, match=f"^config: limits.0 is {word}; "):
        save_checkpoint({DOWN: np.ones((16, 32), np.float32)}, tmp_path / "out", config={"limits": (float(number),)})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("config", [{"quant_method": "modelopt"}, {"quant_method": "fp8"}, "awq"])
def test_a_model_that_is_quantized_already_is_refused(model, tmp_path, config, capsys):
    (model / "config.json").write_text(json.dumps({"quantization_config": config}))
    method = config if isinstance(config, str) else config["quant_method"]
    refused(model, tmp_path, rf"config.json: is quantized already \({method}\)", 3, capsys=capsys)


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale", "_scale_2", "_global_scale"])
def test_scales_of_quantized_weights_are_refused(model, tmp_path, suffix, capsys):
    """Also where no config says that weights are quantized."""
    scale = f"{GATE}{suffix}"
    write(model / A, {**SHARDS[A], scale: ("F32", np.ones((1, 1), np.float32))})
    edit_map(lambda w: w.update({scale: A}))(model)
    text = f"'{scale}': is a scale of quantized weights or of a KV cache; expected a model in high precision$"
    refused(model, tmp_path, text, 3, capsys=capsys)


def test_a_quantized_weight_without_rows(tmp_path, capsys):
    codes, scales = unfit("U8", (0, 16)), unfit("F8_E4M3", (0, 2))
    directory = model_of(tmp_path / "in", {DOWN: codes, f"{DOWN}_scale": scales, f"{DOWN}_scale_2": unfit("F32", ())})
    assert main(["inspect", str(directory)]) == 3
    assert f"tensor '{DOWN}': is U8 [0, 16]; expected U8, 2 axes, whole blocks, not empty" in capsys.readouterr().err


# ---------------------------------------------------------------- outputs
def test_the_source_is_no_output(model, capsys):
    before, link = files_of(model), model.parent / "link"
    link.symlink_to(model)
    for a, b in ((model, model), (model, link), (link, model)):
        assert main(["convert", str(a), str(b), "--overwrite"]) == 2
        assert f"{b.name}: is the source; expected another directory" in capsys.readouterr().err
        assert files_of(model) == before


def test_overwriting_leaves_nothing_of_the_older_output(model, tmp_path, capsys):
    want = converted(model_of(tmp_path / "single", SHARDS[B]), tmp_path, out="want")
    converted(model, tmp_path)
    older = sorted(files_of(tmp_path / "out"))
    (tmp_path / "out" / "mine").write_text("mine")
    (tmp_path / "out" / INDEX).unlink()
    (tmp_path / "out" / INDEX).symlink_to("no")
    capsys.readouterr()
    assert converted(tmp_path / "single", tmp_path, "--overwrite") == {**want, "mine": b"mine"}
    (told,) = re.findall(r"^warning: (.*) of an older checkpoint removed$", capsys.readouterr().err, re.M)
    assert sorted(told.removeprefix(f"{tmp_path / 'out'}: ").split(", ")) == older


@pytest.mark.parametrize("name", ["model.safetensors", "keep.safetensors", "link.safetensors", "broken.safetensors"])
def test_overwriting_removes_no_weights_that_no_conversion_wrote(model, tmp_path, capsys, name):
    """Whether the output has a file of that name or not: those who read it would take it for a part of the model."""
    out = tmp_path / "out"
    converted(model, tmp_path)
    save_checkpoint({DOWN: SHARDS[B][DOWN][1]}, tmp_path / "other")
    if name == "link.safetensors":
        (out / name).symlink_to(tmp_path / "other" / "model.safetensors")
    else:
        shutil.copy(tmp_path / "other" / "model.safetensors", out / name)
    if name == "broken.safetensors":
        (out / name).write_bytes(b"precious")
    if name == "keep.safetensors":  # of other software, which has recipes too
        write(out / name, SHARDS[B], {"recipe": "mine"})
    before = files_of(out)
    assert main(["convert", str(model), str(out), "--overwrite"]) == 2
    assert f"{name}: was not written by a conversion; expected only shards that were\nhint: " in capsys.readouterr().err
    assert files_of(out) == before
    (out / name).unlink()
    converted(model, tmp_path, "--overwrite")


# ---------------------------------------------------------------- disk
def test_an_output_that_cannot_be_made(model, tmp_path, capsys):
    out = model / "config.json" / "out"
    refused(model, tmp_path, "config.json/out: cannot be written", 6, capsys=capsys, out=out)
    converted(model, tmp_path)
    capsys.readouterr()
    assert main(["dequantize", str(tmp_path / "out"), str(out)]) == 6
    assert capsys.readouterr().err.startswith(f"error: {out}: cannot be written (Not a directory)")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission(model, tmp_path, capsys):
    (tmp_path / "locked").mkdir(mode=0o500)
    refused(model, tmp_path, "cannot be written .Permission denied", 6, capsys=capsys, out=tmp_path / "locked" / "out")


def with_free(monkeypatch, count):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=count))


def test_space_is_asked_for_what_is_kept_after_all(tmp_path, monkeypatch):
    """The group with an infinity is kept, which takes more than it would quantized."""
    bad = np.full((64, 64), np.inf, np.float32)
    directory = model_of(tmp_path / "in", {DOWN: weight(16, 32), "a.o_proj.weight": bad})
    options = ConvertOptions(on_nonfinite="skip")
    need = 2 * make_plan(open_source(directory), options).nbytes
    with_free(monkeypatch, need)
    with pytest.raises(CheckpointError, match=f"has {need} bytes free; expected 3"):
        convert_checkpoint(directory, tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [["convert"], ["repack", "--format", "compressed-tensors"], ["dequantize"]])
def test_a_disk_without_room_is_found_before_the_output_is_made(model, tmp_path, monkeypatch, capsys, command):
    """All shards are written beside the largest one, which may be there a second time."""
    converted(model, tmp_path, out="nvfp4")
    source = model if command == ["convert"] else tmp_path / "nvfp4"
    arguments = [command[0], str(source), str(tmp_path / "out"), *command[1:]]
    assert main(arguments) == 0
    sizes = [sum(e.nbytes for e in f.entries.values()) for f in open_source(tmp_path / "out").files.values()]
    shutil.rmtree(tmp_path / "out")
    need = sum(sizes) + max(sizes)
    with_free(monkeypatch, need - 1)
    capsys.readouterr()
    assert main(arguments) == 6
    assert f"{tmp_path}: has {need - 1} bytes free; expected {need} for the output" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with_free(monkeypatch, need)
    assert main(arguments) == 0


class Full:
    """A disk with room for some bytes more: the last write is short, the next one fails."""

    def __init__(self, room):
        self.room, self._write = room, os.pwrite

    def __call__(self, file, data, offset):
        n = min(len(data), self.room)
        if not n:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= n
        return self._write(file, data[:n], offset)


@pytest.mark.parametrize("room", [0, 20, 1000, 3000])
def test_a_disk_that_fills_up(model, tmp_path, monkeypatch, room, capsys):
    full = Full(room)
    monkeypatch.setattr(os, "pwrite", full)
    arguments = ["convert", str(model), str(tmp_path / "out")]
    assert main(arguments) == 6
    err = capsys.readouterr().err
    assert "out: cannot be written (No space left on device)" in err
    assert ("hint: finished shards are kept; --resume goes on" in err) == bool(list((tmp_path / "out").iterdir()))
    assert list(files_of(tmp_path / "out")) in ([], [".jnvfp4-progress.json"])
    assert full.room == 0


def test_writes_that_are_short_are_gone_on_with(model, tmp_path, monkeypatch):
    write = os.pwrite
    want = converted(model, tmp_path, out="want")
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: write(file, data[:100], offset))
    assert converted(model, tmp_path) == want


def failing(error, after=0):
    calls = []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) > after:
            raise OSError(error, os.strerror(error))

    return fail


def test_a_finished_shard_stays_where_the_disk_fails_at_the_end_of_one(model, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.EIO))
        refused(model, tmp_path, r"out: cannot be written \(Input/output error\)", 6, capsys=capsys)
    want = converted(model, tmp_path, out="want")
    arguments = ["convert", str(model), str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.ENOSPC, after=1))
        assert main(arguments) == 6
    assert sorted(files_of(tmp_path / "out")) == [".jnvfp4-progress.json", A]
    assert main([*arguments, "--resume"]) == 0
    assert files_of(tmp_path / "out") == want


class Failing:
    """Opens files as ``open`` does, but the tokenizer fails: to open, to read, or to be written."""

    def __init__(self, what, error, after=0):
        self.what, self.error, self.after = what, error, after

    def __call__(self, path, mode):
        file = open(path, mode, buffering=0)  # noqa: SIM115
        if "tokenizer" not in str(path) or ("w" in mode) != (self.what == "write"):
            return file
        if self.after:
            self.after -= 1
            return file
        if self.what != "open":
            return self.failing(file)
        file.close()
        raise OSError(self.error, os.strerror(self.error), str(path))

    @contextmanager
    def failing(self, file):
        def fail(*_):
            raise OSError(self.error, os.strerror(self.error))

        with file:
            yield types.SimpleNamespace(**{self.what: fail})


@pytest.mark.parametrize(("what", "error"), [("open", errno.EACCES), ("read", errno.EIO)])
def test_a_companion_that_cannot_be_read_is_found_first(model, tmp_path, monkeypatch, capsys, what, error):
    (model / "tokenizer.json").write_text("{}")
    convert_checkpoint(model, tmp_path / "nvfp4")
    monkeypatch.setattr(companions, "open", Failing(what, error), raising=False)
    text = rf"/{{}}/tokenizer.json: cannot be read \({os.strerror(error)}\)$"
    refused(model, tmp_path, text.format("in"), 6, capsys=capsys)
    for command in (["dequantize"], ["repack", "--format", "compressed-tensors"]):
        assert main([command[0], str(tmp_path / "nvfp4"), str(tmp_path / "out"), *command[1:]]) == 6
        assert re.search(text.format("nvfp4"), capsys.readouterr().err, re.M)
        assert not (tmp_path / "out").exists()


COPIES = [("read", errno.EIO, "in/tokenizer.json: cannot be read"),
          ("write", errno.ENOSPC, "out/tokenizer.json: cannot be written")]  # fmt: skip


@pytest.mark.parametrize(("what", "error", "text"), COPIES)
def test_a_copy_that_fails_leaves_no_part(model, tmp_path, monkeypatch, capsys, what, error, text):
    """The check before the conversion has read it."""
    (model / "tokenizer.json").write_text("{}")
    want = converted(model, tmp_path, out="want")
    arguments = ["convert", str(model), str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        patch.setattr(companions, "open", Failing(what, error, after=what == "read"), raising=False)
        capsys.readouterr()
        assert main(arguments) == 6
    line, hint = capsys.readouterr().err.strip().split("\n")[-2:]
    assert line.endswith(f"{text} ({os.strerror(error)})")
    assert hint == "hint: finished shards are kept; --resume goes on"
    assert sorted(files_of(tmp_path / "out")) == [".jnvfp4-progress.json", A, B]
    assert main([*arguments, "--resume"]) == 0
    assert files_of(tmp_path / "out") == want
