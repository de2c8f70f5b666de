"""The checksums that an engine must show of a checkpoint: one module at a time, two of them at once."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from f8emu.audit.blocks import weights_of
from f8emu.audit.checkpoint import CONFIG, FLOATS, Checkpoint, read_checkpoint
from f8emu.audit.formats import format_of
from f8emu.conformance.run.result import Progress, Silent
from f8emu.dialects.arithmetic import DTYPES
from f8emu.dialects.names import DialectName
from f8emu.dialects.rules import Dialect
from f8emu.dialects.stacks import dialect_by_name
from f8emu.rollout.checksums import SGLANG, VLLM, Checksums, Source, TensorChecksum
from f8emu.rollout.holding import Holder
from f8emu.rollout.layout import Module, layout_of
from f8emu.rollout.parts import Unpredicted
from f8emu.spec.errors import OperandError, SpecError
from f8emu.strict import faults_as, open_regular

KERNELS = ("cutlass", "triton", "deepgemm", "deepgemm-blackwell", "marlin")
"""What an engine may multiply float8 weights with."""
VERSIONS = {
    VLLM: "loading as in vllm 0.33.0; /weight_checker as in 0.32.0 and 0.33.0",
    SGLANG: "loading as in sglang 0.5.23; /weights_checker and its hash as in 0.5.12 to 0.5.23",
}
_THREADS = 2
_PRODUCTS = (
    "SGLang hashes bfloat16(code * scale) of weights in blocks: one unit in the last place of a scale, or other codes "
    "with the same products, leave the digest as it is; `sha256` is of the bytes"
)
_GPU_HASH = "SGLang's hash on a GPU has 64 bits"
_EXPERTS = "experts are as Triton's kernel takes them, vLLM's first choice on Hopper under tensor parallelism"


def expected_checksums(
    source: str | Path,
    *,
    engine: Literal["vllm", "sglang"],
    dialect: Dialect | DialectName | None = None,
    tensor_parallel: int = 1,
    kernel: Literal["cutlass", "triton", "deepgemm", "deepgemm-blackwell", "marlin"] = "cutlass",
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    device: Literal["cuda", "cpu"] = "cuda",
    progress: Progress | None = None,
) -> Checksums:
    """The hashes of the bytes that an engine must hold after it loaded a checkpoint, of every tensor on every rank.

    `source` is a float8 checkpoint; or one in high precision and the `dialect` that quantizes it. One of the engine's
    own (`vllm_weight_...`, `sglang_weight_...`) quantizes as the engine does: fused matrices in its `dtype`. Any other
    quantizes as a trainer does before it sends or writes them: each matrix in the dtype of the source. Without a
    dialect the engine serves high precision.

    `kernel` is what the engine multiplies with, which may change what it keeps: vLLM's Cutlass pads; SGLang's takes a
    scale a row; DeepGEMM has vLLM requantize blocks to powers of two (with VLLM_USE_DEEP_GEMM_E8M0=0 give triton).
    `dtype` is that of the engine's other tensors, `device` where it runs: SGLang
    has another hash on a GPU, and vLLM another cast of blocks.

    Memory: the codes of two modules, and a few megabytes.

    Exactness: bytes of the engine's own loading code: benchmarks.proofs.engine_bytes, on a CPU and of vLLM on a GPU.
    Whatever follows from no checkpoint is in `not_predicted`.

    Raises:
        CheckpointError: a checkpoint that is missing, cut short, foreign or inconsistent.
        OperandError, SpecError: a dialect for float8, an unknown name.
        UnsupportedError: an architecture that was not read, or sizes that ranks cannot share.
    """
    # 1. What is asked.
    for name, value, known in (
        ("engine", engine, VERSIONS),
        ("kernel", kernel, KERNELS),
        ("device", device, ("cuda", "cpu")),
        ("dtype", dtype, ("bfloat16", "float16", "float32")),
    ):
        if value not in known:
            raise SpecError(f"checksums: {name} must be one of {', '.join(known)}; got {value!r}")
    if tensor_parallel < 1:
        raise SpecError(f"checksums: tensor_parallel must be at least 1; got {tensor_parallel}; it counts ranks")
    checkpoint, known = read_checkpoint(source), None if dialect is None else dialect_by_name(dialect)
    stored = checkpoint.tensors.values()
    weights = {tensor.dtype for tensor in stored if tensor.is_matrix and tensor.name.endswith(".weight")}
    if known is not None and (not weights <= set(FLOATS) or known.scale is None):
        what = f"{known.name} has no rule for scales" if known.scale is None else "the source is float8 already"
        raise OperandError(f"checksums: dialect must quantize a source in high precision; {what}; leave it out")
    form = format_of(checkpoint)
    layout = layout_of(checkpoint, engine, tensor_parallel)
    holder = Holder(
        checkpoint=checkpoint,
        format=form,
        weights={weight.name: weight for weight in weights_of(checkpoint, form)},
        layout=layout,
        engine=engine,
        kernel=kernel,
        dialect=known,
        dtype=DTYPES[dtype],
        device=device,
    )
    # 2. Every module.
    bar = progress or Silent()
    bar.begin("checksums", "modules", len(layout.modules))
    tensors: list[TensorChecksum] = []
    left = list(layout.unknown)

    def hashed(module: Module) -> tuple[Module, list[TensorChecksum], str]:
        try:
            return module, holder.tensors_of(module), ""
        except Unpredicted as error:
            return module, [], str(error)

    pool = ThreadPoolExecutor(_THREADS)
    try:
        for module, made, why in pool.map(hashed, layout.modules):
            tensors += made
            left += [(module.tensor("weight"), why)] if why else []
            bar.advance()
    finally:
        pool.shutdown(cancel_futures=True)
    # 3. The whole.
    has_blocks = any(not tensor.engine_digest for tensor in tensors)
    has_gpu_hash = engine == SGLANG and device == "cuda"
    notes = [(_PRODUCTS, has_blocks), (_GPU_HASH, has_gpu_hash)]
    notes += [(_EXPERTS, kernel == "deepgemm" and any(module.is_expert for module in layout.modules))]
    kinds = {VLLM: "SHA-256 of the bytes", SGLANG: f"16 digits of SGLang's tensor_hash on {device}"}
    return Checksums(
        engine=engine,
        engine_versions=VERSIONS[engine],
        dialect=known.name if known else "",
        kernel=kernel,
        digests=kinds[engine],
        tensor_parallel=tensor_parallel,
        source=Source(
            path=str(source),
            dtype=", ".join(sorted(weights)),
            sha256=_identity(Path(source), checkpoint),
            hashed="config.json, and names, sizes and headers of the shards; no data",
        ),
        tensors=tuple(sorted(tensors, key=lambda tensor: (tensor.rank, tensor.name))),
        not_predicted=tuple(left),
        notes=tuple(note for note, is_so in notes if is_so),
    )


def _identity(source: Path, checkpoint: Checkpoint) -> str:
    files: dict[Path, int] = {}
    for tensor in checkpoint.tensors.values():
        files[tensor.file] = min(files.get(tensor.file, tensor.begin), tensor.begin)
    with faults_as(OperandError, "checksums", source):
        digest = hashlib.sha256((source / CONFIG).read_bytes())
        for file, begin in sorted(files.items()):
            with open_regular(file) as shard:
                digest.update(f"{file.name} {file.stat().st_size} ".encode() + shard.read(begin))
    return digest.hexdigest()
