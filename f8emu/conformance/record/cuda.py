"""One GEMM run on the GPU by torch, with the kernels that it launched as the profiler saw them."""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from f8emu.conformance.arrays import Framework, torch_arrays
from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.conformance.cases.layouts import store_blocks, store_scales
from f8emu.environment import versions
from f8emu.spec import Granularity, UnsupportedError
from f8emu.split_k.gemm import BLOCKWISE_GEMMS, PlannedGemm

if TYPE_CHECKING:
    import torch

Kernels = tuple[tuple[str, tuple[int, ...]], ...]

_ATTEMPTS = 3
"""The profiler has been seen to miss kernels right after its start."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Launched:
    """What a GEMM gave."""

    out: np.ndarray
    kernels: Kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Why the library did not run a GEMM."""

    reason: str


class CudaLauncher:
    """Runs GEMMs on the current CUDA device.

    Raises:
        MissingExtraError: torch is not installed.
        UnsupportedError: no CUDA device, or one without float8.
    """

    def __init__(self) -> None:
        self.arrays = torch_arrays("record")
        import torch

        from f8emu.torch.gemm.engine import has_float8_hardware

        if not has_float8_hardware(torch.device("cuda")):
            raise UnsupportedError(
                "record: needs a CUDA GPU with float8 (compute capability 8.9 or newer), whose bits are the evidence; "
                f"torch {torch.__version__} sees {_found()}. Run it on such a machine; here, "
                "`f8emu verify` compares with the cases that are shipped"
            )

    def metadata(self) -> dict[str, str]:
        """What the recorded bits belong to."""
        import torch

        major, minor = torch.cuda.get_device_capability()
        return {
            "device": torch.cuda.get_device_name(),
            "capability": f"{major}.{minor}",
            "driver": versions()["driver"] or "unknown",
            "cuda": torch.version.cuda or "unknown",
            "cublas": _first_version("nvidia-cublas", "nvidia-cublas-cu12"),
            "torch": torch.__version__,
        }

    def __call__(self, gemm: GemmCase) -> Launched | Refused:
        """Runs a GEMM twice, the second time under the profiler; of a sampled GEMM, the full size.

        A refusal of the library is a result. Two runs with different bits are refused too: they are no evidence.

        Raises:
            UnsupportedError: the profiler saw no kernel.
        """
        import torch

        sample = gemm.sample
        call = _Call(gemm if sample is None else gemm.embedded(sample), self.arrays)
        try:
            first = call()
            torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, NotImplementedError) as error:
            torch.cuda.synchronize()  # raises again if it is the device that failed, not the library that refused
            return Refused(reason=str(error).strip().splitlines()[0])
        second, kernels = _profiled(call)
        outputs = [self.arrays.store(out) for out in (first, second)]
        if sample is not None:
            outputs = [out[np.ix_(sample.rows, sample.cols)] for out in outputs]
        if outputs[0].tobytes() != outputs[1].tobytes():
            return Refused(reason="two runs gave different bits")
        return Launched(out=outputs[1], kernels=kernels)

    def planned(self, gemm: PlannedGemm, a_K: np.ndarray, b_CK: np.ndarray) -> np.ndarray | Refused:
        """One row of `a @ b^T`, [C]: every row of a is `a_K`; the rows of `b_CK` repeat until b has N of them.

        The matrices are made on the device and have the size and the layout of `gemm`.
        """
        import torch

        aten, columns = torch.ops.aten, len(b_CK)
        a_K1, b_C1K = self.arrays.load(a_K), self.arrays.load(b_CK)
        is_bfloat16 = gemm.gemm == "bfloat16"
        a = _repeated(a_K1[None], gemm.m, transposed=is_bfloat16 and gemm.layout[1] == "t")
        b = _repeated(b_C1K, gemm.n, transposed=is_bfloat16 and gemm.layout[0] == "n").t()
        out_dtype = getattr(torch, gemm.out_dtype)
        try:
            if is_bfloat16:
                out = torch.mm(a, b) if out_dtype == torch.bfloat16 else aten.mm.dtype(a, b, out_dtype)
            elif gemm.is_blockwise:
                pair = BLOCKWISE_GEMMS[gemm.gemm]
                scales = self._unit_scales(pair[0], gemm.m, gemm.k), self._unit_scales(pair[1], gemm.n, gemm.k)
                out = _blockwise(a, b, scales, pair, out_dtype)
            else:
                ones = torch.ones(max(gemm.m, gemm.n), device=a.device)
                scales = (ones[0], ones[0])
                if gemm.gemm == "rowwise":
                    scales = (ones[: gemm.m, None], ones[None, : gemm.n])
                fast = gemm.accumulation == "fast"
                out = aten._scaled_mm(a, b, *scales, out_dtype=out_dtype, use_fast_accum=fast)
            torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, NotImplementedError) as error:
            torch.cuda.synchronize()
            return Refused(reason=str(error).strip().splitlines()[0])
        return self.arrays.store(out[0, :columns].contiguous())

    def _unit_scales(self, granularity: Granularity, rows: int, k: int) -> "torch.Tensor":
        """Block scales of 1 as the library takes them."""
        ones = np.ones(granularity.scale_shape(rows, k), np.float32)
        return _column_major(self.arrays.load(store_blocks(ones, granularity)))


class _Call:
    """A GEMM's operands on the device, and the library call that takes them."""

    def __init__(self, gemm: GemmCase, arrays: Framework) -> None:
        self.gemm = gemm
        self.out_dtype = arrays.dtype(gemm.out_dtype)
        self.a, self.b = arrays.load(gemm.a), arrays.load(gemm.b.swapaxes(-1, -2))
        self.scales = {role: arrays.load(scale) for role, scale in store_scales(gemm).items()}
        if gemm.mode is Mode.BLOCKWISE:
            self.scales = {role: _column_major(scale) for role, scale in self.scales.items()}
        self.bias = None if gemm.bias is None else arrays.load(gemm.bias)
        self.offs = None if gemm.offs is None else arrays.load(gemm.offs)

    def __call__(self) -> "torch.Tensor":
        import torch

        gemm, aten = self.gemm, torch.ops.aten
        match gemm.mode:
            case Mode.BF16:
                if self.out_dtype == torch.bfloat16:
                    return torch.mm(self.a, self.b)
                return aten.mm.dtype(self.a, self.b, self.out_dtype)
            case Mode.GROUPED_ROWWISE:
                return aten._scaled_grouped_mm(
                    self.a,
                    self.b,
                    self.scales["scale_a"],
                    self.scales["scale_b"],
                    offs=self.offs,
                    out_dtype=self.out_dtype,
                    use_fast_accum=gemm.use_fast_accum,
                )
            case Mode.TENSORWISE | Mode.ROWWISE:
                return aten._scaled_mm(
                    self.a,
                    self.b,
                    self.scales["scale_a"],
                    self.scales["scale_b"],
                    bias=self.bias,
                    out_dtype=self.out_dtype,
                    use_fast_accum=gemm.use_fast_accum,
                )
            case Mode.BLOCKWISE:
                scales = self.scales["scale_a"], self.scales["scale_b"]
                pair = gemm.granularity_a, gemm.granularity_b
                options = {"bias": self.bias, "use_fast_accum": gemm.use_fast_accum}
                return _blockwise(self.a, self.b, scales, pair, self.out_dtype, **options)


def _blockwise(
    a: "torch.Tensor",
    b: "torch.Tensor",
    scales: "tuple[torch.Tensor, torch.Tensor]",
    granularities: tuple[Granularity, Granularity],
    out_dtype: "torch.dtype",
    **options: Any,
) -> "torch.Tensor":
    from torch.nn.functional import ScalingType, scaled_mm

    kinds = {
        Granularity.BLOCKWISE_1X128: ScalingType.BlockWise1x128,
        Granularity.BLOCKWISE_128X128: ScalingType.BlockWise128x128,
    }
    kind_a, kind_b = (kinds[granularity] for granularity in granularities)
    return scaled_mm(a, b, scales[0], kind_a, scales[1], kind_b, output_dtype=out_dtype, **options)


def kernels_in_trace(trace: Mapping[str, Any]) -> Kernels:
    """(name, grid) of every kernel in a Chrome trace of torch.profiler, in the order in which they started."""
    events = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    events.sort(key=lambda event: event["ts"])
    return tuple((event["name"], tuple(event["args"]["grid"])) for event in events)


def _profiled(call: _Call) -> tuple["torch.Tensor", Kernels]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    for _ in range(_ATTEMPTS):
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            out = call()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            kernels = kernels_in_trace(json.loads(path.read_text()))
        if kernels:
            return out, kernels
    raise UnsupportedError(
        f"record: torch.profiler saw no kernel in {_ATTEMPTS} runs of one GEMM; it needs CUPTI and the right to "
        "profile: end other profilers, or run with that right"
    )


def _repeated(rows: "torch.Tensor", count: int, *, transposed: bool) -> "torch.Tensor":
    """`rows` [R, K], repeated to a matrix [count, K]: row-major, or column-major if `transposed`."""
    import torch

    codes = rows.view(torch.int16 if rows.element_size() == 2 else torch.uint8)
    turn = torch.arange(count, device=rows.device) % len(rows)
    return (codes.t()[:, turn].contiguous().t() if transposed else codes[turn]).view(rows.dtype)


def _column_major(scale: "torch.Tensor") -> "torch.Tensor":
    """[EPI-5] Strides (1, rows), also where a dimension of 1 makes torch think that any will do."""
    import torch

    return torch.empty_strided(scale.shape, (1, scale.shape[0]), dtype=scale.dtype, device=scale.device).copy_(scale)


def _found() -> str:
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, which has {major}.{minor}"


def _first_version(*packages: str) -> str:
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "unknown"
