"""Reads hessians of what layers multiply, by which GPTQ rounds their weights: finds each weight's, and checks it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from ...calibration import damped_factor
from .._files.errors import CheckpointError
from .._files.safetensors import Planned
from .._files.source import Source, open_source
from .._layouts.names import family_of, module_of
from .choices import Choice


@dataclass(frozen=True)
class Hessians:
    """Holds open files of hessians, and the tensor of each quantized module that has one. None is in memory.

    Attributes:
      source: the files.
      names: the names of the tensors, by module.
      missing: the quantized modules that have none.
    """

    source: Source
    names: Mapping[str, str]
    missing: tuple[str, ...]

    def read(self, module: str, expert: int) -> np.ndarray | None:
        """Reads the hessian of a module, or of an expert of a stack; None if it has seen nothing."""
        h = self._read(self.source.entry(self.names[module]), expert)
        return h if h.any() else None

    def _read(self, entry: Planned, expert: int) -> np.ndarray:
        rows = slice(expert, expert + 1)
        return self.source.read(entry.name, rows)[0] if len(entry.shape) == 3 else self.source.read(entry.name)

    def check(self, device: jax.Device) -> Iterator[str]:
        """Reads all of them, one after another, and names those that have seen nothing.

        Raises:
          CheckpointError: values are not finite, or it is the hessian of no inputs.
        """
        for name in dict.fromkeys(self.names.values()):
            entry = self.source.entry(name)
            stacked = len(entry.shape) == 3
            for expert in range(entry.shape[0] if stacked else 1):
                h, where = self._read(entry, expert), f", expert {expert}" if stacked else ""
                if not h.any():
                    yield f"{name}{where}"
                elif not np.isfinite(h).all():
                    raise self._wrong(name, f"has values that are not finite{where}", "finite values")
                elif not np.isfinite(damped_factor(jax.device_put(h, device), 0.01)).all():
                    raise self._wrong(name, f"is not positive definite{where}", "X^T X of a layer's inputs X")

    def _wrong(self, tensor: str, observed: str, expected: str) -> CheckpointError:
        file = self.source.files[self.source.places[tensor]].path
        return CheckpointError(observed, expected, file=file, tensor=tensor)


def open_hessians(path: Path, choices: Mapping[str, Choice]) -> Hessians:
    """Opens hessians named by weights or their modules; one without its own has that of another one with its inputs.

    Args:
      path: a safetensors file, or a folder of some.
      choices: what is decided about each tensor of the model, by name.

    Raises:
      CheckpointError: a file is damaged, a name is that of no module, dtype or shape do not fit the weight, or no
        module that is quantized has one.
    """
    source, in_model = open_source(path), {module_of(name): choice for name, choice in choices.items()}
    own: dict[str, str] = {}
    of_inputs: dict[object, str] = {}
    for entry in source.entries():
        module = module_of(entry.name)
        if module not in in_model:
            raise CheckpointError(f"has {entry.name!r:.200}", "names of modules of the model", file=path)
        if module in own:
            raise CheckpointError(f"is the hessian of {module!r}, as is {own[module]!r}", "one", tensor=entry.name)
        own[module] = entry.name
        of_inputs.setdefault(family_of(module), entry.name)
    names, missing = {}, []
    for module, choice in ((m, c) for m, c in in_model.items() if c.quantizes):
        name = own.get(module, of_inputs.get(family_of(module)))
        fits = name is not None and _fits(source.entry(name), choice)
        if module in own and not fits:
            entry, k = source.entry(own[module]), choice.matrix[1]
            expected = f"F32 {[*_experts(choice), k, k]}, for K = {k} of {choice.entry.name!r}"
            raise CheckpointError(f"is {entry.tag} {[*entry.shape]}", expected, file=path, tensor=entry.name)
        if name is not None and fits:
            names[module] = name
        else:
            missing.append(module)
    if not names:
        raise CheckpointError("has none of a module that is quantized", "hessians of these", file=path)
    return Hessians(source, names, tuple(missing))


def _experts(choice: Choice) -> tuple[int, ...]:
    return choice.entry.shape[:1] if choice.stacked else ()


def _fits(hessian: Planned, choice: Choice) -> bool:
    k = choice.matrix[1]
    return hessian.tag == "F32" and hessian.shape == (*_experts(choice), k, k)
