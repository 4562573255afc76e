"""Text for pretraining: the sources and documentation of the installed packages, as tokens of a trained tokenizer.

Nothing is downloaded. Which files there are depends on what is installed, so every result names the corpus by its hash.
"""

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

CODE = {
    ".c",
    ".cc",
    ".cpp",
    ".cu",
    ".cuh",
    ".f90",
    ".h",
    ".hpp",
    ".inc",
    ".java",
    ".js",
    ".proto",
    ".py",
    ".pyi",
    ".pyx",
}
DOCUMENTS = {".cfg", ".ipynb", ".md", ".rst", ".toml", ".ts", ".txt", ".yaml", ".yml"}
LARGEST_FILE = 1 << 20  # larger ones are data
END = "<|end|>"  # after each file
SAMPLED = 16  # one file in so many teaches the tokenizer
HELD_OUT = 100  # one file in so many validates
BATCH = 4096  # files that are encoded at a time


@dataclass(frozen=True)
class Source:
    """Says what a corpus was made from.

    Attributes:
      sha256: of the texts, in the order of the tokens.
      files: number of files, without repeated ones.
      bytes: of the files.
      train_tokens: number of tokens to train on.
      val_tokens: number of tokens to validate with.
      vocabulary: number of different tokens.
    """

    sha256: str
    files: int
    bytes: int
    train_tokens: int
    val_tokens: int
    vocabulary: int


@dataclass(frozen=True)
class Corpus:
    """Holds the tokens, uint16, of the files to train on and of those to validate with."""

    train: np.ndarray
    val: np.ndarray
    source: Source


def standard_library() -> Path:
    """Returns the folder of the standard library."""
    return Path(sysconfig.get_paths()["stdlib"]).resolve()


def installed() -> list[Path]:
    """Returns the folders of the standard library and of the installed packages."""
    paths = sysconfig.get_paths()
    return sorted({Path(paths[name]).resolve() for name in ("stdlib", "purelib", "platlib")})


def texts(folders: list[Path], limit: int | None) -> list[tuple[bytes, str]]:
    """Reads the files of some folders: their hashes and texts, in the order of the hashes, every text once.

    Args:
      folders: where to look.
      limit: stop after about so many bytes; None for all.
    """
    found: dict[bytes, str] = {}
    total = 0
    for path in _files(folders):
        content = path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if digest in found:
            continue
        try:
            found[digest] = content.decode()
        except UnicodeDecodeError:
            continue
        total += len(content)
        if limit is not None and total >= limit:
            break
    return sorted(found.items())


def _files(folders: list[Path]) -> Iterator[Path]:
    seen: set[Path] = set()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            wanted = path.suffix in CODE | DOCUMENTS and path.is_file() and not path.is_symlink()
            if wanted and path not in seen and 0 < path.stat().st_size <= LARGEST_FILE:
                seen.add(path)
                yield path


def build(folders: list[Path], vocabulary: int, limit: int | None = None) -> Corpus:
    """Trains a byte-pair tokenizer on a sample of the files and encodes all of them.

    Args:
      folders: where the files are.
      vocabulary: number of tokens.
      limit: stop after about so many bytes of files; None for all.

    Raises:
      ValueError: there are too few files to hold some out.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    found = texts(folders, limit)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text for _, text in found[::SAMPLED]], trainer)
    end = tokenizer.token_to_id(END)

    parts: dict[bool, list[np.ndarray]] = {False: [], True: []}
    state = hashlib.sha256()
    for begin in range(0, len(found), BATCH):
        some = found[begin : begin + BATCH]
        for (digest, _), encoded in zip(some, tokenizer.encode_batch_fast([text for _, text in some]), strict=True):
            state.update(digest)
            is_held_out = int.from_bytes(digest[:4]) % HELD_OUT == 0
            parts[is_held_out].append(np.array([*encoded.ids, end], np.uint16))
    if not (parts[False] and parts[True]):
        raise ValueError(f"folders must have hundreds of files, a part of them for validation, got {len(found)} files")
    train, val = (np.concatenate(parts[is_held_out]) for is_held_out in (False, True))
    size = sum(len(text.encode()) for _, text in found)
    return Corpus(train, val, Source(state.hexdigest(), len(found), size, len(train), len(val), vocabulary))


def load(path: Path, folders: list[Path], vocabulary: int, limit: int | None = None) -> Corpus:
    """Reads a corpus from a file, or builds it, as ``build`` does, and writes the file.

    Raises:
      ValueError: the file was made from other folders, with another vocabulary or limit.
    """
    wanted = json.dumps({"folders": list(map(str, folders)), "vocabulary": vocabulary, "limit": limit})
    if not path.exists():
        corpus = build(folders, vocabulary, limit)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"unfinished-{path.name}")
        source = json.dumps(asdict(corpus.source))
        np.savez(unfinished, train=corpus.train, val=corpus.val, source=source, wanted=wanted)
        unfinished.rename(path)
        return corpus
    with np.load(path) as arrays:
        if str(arrays["wanted"]) != wanted:
            raise ValueError(f"{path} must be made from {wanted}, got {arrays['wanted']}; name another file")
    return read(path)


def read(path: Path) -> Corpus:
    """Reads a corpus that ``load`` wrote."""
    with np.load(path) as arrays:
        return Corpus(arrays["train"], arrays["val"], Source(**json.loads(str(arrays["source"]))))
