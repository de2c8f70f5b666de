"""`f8emu.jax.emulate` and `explain` against what an H100 made of the same programs (`xla_programs.py`)."""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import linen
from flax.linen import fp8_ops
from jax import lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import linear_call
from jax.experimental import pallas

import f8emu.jax as f8
from f8emu.jax.emulated import epilogue, gemm, matching, operands, transform
from f8emu.jax.emulated.rules import Rule, Sizes
from f8emu.spec.errors import SpecError, UnsupportedError
from tests.jax_path import xla_programs
from tests.jax_path.layers import assert_same_bits
from tests.jax_path.xla_programs import BF, E4, E5, F32, SA, A, B, bits, dot

PROGRAMS = xla_programs.programs()
INDEX, ARRAYS = xla_programs.read()
QUICK = {"xla_backend_optimization_level": 0}
"""Machine code in the shortest time. What it gives is compared with optimized code where transformations are."""
NOT_EQUAL = {
    *("deq/divide", "epilogue/gelu", "epilogue/bias gelu"),  # a GPU's own division and tanh
    *("dot/e5e5", "rank/matrix-vector", "deq/only one"),  # no float8 GEMM
}
"""Programs with dots that have other bits."""
NO_GEMM_NOR_BITS = {"div/448 by x", "div/1 by x", "div/x by x"}
NOT_ON_CPU = {"scaled_matmul/float32", "scaled_matmul/bfloat16"}
"""XLA's CPU backend has no such dot."""


def differing(name: str) -> int:
    """The number of elements in which a program differs from the recorded outputs."""
    program, arrays = PROGRAMS[name]
    results = jax.tree.leaves(jax.jit(f8.emulate(program), compiler_options=QUICK)(*arrays))
    wanted = [ARRAYS[key] for key in INDEX["outputs"][name]]
    return sum(int((bits(x) != y).sum()) for x, y in zip(results, wanted, strict=True))


def with_dots() -> list[str]:
    return [name for name in PROGRAMS if not name.startswith(xla_programs.WITHOUT_GEMM) and name not in NOT_ON_CPU]


@pytest.fixture(autouse=True)
def _as_users_write() -> Iterator[None]:
    """The suite forbids `y + bias` without a reshape; users write it."""
    with jax.numpy_rank_promotion("allow"):
        yield


def explanation(name: str) -> f8.Explanation:
    program, arrays = PROGRAMS[name]
    return f8.explain(program)(*arrays)


explained = functools.cache(explanation)


def float8_calls(explanation: f8.Explanation) -> list[list[str]]:
    """The float8 GEMMs of an explanation, as `xla_programs.float8_calls` reads them from HLO."""
    words = {
        "scale of left": "left or product scale",
        "scale": "left or product scale",
        "scale of right": "right scale",
    }
    calls: list[list[str]] = []
    for row in explanation.dots:
        if row.accumulation is not None:
            folded = {words.get(word, word) for word in row.folded}
            folded |= {"float8 output"} if "-> float8" in row.operands else set()
            calls.append([row.accumulation, *sorted(folded)])
    return sorted(calls)


# An H100's bits


def test_programs_have_the_bits_of_an_h100() -> None:
    """115 of 126: 106 with dots here, 9 without in the next test."""
    assert {name for name in with_dots() if differing(name)} == NOT_EQUAL
    assert set(INDEX["outputs"]) == set(PROGRAMS) and len(PROGRAMS) == 126
    assert len(with_dots()) - len(NOT_EQUAL) == 106


def test_what_surrounds_gemms_differs_where_a_gpu_divides() -> None:
    names = [name for name in PROGRAMS if name.startswith(xla_programs.WITHOUT_GEMM)]
    other = set()
    for name in names:
        program, arrays = PROGRAMS[name]
        digests = [xla_programs.digest(bits(x)) for x in jax.tree.leaves(jax.jit(f8.emulate(program))(*arrays))]
        other |= {name} if digests != INDEX["outputs"][name] else set()
    assert other == NO_GEMM_NOR_BITS and len(names) == 12


def test_what_differs_is_not_promised() -> None:
    for name in NOT_EQUAL:
        assert not any(row.is_promised for row in explained(name).dots), name
    assert differing("deq/divide") == 2


# explain


def test_explain_agrees_with_compiled_hlo() -> None:
    calls = {name: float8_calls(explained(name)) for name in PROGRAMS}
    assert calls == INDEX["float8_calls"]
    assert sum(map(len, calls.values())) == 113


def test_every_rule_decides_recorded_programs() -> None:
    deciding = Counter(rule for name in PROGRAMS for rule in {r for row in explained(name).dots for r in row.rules})
    assert deciding == {
        Rule.GEMM.value: 109,
        Rule.ACCUMULATION.value: 109,
        Rule.SCALE.value: 56,
        Rule.FACTOR.value: 57,
        Rule.BIAS.value: 7,
        Rule.RESIDUAL.value: 2,
        Rule.ACTIVATION.value: 4,
        Rule.FLOAT8.value: 7,
        Rule.RAGGED.value: 1,
    }


def test_numerics_states_every_rule() -> None:
    numerics = (Path(__file__).parents[2] / "reference" / "NUMERICS.md").read_text()
    assert [rule.value for rule in Rule] == re.findall(r"^\[(XLA-\d+)\]", numerics, re.MULTILINE)


def test_an_explanation_reads_as_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    lines = str(explained("epilogue/bias relu")).splitlines()
    assert lines[0] == "1 of 1 dots are float8 GEMMs; bits are promised of 1"
    assert lines[2].split() == ["dot", "operands", "float8", "GEMM", "joins", "it", "rules"]
    assert "float8_e4m3fn[64, 2048] x float8_e4m3fn[2048, 96] -> bfloat16[64, 96]  fast" in lines[3]
    assert "scale, bias, relu" in lines[3] and "XLA-1 XLA-2 XLA-3 XLA-4 XLA-5 XLA-7" in lines[3]
    monkeypatch.setenv("COLUMNS", "80")
    narrow = str(explained("epilogue/bias relu")).splitlines()
    assert max(map(len, narrow)) <= 80 and " ".join(narrow).split()[-6:] == lines[3].split()[-6:]
    none = "0 of 0 dots are float8 GEMMs; bits are promised of 0"
    assert str(f8.explain(lambda x: x + 1)(1.0)) == none
    dot_general, x = f8.dot_general("rowwise"), jnp.ones((32, 32), jnp.bfloat16)
    step = jax.value_and_grad(lambda x, w: dot_general(x, w, (((1,), (0,)), ((), ()))).sum(), argnums=(0, 1))
    assert str(f8.explain(step)(x, x)) == f"{none}; not listed, with the chip's bits: 3 GEMMs of f8emu's own layers"


# Planted faults


def refused(*_: Any, **__: Any) -> None:
    return None


def rounded_twice(x: jax.Array, dtype: Any, rounded: Any = gemm.rounded) -> jax.Array:
    return rounded(rounded(x, np.dtype(BF)).astype(F32), dtype)


def as_the_array(factor: operands.Factor, read: Any) -> jax.Array:
    return jnp.asarray(read(factor.value)).reshape(()).astype(factor.dtype).astype(F32)


FAULTS: dict[str, tuple[Any, str, Any, str]] = {
    "operands are not dequantized": (operands, "_converted", refused, "deq/float32/HIGHEST/scalar"),
    "precisions are alike": (matching, "is_fast", lambda _: True, "dot/mixed precision"),
    "no scale joins": (epilogue._Walk, "_scale", refused, "scale/scalar/bfloat16"),
    "a scale joins a cut product": (Sizes, "is_padded", False, "scale/odd sizes/bfloat16"),
    "no scale joins a transposed product": (epilogue._Walk, "_swaps", refused, "scale/transposed product/float16"),
    "a scale is rounded to the array's dtype": (operands.Factor, "read", as_the_array, "scale/twice/bfloat16"),
    "one element is not rounded": (operands, "is_scalar", lambda _: True, "scale/one element/bfloat16"),
    "no bias or residual joins": (epilogue._Walk, "_sum", refused, "epilogue/bias"),
    "a residual is added to a rounded product": (epilogue._Walk, "_sum", refused, "epilogue/residual"),
    "no conversion to float8 joins": (epilogue._Walk, "_float8", refused, "epilogue/amax and float8"),
    "float8 outputs are rounded to bfloat16 before": (gemm, "rounded", rounded_twice, "jnp.dot"),
    "quotients are rounded to bfloat16 before a cast": (matching, "quotient_of", refused, "layer/bfloat16"),
    "groups are multiplied in promoted accumulation": (gemm, "is_fast", lambda _: False, "ragged"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_differs_from_the_h100(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    room, attribute, planted, name = FAULTS[fault]
    monkeypatch.setattr(room, attribute, planted)
    assert differing(name) > 0  # and 0 without it: it is one of the 115


@pytest.mark.parametrize("name", ["epilogue/bias f32 from bf16", "scale/scalar/float32"])
def test_what_changes_no_bit_is_seen_in_the_hlo(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epilogue._Walk, "_step", refused)
    assert differing(name) == 0
    assert float8_calls(explanation(name)) != INDEX["float8_calls"][name]


# Transformations: the GEMM inside has the same bits


def plain(a: Any, b: Any) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=F32)


def scanned(a: Any, b: Any) -> jax.Array:
    return lax.scan(lambda carry, x: (carry + 1, plain(x, b)), 0, a.reshape(4, 16, -1))[1]


def looped(a: Any, b: Any) -> jax.Array:
    start = jnp.zeros((xla_programs.M, xla_programs.N))
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, plain(a, b)), (0, start))[1]


def branched(a: Any, b: Any) -> jax.Array:
    return lax.cond(jnp.isnan(a.astype(F32)).any(), lambda a, b: plain(a, b) * 0, plain, a, b)


@jax.custom_vjp
def with_rule(a: Any, b: Any) -> jax.Array:
    return plain(a, b)


with_rule.defvjp(lambda a, b: (plain(a, b), ()), lambda _, g: (g, g))


@custom_vmap
def with_batching(a: Any, b: Any) -> jax.Array:
    return plain(a, b)


with_batching.def_vmap(lambda size, batched, a, b: (a, b))


def in_a_gradient(a: Any, b: Any) -> jax.Array:
    """The product is the gradient of a linear function of `x`."""
    return jax.grad(lambda x: (x * plain(a, b)).sum())(jnp.ones((xla_programs.M, xla_programs.N)))


WAYS: dict[str, Callable[[Any, Any], jax.Array]] = {
    "eager": f8.emulate(plain),
    "of a jit": f8.emulate(jax.jit(plain)),
    "of a vmap": f8.emulate(lambda a, b: jax.vmap(plain, (0, None))(a.reshape(4, 16, -1), b)),
    "in a vmap": lambda a, b: jax.vmap(f8.emulate(plain), (0, None))(a.reshape(4, 16, -1), b),
    "of a scan": jax.jit(f8.emulate(scanned)),
    "of a while": jax.jit(f8.emulate(looped)),
    "of a cond": jax.jit(f8.emulate(branched)),
    "of a checkpoint": f8.emulate(jax.checkpoint(plain)),
    "of a custom_vjp": f8.emulate(with_rule),
    "of a custom_vmap": f8.emulate(with_batching),
    "of a linear_call": f8.emulate(lambda a, b: linear_call(lambda b, a: plain(a, b), lambda _, g: g, b, a)),
    "of a linear solve": f8.emulate(
        lambda a, b: lax.custom_linear_solve(lambda x: x, plain(A, B), lambda _, y: y * 0 + plain(a, b))
    ),
    "of a gradient": jax.jit(f8.emulate(in_a_gradient)),
    "with donation": lambda a, b: jax.jit(f8.emulate(lambda s, a, b: s + plain(a, b)), donate_argnums=0)(
        jnp.zeros((xla_programs.M, xla_programs.N)), a, b
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_transformations_keep_the_bits(way: str) -> None:
    (key,) = INDEX["outputs"]["dot/e4e4/float32/None"]
    np.testing.assert_array_equal(bits(WAYS[way](A, B)).reshape(ARRAYS[key].shape), ARRAYS[key])
    assert (bits(plain(A, B)) != ARRAYS[key]).any()


def test_places_and_names() -> None:
    def nested(a: Any, b: Any) -> jax.Array:
        with jax.named_scope("outer"):
            return scanned(a, b) + branched(a, b).reshape(4, 16, -1)

    rows = f8.explain(nested)(A, B).dots
    assert [row.place for row in rows] == ["scan of 4", "branch 0", "branch 1"]
    assert f8.explain(jax.named_scope("mine")(plain))(A, B).dots[0].name == "mine"


def test_trees_static_arguments_and_keys() -> None:
    def step(tree: dict[str, Any], key: jax.Array, *, mode: str, scale: bool = False) -> dict[str, Any]:
        assert mode == "train"
        return {"y": plain(tree["a"], tree["b"]), "bits": jax.random.bits(key), "none": None, "scaled": scale}

    outputs = f8.emulate(step)({"a": A, "b": B}, jax.random.key(1), mode="train")
    assert outputs["none"] is None and outputs["scaled"] is False
    assert_same_bits(outputs["bits"], jax.random.bits(jax.random.key(1)))


def test_codes_are_moved_in_the_place_of_values() -> None:
    keep = np.arange(xla_programs.K) % 3 > 0

    def moved(a: Any, b: Any) -> jax.Array:
        values = jnp.where(keep, a.astype(BF) * BF(0.5), 0)[:, :-8]
        return jnp.dot(jnp.pad(values, ((0, 0), (8, 0))), b.astype(BF), preferred_element_type=F32)

    codes = jnp.pad(jnp.where(keep, A, jnp.zeros((), E4))[:, :-8], ((0, 0), (8, 0)))
    assert_same_bits(f8.emulate(moved)(A, B), f8.emulate(plain)(codes, B) * 0.5)
    assert f8.emulate(plain)(A[:0], B).shape == (0, xla_programs.N)


@pytest.mark.parametrize("fill", [1.0, jnp.cos])
def test_what_is_padded_with_other_values_is_no_float8_operand(fill: Any) -> None:
    def padded(a: Any, b: Any, x: Any) -> jax.Array:
        value = fill(x) if callable(fill) else fill
        rows = jnp.pad(a.astype(F32) * 2, ((0, 0), (0, 16)), constant_values=value)
        columns = jnp.pad(b.astype(F32), ((0, 16), (0, 0)), constant_values=value)
        return plain(rows, columns)

    assert_same_bits(f8.emulate(padded)(A, B, SA), padded(A, B, SA))
    assert f8.explain(padded)(A, B, SA).dots[0].notes == ("operands in float32 and float32",)


def test_a_gpu_that_is_the_chip_runs_the_program_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transform, "is_at_hand", lambda _: True)
    assert_same_bits(f8.emulate(plain)(A, B), plain(A, B))
    assert (bits(f8.emulate(plain, force=True)(A, B)) != bits(plain(A, B))).any()


def test_why_a_dot_is_no_float8_gemm() -> None:
    def notes(f: Callable[..., Any], *arrays: Any) -> str:
        (row,) = f8.explain(f)(*arrays).dots
        assert not row.is_float8 and not row.is_promised and row.rules == ()
        return row.notes[0]

    groups, experts = np.array([20, 44], np.int32), jnp.stack([B, B])
    assert notes(plain, A.astype(BF), B) == "operands in bfloat16 and float8_e4m3fn"
    assert notes(lax.ragged_dot, A.astype(BF), experts, groups) == "operands in bfloat16 and float8_e4m3fn"
    assert "E5M2 x E5M2" in notes(plain, A.astype(E5), B.astype(E5))
    assert "a vector" in notes(plain, A, B[:, 0])
    assert "cuBLASLt has none" in notes(dot(E5), A, B)
    program, arrays = PROGRAMS["scaled_matmul/float32"]
    assert notes(program, *arrays).startswith("block scales")


def test_refusals() -> None:
    with pytest.raises(UnsupportedError, match=r"emulate the derivative: f8emu.jax.emulate\(jax.grad\(f\)\)"):
        jax.grad(f8.emulate(lambda s: plain((A.astype(F32) * s).astype(E4), B).sum()))(1.0)
    with pytest.raises(SpecError, match="chip"):
        f8.emulate(plain, chip="H1000")  # pyright: ignore[reportArgumentType]


def test_a_dot_in_a_primitive_that_is_not_opened_is_refused_by_name() -> None:
    def kernel(a: Any, b: Any, out: Any) -> None:
        out[...] = lax.fori_loop(0, 2, lambda _, x: x + plain(a[...], b[...]), out[...])

    shape = jax.ShapeDtypeStruct((xla_programs.M, xla_programs.N), F32)
    for transformed in (f8.emulate, f8.explain):
        with pytest.raises(UnsupportedError, match="got one in the primitive pallas_call"):
            transformed(jax.jit(pallas.pallas_call(kernel, shape, interpret=True)))(A, B)
    in_float32 = f8.emulate(pallas.pallas_call(kernel, shape, interpret=True))(A.astype(F32), B.astype(F32))
    assert in_float32.dtype == F32
    solved: Any = f8.emulate(jnp.linalg.solve)(jnp.eye(3), jnp.ones(3))
    np.testing.assert_array_equal(solved, 1)


def test_f8emu_s_own_layers_stay_as_they_are() -> None:
    def layer(a: Any, b: Any) -> Any:
        return f8.dot_general("rowwise")(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), (((1,), (0,)), ((), ())))

    assert not f8.explain(layer)(A, B).dots
    np.testing.assert_array_equal(bits(jax.jit(f8.emulate(layer))(A, B)), bits(f8.jit(layer)(A, B)))


def test_what_is_no_array_is_returned_as_it_is() -> None:
    outputs = f8.emulate(lambda a: (3, 2.5, True, "name", jnp.int32(4), a))(A)
    assert outputs[:4] == (3, 2.5, True, "name") and [type(x) for x in outputs[:2]] == [int, float]
    assert all(isinstance(x, jax.Array) for x in outputs[4:]) and jax.jit(f8.emulate(lambda a: 3))(A) == 3


DOUBTS = {
    "1 / scale": lambda a, b, s: plain(a, b) / s,
    "slices K is split": lambda a, b, s: plain(jnp.tile(a, (1, 4)), jnp.tile(b, (4, 1))),
    "rounded twice": lambda a, b, s: plain(a, b) * s + jnp.cos(plain(a, b)),
    "sum of two GEMMs": lambda a, b, s: dot(BF, xla_programs.HIGH)(a, b) + dot(BF)(a, b),
    "transpose follows": lambda a, b, s: (dot(BF)(a, b) * s.astype(BF)).T,
    "another array": lambda a, b, s: (dot(BF)(a, b) * s.astype(BF), jnp.cos(dot(F32)(a, b)).astype(BF) * s.astype(BF)),
    "constant and a scale": lambda a, b, s: dot(BF)(a, b) * s.astype(BF) * BF(0.3),
    "constant after": lambda a, b, s: (dot(BF)(a, b) + jnp.cos(s.astype(BF) * jnp.ones(96, BF))) * BF(0.3),
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_what_was_not_recorded_is_not_promised(doubt: str) -> None:
    rows = f8.explain(DOUBTS[doubt])(A, B, SA).dots
    assert any(doubt in note for row in rows for note in row.notes if not row.is_promised)


def test_dots_that_xla_merges_name_the_option_that_keeps_them_apart() -> None:
    rows = f8.explain(lambda a, b: (plain(a, b), plain(a, b + b)))(A, B).dots
    assert all("xla_gpu_dot_merger_threshold_mb=0" in row.notes[0] and row.is_promised for row in rows)


# Layers of flax and qwix, against the same layers whose `lax.dot_general` is f8emu's


OPERATORS = fp8_ops.Fp8DirectDotGeneralOp, fp8_ops.Fp8DotGeneralOp
JAX_DOT = lax.dot_general


def dot_of_chip(lhs: Any, rhs: Any, dimension_numbers: Any, precision: Any = None, **options: Any) -> jax.Array:
    """`lax.dot_general`; of two float8 arrays with one contracted dimension each, by `scaled_mm`."""
    if not {lhs.dtype, rhs.dtype} <= {np.dtype(E4), np.dtype(E5)}:
        return JAX_DOT(lhs, rhs, dimension_numbers, precision=precision, **options)
    ((left, right), _) = dimension_numbers
    a, b = (jnp.moveaxis(x, axes, range(-len(axes), 0)) for x, axes in ((lhs, left), (rhs, right)))
    k = int(np.prod([lhs.shape[i] for i in left]))
    shape, unit = a.shape[: -len(left)] + b.shape[: -len(left)], jnp.ones((), F32)
    product = f8.scaled_mm(
        a.reshape(-1, k),
        b.reshape(-1, k).T,
        unit,
        unit,
        out_dtype=options["preferred_element_type"],
        engine="emulated",
        use_fast_accum=precision in (None, lax.Precision.DEFAULT, (lax.Precision.DEFAULT,) * 2),
    )
    return product.reshape(shape)


def passes(model: linen.Module, transform: Callable[[Any], Any]) -> tuple[Any, f8.Explanation]:
    """The loss of a model and its gradients, and what `explain` says of them."""
    x = xla_programs.real((4, 16, 64), F32, 0)
    variables = jax.jit(model.init, compiler_options=QUICK)(jax.random.key(1), x)

    def loss(variables: Any, x: jax.Array) -> jax.Array:
        y: Any = model.apply(variables, x)
        return (y**2).mean()

    step = jax.value_and_grad(loss, argnums=(0, 1))
    return jax.jit(transform(step), compiler_options=QUICK)(variables, x), f8.explain(step)(variables, x)


def unchanged(f: Any) -> Any:
    return f


@pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated")
def test_flax_operators_train_as_with_dots_of_the_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    direct, dequantizing = (linen.Dense(48, dot_general_cls=cls) for cls in OPERATORS)
    of_direct, rows = passes(direct, f8.emulate)
    of_dequantizing, other_rows = passes(dequantizing, f8.emulate)
    for explanation in (rows, other_rows):
        accumulations = Counter(row.accumulation for row in explanation.dots if row.is_promised)
        assert accumulations == {"fast": 1, "promoted": 2}
    assert_same_bits(of_direct[0], of_dequantizing[0])
    monkeypatch.setattr(lax, "dot_general", dot_of_chip)
    jax.tree.map(assert_same_bits, of_direct, passes(direct, unchanged)[0])


@pytest.mark.filterwarnings("ignore:'VariableState' was removed")
def test_qwix_trains_in_fast_accumulation() -> None:
    rules = [qwix.QtRule(module_path=".*", weight_qtype=E4, act_qtype=E4, bwd_qtype=E5)]
    model = qwix.quantize_model(linen.Dense(48), qwix.QtProvider(rules))
    (loss, _), explanation = passes(model, f8.emulate)
    assert [row.accumulation for row in explanation.dots if row.is_promised] == ["fast"] * 3
    (loss_of_cpu, _), _ = passes(model, unchanged)
    assert bits(loss) != bits(loss_of_cpu)
