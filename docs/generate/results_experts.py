"""The tables of mixtures of experts in torch: the experts alone, and a whole model in training."""

import re
from collections.abc import Callable

from results_records import NO_FIGURE, Entry, lines, percent, record, source, subject, table, times

from benchmarks.kernel_kinds import kinds

_EXPERTS = "experts-h200"
_LIMITS = ("ms", "gemms_ms", "bytes_ms")
_LIMITED = (("bf16", "compiled"), ("f8emu/rowwise_fast", "compiled"), ("f8emu/delayed, fast", "compiled"))
_LIMITED += (("f8emu/rowwise", "eager"),)

_MIXTURE = "moe_train-h200"


def experts() -> str:
    """Speed and peak memory of a mixture's experts, a pair of columns for each shape."""
    shapes = record(_EXPERTS)["shapes"]
    columns, rows = [""], []
    for shape in shapes:
        columns += [f"{shape['name']}: speed", "memory"]
    for name, mode in dict.fromkeys((s["subject"], s["mode"]) for s in shapes[0]["subjects"] if s["mode"] != "alone"):
        row = [f"{_label(name)}, {mode}"]
        for found in (subject(shape, name, mode) for shape in shapes):
            row += map(times, (found.get("speed"), found.get("memory")))
        rows.append(row)
    return f"{table(columns, rows)}\n\n{source(_EXPERTS)}"


def experts_limits() -> str:
    """What limits the experts of each shape."""
    rows = []
    for shape in record(_EXPERTS)["shapes"]:
        for name, mode in _LIMITED:
            found = subject(shape, name, mode)
            figures = (NO_FIGURE if found.get(key) is None else f"{found[key]:.2f}" for key in _LIMITS)
            shown = percent(found.get("fraction_of_floor")), found.get("limit", NO_FIGURE)
            rows.append([f"{shape['name']}: {_label(name)}, {mode}", *figures, *shown])
    return f"{table(['', 'ms', 'GEMMs, ms', 'bytes, ms', 'of the floor', 'most time'], rows)}\n\n{source(_EXPERTS)}"


def accumulation() -> str:
    """What a GEMM that adds to the gradients of weights could save at most."""
    rows = []
    for shape in record(_EXPERTS)["shapes"]:
        elements = 3 * shape["experts"] * shape["dim"] * shape["hidden"]
        found = subject(shape, "f8emu/rowwise_fast, kept, x4", "compiled")
        rows.append(_saved(f"experts of {shape['name']}", elements, found["ms"]))
    (rowwise,) = (s for s in record(_MIXTURE)["subjects"] if s["subject"] == "f8emu/rowwise")
    elements = 5 * 3 * 16 * 2048 * 2048  # layers, weights, experts, `hidden_size`, `moe_intermediate_size`
    rows.append(_saved("experts of the mixture below, of a whole step", elements, rowwise["ms"]))
    columns = ["", "elements of weights", "a microbatch, ms", "saved at most, ms", "of it"]
    return f"{table(columns, rows)}\n\n{lines(_EXPERTS, _MIXTURE)}"


def _saved(label: str, elements: int, ms: float) -> list[str]:
    """In three of four microbatches the new gradient, 2 bytes an element, is neither written nor read again."""
    saved = 3 / 4 * 4e3 * elements / record(_EXPERTS)["copy_bytes_per_second"]
    return [label, f"{elements / 1e6:.0f} M", f"{ms:.2f}", f"{saved:.2f}", percent(saved / ms)]


def mixture() -> str:
    """A whole mixture in training."""
    rows = []
    for found in record(_MIXTURE)["subjects"]:
        bounds = f"{found['ms_min']:.1f} to {found['ms_max']:.1f}"
        figures = (f"{found['tokens_per_second']:,.0f}", times(found["speed"]), f"{found['ms']:.1f}", bounds)
        rows.append([_label(found["subject"]), *figures, f"{found['peak_bytes'] / 2**30:.1f}", times(found["memory"])])
    columns = ["", "tokens per second", "speed", "ms", "turns, ms", "peak memory, GiB", "memory"]
    return f"{table(columns, rows)}\n\n{source(_MIXTURE, ('torch', 'triton', 'transformers'))}"


def mixture_parts() -> str:
    """What the kernels of its step are for."""
    subjects = [s for s in record(_MIXTURE)["subjects"] if "kernels" in s]
    parts = [_parts(found["kernels"]) for found in subjects]
    columns = ["kernels", *(f"{_label(s['subject'])}: {what}" for s in subjects for what in ("ms", "of all"))]
    rows = []
    for kind in parts[0]:
        if any(part[kind] for part in parts):
            shown = ((f"{part[kind] / 1e3:.1f}", percent(part[kind] / part["all"])) for part in parts)
            rows.append([kind, *(figure for pair in shown for figure in pair)])
    return f"{table(columns, rows)}\n\n{source(_MIXTURE, ('torch', 'triton', 'transformers'))}"


def _parts(kernels: list[Entry]) -> dict[str, float]:
    """Microseconds by kind; the GEMMs of experts, which are grouped, count twice."""
    grouped = sum(entry["us"] for entry in kernels if re.search("GroupProblemShape|^gemm_of_", entry["name"]))
    parts = dict[str, float]()
    for kind, us in kinds(kernels).items():
        parts |= {kind: us, "GEMMs, the experts' alone": grouped} if kind == "GEMMs" else {kind: us}
    return parts | {"all": sum(entry["us"] for entry in kernels)}


def _label(name: str) -> str:
    return name.replace("bf16", "bfloat16")


BLOCKS: dict[str, Callable[[], str]] = {
    "experts": experts,
    "experts-limits": experts_limits,
    "experts-accumulation": accumulation,
    "mixture": mixture,
    "mixture-parts": mixture_parts,
}
