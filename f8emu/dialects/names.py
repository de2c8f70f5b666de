"""The names of dialects as a type, by stack: a type checker finds a misspelled one where it stands."""

from typing import Literal

_VllmActivations = Literal["vllm_static", "vllm_tensor", "vllm_token"]
_VllmGroups = Literal["vllm_group", "vllm_group_quotient", "vllm_group_ue8m0"]
_VllmGroupsMore = Literal["vllm_group_ue8m0_packed", "vllm_group_triton", "vllm_group_triton_ue8m0"]
_VllmNative = Literal["vllm_native", "vllm_native_cuda", "vllm_native_group", "vllm_native_group_cuda"]
_VllmWeights = Literal["vllm_weight_tensor", "vllm_weight_channel", "vllm_weight_block"]
_VllmWeightsMore = Literal["vllm_weight_block_cuda", "vllm_weight_block_ue8m0"]
_VllmFused = Literal["vllm_silu_group", "vllm_layernorm_group", "vllm_fused_shards"]
_Sglang = Literal["sglang_group", "sglang_group_ue8m0", "sglang_token"]
_SglangMore = Literal["sglang_tensor", "sglang_weight_tensor", "sglang_weight_block_ue8m0"]
_Deepseek = Literal["deep_gemm_block", "deep_gemm_block_cuda", "deep_gemm_block_ue8m0"]
_DeepseekMore = Literal["deepseek_group", "deepseek_group_ue8m0"]
_Fbgemm = Literal["fbgemm_triton", "fbgemm_torch", "fbgemm_cuda"]
_TransformerEngine = Literal[
    "transformer_engine_delayed", "transformer_engine_current", "transformer_engine_current_pow2"
]
_TransformerEngineMore = Literal[
    "transformer_engine_block", "transformer_engine_block_float", "transformer_engine_mxfp8"
]
_Torchao = Literal["torchao_tensorwise", "torchao_rowwise", "torchao_rowwise_float"]
_TorchaoMore = Literal["torchao_blockwise", "torchao_inference"]
_TorchaoMx = Literal["torchao_mx_floor", "torchao_mx_ceil", "torchao_mx_even", "torchao_mx_rceil"]
_Jax = Literal["flax_linen", "qwix", "qwix_eager_tensor", "qwix_mxfp8"]
_CompressedTensors = Literal["compressed_tensors_tensor", "compressed_tensors_channel", "compressed_tensors_block"]
_CompressedTensorsMore = Literal["compressed_tensors_cuda", "compressed_tensors_mxfp8"]
_Checkpoints = Literal["transformers_block", "transformers_block_ue8m0", "transformers_activation", "autofp8_tensor"]
_Modelopt = Literal["modelopt_tensor", "modelopt_channel", "modelopt_block"]
_ModeloptMore = Literal["modelopt_qtensor", "modelopt_mxfp8", "modelopt_fake"]

_Serving = Literal[
    _VllmActivations,
    _VllmGroups,
    _VllmGroupsMore,
    _VllmNative,
    _VllmWeights,
    _VllmWeightsMore,
    _VllmFused,
    _Sglang,
    _SglangMore,
    _Deepseek,
    _DeepseekMore,
    _Fbgemm,
]
_Training = Literal[_TransformerEngine, _TransformerEngineMore, _Torchao, _TorchaoMore, _TorchaoMx, _Jax]
_Stored = Literal[_CompressedTensors, _CompressedTensorsMore, _Checkpoints, _Modelopt, _ModeloptMore]
DialectName = Literal[_Serving, _Training, _Stored]
"""A dialect by name: `DIALECTS`."""
