"""Who is verified: the implementations of f8emu, and anyone's own kernel.

A subject is a set of verbs that take and give numpy arrays of ml_dtypes, and the name of the engine behind them: an
emulated torch must never be taken for hardware.
"""

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from f8emu.conformance.arrays import Framework, framework_of, jax_arrays, torch_arrays, travelling
from f8emu.conformance.cases.gemm import GemmCase, Verbs
from f8emu.conformance.cases.gemm import NotOffered as NotOffered
from f8emu.conformance.cases.tables import ALIGNED, is_aligned
from f8emu.conformance.kernels.call import Calls, absent, calls_of, question, rows_run
from f8emu.conformance.kernels.child import Ask, begin
from f8emu.conformance.kernels.imported import INTERPRETED, is_interpreted
from f8emu.conformance.kernels.kernel import Kernel
from f8emu.conformance.kernels.known import KERNELS
from f8emu.conformance.kernels.known import scaled_mm_kernel as scaled_mm_kernel
from f8emu.conformance.kernels.loaded import load_kernel
from f8emu.conformance.layers.layer import LayerCase
from f8emu.conformance.layers.trace import engine_linear
from f8emu.conformance.layers.trained import JaxTraining, TorchTraining
from f8emu.conformance.layers.training import train
from f8emu.conformance.run.extra_gemms import engine_cases, kernel_cases
from f8emu.native import library
from f8emu.shown import screen
from f8emu.spec import HOPPER, Chip, MissingExtraError, SpecError, UnsupportedError
from f8emu.spec.gemm_call import GroupKind
from f8emu.spec.names import ArraysName

_GEMM_VERBS = ("scaled_mm", "scaled_grouped_mm", "mm")
_STATE_VERBS = ("initial_delayed_state", "update_delayed_state")
_VERBS = (*_GEMM_VERBS, *_STATE_VERBS, "decode", "cast", "amax", "scale_from_amax", "quantize", "dequantize")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Subject:
    """One implementation under test."""

    name: str
    engine: str
    """The software and hardware that compute: `f8ref.numpy, numpy 2.4.6`, `torch._scaled_mm on NVIDIA H200`, ..."""
    verbs: Verbs = field(default_factory=dict)
    train: Callable[[LayerCase], Mapping[str, np.ndarray]] | None = None
    """Runs the layer that people train, and returns its parts."""
    takes_any_size: bool = True
    """False: M, N and K of a GEMM must be multiples of 16, as for the hardware's library."""
    runs_full_size: bool = False
    """True: a sampled GEMM is run at its full size, on which the library's choice of kernel depends."""
    is_thread_safe: bool = False
    """True: cases may run side by side."""
    is_idle: bool = False
    """True: nothing on this machine computes with it, so that it runs only if it is asked for."""
    group_kinds: tuple[GroupKind, ...] = tuple(GroupKind)
    """The grouped GEMMs that its verb has."""
    chooses_split_k: bool = False
    """True: the library chooses the split-K itself [CHAIN-3]; the verbs do not pass `split_k` on."""
    asks_library: bool = False
    """Whether S of the GEMMs of its layers is what the library of a Hopper GPU says, not the plan's."""
    more_gemms: Callable[[], Iterable[GemmCase]] = tuple
    """Generated GEMMs for this subject alone."""
    kernel: Kernel | None = None
    calls: Calls | None = None
    """The calls of a declared kernel, in place of verbs: its operands lie where a case says."""
    first_call: tuple[GemmCase, np.ndarray | Exception] | None = None
    """The first GEMM that a kernel was given, before the run, and what it gave; judged with the generated GEMMs."""

    def __repr__(self) -> str:
        return screen([f"Subject({self.name!r}, engine={self.engine!r})"])

    @property
    def offers(self) -> Collection[str]:
        return self.verbs.keys() if self.calls is None else ("scaled_mm", "scaled_grouped_mm")

    @property
    def has_layer(self) -> bool:
        """Whether the subject trains layers, or has the verb `linear`."""
        return self.train is not None or "linear" in self.verbs

    def takes(self, case: GemmCase) -> bool:
        """Whether a generated GEMM is in this subject's range."""
        if case.split_k != 1 and self.chooses_split_k:
            return False
        if self.kernel is not None and self.kernel.is_microscaled != case.mode.is_microscaled:
            return False  # E8M0 scales are for kernels that take nothing else
        if self.runs_full_size and case.placement is not None and "bias" in case.placement.offsets:
            return False  # of a bias at 2 bytes `torch._scaled_mm` itself leaves a GPU with a misaligned address
        return self.takes_any_size or is_aligned(case)

    def question(self, case: GemmCase) -> GemmCase:
        """A generated GEMM in the form in which this subject can run it; its oracle gets the same."""
        return case if self.kernel is None else question(self.kernel, case)

    def rows_run(self, case: GemmCase) -> int:
        """The number of rows with which a GEMM is run: more than it has if M is padded."""
        return case.a.shape[0] if self.kernel is None else rows_run(self.kernel, case)

    def outputs(self, case: GemmCase) -> Mapping[str, np.ndarray]:
        """The outputs of a GEMM by name: one, or those of several calls in turn, all read after the last."""
        turns = case.in_turn
        return dict(zip(turns, self._outputs([*turns.values()]), strict=True))

    def gemm(self, case: GemmCase) -> np.ndarray:
        """The output of a GEMM; for a sampled GEMM the sampled outputs.

        Raises:
            NotOffered: the subject has no such GEMM.
        """
        return self._outputs([case])[0]

    def _outputs(self, cases: Sequence[GemmCase]) -> list[np.ndarray]:
        for case in cases:
            if case.verb not in self.offers:
                raise NotOffered(f"{self.name} has no {case.verb}")
            if case.group_kind not in (None, *self.group_kinds):
                raise NotOffered(f"{self.name} has no grouped GEMM where {case.group_kind.description}")
        if self.calls is not None:
            return [*self.calls(cases)]
        once = {id(case): case for case in cases}  # asked again, an implementation of f8emu gives the same
        outputs = {key: self._output(case) for key, case in once.items()}
        return [outputs[id(case)] for case in cases]

    def _output(self, case: GemmCase) -> np.ndarray:
        # The case's outputs among those of the GEMM that runs.
        sample = case.sample
        if sample is None or (self.takes_any_size and not self.runs_full_size):
            return case.run(self.verbs)
        case, sample = (case.embedded(sample), sample) if self.runs_full_size else case.padded(ALIGNED)
        return case.run(self.verbs)[np.ix_(sample.rows, sample.cols)]


def load_subject(
    name: str | Kernel | Callable[..., Any],
    *,
    arrays: ArraysName = "torch",
    timeout: float | None = None,
    here: bool = False,
) -> Subject:
    """One of `SUBJECTS`, such as `f8ref.numpy` or `torch`, a known kernel or `package.module:attribute`.

    A `Kernel`, or a function that is called as `torch._scaled_mm` is, runs in this process: a notebook's, for example.

    `arrays` names the framework whose arrays your own kernel takes: torch, numpy or jax. A kernel runs in its own
    process, so that a crash or a hang is an error of one case only; `timeout`, 120 by default, is in seconds for each
    GEMM. With `here` it runs in this process, for a debugger.

    Raises:
        SpecError: an unknown subject, module or attribute, unknown arrays, or a timeout for a subject that is not a
            kernel.
        MissingExtraError: torch or jax is needed and not installed.
        UnsupportedError: the engine is not compiled.
    """
    if isinstance(name, str):
        return begin_subject(name, arrays=arrays, timeout=timeout, here=here)()
    return kernel_subject(name if isinstance(name, Kernel) else scaled_mm_kernel(name_of(name), name), arrays)


def name_of(function: Callable[..., Any]) -> str:
    """`module:function` of a function, a partial or an object that is called."""
    named = getattr(function, "func", function)  # of a functools.partial
    kind = type(named)
    return f"{getattr(named, '__module__', kind.__module__)}:{getattr(named, '__qualname__', kind.__qualname__)}"


def begin_subject(name: str, *, arrays: str, timeout: float | None, here: bool) -> Callable[[], Subject]:
    """`load_subject` in two: a kernel is imported in its process already while others work; the call waits for it."""
    framework_of(arrays)  # refuses an unknown one here, and not in the kernel's process
    if name in SUBJECTS:
        if timeout is not None:
            raise SpecError(
                f"load_subject: a timeout is for kernels, which run in their own process; {name!r} is not one; leave "
                "out --timeout"
            )
        return SUBJECTS[name]
    if ":" not in name and name not in KERNELS:
        if name.endswith(".py"):
            raise SpecError(f"load_subject: which function of {name}? Name it: {name}:FUNCTION")
        raise SpecError(
            f"load_subject: unknown subject {name!r}; known subjects are {', '.join(SUBJECTS)}; a kernel of your own "
            "is package.module:function or path/to/file.py:function; f8emu verify --kernels lists the known ones"
        )
    return partial(_loaded, name, begin(_kernel_by_name, name, arrays, timeout=timeout, here=here))


def _loaded(name: str, wait: Callable[[], tuple[Subject, Ask]]) -> Subject:
    try:
        subject, calls = wait()
    except SpecError as error:
        if name not in KERNELS:
            raise
        # A known kernel whose package cannot be imported is not offered, and stops no other.
        subject, calls = Subject(name=name, engine=f"{name}, which cannot be loaded"), absent(str(error))
    return replace(subject, calls=calls)


def _kernel_by_name(name: str, arrays: str) -> tuple[Subject, Ask]:
    # Runs in the kernel's process. The outline of its declaration travels.
    kernel = load_kernel(name)
    subject, outline = kernel_subject(kernel, arrays), kernel.outline()
    assert subject.calls is not None, "a kernel is called"
    return replace(subject, calls=None, more_gemms=partial(kernel_cases, outline), kernel=outline), subject.calls


def kernel_subject(kernel: Kernel, arrays: str = "torch") -> Subject:
    """A declared kernel as a subject in this process."""
    framework = framework_of(kernel.arrays or arrays)(f"{kernel.name}, unless its arrays are numpy's,")
    calls = calls_of(kernel, framework)
    engine = [f"{kernel.name} on {framework.name} {framework.version}, {framework.device}"]
    if is_interpreted(kernel.function):  # known once its module is imported
        engine[0] += f", {INTERPRETED}"
    if isinstance(kernel.chip, Chip) and kernel.is_microscaled:
        engine.append(f"bits of {kernel.chip.name}: {kernel.chip.evidence.value} [MX-4] [MX-5]")
    engine += [f"{name}: {text}" for name, text in (("predicted", kernel.predicted), ("seen", kernel.seen)) if text]
    return Subject(
        name=kernel.name,
        engine="; ".join(engine),
        calls=calls,
        runs_full_size=framework.on_gpu,
        chooses_split_k=True,
        more_gemms=partial(kernel_cases, kernel),
        kernel=kernel,
    )


# The implementations of f8emu


def _f8ref_numpy() -> Subject:
    import f8ref.numpy

    verbs = {verb: getattr(f8ref.numpy, verb) for verb in (*_VERBS, "linear")}
    return Subject(name="f8ref.numpy", engine=f"f8ref.numpy, numpy {np.__version__}", verbs=verbs)


def _f8ref_jax() -> Subject:
    framework = jax_arrays("f8emu verify f8ref.jax")
    import f8ref.jax

    return Subject(
        name="f8ref.jax",
        engine=f"f8ref.jax, jax {framework.version}, {framework.device}",
        verbs=_travelling(framework, f8ref.jax, _GEMM_VERBS),
        is_thread_safe=not framework.on_gpu,
        is_idle=not framework.on_gpu and library.library() is not None,
        group_kinds=(GroupKind.ROWS,),
    )


def _f8emu_native(width: str | None = None) -> Subject:
    # The engine at one of its widths, the fastest by default, called with numpy's own memory.
    problem = library.unavailable()
    if problem is not None:
        raise UnsupportedError(f"f8emu verify f8emu.native: {problem}")
    import f8ref.numpy
    from f8emu.numpy import emulation

    names = ("amax", "quantize", *_GEMM_VERBS)
    verbs: dict[str, Any] = {name: partial(getattr(emulation, name), width=width) for name in names}
    verbs["scale_from_amax"] = emulation.scale_from_amax
    verbs["linear"] = partial(engine_linear, dict(verbs))
    # The states, which layers need, are the oracle's.
    verbs |= {name: getattr(f8ref.numpy, name) for name in _STATE_VERBS}
    return Subject(
        name="f8emu.native" if width is None else f"f8emu.native:{width.lower()}",
        engine=f"f8emu.native, {width or library.widths()[0]} on cpu",
        verbs=verbs,
        is_thread_safe=True,
        more_gemms=engine_cases,
    )


def _torch() -> Subject:
    framework = torch_arrays("f8emu verify torch")
    implementation, engine = map(importlib.import_module, ("f8emu.torch", "f8emu.torch.gemm.engine"))
    at = framework.load(np.zeros(1, np.float32)).device
    try:
        multiplies = engine.engine_of("cuda" if framework.on_gpu else "cpu")
    except MissingExtraError:  # its casts run all the same
        multiplies = "no GEMMs: JAX, which would emulate them, is not installed"
    return replace(
        _production("torch", framework, implementation, multiplies, engine.has_float8_hardware(at)),
        train=partial(train, TorchTraining, framework),
        takes_any_size=False,
        asks_library=engine.is_device_of(HOPPER, at),
    )


def _f8emu_jax() -> Subject:
    framework = jax_arrays("f8emu verify f8emu.jax")
    implementation, engine = map(importlib.import_module, ("f8emu.jax", "f8emu.jax.gemm.engine"))
    multiplies = engine.engine_of()
    on_hardware = not multiplies.startswith("emulated")
    production = _production("f8emu.jax", framework, implementation, multiplies, on_hardware)
    return replace(production, train=partial(train, JaxTraining, framework))


def _production(name: str, framework: Framework, module: ModuleType, multiplies: str, on_hardware: bool) -> Subject:
    verbs = _travelling(framework, module, _VERBS)
    return Subject(
        name=name,
        engine=f"{framework.name} {framework.version}, {multiplies}",
        verbs=without_split_k(verbs) if on_hardware else verbs,
        is_thread_safe=not framework.on_gpu,
        runs_full_size=on_hardware,
        chooses_split_k=on_hardware,
        group_kinds=(GroupKind.ROWS,) if "jax" in f"{framework.name} {multiplies}" else tuple(GroupKind),
    )


def _travelling(framework: Framework, module: ModuleType, names: Sequence[str]) -> Verbs:
    return {name: travelling(framework, getattr(module, name)) for name in names}


def without_split_k(verbs: Verbs) -> Verbs:
    """The verbs of a library that chooses the split-K itself."""

    def run(verb: Callable[..., np.ndarray], *args: Any, split_k: int, **options: Any) -> np.ndarray:
        return verb(*args, **options)

    return {**verbs, **{name: partial(run, verbs[name]) for name in ("scaled_mm", "mm") if name in verbs}}


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "f8ref.numpy": _f8ref_numpy,
    "f8ref.jax": _f8ref_jax,
    "f8emu.native": _f8emu_native,
    **{f"f8emu.native:{width.lower()}": partial(_f8emu_native, width) for width in library.widths()[1:]},
    "torch": _torch,
    "f8emu.jax": _f8emu_jax,
}
"""Name -> loader, in the order in which they are verified by default."""
