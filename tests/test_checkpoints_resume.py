"""Conversions that are interrupted or killed: what is left, and that they go on to the same bytes."""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from checkpoints import GOLDEN, environment, files_of, header_of, model_of, weight, with_header, write_model

import jnvfp4
from jnvfp4 import cli
from jnvfp4.checkpoints import (
    CheckpointError,
    ConvertOptions,
    convert,
    convert_checkpoint,
    dequantize_checkpoint,
    inspect,
    open_checkpoint,
    repack_checkpoint,
    save,
    save_checkpoint,
)
from jnvfp4.checkpoints._convert import resume
from jnvfp4.checkpoints._files import files
from jnvfp4.checkpoints._files.safetensors import Writer
from jnvfp4.checkpoints._files.source import open_source
from jnvfp4.cli import main

PROGRESS = ".jnvfp4-progress.json"


@pytest.fixture
def model(tmp_path):
    shutil.copytree(GOLDEN / "llama" / "input", tmp_path / "in")
    return tmp_path / "in"


@pytest.fixture(scope="module")
def whole() -> dict[str, bytes]:
    """The files of a conversion without interruption."""
    with tempfile.TemporaryDirectory() as folder:
        convert_checkpoint(GOLDEN / "llama" / "input", Path(folder) / "whole")
        return files_of(Path(folder) / "whole")


def interrupt(*_, **__):
    raise KeyboardInterrupt


def interrupted_after(count, model, out, options=None, **arguments):
    """Begins a conversion, and interrupts it when so many tensors are done. There are 21 in two shards."""
    told = mock.Mock(side_effect=[None] * count + [KeyboardInterrupt])
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(model, out, options, on_progress=told, **arguments)


@pytest.fixture
def begun(model, tmp_path) -> Path:
    """An output in which the first of two shards is finished."""
    interrupted_after(20, model, tmp_path / "out")
    return tmp_path / "out"


# ---------------------------------------------------------------- in this process
@pytest.mark.parametrize("after", [0, 1, 12, 20])
def test_an_interrupted_conversion_goes_on(model, tmp_path, whole, after):
    """What is left never looks complete, also where it replaces an older output."""
    out = tmp_path / "out"
    for overwrite in (False, True):
        interrupted_after(after, model, out, overwrite=overwrite)
        left = files_of(out)
        assert not any(".tmp-" in name or name.endswith(("index.json", "config.json")) for name in left)
        assert (PROGRESS in left) == any(name.endswith(".safetensors") for name in left)
        convert_checkpoint(model, out, resume=True)
        assert files_of(out) == whole
    with pytest.raises(CheckpointError, match="no record of an interrupted conversion"):
        convert_checkpoint(model, out, resume=True)
    assert files_of(out) == whole


def test_a_hint_names_only_what_is_accepted(model, begun):
    other = ConvertOptions(layout="te")
    for options, hint in ((None, "--resume goes on, --overwrite starts again"), (other, "--overwrite starts again")):
        with pytest.raises(CheckpointError, match=f"is not empty.*\nhint: {hint}$"):
            convert_checkpoint(model, begun, options)
    convert_checkpoint(model, begun, resume=True)
    with pytest.raises(CheckpointError, match=r"is not empty.*\nhint: --overwrite starts again$"):
        convert_checkpoint(model, begun)
    (begun / "foreign.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="was not written by a conversion"):
        convert_checkpoint(model, begun)


def test_an_output_with_nothing_but_part_of_a_file_is_resumed(model, tmp_path, whole):
    """A run that was killed within its first shard has no record yet."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model-00001-of-00002.safetensors.tmp-1").write_bytes(b"part")
    convert_checkpoint(model, tmp_path / "out", resume=True)
    assert files_of(tmp_path / "out") == whole


def test_what_is_finished_is_recorded_and_not_written_again(model, begun, whole, tmp_path, monkeypatch):
    """It is told as one step of the progress, and asks for no room on the disk."""
    (done,) = begun.glob("*.safetensors")
    record = json.loads((begun / PROGRESS).read_text())
    assert record["shards"] == {done.name: hashlib.sha256(done.read_bytes()).hexdigest()}
    assert sorted(record["source"]) == ["config.json", *sorted(p.name for p in model.glob("*.safetensors"))]
    assert record["options"]["version"] == jnvfp4.__version__
    assert "chunk_bytes" not in record["options"]
    for name in ("model-00002-of-00002.safetensors", PROGRESS, *(n for n in whole if n.endswith(".json"))):
        (begun / f"{name}.tmp-456").write_bytes(b"part")  # of killed runs
    (begun / "config.json.tmp-old").write_text("mine")
    (begun / "config.json.tmp-1").mkdir()
    before, usage = done.stat(), shutil.disk_usage(begun)
    # two shards of about 250,000 bytes, and once more the largest
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=600_000))
    with pytest.raises(CheckpointError, match=r"has 600000 bytes free; expected 7\d\d\d\d\d"):
        convert_checkpoint(model, tmp_path / "new")
    told, source, slices = [], open_source(model), ConvertOptions(chunk_bytes=1 << 13)
    convert_checkpoint(model, begun, slices, resume=True, on_progress=lambda *a: told.append(a))
    assert (done.stat().st_ino, done.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    (begun / "config.json.tmp-1").rmdir()
    assert files_of(begun) == {**whole, "config.json.tmp-old": b"mine"}
    want = {n: source.entry(n).nbytes for n, shard in source.places.items() if shard != done.name}
    want[done.name] = sum(e.nbytes for e in source.files[done.name].entries.values())
    assert dict(told) == want
    assert sum(want.values()) == source.nbytes


@pytest.mark.parametrize("kept", [-1, 5])
def test_a_shard_that_was_changed_is_written_again(model, begun, whole, kept):
    (done,) = begun.glob("*.safetensors")
    data = done.read_bytes()
    done.write_bytes(data[:kept] + bytes([data[-1] ^ 1]))
    convert_checkpoint(model, begun, resume=True)
    assert files_of(begun) == whole


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"options": 1, "source": {}, "shards": {}}'])
def test_a_record_that_is_damaged(model, tmp_path, whole, text):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / PROGRESS).write_text(text)
    with pytest.raises(CheckpointError, match=re.escape(PROGRESS)):
        convert_checkpoint(model, tmp_path / "out", resume=True)
    convert_checkpoint(model, tmp_path / "out", overwrite=True)
    assert files_of(tmp_path / "out") == whole


def other_header(header):
    """Names and bytes stay, the shape is another one."""
    header["model.norm.weight"]["shape"].insert(0, 1)


def other_order(header):
    """Two tensors of one size change places."""
    a, b = (header[f"model.layers.1.{n}_layernorm.weight"] for n in ("input", "post_attention"))
    a["data_offsets"], b["data_offsets"] = b["data_offsets"], a["data_offsets"]


def with_another_header(path, change):
    """Size and time of the file stay."""
    before, (header, data) = path.stat(), header_of(path.read_bytes())
    change(header)
    text = json.dumps(header, separators=(",", ":"))
    path.write_bytes(with_header(text.ljust(before.st_size - 8 - len(data)), data))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


SECOND = "model-00002-of-00002.safetensors"

# By what is another one when the conversion goes on: the change of the model or of the file of amaxes, and the error.
OTHERS = {
    "option": (None, "other options: kv_cache;"),
    "shard size": (None, "other options: max_shard_bytes;"),
    "amaxes": (lambda _, scales: scales.write_text(scales.read_text().replace("3.0", "4.0")), "options: input_amax"),
    "version": (None, "other options: version"),
    "time": (lambda model, _: (model / SECOND).touch(), "other source: model-00002"),
    "config": (lambda model, _: (model / "config.json").write_text('{"model_type": "llama"}'), "other source: config"),
    "shape": (lambda model, _: with_another_header(model / SECOND, other_header), "other source: model-00002"),
    "order": (lambda model, _: with_another_header(model / SECOND, other_order), "other source: model-00002"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_resuming_with_another_input_is_refused(model, tmp_path, monkeypatch, case):
    change, text = OTHERS[case]
    scales, out = tmp_path / "scales.json", tmp_path / "out"
    scales.write_text(json.dumps({n.removesuffix(".weight"): 3.0 for n in open_source(model).places if "_proj" in n}))
    options = ConvertOptions(input_amax=scales)
    interrupted_after(20, model, out, options)
    if case == "option":
        options = ConvertOptions(input_amax=scales, kv_cache="fp8")
    elif case == "shard size":
        options = ConvertOptions(input_amax=scales, max_shard_bytes=1 << 20)
    elif case == "version":
        monkeypatch.setattr(resume, "__version__", "99.0")
    else:
        change(model, scales)
    with pytest.raises(CheckpointError, match=text):
        convert_checkpoint(model, out, options, resume=True)
    with pytest.raises(CheckpointError, match="not empty"):
        convert_checkpoint(model, out)


def test_resuming_without_a_file_of_the_source_is_refused(model, tmp_path):
    """Shards need no index, so the rest of them looks like a whole model."""
    interrupted_after(20, model, tmp_path / "out")
    for path in (*model.glob("model-00001*"), *model.glob("*.index.json")):
        path.unlink()
    with pytest.raises(CheckpointError, match="other source: model-00001"):
        convert_checkpoint(model, tmp_path / "out", resume=True)


@pytest.mark.parametrize("command", ["convert", "verify"])
def test_an_interrupt_has_its_exit_code(tmp_path, monkeypatch, capsys, command):
    monkeypatch.setattr(cli, "open_source", interrupt)
    monkeypatch.setattr(cli, "verify_checkpoint", interrupt)
    assert main([command, str(tmp_path / "in"), str(tmp_path / "out"), "--expert-layout=auto"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


# ---------------------------------------------------------------- two writers
WRITERS = {
    "convert": convert_checkpoint,
    "dequantize": dequantize_checkpoint,
    "repack": lambda source, out: repack_checkpoint(source, out, "compressed-tensors"),
    "save": lambda source, out: save_checkpoint({"a.weight": np.ones((16, 32), np.float32)}, out),
}


@pytest.fixture(params=WRITERS)
def writer(request):
    """Writes a checkpoint into a directory."""
    source = GOLDEN / "llama" / ("input" if request.param == "convert" else "te_modelopt")
    return lambda out: WRITERS[request.param](source, out)


@pytest.mark.parametrize("error", [None, OSError(24, "Too many open files")], ids=["locked", "not locked"])
def test_what_another_has_written_meanwhile_stays(writer, tmp_path, monkeypatch, error):
    """Nor is there the advice to remove it."""

    @contextmanager
    def after_another(directory):
        (directory / "config.json").write_text("of another")
        if error is not None:
            raise error
        yield

    for module in (convert, files):
        monkeypatch.setattr(module, "locked", after_another)
    with pytest.raises(CheckpointError, match="cannot be written" if error else "is not empty") as found:
        writer(tmp_path / "out")
    assert "remove" not in str(found.value)
    assert files_of(tmp_path / "out") == {"config.json": b"of another"}


def test_two_writers_do_not_share_a_directory(writer, tmp_path):
    (tmp_path / "out").mkdir()
    with files.locked(tmp_path / "out"):
        text = r"is being written by another command; expected a directory of its own$"
        with pytest.raises(CheckpointError, match=text):
            writer(tmp_path / "out")
        assert files_of(tmp_path / "out") == {}
    for out in ("out", "new/folder/out"):
        writer(tmp_path / out)


@pytest.mark.parametrize("name", ["out", "out/mine"])
def test_an_output_that_is_there_stays(writer, tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    text = r"out: is (a file|not empty); expected (a|an empty or new) direc"
    with pytest.raises(CheckpointError, match=text) as found:
        writer(tmp_path / "out")
    assert found.value.code == 2
    assert (tmp_path / name).read_text() == "mine"


def test_a_directory_is_locked_while_it_is_written(writer, tmp_path, monkeypatch):
    """From the first file to the last, and by the threads of this process too."""
    seen, replace = [], Path.replace

    def rename(path, target):
        with pytest.raises(CheckpointError, match="by another command"), files.locked(tmp_path / "out"):
            pass
        seen.append(Path(target).name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", rename)
    writer(tmp_path / "out")
    assert {PROGRESS, *files_of(tmp_path / "out")} == set(seen)


# ---------------------------------------------------------------- a source that changes


CHANGES = {
    "content": (
        lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])), "another time of"),
    "replaced": (lambda path: Path(shutil.copyfile(path, path.with_suffix(".new"))).replace(path), "another time of"),
    "header": (lambda path: with_another_header(path, other_header), "another header"),
    "shorter": (lambda path: os.truncate(path, 100_000), "truncated"),
    "only its header": (
        lambda path: os.truncate(path, 8 + int.from_bytes(path.read_bytes()[:8], "little")), "truncated"),
    "empty": (lambda path: os.truncate(path, 0), "truncated"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"more"), "4 bytes behind its tensors"),
    "gone": (Path.unlink, "cannot be read"),
    "a moment": (lambda path: os.utime(path, ns=(0, path.stat().st_mtime_ns ^ 1 << 20)), "another time of"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("writer", ["convert", "dequantize", "repack"])
def test_a_source_that_changes_is_an_error(tmp_path, monkeypatch, writer, change):
    """Its second file changes while the first one is written; nothing that looks complete is left."""
    source = tmp_path / "in"
    shutil.copytree(GOLDEN / "llama" / ("input" if writer == "convert" else "te_modelopt"), source)
    path = max(source.glob("*.safetensors"))
    (work, how), changed, put = CHANGES[change], [], Writer.put

    def put_after(*arguments):
        if not changed:
            changed.append(change)
            work(path)
        put(*arguments)

    monkeypatch.setattr(Writer, "put", put_after)
    with pytest.raises(CheckpointError, match=rf"{path.name}: has changed while it was read .*{how}") as error:
        WRITERS[writer](source, tmp_path / "out")
    assert error.value.code == 6
    assert str(error.value).endswith("\nhint: run the command again when no other program writes to it")
    assert not (tmp_path / "out" / "config.json").exists()
    with pytest.raises(CheckpointError, match=r"is an unfinished output|has no \*\.safetensors file"):
        open_checkpoint(tmp_path / "out")


@pytest.mark.parametrize(("change", "experts"), [("content", "keep"), ("header", "keep"), ("content", "stacked")])
def test_a_source_that_changes_before_the_codes_is_an_error(model, tmp_path, monkeypatch, change, experts):
    """Between the amaxes and the codes: nothing is written. The second file has no expert 0, after which stacks are."""
    name = "model.layers.0.mlp.experts.{}.{}.weight"
    files = {f"{e}.safetensors": {name.format(e, w): weight(32, 32) for w in ("w1", "w2", "w3")} for e in (0, 1)}
    model = write_model(tmp_path / "experts", files) if experts == "stacked" else model
    find, path = convert.find_amaxes, max(model.glob("*.safetensors"))
    work, how = CHANGES[change]

    def find_and_change(*arguments):
        found = find(*arguments)
        work(path)
        return found

    monkeypatch.setattr(convert, "find_amaxes", find_and_change)
    with pytest.raises(CheckpointError, match=rf"{path.name}: has changed while it was read .*{how}"):
        convert_checkpoint(model, tmp_path / "out", ConvertOptions(experts=experts))
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- an unfinished output is no checkpoint
def interrupted(work):
    """Interrupts the work in the second file that it writes."""
    paths, put = set(), Writer.put

    def second(file, *arguments):
        paths.add(file.path)
        if len(paths) == 2:
            raise KeyboardInterrupt
        put(file, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Writer, "put", second)
        with pytest.raises(KeyboardInterrupt):
            work()


def check_refused(out, text, capsys):
    """Every way to read it is refused with these words."""
    file = str(next(out.glob("*.safetensors")))
    for work in (open_checkpoint, inspect, open_source):
        with pytest.raises(CheckpointError, match=text):
            work(out)
    arguments = [["inspect", str(out)], ["inspect", file], ["lint", str(out)],
                 ["verify", str(out), str(out)], ["diff", str(out), str(out)],
                 ["dequantize", str(out), "back"], ["repack", str(out), "back", "--format", "modelopt"]]  # fmt: skip
    for command in arguments:
        assert main(command) == 3
        got, err = capsys.readouterr()
        assert re.search(text, err)
        assert not got


def test_an_interrupted_conversion_is_no_checkpoint(model, tmp_path, capsys):
    """One of two shards is there, and neither config nor index: it would look like a smaller model."""
    interrupted(lambda: convert_checkpoint(model, tmp_path / "out"))
    check_refused(
        tmp_path / "out",
        r"out: is an unfinished output.*\nhint: run the same `jnvfp4 convert` again with --resume",
        capsys,
    )
    convert_checkpoint(model, tmp_path / "out", resume=True)
    assert len(open_checkpoint(tmp_path / "out")) == len(open_source(model).places)


def test_another_interrupted_output_is_no_checkpoint(model, tmp_path, capsys):
    convert_checkpoint(model, tmp_path / "nvfp4")
    for i, rewrite in enumerate((dequantize_checkpoint, lambda a, b: repack_checkpoint(a, b, "compressed-tensors"))):
        out = tmp_path / f"out{i}"
        interrupted(lambda rewrite=rewrite, out=out: rewrite(tmp_path / "nvfp4", out))
        assert len(list(out.glob("*.safetensors"))) == 1
        check_refused(out, r"out\d: is an unfinished output.*\nhint: run the command that wrote it again, into", capsys)
        with pytest.raises(CheckpointError, match="is not empty"):
            rewrite(tmp_path / "nvfp4", out)
        rewrite(tmp_path / "nvfp4", tmp_path / f"again{i}")
        assert not (tmp_path / f"again{i}" / PROGRESS).exists()


def test_saving_that_is_interrupted_leaves_no_checkpoint(model, tmp_path, monkeypatch):
    """Without its config a weight of 4over6 in layout te would decode to other numbers."""
    tensors = {"a.weight": jnvfp4.quantize(np.ones((16, 32), np.float32), jnvfp4.spec.four_over_six())}
    for where, name in ((Writer, "put"), (save, "write_file")):  # after the first no shard is there, and no record
        with monkeypatch.context() as patch:
            patch.setattr(where, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                save_checkpoint(tensors, tmp_path / "out", "te")
    with pytest.raises(CheckpointError, match="unfinished output"):
        open_checkpoint(tmp_path / "out")
    save_checkpoint(tensors, tmp_path / "whole", "te")
    assert sorted(files_of(tmp_path / "whole")) == ["config.json", "model.safetensors"]


# ---------------------------------------------------------------- processes
# The command with a line for each write of a tensor, and time to be killed in.
SLOW = """
import sys, time
from jnvfp4 import cli
from jnvfp4.checkpoints._files.safetensors import Writer
put = Writer.put
def slow(*arguments):
    sys.stdout.write("put\\n")  # at once: several threads write
    sys.stdout.flush()
    time.sleep(0.005)
    put(*arguments)
Writer.put = slow
sys.exit(cli.main())
"""
SHARDS, WRITES = 6, 6 * (2 * 4 + 1)


@pytest.fixture(scope="module")
def layers(tmp_path_factory) -> tuple[Path, dict[str, bytes]]:
    """A model of several shards, and what it becomes without interruption."""
    shards = {
        f"model-{i + 1:05d}-of-{SHARDS:05d}.safetensors": {
            f"model.layers.{i}.mlp.down_proj.weight": weight(64, 128, i),
            f"model.layers.{i}.self_attn.o_proj.weight": weight(128, 64, i),
            f"model.layers.{i}.norm.weight": ("F32", np.full(64, i, np.float32)),
        }
        for i in range(SHARDS)
    }
    directory = tmp_path_factory.mktemp("layers")
    model = write_model(directory / "in", shards)
    (model / "tokenizer.json").write_text(json.dumps(["token"] * 10_000))
    convert_checkpoint(model, directory / "whole")
    return model, files_of(directory / "whole")


def stopped(arguments, how, writes, moment) -> subprocess.CompletedProcess:
    """Runs the slow command and sends a signal some time after so many writes."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    for _ in range(writes):
        assert process.stdout.readline() == "put\n"
    time.sleep(moment)
    process.send_signal(how)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=[pytest.mark.long] if s else []) for s in range(12)])
def test_a_killed_conversion_goes_on(layers, tmp_path, seed):
    (model, want), out, rng = layers, tmp_path / "out", random.Random(seed)
    arguments = ["convert", str(model), str(out)]
    stop = stopped(arguments, signal.SIGKILL, rng.randint(1, WRITES), rng.uniform(0, 0.012))
    left = files_of(out)
    if stop.returncode == 0:  # it was at the end already
        assert left == want
    else:
        assert stop.returncode == -signal.SIGKILL
        whole = {name: data for name, data in left.items() if ".tmp-" not in name and name != PROGRESS}
        assert whole.items() <= want.items()
    assert main([*arguments, "--resume", "--quiet"]) == 0
    assert files_of(out) == want


# The command, which sends itself Ctrl-C at the 20th write of a tensor, in the third shard. The thread that writes
# waits until the main thread has the signal, so that the shard cannot be finished before.
INTERRUPTED = """
import itertools, os, signal, sys, threading
from jnvfp4 import cli
from jnvfp4.checkpoints._files.safetensors import Writer
put, count, received = Writer.put, itertools.count(1), threading.Event()
def interrupt(number, frame):
    received.set()
    raise KeyboardInterrupt
def counted(*arguments):
    if next(count) == 20:
        os.kill(os.getpid(), signal.SIGINT)
        if threading.current_thread() is not threading.main_thread():
            assert received.wait(60)
    put(*arguments)
signal.signal(signal.SIGINT, interrupt)
Writer.put = counted
sys.exit(cli.main())
"""


@pytest.mark.parametrize("workers", ["1", "3"])
def test_an_interrupted_command_says_how_to_go_on(layers, tmp_path, workers):
    model, want = layers
    arguments = ["convert", str(model), str(tmp_path / "out"), "--workers", workers]
    command = [sys.executable, "-c", INTERRUPTED, *arguments]
    stop = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    assert stop.returncode == 130
    assert stop.stderr == "error: interrupted; finished shards are kept\nhint: --resume goes on\n"
    left = files_of(tmp_path / "out")
    assert sorted(left) == [PROGRESS, *sorted(n for n in want if n.endswith("safetensors"))[:2]]
    assert main([*arguments, "--resume", "--quiet"]) == 0
    assert files_of(tmp_path / "out") == want


# ---------------------------------------------------------------- memory
MEMORY = """
import sys
import jax
from jnvfp4.checkpoints import convert_checkpoint
jax.devices("cpu")  # what a platform loads when it begins is no part of a conversion
def peak():
    (line,) = (l for l in open("/proc/self/status") if l.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
print(peak())
for model in sys.argv[1:]:
    convert_checkpoint(model, model + "-out")
    print(peak())
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads VmHWM of /proc")
@pytest.mark.parametrize(
    ("few", "many", "rows"), [(2, 40, 1024), pytest.param(4, 24, 4096, marks=pytest.mark.long)], ids=["small", "large"]
)
def test_memory_does_not_grow_with_layers(tmp_path, few, many, rows):
    """Beyond the imported library it is the largest group, its output and 300 MB; the files are several times that."""
    group, roles, w = 2 * rows * 1024 * 2, ("gate", "up"), weight(rows, 1024)
    layers = {n: [f"model.layers.{i}.mlp.{role}_proj.weight" for i in range(n) for role in roles] for n in (few, many)}
    models = [model_of(tmp_path / str(n), dict.fromkeys(names, w)) for n, names in layers.items()]
    arguments = [sys.executable, "-c", MEMORY, *map(str, models)]
    done = subprocess.run(arguments, env=environment(), check=True, capture_output=True, text=True)
    before, a, b = map(int, done.stdout.split())
    assert b - before < group + group * 9 // 32 + 300e6
    assert b - a < many * group / 4
