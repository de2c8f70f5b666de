"""Cases with their results as a table: lines of hexadecimal text, and the same as tensors."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np

_EMPTY = "-"
"""What stands in a column that a case leaves empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Cases that have the same parameters, and arrays of the same shapes."""

    parameters: Mapping[str, int | str] = field(default_factory=dict[str, int | str])
    """The first columns of a line, the same for all cases."""
    arrays: Mapping[str, np.ndarray | None]
    """Bit patterns by column, [cases, ...], as unsigned integers; None: a column that is empty."""
    rules: Sequence[str]
    """The rules that each case needs, by their ids in NUMERICS, separated by commas."""

    def lines(self) -> Iterator[str]:
        """One case a line; an array is written in the order of its elements, without separators."""
        cases = len(self.rules)
        values = [[str(value)] * cases for value in self.parameters.values()]
        words = [[_EMPTY] * cases if x is None else _words(x, cases) for x in self.arrays.values()]
        return map(" ".join, zip(*values, *words, self.rules, strict=True))


def _words(array: np.ndarray, cases: int) -> list[str]:
    data = array.astype(array.dtype.newbyteorder(">")).tobytes()
    return data.hex(" ", len(data) // cases).split(" ")


class Summary(NamedTuple):
    """The content of a file in short."""

    kind: str
    columns: list[str]
    rules: list[str]
    """All that a case needs, by their ids."""
    cases: int
    outputs: int
    """Results; a GEMM has M * N."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The cases of one file."""

    name: str
    """The file's name, without its suffix."""
    header: Mapping[str, str]
    """What its lines are, and each column, by name."""
    results: tuple[str, ...]
    """The columns that a reader computes again."""
    batches: Sequence[Batch]

    def summary(self) -> Summary:
        """What a manifest says of the file."""
        first, texts = self.batches[0], set[str]().union(*(batch.rules for batch in self.batches))
        arrays = (batch.arrays[name] for batch in self.batches for name in self.results)
        return Summary(
            kind=self.header["kind"],
            columns=[*first.parameters, *first.arrays, "rules"],
            rules=sorted({rule for text in texts for rule in text.split(",")}),
            cases=sum(len(batch.rules) for batch in self.batches),
            outputs=sum(array.size for array in arrays if array is not None),
        )

    def described(self, origin: Mapping[str, str]) -> dict[str, str]:
        """The header of the file, and the metadata of the tensors; `origin` is that of all files."""
        content = self.summary()._asdict().items()
        words = {key: " ".join(value) if isinstance(value, list) else str(value) for key, value in content}
        return {**words, **self.header, **origin}

    def text(self, origin: Mapping[str, str]) -> str:
        """The file: comments that describe it, then its cases."""
        comments = [f"# {key}: {value}" for key, value in self.described(origin).items()]
        return "\n".join(chain(comments, *(batch.lines() for batch in self.batches), [""]))

    def tensors(self) -> tuple[dict[str, np.ndarray], list[dict[str, int | str]], list[str]]:
        """Arrays by `number of the batch.column`, the parameters of each batch, and what its `rules` are indices of."""
        texts = list(dict.fromkeys(chain.from_iterable(batch.rules for batch in self.batches)))
        number_of = {text: number for number, text in enumerate(texts)}.__getitem__
        tensors: dict[str, np.ndarray] = {}
        for i, batch in enumerate(self.batches):
            tensors |= {f"{i}.{name}": array for name, array in batch.arrays.items() if array is not None}
            tensors[f"{i}.rules"] = np.array([*map(number_of, batch.rules)], np.uint8)
        return tensors, [dict(batch.parameters) for batch in self.batches], texts
