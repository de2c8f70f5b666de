"""The tables of GEMMs alone, of kernels that were checked, and of what is proved."""

from collections.abc import Callable
from math import log2

from results_records import NO_FIGURE, RECIPES, Entry, count, inline, lines, of, record, source, table, times

from f8emu.report.charts import bars, curves
from f8emu.report.svg import Svg

_KINDS = ("tensorwise, fast", "tensorwise", "rowwise, fast", "rowwise")
_KINDS += ("blockwise 1x128 x 128x128", "blockwise 1x128 x 1x128")


def matmul() -> str:
    """GEMMs of Llama-2 70B, times bfloat16's."""
    found = {(g["name"], g["kind"]): g for g in record("matmul-h200")["gemms"]}
    shapes = list(dict.fromkeys(name for name, _ in found))
    sizes = ["{m} x {n} x {k}".format(**found[name, "bf16"]) for name in shapes]
    rows = [[kind, *(times(found[name, kind]["speed"]) for name in shapes)] for kind in _KINDS]
    rows.append(["bfloat16, TFLOP/s", *(f"{found[name, 'bf16']['tflops']:.0f}" for name in shapes)])
    return f"{table(['M x N x K', *sizes], rows)}\n\n{source('matmul-h200', ('torch', 'cuda'))}"


def matmul_plot() -> str:
    """The largest of them."""
    gemms = [g for g in record("matmul-h200")["gemms"] if g["name"] == "ffn.w13"]
    speeds = [next(g["speed"] for g in gemms if g["kind"] == kind) for kind in _KINDS]
    labels = [kind.replace("blockwise ", "").replace(" x ", " by ") for kind in _KINDS]
    title = "Speed of a float8 GEMM of Llama-2 70B's feed-forward layer on an NVIDIA H200, times bfloat16"
    return inline(bars(labels, {"float8": speeds}, line=(1.0, "bfloat16")), title)


_EMULATORS = {
    "emulator-cpu": "AMD EPYC, 2 cores",
    "emulator-cpu-intel": "Intel Xeon, 2 cores",
    "emulator-h100": "H100, by `f8ref.jax`",
}


def emulator() -> str:
    """The emulated GEMM beside a float32 one, and the engine on the narrower vectors of the same CPU."""
    rows = []
    for name, machine in _EMULATORS.items():
        figures = {(f["subject"], f["size"]): f for f in record(name)["figures"] if f["use_fast_accum"]}
        for size in dict.fromkeys(size for _, size in figures):
            called = figures["f8emu.torch", size]
            widths = (figures.get((f"f8emu.native {width}", size)) for width in ("AVX2", "portable"))
            shown = (f"{1e3 * called['seconds']:.3f}", f"{called['giga_multiply_adds_per_second']:.0f}")
            ratios = (NO_FIGURE if figure is None else f"{figure['ratio']:.1f}" for figure in (called, *widths))
            rows.append([f"{machine}, {size}", *shown, *ratios])
    columns = ["M = N = K", "ms", "G multiply-adds/s", "times `torch.mm`", "with AVX2 only", "in plain C"]
    return f"{table(columns, rows)}\n\n{lines(*_EMULATORS, packages=('torch', 'jax'))}"


def audit() -> str:
    """`f8emu audit` and `f8emu checksums` beside reading the same files."""
    rows = []
    for figure in record("audit-cpu")["figures"]:
        times = (f"{figure[key]:.2f}" for key in ("seconds", "baseline_seconds", "ratio"))
        size, peak = f"{figure['bytes'] / 2**30:.0f} GiB, {figure['source']}", f"{figure['peak_bytes'] / 2**20:.0f} MiB"
        rows.append([figure["subject"], size, *times, peak])
    columns = ["command", "checkpoint", "time, s", "reading, s", "ratio", "peak memory"]
    return f"{table(columns, rows)}\n\n{source('audit-cpu', ('numpy',))}"


def sound() -> str:
    """Sound checkpoints under `f8emu audit`."""
    rows = [[e["tool"], str(e["checkpoints"]), str(e["accused"])] for e in record("sound_checkpoints-cpu")["tools"]]
    return f"{table(['written by', 'checkpoints', 'accused'], rows)}\n\n{source('sound_checkpoints-cpu', ('numpy',))}"


def kernels() -> str:
    """Kernels that `f8emu verify` knows by name, on an H200."""
    return _kernels("kernels-h200", ("torch", "jax"))


def deepgemm() -> str:
    """Those of DeepGEMM on an H100."""
    return _kernels("deepgemm-h100", ("sgl-deep-gemm", "torch"))


def _kernels(name: str, packages: tuple[str, ...]) -> str:
    rows = []
    for kernel in sorted(record(name)["kernels"], key=lambda k: k["kernel"].lower()):
        cases, outputs = (
            of(*(sum(stage[f"{what}_{part}"] for stage in kernel["stages"]) for part in ("equal", "total")))
            for what in ("cases", "outputs")
        )
        rows.append([f"`{kernel['kernel']}`", cases, outputs, _explanation(kernel["diagnosis"])])
    shown = table(["kernel", "GEMMs equal", "outputs equal", "what the kernel does instead"], rows)
    return f"{shown}\n\n{source(name, packages)}"


def _explanation(diagnosis: list[Entry]) -> str:
    """The alterations that give every bit of a kernel, and how many kinds of GEMM have none."""
    found = {", ".join(d["explained_by"]) for d in diagnosis if d["explained_by"]}
    failed = sum(bool(d["error"]) for d in diagnosis)
    without = sum(d["explained_by"] is None for d in diagnosis) - failed
    parts = [f"`{e}`" for e in sorted(found, key=len)]
    if without:
        parts.append(f"not explained: {of(without, len(diagnosis))} kinds of GEMM")
    if failed:
        parts.append("the diagnosis did not run: the kernel raised an error on its GEMMs")
    return "; ".join(parts) or NO_FIGURE


def split_k() -> str:
    """How often the plan names the S that cuBLAS takes."""
    fitted = [record(f"split_k_rule-{gpu}")["tables"] for gpu in ("h200", "h100")]
    rows: list[list[str]] = []
    for name, found in record("split_k_asked-h100")["tables"].items():
        label = name.replace("float8_e5m2", "E5M2").replace("float8_e4m3fn", "E4M3").replace("_", " ")
        scores = [scores[name][sample] for scores in fitted for sample in ("log-uniform", "layers")]
        scores.append([found["random"], found["random right"]])
        rows.append([label, *(f"{100 * right / shapes:.1f} %" for shapes, right, *_ in scores)])
    samples = [f"{gpu}, {what}" for gpu in ("H200", "H100") for what in ("random shapes", "shapes of layers")]
    columns = ["GEMM", *samples, "H100 by the H200's plan"]
    names = ("split_k_rule-h200", "split_k_rule-h100", "split_k_asked-h100", "split_k_asked-h200")
    sources = lines(*names, packages=("torch", "scikit-learn"))
    return f"{table(columns, rows)}\n\n{sources}"


def blockwise_split_k() -> str:
    """Block-scaled GEMMs whose S was read off the grid of the kernel."""
    rows = []
    for gemm in record("blockwise_split_k-h200")["gemms"]:
        size = "{m} x {n} x {k}".format(**gemm)
        rows.append([gemm["gemm"].replace("_", " "), size, str(gemm["split_k"]), count(sum(map(len, gemm["outputs"])))])
    shown = table(["GEMM", "M x N x K", "S", "outputs recorded"], rows)
    return f"{shown}\n\n{source('blockwise_split_k-h200', ('torch',))}"


def _stages(name: str, subject: int = 0) -> dict[str, Entry]:
    return {stage["stage"]: stage for stage in record(name)["subjects"][subject]["stages"]}


def _equal(stage: Entry | None, what: str) -> str:
    return NO_FIGURE if stage is None else of(stage[f"{what}_equal"], stage[f"{what}_total"])


def verify_torch() -> str:
    """`f8emu verify torch` on GPUs, and its stage of layers."""
    held = record("layers-h200")
    totals = {"cases_total": held["cases"], "outputs_total": held["outputs"]}
    h200 = _stages("verify-h200") | {"layers": held | totals}
    rows = []
    for stage, found in _stages("verify-h100").items():
        other = h200.get(stage)
        figures = (_equal(found, "cases"), _equal(found, "outputs"), _equal(other, "cases"), _equal(other, "outputs"))
        rows.append([stage, *figures])
    columns = ["stage", "H100: cases equal", "outputs equal", "H200: cases equal", "outputs equal"]
    return f"{table(columns, rows)}\n\n{lines('verify-h100', 'verify-h200', 'layers-h200', packages=('torch',))}"


def layers() -> str:
    """Converted layers with every K that cuBLAS splits."""
    rows = []
    for name in ("layers-h200", "layers-h100"):
        held = record(name)
        equal = (of(held["cases_equal"], held["cases"]), of(held["outputs_equal"], held["outputs"]))
        cut = (str(held["layers_cut"]), str(held["layers_cut_otherwise_than_by_the_plan"]))
        rows.append([held["device"], *equal, str(held["layers"]), *cut])
    columns = ["", "cases equal", "numbers equal", "layers", "with split-K", "with another S than the plan's"]
    return f"{table(columns, rows)}\n\n{lines('layers-h200', 'layers-h100', packages=('torch',))}"


def verify_jax() -> str:
    """`f8emu verify` of both JAX implementations on an H200."""
    held = record("verify-jax-h200")
    rows = [[s, _equal(e, "cases"), _equal(e, "outputs")] for s, e in _stages("verify-jax-h200").items()]
    rows = [["`f8emu.jax` " + stage, *figures] for stage, *figures in rows]
    rows.append(["`f8emu.jax` layers", _equal(held["layers"], "cases"), _equal(held["layers"], "outputs")])
    for entry in held["f8ref.jax"]["subjects"][0]["stages"]:
        if entry["stage"] in ("golden", "gemms"):
            rows.append([f"`f8ref.jax` {entry['stage']}", _equal(entry, "cases"), _equal(entry, "outputs")])
    shown_table = table(["stage", "cases equal", "outputs equal"], rows)
    others = " and ".join(f"`{held[part]['command'].partition(', ')[0]}`" for part in ("layers", "f8ref.jax"))
    more = f"\n\n<small>The rows of layers and of `f8ref.jax` again: {others}.</small>"
    return f"{shown_table}\n\n{source('verify-jax-h200', ('jax',))}{more}"


def exhaustive() -> str:
    """Casts of every float32 number, scales of every amax, and E8M0 scales of every bfloat16 amax."""
    held = record("exhaustive-cast") | {kind: record("exhaustive-e8m0")[kind] for kind in ("e8m0", "cvt")}
    checks, rows = [held[kind] for kind in ("casts", "scales", "e8m0")], []
    for backend in dict.fromkeys(c["backend"] for c in (*held["casts"], *held["e8m0"])):
        of_backend = [[c for c in check if c["backend"] == backend] for check in checks]
        inputs = (f"{len(check)} x {check[0]['inputs']:,}" if check else NO_FIGURE for check in of_backend)
        rows.append([f"`{backend}`", *inputs, str(sum(c["differences"] for check in of_backend for c in check))])
    shown = table(["implementation", "casts", "scales", "E8M0 scales", "differences"], rows)
    apart, inputs = sum(c["differences"] for c in held["cvt"]), f"{len(held['cvt'])} x {held['cvt'][0]['inputs']:,}"
    cvt = (
        f"NVIDIA's `cvt.rp.satfinite.ue8m0` of `amax * fl(1/max)`, as `cuda_fp8.hpp` has it, beside RCEIL: "
        f"{apart} of {inputs} amaxes differ. One amax a format is expected to, just above `max * 2^-127`, where the "
        "product rounds."
    )
    sources = (source(name, ("numpy", "jax", "torch")) for name in ("exhaustive-cast", "exhaustive-e8m0"))
    return "\n\n".join([shown, cvt, *sources])


def recorded_layers() -> str:
    """Layers recorded on a GPU that the tests emulate on a CPU."""
    held = record("recorded_layers-h200")["layers"]
    rows = []
    for recipe in RECIPES:
        found = {key: digests for key, digests in held.items() if key.split()[0] == recipe}
        sizes = [tuple(map(int, key.split()[1].split("x"))) for key in found]
        ms, ks = sorted({m for m, _, _ in sizes}), sorted({k for _, k, _ in sizes})
        sizes_shown = (f"{ms[0]} to {ms[-1]}", f"{ks[0]:,} to {ks[-1]:,}")
        rows.append([recipe, str(len(found)), str(sum(map(len, found.values()))), *sizes_shown])
    columns = ["recipe", "layers", "tensors", "rows", "K"]
    return f"{table(columns, rows)}\n\n{source('recorded_layers-h200', ('torch',))}"


def captures() -> str:
    """Steps captured on a GPU and computed again on a CPU."""
    rows = []
    for found in record("captures-h200")["captures"]:
        stages = found["stages"]
        shown = (of(stages[s]["elements_equal"], stages[s]["elements"]) for s in ("scale", "codes", "product"))
        rows.append([found["capture"].replace("-compiled", ", compiled").replace("-k", " K"), *shown])
    shown_table = table(["capture", "scales equal", "codes equal", "outputs equal"], rows)
    return f"{shown_table}\n\n{source('captures-h200', ('torch',))}"


def dialects() -> str:
    """The kernels of other stacks on a GPU, by the dialect that says what they give."""
    rows, held = [], record("dialects_on_gpu-h100")["cases"]
    ran = [case for case in held if case["verdict"] != "not run"]
    for dialect in dict.fromkeys(case["dialect"] for case in ran):
        found = [case for case in ran if case["dialect"] == dialect]
        counts = [(sum(case[what] for case in found), sum(case[f"{what}_differ"] for case in found)) for what in _BYTES]
        shown = [of(number - apart, number) if number else NO_FIGURE for number, apart in counts]
        far = [max(case[what] for case in found) for what in ("scale_ulps", "code_steps")]
        kernels = len({case["kernel"] for case in found})
        rows.append([f"`{dialect}`", str(kernels), *shown, f"{far[0]}, {far[1]}" if any(far) else NO_FIGURE])
    special = [case["special"] for case in ran if "special" in case]
    apart, number = (sum(sum(case[f"{what}{end}"] for what in _BYTES) for case in special) for end in ("_differ", ""))
    shown_table = table(["dialect", "kernels", "scales equal", "codes equal", "furthest, ulps and codes"], rows)
    said = f"In blocks with NaN or infinity {of(apart, number)} scales and codes differ."
    stacks = ("vllm", "sglang", "compressed-tensors", "transformers", "torchao", "torch", "triton", "cuda")
    return f"{shown_table}\n\n{said}\n\n{source('dialects_on_gpu-h100', stacks)}"


_BYTES = ("scales", "codes")
_STATES = ("loaded", "updated")


def served_by_vllm() -> str:
    """What `f8emu certify` says of vLLM beside its trainer, as loaded and after an update in place."""
    rows, report = [], record("served_by_vllm-h200")
    for case in report["cases"]:
        loaded, updated = case["loaded"], case["updated"]
        kernel = ", ".join(name.removesuffix("Kernel") for name in case["kernels"])
        tensors = [of(state["tensors_equal"], state["tensors"]) for state in (loaded, updated)]
        products = [of(state["outputs_equal"], state["outputs"]) for state in (loaded, updated)]
        decode = of(loaded["decode"]["rows_equal"], loaded["decode"]["rows"])
        rows.append([case["case"], kernel, *tensors, *products, decode])
    what = ("tensors", "products")
    columns = ["recipe and format", "vLLM's kernel", *(f"{name}, {state}" for name in what for state in _STATES)]
    return f"{table([*columns, 'rows decoded'], rows)}\n\n{source('served_by_vllm-h200', ('vllm', 'torch'))}"


def programs() -> str:
    """Programs of other projects on a GPU and on its CPU under `f8emu.torch.emulate`."""
    rows = []
    for program in record("programs-h100")["programs"]:
        kinds = {kind: (differ, elements) for kind, (differ, elements) in program["kinds"].items()}
        after = kinds.pop("weight after AdamW", None)
        differ, elements = (sum(column) for column in zip(*kinds.values(), strict=True))
        where = ", ".join(f"{kind} {count(part)}" for kind, (part, _) in kinds.items() if part) or NO_FIGURE
        rows.append(
            [program["program"], count(elements), count(differ), where, count(after[0]) if after else NO_FIGURE]
        )
    columns = ["program", "outputs and gradients", "differ", "where", "weights that AdamW rounds otherwise"]
    return f"{table(columns, rows)}\n\n{source('programs-h100', ('torch', 'torchao', 'torchtitan'))}"


def suites() -> str:
    """Tests of other projects on a CPU under the plugin of pytest."""
    parts: list[str] = []
    for name in ("suites-torchao", "suites-torchtitan"):
        held = record(name)
        rows = [[f"`{e['file']}`", *(str(e[key]) for key in ("passed", "failed", "skipped"))] for e in held["files"]]
        parts.append(table([f"{held['project']} {held['version']}", "passed", "failed", "skipped"], rows))
        if held["not_passed"]:
            parts.append("\n".join(f"- {e['tests']} {e['outcome']}: `{e['reason']}`" for e in held["not_passed"]))
        parts.append(source(name, ("torch", "torchao")))
    return "\n\n".join(parts)


def mma_sim() -> str:
    """Single instructions by our rules and by MMA-Sim."""
    rows = []
    for entry in record("mma_sim-cpu")["instructions"]:
        kind = (entry["chip"], entry["name"], f"{entry['operands']} to {entry['out']}")
        rows.append([*kind, *(count(entry[key]) for key in ("outputs", "differ", "left_out"))])
    shown = table(["chip", "instruction", "types", "outputs compared", "differ", "left out"], rows)
    return f"{shown}\n\n{source('mma_sim-cpu', ('mmasim', 'numpy', 'torch'))}"


def instructions() -> str:
    """Single instructions of an H200 by the GPU and by our rules."""
    rows = [
        [entry["instruction"].replace(" -> ", " to "), *(count(entry[key]) for key in ("cases", "differ"))]
        for entry in record("instructions-h200")["instructions"]
    ]
    return f"{table(['instruction', 'outputs compared', 'differ'], rows)}\n\n{source('instructions-h200', ('torch',))}"


def engine_bytes() -> str:
    """Digests of engines' own loading code beside ours on a CPU: a row a case, the sizes together."""
    return _engine_bytes("engine_bytes-cpu", [])


def engine_bytes_on_gpu() -> str:
    """The same of vLLM on a GPU, with the kernels that it chose."""
    return _engine_bytes("engine_bytes-h200", ["kernels"])


def _engine_bytes(name: str, more: list[str]) -> str:
    rows: dict[tuple[str, ...], list[int]] = {}
    for entry in record(name)["entries"]:
        shown = [", ".join(entry.get(key, ())).replace("Kernel", "") or NO_FIGURE for key in more]
        counts = rows.setdefault((entry["engine"], entry["case"], entry["model"], *shown), [0, 0, 0])
        for i, key in enumerate(("tensors", "differ", "left_out")):
            counts[i] += entry[key]
    shown = table(
        ["engine", "checkpoint", "model", *more, "tensors compared", "differ", "left out"],
        [[*key, *map(count, counts)] for key, counts in rows.items()],
    )
    return f"{shown}\n\n{source(name, ('vllm', 'sglang', 'torch'))}"


def outliers_plot() -> tuple[Svg, str]:
    """The errors of casts beside outliers, for the page that chooses a recipe, and their title."""
    held = record("outliers-cpu")
    exponents = [log2(outlier) for outlier in held["outliers"]]
    shown = ("tensorwise", "rowwise", "blockwise_ue8m0", "blockwise")
    errors = {name: list(zip(exponents, held["errors"][name], strict=True)) for name in shown}
    title = "Relative error of the other values of an input in which one value in 4096 is 2^x times larger"
    return curves(
        errors, unit="relative error of the other values", x_unit="outliers are 2^x times larger", log=True
    ), title


def outliers() -> str:
    """The same with its record."""
    return f"{inline(*outliers_plot())}\n\n{source('outliers-cpu', ('numpy',))}"


BLOCKS: dict[str, Callable[[], str]] = {
    "outliers": outliers,
    "matmul": matmul,
    "matmul-plot": matmul_plot,
    "emulator": emulator,
    "kernels": kernels,
    "split-k": split_k,
    "blockwise-split-k": blockwise_split_k,
    "verify-torch": verify_torch,
    "layers": layers,
    "verify-jax": verify_jax,
    "exhaustive": exhaustive,
    "recorded-layers": recorded_layers,
    "captures": captures,
    "audit": audit,
    "sound": sound,
    "dialects": dialects,
    "served-by-vllm": served_by_vllm,
    "deepgemm": deepgemm,
    "programs": programs,
    "instructions": instructions,
    "mma-sim": mma_sim,
    "engine-bytes": engine_bytes,
    "engine-bytes-gpu": engine_bytes_on_gpu,
    "suites": suites,
}
