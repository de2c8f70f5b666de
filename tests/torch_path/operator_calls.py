"""Calls of torch's float8 and bfloat16 GEMM operators, good and bad, for a GPU of the chip and for its emulation.

`python -m tests.torch_path.operator_calls OUT.json` records on a GPU what each call gives: the SHA-256 of its bytes,
or the class of its error.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

E4M3, E5M2, BF16, F16, F32 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bfloat16,
    torch.float16,
    torch.float32,
)
Call = Callable[[str], Tensor]
"""A call on a device."""


def draw(*shape: int, dtype: torch.dtype = E4M3, seed: int = 0) -> Tensor:
    """Values of many magnitudes, the same on every machine."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    significands = torch.randint(-63, 64, shape, generator=generator) / 16  # randn differs between CPUs
    return (significands * torch.exp2(torch.randint(-6, 7, shape, generator=generator).float())).to(dtype)


def scale(*shape: int, seed: int = 1) -> Tensor:
    """Float32 factors with full significands."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(1 << 21, 1 << 23, shape, generator=generator) / (1 << 22)


def columns(x: Tensor) -> Tensor:
    """The same matrix, or stack of matrices, in column-major memory."""
    return x.mT.contiguous().mT


def shifted(x: Tensor, elements: int) -> Tensor:
    """The same values and strides, `elements` behind the start of their memory."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.new_empty(extent + elements).as_strided(x.shape, x.stride(), elements).copy_(x)


def call(operator: Callable[..., Tensor], *arguments: Any, **options: Any) -> Call:
    """`operator` on a device, the layout of every argument and its place in its memory kept."""

    def on(device: str) -> Tensor:
        def moved(x: Any) -> Any:
            if isinstance(x, list):
                return [moved(y) for y in x]
            if not isinstance(x, Tensor):
                return x
            memory = torch.empty(x.untyped_storage().nbytes() // x.itemsize, dtype=x.dtype, device=device)
            return memory.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(x)

        return operator(*map(moved, arguments), **{name: moved(x) for name, x in options.items()})

    return on


def scaled_mm_calls() -> Iterator[tuple[str, Call]]:
    mm = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    unit = scale(1)[0]
    sizes = [(64, 64, 128), (1, 16, 16), (129, 48, 1040), (256, 512, 4096), (17, 32, 64)]
    for m, n, k in sizes:
        a, b = draw(m, k), columns(draw(k, n))
        for out in (BF16, F16, F32):
            for fast in (False, True):
                name = f"{m}x{n}x{k} {out} fast={fast}".replace("torch.", "")
                yield f"tensorwise {name}", call(mm, a, b, unit, unit, out_dtype=out, use_fast_accum=fast)
                rows = scale(m, 1), scale(1, n)
                yield f"rowwise {name}", call(mm, a, b, *rows, out_dtype=out, use_fast_accum=fast)
        for out in (BF16, F16):
            yield f"bias {m}x{n}x{k} {out}", call(mm, a, b, unit, unit, bias=draw(n, dtype=out), out_dtype=out)
            rows = scale(m, 1), scale(1, n)
            yield f"rowwise bias {m}x{n}x{k} {out}", call(mm, a, b, *rows, bias=draw(n, dtype=out), out_dtype=out)
    for left, right in ((E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)):
        a, b = draw(32, 64, dtype=left), columns(draw(64, 48, dtype=right))
        yield f"pair {left} {right}", call(mm, a, b, unit, unit, out_dtype=BF16)
        yield f"pair {left} {right} rowwise", call(mm, a, b, scale(32, 1), scale(1, 48), out_dtype=BF16)
    # Block scales by shape and strides.
    for m, n, k in ((64, 256, 512), (128, 128, 1024), (132, 48, 640)):
        a, b = draw(m, k), columns(draw(k, n))
        kb, mb, nb = -(-k // 128), -(-m // 128), -(-n // 128)
        vector_a, vector_b = columns(scale(m, kb)), scale(kb, n)
        yield f"blocks 1x128 1x128 {m}x{n}x{k}", call(mm, a, b, vector_a, vector_b, out_dtype=BF16)
        yield f"blocks 1x128 128x128 {m}x{n}x{k}", call(mm, a, b, vector_a, columns(scale(kb, nb)), out_dtype=BF16)
        yield f"blocks 128x128 1x128 {m}x{n}x{k}", call(mm, a, b, scale(mb, kb), vector_b, out_dtype=BF16)
        yield f"blocks float32 {m}x{n}x{k}", call(mm, a, b, vector_a, columns(scale(kb, nb)), out_dtype=F32)
        yield f"blocks fast {m}x{n}x{k}", call(mm, a, b, vector_a, vector_b, out_dtype=BF16, use_fast_accum=True)
        yield f"blocks row-major {m}x{n}x{k}", call(mm, a, b, scale(m, kb), vector_b, out_dtype=BF16)
        bias = draw(n, dtype=BF16)
        yield f"blocks bias {m}x{n}x{k}", call(mm, a, b, vector_a, vector_b, bias=bias, out_dtype=BF16)
    a, b = draw(32, 64), columns(draw(64, 48))
    for name, arguments, options in (
        ("no out_dtype", (a, b, unit, unit), {}),
        ("E5M2 out", (a, b, unit, unit), {"out_dtype": E5M2}),
        ("scale_result", (a, b, unit, unit), {"out_dtype": BF16, "scale_result": unit}),
        ("float64 out", (a, b, unit, unit), {"out_dtype": torch.float64}),
        ("scales [1]", (a, b, scale(1), scale(1)), {"out_dtype": BF16}),
        ("scales [1, 1]", (a, b, scale(1, 1), scale(1, 1)), {"out_dtype": BF16}),
        ("scales of two kinds", (a, b, unit, scale(1, 48)), {"out_dtype": BF16}),
        ("scales 1-d", (a, b, scale(32), scale(48)), {"out_dtype": BF16}),
        ("scales bfloat16", (a, b, unit.bfloat16(), unit.bfloat16()), {"out_dtype": BF16}),
        ("scales transposed", (a, b, scale(1, 32), scale(48, 1)), {"out_dtype": BF16}),
        ("scales strided", (a, b, scale(32, 2)[:, :1], scale(1, 48)), {"out_dtype": BF16}),
        ("a column-major", (columns(a), b, unit, unit), {"out_dtype": BF16}),
        ("b row-major", (a, b.contiguous(), unit, unit), {"out_dtype": BF16}),
        ("a 3-d", (a[None], b, unit, unit), {"out_dtype": BF16}),
        ("K not equal", (a[:, :48], b, unit, unit), {"out_dtype": BF16}),
        ("K 24", (draw(32, 24), columns(draw(24, 48)), unit, unit), {"out_dtype": BF16}),
        ("N 40", (a, columns(draw(64, 40)), unit, unit), {"out_dtype": BF16}),
        ("M 0", (a[:0], b, unit, unit), {"out_dtype": BF16}),
        ("K 0", (a[:, :0], b[:0], unit, unit), {"out_dtype": BF16}),
        ("N 0", (a, b[:, :0], unit, unit), {"out_dtype": BF16}),
        ("bfloat16 operands", (a.bfloat16(), b.bfloat16(), unit, unit), {"out_dtype": BF16}),
        ("bias float32", (a, b, unit, unit), {"out_dtype": BF16, "bias": draw(48, dtype=F32)}),
        ("bias of float32 out", (a, b, unit, unit), {"out_dtype": F32, "bias": draw(48, dtype=BF16)}),
        ("bias float16 for bfloat16", (a, b, unit, unit), {"out_dtype": BF16, "bias": draw(48, dtype=F16)}),
        ("bias bfloat16 for float16", (a, b, unit, unit), {"out_dtype": F16, "bias": draw(48, dtype=BF16)}),
        ("bias short", (a, b, unit, unit), {"out_dtype": BF16, "bias": draw(47, dtype=BF16)}),
        ("bias [1, N]", (a, b, unit, unit), {"out_dtype": BF16, "bias": draw(1, 48, dtype=BF16)}),
        ("a padded rows", (draw(32, 96)[:, :64], b, unit, unit), {"out_dtype": BF16}),
        ("a stride 72", (draw(32, 72)[:, :64], b, unit, unit), {"out_dtype": BF16}),
        ("b padded columns", (a, draw(48, 96).t()[:64], unit, unit), {"out_dtype": BF16}),
        ("one row, odd stride", (draw(1, 80)[:, :64], b, unit, unit), {"out_dtype": BF16}),
    ):
        yield f"scaled_mm {name}", call(mm, *arguments, **options)


def misaligned_calls() -> Iterator[tuple[str, Call]]:
    mm = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    a, b, unit, bias = draw(64, 256), columns(draw(256, 48)), scale(1)[0], draw(48, dtype=BF16)
    rows, blocks = (scale(64, 1), scale(1, 48)), (columns(scale(64, 2)), scale(2, 48))
    for elements in (1, 4, 8, 16):
        for name, scales in (("tensorwise", (unit, unit)), ("rowwise", rows), ("blocks", blocks)):
            for place, left, right in (("a", shifted(a, elements), b), ("b", a, shifted(b, elements))):
                yield f"misaligned {place} {elements} {name}", call(mm, left, right, *scales, out_dtype=BF16)
            moved = (shifted(scales[0], elements), shifted(scales[1], elements))
            yield f"misaligned scales {elements} {name}", call(mm, a, b, *moved, out_dtype=BF16)
        arguments = a, b, unit, unit
        yield f"misaligned bias {elements}", call(mm, *arguments, bias=shifted(bias, elements), out_dtype=BF16)
    experts, ends = columns(draw(2, 256, 48)), torch.tensor([16, 64], dtype=torch.int32)
    grouped = torch._scaled_grouped_mm  # pyright: ignore[reportPrivateImportUsage]
    for place, left, right in (("a", shifted(a, 8), experts), ("b", a, shifted(experts, 8))):
        yield f"misaligned grouped {place}", call(grouped, left, right, scale(64), scale(2, 48), offs=ends)


def functional_calls() -> Iterator[tuple[str, Call]]:
    mm = F.scaled_mm
    tensor, row = ScalingType.TensorWise, ScalingType.RowWise
    vector, square, mx = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128, ScalingType.BlockWise1x32
    unit = scale(1)[0]
    for m, n, k in ((64, 48, 128), (132, 256, 640)):
        a, b = draw(m, k), columns(draw(k, n))
        kb, mb, nb = -(-k // 128), -(-m // 128), -(-n // 128)
        padded = -(-kb // 4) * 4
        squares_a, squares_b = columns(scale(padded, mb)), columns(scale(padded, nb))
        vectors_a, vectors_b = columns(scale(m, kb)), columns(scale(n, kb))
        for name, left, left_recipe, right, right_recipe in (
            ("tensorwise", unit, tensor, unit, tensor),
            ("rowwise", scale(m, 1), row, scale(1, n), row),
            ("rowwise of [N, 1]", scale(m, 1), row, scale(n, 1), row),
            ("vectors", vectors_a, vector, vectors_b, vector),
            ("vectors squares", vectors_a, vector, squares_b, square),
            ("squares vectors", squares_a, square, vectors_b, vector),
            ("squares squares", squares_a, square, squares_b, square),
            ("squares not padded", vectors_a, vector, columns(scale(kb, nb)), square),
            ("vectors row-major", scale(m, kb), vector, vectors_b, vector),
            ("tensorwise rowwise", unit, tensor, scale(1, n), row),
            ("rowwise short", scale(m - 1, 1), row, scale(1, n), row),
            ("MXFP8", scale(m, 1), mx, scale(n, 1), mx),
        ):
            arguments = a, b, left, left_recipe, right, right_recipe
            yield f"functional {name} {m}x{n}x{k}", call(mm, *arguments, output_dtype=BF16)
        rows = scale(m, 1), row, scale(1, n), row
        yield f"functional fast {m}x{n}x{k}", call(mm, a, b, *rows, output_dtype=F32, use_fast_accum=True)
        bias = draw(n, dtype=BF16)
        yield f"functional bias {m}x{n}x{k}", call(mm, a, b, *rows, bias=bias, output_dtype=BF16)
        swizzles = {"swizzle_a": SwizzleType.SWIZZLE_32_4_4, "swizzle_b": SwizzleType.SWIZZLE_32_4_4}
        yield f"functional swizzled {m}x{n}x{k}", call(mm, a, b, *rows, output_dtype=BF16, **swizzles)
    a, b = draw(32, 64), columns(draw(64, 48))
    for name, left, right in (
        ("K 24", draw(32, 24), columns(draw(24, 48))),
        ("N 40", a, columns(draw(64, 40))),
        ("E5M2 pair", draw(32, 64, dtype=E5M2), columns(draw(64, 48, dtype=E5M2))),
        ("bfloat16", a.bfloat16(), b.bfloat16()),
        ("a column-major", columns(a), b),
        ("b row-major", a, b.contiguous()),
        ("M 0", a[:0], b),
        ("K not equal", a[:, :48], b),
    ):
        yield f"functional {name}", call(mm, left, right, unit, tensor, unit, tensor, output_dtype=BF16)


def grouped_calls() -> Iterator[tuple[str, Call]]:
    mm = torch._scaled_grouped_mm  # pyright: ignore[reportPrivateImportUsage]
    grouped_mm = F.scaled_grouped_mm  # pyright: ignore[reportAttributeAccessIssue]
    bf16_mm = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]

    def ends(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    g, m, n, k = 3, 64, 48, 256
    rows, inner, across = ends(16, 16, m), ends(64, 128, k), ends(16, 32, n)
    kinds = (
        ("rows", draw(m, k), draw(g, k, n), scale(m), scale(g, n), rows),
        ("columns", draw(g, m, k), draw(k, n), scale(g, m), scale(n), across),
        ("inner", draw(m, k), draw(k, n), scale(g * m), scale(g * n), inner),
        ("batch", draw(g, m, k), draw(g, k, n), scale(g, m), scale(g, n), None),
    )
    row = ScalingType.RowWise
    for name, a, b, scale_a, scale_b, offs in kinds:
        b_columns = columns(b)
        for fast in (False, True):
            options = {"offs": offs, "out_dtype": BF16, "use_fast_accum": fast}
            yield f"grouped {name} fast={fast}", call(mm, a, b_columns, scale_a, scale_b, **options)
        arguments = a, b_columns, scale_a, row, scale_b, row
        yield f"grouped functional {name}", call(grouped_mm, *arguments, offs=offs, output_dtype=BF16)
        yield f"grouped no out_dtype {name}", call(mm, a, b_columns, scale_a, scale_b, offs=offs)
        yield f"grouped b row-major {name}", call(mm, a, b, scale_a, scale_b, offs=offs)
        yield f"grouped bfloat16 {name}", call(bf16_mm, a.bfloat16(), b.bfloat16(), offs=offs)
        yield f"grouped bfloat16 columns {name}", call(bf16_mm, a.bfloat16(), columns(b.bfloat16()), offs=offs)
        yield f"grouped E5M2 {name}", call(mm, a.to(E5M2), b_columns, scale_a, scale_b, offs=offs)
        yield f"grouped float32 {name}", call(mm, a, b_columns, scale_a, scale_b, offs=offs, out_dtype=F32)
        yield f"grouped short scale {name}", call(mm, a, b_columns, scale_a[..., :-1], scale_b, offs=offs)
        wrong = None if offs is not None else rows
        yield f"grouped wrong offs {name}", call(mm, a, b_columns, scale_a, scale_b, offs=wrong)
    _, a, b, scale_a, scale_b, _ = kinds[0]
    arguments = a, columns(b), scale_a, scale_b
    yield "grouped offs int64", call(mm, *arguments, offs=rows.long())
    yield "grouped odd rows", call(mm, *arguments, offs=ends(5, 37, m))
    yield "grouped bfloat16 odd rows", call(bf16_mm, a.bfloat16(), b.bfloat16(), offs=ends(5, 37, m))
    yield "grouped bias", call(mm, *arguments, offs=rows, bias=draw(n, dtype=BF16))
    for size in (24, 40):
        arguments = draw(m, size), columns(draw(g, size, n)), scale_a, scale_b
        yield f"grouped K {size}", call(mm, *arguments, offs=rows)
        yield f"grouped bfloat16 K {size}", call(bf16_mm, *(x.bfloat16() for x in arguments[:2]), offs=rows)


def calls() -> dict[str, Call]:
    return {
        name: made
        for source in (scaled_mm_calls, functional_calls, grouped_calls, misaligned_calls)
        for name, made in source()
    }


def observed(made: Call, device: str) -> str:
    """The SHA-256 of the result's bytes, its dtype and shape; or the builtin classes of the error."""
    try:
        result = made(device).cpu()
    except Exception as error:
        classes = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        return " ".join(classes)
    digest = hashlib.sha256(result.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    return f"{str(result.dtype).removeprefix('torch.')} {list(result.shape)} {digest}"


def main() -> None:
    recorded = {}
    for name, made in calls().items():
        recorded[name] = observed(made, "cuda")
        print(f"{name}: {recorded[name]}", flush=True)
        torch.cuda.synchronize()
    head = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "calls": recorded}
    Path(sys.argv[1]).write_text(json.dumps(head, indent=0) + "\n")


if __name__ == "__main__":
    main()
