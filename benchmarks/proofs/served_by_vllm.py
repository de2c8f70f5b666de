"""A rollout of vLLM beside its trainer, on a Hopper GPU, certified by `f8emu certify`.

    python -m benchmarks.proofs.served_by_vllm --json FILE

A small Llama is trained for a few steps and exported. vLLM loads it, shows its checksums, and captures a prefill, two
decoded tokens and a prefill of all of these tokens, by the plugin that f8emu brings. The trainer then makes another
step, `stream_float8` sends its weights, vLLM takes them in place (`reload_weights`), and shows its checksums again.

`f8emu certify` judges both states:

- weights: every tensor that vLLM holds, by its own SHA-256, against the bytes that its export gives;
- the server's inputs: what the trainer's GEMMs give for what entered the GEMMs of vLLM;
- decode: rows of equal operands, in passes of one row and of all.

The verdict of a whole certificate is "different": attention is of another stack than the trainer's. Exit status 1 if a
tensor differs; for `blockwise_ue8m0`, which promises equal GEMMs, if a product differs of equal operands, or if what
parts trainer and server is anything but attention. Not counted is `Case.lost`. vLLM 0.32 or later.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import f8emu.torch as f8
from benchmarks.runner import Bench, draw, option, say
from f8emu import server_plugins
from f8emu.spec import RecipeName
from f8emu.torch.serving.formats import CheckpointFormat

TOKENS = 301
"""Of the prompt: an odd number, as prompts have."""
DECODED = 2
STEPS, BATCH, VOCABULARY, LAYERS = 5, 128, 1024, 2
_LINEAR = 7
"""Linear layers in each, as the trainer has them."""
PROMISED = "blockwise_ue8m0"
STATES = ("loaded", "updated")
ATTENTION = "attention or the KV cache, not a GEMM"


class Case(NamedTuple):
    """A recipe, the format in which its weights are served, and what vLLM multiplies with."""

    recipe: RecipeName
    format: CheckpointFormat
    kernel: str
    """As `f8emu checksums` names it."""
    has_ue8m0: bool = True
    lost: str = ""
    """A tensor of a layer that vLLM 0.33.0 leaves undefined in an update in place."""

    @property
    def name(self) -> str:
        return f"{self.recipe} {self.format}" + " float scales" * (not self.has_ue8m0)


CASES = (
    Case(PROMISED, "block", "deepgemm"),
    Case("blockwise", "block", "deepgemm"),
    Case("blockwise", "block", "triton", has_ue8m0=False),
    Case("blockwise", "compressed-tensors", "triton", has_ue8m0=False),
    Case("rowwise", "compressed-tensors", "cutlass"),
    Case("rowwise", "per-channel", "cutlass", lost="input_scale_ub"),
    Case("tensorwise", "compressed-tensors", "cutlass"),
)


# 1 The trainer


class Trainer:
    """A Llama in training."""

    def __init__(self, recipe: RecipeName) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": LAYERS,
            "vocab_size": VOCABULARY,
        }
        heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=False))
        self.model: nn.Module = model.bfloat16().cuda()
        f8.convert_to_float8_training(model.model, config=recipe)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            tokens = torch.randint(VOCABULARY, (2, BATCH), device="cuda")
            self.model(input_ids=tokens, labels=tokens).loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()

    def keep(self, folder: Path, form: CheckpointFormat) -> None:
        """The export, and a capture of a prefill of all tokens."""
        f8.export_float8(self.model, folder / "model", format=form)
        with f8.capture(self.model, folder / "trainer"), torch.no_grad():
            self.model(input_ids=torch.tensor([tokens()], device="cuda"))


def tokens() -> list[int]:
    """The prompt, and what is decoded: one token again and again, the only one that is allowed."""
    drawn = np.random.default_rng(1).integers(VOCABULARY, size=TOKENS).tolist()
    return [*drawn, *drawn[:1] * DECODED]


# 2 The server, in a process of its own


def serve(folder: Path) -> None:
    """Loads `folder`/loaded/model in vLLM and updates it; checksums and captures of both states go to their folders."""
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    loaded, updated = (folder / state for state in STATES)
    os.environ |= {"F8EMU_CAPTURE": str(loaded / "server"), "F8EMU_CAPTURE_CALLS": "2"}
    server_plugins.vllm()  # the entry point, which only an installed f8emu has
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 28}
    options |= {"enforce_eager": True, "enable_prefix_caching": False, "allow_deprecated_quantization": True}
    llm = LLM(model=str(loaded / "model"), gpu_memory_utilization=0.1, seed=0, **options)
    whole = tokens()

    def generate(prompt: list[int], count: int) -> None:
        sampling = SamplingParams(max_tokens=count, detokenize=False, allowed_token_ids=whole[:1])
        llm.generate([{"prompt_token_ids": prompt}], sampling)

    def save_checksums(state: Path) -> None:
        (state / "checksums.json").write_text(json.dumps(llm.collective_rpc("compute_weight_checksums")))

    save_checksums(loaded)
    generate(whole[:TOKENS], DECODED + 1)
    generate(whole, 1)
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": load_file(folder / "stream.safetensors").items()})
    save_checksums(updated)
    (model,) = llm.apply_model(lambda model: model)
    with f8.capture(model, updated / "server"):
        generate(whole, 1)


def start(folder: Path, case: Case) -> subprocess.Popen[bytes]:
    """That process; what it writes is `folder`/vllm.log."""
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DEEP_GEMM_WARMUP": "skip", "VLLM_NO_USAGE_STATS": "1"}
    settings |= {"HF_HUB_OFFLINE": "1", "VLLM_USE_DEEP_GEMM_E8M0": str(int(case.has_ue8m0))}
    settings |= {"VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    command = [sys.executable, "-m", "benchmarks.proofs.served_by_vllm", "--serve", str(folder)]
    with (folder / "vllm.log").open("wb") as log:
        return subprocess.Popen(command, env={**os.environ, **settings}, stdout=log, stderr=subprocess.STDOUT)


# 3 The certificates


def certified(state: Path, case: Case) -> tuple[dict[str, Any], str]:
    """The certificate that `f8emu certify` writes of a state, and what it prints."""
    command = [sys.executable, "-m", "f8emu", "certify", str(state / "model"), str(state / "checksums.json")]
    command += ["--captures", str(state / "trainer"), str(state / "server"), "--kernel", case.kernel]
    run = subprocess.run([*command, "--json", str(state / "certificate.json")], capture_output=True, text=True)
    text = f"$ f8emu {' '.join(command[3:])}\n{run.stdout}{run.stderr}"
    if not (state / "certificate.json").exists():
        raise RuntimeError(text)
    return json.loads((state / "certificate.json").read_text()), text


def summary(certificate: dict[str, Any]) -> dict[str, Any]:
    """What is recorded of a certificate."""
    (weights,), captures = certificate["weights"], certificate["captures"]
    served, verdicts = captures["served"], [layer["verdict"] for layer in certificate["invariance"]]
    dialects = [set(layer["dialects"]) for layer in served["layers"].values()]
    return {
        "verdict": certificate["verdict"],
        "tensors": weights["compared"],
        "tensors_equal": weights["equal"],
        "tensors_not_predicted": weights["not_predicted"],
        "outputs": served["outputs"],
        "outputs_equal": served["equal"],
        "layers": len(served["layers"]),
        "dialects": sorted(set.intersection(*dialects)) if dialects else [],
        "decode": certificate["decode"],
        "layers_measured": len(verdicts),
        "layers_invariant": sum(verdict.startswith("invariant") for verdict in verdicts),
        "differences": [
            {key: difference[key] for key in ("part", "place", "cause")} for difference in certificate["differences"]
        ],
        "sha256": certificate["sha256"],
    }


def is_kept(case: Case, name: str, state: dict[str, Any]) -> bool:
    """Whether vLLM holds every byte, and where the recipe promises it, multiplies as the trainer does."""
    wrong = [difference for difference in state["differences"] if difference["part"] == "weights"]
    is_lost = bool(case.lost) and name == "updated" and all(x["place"].endswith(case.lost) for x in wrong)
    if not state["tensors"] or state["tensors_not_predicted"] or (wrong and not is_lost):
        return False
    causes = {difference["cause"] for difference in state["differences"]}
    has_products = state["layers"] == _LINEAR * LAYERS and state["outputs"] == state["outputs_equal"]
    return case.recipe != PROMISED or (has_products and all(cause.endswith(ATTENTION) for cause in causes))


# 4 The run

BENCH = Bench(
    "benchmarks.proofs.served_by_vllm",
    __doc__,
    option("serve", "", "for the process of a server: its folder"),
    option("only", "", "cases whose names hold this"),
    option("logs", "", "where to keep what vLLM and f8emu wrote, and the certificates"),
)


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv, "cuda")
    if run.arguments.serve:
        serve(Path(run.arguments.serve))
        return 0
    from safetensors.torch import save_file
    from vllm import __version__  # pyright: ignore[reportMissingImports]

    run.announce(f", vLLM {__version__}")
    rows: list[dict[str, Any]] = []
    wrong = 0
    with TemporaryDirectory() as work:
        # 1. Train all, and let all servers start at once.
        servers: list[tuple[Case, Path, subprocess.Popen[bytes]]] = []
        for i, case in enumerate(case for case in CASES if run.arguments.only in case.name):
            folder, trainer = Path(work) / str(i), Trainer(case.recipe)
            for state, steps in zip(STATES, (STEPS, 1), strict=True):
                trainer.train(steps)
                trainer.keep(folder / state, case.format)
            stream = {name: tensor.clone() for name, tensor in f8.stream_float8(trainer.model, case.format)}
            save_file(stream, folder / "stream.safetensors")
            servers.append((case, folder, start(folder, case)))
        # 2. One after the other.
        for case, folder, server in servers:
            status, log = server.wait(), (folder / "vllm.log").read_text(errors="replace")
            row: dict[str, Any] = {"case": case.name}
            row["kernels"] = sorted({word for word in log.split() if word.endswith(("LinearKernel", "MMKernel"))})
            if status:
                row["failed"] = log.strip().rpartition("\n")[2] or f"status {status}"
            for state in () if status else STATES:
                certificate, text = certified(folder / state, case)
                row[state], log = summary(certificate), log + text
                wrong += not is_kept(case, state, row[state])
            if run.arguments.logs:
                (Path(run.arguments.logs) / f"{case.name.replace(' ', '_')}.log").write_text(log)
            rows.append(row)
    # 3. The table.
    cells = [[row["case"], *(cell for state in STATES for cell in shown(row.get(state)))] for row in rows]
    columns = (f"{state}: {what}" for state in STATES for what in ("tensors", "products"))
    draw("equal, of vLLM's own", ("case", *columns), cells)
    for row in rows:
        say(f"{row['case']}: {', '.join(row['kernels'])} {row.get('failed', '')}")
    run.report["versions"]["vllm"] = __version__
    run.record(cases=rows)
    return int(wrong > 0 or any("failed" in row for row in rows))


def shown(state: dict[str, Any] | None) -> tuple[str, str]:
    if state is None:
        return "failed", "failed"
    return f"{state['tensors_equal']} of {state['tensors']}", f"{state['outputs_equal']} of {state['outputs']}"


if __name__ == "__main__":
    sys.exit(main())
