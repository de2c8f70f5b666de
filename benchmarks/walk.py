"""How far one tensor travels through the code: files, stays and returns of a call of a layer on a CPU.

    python -m benchmarks.walk                       Float8Linear.forward, rowwise, the second call
    python -m benchmarks.walk --recipe blockwise --first

A *stay* is a part of the call that runs in one file of f8emu; a *return* is a stay in a file that was left before.
Files of other packages do not count: a call through torch that comes back to the same file is one stay.
"""

import argparse
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import f8emu
from f8emu.spec import RecipeName
from f8emu.torch import Float8Linear

_ROOT = str(Path(f8emu.__file__).parent)


def walked(function: Any, *arguments: Any) -> list[str]:
    """The files of f8emu in which `function` runs, one for each stay."""
    stays: list[str] = []

    def note(frame: FrameType | None) -> None:
        while frame is not None and not frame.f_code.co_filename.startswith(_ROOT):
            frame = frame.f_back
        if frame is not None and (not stays or stays[-1] != frame.f_code.co_filename):
            stays.append(frame.f_code.co_filename)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "return"):
            note(frame if event == "call" else frame.f_back)

    sys.setprofile(profile)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return stays


def stays_of_layer(recipe: RecipeName, *, is_first: bool = False) -> list[str]:
    """The stays of the first or of the second forward pass of a layer."""
    layer = Float8Linear(64, 48, bias=False, dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    if not is_first:
        layer(x)
    return walked(layer, x * 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="rowwise")
    parser.add_argument("--first", action="store_true", help="the first call instead of the second")
    parser.add_argument("--files", action="store_true", help="print every stay")
    arguments = parser.parse_args()
    stays = stays_of_layer(arguments.recipe, is_first=arguments.first)
    if arguments.files:
        print("\n".join(str(Path(file).relative_to(_ROOT)) for file in stays))
    print(f"{arguments.recipe}: {len(set(stays))} files, {len(stays)} stays, {len(stays) - len(set(stays))} returns")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
