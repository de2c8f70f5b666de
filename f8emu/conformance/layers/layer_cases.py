"""The table of layers: every recipe with every dtype, in every situation of training, eager and compiled.

On a CPU a compiled case takes seconds of a C++ compiler, so it holds several situations; and a shape takes seconds of
the emulation's compiler, so there are few of them.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

from f8emu.conformance.layers.layer import LayerCase, LayerMode
from f8emu.spec.formats import BFLOAT16, E4M3FN, FLOAT32, HIGH_PRECISION
from f8emu.spec.gemm import Cast, Gemm
from f8emu.spec.recipe import BLOCKWISE, DELAYED, MXFP8, RECIPES, ROWWISE, ROWWISE_WITH_GW_HP, TENSORWISE, Recipe
from f8emu.spec.scaling import AmaxHistoryReduction, DelayedScaling, Granularity

REGULAR = (144, 160, 176)  # M, N, K: multiples of 16; tails of 32 and of 128 in all three sums
ODD = (33, 50, 70)  # nothing is a multiple of 16
BLOCKWISE_ODD = (130, 37, 200)
ONE_ROW = (1, 16, 32)
# On hardware, in both modes: a single row, tails of tiles and of 128-blocks, several tiles
FULL_SIZES = (ONE_ROW, (19, 32, 48), (21, 20, 37), (150, 144, 272), (256, 512, 384))
# On hardware, in both modes: `output`, `grad_input` or `grad_weight` has a long sum and few outputs, and is cut
# [PLAN-1] but for rowwise float8.
LONG = ((16, 32, 8192), (16, 8192, 32), (8192, 32, 64))
# On hardware: `output` has many tiles, and how often it is cut depends on how fast the chip's memory is [PLAN-7]
TILES = (8, 1024, 16384)
DISTRIBUTIONS = ("blocks", "normal", "outlier", "gradient", "specials", "cancellation", "subnormals")

# The fields of delayed scaling that no named recipe sets
DELAYED_MOST_RECENT = replace(
    DELAYED,
    name="delayed most_recent",
    delayed=DelayedScaling(history_length=3, reduction=AmaxHistoryReduction.MOST_RECENT, margin=2),
)

_KINDS = (kind for kind in Granularity if not kind.is_microscaled)
_CASTS = {letter: Cast(format=E4M3FN, granularity=kind) for letter, kind in zip("trvs", _KINDS, strict=True)}
_CASTS["-"] = Cast(format=None)


def _mixed(name: str, *gemms: str, fast_output: bool = False, delayed: DelayedScaling | None = None) -> Recipe:
    """`gemms` name the casts of a and b: by tensor, row, vector or square, or none."""
    output, grad_input, grad_weight = (Gemm(a=_CASTS[a], b=_CASTS[b]) for a, b in gemms)
    output = replace(output, use_fast_accum=fast_output)
    return Recipe(name=name, output=output, grad_input=grad_input, grad_weight=grad_weight, delayed=delayed)


# Recipes beyond the named ones: a matrix in two granularities, in float8 in one GEMM only, delayed beside dynamic
MIXED = (
    _mixed("mixed tensor row", "tr", "rt", "rr"),
    _mixed("mixed block tensor high", "vs", "tt", "--"),
    _mixed("mixed high high tensor", "--", "--", "tr"),
    _mixed("mixed square high block", "sv", "--", "vv"),
    _mixed(
        *("mixed delayed row", "tt", "rt", "rt"),
        fast_output=True,
        delayed=DelayedScaling(margin=1, tensors=("input", "weight")),
    ),
    _mixed("mixed delayed high", "--", "tt", "--", delayed=DelayedScaling(tensors=("weight",))),
)

# No hardware at hand multiplies under MXFP8: it is emulated everywhere.
ALL_RECIPES = (*RECIPES.values(), DELAYED_MOST_RECENT, MXFP8)

# Fields that differ from a bfloat16 layer with a bias, of shape ODD
SITUATIONS: dict[str, dict[str, Any]] = {
    "batch": {"weight_dtype": FLOAT32, "gradient": "integers", "batch": (3, 11)},
    "autocast": {"weight_dtype": FLOAT32, "is_autocast": True, "with_bias": False},
    "frozen weight": {"trained": ("input",), "gradient": "integers", "distribution": "outlier"},
    "first layer": {"trained": ("weight",), "distribution": "blocks"},
    "forward only": {"trained": (), "distribution": "specials"},
    # Weights change from step to step, and under delayed scaling the scales.
    "long": {"weight_dtype": FLOAT32, "passes": 2, "steps": 4, "gradient": "integers"},
}
SHARED: dict[str, Any] = {"layers": 2, "weight_dtype": FLOAT32, "passes": 2, "gradient": "integers"}
# Under every named recipe
COMPILED: tuple[dict[str, Any], ...] = (
    {"batch": (3, 11), "weight_dtype": FLOAT32, "passes": 2, "steps": 2, "gradient": "integers"},
    {"shape": REGULAR, "is_autocast": True, "weight_dtype": FLOAT32, "distribution": "blocks"},
)


@cache
def layer_cases(*, full_size: bool = False) -> tuple[LayerCase, ...]:
    """All layers in all modes; on hardware (`full_size`) more of them compiled."""
    eager, compiled = LayerMode.EAGER, LayerMode.COMPILED
    cases = [replace(case, mode=mode) for case in _both() for mode in (LayerMode.TRACE, eager)]
    situations = [fields for name, fields in SITUATIONS.items() if name != "long"]
    cases += [_case(recipe, eager, **fields) for recipe, fields in product(ALL_RECIPES, situations)]
    cases += [_case(recipe, eager, **SHARED) for recipe in (TENSORWISE, ROWWISE_WITH_GW_HP, DELAYED)]
    cases += [_case(recipe, eager, shape=ONE_ROW) for recipe in (TENSORWISE, ROWWISE, DELAYED, BLOCKWISE)]
    cases += [_case(recipe, compiled, **fields) for recipe, fields in product((*RECIPES.values(), MXFP8), COMPILED)]
    cases += [_case(TENSORWISE, compiled, **SHARED)]
    return (*cases, *_full_size()) if full_size else tuple(cases)


def _case(recipe: Recipe, mode: LayerMode, **fields: Any) -> LayerCase:
    defaults: dict[str, Any] = {"shape": ODD, "dtype": BFLOAT16, "weight_dtype": BFLOAT16}
    return LayerCase(recipe=recipe, mode=mode, **defaults | fields)


def _both() -> Iterator[LayerCase]:
    """Layers that the verb `linear` is asked too: all dtypes, a tail in every sum, several steps."""
    i = 0
    for recipe, dtype in product(ALL_RECIPES, HIGH_PRECISION):
        odd = BLOCKWISE_ODD if recipe.output.a.granularity.is_blockwise else ODD
        # Products in float32 show every bit of the accumulator.
        for shape in (REGULAR, odd) if dtype == FLOAT32 else (REGULAR,):
            yield _case(
                recipe,
                LayerMode.TRACE,
                shape=shape,
                dtype=dtype,
                weight_dtype=dtype,
                distribution=DISTRIBUTIONS[i % len(DISTRIBUTIONS)],
                with_bias=i % 2 == 0,
                steps=2 if recipe.delayed and shape != REGULAR else 1,
            )
            i += 1
    for recipe in ALL_RECIPES:
        yield _case(recipe, LayerMode.TRACE, **SITUATIONS["long"])
    for recipe in MIXED:
        yield _case(recipe, LayerMode.TRACE, steps=2 if recipe.delayed else 1)


def _full_size() -> Iterator[LayerCase]:
    for recipe, shape, weight_dtype in product(RECIPES.values(), FULL_SIZES, (BFLOAT16, FLOAT32)):
        for mode in (LayerMode.EAGER, LayerMode.COMPILED):
            yield _case(recipe, mode, shape=shape, weight_dtype=weight_dtype, distribution="blocks", steps=2)
    # Products in float32 show every bit, and outliers how they were added.
    for recipe, shape, mode in product(RECIPES.values(), LONG, (LayerMode.EAGER, LayerMode.COMPILED)):
        yield _long(recipe, mode, shape, steps=2)
    yield _long(TENSORWISE, LayerMode.EAGER, TILES, trained=())


def _long(recipe: Recipe, mode: LayerMode, shape: tuple[int, int, int], **fields: Any) -> LayerCase:
    return _case(recipe, mode, shape=shape, dtype=FLOAT32, weight_dtype=FLOAT32, distribution="outlier", **fields)
