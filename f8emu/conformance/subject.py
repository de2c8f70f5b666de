"""Who is verified: the implementations of f8emu, and anyone's own kernel.

A subject is a set of verbs that take and give numpy arrays of ml_dtypes, and the name of the engine behind them: an
emulated torch must never be taken for hardware.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from f8emu.conformance import jax_layer, torch_layer
from f8emu.conformance.arrays import FRAMEWORKS, Framework, jax_arrays, torch_arrays, travelling
from f8emu.conformance.gemm import GemmCase, Verbs
from f8emu.conformance.gemm_cases import ALIGNED, is_aligned
from f8emu.conformance.layer import LayerCase
from f8emu.spec import Format, Granularity, MissingExtraError, SpecError

VERBS = (
    "decode",
    "cast",
    "amax",
    "scale_from_amax",
    "quantize",
    "dequantize",
    "scaled_mm",
    "scaled_grouped_mm",
    "mm",
    "initial_delayed_state",
    "update_delayed_state",
    "linear",
)
"""What an implementation of f8emu offers."""


class NotOffered(Exception):
    """A subject that does not have the operation of a case: reported as such, never as equal or different."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One implementation under test."""

    name: str
    engine: str
    """What computes: `f8ref.numpy, numpy 2.4.6`, `torch._scaled_mm on NVIDIA H200`, ..."""
    verbs: Verbs
    """Of `VERBS` those that it has."""
    train: Callable[[LayerCase], Mapping[str, np.ndarray]] | None = None
    """Runs the layer that people train, and gives its parts."""
    takes_any_size: bool = True
    """False: M, N and K of a GEMM must be multiples of 16, as for the hardware's library."""
    runs_full_size: bool = False
    """True: a sampled GEMM is run at its full size, on which the library's choice of kernel depends."""
    is_thread_safe: bool = False
    """True: cases may run side by side."""
    chooses_split_k: bool = False
    """True: the library splits K as it likes [CHAIN-3], and is not told; its verbs do not pass `split_k` on."""

    def takes(self, case: GemmCase) -> bool:
        """Whether a generated GEMM is in this subject's range."""
        if case.split_k != 1 and self.chooses_split_k:
            return False
        return self.takes_any_size or is_aligned(case)

    def gemm(self, case: GemmCase) -> np.ndarray:
        """The output of a GEMM; of a sampled one the sampled outputs.

        Raises:
            NotOffered: the subject has no such GEMM.
        """
        if case.verb not in self.verbs:
            raise NotOffered(f"{self.name} has no {case.verb}")
        if case.sample is None:
            return case.run(self.verbs)
        if self.runs_full_size:
            output = case.embedded(case.sample).run(self.verbs)
            return output[np.ix_(case.sample.rows, case.sample.cols)]
        if self.takes_any_size:
            return case.run(self.verbs)
        padded, sample = case.padded(ALIGNED)
        return padded.run(self.verbs)[np.ix_(sample.rows, sample.cols)]


def load_subject(name: str, *, arrays: str = "torch") -> Subject:
    """The subject called `f8ref.numpy`, `f8ref.jax`, `torch`, `f8emu.jax` or `package.module:function`.

    `arrays` names the framework whose arrays an own kernel takes: torch, numpy or jax.

    Raises:
        SpecError: no such subject, module or function, or unknown arrays.
        MissingExtraError: torch or jax is needed and not installed.
    """
    if arrays not in FRAMEWORKS:
        raise SpecError(f"load_subject: arrays must be one of {', '.join(FRAMEWORKS)}; got {arrays!r}")
    if name in SUBJECTS:
        return SUBJECTS[name]()
    if ":" in name:
        return kernel_subject(name, arrays)
    known = ", ".join(SUBJECTS)
    raise SpecError(
        f"load_subject: unknown subject {name!r}; known subjects are {known}, and package.module:function for a kernel"
    )


def kernel_subject(path: str, arrays: str = "torch") -> Subject:
    """Anyone's own scaled GEMM, called as `torch._scaled_mm` is.

    `function(a, b, scale_a, scale_b, *, bias, out_dtype, use_fast_accum)`: a [M, K] row-major, b [K, N] column-major;
    scales tensorwise (one element) or rowwise ([M, 1] and [1, N]), float32. `NotImplementedError` means "not offered".

    Raises:
        SpecError: no such module or function.
        MissingExtraError: the arrays' framework is not installed.
    """
    call = f"f8emu verify {path}"
    module_name, _, function_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name)
        if not callable(function):
            raise AttributeError(f"{path} is not callable")
    except (ImportError, AttributeError, ValueError) as error:
        raise SpecError(
            f"{call}: expected package.module:function of an importable module; {error}. "
            "Run it where the module can be imported, or set PYTHONPATH"
        ) from None
    framework = FRAMEWORKS[arrays](call)
    return Subject(
        name=path,
        engine=f"{path} on {framework.name} {framework.version}, {framework.device}",
        verbs={"scaled_mm": _kernel_verb(framework, function)},
        takes_any_size=False,
        runs_full_size=framework.on_gpu,
    )


def _kernel_verb(framework: Framework, function: Callable[..., Any]) -> Callable[..., Any]:
    run = travelling(framework, function)

    def scaled_mm(
        a: np.ndarray,
        b: np.ndarray,
        scale_a: np.ndarray,
        scale_b: np.ndarray,
        *,
        granularity_a: Granularity,
        granularity_b: Granularity,
        bias: np.ndarray | None,
        out_dtype: Format,
        use_fast_accum: bool,
        split_k: int,
    ) -> np.ndarray:
        if granularity_a.is_blockwise or granularity_b.is_blockwise:
            raise NotOffered("block scales have no place in the arguments of torch._scaled_mm")
        if split_k != 1:
            raise NotOffered("split-K is the library's choice, which an own kernel is not told")
        if granularity_a is Granularity.TENSORWISE:
            scale_a, scale_b = scale_a.reshape(()), scale_b.reshape(())
        options = {"bias": bias, "out_dtype": framework.dtype(out_dtype), "use_fast_accum": use_fast_accum}
        try:
            return run(a, b, scale_a, scale_b, **options)
        except NotImplementedError as reason:
            raise NotOffered(str(reason)) from None

    return scaled_mm


def _f8ref_numpy() -> Subject:
    import f8ref.numpy

    return Subject(
        name="f8ref.numpy",
        engine=f"f8ref.numpy, numpy {np.__version__}",
        verbs={verb: getattr(f8ref.numpy, verb) for verb in VERBS},
    )


def _f8ref_jax() -> Subject:
    framework = jax_arrays("f8emu verify f8ref.jax")
    import f8ref.jax

    return Subject(
        name="f8ref.jax",
        engine=f"f8ref.jax, jax {framework.version}, {framework.device}",
        verbs={verb: travelling(framework, getattr(f8ref.jax, verb)) for verb in VERBS},
        is_thread_safe=not framework.on_gpu,
    )


def _torch() -> Subject:
    call = "f8emu verify torch"
    framework = torch_arrays(call)
    implementation, engine = (importlib.import_module(name) for name in ("f8emu.torch", "f8emu.torch.gemm.engine"))
    device = "cuda" if framework.on_gpu else "cpu"
    on_hardware = framework.on_gpu and engine.has_float8_hardware(framework.load(np.zeros(1, np.float32)).device)
    try:
        multiplies = engine.engine_of(device)
    except MissingExtraError:  # its casts run all the same
        multiplies = "no GEMMs: JAX, which would emulate them, is not installed"
    names = [verb for verb in VERBS if verb != "linear"]  # its layer is Float8Linear, and that trains
    verbs = {verb: travelling(framework, getattr(implementation, verb)) for verb in names}
    return Subject(
        name="torch",
        engine=f"torch {framework.version}, {multiplies}",
        verbs=without_split_k(verbs) if on_hardware else verbs,
        train=partial(torch_layer.train, framework),
        takes_any_size=False,
        is_thread_safe=not framework.on_gpu,
        runs_full_size=on_hardware,
        chooses_split_k=on_hardware,
    )


def _f8emu_jax() -> Subject:
    framework = jax_arrays("f8emu verify f8emu.jax")
    implementation, engine = (importlib.import_module(name) for name in ("f8emu.jax", "f8emu.jax.gemm.engine"))
    multiplies = engine.engine_of()
    on_hardware = not multiplies.startswith("emulated")
    names = [verb for verb in VERBS if verb != "linear"]  # its layer is made of dot_general, and that trains
    verbs = {verb: travelling(framework, getattr(implementation, verb)) for verb in names}
    return Subject(
        name="f8emu.jax",
        engine=f"jax {framework.version}, {multiplies}",
        verbs=without_split_k(verbs) if on_hardware else verbs,
        train=partial(jax_layer.train, framework),
        is_thread_safe=not framework.on_gpu,
        runs_full_size=on_hardware,
        chooses_split_k=on_hardware,
    )


def without_split_k(verbs: Verbs) -> Verbs:
    """The verbs of a library that splits K as it likes, and is told nothing."""

    def run(verb: Callable[..., np.ndarray], *args: Any, split_k: int, **options: Any) -> np.ndarray:
        return verb(*args, **options)

    return {**verbs, **{name: partial(run, verbs[name]) for name in ("scaled_mm", "mm") if name in verbs}}


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "f8ref.numpy": _f8ref_numpy,
    "f8ref.jax": _f8ref_jax,
    "torch": _torch,
    "f8emu.jax": _f8emu_jax,
}
"""Name -> loader, in the order in which they are verified by default."""
