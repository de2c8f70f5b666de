"""The packages of other stacks quantize the tables: a program, since they change what others import.

    python packages.py OUT.npz BLOCKS FOLDER

writes FOLDER with the checkpoints of tests/audit/written.py, since one process is to import all this, and
`TABLE/DTYPE/DIALECT/BLOCK/codes`, bytes, and `.../scale`, the bytes of the stored scales and their dtype.
"""

# pyright: reportMissingImports=false

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tables import DTYPES, GROUP_ENDS, GROUPED, SWIZZLED, scales_to_swizzle, tables

from tests.audit import written

warnings.simplefilter("ignore")
E4M3 = torch.float8_e4m3fn
Result = tuple[Any, Any]
Case = Callable[[torch.Tensor, tuple[Any, Any]], Result]


def grid(x: torch.Tensor, block: tuple[Any, Any]) -> torch.Tensor:
    """[blocks, rows, blocks, K] of a matrix that the block divides."""
    rows, k = block[0] or x.shape[0], block[1] or x.shape[1]
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // k, k)


def torchao() -> dict[str, Case]:
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.prototype.blockwise_fp8_training import kernels
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.quantization import PerBlock, PerRow, PerTensor
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor

    def training(granularity: Any, axis: int | None, pow2: bool) -> Case:
        def run(x: torch.Tensor, _: Any) -> Result:
            rest = {"scaling_granularity": granularity, "axiswise_dim": axis, "round_scales_to_power_of_2": pow2}
            found = hp_tensor_to_float8_dynamic(x, E4M3, LinearMMConfig(), **rest)
            return found._data, found._scale

        return run

    def blockwise(x: torch.Tensor, block: Any) -> Result:
        if block == (1, 128):
            return kernels.torch_blockwise_scale_act_quant_lhs(x)
        return kernels.torch_blockwise_scale_weight_quant(x)

    def inference(x: torch.Tensor, block: Any) -> Result:
        granularity = {(1, None): PerRow(), (None, None): PerTensor()}.get(block) or PerBlock(list(block))
        tensor = Float8Tensor.from_hp(x, granularity=granularity, kernel_preference=KernelPreference.TORCH)
        return tensor.qdata, tensor.scale

    def mx(mode: Any) -> Case:
        return lambda x, _: to_mx(x, E4M3, 32, mode)[::-1]

    axiswise = ScalingGranularity.AXISWISE
    modes = {f"torchao_mx_{mode.name.lower()}": mx(mode) for mode in ScaleCalculationMode}
    return {
        "torchao_tensorwise": training(ScalingGranularity.TENSORWISE, None, False),
        "torchao_rowwise": training(axiswise, -1, True),
        "torchao_rowwise_float": training(axiswise, -1, False),
        "torchao_blockwise": blockwise,
        "torchao_inference": inference,
        **modes,
    }


def torchao_mx() -> Iterator[tuple[str, np.ndarray]]:
    """What no dialect has: E5M2, and the swizzled layout of cuBLASLt, also of groups along the rows and along K."""
    from torchao.prototype.moe_training.kernels.mxfp8 import quant
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.utils import to_blocked

    for dtype in ("float32", "bfloat16"):
        for table, x in tables(dtype).items():
            for mode in ScaleCalculationMode:
                scale, codes = to_mx(tensor_of(x), torch.float8_e5m2, 32, mode)
                yield f"{table}/{dtype}/torchao_mx_{mode.name.lower()}/e5m2/codes", raw(codes)
                yield f"{table}/{dtype}/torchao_mx_{mode.name.lower()}/e5m2/scale", raw(scale)
    for shape in SWIZZLED:
        yield f"swizzled/{shape}", raw(to_blocked(torch.from_numpy(scales_to_swizzle(shape))))
    scales = torch.from_numpy(scales_to_swizzle(GROUPED))
    yield "swizzled/rows", raw(quant.torch_to_blocked_2d_M_groups(scales, torch.tensor(GROUP_ENDS[0]))[0])
    yield "swizzled/K", raw(quant.torch_to_blocked_2d_K_groups(scales, torch.tensor(GROUP_ENDS[1]))[0])


def compressed_tensors() -> dict[str, Case]:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    def run(strategy: str, **rest: Any) -> Case:
        def quantized(x: torch.Tensor, block: Any) -> Result:
            name = {(1, 128): "group"}.get(block, strategy)
            shape = {"group": {"group_size": 128}, "block": {"block_structure": list(block)}}.get(name, {})
            args = QuantizationArgs(num_bits=8, type="float", strategy=name, **(shape | rest))
            blocks = grid(x, block)
            scale, _ = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
            codes = quantize(x, scale, None, args, dtype=E4M3)
            return codes, scale.to(torch.float8_e8m0fnu) if rest else scale  # its compressor keeps their exponents

        return quantized

    names = {f"compressed_tensors_{name}": run(name) for name in ("tensor", "channel", "block")}
    return names | {"compressed_tensors_mxfp8": run("group", group_size=32, scale_dtype=torch.uint8)}


def transformers() -> dict[str, Case]:
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    def run(scale_fmt: str) -> Case:
        def quantized(x: torch.Tensor, block: Any) -> Result:
            config = SimpleNamespace(weight_block_size=None if block[0] is None else block, scale_fmt=scale_fmt)
            tensor = Fp8Quantize(SimpleNamespace(quantization_config=config))._quantize_one("l.weight", x)
            return tensor["l.weight"], tensor["l.weight_scale_inv"]

        return quantized

    return {"transformers_block": run("float"), "transformers_block_ue8m0": run("ue8m0")}


def modelopt() -> dict[str, Case]:
    from modelopt.torch.export.quant_utils import get_scaling_factor, to_quantized_weight
    from modelopt.torch.quantization.config import QuantizerAttributeConfig
    from modelopt.torch.quantization.nn import TensorQuantizer
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor
    from modelopt.torch.quantization.tensor_quant import fp8_eager

    def scale_of(x: torch.Tensor, block: Any) -> torch.Tensor:
        axis = None if block == (None, None) else 0
        quantizer = TensorQuantizer(QuantizerAttributeConfig(num_bits=(4, 3), axis=axis))
        amax = grid(x, block).abs().amax((1, 3)).float()
        quantizer.amax = amax.reshape(()) if axis is None else amax.reshape(-1, 1)
        return get_scaling_factor(quantizer)

    def tensor(x: torch.Tensor, block: Any) -> Result:
        scale = scale_of(x, block).reshape(())
        return to_quantized_weight(x, scale, "fp8"), scale

    def channel(x: torch.Tensor, block: Any) -> Result:
        scale = scale_of(x, block)
        return to_quantized_weight(x, scale, "fp8" if block[0] is None else "fp8_pc_pt"), scale

    def square(x: torch.Tensor, block: Any) -> Result:
        scale = scale_of(x, block).reshape(x.shape[0] // 128, x.shape[1] // 128)
        return to_quantized_weight(x, scale, "fp8_pb_wo", block_size=128), scale

    def qtensor(x: torch.Tensor, block: Any) -> Result:
        rest: Any = {"axis": {(None, None): None, (1, None): 0}.get(block)}
        if block[1] is not None:
            rest = {"block_sizes": {-1: block[1]} | ({-2: block[0]} if block[0] > 1 else {})}
        tensor, scale = FP8QTensor.quantize(x, **rest)
        return tensor._quantized_data, scale

    def mxfp8(x: torch.Tensor, _: Any) -> Result:
        tensor, scale = MXFP8QTensor.quantize(x)
        return tensor._quantized_data, scale

    def fake(x: torch.Tensor, block: Any) -> Result:
        return fp8_eager(x, grid(x, block).abs().amax((1, 3)).reshape(-1, 1)), torch.zeros(0)

    return {
        "modelopt_tensor": tensor,
        "modelopt_channel": channel,
        "modelopt_block": square,
        "modelopt_qtensor": qtensor,
        "modelopt_mxfp8": mxfp8,
        "modelopt_fake": fake,
    }


def jax_libraries() -> dict[str, Case]:
    import jax
    import jax.numpy as jnp
    from flax.linen import fp8_ops
    from qwix._src.core import qarray

    def flax(x: Any, _: Any) -> Result:
        amax = jnp.max(jnp.abs(x)).astype(jnp.float32)
        scale = fp8_ops.compute_scale(amax, jnp.float32(1.0), jnp.float32(448.0))
        return fp8_ops.quantize(x, jnp.float8_e4m3fn, scale, x.dtype), scale

    def qwix(x: Any, block: Any) -> Result:
        tiles = {axis: size for axis, size in enumerate(block) if size not in (None, 1)}
        rows = (0,) if block[0] == 1 else ()
        qtype = "mxfp8" if block == (1, 32) else jnp.float8_e4m3fn
        array = qarray.quantize_api(x, qtype, channelwise_axes=rows, tiled_axes=tiles)
        return array.qvalue, array.scale

    compiled = {"flax_linen": flax, "qwix": qwix, "qwix_mxfp8": qwix}
    return {name: jax.jit(case, static_argnums=1) for name, case in compiled.items()} | {"qwix_eager_tensor": qwix}


def tensor_of(x: np.ndarray) -> torch.Tensor:
    dtype = getattr(torch, x.dtype.name)
    return torch.from_numpy(x.view(f"i{x.itemsize}")).view(dtype)


def raw(x: Any) -> np.ndarray:
    if isinstance(x, torch.Tensor):
        x = x.detach().contiguous()
        x = x.view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[x.itemsize])
        return x.numpy()
    return np.asarray(x).view(f"u{np.asarray(x).dtype.itemsize}")


def results(blocks_of: dict[str, list[list[Any]]]) -> Iterator[tuple[str, np.ndarray]]:
    import jax.numpy as jnp

    inputs = {(dtype, name): x for dtype in DTYPES for name, x in tables(dtype).items()}
    for package in (torchao, compressed_tensors, transformers, modelopt, jax_libraries):
        array: Any = jnp.asarray if package is jax_libraries else tensor_of
        for dialect, case in package().items():
            for (dtype, table), x in inputs.items():
                if "torchao_mx" in dialect and dtype == "float16":
                    continue  # it refuses them
                for block in map(tuple, blocks_of[dialect]):
                    if package is jax_libraries and dtype != "float32" and list(block) != blocks_of[dialect][0]:
                        continue  # XLA compiles for every dtype and block
                    codes, scale = case(array(x), block)
                    yield f"{table}/{dtype}/{dialect}/{block}/codes", raw(codes)
                    yield f"{table}/{dtype}/{dialect}/{block}/scale", raw(scale)


if __name__ == "__main__":
    found: dict[str, Any] = dict(results(json.loads(sys.argv[2]))) | dict(torchao_mx())
    np.savez(sys.argv[1], **found)
    written.main(Path(sys.argv[3]))
