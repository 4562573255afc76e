"""Runs the command ``jnvfp4``: convert, inspect, lint, verify, repack, dequantize, diff, doctor, support, conform."""

import argparse
import dataclasses
import os
import re
import sys
import tempfile
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import jax

from . import __version__
from ._reports import conform, doctor, support
from .checkpoints import console
from .checkpoints._convert.encode import Implementation
from .checkpoints._convert.options import ConvertOptions
from .checkpoints._convert.plan import make_plan
from .checkpoints._files.errors import CheckpointError, CommandError, Exit, OptionError
from .checkpoints._files.files import RECORD, checked_path, existing_parent
from .checkpoints._files.source import open_source
from .checkpoints._layouts.layouts import LAYOUTS
from .checkpoints._layouts.loaders import TITLES
from .checkpoints.compare import diff, inspect
from .checkpoints.convert import convert_checkpoint
from .checkpoints.fix import fix_checkpoint
from .checkpoints.report_files import summary, write_report
from .checkpoints.rewrite import dequantize_checkpoint, repack_checkpoint
from .checkpoints.rules import lint
from .checkpoints.verify import VerificationError, as_json, verify_checkpoint
from .spec import NVFP4, NVFP4_2D, ROW_SCALED, QuantSpec, four_over_six

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
Add = Callable[..., argparse.Action]  # ``add_argument`` of a group of arguments
Run = Callable[[argparse.Namespace], Exit]  # runs the command that it is called like
_BROKEN_PIPE = 141  # the exit code that a shell shows for a process that SIGPIPE ended
_IMPLEMENTATIONS: dict[str, Implementation] = {"auto": None, "cuda": "native", "cpu": "native", "jnp": "reference"}
# The flags that are not called like the field of ConvertOptions, or the argument of another function, that they set.
_FLAGS = {
    "layout": "--format",
    "spec": "--recipe",
    "start_layers": "--num-layers-at-start-in-bf16",
    "end_layers": "--num-layers-at-end-in-bf16",
    "max_shard_bytes": "--max-shard-size",
    "chunk_bytes": "--device-chunk",
    "max_relative_error": "--max-rel-error",
}


def _flag(name: str) -> str:
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


# ---------------------------------------------------------------- values of flags
def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmg]?i?b?)", text.lower(), re.ASCII)
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"invalid size {text!r}; expected a size such as 500MB or 5GB")
    return size


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"invalid number {text!r}; expected 1 or more")
    return int(text)


def _input_amax(text: str) -> float | Path:
    try:
        return float(text)
    except ValueError:
        if not os.path.isfile(text):
            raise argparse.ArgumentTypeError(f"{text!r} is no file; expected a number or a JSON file") from None
        return Path(text)


def _device(name: str, backend: str) -> jax.Device | None:
    """Finds the device ``cpu`` or ``cuda:N``; ``auto`` takes the backend's, or None: the converter chooses."""
    if name != "auto" and backend in ("cuda", "cpu") and not name.startswith(backend):
        raise CommandError(f"--backend is {backend} and --device is {name}", "a device of the backend")
    if name == "auto" and backend in ("auto", "jnp"):
        return None
    name = backend if name == "auto" else name
    platform, _, number = name.partition(":")
    try:
        return jax.devices(platform)[int(number or 0)]
    except (RuntimeError, IndexError, ValueError) as e:
        raise CommandError(f"--device is {name!r}", "auto, cpu, or cuda:N of a GPU that JAX has") from e


# ---------------------------------------------------------------- flags
class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(message, hint=f"{self.prog} --help")

    def _print_message(self, message: str, file: object = None) -> None:  # argparse's own ignores a full disk
        _show(message.removesuffix("\n"))


_EXPERT_LAYOUT = "axes of experts in one tensor: [E, N, K] or [E, K, N]; auto decides by the config"
_OUTPUT = "output: a new or empty directory"


def _parser() -> argparse.ArgumentParser:
    common, json = _Parser(add_help=False), _Parser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    json.add_argument("--json", action="store_true", help="print JSON instead of text")
    text = "NVFP4 for JAX: Hugging Face checkpoints, and what runs here."
    parser = _Parser(prog="jnvfp4", description=text, parents=[common])
    parser.add_argument("--version", action="version", version=f"jnvfp4 {__version__}")
    # A shorter metavar makes the column too narrow for dequantize.
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND [-h]", parser_class=_Parser)

    def command(run: Run, text: str, more: str = "", example: str = "", **paths: str) -> argparse.ArgumentParser:
        name = run.__name__.removeprefix("_")
        p = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.{more}",
            epilog=f"example: jnvfp4 {name} {example}" if example else None,
            parents=[common] if run in (_convert, _support, _conform) else [common, json],
        )
        _positional(p.add_argument, **paths)
        p.set_defaults(run=run)
        return p

    more = " SOURCE and OUTPUT come first, since some options take several values."
    _convert_arguments(command(_convert, "quantize a checkpoint", more))
    text = "describe a checkpoint: layout, kept tensors, groups, sizes"
    command(_inspect, text, example="MODEL-NVFP4", source="the checkpoint")
    more = (
        " Codes are not read, only headers, scales and configs. Each rule says which loaders break and what to do. "
        "Exit code 1 says that something is found, or left after --fix; notes do not count."
    )
    text = "find what breaks loaders of any software's NVFP4 checkpoint"
    p = command(_lint, text, more, "MODEL-NVFP4 --fix OUTPUT", source="the checkpoint")
    text = "write a checkpoint with scales and configs mended, and the same codes, into a new or empty directory"
    p.add_argument("--fix", type=Path, metavar="OUTPUT", help=text)
    text = "ranks of tensor parallelism that must not cut blocks (without it: a note about 2, 4 and 8)"
    p.add_argument("--ranks", type=_count, metavar="N", help=text)
    more = " The last line gives the verdict. Exit code 5: the checkpoint is not verified."
    paths = {"source": "the checkpoint that was converted", "output": "the converted checkpoint"}
    p = command(_verify, "compare a converted checkpoint with its source", more, "MODEL MODEL-NVFP4", **paths)
    text = "largest relative error of a weight (default 0.2)"
    p.add_argument("--max-rel-error", type=float, default=0.2, metavar="X", help=text)
    text = f"also compare the weights that a loader multiplies by: {', '.join(TITLES)}"
    p.add_argument("--as", dest="loader", choices=TITLES, metavar="LOADER", help=text)
    _option(p.add_argument, "expert_layout", _EXPERT_LAYOUT)
    text = "with --as: read no codes and nothing of SOURCE, and find only what the loader changes"
    p.add_argument("--scales-only", action="store_true", help=text)
    text = "write another layout, with the same codes and block scales"
    paths = {"source": "the checkpoint", "output": _OUTPUT}
    p = command(_repack, text, example="MODEL-NVFP4 OUTPUT --format compressed-tensors", **paths)
    p.add_argument(
        "--format", choices=LAYOUTS, required=True, metavar="LAYOUT", help=f"layout of the output: {', '.join(LAYOUTS)}"
    )
    p = command(_dequantize, "decode a checkpoint to 16 or 32 bits", example="MODEL-NVFP4 OUTPUT --dtype bf16", **paths)
    p.add_argument("--dtype", choices=("bf16", "f16", "f32"), default="bf16", help="dtype of the decoded weights")
    more = (
        " Tensors are compared, and every entry of config.json and hf_quant_config.json (of two layouts, not those "
        "that describe the quantization). Tokenizers and other files are not compared. Exit code 1 says that "
        "something differs."
    )
    text = "count where two checkpoints differ, in tensors and in configs"
    paths = {"first": "a checkpoint", "second": "another checkpoint, of any layout"}
    command(_diff, text, more, "MODEL-A MODEL-B", **paths)
    more = (
        " Every GEMM kernel and the plain quantizers compute known answers; --full checks all recipes, with more "
        "operands. GPUs newer than Hopper always get all checks. Exit code 5 says that a kernel is wrong."
    )
    p = command(_doctor, "show what was built and what runs here, and check its bits", more)
    p.add_argument("--full", action="store_true", help="run all checks (under a minute), as for a report of a bug")
    command(_support, "show which operation has which kernels")
    more = (
        " The first device of each platform computes all vectors of jnvfp4/conformance. Exit code 1 says that a byte "
        "differs."
    )
    p = command(_conform, "compare what runs here with the vectors of NVFP4", more, "--record RESULTS.npz")
    p.add_argument("--record", type=Path, metavar="FILE", help="write what the default device gives, and compare it")
    return parser


def _positional(add: Add, **arguments: str) -> None:
    for name, text in arguments.items():
        add(name, type=Path, metavar=name.upper(), help=text)


_TYPES = typing.get_type_hints(ConvertOptions)
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(ConvertOptions)}


def _option(add: Add, name: str, text: str, **more: Any) -> None:
    """Adds the flag of a field of ConvertOptions, whose type says whether it is a switch, a choice or a list."""
    hint, default = _TYPES[name], _DEFAULTS[name]
    if hint is bool:
        more["action"] = "store_true"
    elif typing.get_origin(hint) is Literal:
        more["choices"] = typing.get_args(hint)
    elif typing.get_origin(hint) is tuple:
        more["nargs"] = "+"
    add(_flag(name), dest=name, default=default, help=text, **more)


def _convert_arguments(p: argparse.ArgumentParser) -> None:
    p.usage = """%(prog)s SOURCE OUTPUT [files] [quantization] [selection]
                      [activations] [other models] [speed] [display]"""

    def group(title: str, example: str) -> tuple[Add, Callable[..., None]]:
        add = p.add_argument_group(title, f"example: jnvfp4 convert {example}").add_argument
        return add, partial(_option, add)

    add, option = group("files", "MODEL MODEL-NVFP4 --max-shard-size 5GB")
    _positional(add, source="input: a directory of safetensors files, or one such file", output=_OUTPUT)
    add("--subfolder", type=Path, metavar="NAME", help="convert this folder of the input instead, with its config")
    option("max_shard_bytes", "size of output files, such as 5GB, instead of the input's", type=_size, metavar="SIZE")
    add("--resume", action="store_true", help="continue an interrupted conversion")
    add("--overwrite", action="store_true", help="accept an output that has files")

    add, option = group("quantization", "MODEL OUTPUT --format te --recipe row-scaled")
    option("layout", "layout of the output (default modelopt)")
    recipes = ("nvfp4", "4over6", "row-scaled")
    add("--recipe", choices=recipes, default="nvfp4", help="how weights are quantized (default nvfp4)")
    add("--4over6-err-mode", dest="error", choices=("mae", "mse"), help="error that 4over6 minimizes (default mse)")
    add("--e4m3-max", type=int, choices=(448, 256), help="largest block scale of 4over6 (default 448)")
    add("--2d", dest="two_d", action="store_true", help="use 16x16 blocks instead of 1x16")
    text = "scale that maps the largest of 16 to 6, or the one of least error (default max6)"
    add("--scales", choices=("max6", "search"), default="max6", help=text)
    text = "round weights by GPTQ: X^T X of what they multiply by weight, in a safetensors file or a folder of some"
    option("hessians", text, type=Path, metavar="FILE")
    option("share", r"share a global scale in further groups: (PARENT)\.ROLE", metavar="EXPRESSION")

    add, option = group("selection", 'MODEL OUTPUT --ignore "*.o_proj" --strict')
    pattern = "a module and all below it, re: and an expression, or a name with *"
    option("preset", "quantize all projections, or only experts")
    option("targets", f"quantize only these weights: {pattern}", metavar="PATTERN")
    option("ignore", f"leave these weights unquantized: {pattern}", metavar="PATTERN")
    option("start_layers", "leave the first N decoder layers unquantized", type=int, metavar="N")
    option("end_layers", "leave the last N decoder layers unquantized", type=int, metavar="N")
    option("on_nonfinite", "skip: leave a group with NaN or infinity unquantized")
    option("on_bad_shape", "keep: leave a weight unquantized if its K is no multiple of 16")
    option("strict", "refuse a rule that splits a group")

    add, option = group("activations", "MODEL OUTPUT --input-amax amaxes.json")
    option("weight_only", "keep activations in high precision")
    text = (
        "amax of all activations, or a JSON file with the amax of each module (without it scales are 1.0, uncalibrated)"
    )
    option("input_amax", text, type=_input_amax, metavar="NUMBER|FILE")
    option("on_missing_amax", "siblings: an expert that the file does not name has the largest amax of its siblings")
    option("kv_cache", "KV cache that the config asks for (default none)")

    add, option = group("other models", "MODEL OUTPUT --experts per-expert")
    option("experts", "leave experts as they are, give each its own tensors, or put all in one")
    option("expert_layout", _EXPERT_LAYOUT)
    option("dequantize_input", "decode weights in FP8 (per tensor, per channel, 128x128 blocks, MXFP8), or also MXFP4")

    add, option = group("speed", "MODEL OUTPUT --device cuda:0 --workers 4")
    add("--device", default="auto", metavar="auto|cpu|cuda:N", help="device that quantizes; auto is cpu")
    add("--backend", choices=_IMPLEMENTATIONS, default="auto", help="kernels that quantize, to the same bytes")
    option("chunk_bytes", "bytes of a weight processed at once (default 64MiB)", type=_size, metavar="SIZE")
    add("--workers", type=_count, default=2, metavar="N", help="tensors processed at once (default 2)")

    add, _ = group("display", "MODEL OUTPUT --dry-run")
    add("--report", type=Path, metavar="DIR", help="verify, and write report.json, .csv and .png into DIR")
    add("--dry-run", action="store_true", help="show what would be done, write nothing")
    add("--json", action="store_true", help="print JSON instead of text")
    add("--quiet", action="store_true", help="print no progress and no warnings")


# ---------------------------------------------------------------- convert
def _options(a: argparse.Namespace) -> ConvertOptions:
    """Makes the options: flags have the names of the fields, but for those that choose the spec."""
    values: dict[str, Any] = {
        name: tuple(v) if isinstance(v := getattr(a, name), list) else v for name in _TYPES if name != "spec"
    }
    return ConvertOptions(spec=_spec(a), **values)


def _spec(a: argparse.Namespace) -> QuantSpec:
    if a.scales == "search" and (a.two_d or a.recipe == "4over6"):
        other = "--2d is used" if a.two_d else f"--recipe is {a.recipe}"
        raise CommandError(f"--scales is search and {other}", "1x16 blocks of recipe nvfp4 or row-scaled")
    if a.scales == "search" and a.backend == "cuda":
        raise CommandError("--scales is search and --backend is cuda", "another one, as GPUs have no kernel for it")
    if a.recipe == "4over6":
        return four_over_six(a.error or "mse", e4m3_max=a.e4m3_max or 448, block_rows=16 if a.two_d else 1)
    for flag, value in (("--4over6-err-mode", a.error), ("--e4m3-max", a.e4m3_max)):
        if value is not None:
            raise CommandError(f"{flag} is {value} and --recipe is {a.recipe}", f"--recipe 4over6 with {flag}")
    if a.recipe == "row-scaled":
        if a.two_d:
            raise CommandError("--2d is used and --recipe is row-scaled", "1x16 blocks, without --2d")
        return dataclasses.replace(ROW_SCALED, select=a.scales)
    return NVFP4_2D if a.two_d else dataclasses.replace(NVFP4, select=a.scales)


def _model(a: argparse.Namespace) -> Path:
    if a.subfolder is None:
        return a.source
    if a.subfolder.is_absolute() or ".." in a.subfolder.parts:
        raise CommandError(f"--subfolder is {str(a.subfolder)!r}", "a folder in the input")
    return a.source / a.subfolder


def _check_directory(path: Path) -> None:
    """Raises if a directory cannot be made or written into. It is not made, since it may be inside of the output."""
    directory = existing_parent(checked_path(path))
    if not directory.is_dir():
        raise CheckpointError("is a file", "a directory", file=directory, code=Exit.USAGE)
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as e:
        raise CheckpointError(f"cannot be written into ({e.strerror})", file=directory, code=Exit.IO) from e


def _convert(a: argparse.Namespace) -> Exit:
    options, model = _options(a), _model(a)
    source = open_source(model)
    if a.dry_run:
        plan = console.plan_as_json(make_plan(source, options))
        return _show(plan if a.json else console.plan_table(plan))
    if a.report is not None:
        _check_directory(a.report)
    try:
        with console.progress(source.nbytes, quiet=a.quiet) as on_progress:
            result = convert_checkpoint(
                model,
                a.output,
                options,
                device=_device(a.device, a.backend),
                implementation=_IMPLEMENTATIONS[a.backend],
                workers=a.workers,
                overwrite=a.overwrite,
                resume=a.resume,
                on_progress=on_progress,
            )
    except KeyboardInterrupt:
        if not (a.output / RECORD).is_file():
            raise
        text = "interrupted; finished shards are kept"
        raise CommandError(text, hint="--resume goes on", code=Exit.INTERRUPTED) from None
    if not a.quiet:
        for warning in result.warnings:
            _warn(warning)
    if a.report is not None:
        try:
            records = verify_checkpoint(model, a.output, expert_layout=a.expert_layout, warn=_ignore)
        except VerificationError as e:
            write_report(a.report, e.records, result)
            raise
        written = write_report(a.report, records, result)
        if not a.quiet and not any(path.suffix == ".png" for path in written):
            console.say("note: no report.png, as matplotlib is not installed", sys.stderr)
        tables = f"{console.records_table(records)}\n{console.verdict(records, [])}\n{console.conversion_table(result)}"
        return _show(summary(records, result) if a.json else tables)
    return _show(console.result_as_json(result) if a.json else console.conversion_table(result))


# ---------------------------------------------------------------- the other commands
def _inspect(a: argparse.Namespace) -> Exit:
    description = inspect(a.source)
    return _show(description if a.json else console.inspect_table(description))


def _verify(a: argparse.Namespace) -> Exit:
    failure: VerificationError | None = None
    try:
        records = verify_checkpoint(
            a.source, a.output, a.max_rel_error, a.expert_layout, loader=a.loader, scales_only=a.scales_only, warn=_warn
        )
    except VerificationError as e:
        records, failure = e.records, e
    failures = [str(f) for f in failure.failures] if failure else []
    last = console.verdict(records, failures)
    as_values = {"verdict": last, "failures": failures, **summary(records), "tensors": as_json(records)}
    _show(as_values if a.json else f"{console.records_table(records)}\n{last}")
    if failure:
        raise failure
    return Exit.OK


def _warn(text: str) -> None:
    console.say(f"warning: {text}", sys.stderr)


def _ignore(text: str) -> None:
    """Takes a warning that was given before."""


def _lint(a: argparse.Namespace) -> Exit:
    done = fix_checkpoint(a.source, a.fix, warn=_warn) if a.fix is not None else {}
    found = lint(a.fix if done else a.source, a.ranks, warn=_warn if a.fix is None else _ignore)
    _show(console.findings_as_json(found, done) if a.json else console.findings_table(found, done, a.fix))
    return Exit.OK if all(f.note for f in found) else Exit.DIFFERENT


def _repack(a: argparse.Namespace) -> Exit:
    changed = repack_checkpoint(a.source, a.output, a.format, warn=_warn)
    did = _rewritten(a, "kv_scales", to=a.format) | {"globals_that_do_not_come_back": changed}
    text = (
        "repacked {weights} weights from {from} to {to}, with the same codes and block scales, and copied {copied} "
        "other tensors\n{globals_that_do_not_come_back} global scales would change in the last bit on the way back"
    )
    return _show(did if a.json else text.format_map(did))


def _dequantize(a: argparse.Namespace) -> Exit:
    dequantize_checkpoint(a.source, a.output, a.dtype.upper(), warn=_warn)
    did = _rewritten(a, dtype=a.dtype)
    text = "decoded {weights} NVFP4 weights and {fp8} FP8 weights to {dtype}, and copied {copied} other tensors"
    return _show(did if a.json else text.format_map(did))


def _rewritten(a: argparse.Namespace, *copied: str, **to: str) -> dict[str, object]:
    source = inspect(a.source)
    weights, fp8, *others = (len(source[k]) for k in ("quantized", "fp8", "kept", *copied))
    return {"from": source["layout"], **to, "weights": weights, "fp8": fp8, "copied": sum(others)}


def _diff(a: argparse.Namespace) -> Exit:
    found = diff(a.first, a.second, warn=_warn)
    _show(vars(found) if a.json else console.difference_table(found))
    return Exit.OK if found.same else Exit.DIFFERENT


def _doctor(a: argparse.Namespace) -> Exit:
    with _writing_stdout():
        found = doctor.report(a.full) if a.json else {"ok": doctor.doctor(a.full)}
        sys.stdout.flush()
    if a.json:
        _show(found)
    if not found["ok"]:
        raise CommandError("a kernel gives other bits than the reference", code=Exit.VERIFICATION)
    return Exit.OK


def _support(a: argparse.Namespace) -> Exit:
    return _show(support.support_table().removesuffix("\n"))


def _conform(a: argparse.Namespace) -> Exit:
    tables = conform.record(a.record) if a.record else conform.tables()
    _show("\n\n".join(text for text, _ in tables))
    return Exit.OK if all(equal for _, equal in tables) else Exit.DIFFERENT


def _show(result: object) -> Exit:
    with _writing_stdout():
        console.say(result, sys.stdout, indent=2)
    return Exit.OK


@contextmanager
def _writing_stdout() -> Iterator[None]:
    """Says that stdout could not be written, unless the error is about a file or a reader that has gone."""
    try:
        yield
    except OSError as e:
        if e.filename or isinstance(e, BrokenPipeError):
            raise
        console.discard(sys.stdout)
        raise CheckpointError(f"cannot be written ({e.strerror})", file="stdout", code=Exit.IO) from e


def _open_closed_streams() -> None:
    """Opens the standard streams that the caller has closed, so that no file of a checkpoint takes their descriptors.

    What is written to stderr is lost then, and to write to stdout is the error that the system makes of it.
    """
    for name, flags in (("stdin", os.O_RDONLY), ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:  # the system gives the lowest descriptor that is free
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode, closefd=False))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code. Results go to stdout as JSON or a table, errors to stderr."""
    _open_closed_streams()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        a = _parser().parse_args(arguments)
        return int(a.run(a))
    except BrokenPipeError:  # the reader stopped reading, as head does
        console.discard(sys.stdout)
        return _BROKEN_PIPE
    except (CommandError, OSError) as e:
        if "--debug" in arguments:
            raise
        if isinstance(e, OSError):
            e = CommandError(f"{e.filename or 'a file'}: {e.strerror}", code=Exit.IO)
        console.say(f"error: {e.renamed(_flag) if isinstance(e, OptionError) else e}", sys.stderr)
        return int(e.code)
    except KeyboardInterrupt:
        console.say("error: interrupted", sys.stderr)
        return int(Exit.INTERRUPTED)
