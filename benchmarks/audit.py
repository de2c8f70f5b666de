"""`f8emu audit` and `f8emu checksums` of checkpoints in shards beside reading their files, in the same run.

    python -m benchmarks.audit --json OUT

One checkpoint has codes in blocks of 128 x 128, the other bfloat16 in as many bytes. All are read from the disk: their
pages leave the cache before. Figures are medians of several rounds, in which all take turns, each after a reading.
Memory is the most that a process of its own held. Exit status 1 if the audit finds a fault, or a checksum is not
predicted.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.emulator import cpu_name
from benchmarks.runner import Bench, Entry, draw_entries, option, turns_of
from f8emu.dialects import quantize
from tests.audit.checkpoints import BF16, checkpoint, fp8, normal

BENCH = Bench(
    "benchmarks.audit",
    __doc__,
    option("device", "cpu", choices=("cpu",)),
    option("mebibytes", 8192, "of weights"),
    option("shards", 4),
    *turns_of(5),
)
_ROWS, _K = 2048, 8192  # 16 MiB of codes a weight
_LLAMA = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 64}
_CODES, _BFLOAT16 = "codes in blocks", "bfloat16"
_SUBJECTS = {
    ("f8emu audit", _CODES): "audit(path)",
    ("f8emu checksums, vLLM", _CODES): "expected_checksums(path, engine='vllm')",
    ("f8emu checksums, SGLang", _CODES): "expected_checksums(path, engine='sglang')",
    ("f8emu checksums, vLLM", _BFLOAT16): "expected_checksums(path, engine='vllm', dialect='vllm_weight_channel')",
    ("f8emu checksums, SGLang", _BFLOAT16): "expected_checksums(path, engine='sglang', dialect='deep_gemm_block')",
}
_PROCESS = """
import re, sys, time
from f8emu.audit import audit
from f8emu.rollout import expected_checksums
path, begin = sys.argv[1], time.perf_counter()
result = CALL
seconds = time.perf_counter() - begin
left = result.verdict.status if hasattr(result, "verdict") else len(result.not_predicted)
peak = 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])  # since exec
print(seconds, peak, int(left))
"""


def write(folder: Path, mebibytes: int, shards: int, source: str) -> Path:
    """A matrix that is drawn once, under as many names as it takes."""
    x, is_float8 = normal(_ROWS, _K).astype(BF16), source == _CODES
    made = quantize(x, "deep_gemm_block") if is_float8 else None
    weight = x if made is None else made.codes
    layers = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(max(1, mebibytes * 2**20 // weight.nbytes))]
    tensors = {name: weight for name in layers}
    tensors |= {} if made is None else {f"{name}_scale_inv": made.scale for name in layers}
    files = {
        f"model-{i + 1:05}-of-{shards:05}.safetensors": [
            name for j, layer in enumerate(layers) for name in tensors if j % shards == i and name.startswith(layer)
        ]
        for i in range(shards)
    }
    checkpoint(folder, tensors, None, files)
    (folder / "config.json").write_text(json.dumps(_LLAMA | ({"quantization_config": fp8()} if is_float8 else {})))
    return folder


def forget(files: Sequence[Path]) -> None:
    """Takes their pages, which are on the disk, out of the cache."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(files: Sequence[Path]) -> float:
    """Seconds to read them, 8 MiB at a time."""
    part, begin = bytearray(1 << 23), time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(part):
                pass
    return time.perf_counter() - begin


def called(call: str, path: Path) -> list[float]:
    """Seconds of a subject in a process of its own, the most bytes that it held, and how much it found or left out."""
    words = [sys.executable, "-c", _PROCESS.replace("CALL", call), str(path)]
    shown = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return [float(number) for number in shown.split()]


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv)
    load, entries = os.getloadavg()[0], list[Entry]()
    for source in (_CODES, _BFLOAT16):
        with tempfile.TemporaryDirectory() as folder:
            path = write(Path(folder), run.arguments.mebibytes, run.arguments.shards, source)
            files, subjects = sorted(path.glob("*.safetensors")), [key for key in _SUBJECTS if key[1] == source]
            os.sync()
            turns: list[list[list[float]]] = [[] for _ in subjects]
            for _ in range(run.arguments.rounds):
                for key, figures in zip(subjects, turns, strict=True):
                    # Each beside a reading just before it: the disk may keep what was read, too.
                    forget(files)
                    baseline = read(files)
                    forget(files)
                    seconds, *more = called(_SUBJECTS[key], path)
                    figures.append([seconds, baseline, seconds / baseline, *more])
            size = sum(file.stat().st_size for file in files)
        for key, figures in zip(subjects, turns, strict=True):
            seconds, baseline, ratio, peak, left = map(median, zip(*figures, strict=True))
            entry: Entry = {"subject": key[0], "source": source, "bytes": size, "seconds": seconds, "ratio": ratio}
            entries.append(entry | {"baseline_seconds": baseline, "peak_bytes": int(peak), "left": int(left)})
    columns = "source: seconds:.2f baseline_seconds:.2f ratio:.2f peak_bytes:GiB"
    draw_entries("beside reading from the disk", entries, columns)
    run.record(cpu=cpu_name(), cores=len(os.sched_getaffinity(0)), load_before=round(load, 1), figures=entries)
    return int(any(entry["left"] for entry in entries))


if __name__ == "__main__":
    sys.exit(main())
