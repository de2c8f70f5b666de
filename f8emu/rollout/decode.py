"""Decode beside prefill, inside the capture of a server.

Shorter passes are found in the longest one by the rows that enter its first GEMM. What enters a GEMM may differ
although every product before it is equal: then it is no GEMM that parts them.
"""

from collections.abc import Sequence

from f8emu.conformance.compare import counted
from f8emu.rollout.batch import SPLIT, Measured
from f8emu.rollout.certificate import Difference
from f8emu.rollout.passes import Gemm, Pass, before
from f8emu.rollout.seen import Seen

DECODE = "decode other than prefill"


def decoded(passes: Sequence[Pass], result: Seen) -> None:
    """Compare the rows of a rank's shorter passes with those of its longest; add to `result`."""
    # 1. Where the rows of each shorter pass are in the longest one.
    whole = max(passes, key=lambda shown: shown.rows)
    shorter = [shown for shown in passes if 0 < shown.rows < whole.rows]
    if not shorter:
        return result.lacks("decode", f"passes of several lengths of rank {whole.step.header.rank}")
    first = next(iter(whole.outputs))
    rows, end = whole.gemm(first).operands, 0
    placed: list[tuple[Pass, int]] = []
    for short in shorter:
        part = short.gemm(first).operands if first in short.outputs else []
        starts = [i for i in range(len(rows) - len(part) + 1) if part and rows[i : i + len(part)] == part]
        if end in starts or len(starts) == 1:
            placed.append((short, end if end in starts else starts[0]))
            end = placed[-1][1] + len(part)
        else:
            why = "several rows of the longest pass are its own" if starts else "its rows are not in the longest pass"
            result.lacks("decode", f"a pass of {counted(short.rows, 'row')} of {short.step.name}: {why}")
    # 2. Layer by layer, in the order of execution: what is first is the cause of what follows.
    total = equal = 0
    is_parted = False
    for layer in dict.fromkeys((*whole.outputs, *(layer for short, _ in placed for layer in short.outputs))):
        same, right, cause = result.measured.get(layer, Measured())
        of_whole: Gemm | None = None
        for short, at in placed:
            if lacking := [shown for shown in (whole, short) if layer not in shown.outputs]:
                result.lacks("decode", f"{layer} in a pass of {counted(lacking[0].rows, 'row')}")
                continue
            if any(shown.rows_of(layer) != shown.rows_of(first) for shown in (whole, short)):
                # A head of the last tokens, or experts: which of the rows it has is not shown.
                result.lacks("decode", f"{layer}, which has other rows than {first}")
                continue
            of_whole = of_whole or whole.gemm(layer)
            operands, products = _rows_equal(of_whole, short.gemm(layer), at)
            total, equal = total + len(products), equal + sum(products)
            both = [product for operand, product in zip(operands, products, strict=False) if operand]
            same, right = same + len(both), right + sum(both)
            if not all(both) and _has_other_split(whole, short, layer):
                cause = SPLIT
            if not is_parted and not (all(operands) and all(products)):
                is_parted = True
                result.differences.append(_parting(layer, operands, products, at, (short.rows, whole.rows), cause))
        if same:
            result.measured[layer] = Measured(same, right, cause)
    counts = {"prefill_rows": whole.rows, "passes": len(placed), "rows": total, "rows_equal": equal}
    result.decode = {name: count + result.decode.get(name, 0) for name, count in counts.items()}


def _rows_equal(whole: Gemm, short: Gemm, at: int) -> tuple[list[bool], list[bool]]:
    # Of each row of a shorter pass whether its operands, weight included, and its product are those of the longest.
    products = [whole.products[at + i].tobytes() == row.tobytes() for i, row in enumerate(short.products)]
    is_weight = all(short.weight.get(name) == weight for name, weight in whole.weight.items())
    pairs = zip(whole.operands[at:], short.operands, strict=False)
    return [is_weight and mine == theirs for mine, theirs in pairs], products


def _has_other_split(whole: Pass, short: Pass, layer: str) -> bool:
    splits = [getattr(shown.outputs[layer].record, "split_k", None) for shown in (whole, short)]
    return splits[0] != splits[1]


def _parting(
    layer: str, operands: Sequence[bool], products: Sequence[bool], at: int, sizes: tuple[int, int], cause: str
) -> Difference:
    # The first GEMM whose operands or products differ, all GEMMs before it being equal; `cause` is of its products.
    if not operands:
        cause, place, seen = "", layer, "products differ; the operands are not shown"
    elif not all(operands):
        cause, place = before(layer), f"before {layer}"
        seen = (
            f"the input of {layer} differs first in row {at + operands.index(False)}; every product before it is equal"
        )
    else:
        place, row = layer, at + products.index(False)
        seen = f"of equal operands row {row} has other products with {sizes[0]} rows than with {sizes[1]}"
    return Difference(part="decode", place=place, cause=": ".join(filter(None, (DECODE, cause))), seen=seen)
