"""The trainer's GEMMs on the server's own inputs.

Attention differs between any two stacks, so from the first attention on, the inputs of a trainer and of its server are
other ones, and their products tell nothing. Here the oracle casts what entered each GEMM of the server by the trainer's
recipe, multiplies it with the weight that the trainer captured, and compares the server's product.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from f8emu.capture.oracle import cast_operand, product_of, require_of_recipe, sampled
from f8emu.capture.pairing import Half, Key, renamed, unseen
from f8emu.capture.read import Arrays, CapturedStep
from f8emu.capture.record import GemmRecord, Record
from f8emu.conformance.compare import different
from f8emu.conformance.run.subject import NotOffered, Subject, load_subject
from f8emu.dialects.matching import fitting
from f8emu.spec import F8Error, Recipe

_ROWS = 128
"""Rows of activations whose dialects are sought, where every row has its own scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLayer:
    """A GEMM of the server, and what the trainer's gives of the same input."""

    layer: str
    outputs: int = 0
    equal: int = 0
    dialects: tuple[str, ...] = ()
    """Those that give every code and scale of the server's activations; empty: none, or they are not shown."""
    why_not: str = ""
    """Why it was not compared."""


def served_layers(
    trainer: CapturedStep, server: CapturedStep, *, outputs: int, names: Sequence[str] = ()
) -> list[ServedLayer]:
    """Every GEMM of the server's step that the trainer's has too, shards of fused layers apart.

    `outputs` is the most outputs of a GEMM to compute, rows and columns drawn at random. Exactness: every bit.
    """
    ours, theirs = (
        Half(name, step, {captured.record.key: captured for captured in step.records})
        for name, step in (("A", renamed(trainer, names)), ("B", server))
    )
    ours, theirs = ours.without_fusion(theirs), theirs.without_fusion(ours)
    judge = load_subject("f8ref.numpy")
    layers: list[ServedLayer] = []
    for key in (key for key in theirs.records if key[1] == "output" and key in ours.records):
        try:
            layers.append(_compared(ours, theirs, key, judge, outputs))
        except (NotOffered, F8Error) as error:  # a GEMM that the oracle does not have, or a damaged record
            layers.append(ServedLayer(layer=key[0], why_not=str(error)))
    return layers


def _compared(ours: Half, theirs: Half, key: Key, judge: Subject, outputs: int) -> ServedLayer:
    # 1. What is needed: the server's input, and a recipe that casts it without other steps or ranks.
    layer, (mine, its) = key[0], (half.records[key] for half in (ours, theirs))
    record, x, arrays, served = mine.record, theirs.value(key, "a"), mine.load(), its.load()["product"]
    recipe = ours.step.header.recipes.get(record.recipe) if isinstance(record, GemmRecord) else None
    if not isinstance(record, GemmRecord) or recipe is None:
        return ServedLayer(layer=layer, why_not="the trainer's layer has no recipe")
    require_of_recipe(record, recipe)
    if why := _why_not(recipe, record, x, served) or _has_bias(its.record, record):
        return ServedLayer(layer=layer, why_not=why)
    assert x is not None
    # 2. The trainer's GEMM of it.
    codes, scale = cast_operand(x, recipe.output.a, recipe)
    operands: Arrays = {name: array for name, array in arrays.items() if name.startswith("b.")}
    operands |= {"a.codes": codes, "product": served} | ({} if scale is None else {"a.scale": scale})
    if recipe.output.b.format is not None and "b.scale" not in operands:
        return ServedLayer(layer=layer, why_not="a block of the trainer's weight reaches into another layer")
    sample = sampled(record, operands, outputs)
    wrong = different(sample.product, product_of(sample, judge, record.split_k))
    equal = wrong.size - int(np.count_nonzero(wrong))
    return ServedLayer(layer=layer, outputs=wrong.size, equal=equal, dialects=_dialects(ours, theirs, key, x))


def _has_bias(served: Record, record: GemmRecord) -> str:
    return next((f"the product {why}" for parts, why in unseen(served, record) if "product" in parts), "")


def _why_not(recipe: Recipe, record: GemmRecord, x: np.ndarray | None, served: np.ndarray) -> str:
    if x is None:
        return "the server's input is not shown"
    if recipe.delayed_scaling_of("input") is not None or record.is_sharded:
        return "the scale of the input follows from earlier steps or other ranks"
    if (x.shape, served.shape) != ((record.m, record.k), (record.m, record.n)):
        ours = f"{[record.m, record.n]} of {[record.m, record.k]}"
        return f"its product is {list(served.shape)} of {list(x.shape)}, and the trainer's {ours}"
    if served.dtype.name != record.out_dtype:
        return f"its product is {served.dtype.name}, and the trainer's {record.out_dtype}"
    return "" if len(x) else "it has no rows"


def _dialects(ours: Half, theirs: Half, key: Key, x: np.ndarray) -> tuple[str, ...]:
    side = theirs.operand(key, "a", ours)
    if side is None:
        return ()
    rows = slice(_ROWS if side.block[0] == 1 else None)
    fits = fitting(x[rows], side.codes[rows], side.scale[rows], side.block, side.dialects)
    return tuple(candidate.dialect.name for candidate in fits)
