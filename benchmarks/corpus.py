"""Real text that every machine has: the sources of Python's standard library, as bytes."""

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 10
"""Every tenth file is held out."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and held-out text, uint8 [bytes]. It depends on the Python version alone."""

    training: Tensor
    held_out: Tensor
    description: dict[str, object]

    def batch(self, generator: torch.Generator, rows: int, length: int) -> Tensor:
        """Random windows of the training text, int64 [rows, length + 1]."""
        starts = torch.randint(self.training.numel() - length, (rows,), generator=generator)
        return _windows(self.training, starts, length)

    def held_out_batches(self, count: int, rows: int, length: int) -> list[Tensor]:
        """`count * rows` windows spread evenly over the held-out text, the same for everybody."""
        starts = torch.linspace(0, self.held_out.numel() - length - 1, count * rows, dtype=torch.float64).long()
        return list(_windows(self.held_out, starts, length).split(rows))


def read_corpus() -> Corpus:
    """The modules at the top of the standard library, in the order of their names, whole files held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts = [
        b"\n".join(f.read_bytes() for i, f in enumerate(files) if (i % HELD_OUT == 0) is out) for out in (False, True)
    ]
    training, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    description: dict[str, object] = {
        "python": platform.python_version(),
        "files": len(files),
        "training_bytes": training.numel(),
        "held_out_bytes": held_out.numel(),
        "training_sha256": hashlib.sha256(parts[0]).hexdigest(),
        "held_out_sha256": hashlib.sha256(parts[1]).hexdigest(),
    }
    return Corpus(training, held_out, description)


def _windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    return text[starts[:, None] + torch.arange(length + 1)].long()
