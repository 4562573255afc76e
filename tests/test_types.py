"""What a type checker reads at the front door: every public function has types, and a call has that of its result."""

import inspect
import os
import pathlib
import re
import subprocess
import sys
import typing
from collections.abc import Iterator

import pytest

import jnvfp4

ROOT = pathlib.Path(__file__).parent.parent
MODULES = (jnvfp4, jnvfp4.attention, jnvfp4.recipes, jnvfp4.remat, jnvfp4.sharding, jnvfp4.stats)
OF_TREES = {jnvfp4.to_state, jnvfp4.from_state, jnvfp4.Policy.explain}  # trees of anything are Any, as in JAX
# expression -> what a checker says that it is
CALLS = {
    "jnvfp4.quantize(x)": "NVFP4Tensor",
    "jnvfp4.quantize(x).data": "Array",
    "jnvfp4.quantize(x).format": "Format",
    "jnvfp4.quantize_pair(x, jnvfp4.NVFP4, jnvfp4.NVFP4_RHT)": "tuple[NVFP4Tensor, NVFP4Tensor]",
    "jnvfp4.transpose(q, jnvfp4.NVFP4)": "NVFP4Tensor",
    "jnvfp4.dequantize(q, jnp.bfloat16)": "Array",
    "jnvfp4.fake_quant(x)": "Array",
    "jnvfp4.matmul_nt(q, q)": "Array",
    "jnvfp4.grouped_matmul_nt(x, q, sizes)": "Array",
    "jnvfp4.linear(x, w, jnvfp4.recipes.pretrain(), key=key)": "Array",
    "jnvfp4.grouped_linear(x, w, sizes)": "Array",
    "jnvfp4.attention.append_kv(jnvfp4.attention.KVCache(q, q), x, x, sizes).keys": "NVFP4Tensor | Array",
    "jnvfp4.attention.decode_attention(x, jnvfp4.attention.KVCache(q, q), sizes)": "Array",
    "jnvfp4.einsum('mk,nk->mn', x, w)": "Array",
    "jnvfp4.DotGeneral(jnvfp4.recipes.pretrain())": "DotGeneral",
    "jnvfp4.spec.four_over_six('mse')": "QuantSpec",
    "jnvfp4.recipes.pretrain()": "Recipe",
    "jnvfp4.supports('quantize', x).native": "bool",
    "jnvfp4.stats.quantization_report(x).relative_error": "Array",
    "jnvfp4.stats.probe()": "Array",
    "jnvfp4.stats.probe(bool())": "Array | None",
    "jnvfp4.stats.read(x).dy.underflow_share": "Array",
    "jnvfp4.Policy([jnvfp4.Rule('a', jnvfp4.Recipe())])": "Policy",
    "jnvfp4.__version__": "str",
}
GIVEN = "x: jax.Array, w: jax.Array, q: jnvfp4.NVFP4Tensor, sizes: jax.Array, key: jax.Array"


def functions() -> Iterator[tuple[str, object]]:
    """The public functions, and the methods of the public classes."""
    for module in MODULES:
        for name, value in vars(module).items():
            if name.startswith("_") or not getattr(value, "__module__", "").startswith("jnvfp4"):
                continue
            if inspect.isfunction(value):
                yield name, value
            elif inspect.isclass(value):
                for method, function in vars(value).items():
                    function = function.fget if isinstance(function, property) else function
                    if inspect.isfunction(function) and (method == "__call__" or not method.startswith("_")):
                        yield f"{name}.{method}", function


FUNCTIONS = dict(functions())


def has_any(hint: object) -> bool:
    """``type[Any]`` is a class, as in JAX's DTypeLike."""
    return hint is typing.Any or (typing.get_origin(hint) is not type and any(map(has_any, typing.get_args(hint))))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_has_types(name):
    function = inspect.unwrap(FUNCTIONS[name])
    hints = typing.get_type_hints(function)
    assert {*inspect.signature(function).parameters, "return"} - {"self", "cls"} <= set(hints)
    assert FUNCTIONS[name] in OF_TREES or not any(map(has_any, hints.values()))


def test_the_functions_are_those_of_the_package():
    assert {"quantize", "linear", "NVFP4Tensor.reshape", "Policy.explain", "DotGeneral.__call__"} <= set(FUNCTIONS)


@pytest.mark.long
def test_a_checker_knows_what_a_call_returns(tmp_path):
    pytest.importorskip("mypy", reason="no mypy")
    calls = "".join(f"    reveal_type({call})\n" for call in CALLS)
    imports = "import jax\nimport jax.numpy as jnp\n\nimport jnvfp4\n\n\n"
    (tmp_path / "calls.py").write_text(f"{imports}def f({GIVEN}) -> None:\n{calls}")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "calls.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert dict(zip(CALLS, [re.sub(r"[\w.]+\.(?=\w)", "", text) for text in found], strict=True)) == CALLS
