"""vLLM itself serves what f8emu trained: every product of its layers beside the trainer's, on a Hopper GPU.

    python -m benchmarks.proofs.served_by_vllm --json FILE

A small Llama is trained for a few steps, exported, and loaded by vLLM in a process of its own, which captures one
prefill. Of every layer that vLLM serves, fused ones as well:

- weights: the values that vLLM multiplies, against those that were exported;
- activations: the codes and scales that vLLM's kernel makes of its input, against the dialect of that kernel;
- products: what f8emu's layers give for vLLM's own input, and what the oracle gives for vLLM's operands.

Inputs of the two captures differ from the first attention on, which is the stacks' own: see `f8emu diff` in --logs.
With a vLLM that hashes its weights (0.32 and later), `f8emu certify` judges weights and captures, there too.

Exit status 1 if a bit of `blockwise_ue8m0` differs: it is the recipe that promises equal ones.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import f8emu.numpy as oracle
import f8emu.torch as f8
from benchmarks.runner import Bench, draw, option, say
from f8emu.capture.read import Arrays, read_capture
from f8emu.capture.record import ForeignRecord
from f8emu.conformance.cases.distributions import codes_of
from f8emu.dialects import DialectName, quantize
from f8emu.dialects.arithmetic import decode
from f8emu.dialects.stacks import FUSED
from f8emu.interop import to_numpy, to_torch
from f8emu.spec import RecipeName
from f8emu.torch.serving.formats import CheckpointFormat

TOKENS = 301
"""Of the prompt: an odd number, as prompts have."""
STEPS, BATCH, VOCABULARY = 5, 128, 1024
PROMISED = "blockwise_ue8m0"
FLOAT32 = np.dtype(np.float32)
PARTS = ("weights", "requantized", "activation codes", "activation scales", "products", "oracle")


class Case(NamedTuple):
    """A recipe, the format in which its weights are served, and what vLLM makes of activations."""

    recipe: RecipeName
    format: CheckpointFormat
    activations: DialectName
    """A dialect."""
    weights: DialectName | Literal[""] = ""
    """The dialect by which vLLM quantizes the weights again; empty: it serves them as they are."""
    has_ue8m0: bool = True

    @property
    def name(self) -> str:
        return f"{self.recipe} {self.format}" + " float scales" * (not self.has_ue8m0)


CASES = (
    Case(PROMISED, "block", "vllm_group_ue8m0", "vllm_weight_block_ue8m0"),
    Case("blockwise", "block", "vllm_group_ue8m0", "vllm_weight_block_ue8m0"),
    Case("blockwise", "block", "vllm_group_quotient", has_ue8m0=False),
    Case("blockwise", "compressed-tensors", "vllm_group_quotient", has_ue8m0=False),
    Case("rowwise", "compressed-tensors", "vllm_token"),
    Case("rowwise", "per-channel", "vllm_token"),
    Case("tensorwise", "compressed-tensors", "vllm_token"),
)


# 1 The trainer


def trained(recipe: RecipeName) -> nn.Module:
    """A Llama after a few steps of AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "vocab_size": VOCABULARY,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=False))
    model = model.bfloat16().cuda()
    f8.convert_to_float8_training(model.model, config=recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (2, BATCH), device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def prompt() -> list[int]:
    """The tokens that both sides see."""
    return np.random.default_rng(1).integers(VOCABULARY, size=TOKENS).tolist()


# 2 The server, in a process of its own


def serve(folder: Path) -> None:
    """Loads `folder`/model in vLLM, and captures one prefill into `folder`/served."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 28}
    options |= {"enforce_eager": True, "enable_prefix_caching": False, "allow_deprecated_quantization": True}
    llm = LLM(model=str(folder / "model"), gpu_memory_utilization=0.1, seed=0, **options)
    with suppress(AttributeError, NotImplementedError):  # before vLLM 0.32
        (checksums,) = llm.collective_rpc("compute_weight_checksums")
        (folder / "checksums.json").write_text(json.dumps({"checksums": checksums}))
    (model,) = llm.apply_model(lambda model: model)
    with f8.capture(model, folder / "served"):
        llm.generate([{"prompt_token_ids": prompt()}], SamplingParams(max_tokens=1, detokenize=False))


def start(folder: Path, case: Case) -> subprocess.Popen[bytes]:
    """That process; what it writes is `folder`/vllm.log."""
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DEEP_GEMM_WARMUP": "skip", "VLLM_NO_USAGE_STATS": "1"}
    settings |= {"HF_HUB_OFFLINE": "1", "VLLM_USE_DEEP_GEMM_E8M0": str(int(case.has_ue8m0))}
    settings |= {"VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    command = [sys.executable, "-m", "benchmarks.proofs.served_by_vllm", "--serve", str(folder)]
    with (folder / "vllm.log").open("wb") as log:
        return subprocess.Popen(command, env={**os.environ, **settings}, stdout=log, stderr=subprocess.STDOUT)


# 3 The comparison


def layers(folder: Path) -> Iterator[tuple[ForeignRecord, Arrays, np.ndarray]]:
    """Of each layer that vLLM served: its record, its operands and its input."""
    (step,) = read_capture(folder / "served")
    inputs = {captured.record.layer: captured for captured in step.records if captured.record.what == "input"}
    for captured in step.records:
        if isinstance(captured.record, ForeignRecord):
            yield captured.record, captured.load(), inputs[captured.record.layer].load()["value"]


def compared(model: nn.Module, folder: Path, case: Case) -> list[dict[str, Any]]:
    """One entry a layer: how many bits of each part differ, None for what vLLM does not show."""
    from safetensors.torch import load_file

    modules, stored = dict(model.named_modules()), load_file(folder / "model" / "model.safetensors")
    entries: list[dict[str, Any]] = []
    for record, arrays, x in layers(folder):
        stem, _, last = record.layer.rpartition(".")
        shards = [f"{stem}.{name}" for name in FUSED.get(last, (last,))]
        entry: dict[str, Any] = {"layer": record.layer, "module": record.module, "outputs": arrays["product"].size}
        # 1. The trainer's layers, given vLLM's input.
        value = to_torch(x).cuda()
        with torch.no_grad():
            ours = torch.cat([modules[shard](value) for shard in shards], dim=1)
        entry["products"] = count(to_numpy(ours), arrays["product"])
        # 2. The operands.
        if "b.scale" in arrays:
            values = np.concatenate([exported(stored, shard) for shard in shards])
            entry["weights"] = count(decode(arrays["b.codes"], arrays["b.scale"], record.block("b"), FLOAT32), values)
            if case.weights:
                again = quantize(values, case.weights)
                entry["requantized"] = count(again.codes, arrays["b.codes"]) + count(again.scale, arrays["b.scale"])
        if "a.scale" in arrays:
            made = quantize(x, case.activations)
            entry["activation codes"] = count(made.codes, arrays["a.codes"])
            entry["activation scales"] = count(made.scale, arrays["a.scale"])
        # 3. The oracle, given vLLM's operands.
        if "a.scale" in arrays and "b.scale" in arrays:
            a, b, sa, sb = (arrays[key] for key in ("a.codes", "b.codes", "a.scale", "b.scale"))
            if sb.size == 1 < sa.size:  # one scale for the weight is one for each of its rows
                sb = np.broadcast_to(sb, (len(b), 1))
            y = oracle.scaled_mm(a, b.T, sa, sb.T, out_dtype="bfloat16", split_k=1)
            entry["oracle"] = count(y, arrays["product"])
        entries.append(entry)
    return entries


def exported(stored: Mapping[str, Tensor], layer: str) -> np.ndarray:
    """The values of an exported weight."""
    codes = stored[f"{layer}.weight"]
    scale = next(stored[name] for name in (f"{layer}.weight_scale_inv", f"{layer}.weight_scale") if name in stored)
    grid = scale.reshape(-1, scale.shape[-1] if scale.dim() > 1 else 1)
    rows, columns = (-(-size // of) for size, of in zip(codes.shape, grid.shape, strict=True))
    return decode(to_numpy(codes), to_numpy(grid), (rows, columns), FLOAT32)


def count(a: np.ndarray, b: np.ndarray) -> int:
    """How many elements have other bits."""
    assert a.shape == b.shape and a.dtype == b.dtype, f"{a.shape} {a.dtype}, {b.shape} {b.dtype}"
    return int(np.count_nonzero(codes_of(a) != codes_of(b)))


def verdicts(folder: Path, case: Case) -> str:
    """What `f8emu diff` prints of the captures of trainer and server, and `f8emu certify` of these and the weights."""
    captures, expected = (str(folder / "trained"), str(folder / "served")), str(folder / "expected.json")
    commands: list[tuple[str, ...]] = [("diff", *captures)]
    if (checksums := folder / "checksums.json").exists():
        kernel = "deepgemm" if case.weights else "cutlass"
        held = (
            "checksums",
            str(folder / "model"),
            "--engine",
            "vllm",
            "--kernel",
            kernel,
            "--json",
            expected,
            "--quiet",
        )
        commands += [held, ("certify", expected, str(checksums), "--captures", *captures)]
    runs = (subprocess.run([sys.executable, "-m", "f8emu", *c], capture_output=True, text=True) for c in commands)
    return "\n".join(f"$ f8emu {' '.join(c)}\n{run.stdout}{run.stderr}" for c, run in zip(commands, runs, strict=True))


# 4 The run

BENCH = Bench(
    "benchmarks.proofs.served_by_vllm",
    __doc__,
    option("serve", "", "for the process of a server: its folder"),
    option("only", "", "cases whose names hold this"),
    option("logs", "", "where to keep what vLLM wrote"),
)


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv, "cuda")
    if run.arguments.serve:
        serve(Path(run.arguments.serve))
        return 0
    from vllm import __version__  # pyright: ignore[reportMissingImports]

    run.announce(f", vLLM {__version__}")
    cases = [case for case in CASES if run.arguments.only in case.name]
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as work:
        # 1. Train all, and let all servers start at once.
        servers: list[tuple[Case, nn.Module, Path, subprocess.Popen[bytes]]] = []
        for i, case in enumerate(cases):
            folder = Path(work) / str(i)
            folder.mkdir()
            model = trained(case.recipe)
            f8.export_float8(model, folder / "model", format=case.format)
            with f8.capture(model, folder / "trained"), torch.no_grad():
                model(input_ids=torch.tensor([prompt()], device="cuda"))
            servers.append((case, model, folder, start(folder, case)))
        # 2. One after the other.
        for case, model, folder, server in servers:
            status, log = server.wait(), (folder / "vllm.log").read_text(errors="replace")
            row: dict[str, Any] = {"case": case.name, "activations": case.activations}
            row["kernels"] = sorted({word for word in log.split() if word.endswith(("LinearKernel", "MMKernel"))})
            if status:
                row["failed"] = log.strip().splitlines()[-1]
            else:
                row["layers"] = compared(model, folder, case)
            if run.arguments.logs:
                log += "" if status else verdicts(folder, case)
                (Path(run.arguments.logs) / f"{case.name.replace(' ', '_')}.log").write_text(log)
            rows.append(row)
    # 3. The table.
    draw(
        "bits that differ, of all layers",
        ("case", "outputs", *PARTS),
        ([row["case"], *(total(row, key) for key in ("outputs", *PARTS))] for row in rows),
    )
    for row in rows:
        say(f"{row['case']}: {', '.join(row['kernels'])} {row.get('failed', '')}")
    run.report["versions"]["vllm"] = __version__
    run.record(cases=rows)
    return int(any("failed" in row for row in rows) or not all(map(is_kept, rows)))


def is_kept(row: Mapping[str, Any]) -> bool:
    """Whether every bit is equal where the recipe promises it."""
    promised = set(PARTS) - {"requantized"}
    return not row["case"].startswith(PROMISED) or all(
        layer.get(part) == 0 for layer in row["layers"] for part in promised
    )


def total(row: Mapping[str, Any], key: str) -> str:
    """A sum over the layers, or what vLLM does not show."""
    counts = [layer[key] for layer in row.get("layers", ()) if key in layer]
    return f"{sum(counts)}" if counts else "not shown"


if __name__ == "__main__":
    sys.exit(main())
