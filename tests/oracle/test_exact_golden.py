"""f8ref.exact against the recorded H200: sampled outputs of every case, every bit.

The file is read here by hand (safetensors is a length, a JSON header and bytes), so that the definition is proved by no
reader but this one.
"""

import json
import random
import re
import struct
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest

import f8emu
from f8emu.spec import FLOAT32, Granularity, format_by_name
from f8ref.exact import cast, group_of_row, mm_dot, scaled_dot

GOLDEN = Path(f8emu.__file__).parent / "conformance" / "data" / "h200_golden.safetensors"
UNSIGNED = {"U8": "B", "BF16": "H", "F16": "H", "F32": "I", "I32": "I"}
"""The bit patterns of a type as `struct` names them: 1, 2 or 4 bytes."""


@cache
def golden() -> tuple[bytes, int, dict[str, Any]]:
    """The file's bytes, where its data begins, its header."""
    data = GOLDEN.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return data, 8 + length, json.loads(data[8 : 8 + length])


CASES: list[dict[str, Any]] = json.loads(golden()[2]["__metadata__"]["cases"])


class Codes:
    """One tensor of a case: `codes[i, j]` is the element's bit pattern, `row(i)` a row of the last dimension."""

    def __init__(self, case: dict[str, Any], role: str) -> None:
        data, start, header = golden()
        entry = header[case["tensors"][role]]
        self.shape: list[int] = entry["shape"]
        self._code = UNSIGNED[entry["dtype"]]
        first, last = entry["data_offsets"]
        self._bytes = memoryview(data)[start + first : start + last]

    def __getitem__(self, index: tuple[int, ...]) -> int:
        return self._from(index, 1)[0]

    def row(self, *index: int) -> list[int]:
        return self._from((*index, 0), self.shape[-1])

    def flat(self) -> list[int]:
        return self._from((0,) * len(self.shape), prod(self.shape))

    def _from(self, index: tuple[int, ...], count: int) -> list[int]:
        """So many codes from `index` on."""
        flat = 0
        for size, i in zip(self.shape, index, strict=True):
            assert 0 <= i < size
            flat = flat * size + i
        return list(struct.unpack_from(f"<{count}{self._code}", self._bytes, flat * struct.calcsize(f"<{self._code}")))


def split_k(case: dict[str, Any]) -> int:
    """[CHAIN-3] S = blocks in the grid / output tiles, the tile being the AxB in the name of the kernel."""
    name, grid = case["kernels"][0]
    if "splitK" not in name:
        return 1
    match = re.search(r"_(\d+)x(\d+)_", name)
    assert match is not None
    first, second = int(match[1]), int(match[2])
    blocks = grid[0] * grid[1] * grid[2]
    found = {
        blocks // tiles
        for a, b in ((first, second), (second, first))
        if blocks % (tiles := -(-case["M"] // a) * -(-case["N"] // b)) == 0
    }
    assert len(found) == 1, (case["id"], found)
    return found.pop()


def block_scales(codes: Codes, rows: int, k: int, row: int) -> tuple[list[int], Granularity]:
    """The scales that one row meets. 1x128 are stored [rows, K/128], 128x128 [K/128 padded to a 4, rows/128]."""
    blocks = k // 128
    if codes.shape == [rows, blocks]:
        return codes.row(row), Granularity.BLOCKWISE_1X128
    assert codes.shape == [-(-blocks // 4) * 4, rows // 128]
    return [codes[g, row // 128] for g in range(blocks)], Granularity.BLOCKWISE_128X128


def expected_code(case: dict[str, Any], m: int, n: int) -> int:
    """What f8ref.exact says about output [m, n]; in a layer case m and n count its sampled rows and columns."""
    out_format = format_by_name(case["out_dtype"])
    a, b = Codes(case, "a"), Codes(case, "b")
    if case["mode"] == "bf16":
        return mm_dot(a.row(m), b.row(n), out_format=out_format, split_k=split_k(case))

    options: dict[str, Any] = {}
    scale_a, scale_b = Codes(case, "scale_a"), Codes(case, "scale_b")
    column = (n,)
    match case["mode"]:
        case "tensorwise":
            options |= {"scale_a": scale_a.flat(), "scale_b": scale_b.flat(), "split_k": split_k(case)}
        case "rowwise":
            options |= {"scale_a": [scale_a.flat()[m]], "scale_b": [scale_b.flat()[n]]}
        case "grouped_rowwise":
            column = (group_of_row(m, Codes(case, "offs").flat()), n)
            options |= {"scale_a": [scale_a[m,]], "scale_b": [scale_b[column]], "is_grouped": True}
        case "blockwise":
            options["scale_a"], options["granularity_a"] = block_scales(scale_a, case["M"], case["K"], m)
            options["scale_b"], options["granularity_b"] = block_scales(scale_b, case["N"], case["K"], n)
        case mode:
            raise AssertionError(mode)
    if case["mode"] in ("rowwise", "grouped_rowwise"):
        options |= {"granularity_a": Granularity.ROWWISE, "granularity_b": Granularity.ROWWISE}
    if "bias" in case["tensors"]:
        options["bias"] = cast(Codes(case, "bias")[n,], out_format, FLOAT32)
    return scaled_dot(
        a.row(m),
        b.row(*column),
        a_format=format_by_name(case["a_dtype"]),
        b_format=format_by_name(case["b_dtype"]),
        out_format=out_format,
        use_fast_accum=case["use_fast_accum"],
        **options,
    )


def outputs_per_case(case: dict[str, Any]) -> int:
    """At least three; more where K is short, most where specials meet."""
    k = Codes(case, "a").shape[-1]
    return 64 if case["name"] == "special" else max(3, min(12, 8192 // k))


def test_the_file_is_the_recorded_one() -> None:
    assert len(CASES) == 174
    assert {case["mode"] for case in CASES} == {"tensorwise", "rowwise", "blockwise", "grouped_rowwise", "bf16"}
    assert {split_k(case) for case in CASES} == {1, 3, 6}


@pytest.mark.parametrize("case", CASES, ids=[f"{c['id']}-{c['name'].replace(' ', '-')}" for c in CASES])
def test_recorded_outputs(case: dict[str, Any]) -> None:
    """[OP], [ACC], [CHAIN], [EPI], [SPEC], [BF16]: a seeded sample of outputs equals the GPU's, as integers."""
    out = Codes(case, "out")
    draw = random.Random(f"exact {case['id']}")
    for _ in range(outputs_per_case(case)):
        m, n = draw.randrange(out.shape[0]), draw.randrange(out.shape[1])
        expected, recorded = expected_code(case, m, n), out[m, n]  # NaN too is one code [SPEC-1]
        assert expected == recorded, (m, n, hex(recorded), hex(expected))
