"""Scales, biases and outputs that stand in the place of others."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np


class Choice(Enum):
    """One value of a rule, in words, the name of the alteration that makes a rule so, and the id of a rule of MXFP8."""

    _value_: str
    alteration: str
    of_mxfp8: str

    def __new__(cls, words: str, alteration: str = "", of_mxfp8: str = "") -> "Choice":
        choice = object.__new__(cls)
        choice._value_, choice.alteration, choice.of_mxfp8 = words, alteration, of_mxfp8
        return choice

    # Rules are hashed often, and Enum's own hash is a Python function.
    __hash__ = object.__hash__


class Places(Choice):
    """Arrays whose elements may stand in each other's place."""

    SCALES_A = "scale_a of row"
    SCALES_B = "scale_b of column"
    BLOCKS_A = "scale_a of block"
    BLOCKS_B = "scale_b of block"
    BIAS = "bias of column"
    ROWS = "output of row"
    COLUMNS = "output of column"

    @property
    def is_output(self) -> bool:
        return self in (Places.ROWS, Places.COLUMNS)


class Taken(Enum):
    """Which place stands for place i of n, given a size s: its words, and the place as a function of all i and s."""

    _value_: tuple[str, Callable[[np.ndarray, int], np.ndarray]]
    SHIFTED = "{i} {sign} {size}", lambda i, s: (i - s).clip(0, len(i) - 1)
    ROLLED = "{i} {sign} {size} round about", lambda i, s: (i - s) % len(i)
    SWAPPED = "{i} xor {size}", lambda i, s: np.where(i ^ s < len(i), i ^ s, i)
    REPEATED = "{i} mod {size}", lambda i, s: i % s
    FIRST_OF_TILE = "{i} - {i} mod {size}", lambda i, s: i - i % s
    ONE = "{size}", lambda i, s: np.full(len(i), min(s, len(i) - 1))
    NOWHERE = "{i} is {nothing}", lambda i, s: np.full(len(i), -1)
    """A scale of one; a bias or an output of zero."""


_LETTERS = {"row": "m", "column": "n", "block": "g"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Misplaced:
    """Scales, biases or outputs that stand in the place of others."""

    of: Places
    taken: Taken
    size: int = 0
    start: int = 0  # the first place that is wrong

    def __str__(self) -> str:
        """`scale_a of row m - 64, for m >= 64`."""
        i = _LETTERS[self.of.value.split()[-1]]
        nothing = "zero" if self.of.is_output or self.of is Places.BIAS else "one"
        sign, size = "-" if self.size > 0 else "+", abs(self.size)
        taken = self.taken.value[0].format(i=i, sign=sign, size=size, nothing=nothing)
        return f"{self.of.value} {taken}" + (f", for {i} >= {self.start}" if self.start else "")

    @property
    def sentence(self) -> str:
        """The words that follow "it": `gives row m the scale_a of row m - 64, for m >= 64`."""
        noun, unit = self.of.value.split(" of ")
        name, *start = str(self).removeprefix(f"{self.of.value} ").split(", ")
        i = _LETTERS[unit]
        match self.taken:
            case Taken.NOWHERE:
                clause = f"leaves {unit}s of the output zero" if self.of.is_output else f"ignores the {noun} of {unit}s"
            case Taken.SWAPPED:
                clause = f"exchanges the {noun} of {unit}s {i} and {name}"
            case Taken.FIRST_OF_TILE:
                clause = f"uses the {noun} of a tile's first {unit} for all {self.size} of it"
            case _:
                clause = f"gives {unit} {i} the {noun} of {unit} {name.replace(' round about', ', wrapping around')}"
        return ", ".join([clause, *start])

    def places(self, n: int) -> np.ndarray:
        """The place that stands for each of n, -1 for none."""
        i = np.arange(n)
        return np.where(i < self.start, i, self.taken.value[1](i, self.size))
