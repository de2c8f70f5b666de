"""The error of the input of a linear layer, cast under every recipe, against how large its outliers are.

    python -m benchmarks.proofs.outliers --json benchmarks/results/outliers-cpu.json

The input [256, 1024] is drawn from a normal distribution; one value in 4096 is multiplied by a power of two. The error
is that of all other values, which share scales with these, after the cast: relative, by Frobenius norms.
"""

import argparse
import json
import os
import platform
from pathlib import Path

import numpy as np

import f8emu.numpy as f8
from f8emu import RECIPES
from f8emu.spec import SERVING_RECIPES, recipe_by_name

OUTLIERS = tuple(2**exponent for exponent in range(0, 25, 2))


def errors(recipe_name: str) -> list[float]:
    """The relative error for each size of an outlier."""
    generator = np.random.default_rng(0)
    x, weight = (generator.standard_normal((rows, 1024)).astype(np.float32) for rows in (256, 16))
    is_outlier = generator.random(x.shape) < 1 / 4096
    recipe, results = recipe_by_name(recipe_name), list[float]()
    for outlier in OUTLIERS:
        operand = f8.linear(recipe, np.where(is_outlier, x * np.float32(outlier), x), weight).output.a
        values = np.asarray(f8.dequantize(operand.codes, operand.scale, recipe.output.a.granularity))
        difference = np.where(is_outlier, 0, values.astype(np.float64) - x)
        results.append(float(np.linalg.norm(difference) / np.linalg.norm(np.where(is_outlier, 0, x))))
    return results


def main() -> None:
    """Measure, and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="where to write")
    out: Path = parser.parse_args().json
    names = [name for name, recipe in (RECIPES | SERVING_RECIPES).items() if recipe.delayed is None]
    record = {
        "command": "python -m benchmarks.proofs.outliers",
        "machine": platform.machine(),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "numpy": np.__version__,
        "outliers": OUTLIERS,
        "errors": {name: errors(name) for name in names},
    }
    out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
