"""The dialects of other stacks, as data. Versions are those in which the source was read or the package compared."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

from f8emu.dialects import rules
from f8emu.dialects.names import DialectName
from f8emu.dialects.rules import COLUMN, GROUP, MX_COLUMN, MX_GROUP, ROW, SQUARE, TENSOR, Dialect, ScaleForm, Stored
from f8emu.spec.errors import SpecError

_TRITON = "On a GPU Triton divides by an approximation."
_HISTORY = "amax is the history's; one of 0, inf or NaN leaves the scale as it was, which is 1 at first."
_NAN_OF_MX = "A block whose byte is 255, for a NaN, is divided by inf."
_XLA = "XLA gives float16 codes as x * (1/s) in float16. Its maximum may drop a NaN."
_CAVEATS = {
    "vllm_token": "A given scale_ub bounds s; here is none.",
    "vllm_group_quotient": "Later versions have vllm_group.",
    "vllm_group_ue8m0": "A float32 matrix has 2^ceil(log2 s), with a log2 that is k for some s just above 2^k.",
    "vllm_group_triton": _TRITON,
    "vllm_weight_block_cuda": f"vLLM compiles it to Triton. {_TRITON}",
    "vllm_weight_block_ue8m0": "Of a block-quantized weight decoded to float32, as the model is loaded.",
    "vllm_fused_shards": "Each shard is decoded to float16 by its own scale. The largest scale is given here.",
    "sglang_group": "Fast math: the division for codes is approximate, and gives codes of 0 for an amax above 2^126. A "
    "float32 or float16 NaN gives +448.",
    "sglang_group_ue8m0": "1/s is infinite in float16 where s is 2^-16 or less. A bfloat16 NaN stays one.",
    "sglang_token": "Fast math on SM90. Zeros have codes 0 from the kernel of large batches, 0x7E from the other.",
    "sglang_weight_tensor": "vLLM's function of this name computes amax and its floor in x's dtype.",
    "sglang_weight_block_ue8m0": "Of a block-quantized weight decoded to bfloat16, as the model is loaded.",
    "deepseek_group": _TRITON,
    "transformer_engine_delayed": _HISTORY,
    "torchao_blockwise": "Compared are the package's references in torch; its kernels are Triton's.",
    "torchao_inference": "On CUDA s is amax * fl(1/448), which is another float32, and another float16 for some s "
    "below 2^-17. With MSLK on SM90, rows follow fbgemm_cuda (1.1.0). hp_value_lb and hp_value_ub bound amax.",
    "torchao_mx_floor": _NAN_OF_MX,
    "torchao_mx_ceil": _NAN_OF_MX,
    "torchao_mx_even": _NAN_OF_MX,
    "torchao_mx_rceil": "A block whose byte is 0 is not multiplied. Later versions multiply amax by fl(1/448).",
    "compressed_tensors_cuda": "The Triton back end, on SM90 and later.",
    "compressed_tensors_mxfp8": "An amax of 1.75 * 2^127 or more gives the byte 255; in float16 one of "
    "1.75 * 2^15 or more, and one below 2^-14, or NaN, the scale 1.",
    "transformers_activation": f"kernels-community finegrained-fp8 46fa552. {_TRITON}",
    "fbgemm_triton": _TRITON,
    "fbgemm_torch": "The floor has x's dtype, in which it is another number; float16 has none, and zeros the scale 1.",
    "fbgemm_cuda": "A given scale_ub bounds amax; here is none.",
    "modelopt_tensor": "For a 0-dimensional scale. With one of shape [1], codes are those of modelopt_channel.",
    "modelopt_fake": "Fake quantization: the package keeps code * s in x's dtype, and no scale.",
    "flax_linen": f"{_HISTORY} So does a subnormal one, which XLA flushes. {_XLA}",
    "qwix": f"An eager array of one scale is divided: qwix_eager_tensor. {_XLA}",
    "qwix_eager_tensor": _XLA,
    "qwix_mxfp8": "XLA's maximum may drop a NaN. An infinite amax gives s = inf. Later versions have another rule.",
}
_COLUMNS = ("source", "scale", "code", "blocks", "stored")
"""What a row says of a dialect after its name."""
_GPU = {"gpu": "H100"}
"""Its kernels gave these bytes there: tests hold it to dialects_on_gpu-h100.json."""


def _of(stack: str, version: str, **standing: Any) -> Callable[..., Dialect]:
    """A function that makes the dialects of a stack from rows of `_COLUMNS`; `standing` is that of most."""

    def make(name: str, *row: Any, **more: Any) -> Dialect:
        fields: Any = dict(zip(_COLUMNS, row, strict=False)) | standing | more
        return Dialect(name=name, stack=stack, version=version, caveat=_CAVEATS.get(name, ""), **fields)

    return make


def _with_cuda(make: Callable[..., Dialect], name: str, source: str, scale: ScaleForm, *rest: Any) -> Iterable[Dialect]:
    """Torch's `tensor / number` on a CPU, and what the same text is on CUDA."""
    on_cuda = replace(scale, division=rules.Division.RECIPROCAL)
    return make(name, source, scale, *rest, gpu=""), make(f"{name}_cuda", source, on_cuda, *rest)


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""A fused Linear of a server -> the layers whose rows it has, one below the other."""

# 1 Rules that stacks share; divisions and code rules in the order of their enums

_D, _R, _T, _T2, _MX = (functools.partial(ScaleForm, division=division) for division in rules.Division)
_UP, _UP_LOG2 = rules.PowerOfTwo.UP, rules.PowerOfTwo.UP_LOG2
_DOWN, _DOWN_LOG2 = rules.PowerOfTwo.DOWN, rules.PowerOfTwo.DOWN_LOG2
_INPUT, _ZERO_IS_ONE = rules.Arithmetic.INPUT, (0.0, 448.0)
_BY_S, _BY_INVERSE, _BY_T = (rules.CodeForm(rule=rule) for rule in rules.CodeRule)
_BY_S_NARROW = replace(_BY_S, arithmetic=_INPUT)
_MIN_SCALE = 1.0 / (448.0 * 512.0)
"""The floor of vLLM's and FBGEMM's scales per token."""
_WEIGHT, _WEIGHT_INV = Stored(names=("weight_scale",)), Stored(names=("weight_scale_inv",))
_ANY, _NARROW = Stored(names=("weight_scale", "input_scale")), Stored(dtype="input")
_BYTE = Stored(dtype="float8_e8m0fnu")

# 2 Serving

_vllm = _of("vLLM", "vllm==0.33.0", **_GPU)
_common, _grouped = "w8a8/fp8/common.cu", "w8a8/fp8/per_token_group_quant.cu"
_utils, _deep_gemm = "fp8_utils.py", "utils/deep_gemm.py: per_block_cast_to_fp8"
_native = "input_quant_fp8.py: QuantFP8.forward_native"
_max, _native_token = _D(ignores_nan=True), _D(scale_floor=_MIN_SCALE)
_token = replace(_max, scale_floor=_MIN_SCALE)
_group = _D(ignores_nan=True, amax_floor=1e-10)
_group_up = replace(_group, scale_floor=1e-10, power_of_two=_UP)
_block, _reciprocal = _D(amax_floor=1e-4), _R(amax_floor=1e-4)
_requant = replace(_reciprocal, power_of_two=_UP_LOG2)
_triton, _triton_up = _R(amax_floor=1e-10), _R(amax_floor=1e-10, power_of_two=_UP_LOG2)
_q1, _q2 = replace(_BY_S, nan=rules.NanCode.MAX), replace(_BY_INVERSE, nan=rules.NanCode.MAX)
_by_s_low, _q2_low = (replace(one, nan=rules.NanCode.MIN) for one in (_BY_S, _BY_INVERSE))
_grid = Stored(layout="row-major, column-major or aligned for TMA")
_packed = replace(_BYTE, layout="int32 of four bytes along K, rows next to each other")
_rounded = replace(_WEIGHT, is_rounded_to_output=True)
_VLLM = (
    _vllm("vllm_static", f"{_common}: static_scaled_fp8_quant", None, _q2, (TENSOR, ROW, GROUP, SQUARE), _ANY),
    _vllm("vllm_tensor", f"{_common}: dynamic_scaled_fp8_quant", _max, _q2, (TENSOR,)),
    _vllm("vllm_token", f"{_common}: dynamic_per_token_scaled_fp8_quant", _token, _q1, (ROW,)),
    _vllm("vllm_group", _grouped, _group, _q2_low, (GROUP,), _grid),
    _of("vLLM", "vllm==0.25.1")("vllm_group_quotient", _grouped, _group, _by_s_low, (GROUP,), _grid),
    _vllm("vllm_group_ue8m0", _grouped, _group_up, _q2_low, (GROUP,), _grid),
    _vllm("vllm_group_ue8m0_packed", _grouped, _group_up, _q2_low, (GROUP,), _packed),
    _vllm("vllm_group_triton", _utils, _triton, _BY_S, (GROUP,), code_steps=1),
    _vllm("vllm_group_triton_ue8m0", _utils, _triton_up, _BY_S, (GROUP,)),
    _vllm("vllm_silu_group", "fused_silu_mul_block_quant.cu", _token, _q1, (GROUP,)),
    _vllm("vllm_layernorm_group", "layernorm_utils.cuh", _token, _q2, (GROUP,)),
    *_with_cuda(_vllm, "vllm_native", _native, _native_token, _BY_INVERSE, (ROW, TENSOR)),
    *_with_cuda(_vllm, "vllm_native_group", _native, _native_token, _BY_S, (GROUP,)),
    _vllm("vllm_weight_tensor", "online/fp8.py", _max, _q2, (TENSOR,), _WEIGHT, gpu=""),
    _vllm("vllm_weight_channel", "online/fp8.py", _token, _q1, (ROW,), _WEIGHT, gpu=""),
    _vllm("vllm_weight_block", _deep_gemm, _block, _BY_INVERSE, (SQUARE,), _WEIGHT_INV, gpu=""),
    _vllm("vllm_weight_block_cuda", _deep_gemm, _reciprocal, _BY_INVERSE, (SQUARE,), _WEIGHT_INV, code_steps=1),
    _vllm("vllm_weight_block_ue8m0", f"{_utils}: requant", _requant, _BY_INVERSE, (SQUARE,), _WEIGHT_INV),
    _vllm("vllm_fused_shards", "w8a8_utils.py: requantize_with_max_scale", None, _q2, (TENSOR,), _rounded, gpu=""),
)

_sglang = _of("SGLang", "sglang==0.5.23", **_GPU)
_fast, _fast_up = replace(_triton, ignores_nan=True), replace(_triton, ignores_nan=True, power_of_two=_UP)
_floor_and_reciprocal, _block_up = _T2(amax_floor=1e-12), replace(_block, power_of_two=_UP, exponents=(1, 254))
_half = replace(_q2, arithmetic=_INPUT)
_bytes_of_sglang = replace(_BYTE, layout="uint8, or int32 of four bytes along K")
_cuh, _weight_ue8m0 = "per_token_group_quant.cuh", "fp8_utils.py: quant_weight_ue8m0"
_SGLANG = (
    _sglang("sglang_group", _cuh, _fast, _BY_T, (GROUP,), code_steps=1),
    _sglang("sglang_group_ue8m0", _cuh, _fast_up, _half, (GROUP,), _bytes_of_sglang),
    _sglang("sglang_token", "per_token_quant_fp8.cuh", _max, _q2, (ROW,), scale_ulps=2, code_steps=1),
    _sglang("sglang_tensor", "per_tensor_quant_fp8.cuh", _max, _q2, (TENSOR,)),
    _sglang("sglang_weight_tensor", "input_to_float8", _floor_and_reciprocal, _BY_T, (TENSOR,), _WEIGHT),
    _sglang("sglang_weight_block_ue8m0", _weight_ue8m0, _block_up, _BY_INVERSE, (SQUARE,), _WEIGHT_INV),
)

_gemm, _v3 = _of("DeepGEMM", "DeepGEMM 54e2261", **_GPU), _of("DeepSeek-V3", "DeepSeek-V3 9b4e978", **_GPU)
_math, _kernel = "deep_gemm/utils/math.py: per_block_cast_to_fp8 and others", "inference/kernel.py: act_quant"
_casts, _block_log2 = (SQUARE, GROUP, COLUMN), replace(_block, power_of_two=_UP_LOG2)
_DEEPSEEK = (
    *_with_cuda(_gemm, "deep_gemm_block", _math, _block, _BY_INVERSE, _casts, _WEIGHT_INV),
    _gemm("deep_gemm_block_ue8m0", _math, _block_up, _BY_INVERSE, _casts, _WEIGHT_INV),
    _v3("deepseek_group", _kernel, _reciprocal, _BY_S, (GROUP,), code_steps=1),
    _v3("deepseek_group_ue8m0", _kernel, _block_log2, _BY_S, (GROUP,)),
)

_fbgemm, _fp8_gemm = _of("FBGEMM", "FBGEMM 71d6f8b", **_GPU), "fp8_gemm.py: quantize_fp8_row, quantize_fp8_block"
_floored, _k_major = _T(amax_floor=1e-12), replace(_WEIGHT, layout="blocks transposed, unless k_major")
_FBGEMM = (
    _fbgemm("fbgemm_triton", _fp8_gemm, _floored, _BY_T, (ROW, SQUARE), _k_major, scale_ulps=4, code_steps=1),
    _fbgemm("fbgemm_torch", _fp8_gemm, _floor_and_reciprocal, _BY_T, (ROW, SQUARE), _WEIGHT),
    _fbgemm("fbgemm_cuda", "quantize.cu: quantize_fp8_per_row", _token, _BY_S, (ROW,), _WEIGHT),
)

# 3 Training

_te = _of("TransformerEngine", "TransformerEngine d0067d0")
_or_448 = _T(small_amax=_ZERO_IS_ONE, nan_amax=448.0, infinite_amax=448.0)
_current, _of_block = (replace(_or_448, largest_multiplier=one) for one in (rules.Arithmetic.FLOAT32, _INPUT))
_current_pow2, _of_block_pow2 = (replace(one, power_of_two=_DOWN) for one in (_current, _of_block))
_mxfp8 = _R(power_of_two=_UP)
_transposed = Stored(layout="1x128: transposed, [K / 128, rows padded to 4]; 128x128: K / 128 padded to 4")
_scaling, _blockwise = "recipe/current_scaling.cu", "transpose/quantize_transpose_{square,vector}_blockwise.cu"
_TRANSFORMER_ENGINE = (
    _te("transformer_engine_delayed", "recipe/delayed_scaling.cu", _current, _BY_T, (TENSOR,)),
    _te("transformer_engine_current", _scaling, _current, _BY_T, (TENSOR,)),
    _te("transformer_engine_current_pow2", _scaling, _current_pow2, _BY_T, (TENSOR,)),
    _te("transformer_engine_block", _blockwise, _of_block_pow2, _BY_T, (GROUP, SQUARE), _transposed),
    _te("transformer_engine_block_float", _blockwise, _of_block, _BY_T, (GROUP, SQUARE), _transposed),
    _te("transformer_engine_mxfp8", "cast/mxfp8", _mxfp8, _BY_INVERSE, (MX_GROUP, MX_COLUMN), _BYTE),
)

_ao = _of("torchao", "torchao==0.18.0", is_compared=True, **_GPU)
_training = _T(arithmetic=rules.Arithmetic.FLOAT64, amax_floor=1e-12)
_down = replace(_training, power_of_two=_DOWN_LOG2)
_t = Stored(is_multiplier=True, layout="1/t goes to torch._scaled_mm")
_float8, _mx = "float8/float8_utils.py: tensor_to_scale", "prototype/mx_formats/mx_tensor.py: to_mx"
_kernels, _hp = "prototype/blockwise_fp8_training/kernels.py", "Float8Tensor.from_hp, quant_primitives.py"
_bounded, _narrow, _log2 = replace(_BY_S, scale_floor=2.0**-126), _D(arithmetic=_INPUT), _D(power_of_two=_UP_LOG2)
_TORCHAO = (
    _ao("torchao_tensorwise", _float8, _training, _BY_T, (TENSOR,), _t),
    _ao("torchao_rowwise", _float8, _down, _BY_T, (ROW,), _t),
    _ao("torchao_rowwise_float", _float8, _training, _BY_T, (ROW,), _t),
    _ao("torchao_blockwise", _kernels, _training, _BY_T, (GROUP, SQUARE, COLUMN)),
    _ao("torchao_inference", _hp, _narrow, _BY_S, (ROW, TENSOR, SQUARE, GROUP)),
    _ao("torchao_mx_floor", _mx, _MX(), _bounded, (MX_GROUP,), _BYTE),
    _ao("torchao_mx_ceil", _mx, _MX(carry=0x7FFFFF), _bounded, (MX_GROUP,), _BYTE),
    _ao("torchao_mx_even", _mx, _MX(carry=1 << 19), _bounded, (MX_GROUP,), _BYTE),
    _ao("torchao_mx_rceil", _mx, _log2, _BY_INVERSE, (MX_GROUP,), _BYTE),
)

_flax, _ops = _of("flax", "flax==0.12.8", is_compared=True), "linen/fp8_ops.py: compute_scale, quantize"
_qwix, _qarray = _of("qwix", "qwix==0.1.8", is_compared=True), "_src/core/qarray.py: quantize"
_eager = replace(_narrow, small_scale=(rules.Limit.ROOT_OF_TINY, 1.0))
_compiled = replace(_eager, division=rules.Division.RECIPROCAL)
_compiled_ln = replace(_compiled, power_of_two=rules.PowerOfTwo.UP_LN)
_by_rounded_s = replace(_BY_S_NARROW, is_scale_rounded=True)
_kernel_scale = Stored(names=("kernel_scale", "input_scale"))
_JAX = (
    _flax("flax_linen", _ops, _or_448, _by_rounded_s, (TENSOR,), _kernel_scale),
    _qwix("qwix", _qarray, _compiled, _BY_S_NARROW, (ROW, TENSOR, GROUP, SQUARE), _NARROW),
    _qwix("qwix_eager_tensor", _qarray, _eager, _BY_S_NARROW, (TENSOR,), _NARROW),
    _qwix("qwix_mxfp8", _qarray, _compiled_ln, _BY_S_NARROW, (MX_GROUP,), _NARROW),
)

# 4 Checkpoints

_ct, _ct_gpu = (_of("compressed-tensors", "compressed-tensors==0.20.0", **one) for one in ({"is_compared": True}, _GPU))
_qparams, _every = "helpers.py: calculate_qparams, forward_helpers.py: _quantize", (ROW, TENSOR, SQUARE, GROUP)
_epsilon, _from_1_75 = replace(_narrow, small_scale=(0.0, rules.Limit.EPSILON)), _MX(carry=1 << 21, nan_amax=0.0)
_narrow_weight, _byte_weight = (replace(one, names=("weight_scale",)) for one in (_NARROW, _BYTE))
_COMPRESSED_TENSORS = (
    _ct("compressed_tensors_tensor", _qparams, _epsilon, _BY_S_NARROW, (TENSOR,), _narrow_weight),
    _ct("compressed_tensors_channel", _qparams, _epsilon, _BY_S_NARROW, (ROW,), _narrow_weight),
    _ct("compressed_tensors_block", _qparams, _epsilon, _BY_S_NARROW, (SQUARE, GROUP), _narrow_weight),
    _ct_gpu("compressed_tensors_cuda", "_quantize_triton", _epsilon, _BY_S, _every, _narrow_weight),
    _ct("compressed_tensors_mxfp8", "mxfp_utils.py", _from_1_75, _BY_S_NARROW, (MX_GROUP,), _byte_weight),
)

_hf = _of("transformers", "transformers==5.23.0", is_compared=True, **_GPU)
_fp8_quantize, _act_quant = "finegrained_fp8.py: Fp8Quantize", "act_quant.py: fp8_act_quant"
_safe = _T2(small_amax=_ZERO_IS_ONE, nan_amax=448.0)
_safe_log2 = replace(_safe, scale_floor=2.0**-126, power_of_two=_UP_LOG2, exponents=(0, 255))
_by_least, _byte_inv = replace(_BY_S, scale_floor=1e-12), replace(_BYTE, names=("weight_scale_inv",))
_TRANSFORMERS = (
    _hf("transformers_block", _fp8_quantize, _safe, _BY_T, (SQUARE, TENSOR), _WEIGHT_INV),
    _hf("transformers_block_ue8m0", _fp8_quantize, _safe_log2, _BY_T, (SQUARE, TENSOR), _byte_inv),
    _hf("transformers_activation", _act_quant, _R(), _by_least, (GROUP,), code_steps=1, is_compared=False),
)

_mo = _of("Model-Optimizer", "nvidia-modelopt==0.47.0", is_compared=True)
_export, _qtensor = "export/quant_utils.py: to_quantized_weight", "fp8_tensor.py: FP8QTensor.quantize"
_positive = _D(small_amax=_ZERO_IS_ONE, nan_amax=448.0, infinite_amax=(2 - 2.0**-23) * 2.0**127, amax_floor=2.0**-126)
_nan_is_zero, _fake = replace(_log2, nan_amax=0.0), _T2(small_amax=(2.0**-24, 1.0))
_four_dimensions = replace(_WEIGHT, layout="[rows, 1, K, 1] of blocks")
_MODELOPT = (
    _mo("modelopt_tensor", _export, _positive, _BY_S_NARROW, (TENSOR,), _ANY),
    _mo("modelopt_channel", _export, _positive, _BY_S, (ROW, TENSOR), _WEIGHT),
    _mo("modelopt_block", _export, _positive, _BY_S, (SQUARE,), _four_dimensions),
    _mo("modelopt_qtensor", _qtensor, _narrow, _BY_S_NARROW, (TENSOR, ROW, SQUARE, GROUP), _NARROW),
    _mo("modelopt_mxfp8", "mxfp8_tensor.py", _nan_is_zero, _BY_INVERSE, (MX_GROUP,), _byte_weight),
    _mo("modelopt_fake", "tensor_quant.py: fp8_eager", _fake, _BY_T, (TENSOR, ROW)),
)

_AUTOFP8 = _of("AutoFP8", "AutoFP8 084feb8")(
    *("autofp8_tensor", "auto_fp8/quantize.py: per_tensor_quantize"),
    *(_T2(arithmetic=_INPUT, amax_floor=1e-12), replace(_BY_T, arithmetic=_INPUT), (TENSOR,), _WEIGHT),
)

_SERVING = (*_VLLM, *_SGLANG, *_DEEPSEEK, *_FBGEMM)
_TRAINING = (*_TRANSFORMER_ENGINE, *_TORCHAO, *_JAX)
_CHECKPOINTS = (*_COMPRESSED_TENSORS, *_TRANSFORMERS, *_MODELOPT, _AUTOFP8)
_ALL = (*_SERVING, *_TRAINING, *_CHECKPOINTS)
DIALECTS: dict[DialectName, Dialect] = cast(Any, {dialect.name: dialect for dialect in _ALL})
"""Every dialect by name."""


def dialect_by_name(dialect: Dialect | str) -> Dialect:
    """The dialect of this name, or the dialect itself.

    Raises:
        SpecError: an unknown name; the message lists the known ones.
    """
    if isinstance(dialect, Dialect):
        return dialect
    if dialect not in DIALECTS:
        raise SpecError(f"dialect_by_name: unknown dialect {dialect!r}; known dialects are: {', '.join(DIALECTS)}")
    return DIALECTS[dialect]
