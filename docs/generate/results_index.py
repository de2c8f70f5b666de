"""The list of every recorded file: what it holds, where it was measured, and how to measure it again."""

from results_records import NO_FIGURE, command, commits, device, names, table

HELD = {
    "audit-cpu": "Time and memory of `f8emu audit` and `f8emu checksums`, beside reading the files",
    "block-h200": "Llama-3 8B's transformer block, compiled and eager, under each kind of activation checkpointing",
    "blockwise_split_k-h200": "Block-scaled GEMMs with the S that the kernel's grid shows; "
    "`tests/oracle/test_recorded_blockwise.py` replays them",
    "captures-h200": "Training steps captured on an H200 and computed again on a CPU",
    "cast-order-h200": "The feed-forward block with casts in ascending order, and from the end of the L2 cache",
    "casts-h200": "Every fused cast beside the compiler's, for two widths and two dtypes",
    "clients-cpu": "Libraries that trained converted models: versions, what ran, and what was checked",
    "deepgemm-h100": "The verdict of `f8emu verify` on DeepGEMM's kernels on an H100, with the diagnosis",
    "dialects_on_gpu-h100": "The kernels of other stacks on an H100 beside `f8emu.dialects`: codes and scales",
    "distributed_bits-h200x2": "Every number of layers on two GPUs against one GPU: FSDP2 and tensor parallelism",
    "emulator-cpu": "Time of the emulated GEMM on a CPU of AMD",
    "emulator-cpu-intel": "Time of the emulated GEMM on a CPU of Intel",
    "emulator-h100": "Time of the emulated GEMM on a GPU",
    "engine_bytes-cpu": "Tensors of two tiny models as vLLM's and SGLang's own loading code makes them, beside "
    "`f8emu checksums`",
    "engine_bytes-h200": "The same of vLLM on an H200, with its own kernels and its steps after loading",
    "evidence": "How many recorded outputs change when one rule changes",
    "exhaustive-cast": "Casts of all float32 numbers and scales of all amaxes",
    "exhaustive-e8m0": "E8M0 scales of all bfloat16 amaxes, and NVIDIA's conversion of all float32 ones",
    "experts-h200": "A mixture's experts in the shapes of four models on an H200, with GEMMs alone and the floor",
    "feed-forward-before-and-now-h200": "The feed-forward block at two commits, one after the other on one machine",
    "feed-forward-h100": "Llama-3 8B's feed-forward block on an H100, with the kernels of a step",
    "feed-forward-h200": "Llama-3 8B's feed-forward block on an H200, with the kernels of a step",
    "feed-forward-recompute-h200": "The same with the casts of tensorwise and rowwise repeated in the backward pass",
    "host-2048-h200": "Host and step time of small blocks, dim 2048",
    "host-h200": "Host and step time of small blocks, dim 512: compiled, eager and in CUDA graphs",
    "host-machines-h200": "The same at dim 512 on several hosts",
    "huggingface-h200": "Tokens per second and peak memory of a Hugging Face Llama in training",
    "inspection-h200": "The cost of `f8emu.torch.inspect`",
    "jax_feed_forward-fused-h200": "The feed-forward block in JAX, on two machines, with 10 and 100 steps a turn",
    "jax_feed_forward-h200": "The feed-forward block in JAX, with flax's float8",
    "jax_feed_forward-memory-h200": "The same with different choices of what the backward pass keeps, and two blocks",
    "jax_feed_forward-steps-h200": "The same with 10, 40 and 100 steps a turn, and the kernels of a step",
    "jax_sharding-h200x2": "Sharded layers on two GPUs against the oracle and against one GPU",
    "jax_train-mxfp8-cpu": "50 steps of that model under MXFP8",
    "jax_train-cpu": "200 steps of a small flax model under every recipe, in JAX and in torch",
    "kernels-h200": "The verdict of `f8emu verify` on known kernels, with the diagnosis",
    "layers-h100": "The layers stage of `f8emu verify torch` on an H100",
    "layers-h200": "The layers stage of `f8emu verify torch` on an H200",
    "linear-h200": "One linear layer and the feed-forward block, compiled and eager",
    "matmul-h200": "GEMMs alone, bfloat16 and every kind of scales",
    "microbatches-h100": "The feed-forward block with four microbatches a step, with weights at rest between steps",
    "mma_sim-cpu": "Single instructions of every chip by our rules and by MMA-Sim 2.1.1",
    "moe_train-h200": "A Qwen3-MoE of 16 experts in training on an H200, with the kernels of a step",
    "outliers-cpu": "The error of casts under every recipe, beside outliers of the input",
    "mutants": "300 seeded one-line mutants of the package, and those that the tests catch",
    "programs-h100": "torchao, torchtitan and grouped experts on an H100, and on its CPU under `f8emu.torch.emulate`",
    "instructions-h200": "Single instructions of an H200, recorded and compared",
    "recorded_layers-h200": "SHA-256 digests of layers with few rows; the tests emulate them on a CPU",
    "served_by_vllm-h200": "A small Llama that vLLM serves on an H200, loaded and updated in place, certified",
    "sizes-h200": "One linear layer over a grid of sizes, eager and in CUDA graphs",
    "sound_checkpoints-cpu": "Sound checkpoints of eleven tools under `f8emu audit`",
    "split_k-h200": "The S of 75 shapes, found on a GPU by `f8emu record --plans`",
    "split_k_asked-h100": "The S that cuBLAS's heuristic gives on an H100, beside the H200's plan",
    "split_k_asked-h200": "The S that cuBLAS's heuristic gives on an H200, beside the shipped plan",
    "split_k_rule-h100": "Scores of the fitted plan of an H100 on shapes set aside from the fit",
    "split_k_rule-h200": "Scores of the fitted plan on shapes set aside from the fit",
    "suites-torchao": "torchao's float8 tests on a CPU under the plugin of pytest",
    "suites-torchtitan": "torchtitan's tests of quantization and LoRA, likewise",
    "tensor_parallel-h200x2": "A Llama of 1 B parameters under tensor and sequence parallelism",
    "torchtitan-all-gather-h200x2": "torchtitan, 16 layers of Llama-3 8B on two GPUs, float8 all-gather",
    "torchtitan-all-gather-h200x4": "torchtitan, Llama-3 8B on four GPUs, float8 all-gather, with a step's kernels",
    "torchtitan-h200x4": "torchtitan, Llama-3 8B on four GPUs, bfloat16 all-gather",
    "torchtitan-step-delayed-h200x2": "The same under delayed scaling",
    "torchtitan-step-h200x2": "torchtitan, 16 layers of Llama-3 8B on two GPUs, with a step's kernels",
    "train-mxfp8-cpu": "50 steps of a smaller Llama under MXFP8, emulated, three seeds each",
    "train-h200": "300 steps of a small Llama under every recipe, three seeds each",
    "verify-h100": "`f8emu verify torch` on an H100, all stages",
    "verify-h200": "`f8emu verify torch` on an H200",
    "verify-jax-h200": "`f8emu verify f8emu.jax` and `f8emu verify f8ref.jax` on an H200",
}
"""What each recorded file holds. A test asks for an entry for every file."""


def index() -> str:
    """One row for each recorded file."""
    rows = []
    for name in names():
        again = f"`{command(name)}`" if command(name) else NO_FIGURE
        rows.append([f"[{name}.json](data/{name}.json)", HELD[name], device(name), commits(name) or NO_FIGURE, again])
    return table(["file", "what it holds", "device", "f8emu at", "command"], rows)
