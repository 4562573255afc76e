"""Reads hessians of what layers multiply, by which GPTQ rounds their weights: finds each weight's, and checks it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ...calibration import damped_factor
from .._files.errors import CheckpointError
from .._files.safetensors import Planned
from .._files.source import Source, open_source
from .._layouts.names import inputs_of, is_expert, module_of
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

    def check(self, device: jax.Device) -> dict[str, list[str]]:
        """Reads all of them, one after another.

        Returns:
          of each tensor the matrices that have seen nothing: the tensor's name, of stacks with the expert.

        Raises:
          CheckpointError: values are not finite, or it is the hessian of no inputs.
        """
        return {name: [*self._unseen(name, device)] for name in dict.fromkeys(self.names.values())}

    def _unseen(self, name: str, device: jax.Device) -> Iterator[str]:
        entry = self.source.entry(name)
        stacked = len(entry.shape) == 3
        for expert in range(entry.shape[0] if stacked else 1):
            h, where = self._read(entry, expert), f", expert {expert}" if stacked else ""
            if not h.any():
                yield f"{name}{where}"
            elif observed := _fault(h, device):
                file = self.source.files[self.source.places[name]].path
                raise CheckpointError(f"{observed}{where}", "X^T X of a layer's inputs X", file=file, tensor=name)


def open_hessians(path: Path, choices: Mapping[str, Choice]) -> Hessians:
    """Opens hessians named by weights or their modules; one without its own has that of the other with its inputs.

    Args:
      path: a safetensors file, or a folder of some.
      choices: what is decided about each tensor of the model, by name.

    Raises:
      CheckpointError: a file is damaged, a name is that of no module, dtype or shape do not fit the weight, a module
        without its own could have that of two others, or no module that is quantized has one.
    """
    source, in_model = open_source(path), {module_of(name): choice for name, choice in choices.items()}
    own: dict[str, str] = {}
    of_inputs: dict[object, list[str]] = {}
    for entry in source.entries():
        module = module_of(entry.name)
        if module not in in_model:
            hint = "--experts changes names: hessians have those of the output" if is_expert(module) else ""
            raise CheckpointError(f"has {entry.name!r:.200}", "names of modules of the model", file=path, hint=hint)
        if module in own:
            raise CheckpointError(f"is the hessian of {module!r}, as is {own[module]!r}", "one", tensor=entry.name)
        own[module] = entry.name
        of_inputs.setdefault(inputs_of(module), []).append(entry.name)
    names, missing = {}, []
    for module, choice in ((m, c) for m, c in in_model.items() if c.quantizes):
        others = [] if module in own else of_inputs.get(inputs_of(module), [])
        if len(others) > 1:
            observed = f"has {' and '.join(sorted(others))}, but none of {module!r}, which has the same inputs"
            raise CheckpointError(observed, "one for each of them, or one for all", file=path)
        name = own.get(module, next(iter(others), None))
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


def _fault(h: np.ndarray, device: jax.Device) -> str:
    """Says why a matrix is no hessian; nothing if it is one."""
    if not np.isfinite(h).all():
        return "has values that are not finite"
    if (np.diagonal(h) < 0).any():
        return "has a negative value on its diagonal"
    on_device = jax.device_put(h, device)
    if not _is_symmetric(on_device):
        return "is not symmetric"
    return "" if np.isfinite(damped_factor(on_device)).all() else "is not positive definite"


@jax.jit
def _is_symmetric(h: jax.Array) -> jax.Array:
    """Tells whether H is H^T, but for sums of X^T X in another order."""
    size = jnp.sqrt(jnp.diagonal(h))  # which |H| is at most: size size^T
    return jnp.all(jnp.abs(h - h.T) <= 1e-3 * size[:, None] * size)


def _experts(choice: Choice) -> tuple[int, ...]:
    return choice.entry.shape[:1] if choice.stacked else ()


def _fits(hessian: Planned, choice: Choice) -> bool:
    k = choice.matrix[1]
    return hessian.tag == "F32" and hessian.shape == (*_experts(choice), k, k)
