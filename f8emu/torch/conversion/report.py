"""The report of a conversion: what it does with each layer and why, and which weights it does not consider."""

from dataclasses import dataclass
from enum import Enum

from f8emu.spec.recipe import Recipe


class Outcome(Enum):
    """What a conversion does with a layer."""

    CONVERTED = "converted"
    FILTER = "filter"
    """Left alone: the filter excludes it."""
    SIZE = "size"
    """in_features or out_features is not a multiple of 16 and `pad` is off: the conversion raises an error."""
    ADAPTER = "adapter"
    """Left alone: a low-rank layer (LoRA) whose rank is not a multiple of 16, and `pad` is off."""
    TYPE = "type"
    """Left alone: a subclass of nn.Linear, a replaced `forward`, or a weight not in float32, bfloat16 or float16."""
    SHARDED = "sharded"
    """Its weight is a DTensor, or flattened by FSDP: the conversion raises an error."""
    ALREADY = "already"
    """Left alone: it is a Float8Linear already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionEntry:
    """One linear layer of the model."""

    fqn: str
    shape: tuple[int, int]
    """(out_features, in_features)."""
    outcome: Outcome
    reason: str = ""
    """Why it is not converted, if the outcome alone does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherWeight:
    """A parameter of two or more dimensions outside of linear layers, which a conversion does not consider."""

    fqn: str
    shape: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """What a conversion does to every linear layer, in the order of `named_modules`."""

    recipe: Recipe
    entries: tuple[ConversionEntry, ...]
    others: tuple[OtherWeight, ...] = ()
    notes: tuple[str, ...] = ()
    """Modules that bypass their converted layers."""
    parameters: int = 0
    """The number of parameters of the model, each counted once."""
    covered: int = 0
    """How many of these parameters are weights of layers that are converted, or were before."""

    @property
    def share(self) -> float:
        """The share of the parameters that float8 GEMMs multiply."""
        return self.covered / max(self.parameters, 1)

    def names(self, outcome: Outcome) -> tuple[str, ...]:
        """The names of the layers with this outcome."""
        return tuple(entry.fqn for entry in self.entries if entry.outcome is outcome)

    @property
    def summary(self) -> str:
        """One line: the recipe, and how many layers have each outcome."""
        counts = ((outcome, len(self.names(outcome))) for outcome in Outcome)
        found = ", ".join(f"{count} {outcome.value}" for outcome, count in counts if count)
        return f"recipe {self.recipe.label}: {found or 'no linear layer'}"

    def __str__(self) -> str:
        share = f"float8 GEMMs multiply {self.share:.1%} of {self.parameters} parameters"
        lines = [f"{self.summary}; {share}"]
        lines += _rows([(e.fqn, e.shape, _because(e.outcome.value, e.reason)) for e in self.entries])
        if self.others:
            lines += ["not looked at:", *_rows([(other.fqn, other.shape, other.reason) for other in self.others])]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _because(outcome: str, reason: str) -> str:
    return f"{outcome}: {reason}" if reason else outcome


def _rows(rows: list[tuple[str, tuple[int, ...], str]]) -> list[str]:
    width = max((len(fqn) for fqn, _, _ in rows), default=0)
    return [f"  {fqn:<{width}}  {list(shape)!s:<14}  {text}" for fqn, shape, text in rows]
