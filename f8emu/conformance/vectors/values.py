"""Vectors of formats, casts and scales: inputs of the suite's tables, results of f8emu.numpy."""

from itertools import product

import numpy as np

from f8emu.conformance.cases.distributions import codes_of, rng
from f8emu.conformance.cases.tables import SCALE_RULES, all_codes, amax_corners, cast_inputs
from f8emu.conformance.vectors.table import Batch, Table
from f8emu.numpy import cast, decode, scale_from_amax
from f8emu.spec.formats import E8M0FNU, FLOAT8, FLOAT32, Format, Overflow

_BEYOND = 3
"""Binades above and below those of a format, of which random inputs are."""


def decode_table() -> Table:
    """Every code of every format of 8 bits, and its value."""
    batches: list[Batch] = []
    for format in (*FLOAT8, E8M0FNU):
        codes = all_codes(format)
        values = decode(codes)
        rules = np.where(np.isfinite(values), "OP-1", "SPEC-1")
        arrays = {"code": codes_of(codes), "value": codes_of(values)}
        batches.append(Batch(parameters={"format": format.name}, arrays=arrays, rules=rules.tolist()))
    header = {"kind": "decode", "code": "all 256", "value": "float32"}
    return Table(name="decode", header=header, results=("value",), batches=batches)


def cast_table(source: Format, target: Format, seed: int, count: int) -> Table:
    """A cast of every 16-bit input; or of the boundaries of float32, and `count` random ones."""
    inputs = cast_inputs(source, target)
    if source == FLOAT32:
        inputs = np.concatenate([inputs, _random(target, count, seed)])
    saturate, nonfinite = (codes_of(cast(inputs, target, overflow=overflow)) for overflow in Overflow)
    is_nan, is_beyond = saturate == target.nan_code, saturate != nonfinite
    rules = np.array(["CAST-1", "CAST-1,CAST-2,CAST-3", "CAST-4"], object)[np.where(is_nan, 2, is_beyond)]
    header = {
        "kind": "cast",
        "cast": f"{source} to {target}",
        "input": "of the first format",
        "saturate": "the code; what rounds beyond the largest is the largest [CAST-2]",
        "nonfinite": "the code; what rounds beyond the largest is infinity, or NaN [CAST-3]",
    }
    arrays = {"input": codes_of(inputs), "saturate": saturate, "nonfinite": nonfinite}
    batch = Batch(arrays=arrays, rules=rules.tolist())
    return Table(name=f"casts-{source}-{target}", header=header, results=("saturate", "nonfinite"), batches=[batch])


def _random(target: Format, count: int, seed: int) -> np.ndarray:
    # Float32 of any sign and fraction, in the binades of the format and a few beyond.
    r = rng("vectors", seed, target.name)
    lowest, highest = target.min_exponent - target.fraction_bits - _BEYOND, target.max_exponent + _BEYOND
    fields = r.integers(lowest + FLOAT32.bias, highest + FLOAT32.bias + 1, count)
    bits = (r.integers(0, 2, count) << 31) | (fields << FLOAT32.fraction_bits) | r.integers(0, 1 << 23, count)
    return bits.astype(np.uint32).view(np.float32)


def scale_table() -> Table:
    """Amaxes, with the factors of every scale rule that the suite asks for, for every float8 format."""
    amaxes = amax_corners()[:, 0]
    batches: list[Batch] = []
    for format, (rule, margin) in product(FLOAT8, SCALE_RULES):
        scales = scale_from_amax(amaxes, format, rule, margin=margin)
        common = "SCALE-1,SCALE-2" if rule.power_of_two else "SCALE-1"
        is_edge = ~np.isfinite(amaxes) | (amaxes < rule.amax_floor)
        rules = np.where(is_edge, f"{common},SCALE-3", common)
        parameters = {
            "format": format.name,
            "max": f"{codes_of(np.float32(format.max)):08x}",
            "margin": margin,
            "amax_floor": f"{codes_of(np.float64(rule.amax_floor)):016x}",
            "power_of_two": int(rule.power_of_two),
        }
        factors = {"inv_scale": codes_of(scales.inv_scale), "scale": codes_of(scales.scale)}
        batches.append(Batch(parameters=parameters, arrays={"amax": codes_of(amaxes), **factors}, rules=rules.tolist()))
    header = {
        "kind": "scale",
        "max": "the largest finite value of the format, float32",
        "margin": "a decimal integer: max is divided by 2^margin",
        "amax_floor": "float64",
        "power_of_two": "1: the fraction bits of inv_scale are cleared [SCALE-2]",
        "amax": "float32",
        "inv_scale": "the factor that is multiplied while quantizing, float32",
        "scale": "the factor that decodes, float32",
    }
    return Table(name="scales", header=header, results=("inv_scale", "scale"), batches=batches)
