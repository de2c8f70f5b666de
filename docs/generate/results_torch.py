"""The tables and plots of training in torch, the README's speed table and its plot among them."""

import re
from collections.abc import Callable, Sequence
from statistics import mean

from results_records import (
    NO_FIGURE,
    RECIPES,
    Entry,
    command,
    device,
    inline,
    lines,
    percent,
    record,
    shown_as,
    source,
    span,
    subject,
    table,
    times,
    versions,
    workload,
)

from f8emu.report.charts import bars, curves, dots
from f8emu.report.svg import Svg

_SPEED = "feed-forward-h200"
"""The newest run that has f8emu and torchao side by side."""

_HOST_RUNS = ("543e70a", "2e5731f", "f11b80e")
"""The newest recorded runs of `benchmarks.host`, one a host; their eager layers still replayed launches."""


def _both(run: Entry, recipe: str, key: str, mode: str = "compiled") -> tuple[float | None, float | None]:
    """A figure of f8emu and of torchao, which has no `delayed` and no `blockwise`."""
    ours, theirs = (subject(run, f"{library}/{recipe}", mode).get(key) for library in ("f8emu", "torchao"))
    return ours, theirs


def _speed_table(name: str) -> str:
    """The README's table; `name` is how a recipe is written."""
    run, rows = workload(_SPEED), []
    for recipe in RECIPES:
        (speed, its_speed), (memory, its_memory) = (_both(run, recipe, key) for key in ("speed", "memory"))
        rows.append([name.format(recipe), *map(times, (speed, memory, its_speed, its_memory))])
    return table(["recipe", "speed", "peak memory", "torchao: speed", "torchao: peak memory"], rows)


def readme() -> str:
    """The README's one table, with the line that says where it comes from."""
    packages = re.sub(r"\.0\b", "", versions(_SPEED, ("torch", "torchao")))
    where = f"One {device(_SPEED)}, {packages}, `torch.compile`."
    measured = f"{where} Measure again:\n`{command(_SPEED).split(' --rounds')[0]}`"
    return f"{_speed_table('`{}`')}\n\n{measured}\n\n{_memory()}"


def _memory() -> str:
    """What `recompute_casts` trades, in a model of many layers."""
    name = "huggingface-h200"
    shown = [
        f"{times(found['speed'])} in {found['peak_bytes'] / 2**30:.1f} GiB"
        for found in (subject(record(name), f"f8emu/tensorwise{suffix}") for suffix in ("", "+recompute"))
    ]
    plain = f"{subject(record(name), 'bf16')['peak_bytes'] / 2**30:.1f} GiB"
    return (
        f"A [Hugging Face Llama](docs/results/torch.md#a-hugging-face-model) trains in {plain} in bfloat16. Under\n"
        f"`tensorwise` its speed is {shown[0]}; with\n"
        f"`convert_to_float8_training(..., recompute_casts=True)` it is {shown[1]}.\n"
        "That option does nothing for `blockwise` and experts."
    )


def speed() -> str:
    """The same table on a page of the site, where a name in code type would be broken in two."""
    return f"{_speed_table('{}')}\n\n{source(_SPEED)}"


def speed_plot() -> tuple[Svg, str]:
    """The README's one plot, speeds of the feed-forward block, and its title."""
    run = workload(_SPEED)
    ours, theirs = zip(*(_both(run, recipe, "speed") for recipe in RECIPES), strict=True)
    title = f"Speed of Llama-3 8B's feed-forward block on an {device(_SPEED)}, times bfloat16"
    return bars(RECIPES, {"f8emu": ours, "torchao": theirs}, line=(1.0, "bfloat16")), title


def feed_forward() -> str:
    """The block compiled: an H200 beside torchao and the floor, other runs on H200s, an H100."""
    h200, h100 = workload(_SPEED), workload("feed-forward-h100")
    other = [workload(record("feed-forward-before-and-now-h200")["runs"][-1])]
    other += [workload(record("cast-order-h200")["from_the_end"])]
    rows = []
    for recipe in RECIPES:
        ours, old = subject(h200, f"f8emu/{recipe}"), subject(h100, f"f8emu/{recipe}")
        speeds = span(subject(run, f"f8emu/{recipe}").get("speed") for run in (h200, *other))
        figures = (times(ours["speed"]), percent(ours["fraction_of_floor"]), times(ours["memory"]), times(ours["kept"]))
        rows.append([recipe, *figures, speeds, times(old["speed"])])
    columns = ["recipe", "H200: speed", "of the floor", "peak memory", "kept for backward", "three runs", "H100: speed"]
    files = (_SPEED, "feed-forward-before-and-now-h200", "cast-order-h200", "feed-forward-h100")
    return f"{table(columns, rows)}\n\n{lines(*files)}"


def feed_forward_torchao() -> str:
    """The same run: torchao's recipes."""
    rows = []
    for recipe in RECIPES[:3]:
        for library in ("f8emu", "torchao"):
            found = subject(workload(_SPEED), f"{library}/{recipe}")
            figures = (times(found["speed"]), times(found["memory"]), times(found["kept"]))
            rows.append([f"{library} {recipe}", *figures, f"{found['ms']:.1f}"])
    columns = ["", "speed", "peak memory", "kept for backward", "ms a step"]
    return f"{table(columns, rows)}\n\n{source(_SPEED)}"


def _modes(name: str, workload_name: str, modes: Sequence[str]) -> str:
    """Speeds and peak memory of one workload, f8emu's with torchao's behind them."""
    run = workload(name, workload_name)
    columns = ["recipe"]
    for mode in modes:
        columns += [f"{mode}: speed", "torchao's", "peak memory", "torchao's"]
    rows = []
    for recipe in RECIPES:
        row = [recipe]
        for mode in modes:
            row += map(times, (*_both(run, recipe, "speed", mode), *_both(run, recipe, "memory", mode)))
        rows.append(row)
    return f"{table(columns, rows)}\n\n{source(name)}"


def feed_forward_eager() -> str:
    """The block without the compiler."""
    return _modes("linear-h200", "feed_forward", ["eager"])


def one_layer() -> str:
    """A single linear layer."""
    return _modes("linear-h200", "linear", ["compiled", "eager"])


def recompute_casts() -> str:
    """What `recompute_casts` keeps and costs."""
    without, repeated = workload(_SPEED), workload("feed-forward-recompute-h200")
    rows = []
    for recipe in ("tensorwise", "rowwise"):
        for label, run in (("", without), (", `recompute_casts=True`", repeated)):
            found = subject(run, f"f8emu/{recipe}")
            rows.append([f"{recipe}{label}", *map(times, (found["speed"], found["kept"], found["memory"]))])
    shown = table(["", "speed", "kept for backward", "peak memory"], rows)
    return f"{shown}\n\n{lines(_SPEED, 'feed-forward-recompute-h200')}"


def block() -> str:
    """A transformer block under each kind of activation checkpointing."""
    kinds = ("none", "full", "selective")
    runs = [workload("block-h200", "block", kind) for kind in kinds]
    columns = ["recipe", *(f"{kind}: {what}" for kind in kinds for what in ("speed", "torchao's", "peak memory"))]
    rows = []
    for recipe in RECIPES:
        row = [recipe]
        for run in runs:
            row += map(times, (*_both(run, recipe, "speed"), _both(run, recipe, "memory")[0]))
        rows.append(row)
    return f"{table(columns, rows)}\n\n{source('block-h200')}"


def huggingface() -> str:
    """A Hugging Face model in training."""
    rows = []
    for found in record("huggingface-h200")["subjects"]:
        figures = (times(found["speed"]), f"{found['tokens_per_second']:,.0f}", f"{found['peak_bytes'] / 2**30:.1f}")
        rows.append([shown_as(found["subject"]), *figures])
    shown = table(["", "speed", "tokens per second", "peak memory, GiB"], rows)
    return f"{shown}\n\n{source('huggingface-h200', ('torch', 'torchao', 'transformers'))}"


def host() -> str:
    """Milliseconds of the host that a layer's step adds to bfloat16's."""
    runs = [run for run in record("host-machines-h200")["runs"] if run["recorded_at"] in _HOST_RUNS]
    graph = next(m for m in record("host-h200")["measured"] if m["mode"] == "graph")
    large = record("host-2048-h200")["measured"][0]
    rows = []
    for name in ("f8emu/tensorwise", "f8emu/rowwise", "f8emu/delayed", "torchao/tensorwise"):
        measured = [m for run in runs for m in run["measured"] if m["mode"] == "compiled"]
        added = span(subject(m, name)["host_ms_added_a_layer"] for m in measured)
        speeds = (times(subject(run, name)["speed"]) for run in (graph, large))
        rows.append([name.replace("/", " "), added, *speeds])
    columns = ["", "compiled: ms added", "dim 512, CUDA graph: speed", "dim 2048, compiled: speed"]
    return f"{table(columns, rows)}\n\n{lines('host-machines-h200', 'host-h200', 'host-2048-h200')}"


def sizes_smallest() -> str:
    """The thresholds that `filter_small_layers` takes."""
    held = record("sizes-h200")["smallest"]
    rows = []
    for recipe in RECIPES:
        row = [recipe]
        for timing in ("back to back", "CUDA graph"):
            features, parameters = held[timing][f"f8emu/{recipe}"]
            row += [f"{features:,}", f"{parameters:,}"]
        rows.append(row)
    columns = ["recipe", "eager: features", "parameters", "CUDA graph: features", "parameters"]
    return f"{table(columns, rows)}\n\n{source('sizes-h200')}"


def sizes_grid() -> str:
    """Speeds over sizes of a layer, eager and in a CUDA graph."""
    points = {(p["k"], p["n"]): p for p in record("sizes-h200")["points"]}
    sizes = sorted({k for k, _ in points})

    def cell(k: int, n: int) -> str:
        at = points[k, n]
        found = [
            next(s["speed"] for s in at[timing] if s["subject"] == "f8emu/rowwise")
            for timing in ("back to back", "CUDA graph")
        ]
        return " / ".join(map(times, found))

    rows = [[f"K {k}", *(cell(k, n) for n in sizes)] for k in sizes]
    return f"{table(['rowwise', *(f'N {n}' for n in sizes)], rows)}\n\n{source('sizes-h200')}"


def casts() -> str:
    """The fused casts beside what the compiler makes of the same lines."""
    rows = []
    for cast in record("casts-h200")["casts"]:
        if (cast["dtype"], cast["shape"][1]) == ("bfloat16", 14336):
            shares = (percent(cast["f8emu_of_copy"]), percent(cast["compiler_of_copy"]))
            rows.append([cast["cast"], *shares, times(cast["speed"]), str(cast["differing"])])
    columns = ["cast", "f8emu, of a copy", "compiler, of a copy", "f8emu / compiler", "codes that differ"]
    return f"{table(columns, rows)}\n\n{source('casts-h200')}"


def inspection() -> str:
    """What watching a run costs."""
    runs = record("inspection-h200")["runs"]
    rows = []
    for i, found in enumerate(runs[0]["subjects"]):
        costs = [run["subjects"][i]["overhead"] for run in runs]
        rows.append([found["subject"], *(NO_FIGURE if not i else f"{100 * cost:.1f} %" for cost in costs)])
    return f"{table(['inspection', 'eager', 'compiled'], rows)}\n\n{source('inspection-h200')}"


def microbatches() -> str:
    """Steps that accumulate gradients."""
    rows = []
    for found in record("microbatches-h100")["workloads"][0]["subjects"]:
        bounds = f"{found['ms_min']:.1f} to {found['ms_max']:.1f}"
        named = shown_as(found["subject"].removeprefix("f8emu/"))
        rows.append([named, f"{found['ms']:.1f}", bounds, times(found["speed"]), times(found["memory"])])
    columns = ["", "ms", "turns, ms", "speed", "memory"]
    return f"{table(columns, rows)}\n\n{source('microbatches-h100')}"


def training() -> str:
    """Losses of a small model on held-out text."""
    held = record("train-h200")
    return f"{losses(held['verdicts'])}\n\n{source('train-h200')}"


def training_mxfp8() -> str:
    """A smaller Llama on a CPU under MXFP8."""
    name = "train-mxfp8-cpu"
    return f"{losses(record(name)['verdicts'])}\n\n{source(name)}"


def losses(verdicts: Sequence[Entry]) -> str:
    """The loss of each recipe within the range of the bfloat16 seeds."""
    rows = []
    for verdict in verdicts:
        found = verdict["held_out"]
        least, greatest = found["bf16_least"], found["bf16_greatest"]
        bounds = f"{least:.3f} to {greatest:.3f}"
        rows.append([verdict["name"], f"{found['loss']:.3f}", bounds, "yes" if found["in_range"] else "no"])
    return table(["recipe", "held-out loss, mean of the seeds", "bfloat16 seeds", "within"], rows)


def training_plot() -> str:
    """The same, run by run."""
    runs = record("train-h200")["runs"]
    found = [[r["held_out"] for r in runs if r["name"] == name] for name in ("bf16", *RECIPES)]
    title = "Held-out loss of a small Llama, one dot for each seed; the band is the range of the bfloat16 seeds"
    shown = {"bfloat16": "bf16", **{name: name for name in RECIPES if name != "rowwise_with_gw_hp"}}
    losses_of = {name: [r["losses"] for r in runs if r["name"] == key] for name, key in shown.items()}
    lines_of = {
        name: [(step + 1, mean(of_seeds)) for step, of_seeds in enumerate(zip(*seeds, strict=True)) if step % 3 == 0]
        for name, seeds in losses_of.items()
    }
    curve_title = "Training loss of the same runs over the steps, the mean of three seeds"
    chart = curves(lines_of, unit="loss")
    held_out = inline(dots(("bfloat16", *RECIPES), found, band="bfloat16's range"), title)
    return f"{held_out}\n\n{inline(chart, curve_title)}"


def equal_to_torchao() -> str:
    """Layers compared with torchao's `Float8Linear`, number by number."""
    rows = []
    for layer in record(_SPEED)["equal_to_torchao"]:
        differing = layer["numbers_differing"]
        size = f"{layer['tokens']} x {layer['k']} x {layer['n']}, {layer['parameters']}"
        compared = ", ".join(f"`{name}`" for name in differing)
        rows.append([size, "yes" if layer["bias"] else "no", compared, str(sum(differing.values()))])
    return f"{table(['tokens x K x N', 'bias', 'compared', 'numbers that differ'], rows)}\n\n{source(_SPEED)}"


BLOCKS: dict[str, Callable[[], str]] = {
    "microbatches": microbatches,
    "speed": speed,
    "speed-plot": lambda: inline(*speed_plot()),
    "feed-forward": feed_forward,
    "feed-forward-torchao": feed_forward_torchao,
    "feed-forward-eager": feed_forward_eager,
    "one-layer": one_layer,
    "recompute-casts": recompute_casts,
    "block": block,
    "huggingface": huggingface,
    "host": host,
    "sizes-smallest": sizes_smallest,
    "sizes-grid": sizes_grid,
    "casts": casts,
    "inspection": inspection,
    "training": training,
    "training-mxfp8": training_mxfp8,
    "training-plot": training_plot,
    "equal-to-torchao": equal_to_torchao,
}
