"""The engine on aarch64: calls that the tests of this machine's widths make, recorded, and made again under qemu."""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from f8emu.native import library
from f8emu.native.gemm import FORMATS, MICROSCALED

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
if library.unavailable() or not (shutil.which(COMPILER) and shutil.which(EMULATOR)):
    pytest.skip(f"needs the engine, {COMPILER} and {EMULATOR}", allow_module_level=True)

from f8emu.spec import FLOAT8, HOPPER, Granularity  # noqa: E402
from tests.native import test_cast, test_gemm  # noqa: E402
from tests.native import test_microscaled as test_microscaled_gemms  # noqa: E402

SOURCES = Path(library.__file__).with_name("src")
SIZES = {FORMATS[name]: size for name, size in (("bfloat16", 2), ("float16", 2), ("float32", 4))}


class Recorder:
    """The engine's library, and a file that gets what its calls read and write."""

    def __init__(self, engine: ctypes.CDLL, file: BinaryIO) -> None:
        self.engine = engine
        self.file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def f8_run(self, gemm: Any, width: int) -> int:
        call = gemm._obj
        regions = [(type(call).model.offset, ctypes.addressof(call.model.contents), ctypes.sizeof(call.model.contents))]
        for x, rows, field in ((call.a, call.m, type(call).a), (call.b, call.n, type(call).b)):
            size = SIZES.get(x.format, 1)
            bytes_of_codes = _extent(size, (rows, x.row_stride), (call.k, x.k_stride))
            regions.append((field.offset + type(x).codes.offset, x.codes, bytes_of_codes))
            block, scale_size = (32, 1) if call.scaling == MICROSCALED else (128, 4)
            blocks = (-(-rows // x.rows_per_scale), x.scale_row_stride), (-(-call.k // block), x.scale_block_stride)
            regions.append((field.offset + type(x).scale.offset, x.scale, _extent(scale_size, *blocks)))
        of_out = _extent(SIZES[call.out_format], (call.m, call.out_row_stride), (call.n, call.out_column_stride))
        of_bias = _extent(SIZES[call.bias_format], (call.n, call.bias_stride))
        regions += [(type(call).out.offset, call.out, of_out), (type(call).bias.offset, call.bias, of_bias)]
        return self._record(0, call, regions, lambda: self.engine.f8_run(gemm, width))

    def f8_run_cast(self, cast: Any, width: int) -> int:
        call = cast._obj
        blocks = [
            (-(-size // block) if block else 1, stride)
            for size, block, stride in (
                (call.lines, call.line_block, call.scale_line_stride),
                (call.positions, call.position_block, call.scale_position_stride),
            )
        ]
        of_x = _extent(SIZES[call.format], (call.lines, call.line_stride), (call.positions, 1))
        of_codes = _extent(1, (call.lines, call.code_line_stride), (call.positions, call.code_position_stride))
        sizes = {"x": of_x, "codes": of_codes, **dict.fromkeys(("amax", "inv_scale"), _extent(4, *blocks))}
        sizes["scale"] = _extent(1 if call.rule.is_e8m0 else 4, *blocks)
        regions = [(getattr(type(call), name).offset, getattr(call, name), size) for name, size in sizes.items()]
        return self._record(1, call, regions, lambda: self.engine.f8_run_cast(cast, width))

    def _record(self, function: int, call: Any, regions: Sequence[tuple[int, int | None, int]], run: Any) -> int:
        present = [(offset, address, size) for offset, address, size in regions if address]
        before = [ctypes.string_at(address, size) for _, address, size in present]
        result = run()
        self.file.write(_words(function, ctypes.sizeof(call), len(present)) + bytes(call))
        for (offset, address, size), old in zip(present, before, strict=True):
            self.file.write(_words(offset, size) + old + ctypes.string_at(address, size))
        return result


def _words(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


def _extent(size: int, *axes: tuple[int, int]) -> int:
    """Bytes from the first element of (count, stride) axes to the end of the last."""
    return size * (1 + sum((count - 1) * stride for count, stride in axes))


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("aarch64") / "replay"
    sources = [Path(__file__).parent / "replay.c", *sorted(SOURCES.glob("*.c"))]
    flags = ["-std=gnu11", "-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-static", "-pthread", f"-I{SOURCES}"]
    subprocess.run([COMPILER, *flags, *sources, "-lm", "-o", program], check=True)
    return program


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Recorder]:
    engine = library.library()
    assert engine is not None
    with (tmp_path / "calls").open("wb") as file:
        recording = Recorder(engine, file)
        monkeypatch.setattr(library, "library", lambda: recording)
        yield recording


def _replay(program: Path, recorder: Recorder) -> None:
    recorder.file.flush()
    replayed = subprocess.run([EMULATOR, program, recorder.file.name], capture_output=True, text=True)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.startswith("NEON\n"), replayed.stdout


@pytest.mark.parametrize("kind", ["every code", "one sign", "tiny"])
def test_gemms(kind: str, replay: Path, recorder: Recorder) -> None:
    shapes = test_gemm.SHAPES if kind == "every code" else test_gemm.SHAPES[:-1]  # the last is most of the work
    test_gemm.check_accumulators(kind, library.widths()[:1], shapes)
    _replay(replay, recorder)


@pytest.mark.parametrize(
    "pair", [HOPPER.granularity_pairs[0], HOPPER.granularity_pairs[-1]], ids=["tensorwise", "blockwise"]
)
def test_epilogues(pair: tuple[Granularity, Granularity], replay: Path, recorder: Recorder) -> None:
    test_gemm.check_epilogues(pair, library.widths()[:1])
    _replay(replay, recorder)


def test_microscaled(replay: Path, recorder: Recorder) -> None:
    test_microscaled_gemms.check_products(library.widths()[:1], test_microscaled_gemms.SHAPES[:-1])
    test_microscaled_gemms.check_options(library.widths()[:1])
    _replay(replay, recorder)


def test_casts(replay: Path, recorder: Recorder) -> None:
    for format in FLOAT8:
        test_cast.test_every_16_bit_input_is_cast_as_the_oracle_casts_it(format, library.widths()[0])
    for granularity in Granularity:
        test_cast.check_casts(FLOAT8[0], granularity, library.widths()[:1])
    _replay(replay, recorder)
