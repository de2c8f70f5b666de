"""The engine of f8emu/native/src, built into one shared library; everything else stands in pyproject.toml.

It is a plain library that `ctypes` loads, not an extension module: one file, and one wheel, for every Python of a
platform. Where it cannot be compiled, f8emu is installed without it, and emulates with numpy and XLA.
"""

import os
import sys
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# Python's own flags ask for debugging information, which doubles the file; CFLAGS=-g1 keeps it.
DEBUG = [] if "-g" in os.environ.get("CFLAGS", "") else ["-g0"]

ENGINE = Extension(
    "f8emu.native._engine",
    # Every width is compiled everywhere, and is empty on another architecture. It names its instructions itself: no
    # -march, so that the library runs on every machine of the platform.
    sources=sorted(glob("f8emu/native/src/*.c")),
    depends=["setup.py", *sorted(glob("f8emu/native/src/*.h"))],
    # A contracted multiply-add rounds once where the chip rounds twice.
    extra_compile_args=["-std=gnu11", "-O3", *DEBUG, "-ffp-contract=off", "-fno-fast-math", "-pthread"],
    extra_link_args=["-pthread"],
    py_limited_api=True,
    optional=True,
)

WITHOUT = """
f8emu: its engine could not be compiled, for the reason given below. f8emu works without it; emulated GEMMs are slow.
For the engine install a C compiler, gcc or clang, and then f8emu again.
"""


class BuildLibrary(build_ext):
    """Builds the engine, which has no PyInit and needs nothing of Python."""

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return ext.export_symbols

    def get_libraries(self, ext: Extension) -> list[str]:
        return ext.libraries

    def build_extension(self, ext: Extension) -> None:
        self.distribution.has_engine = False
        try:
            super().build_extension(ext)
        except Exception:
            print(WITHOUT, file=sys.stderr)
            raise  # setuptools prints it, and goes on
        self.distribution.has_engine = True


class WheelOfLibrary(bdist_wheel):
    """A wheel for any Python of the platform; for any platform if it has no engine."""

    def run(self) -> None:
        self.run_command("build")
        if not self.distribution.has_engine:
            self.root_is_pure = True
            self.distribution.ext_modules = []
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", "any" if self.root_is_pure else super().get_tag()[2])


setup(ext_modules=[ENGINE], cmdclass={"build_ext": BuildLibrary, "bdist_wheel": WheelOfLibrary})
