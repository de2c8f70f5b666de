"""Vectors of GEMMs: single outputs, small whole GEMMs and single instructions of a chip; results of f8emu.numpy."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import cycle, product
from typing import NamedTuple

import numpy as np

from f8emu.conformance.cases.distributions import (
    bfloat16_case,
    codes_of,
    draw,
    draw_codes,
    drawn_scales,
    dtype_of,
    rng,
    scaled_case,
)
from f8emu.conformance.cases.families import OUTPUTS, VECTOR_SCALES
from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.conformance.cases.tables import BF16_DISTRIBUTIONS, BF16_SHAPES, BLOCKWISE_SPLITS, CODE_DISTRIBUTIONS, SPLITS
from f8emu.conformance.vectors.rules import by_case, rules_of_gemm, rules_of_model
from f8emu.conformance.vectors.table import Batch, Table
from f8emu.native.gemm import slice_k
from f8emu.numpy import mm, mma, scaled_grouped_mm, scaled_mm
from f8emu.spec.chip import AccumulationModel, Chip
from f8emu.spec.chips import CHIPS
from f8emu.spec.errors import SpecError, UnsupportedError
from f8emu.spec.formats import BFLOAT16, Format
from f8emu.spec.scaling import Granularity
from f8emu.split_k.gemm import BLOCKWISE_GEMMS, GEMMS

_NONE, _GROUPED = "none", "grouped"
# K of single outputs: a step, less, tails of a step and of a promotion, several promotions
LENGTHS = (32, 16, 144, 256, 33, 400, 128, 528, 1040)
# M, N, K of whole GEMMs: tails of everything; two rows of squares of b, and of a
TAILS = (5, 7, 401)
SQUARES = ((8, 144, 272), (144, 8, 272))
# What scales are multiplied by, a power of two or a value at which arithmetic ends
_FACTORS = np.array([*[1, -1] * len(VECTOR_SCALES), *VECTOR_SCALES], np.float32)
_HEADER = {
    "kind": "gemm",
    "M, N, K": "a is [M, K], b is [N, K], and the output, of a @ b^T, is [M, N], each row by row; decimal",
    "step_k, aligned_bits, result_bits": "products of a step, and the fraction bits of [ACC-3] and [ACC-5]; decimal",
    "promote_k": "K after which the chain restarts from zero [CHAIN-2]; 0: never [CHAIN-1]; decimal",
    "slice_k": "K of a slice [CHAIN-3]; decimal",
    "scaling": "tensorwise, rowwise, grouped, blockwise with the blocks of a and of b, or none",
    "scale_a, scale_b": "float32: one; of each row; of each row and 128 of K; of each 128 rows and 128 of K",
    "bias": "float32 of each column",
    "c": "the first accumulator, of out_format",
    "expected": "of out_format",
}


class GemmSet(Enum):
    """The GEMMs of one file."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    GROUPED = "grouped"
    BLOCKWISE = "blockwise"
    BFLOAT16 = "bfloat16"
    WHOLE = "whole"
    INSTRUCTIONS = "instructions"


class _Kind(NamedTuple):
    scaling: str
    formats: tuple[Format, Format]
    use_fast_accum: bool = False


def sets_for(chip: Chip, names: Sequence[str]) -> tuple[GemmSet, ...]:
    """The named sets, or all that the profile of a chip has.

    SpecError for an unknown name, UnsupportedError for a set that the profile lacks.
    """
    known = {member.value: member for member in GemmSet}
    for name in names:
        if name not in known:
            raise SpecError(f"vectors: --gemm-set must be one of {', '.join(known)}; got {name!r}")
        if known[name] not in _sets_of(chip):
            having = ", ".join(other for other, profile in CHIPS.items() if known[name] in _sets_of(profile))
            raise UnsupportedError(f"vectors: {chip} has no rules for {name}; leave it out, or choose among {having}")
    return tuple(known[name] for name in dict.fromkeys(names)) or _sets_of(chip)


def _sets_of(chip: Chip) -> tuple[GemmSet, ...]:
    return tuple(known for known in GemmSet if known is not GemmSet.BLOCKWISE or chip.block_scaled_format_pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmVectors:
    """The GEMMs of a chip, drawn from a seed."""

    chip: Chip
    seed: int
    count: int
    """Cases of each kind: of each scaling, pair of formats and accumulation, and of each instruction."""

    def table(self, name: GemmSet) -> Table:
        """The cases of a set, with their results."""
        match name:
            case GemmSet.WHOLE:
                batches = self._whole()
            case GemmSet.INSTRUCTIONS:
                batches = self._instructions()
            case _:
                batches = self._single(name)
        return Table(name=f"gemms-{name.value}", header=_HEADER, results=("expected",), batches=list(batches))

    def _single(self, name: GemmSet) -> Iterator[Batch]:
        # Outputs of which each is a GEMM of its own, in every distribution.
        lengths, outputs = cycle(LENGTHS), cycle(OUTPUTS)
        for kind in self._kinds(name):
            for distribution, cases in self._shares(kind.formats):
                drawn = self._drawn(kind, (cases, cases, next(lengths)), distribution, next(outputs))
                yield self._batch(kind, list(_diagonal(drawn)))

    def _whole(self) -> Iterator[Batch]:
        names = (GemmSet.TENSORWISE, GemmSet.ROWWISE, GemmSet.BFLOAT16, GemmSet.BLOCKWISE)
        kinds = [kind for name in names for kind in self._kinds(name)]
        blocks = [kind for kind in kinds if kind.scaling in BLOCKWISE_GEMMS]
        # 1. Sizes that no tile divides, and grids of block scales.
        for kind, output in zip(kinds, cycle(OUTPUTS), strict=False):
            for shape in SQUARES if kind in blocks else (TAILS,):
                yield self._batch(kind, [self._drawn(kind, shape, "normal", output)])
        # 2. K in slices, where the profile is that of a library that cuts it.
        if self.chip.plan:
            dense = [(next(kind for kind in kinds if kind.use_fast_accum is fast), (s, k)) for s, k, fast in SPLITS]
            plain = [(kind, BF16_SHAPES[-1][:1:-1]) for kind in kinds if kind.scaling == _NONE]
            for kind, (slices, k) in (*dense, *plain, *zip(blocks, BLOCKWISE_SPLITS, strict=True)):
                drawn = self._drawn(kind, (16, 16, k), "normal", OUTPUTS[0])
                yield self._batch(kind, [replace(drawn, split_k=slices)])

    def _instructions(self) -> Iterator[Batch]:
        # `d = dot(a, b) + c` by one instruction, and by two in a row; the lines have no columns of E8M0 scales.
        for instruction in (i for i in self.chip.instructions if not i.is_microscaled):
            model, out = instruction.model, instruction.out
            for formats, repeats in product(instruction.format_pairs, (1, 2)):
                k = repeats * max(model.step_k, len(model.order))
                for distribution, cases in self._shares(formats):
                    kind, key = _Kind(_NONE, formats), ("vectors", self.seed, str(out), repeats, distribution)
                    drawn = draw if formats[0] == BFLOAT16 else draw_codes
                    a, b = (drawn(distribution, (cases, k), format, (*key, i)) for i, format in enumerate(formats))
                    c = drawn_scales(Granularity.ROWWISE, cases, 1, *key)[:, 0]
                    c = (c * rng(*key).choice(np.array([-16, -1, 0, 1, 16]), cases)).astype(dtype_of(out))
                    arrays = {"a": a, "b": b, "c": c, "expected": mma(a, b, c, chip=self.chip, out_dtype=out)}
                    yield _batch(_parameters(kind, (1, 1, k), model, k, out), arrays, rules_of_model(model))

    def _kinds(self, name: GemmSet) -> Iterator[_Kind]:
        if name is GemmSet.BFLOAT16:
            yield _Kind(_NONE, (BFLOAT16, BFLOAT16))
        elif name is GemmSet.BLOCKWISE:
            yield from (_Kind(*kind) for kind in product(BLOCKWISE_GEMMS, self.chip.block_scaled_format_pairs))
        else:
            yield from (_Kind(*kind) for kind in product((name.value,), self.chip.format_pairs, (True, False)))

    def _shares(self, formats: tuple[Format, Format]) -> Iterator[tuple[str, int]]:
        # Every distribution, and its share of the cases.
        distributions = BF16_DISTRIBUTIONS if formats[0] == BFLOAT16 else CODE_DISTRIBUTIONS
        for i, distribution in enumerate(distributions):
            if cases := len(range(i, self.count, len(distributions))):
                yield distribution, cases

    def _drawn(
        self, kind: _Kind, shape: tuple[int, int, int], distribution: str, output: tuple[Format, bool]
    ) -> GemmCase:
        name = f"vectors {self.seed} {kind.scaling} {kind.use_fast_accum} {shape} {distribution}"
        out, with_bias = output
        if kind.scaling == _NONE:
            return bfloat16_case(name, shape, distribution, out)
        pair = GEMMS["rowwise" if kind.scaling == _GROUPED else kind.scaling]
        has_bias = with_bias and kind.scaling in ("tensorwise", "rowwise")
        more = {"with_bias": has_bias, "out_dtype": out, "use_fast_accum": kind.use_fast_accum}
        return scaled_case(name, pair, kind.formats, shape, distribution, **more)

    def _batch(self, kind: _Kind, gemms: Sequence[GemmCase]) -> Batch:
        # GEMMs of one shape and one way.
        gemm = gemms[0]
        pair = None if gemm.mode is Mode.BF16 else (gemm.granularity_a, gemm.granularity_b)
        model = self.chip.accumulation(pair, use_fast_accum=gemm.use_fast_accum)
        arrays = {name: np.stack([getattr(gemm, name) for gemm in gemms]) for name in ("a", "b")}
        if pair is not None:
            arrays["scale_a"] = np.stack([gemm.scales[0] for gemm in gemms])
            arrays["scale_b"] = np.stack([gemm.scales[1].T for gemm in gemms])
        if gemm.bias is not None:
            arrays["bias"] = np.stack([gemm.bias for gemm in gemms if gemm.bias is not None]).astype(np.float32)
        arrays["expected"] = np.stack([self._run(kind, gemm) for gemm in gemms])
        rules = rules_of_gemm(model, kind.scaling, has_bias=gemm.bias is not None, is_split=gemm.split_k > 1)
        length = slice_k(model, gemm.k, gemm.split_k)
        return _batch(_parameters(kind, (*gemm.output_shape, gemm.k), model, length, gemm.out_dtype), arrays, rules)

    def _run(self, kind: _Kind, gemm: GemmCase) -> np.ndarray:
        if kind.scaling == _GROUPED:
            (scale_a, _), ends = gemm.scales, np.array([len(gemm.a)], np.int32)
            gemm = replace(gemm, mode=Mode.GROUPED_ROWWISE, b=gemm.b[None], scale_a=scale_a[:, 0], offs=ends)
        verbs = (mm, scaled_mm, scaled_grouped_mm)
        return gemm.run({verb.__name__: partial(verb, chip=self.chip) for verb in verbs})


def _diagonal(drawn: GemmCase) -> Iterator[GemmCase]:
    # Each row of a with the next of b: rows of a distribution differ, and equal ones would meet.
    r = rng(drawn.id)
    for row in range(len(drawn.a)):
        column = (row + 1) % len(drawn.b)
        bias = None if drawn.bias is None else drawn.bias[[column]]
        gemm = replace(drawn, a=drawn.a[[row]], b=drawn.b[[column]], bias=bias)
        if drawn.mode is not Mode.BF16:
            scale_a = _scale_of(drawn.scales[0], drawn.granularity_a, row)
            scale_b = _scale_of(drawn.scales[1].T, drawn.granularity_b, column).T
            gemm = replace(gemm, scale_a=scale_a, scale_b=scale_b).scaled(*r.choice(_FACTORS, 2))
        yield gemm


def _scale_of(scale: np.ndarray, granularity: Granularity, row: int) -> np.ndarray:
    rows_per_scale = granularity.block[0]
    return scale[[row // rows_per_scale if rows_per_scale else 0]]


def _parameters(
    kind: _Kind, shape: tuple[int, int, int], model: AccumulationModel, length: int, out: Format
) -> dict[str, int | str]:
    return {
        **dict(zip("MNK", shape, strict=True)),
        "step_k": model.step_k,
        "aligned_bits": model.aligned_fraction_bits,
        "result_bits": model.result_fraction_bits,
        "promote_k": model.promote_k or 0,
        "slice_k": length,
        "scaling": kind.scaling,
        **{f"{name}_format": format.name for name, format in zip("ab", kind.formats, strict=True)},
        "out_format": out.name,
    }


def _batch(parameters: Mapping[str, int | str], arrays: Mapping[str, np.ndarray], rules: Sequence[str]) -> Batch:
    names = ("a", "b", "scale_a", "scale_b", "bias", "c", "expected")
    codes = {name: codes_of(arrays[name]) if name in arrays else None for name in names}
    return Batch(parameters=parameters, arrays=codes, rules=by_case(rules, arrays["a"], arrays["b"]))
