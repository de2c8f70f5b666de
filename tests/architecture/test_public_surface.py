"""The public names, frozen, and the signatures of the verbs, which are the same for every backend.

A changed name is a changed promise: add a line to CHANGELOG.md with it.
`python -m tests.architecture.test_public_surface` writes the names of today into public_names.txt.
"""

import dataclasses
import importlib
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

import f8emu.spec
from f8emu.spec import Format

NAMES = Path(__file__).with_name("public_names.txt")
"""Every public name, with its package. A name that comes or goes changes this file: see `test_public_names`."""
SURFACE: dict[str, list[str]] = {}
for line in NAMES.read_text().split():
    package, _, public_name = line.rpartition(".")
    SURFACE.setdefault(package, []).append(public_name)
VERBS = (
    *("amax", "cast", "decode", "dequantize", "initial_delayed_state", "mm", "quantize", "scale_from_amax"),
    *("scaled_grouped_mm", "scaled_mm", "update_delayed_state"),
)
# The verbs as the oracle has them; those of GEMMs are in `f8ref.jax` too.
SIGNATURES = {
    "amax": "(x, granularity=TENSORWISE)",
    "cast": "(x, format, *, overflow=SATURATE)",
    "decode": "(x)",
    "dequantize": "(codes, scale, granularity=TENSORWISE)",
    "initial_delayed_state": "(delayed)",
    "grouped_linear": (
        "(recipe, input, weight, offs, grad_output=None, *, delayed_state=None, split_k=None, chip=None)"
    ),
    "linear": "(recipe, input, weight, grad_output=None, bias=None, *, delayed_state=None, split_k=None, chip=None)",
    "mm": "(a, b, *, out_dtype='bfloat16', split_k=1, chip=Hopper)",
    "mma": "(a, b, c, scale_a=None, scale_b=None, *, chip=Hopper, out_dtype='float32')",
    "quantize": "(x, inv_scale, format, granularity=TENSORWISE)",
    "scale_from_amax": "(amax, format, rule=ScaleRule(), *, margin=0)",
    "scaled_grouped_mm": (
        "(a, b, scale_a, scale_b, offs=None, *, out_dtype='bfloat16', use_fast_accum=False, chip=Hopper)"
    ),
    "scaled_mm": (
        "(a, b, scale_a, scale_b, *, granularity_a=TENSORWISE, granularity_b=TENSORWISE, bias=None, "
        "out_dtype='bfloat16', use_fast_accum=False, split_k=1, chip=Hopper)"
    ),
    "update_delayed_state": "(state, amax, format, rule, delayed)",
}
OF_NUMPY: dict[str, dict[str, object]] = {
    "dequantize": {"out_dtype": "float32"},
    "mm": {"split_k": None},
    "scaled_mm": {"granularity_a": None, "granularity_b": None, "split_k": None},
}
GEMMS = ("mm", "scaled_grouped_mm", "scaled_mm")
OF_JAX = OF_NUMPY | {gemm: {"engine": "auto", **OF_NUMPY.get(gemm, {})} for gemm in GEMMS}
OF_TORCH = {
    "dequantize": {"out_dtype": "torch.float32"},
    "initial_delayed_state": {"device": None},
    "mm": OF_JAX["mm"] | {"out_dtype": "torch.bfloat16"},
    "scaled_grouped_mm": OF_JAX["scaled_grouped_mm"] | {"out_dtype": "torch.bfloat16"},
    "scaled_mm": OF_JAX["scaled_mm"] | {"out_dtype": None},
}
"""What the production paths add and default otherwise. Names and order of the operands are the oracle's."""
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def load(name: str) -> ModuleType:
    if name in ("f8ref.jax", "f8emu.jax", "f8emu.torch"):
        pytest.importorskip(name.split(".")[1])
    return importlib.import_module(name)


def parameters(verb: Callable[..., Any]) -> tuple[list[str], dict[str, object]]:
    """The positional parameters in order, and every default by name."""
    of_verb = inspect.signature(verb).parameters
    positional = [p.name for p in of_verb.values() if p.kind in POSITIONAL]
    return positional, {p.name: p.default for p in of_verb.values() if p.default is not p.empty}


def text(verb: Callable[..., Any]) -> str:
    """The signature without annotations, enum members by their name."""
    signature = inspect.signature(verb)
    bare = [
        p.replace(annotation=p.empty, default=Bare(p.default) if hasattr(p.default, "name") else p.default)
        for p in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


class Bare:
    """Prints the name of an enum member."""

    def __init__(self, member: Any) -> None:
        self.name = member.name

    def __repr__(self) -> str:
        return self.name


@pytest.mark.parametrize("package", ["f8emu.numpy", "f8emu.jax", "f8emu.dialects"])
def test_help_begins_with_names_of_types(package: str) -> None:
    """Not with the members of each Literal, which take a screen."""
    functions = [value for value in vars(load(package)).values() if isinstance(value, FunctionType)]
    assert len(functions) > 2
    assert {f.__name__: str(inspect.signature(f)) for f in functions if "Literal[" in str(inspect.signature(f))} == {}


def public_names(package: str) -> list[str]:
    public = {name: getattr(load(package), name) for name in dir(load(package)) if not name.startswith("_")}
    return sorted(name for name, value in public.items() if not isinstance(value, ModuleType))


@pytest.mark.parametrize("package", SURFACE)
def test_public_names(package: str) -> None:
    assert public_names(package) == SURFACE[package]


@pytest.mark.parametrize(
    "name", [n for n, v in vars(f8emu.spec).items() if isinstance(v, type) and dataclasses.is_dataclass(v)]
)
def test_spec_is_frozen_data(name: str) -> None:
    """Hashable, so that a recipe can be a static argument of `jax.jit`; keyword-only, so that fields can be added."""
    kind = getattr(f8emu.spec, name)
    assert kind.__dataclass_params__.frozen
    assert kind.__hash__ is not None
    assert all(field.kw_only for field in dataclasses.fields(kind))
    assert "__dict__" not in dir(kind) and "__slots__" in vars(kind)


@pytest.mark.parametrize(
    ("module", "verb"), [(name, verb) for name in ("f8ref.numpy", "f8ref.jax") for verb in SURFACE[name]]
)
def test_signature_of_the_reference(module: str, verb: str) -> None:
    assert text(getattr(load(module), verb)) == SIGNATURES[verb]


@pytest.mark.parametrize("verb", VERBS)  # a layer is Float8Linear or dot_general there
@pytest.mark.parametrize(
    ("module", "of_module"),
    [("f8emu.torch", OF_TORCH), ("f8emu.jax", OF_JAX), ("f8emu.numpy", OF_NUMPY)],
    ids=["torch", "jax", "numpy"],
)
def test_signature_of_the_production_paths(module: str, of_module: dict[str, dict[str, object]], verb: str) -> None:
    """What is written for the oracle runs there: the same operands in the same order, the same keywords."""
    oracle_positional, oracle_defaults = parameters(getattr(load("f8ref.numpy"), verb))
    positional, defaults = parameters(getattr(load(module), verb))
    assert positional == oracle_positional
    differing = {k: v for k, v in defaults.items() if k not in oracle_defaults or v != oracle_defaults[k]}
    is_named = lambda v: isinstance(v, Format) or type(v).__module__ == "torch"  # noqa: E731
    as_text = {k: str(v) if is_named(v) else v for k, v in differing.items()}
    assert as_text == of_module.get(verb, {})
    assert oracle_defaults.keys() - {"chip"} <= defaults.keys(), "they have the chip that they run on or emulate"


@pytest.mark.parametrize("verb", SURFACE["f8emu.numpy"])
def test_help_of_numpy_begins_with_names_of_types(verb: str) -> None:
    """At most six lines of 80 columns: numpy's own types are unions of private classes."""
    lines = textwrap.wrap(f"{verb}{inspect.signature(getattr(load('f8emu.numpy'), verb))}", 80)
    assert len(lines) <= 6 and "numpy._typing" not in "".join(lines)


if __name__ == "__main__":
    NAMES.write_text("".join(f"{package}.{name}\n" for package in SURFACE for name in public_names(package)))
