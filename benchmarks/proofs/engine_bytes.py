"""The bytes that vLLM and SGLang hold of a checkpoint, by their own loading code, beside `f8emu checksums`.

    python -m benchmarks.proofs.engine_bytes --vllm FOLDERS --sglang FOLDERS --json FILE
    python -m benchmarks.proofs.engine_bytes --vllm FOLDERS --sglang FOLDERS --device cuda --json FILE

FOLDERS, separated by colons, hold the unpacked wheel and the packages that it imports. A tiny Llama and a tiny
Qwen3-MoE are loaded at tensor-parallel sizes of 1, 2 and 4, on a CPU:

- vLLM: `get_model_loader().load_model` of the whole model, a process for each rank, `process_weights_after_loading` and
  all; `compute_tensor_digests` hashes. Left out are what chooses a kernel, and a kernel's own step after loading.
- SGLang: its classes of parameters, each with its rank, `FusedMoE._load_w13` and `_load_w2`, `convert_to_channelwise`,
  and the weight checker's `Fp8BlockComparable` and `_hash_tensor`, on float8 checkpoints. Its layers need AMX on a CPU.
  Its hash on a GPU runs in Triton's interpreter.

vLLM casts some weights by compiled kernels, for which operators of torch stand in there: STAND_INS. NOT_RUN names what
runs on no CPU.

On GPUs nothing stands in: vLLM loads the same models, at sizes up to the number of GPUs, with the kernels that it
chooses, their casts and their steps after loading; of SGLang its hash runs. Exit status 1 if a digest differs.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import distributions
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import torch
from torch import Tensor

from benchmarks.runner import DEVICE, Bench, Entry, draw_entries, option, say
from f8emu.dialects import DialectName, quantize
from f8emu.dialects.rules import ROW, SQUARE, TENSOR, Block
from f8emu.rollout import expected_checksums
from f8emu.rollout.hashing import SglangGpuHash

HIDDEN, HEADS, KV_HEADS, VOCABULARY, EXPERTS = 512, 4, 2, 1000, 4
RANKS = (1, 2, 4)
_KERNELS = {"DeepGemm": "deepgemm", "Cutlass": "cutlass", "Triton": "triton"}
"""In the names of vLLM's linear kernels -> as `f8emu checksums` names them."""
HASHED = (1, 4, 6, 1000, 4 * 8192, 4 * 8192 + 8, 12 * 8192 + 12)
"""Sizes in bytes that SGLang's hash on a GPU is given: tiles have 8192 words."""
STAND_INS = ("static_scaled_fp8_quant", "dynamic_per_token_scaled_fp8_quant")
NOT_RUN = {
    "vllm": (*STAND_INS, "process_weights_after_loading of kernels", "transform_sf_into_required_layout"),
    "sglang": (
        "LinearBase, FusedMoE and VocabParallelEmbedding as a whole",
        "process_weights_after_loading",
        "scaled_fp8_quant, and with it requantize_with_max_scale and casts of what is loaded",
    ),
}
_ENDED = {"failed": "the process ended"}
_KEPT: list[Any] = []
"""Libraries of operators, which end with their objects."""
_CT: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
}
_FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
}


_INPUTS = {"block": "group", "channel": "token", "tensor": "tensor"}
"""Scales of weights -> of activations, in compressed-tensors' words."""


def _compressed(strategy: str, **more: Any) -> dict[str, Any]:
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    inputs = {**number, "dynamic": True, "strategy": _INPUTS[strategy]}
    inputs |= {"group_size": 128} if strategy == "block" else {}
    weights = {**number, "dynamic": False, "strategy": strategy, **more}
    return {
        **_CT,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
    }


class Case(NamedTuple):
    """A checkpoint, and how an engine is asked to load it."""

    name: str
    dialect: DialectName
    block: Block
    config: dict[str, Any] | None = None
    """The quantization of a float8 checkpoint; None: the engine quantizes."""
    quantization: str | None = None
    """What vLLM is given, where it quantizes."""
    dtype: torch.dtype = torch.bfloat16


CASES = (
    Case("online per block", "vllm_weight_block", SQUARE, quantization="fp8_per_block"),
    Case("online per channel", "vllm_weight_channel", ROW, quantization="fp8_per_channel"),
    Case(
        "online per channel, of float32",
        "vllm_weight_channel",
        ROW,
        quantization="fp8_per_channel",
        dtype=torch.float32,
    ),
    Case("online per tensor", "vllm_weight_tensor", TENSOR, quantization="fp8_per_tensor"),
    Case("blocks, DeepSeek's", "deep_gemm_block", SQUARE, {**_FP8, "weight_block_size": [128, 128]}),
    Case("one scale a tensor", "modelopt_channel", TENSOR, _FP8),
    Case("one scale a tensor, static", "modelopt_channel", TENSOR, {**_FP8, "activation_scheme": "static"}),
    Case("channels, compressed-tensors", "compressed_tensors_channel", ROW, _compressed("channel")),
    Case("one scale, compressed-tensors", "compressed_tensors_tensor", TENSOR, _compressed("tensor")),
    Case(
        "blocks, compressed-tensors",
        "compressed_tensors_block",
        SQUARE,
        _compressed("block", block_structure=[128, 128]),
    ),
)


class Model(NamedTuple):
    """What is loaded."""

    name: str
    moe: bool = False
    intermediate: int = HIDDEN


MODELS = (Model("Llama"), Model("Qwen3-MoE", moe=True))
ODD = Model("Llama, 500 features", intermediate=500)
"""On a GPU beside them: kernels pad it. Engines refuse it in blocks."""

# 1 Checkpoints


def weights(model: Model) -> dict[str, Tensor]:
    """The tensors of a model of one layer, float32; each matrix has another largest magnitude."""
    generator, stem, head = torch.Generator().manual_seed(0), "model.layers.0", HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {name: (VOCABULARY, HIDDEN) for name in ("model.embed_tokens", "lm_head")}
    norms = ["model.norm", f"{stem}.input_layernorm", f"{stem}.post_attention_layernorm"]
    shapes |= {name: (HIDDEN,) for name in norms}
    for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        shapes[f"{stem}.self_attn.{name}_proj"] = (heads * head, HIDDEN)
    shapes[f"{stem}.self_attn.o_proj"] = (HIDDEN, HEADS * head)
    for expert in [f"experts.{i}." for i in range(EXPERTS)] if model.moe else [""]:
        shapes |= {f"{stem}.mlp.{expert}{name}_proj": (model.intermediate, HIDDEN) for name in ("gate", "up")}
        shapes[f"{stem}.mlp.{expert}down_proj"] = (HIDDEN, model.intermediate)
    if model.moe:
        shapes |= {f"{stem}.mlp.gate": (EXPERTS, HIDDEN)}
        shapes |= {f"{stem}.self_attn.{name}_norm": (head,) for name in "qk"}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {f"{name}.weight": x * 2.0 ** (i % 5 - 6) for i, (name, x) in enumerate(drawn.items())}


def write(folder: Path, case: Case, model: Model) -> None:
    """The checkpoint of a case."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, x in weights(model).items():
        tensors[name] = x.to(case.dtype)
        if case.config and "_proj" in name:
            tensors[name], scale = quantize(tensors[name], case.dialect, block=case.block)
            scale = scale.float() if "fp8" in case.config["quant_method"] else scale
            suffix = "_scale_inv" if "weight_block_size" in case.config else "_scale"
            tensors[name + suffix] = scale.reshape(()) if case.block == TENSOR else scale
            if case.config.get("activation_scheme") == "static":
                tensors[name.replace("weight", "input_scale")] = x.abs().max() / 448
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    kind = ("Qwen3MoeForCausalLM", "qwen3_moe") if model.moe else ("LlamaForCausalLM", "llama")
    config = {
        "architectures": [kind[0]],
        "model_type": kind[1],
        "num_attention_heads": HEADS,
        "head_dim": HIDDEN // HEADS,
    }
    config |= {
        "num_key_value_heads": KV_HEADS,
        "hidden_size": HIDDEN,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": 1,
    }
    config |= {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    config |= {
        "tie_word_embeddings": False,
        "torch_dtype": str(case.dtype).removeprefix("torch."),
        "norm_topk_prob": True,
    }
    config |= {
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": HIDDEN,
        "decoder_sparse_step": 1,
    }
    config |= {"quantization_config": case.config} if case.config else {}
    (folder / "config.json").write_text(json.dumps(config))


# 2 vLLM, in a process for each rank


def vllm_rank(folder: Path, rank: int, ranks: int, device: str) -> None:
    """The digests of every case on one rank, as vLLM's own functions give them."""
    from vllm.config import (  # pyright: ignore[reportMissingImports]
        DeviceConfig,
        ModelConfig,
        ParallelConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.distributed import (  # pyright: ignore[reportMissingImports]
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.model_executor.model_loader import get_model_loader  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.model_loader.weight_checksum import (  # pyright: ignore[reportMissingImports]
        compute_tensor_digests,
    )

    if device == "cpu":
        stand_in_for_kernels()
    else:
        torch.cuda.set_device(rank)
    backend = "gloo" if device == "cpu" else "nccl"
    is_first = True
    for case in sorted(folder.glob("*/config.json")):
        place, asked = case.parent, json.loads((case.parent / "asked.json").read_text())
        options = {"skip_tokenizer_init": True, "dtype": "bfloat16", "enforce_eager": True, "max_model_len": 64}
        model = ModelConfig(model=str(place), tokenizer=str(place), quantization=asked, **options)
        parallel = ParallelConfig(tensor_parallel_size=ranks)
        config = VllmConfig(model_config=model, device_config=DeviceConfig(device), parallel_config=parallel)
        with set_current_vllm_config(config):
            if is_first:
                init_distributed_environment(ranks, rank, f"file://{folder}/meet-{ranks}", rank, backend)
                initialize_model_parallel(ranks)
                is_first = False
            try:
                loaded = get_model_loader(config.load_config).load_model(config, model)
                shown: dict[str, Any] = {"digests": compute_tensor_digests(loaded), "kernels": kernels_of(loaded)}
            except Exception as error:  # told as it is: a case that does not run is not equal
                shown = {"failed": f"{type(error).__name__}: {error}"}
        (place / f"vllm-{ranks}-{rank}.json").write_text(json.dumps(shown))


def kernels_of(model: torch.nn.Module) -> list[str]:
    """What vLLM chose for linear layers and for experts; on a CPU a stand-in."""
    names: set[str] = set()
    for module in model.modules():
        for holder in (getattr(module, "quant_method", None), getattr(module, "scheme", None)):
            kernel, backend = (getattr(holder, name, None) for name in ("fp8_linear", "fp8_backend"))
            names |= {type(kernel).__name__} if kernel is not None else set()
            names |= {f"experts: {backend.value}"} if backend is not None else set()
    return sorted(names)


def stand_in_for_kernels() -> None:
    """What a CPU lacks: the choice of kernels, and STAND_INS as operators of torch, by the words of their sources."""
    import vllm.model_executor.layers.fused_moe.oracle.fp8 as backends  # pyright: ignore[reportMissingImports]
    import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8 as ct_moe  # pyright: ignore[reportMissingImports]  # noqa: E501
    import vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w8a8_fp8 as ct  # pyright: ignore[reportMissingImports]
    import vllm.model_executor.layers.quantization.fp8 as offline  # pyright: ignore[reportMissingImports]
    import vllm.model_executor.layers.quantization.online.fp8 as online  # pyright: ignore[reportMissingImports]

    # 1. What chooses kernels; nothing of loading.
    class Kernel:
        process_weights_after_loading = input_quant_key = staticmethod(lambda *_: None)

    for module in (offline, online, ct, ct_moe):
        for name, stand_in in (
            ("init_fp8_linear_kernel", lambda **_: Kernel()),
            ("select_fp8_moe_backend", lambda **_: (backends.Fp8MoeBackend.TRITON, object)),
            ("make_fp8_moe_kernel", lambda **_: None),
        ):
            if hasattr(module, name):
                setattr(module, name, stand_in)
    backends.make_fp8_moe_kernel = lambda **_: None
    torch.accelerator.empty_cache = lambda: None
    # 2. Casts: x * (1/s), and x / s of a row's own scale.
    library = torch.library.Library("_C", "FRAGMENT")
    library.define(f"{STAND_INS[0]}(Tensor! out, Tensor x, Tensor scale, (int, int)? group=None) -> ()")
    library.define(f"{STAND_INS[1]}(Tensor! out, Tensor x, Tensor! scale, Tensor? bound=None) -> ()")

    def static(out: Tensor, x: Tensor, scale: Tensor, group: Any = None) -> None:
        out.copy_((x.float() * (1.0 / scale.float())).clamp(-448, 448).to(out.dtype))

    def by_row(out: Tensor, x: Tensor, scale: Tensor, bound: Any = None) -> None:
        scale.copy_((x.float().abs().amax(-1, keepdim=True) / torch.tensor(448.0)).clamp_min(1 / (448 * 512)))
        out.copy_((x.float() / scale).clamp(-448, 448).to(out.dtype))

    library.impl(STAND_INS[0], static, "CPU")
    library.impl(STAND_INS[1], by_row, "CPU")
    _KEPT.append(library)


# 3 SGLang: its classes and functions, one rank after the other


def sglang_ranks(folder: Path, ranks: int) -> None:
    """The digests of every float8 case on every rank, of what SGLang's own functions make."""
    import_sglang()
    from safetensors.torch import load_file
    from sglang.srt.layers import parameter  # pyright: ignore[reportMissingImports]
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE  # pyright: ignore[reportMissingImports]
    from sglang.srt.layers.quantization.utils import convert_to_channelwise  # pyright: ignore[reportMissingImports]
    from sglang.srt.utils.weight_checker import _hash_tensor  # pyright: ignore[reportMissingImports]
    from sglang.srt.utils.weight_checker_comparator import Fp8BlockComparable  # pyright: ignore[reportMissingImports]

    head = HIDDEN // HEADS
    for case in sorted(folder.glob("*/config.json")):
        quantization: Any = json.loads(case.read_text()).get("quantization_config")
        if quantization is None:
            continue
        tensors, stem = load_file(case.parent / "model.safetensors"), "model.layers.0"
        is_compressed = quantization["quant_method"] == "compressed-tensors"
        block = tensors[f"{stem}.self_attn.o_proj.weight"].shape[0] // next(
            x.shape[0] if x.dim() > 1 else HIDDEN for name, x in tensors.items() if "o_proj.weight_scale" in name
        )
        suffix = next(name.rpartition("weight")[2] for name in tensors if "o_proj.weight_scale" in name)
        for rank in range(ranks):
            digests: dict[str, str] = {}
            # 1. Linear layers. Rows of scales are cut as those of codes, in units of blocks; a scale alone is not.
            for name, parts in (
                (
                    "self_attn.qkv_proj",
                    (("q", HEADS // ranks), ("k", max(1, KV_HEADS // ranks)), ("v", max(1, KV_HEADS // ranks))),
                ),
                ("mlp.gate_up_proj", (("gate", HIDDEN // head // ranks), ("up", HIDDEN // head // ranks))),
                ("self_attn.o_proj", ()),
                ("mlp.down_proj", ()),
            ):
                room, sizes = name.partition(".")[0], [count * head for _, count in parts] or [HIDDEN]
                if f"{stem}.{name.replace('gate_up', 'gate').replace('qkv', 'q')}.weight" not in tensors:
                    continue
                made: list[Tensor] = []
                for what, unit in (("weight", 1), (f"weight{suffix}", block)):
                    sources = [tensors[f"{stem}.{room}.{part}_proj.{what}"] for part, _ in parts]
                    sources = sources or [tensors[f"{stem}.{name}.{what}"]]
                    if sources[0].dim() == 0:
                        made.append(torch.stack([x.float() for x in sources]))
                        continue
                    k = sources[0].shape[1] // (1 if parts or sources[0].shape[1] == 1 else ranks)
                    dtype = sources[0].dtype if what == "weight" else torch.float32
                    data = torch.empty(sum(sizes) // unit, k, dtype=dtype)
                    kind = parameter.ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=None)
                    at = 0
                    for source, size, (part, _) in zip(sources, sizes, parts or [("", 0)], strict=True):
                        where = {"tp_rank": rank, "shard_offset": at // unit, "shard_size": size // unit}
                        if part in ("q", "k", "v"):
                            kind.load_qkv_weight(source, shard_id=part, num_heads=max(1, ranks // KV_HEADS), **where)
                        elif part:
                            kind.load_merged_column_weight(source, **where, use_presharded_weights=False)
                        elif k == source.shape[1]:
                            kind.data.copy_(source)
                        else:
                            kind.load_row_parallel_weight(source, tp_rank=rank)
                        at += size
                    made.append(kind.data)
                codes, scale = made
                name = f"{stem}.{name}"
                if scale.dim() == 1:  # Fp8LinearMethod with Cutlass; compressed-tensors casts again, by STAND_IN
                    if is_compressed:
                        continue
                    scale = convert_to_channelwise(scale, sizes)
                if block == 128 and not is_compressed:
                    digests[f"{name}.weight"] = _hash_tensor(Fp8BlockComparable(codes, scale).dequantize())
                else:
                    digests[f"{name}.weight"] = _hash_tensor(codes if block == 128 else codes.t())
                    digests[f"{name}.weight{suffix}"] = _hash_tensor(scale)
            # 2. Experts, by the loader of FusedMoE, of a layer that has nothing but what it reads.
            layer = SimpleNamespace(
                moe_runner_config=SimpleNamespace(is_gated=True),
                quant_method=None,
                quant_config=None,
                use_padded_loading=True,
                use_presharded_weights=False,
                use_triton_kernels=False,
                moe_tp_rank=rank,
                moe_tp_size=ranks,
            )
            if f"{stem}.mlp.gate.weight" in tensors and block == 128:
                loaded: dict[str, Tensor] = {}
                for what, unit in (("weight", 1), (f"weight{suffix}", 128)):
                    dtype, n = (torch.float8_e4m3fn, HIDDEN) if unit == 1 else (torch.float32, HIDDEN // 128)
                    w13, w2 = (
                        torch.empty(EXPERTS, 2 * n // ranks, n, dtype=dtype),
                        torch.empty(EXPERTS, n, n // ranks, dtype=dtype),
                    )
                    for expert in range(EXPERTS):
                        of = f"{stem}.mlp.experts.{expert}"
                        FusedMoE._load_w13(layer, w13[expert], 0, "w1", tensors[f"{of}.gate_proj.{what}"])
                        FusedMoE._load_w13(layer, w13[expert], 0, "w3", tensors[f"{of}.up_proj.{what}"])
                        FusedMoE._load_w2(layer, w2[expert], 1, "w2", tensors[f"{of}.down_proj.{what}"])
                    loaded |= {f"w13_{what}": w13, f"w2_{what}": w2}
                for name in ("w13", "w2"):
                    codes, scale, key = (
                        loaded[f"{name}_weight"],
                        loaded[f"{name}_weight{suffix}"],
                        f"{stem}.mlp.experts.{name}_weight",
                    )
                    if is_compressed:
                        digests |= {key: _hash_tensor(codes), f"{key}{suffix}": _hash_tensor(scale)}
                    else:
                        digests[key] = _hash_tensor(Fp8BlockComparable(codes, scale).dequantize())
            (case.parent / f"sglang-{ranks}-{rank}.json").write_text(json.dumps({"digests": digests}))


def sglang_gpu_hash(folder: Path, device: str) -> None:
    """Its hash on a GPU, or in Triton's interpreter: its source, there with `is_cpu` in the place of `is_cuda`."""
    (source,) = [
        Path(place, "sglang/kernels/ops/memory/gpu_tensor_hash.py")
        for place in sys.path
        if Path(place, "sglang/kernels/ops/memory/gpu_tensor_hash.py").exists()
    ]
    (folder / "hash_of_sglang.py").write_text(source.read_text().replace(".is_cuda", f".is_{device}"))
    sys.path.insert(0, str(folder))
    hashed = import_module("hash_of_sglang").gpu_tensor_hash
    wrong: list[str] = []
    for size in HASHED:
        data = torch.randint(256, (size,), dtype=torch.uint8)
        ours = SglangGpuHash(size)
        ours.update(data.numpy())
        wrong += [f"{size} bytes"] if f"{hashed(data.to(device)):016x}" != ours.hexdigest() else []
    case = "gpu_tensor_hash" + " in Triton's interpreter" * (device == "cpu")
    kind = {"engine": "sglang", "model": "bytes", "case": case, "ranks": 1}
    entry = kind | {"tensors": len(HASHED), "differ": len(wrong), "left_out": 0, "names": wrong}
    (folder / "hash.json").write_text(json.dumps(entry))


def import_sglang() -> None:
    """Lets SGLang be imported without its kernels: modules of sgl_kernel hold nothing that can run."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):  # torchvision's own, which a torch for CPUs from elsewhere lacks
        library.define(f"{name}(Tensor a, Tensor b, float c) -> Tensor")

    class Nothing(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return MagicMock(name=name)

    class Finder(MetaPathFinder, Loader):
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "sgl_kernel" else None

        def create_module(self, spec: Any) -> ModuleType:
            module = Nothing(spec.name)
            module.__path__ = []
            return module

        def exec_module(self, module: Any) -> None:
            pass

    sys.meta_path.append(Finder())
    _KEPT.append(library)


# 4 The comparison


def run_ranks(engine: str, packages: str, folder: Path, ranks: int, device: str) -> None:
    """A process for each rank, of SGLang one for all; what they write goes to `folder`/log."""
    path = os.pathsep.join((packages, os.environ.get("PYTHONPATH", ""), str(Path.cwd())))
    settings = {
        "PYTHONPATH": path,
        "TRITON_INTERPRET": str(int(engine == "hash" and device == "cpu")),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    } | ({"VLLM_TARGET_DEVICE": "cpu"} if device == "cpu" else {})
    command = [sys.executable, "-m", "benchmarks.proofs.engine_bytes", "--device", device, "--folder", str(folder)]
    command.append("--rank")
    processes: list[subprocess.Popen[bytes]] = []
    with (folder / "log").open("ab") as log:
        for rank in range(ranks if engine == "vllm" else 1):
            words, environment = [*command, f"{engine}:{rank}:{ranks}"], {**os.environ, **settings}
            processes.append(subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT))
        for process in processes:
            process.wait()


def compared(engine: str, folder: Path, case: Case, ranks: int, device: Any) -> Entry:
    """How many tensors of all ranks are equal; of SGLang those that it made, the others are left out."""
    entry: Entry = {"ranks": ranks, "tensors": 0, "differ": 0, "left_out": 0, "names": []}
    # 1. What every rank shows, and the kernel that vLLM chose for linear layers.
    files = [folder / f"{engine}-{ranks}-{rank}.json" for rank in range(ranks)]
    answers: list[Entry] = [json.loads(file.read_text()) if file.exists() else _ENDED for file in files]
    if failed := [answer["failed"] for answer in answers if "failed" in answer]:
        return entry | {"failed": failed[0]}
    kernels = answers[0].get("kernels", [])
    known = [ours for theirs, ours in _KERNELS.items() for kernel in kernels if kernel.startswith(theirs)]
    kernel: Any = known[0] if known else "triton" if engine == "vllm" else "cutlass"
    # 2. Beside ours.
    options: Any = {"engine": engine, "dialect": None if case.config else case.dialect, "tensor_parallel": ranks}
    expected = expected_checksums(folder, kernel=kernel, device=device, **options)
    hidden = tuple(name.removesuffix("weight") for name, _ in expected.not_predicted)
    entry["kernels"] = kernels
    for rank, shown in enumerate(answer["digests"] for answer in answers):
        ours = {tensor.name: tensor.engine_digest for tensor in expected.tensors if tensor.rank == rank}
        every = ours.keys() | shown.keys()
        names = {name for name in (every if engine == "vllm" else shown) if not name.startswith(hidden)}
        wrong = [name for name in names if ours.get(name) != shown.get(name)]
        entry["tensors"] += len(names)
        entry["differ"] += len(wrong)
        entry["left_out"] += len(every - names)
        entry["names"] += sorted(f"tp{rank}:{name}" for name in wrong)
    return entry


BENCH = Bench(
    "benchmarks.proofs.engine_bytes",
    __doc__,
    option("vllm", "", "folders with vLLM and what it imports"),
    option("sglang", "", "folders with SGLang and what it imports"),
    option("only", "", "cases whose names hold this"),
    DEVICE,
    option("rank", "", "for the process of a rank: ENGINE:RANK:RANKS"),
    option("folder", Path, "its checkpoints"),
)


def cases(only: str, device: str) -> Iterator[tuple[str, Model, Case]]:
    """A folder, the model and the case."""
    for number, case in enumerate(CASES):
        odd = (ODD,) if device == "cuda" and case.block != SQUARE else ()
        for at, model in enumerate((*MODELS, *odd)):
            if only in case.name:
                yield f"{number}-{at}", model, case


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv)
    device = run.device.type
    if run.arguments.rank:
        engine, rank, ranks = run.arguments.rank.split(":")
        if engine == "vllm":
            vllm_rank(run.arguments.folder, int(rank), int(ranks), device)
        elif engine == "hash":
            sglang_gpu_hash(run.arguments.folder, device)
        else:
            sglang_ranks(run.arguments.folder, int(ranks))
        return 0
    entries: list[Entry] = []
    packages = {"vllm": run.arguments.vllm, "sglang": run.arguments.sglang}
    with TemporaryDirectory() as work:
        folder = Path(work)
        for name, model, case in cases(run.arguments.only, device):
            write(folder / name, case, model)
            (folder / name / "asked.json").write_text(json.dumps(case.quantization))
        sizes = [ranks for ranks in RANKS if device == "cpu" or ranks <= torch.cuda.device_count()]
        engines = [engine for engine in packages if packages[engine] and (device == "cpu" or engine == "vllm")]
        for engine, ranks in product(engines, sizes):
            run_ranks(engine, packages[engine], folder, ranks, device)
            for name, model, case in cases(run.arguments.only, device):
                if engine == "vllm" or case.config:
                    entry = {"engine": engine, "model": model.name, "case": case.name}
                    entries.append(entry | compared(engine, folder / name, case, ranks, device))
        if packages["sglang"]:
            run_ranks("hash", packages["sglang"], folder, 1, device)
            entries.append(json.loads((folder / "hash.json").read_text()))
        if any("ended" in entry.get("failed", "") for entry in entries):
            say((folder / "log").read_text()[-4000:])
    columns = "model: case: ranks: tensors:, differ:, left_out:,"
    draw_entries("digests of the engines' own code, beside ours", entries, columns, of="engine")
    for entry in entries:
        for name in [*entry["names"][:4], *([entry["failed"]] if "failed" in entry else [])]:
            say(f"{entry['engine']}, {entry['model']}, {entry['case']}, {entry['ranks']} ranks: {name}")
    totals = {key: sum(entry[key] for entry in entries) for key in ("tensors", "differ", "left_out")}
    for engine, folders in packages.items():
        there = distributions(name=engine, path=folders.split(os.pathsep)) if folders else ()
        run.report["versions"][engine] = next((package.version for package in there), None)
    on_cpu: Entry = {"not_run": NOT_RUN, "stand_ins": STAND_INS} if device == "cpu" else {}
    run.record(**totals, entries=entries, **on_cpu)
    return int(any(entry["differ"] or "failed" in entry for entry in entries))


if __name__ == "__main__":
    sys.exit(main())
