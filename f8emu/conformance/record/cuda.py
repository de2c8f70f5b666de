"""One GEMM run on the GPU by torch, with the kernels that it launched as the profiler saw them."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from f8emu.conformance.arrays import Framework, torch_arrays
from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.conformance.cases.golden import Kernels, store_blocks, store_scales
from f8emu.environment import version_of, versions
from f8emu.spec import Granularity, UnsupportedError
from f8emu.split_k.gemm import PlannedGemm

if TYPE_CHECKING:
    import torch

_ATTEMPTS = 3  # the profiler has been seen to miss kernels right after its start


class Launched(NamedTuple):
    """The output of a GEMM, and the kernels that ran."""

    out: np.ndarray
    kernels: Kernels


class Refused(NamedTuple):
    """Why the library did not run a GEMM."""

    reason: str


class CudaLauncher:
    """Runs GEMMs on the current CUDA device."""

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
        import torch

        return {
            "device": torch.cuda.get_device_name(),
            "capability": "{}.{}".format(*torch.cuda.get_device_capability()),
            "driver": versions()["driver"] or "unknown",
            "cuda": torch.version.cuda or "unknown",
            "cublas": version_of("nvidia-cublas") or version_of("nvidia-cublas-cu12") or "unknown",
            "torch": torch.__version__,
        }

    def __call__(self, gemm: GemmCase) -> Launched | Refused:
        """Runs a GEMM twice, the second time under the profiler; of a sampled GEMM, the full size.

        A refusal of the library is a result. Two runs with different bits are refused too: they are no evidence.
        """
        sample = gemm.sample
        call = _Call.of(gemm if sample is None else gemm.embedded(sample), self.arrays)
        first = _tried(call)
        if isinstance(first, Refused):
            return first
        second, kernels = _profiled(call)
        # Outputs of groups lie one under the other.
        outputs = [self.arrays.store(out).reshape(-1, out.shape[-1]) for out in (first, second)]
        if sample is not None:
            outputs = [out[np.ix_(sample.rows, sample.cols)] for out in outputs]
        if outputs[0].tobytes() != outputs[1].tobytes():
            return Refused("two runs gave different bits")
        return Launched(outputs[1], kernels)

    def planned(self, gemm: PlannedGemm, a_K: np.ndarray, b_CK: np.ndarray) -> np.ndarray | Refused:
        """One row of `a @ b^T`, [C]: every row of a is `a_K`; the rows of `b_CK` repeat until b has N of them.

        The matrices are made on the device and have the size and the layout of `gemm`.
        """
        import torch

        # 1. The operands. A float8 GEMM has layout tn alone: a row-major, b column-major.
        a = _repeated(self.arrays.load(a_K)[None], gemm.m, transposed=gemm.layout[1] == "t")
        b = _repeated(self.arrays.load(b_CK), gemm.n, transposed=gemm.layout[0] == "n").t()
        # 2. Scales of 1 in the layouts of the library.
        pair, ones, scales = gemm.granularities, torch.ones(max(gemm.m, gemm.n), device=a.device), None
        if gemm.is_blockwise and pair:
            sides = zip(pair, (gemm.m, gemm.n), strict=True)
            blocks = [store_blocks(np.ones(kind.scale_shape(rows, gemm.k), np.float32), kind) for kind, rows in sides]
            scales = tuple(_column_major(self.arrays.load(block)) for block in blocks)
        elif gemm.gemm == "rowwise":
            scales = (ones[: gemm.m, None], ones[None, : gemm.n])
        elif pair:
            scales = (ones[0], ones[0])
        # 3. The call.
        mode = Mode.BF16 if pair is None else Mode.BLOCKWISE if gemm.is_blockwise else Mode(gemm.gemm)
        out_dtype = getattr(torch, gemm.call.out.name)
        out = _tried(_Call(mode, a, b, out_dtype, scales, pair, use_fast_accum=gemm.call.use_fast_accum))
        return out if isinstance(out, Refused) else self.arrays.store(out[0, : len(b_CK)].contiguous())


class _Call(NamedTuple):
    """A GEMM's operands on the device, and the library call that takes them."""

    mode: Mode
    a: "torch.Tensor"
    b: "torch.Tensor"
    out_dtype: "torch.dtype"
    scales: "tuple[torch.Tensor, ...] | None"
    pair: tuple[Granularity, Granularity] | None
    bias: "torch.Tensor | None" = None
    offs: "torch.Tensor | None" = None
    use_fast_accum: bool = False

    @classmethod
    def of(cls, gemm: GemmCase, arrays: Framework) -> "_Call":
        bias, offs = (None if x is None else arrays.load(x) for x in (gemm.bias, gemm.offs))
        scales = tuple(map(arrays.load, store_scales(gemm).values())) or None
        if scales and gemm.mode is Mode.BLOCKWISE:
            scales = tuple(map(_column_major, scales))
        return cls(
            gemm.mode,
            arrays.load(gemm.a),
            arrays.load(gemm.b.swapaxes(-1, -2)),
            arrays.dtype(gemm.out_dtype),
            scales,
            (gemm.granularity_a, gemm.granularity_b),
            bias,
            offs,
            gemm.use_fast_accum,
        )

    def __call__(self) -> "torch.Tensor":
        import torch

        aten = torch.ops.aten
        if self.scales is None:
            if self.out_dtype == torch.bfloat16:
                return torch.mm(self.a, self.b)
            return aten.mm.dtype(self.a, self.b, self.out_dtype)
        scale_a, scale_b = self.scales
        options: dict[str, Any] = {"use_fast_accum": self.use_fast_accum}
        if self.mode is Mode.BLOCKWISE:
            from torch.nn.functional import ScalingType, scaled_mm

            square = Granularity.BLOCKWISE_128X128
            of_block, of_square = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
            kind_a, kind_b = (of_square if granularity is square else of_block for granularity in self.pair or ())
            options |= {"bias": self.bias, "output_dtype": self.out_dtype}
            return scaled_mm(self.a, self.b, scale_a, kind_a, scale_b, kind_b, **options)
        options["out_dtype"] = self.out_dtype
        if self.mode is Mode.GROUPED_ROWWISE:
            return aten._scaled_grouped_mm(self.a, self.b, scale_a, scale_b, offs=self.offs, **options)
        return aten._scaled_mm(self.a, self.b, scale_a, scale_b, bias=self.bias, **options)


def _tried(call: _Call) -> "torch.Tensor | Refused":
    """The output, or why the library refused."""
    import torch

    try:
        out = call()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, NotImplementedError) as error:
        torch.cuda.synchronize()  # raises again if it is the device that failed, not the library that refused
        return Refused(str(error).strip().splitlines()[0])
    return out


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
    return "{}, which has {}.{}".format(torch.cuda.get_device_name(), *torch.cuda.get_device_capability())
