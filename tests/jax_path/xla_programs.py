"""Programs with float8 dots, and what XLA made of them on an H100: outputs, and the float8 GEMMs of the compiled HLO.

    python -m tests.jax_path.xla_programs OUT.npz.xz      # on a Hopper GPU: record anew

Each program is compiled with `xla_gpu_enable_triton_gemm=False`, as `f8emu.jax.jit` does.
"""

import hashlib
import io
import json
import lzma
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

RECORDED = Path(__file__).with_name("xla_programs-h100.npz.xz")
E4, E5, BF, F16, F32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float16, jnp.float32
DEFAULT, HIGH, HIGHEST = lax.Precision.DEFAULT, lax.Precision.HIGH, lax.Precision.HIGHEST
M, N, K = 64, 96, 2048
SA, SB = np.float32(0.0123), np.float32(0.37)
"""Scales; neither they nor their product are bfloat16 numbers."""
WITHOUT_GEMM = ("cast/", "div/", "gelu")
"""Programs of which only a digest is kept."""
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def codes(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    normal = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return (normal * (1.5 if dtype is E4 else 0.3)).astype(dtype)


def real(shape: tuple[int, ...], dtype: Any, seed: int, factor: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * np.float32(factor)).astype(dtype)


def dot(out: Any, precision: Any = None, contracting: Any = ((1,), (0,)), batch: Any = ((), ())) -> Callable[..., Any]:
    def product(a: Any, b: Any) -> Any:
        return lax.dot_general(a, b, (contracting, batch), precision=precision, preferred_element_type=out)

    return product


def name(dtype: Any) -> str:
    return str(np.dtype(dtype))


A, B = codes((M, K), E4, 1), codes((K, N), E4, 2)
A3, B3 = A.reshape(4, 16, K), codes((4, K, N), E4, 8)


def programs() -> dict[str, Program]:
    """The programs, each with its operands."""
    parts = (_plain(), _ranks(), _scaled(), _dequantized(), _epilogues(), _casts(), _layers(), _others())
    return {key: program for part in parts for key, program in part}


def _plain() -> Iterator[tuple[str, Program]]:
    for out in (F32, BF, F16, None):
        for precision in (None, DEFAULT, HIGH, HIGHEST):
            yield f"dot/e4e4/{name(out) if out else 'none'}/{precision}", (dot(out, precision), (A, B))
    for preset in ("ANY_F8_ANY_F8_F32", "ANY_F8_ANY_F8_F32_FAST_ACCUM"):
        yield f"dot/preset/{preset}", (dot(F32, getattr(lax.DotAlgorithmPreset, preset)), (A, B))
    yield "dot/mixed precision", (dot(F32, (DEFAULT, HIGHEST)), (A, B))
    yield "dot/e5e4", (dot(F32), (codes((M, K), E5, 4), B))
    yield "dot/e4e5", (dot(BF, HIGHEST), (A, codes((K, N), E5, 5)))
    yield "dot/e5e5", (dot(F32), (codes((M, K), E5, 4), codes((K, N), E5, 5)))
    sizes = (17, 33, 200), (16, 16, 16), (256, 64, 128), (128, 256, 4096), (256, 256, 8192), (32, 64, 12288)
    for m, n, k in sizes:
        for out in (F32, BF):
            yield f"dot/size/{m}x{n}x{k}/{name(out)}", (dot(out), (codes((m, k), E4, 6), codes((k, n), E4, 7)))


def _ranks() -> Iterator[tuple[str, Program]]:
    yield "rank/3D lhs", (dot(F32, contracting=((2,), (0,))), (A3, B))
    yield "rank/batch", (dot(F32, contracting=((2,), (1,)), batch=((0,), (0,))), (A3, B3))
    yield "rank/vmap both", (jax.vmap(dot(BF)), (A3, B3))
    two = A.reshape(M, 8, K // 8), B.reshape(8, K // 8, N)
    yield "rank/two contracting", (dot(F32, contracting=((1, 2), (0, 1))), two)
    yield "rank/matrix-vector", (dot(F32), (A, B[:, 0]))
    yield "layout/nt", (dot(F32, contracting=((1,), (1,))), (A, B.T.copy()))
    yield "layout/tn", (dot(F32, contracting=((0,), (0,))), (A.T.copy(), B))
    yield "layout/tt", (dot(F32, contracting=((0,), (1,))), (A.T.copy(), B.T.copy()))
    yield "jnp.dot", (lambda a, b: jnp.dot(a, b), (A, B))


def _scaled() -> Iterator[tuple[str, Program]]:
    """A scale behind the dot: whether it joins the GEMM, and how it is rounded."""
    for out in (BF, F32, F16):
        for form, program in _scaled_in(out, dot(out)):
            yield f"scale/{form}/{name(out)}", program
    y = dot(BF)
    twice = lambda a, b, s: (lambda product: (product * s.astype(BF), product))(y(a, b))  # noqa: E731
    yield "scale/two uses/bfloat16", (twice, (A, B, SA))
    yield "scale/f32 of a bfloat16 dot", (lambda a, b, s: y(a, b).astype(F32) * s, (A, B, SA))
    narrowed = lambda a, b, s, t: (dot(F32)(a, b) * (s * t)).astype(BF)  # noqa: E731
    yield "scale/bfloat16 of a f32 dot", (narrowed, (A, B, SA, SB))
    rows = lambda a, b, s, t: (dot(F32)(a, b) * s[:, None] * t[None, :]).astype(BF)  # noqa: E731
    yield "scale/rows", (rows, (A, B, real((M,), F32, 20) ** 2, real((N,), F32, 21) ** 2))


def _scaled_in(out: Any, y: Any) -> Iterator[tuple[str, Program]]:
    wide = dot(out, contracting=((2,), (0,)))
    pair, ones = (A, B, SA, SB), (A, B, SA.reshape(1), SB.reshape(1))
    yield "scalar", (lambda a, b, s, t: y(a, b) * (s * t).astype(out), pair)
    yield "one element", (lambda a, b, s, t: y(a, b) * jnp.broadcast_to((s * t).astype(out), (M, N)), ones)
    yield "barrier", (lambda a, b, s, t: y(a, b) * lax.optimization_barrier(s * t).astype(out), pair)
    yield "one factor", (lambda a, b, s: y(a, b) * s.astype(out), (A, B, SA))
    yield "divide", (lambda a, b, s: y(a, b) / s.astype(out), (A, B, SB))
    yield "constant", (lambda a, b: y(a, b) * out(0.37), (A, B))
    yield "twice", (lambda a, b, s, t: y(a, b) * s.astype(out) * t.astype(out), pair)
    yield "transposed product", (lambda a, b, s, t: y(a, b).T * (s * t).astype(out), pair)
    yield "3D", (lambda a, b, s, t: wide(a, b) * (s * t).astype(out), (A3, B, SA, SB))
    yield "odd sizes", (lambda a, b, s, t: y(a, b) * (s * t).astype(out), (A[:33], B[:, :50], SA, SB))


def _dequantized() -> Iterator[tuple[str, Program]]:
    """Dots of high-precision operands that were float8: GemmRewriter may make them float8 GEMMs."""

    def values(x: Any, s: Any, dtype: Any) -> Any:
        return x.astype(dtype) * jnp.broadcast_to(s.astype(dtype), x.shape)

    def rounded(x: Any, s: Any) -> Any:
        return jnp.clip(x / s.astype(BF), BF(-448), BF(448)).astype(E4)

    def product(dtype: Any, precision: Any = None, out: Any = None) -> Callable[..., Any]:
        return lambda a, b, s, t: dot(out, precision)(values(a, s, dtype), values(b, t, dtype))

    def transposed(a: Any, b: Any, s: Any, t: Any) -> Any:
        return dot(None, contracting=((0,), (0,)))(values(a, s, BF).T, values(b, t, BF))

    for dtype in (BF, F32, F16):
        for precision in (DEFAULT, HIGHEST):
            for form, shape in (("scalar", ()), ("one element", (1,))):
                operands = A, B, SA.reshape(shape), SB.reshape(shape)
                yield f"deq/{name(dtype)}/{precision}/{form}", (product(dtype, precision), operands)
    pair = A, B, SA, SB
    yield "deq/bf16 to f32", (product(BF, out=F32), pair)
    yield "deq/no scale", (lambda a, b: dot(None)(a.astype(BF), b.astype(BF)), (A, B))
    yield "deq/only one", (lambda a, b, s: dot(None)(values(a, s, BF), b), (A, real((K, N), BF, 9), SA))
    divided = lambda a, b, s, t: dot(None)(a.astype(BF) / s.astype(BF), b.astype(BF) / t.astype(BF))  # noqa: E731
    yield "deq/divide", (divided, pair)
    yield "deq/transposed", (transposed, pair)
    yield "deq/then scale", (lambda a, b, s, t: product(BF)(a, b, s, t) * s.astype(BF), pair)
    tensor = lambda x, w, s, t: product(BF, DEFAULT)(rounded(x, s), rounded(w, t), s, t)  # noqa: E731
    yield "deq/qdq of a tensor", (tensor, (real((M, K), BF, 10), real((K, N), BF, 11), SA, SB))


def _epilogues() -> Iterator[tuple[str, Program]]:
    bias, residual = real((N,), BF, 12, 3), real((M, N), BF, 13, 3)

    def y(a: Any, b: Any, s: Any) -> Any:
        return dot(BF)(a, b) * s.astype(BF)

    def with_amax(a: Any, b: Any, s: Any) -> Any:
        product = dot(BF)(a, b)
        return jnp.clip(product / s.astype(BF), BF(-448), BF(448)).astype(E4), jnp.max(jnp.abs(product))

    scaled, biased = (A, B, SA), (A, B, SA, bias)
    yield "epilogue/bias", (lambda a, b, s, c: y(a, b, s) + c, biased)
    yield "epilogue/bias as flax", (lambda a, b, s, c: y(a, b, s) + jnp.reshape(c, (1, -1)), biased)
    yield "epilogue/bias without scale", (lambda a, b, c: dot(BF)(a, b) + c, (A, B, bias))
    yield "epilogue/bias f32 from bf16", (lambda a, b, c: dot(F32)(a, b) + c.astype(F32), (A, B, bias))
    yield "epilogue/bias f32", (lambda a, b, c: dot(F32)(a, b) + c, (A, B, real((N,), F32, 14)))
    yield "epilogue/residual", (lambda a, b, s, r: y(a, b, s) + r, (A, B, SA, residual))
    both = lambda a, b, s, c, r: y(a, b, s) + c + r  # noqa: E731
    yield "epilogue/bias and residual", (both, (A, B, SA, bias, residual))
    yield "epilogue/relu", (lambda a, b, s: jnp.maximum(y(a, b, s), 0), scaled)
    yield "epilogue/bias relu", (lambda a, b, s, c: jnp.maximum(y(a, b, s) + c, 0), biased)
    yield "epilogue/gelu", (lambda a, b, s: jax.nn.gelu(y(a, b, s)), scaled)
    yield "epilogue/bias gelu", (lambda a, b, s, c: jax.nn.gelu(y(a, b, s) + c), biased)
    yield "epilogue/to float8", (lambda a, b, s: jnp.clip(y(a, b, s), BF(-448), BF(448)).astype(E4), scaled)
    yield "epilogue/amax and float8", (with_amax, (A, B, SB))


def _casts() -> Iterator[tuple[str, Program]]:
    """What programs compute around float8 GEMMs, without one."""

    def divided(x: Any, s: Any) -> Any:
        quotients = x / jnp.broadcast_to(s.astype(x.dtype), x.shape)
        return jnp.clip(quotients, -x.dtype.type(448), x.dtype.type(448)).astype(E4)

    def multiplied(x: Any, s: Any) -> Any:
        return jnp.clip(x * s.astype(x.dtype), -x.dtype.type(448), x.dtype.type(448)).astype(E4)

    def new_scale(history: Any, s: Any) -> Any:
        amax = jnp.max(history, axis=0)
        return 1 / jnp.where(amax > 0, (F32(448) / amax), 1 / s)

    x = real((256, 256), F32, 15, 3)
    for dtype in (F32, BF):
        yield f"cast/divide/{name(dtype)}", (divided, (x.astype(dtype), SA.reshape(1)))
        yield f"cast/multiply/{name(dtype)}", (multiplied, (x.astype(dtype), np.float32(81.3)))
        yield f"cast/plain/{name(dtype)}", (lambda x: (x.astype(E4), x.astype(E5)), ((x * 100).astype(dtype),))
    yield "cast/new scale", (new_scale, (np.abs(real((1024,), F32, 16)), SA.reshape(1)))
    wide = np.exp2(np.random.default_rng(25).uniform(-20, 20, 32768)).astype(np.float32)
    yield "div/448 by x", (lambda x: F32(448) / x, (wide,))
    yield "div/1 by x", (lambda x: 1 / x, (wide,))
    yield "div/x by s", (lambda x, s: x / s, (wide, SB))
    yield "div/x by x", (lambda x, y: x / y, (wide, wide[::-1].copy()))
    yield "gelu", (lambda x: jax.nn.gelu(x), (x.astype(BF),))


def _layers() -> Iterator[tuple[str, Program]]:
    """The casts and GEMMs of flax's Fp8DirectDotGeneralOp: forward, and the gradients of input and weight."""

    def layer(dtype: Any, x: Any, w: Any, g: Any, sx: Any, sw: Any, sg: Any) -> Any:
        def rounded(v: Any, s: Any, to: Any, top: float) -> Any:
            return jnp.clip(v / jnp.broadcast_to(s.astype(dtype), v.shape), -dtype(top), dtype(top)).astype(to)

        def scaled(y: Any, s: Any) -> Any:
            return y * jnp.broadcast_to(s.astype(dtype), y.shape)

        x, w, g = rounded(x, sx, E4, 448), rounded(w, sw, E4, 448), rounded(g, sg, E5, 57344)
        output, grad_input = dot(dtype, DEFAULT)(x, w), dot(dtype, HIGHEST, ((1,), (1,)))(g, w)
        grad_weight = lax.transpose(dot(dtype, HIGHEST, ((0,), (0,)))(g, x), (1, 0))
        return x, w, g, scaled(output, sx * sw), scaled(grad_input, sw * sg), scaled(grad_weight, sx * sg)

    scales = [np.array([x], np.float32) for x in (0.0071, 0.0009, 1e-6)]
    for dtype in (F32, BF):
        arrays = real((64, 256), dtype, 17), real((256, 96), dtype, 18, 0.1), real((64, 96), dtype, 19, 0.01)
        yield f"layer/{name(dtype)}", (lambda *v, dtype=dtype: layer(dtype, *v), (*arrays, *scales))


def _others() -> Iterator[tuple[str, Program]]:
    ragged = lambda a, b, n: lax.ragged_dot(a, b, n, preferred_element_type=F32)  # noqa: E731
    yield "ragged", (ragged, (A, codes((2, K, N), E4, 22), np.array([20, 44], np.int32)))
    exponents = (np.random.default_rng(seed).integers(-3, 4, (1, rows, K // 32)) for seed, rows in ((23, M), (24, N)))
    scales = [np.asarray(2.0**e, np.float32).astype(jnp.float8_e8m0fnu) for e in exponents]
    for out in (F32, BF):
        product = lambda *x, out=out: jax.nn.scaled_matmul(*x, preferred_element_type=out)  # noqa: E731
        yield f"scaled_matmul/{name(out)}", (product, (A[None], B.T[None].copy(), *scales))


def bits(x: Any) -> np.ndarray:
    """An array's bit patterns."""
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def digest(x: np.ndarray) -> str:
    return hashlib.sha256(f"{x.dtype}{x.shape}".encode() + x.tobytes()).hexdigest()[:16]


def float8_calls(hlo: str) -> list[list[str]]:
    """Of every float8 GEMM of compiled HLO the accumulation, and what is folded, in the words of `explain`."""
    ones = set(re.findall(r"(%[\w.]+) = f32\[\] constant\(1\)", hlo))
    calls: list[list[str]] = []
    for line in hlo.splitlines():
        if "__cublas$lt$matmul$f8" not in line:
            continue
        config = json.loads(line[line.index("backend_config=") + 15 :])["gemm_backend_config"]
        precision, beta = config["precision_config"], int(config["beta"])
        listed = re.search(r"custom-call\(([^)]*)\)", line)
        assert listed is not None
        scale_a, scale_b = re.sub(r"/\*.*?\*/", "", listed[1]).split(", ")[2 + beta : 4 + beta]
        by_algorithm = precision["algorithm"].endswith("FAST_ACCUM")
        by_precision = precision["algorithm"] == "ALG_UNSET" and set(precision["operand_precision"]) == {"DEFAULT"}
        folded = {
            "left or product scale": scale_a not in ones,
            "right scale": scale_b not in ones,
            "constant": config["alpha_real"] != 1,
            "residual": bool(beta),
            "amax": config["damax_output"],
            "float8 output": bool(re.search(r"= \(?f8", line)),
            **{word.lower(): word in config["epilogue"] for word in ("BIAS", "RELU", "GELU")},
        }
        accumulation = "fast" if by_algorithm or by_precision else "promoted"
        calls.append([accumulation, *sorted(word for word, is_there in folded.items() if is_there)])
    return sorted(calls)


def pack(results: dict[str, list[np.ndarray]], calls: dict[str, list[list[str]]], device: str) -> bytes:
    """A file of outputs, each stored once."""
    arrays = {digest(x): x for key, xs in results.items() if not key.startswith(WITHOUT_GEMM) for x in xs}
    digests = {key: [digest(x) for x in xs] for key, xs in results.items()}
    index = {"device": device, "outputs": digests, "float8_calls": calls}
    buffer = io.BytesIO()
    np.savez(buffer, index=np.frombuffer(json.dumps(index).encode(), np.uint8), **arrays)  # pyright: ignore[reportArgumentType]
    return lzma.compress(buffer.getvalue(), preset=9)


def read(path: Path = RECORDED) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The index of a file, and its arrays by their digests."""
    file = np.load(io.BytesIO(lzma.decompress(path.read_bytes())))
    return json.loads(file["index"].tobytes()), {key: file[key] for key in file.files if key != "index"}


def main(path: str) -> None:
    """Record every program on JAX's default device."""
    results, calls = {}, {}
    for key, (function, operands) in programs().items():
        options: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
        compiled = jax.jit(function).lower(*operands).compile(compiler_options=options)
        results[key] = [bits(x) for x in jax.tree.leaves(compiled(*operands))]
        calls[key] = float8_calls(compiled.as_text() or "")
    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    Path(path).write_bytes(pack(results, calls, device))


if __name__ == "__main__":
    main(sys.argv[1])
