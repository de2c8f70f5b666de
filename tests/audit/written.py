"""Checkpoints as the packages of other stacks and f8emu write them, in the process of tests/dialects/packages.py.

The packages change what others import, so that nothing here is imported before `main`.
"""

# pyright: reportMissingImports=false, reportArgumentType=false

import random
import sys
from pathlib import Path
from typing import Any

import torch

from tests.audit.sound import accused

WRITERS = (
    *(f"compressed_tensors_{name}" for name in ("tensor", "channel", "block", "mxfp8")),
    *("modelopt_tensor", "modelopt_block", "torchao_inference", "transformers_block", "transformers_block_ue8m0"),
    *("torchao_blockwise", "torchao_rowwise"),  # f8emu's own, which scales as torchao does in training
)


def assert_clean(folder: Path) -> None:
    """Nothing is found in what `main` has written, and each dialect is recognized."""
    for name in WRITERS:
        assert accused(folder / name, folder / "source", name) == [], name


def llama(source: Path, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, device_map="cpu", **more)


def compressed_tensors(source: Path, out: Path, scheme: str) -> None:
    """As llm-compressor does without calibration."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    model = llama(source)
    apply_quantization_config(model, QuantizationConfig(config_groups={scheme: ["Linear"]}, ignore=["lm_head"]))
    for module in model.modules():
        if (found := getattr(module, "quantization_scheme", None)) is not None:
            rows, k = module.weight.shape
            down, across = {"FP8": (rows, k), "FP8_DYNAMIC": (1, k), "FP8_BLOCK": (128, 128), "MXFP8": (1, 32)}[scheme]
            blocks = module.weight.data.reshape(rows // down, down, k // across, across)
            scale, _ = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), found.weights)
            module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
            if hasattr(module, "input_scale"):
                module.input_scale.data.fill_(0.01)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)


def modelopt(source: Path, out: Path, config: str) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    model = mtq.quantize(llama(source), getattr(mtq, config), lambda model: model(torch.arange(32)[None]))
    export_hf_checkpoint(model, export_dir=out)


def f8emu(source: Path, out: Path, recipe: str, form: str) -> None:
    from transformers import LlamaForCausalLM

    from f8emu.torch import convert_to_float8_training, export_float8

    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    convert_to_float8_training(model, config=recipe, module_filter_fn=lambda layer, fqn: fqn != "lm_head")
    export_float8(model, out, format=form)


def main(folder: Path, seed: int = 0) -> None:
    """Write `folder`/source, in bfloat16, and one checkpoint for each of WRITERS; blocks of 128 divide all sizes."""
    from torchao.quantization import Float8WeightOnlyConfig
    from transformers import FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM, TorchAoConfig
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    source = folder / "source"
    torch.manual_seed(seed)
    draw = random.Random(seed)
    sizes = {name: draw.choice((256, 384)) for name in ("hidden_size", "intermediate_size")}
    sizes |= {"num_hidden_layers": draw.choice((1, 2)) if seed else 1, "vocab_size": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).to(torch.bfloat16).save_pretrained(source)
    # transformers refuses to quantize without a GPU, and computes the same on a CPU.
    FineGrainedFP8HfQuantizer.validate_environment = lambda self, *args, **kwargs: None
    for name, more in (("block", {}), ("block_ue8m0", {"scale_fmt": "ue8m0"})):
        llama(source, quantization_config=FineGrainedFP8Config(**more)).save_pretrained(folder / f"transformers_{name}")
    ao = TorchAoConfig(quant_type=Float8WeightOnlyConfig())
    llama(source, quantization_config=ao).save_pretrained(folder / "torchao_inference")
    for scheme, name in (("FP8", "tensor"), ("FP8_DYNAMIC", "channel"), ("FP8_BLOCK", "block"), ("MXFP8", "mxfp8")):
        compressed_tensors(source, folder / f"compressed_tensors_{name}", scheme)
    for config, name in (("FP8_DEFAULT_CFG", "tensor"), ("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", "block")):
        modelopt(source, folder / f"modelopt_{name}", config)
    f8emu(source, folder / "torchao_blockwise", "blockwise", "block")
    f8emu(source, folder / "torchao_rowwise", "rowwise", "compressed-tensors")


if __name__ == "__main__":  # FOLDER and how many seeds
    for number in range(int(sys.argv[2])):
        main(Path(sys.argv[1], str(number)), number)
