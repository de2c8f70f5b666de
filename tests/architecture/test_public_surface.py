"""The public names, frozen, and the signatures of the verbs, which are the same for every backend.

A changed list here is a changed promise: add a line to CHANGELOG.md with it.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import f8emu.spec
from f8emu.spec import Format

VERBS = (
    "amax cast decode dequantize initial_delayed_state mm quantize scale_from_amax scaled_grouped_mm scaled_mm "
    "update_delayed_state"
)
SURFACE = {
    "f8emu": """
        BLOCKWISE BLOCKWISE_UE8M0 Cast CastFrom DELAYED DelayedScaling E4M3FN E5M2 E8M0FNU F8Error Format Gemm
        Granularity Overflow RECIPES ROWWISE ROWWISE_WITH_GW_HP Recipe ScaleRule TENSORWISE recipe_by_name
        recipe_from_json recipe_from_toml
    """,
    "f8emu.spec": """
        ADA AccumulationModel AmaxHistoryReduction BFLOAT16 BLACKWELL_MMA BLACKWELL_TCGEN05 BLOCKWISE
        BLOCKWISE_UE8M0 CDNA3 CHIPS Cast CastFrom Chip DELAYED DelayedScaling DelayedState E4M3FN E4M3FNUZ E5M2 E5M2FNUZ
        E8M0FNU Evidence F8Error FLOAT16 FLOAT32 FLOAT8 FORMATS Float8State FlooredSum Format GEMM_NAMES Gemm GemmTrace
        GoldenFileError Granularity H100 HIGH_PRECISION HIGH_PRECISION_CAST HOPPER Instruction LinearTrace MAX_MARGIN
        MIN_AMAX_FLOOR MissingExtraError OPERANDS OperandError OperandTrace Overflow RECIPES RECIPE_ALIASES ROWWISE
        ROWWISE_WITH_GW_HP SERVING_RECIPES Recipe Rounding ScaleRule Scales SpecError Specials TENSORS TENSORWISE
        TRANSPOSED UnsupportedError chip_by_name float8_format format_by_name granularity_by_name output_format
        recipe_by_name recipe_from_dict recipe_from_json recipe_from_toml
    """,
    "f8emu.capture": """
        CaptureError ForeignRecord GemmRecord LeftOut Session StepHeader StepWriter Stored TensorRecord
    """,
    "f8emu.audit": "Audit CHECKS Check CheckpointError Finding Severity audit",
    "f8ref.numpy": VERBS + " grouped_linear linear mma",
    "f8ref.jax": "mm mma scaled_grouped_mm scaled_mm",
    "f8emu.numpy": VERBS + " grouped_linear linear mma",
    "f8emu.jax": VERBS
    + """
        Capture DelayedDotGeneral DotGeneral Float8State capture compiler_options
        delayed_dot_general dot_general engine_of jit linear_delayed_maximum linear_delayed_settled
        linear_delayed_state linear_delayed_update overwrite_with_gradient ragged_dot
        shared_delayed_state
    """,
    "f8emu.dialects": """
        CodeForm DIALECTS Dialect Quantized ScaleForm Stored dequantize dialect_by_name quantize
        serving_recipe zero_block_scale
    """,
    "f8emu.interop": """
        DEFAULT_RULES ParameterRule delayed_state_dict_from_float8_states float8_states_from_delayed_state_dict
        jax_device params_from_state_dict require_jax require_torch state_dict_from_params to_jax to_numpy
        to_torch
    """,
    "f8emu.torch": VERBS
    + """
        Capture ConversionEntry ConversionReport DelayedScalingError DelayedScalingState ExpertParallel
        Float8ColwiseParallel Float8Experts Float8FeedForward Float8Linear Float8RowwiseParallel Float8Weight
        InspectConfig Inspector
        MasterWeights OtherWeight Outcome PrepareFloat8ModuleInput capture convert_to_float8_training
        delayed_state_dict dequantize_float8_training engine_of export_float8 filter_small_layers
        float8_checkpoint_policy float8_experts grouped_linear inspect load_delayed_state_dict plan_conversion
        precompute_float8_dynamic_scale_for_fsdp set_amax_reduction_group swap_linear_with_float8_linear
        sync_float8_amax_and_scale_history verify_export
    """,
}
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
    "mma": "(a, b, c, *, chip=Hopper, out_dtype='float32')",
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
    found = inspect.signature(verb).parameters
    positional = [p.name for p in found.values() if p.kind in POSITIONAL]
    return positional, {p.name: p.default for p in found.values() if p.default is not p.empty}


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


@pytest.mark.parametrize("module", SURFACE)
def test_public_names(module: str) -> None:
    loaded = load(module)
    public = {n: getattr(loaded, n) for n in dir(loaded) if not n.startswith("_")}
    names = {n for n, v in public.items() if not isinstance(v, ModuleType)}
    assert names == set(SURFACE[module].split())


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
    ("module", "verb"), [(name, verb) for name in ("f8ref.numpy", "f8ref.jax") for verb in SURFACE[name].split()]
)
def test_signature_of_the_reference(module: str, verb: str) -> None:
    assert text(getattr(load(module), verb)) == SIGNATURES[verb]


@pytest.mark.parametrize("verb", VERBS.split())  # a layer is Float8Linear or dot_general there
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
