"""The tables and plots of training in JAX and of training on many GPUs."""

from collections.abc import Callable, Iterable
from statistics import median

from results_records import (
    NO_FIGURE,
    RECIPES,
    Entry,
    count,
    inline,
    lines,
    middle,
    of,
    record,
    shown_as,
    source,
    span,
    subject,
    table,
    times,
)
from results_torch import losses

from benchmarks.kernel_kinds import KINDS, kinds
from f8emu.report.charts import bars, curves

_JAX = ("jax",)
_FUSED, _MEMORY = "jax_feed_forward-fused-h200", "jax_feed_forward-memory-h200"
_TITAN = ("torch", "torchao", "torchtitan")
_CASTS = ("cast kernels", "triton with a cast or an amax", "amax kernels", "cast_columns", "transpose_codes", "scales")
"""The classes of kernels that a float8 step has and a bfloat16 one does not."""


def jax_feed_forward() -> str:
    """The block in JAX: each recipe, and flax's float8."""
    runs = record(_FUSED)["runs"]
    two_blocks = next(run for run in record(_MEMORY)["runs"] if run["blocks"] == 2)
    shown = {
        **{recipe: f"f8emu/{recipe}" for recipe in RECIPES},
        "flax `Fp8DirectDotGeneralOp`": "flax/Fp8DirectDotGeneralOp",
        "flax `Fp8DotGeneralOp`": "flax/Fp8DotGeneralOp",
    }
    rows = []
    for label, name in shown.items():
        found = [(run["steps"], subject(run, name)) for run in runs]
        speeds = [span(s.get("speed") for steps, s in found if steps == turn) for turn in (10, 100)]
        memory = next(s["memory"] for _, s in reversed(found) if s)
        rows.append([label, *speeds, times(memory), times(subject(two_blocks, name).get("memory"))])
    columns = ["", "speed", "100 steps a turn", "memory", "memory, two blocks"]
    return f"{table(columns, rows)}\n\n{lines(_FUSED, _MEMORY, packages=_JAX)}"


def jax_plot() -> str:
    """The speeds of one run."""
    run = record(_FUSED)["runs"][2]
    speeds = [subject(run, f"f8emu/{recipe}").get("speed") for recipe in RECIPES]
    title = "Speed of Llama-3 8B's feed-forward block in JAX on an NVIDIA H200, times bfloat16"
    return inline(bars(RECIPES, {"f8emu": speeds}, line=(1.0, "bfloat16")), title)


def jax_machines() -> str:
    """The block on all machines that ran it."""
    files = ("jax_feed_forward-h200", "jax_feed_forward-steps-h200", _FUSED)
    runs = [run for name in files for run in record(name).get("runs", [record(name)])]
    rows = []
    for recipe in RECIPES:
        found = [subject(run, f"f8emu/{recipe}").get("speed") for run in runs]
        rows.append([recipe, middle(found), str(sum(v is not None for v in found))])
    return f"{table(['', 'speed', 'runs'], rows)}\n\n{lines(*files, packages=_JAX)}"


def jax_training() -> str:
    """Losses of a small flax model."""
    return _losses_of("jax_train-cpu")


def jax_training_mxfp8() -> str:
    """The same for 50 steps under MXFP8."""
    return _losses_of("jax_train-mxfp8-cpu")


def _losses_of(name: str) -> str:
    return f"{losses(record(name)['verdicts'])}\n\n{source(name, ('jax', 'torch'))}"


def jax_sharding() -> str:
    """Layers over two GPUs, against the oracle and against one GPU."""
    rows = []
    for case in record("jax_sharding-h200x2")["cases"]:
        compared = case.get("differing", {}).items()
        shown = ", ".join(f"`{name}` {of(*found)}" for name, found in compared if found[0])
        rows.append([case["case"], case["verdict"], shown or ("0" if compared else NO_FIGURE)])
    columns = ["case", "what must be equal", "numbers that differ from one GPU's"]
    return f"{table(columns, rows)}\n\n{source('jax_sharding-h200x2', _JAX)}"


def _ratios(runs: Iterable[Entry], checkpointing: str, variant: str) -> tuple[list[float], str]:
    """The speeds of a variant on all machines, and its memory in the last run that has it."""
    found = [v for run in runs if run["checkpointing"] == checkpointing for v in run["variants"]]
    found = [v for v in found if v["variant"] == variant]
    return [v["speed"] for v in found], times(found[-1]["memory"]) if found else NO_FIGURE


def _titan(name: str, layers: int) -> str:
    runs = [run for run in record(name)["runs"] if run["layers"] == layers]
    rows = []
    for label in ("f8emu/tensorwise", "f8emu/rowwise", "f8emu/delayed", "torchao/tensorwise"):
        row = [label.replace("/", " ")]
        for checkpointing in ("selective", "none"):
            speeds, memory = _ratios(runs, checkpointing, f"{label}+all-gather")
            row += [middle(speeds), str(len(speeds)) if speeds else NO_FIGURE, memory]
        rows.append(row)
    what = ("speed", "runs", "memory")
    columns = ["", *(f"{kind}: {w}" for kind in ("selective", "no checkpointing") for w in what)]
    return f"{table(columns, rows)}\n\n{source(name, _TITAN)}"


def titan_four() -> str:
    """Llama-3 8B on four GPUs."""
    return _titan("torchtitan-all-gather-h200x4", 32)


def titan_two() -> str:
    """Half of it on two."""
    return _titan("torchtitan-all-gather-h200x2", 16)


_STEP, _DELAYED_STEP = "torchtitan-step-h200x2", "torchtitan-step-delayed-h200x2"
_OF_STEP = [*(kind for kind in KINDS if kind != "collectives"), "other"]


def titan_at_rest() -> str:
    """The same with the codes of weights at rest."""
    rows, name = [], _STEP
    weights = record(name)["layers"] * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336)  # of q, k, v, o and w1, w2, w3
    for found in record(name)["variants"]:
        named = shown_as(found["variant"])
        codes = {"f8emu tensorwise, at rest": 1, "f8emu rowwise, at rest": 2}.get(named, 0) * weights
        held = [f"{found[key]:.2f}" for key in ("rest_gib", "peak_active_gib")]
        predicted = f"{codes / record(name)['gpus'] / 2**30:.2f}"
        rows.append([named, f"{found['speed']:.3f}", predicted, *held])
    columns = ["", "speed", "codes, predicted, GiB", "at rest, GiB", "peak, GiB"]
    return f"{table(columns, rows)}\n\n{source(name, _TITAN)}"


def titan_two_step() -> str:
    """Where the milliseconds of a step on two GPUs go."""
    rows = []
    others = [v for v in record(_DELAYED_STEP)["variants"] if v["variant"] == "f8emu/delayed+all-gather"]
    for found in record(_STEP)["variants"] + others:
        if "kernels" not in found:
            continue
        of_kinds, waits = kinds(found["kernels"]), found["exposure"]
        row = [waits["step_us"], *(of_kinds[kind] for kind in _OF_STEP), waits["exposed_us"], waits["idle_us"]]
        rows.append([shown_as(found["variant"]), f"{found['speed']:.3f}", *(f"{us / 1e3:.0f}" for us in row)])
    columns = ["ms", "speed", "step", *_OF_STEP, "collectives alone", "nothing"]
    return f"{table(columns, rows)}\n\n{lines(_STEP, _DELAYED_STEP, packages=_TITAN)}"


def titan_plot() -> str:
    """Medians of four GPUs."""
    runs = record("torchtitan-all-gather-h200x4")["runs"]
    variants = ("f8emu/tensorwise", "f8emu/rowwise", "f8emu/delayed", "torchao/tensorwise")
    series = {
        label: [median(_ratios(runs, kind, f"{variant}+all-gather")[0]) for variant in variants]
        for label, kind in (("selective", "selective"), ("no checkpointing", "none"))
    }
    title = "Tokens per second of Llama-3 8B under torchtitan on four NVIDIA H200, times bfloat16"
    rows = [v.removeprefix("f8emu/").replace("/", " ") for v in variants]
    return inline(bars(rows, series, line=(1.0, "bfloat16")), title)


def titan_bfloat16_gather() -> str:
    """The same model with weights gathered in bfloat16."""
    rows = []
    for found in record("torchtitan-h200x4")["variants"]:
        figures = (times(found["speed"]), f"{found['tokens_per_second_per_gpu']:,.0f}", times(found["memory"]))
        rows.append([shown_as(found["variant"]), *figures])
    columns = ["", "speed", "tokens per second and GPU", "memory"]
    return f"{table(columns, rows)}\n\n{source('torchtitan-h200x4', _TITAN)}"


def titan_step() -> str:
    """Where the milliseconds of a step go."""
    held = record("torchtitan-all-gather-h200x4")["phases_of_a_step"]
    shown = {
        "bfloat16": "bf16",
        "tensorwise": "tensorwise",
        "rowwise": "rowwise_new",
        "tensorwise, no checkpointing": "tensorwise_none",
        "rowwise, no checkpointing": "rowwise_none",
    }
    variants = {v["variant"]: v for v in held["variants"]}
    rows = []
    for label, name in shown.items():
        found, classes = variants[name], {k: ms for k, (ms, _) in variants[name]["classes_ms"].items()}
        phases = [sum(p[k] for p in found["phases"].values()) for k in ("computing", "exposed", "idle")]
        gemms = classes.get("GEMMs float8", 0) + classes["GEMMs bf16"]
        casts = sum(classes.get(k, 0) for k in _CASTS) if name != "bf16" else 0
        row = (found["step_ms_profiled"], *phases, gemms, classes["attention"], casts)
        rows.append([label, *(f"{ms:.0f}" for ms in row)])
    columns = ["ms", "step", "computing", "collectives alone", "idle", "GEMMs", "attention", "casts and amaxes"]
    return f"{table(columns, rows)}\n\n{source('torchtitan-all-gather-h200x4', _TITAN)}"


def titan_losses() -> str:
    """Losses of fifty steps on the same tokens."""
    rows = []
    for name in ("torchtitan-all-gather-h200x4", "torchtitan-all-gather-h200x2"):
        run = next(r for r in record(name)["runs"] if r["steps"] == 50)
        for found in run["variants"]:
            named = shown_as(found["variant"].removesuffix("+all-gather"))
            layers = f"{run['layers']} layers, {run['gpus']} GPUs"
            loss, baseline = found["losses"][-1], run["variants"][0]["losses"][-1]
            rows.append([named, layers, f"{loss:.3f}", f"{loss - baseline:+.3f}" if loss != baseline else "0"])
    sources = lines("torchtitan-all-gather-h200x4", "torchtitan-all-gather-h200x2", packages=_TITAN)
    return f"{table(['', 'model', 'loss after 50 steps', 'less bfloat16'], rows)}\n\n{sources}"


def tensor_parallel() -> str:
    """A Llama of 1 B parameters cut over two GPUs."""
    runs = record("tensor_parallel-h200x2")["runs"]
    tokens = sorted({run["tokens"] for run in runs}, reverse=True)
    rows = []
    for name in ("f8emu/tensorwise", "f8emu/rowwise", "f8emu/delayed", "torchao/tensorwise"):
        row = [name.replace("/", " ")]
        for size in tokens:
            found = next((s for r in runs if r["tokens"] == size and (s := subject(r, name))), {})
            row += [times(found.get("speed")), times(found.get("memory"))]
        rows.append(row)
    columns = ["", *(f"{size:,} tokens: {what}" for size in tokens for what in ("speed", "memory"))]
    return f"{table(columns, rows)}\n\n{source('tensor_parallel-h200x2', ('torch', 'torchao'))}"


def distributed_bits() -> str:
    """Numbers on two ranks that differ from those on one device."""
    cases = record("distributed_bits-h200x2")["cases"]
    rows = []
    for recipe in RECIPES[:4]:
        for mode in ("eager", "compiled"):
            found = [c for c in cases if (c["recipe"], c["mode"]) == (recipe, mode)]
            differing = [pair for c in found for pair in c["differing"].values()]
            totals = [sum(column) for column in zip(*differing, strict=True)]
            rows.append([f"{recipe}, {mode}", str(len(found)), count(totals[1]), count(totals[0])])
    columns = ["", "cases", "numbers compared", "that differ"]
    return f"{table(columns, rows)}\n\n{source('distributed_bits-h200x2', ('torch',))}"


def titan_curves() -> str:
    """Losses over the steps of the longest run in which torchao's layers trained too."""
    name = "torchtitan-all-gather-h200x2"
    runs = [r for r in record(name)["runs"] if any(v["variant"].startswith("torchao") for v in r["variants"])]
    run = max(runs, key=lambda run: run["steps"])
    lines_of = {
        shown_as(v["variant"].removesuffix("+all-gather")): [*enumerate(v["losses"], 1)]
        for v in run["variants"]
        if v["variant"] == "bf16" or v["variant"].endswith("+all-gather")
    }
    title = f"Training loss of {run['layers']} layers on {run['gpus']} GPUs over {run['steps']} steps, one run each"
    return f"{inline(curves(lines_of, unit='loss'), title)}\n\n{source(name, _TITAN)}"


BLOCKS: dict[str, Callable[[], str]] = {
    "jax-feed-forward": jax_feed_forward,
    "jax-plot": jax_plot,
    "jax-machines": jax_machines,
    "jax-training": jax_training,
    "jax-training-mxfp8": jax_training_mxfp8,
    "jax-sharding": jax_sharding,
    "titan-four": titan_four,
    "titan-two": titan_two,
    "titan-at-rest": titan_at_rest,
    "titan-two-step": titan_two_step,
    "titan-plot": titan_plot,
    "titan-bfloat16-gather": titan_bfloat16_gather,
    "titan-step": titan_step,
    "titan-losses": titan_losses,
    "titan-curves": titan_curves,
    "tensor-parallel": tensor_parallel,
    "distributed-bits": distributed_bits,
}
