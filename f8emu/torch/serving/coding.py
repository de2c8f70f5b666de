"""Weights as a server takes them: the codes and scales that the layers multiply, or those of a dialect."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from f8emu import dialects
from f8emu.spec.errors import OperandError, SpecError, UnsupportedError
from f8emu.spec.recipe import Recipe
from f8emu.spec.scaling import BLOCK, Granularity
from f8emu.torch.casts.operand import cast_matrix, weight_to_cast
from f8emu.torch.serving.formats import CHECKPOINT_FORMATS, scale_name

_SQUARE, _TENSOR = Granularity.BLOCKWISE_128X128.block, Granularity.TENSORWISE.block


def format_or_dialect(call: str, name: str) -> str | dialects.Dialect:
    """A format of checkpoints, or the dialect of this name."""
    if name in CHECKPOINT_FORMATS:
        return name
    if name in dialects.DIALECTS:
        return dialects.dialect_by_name(name)
    known = ", ".join((*CHECKPOINT_FORMATS, *(dialect for dialect in dialects.DIALECTS if "_weight_" in dialect)))
    raise SpecError(f"{call}: to must be a format or a dialect that casts weights, such as {known}; got {name!r}")


class WeightCoder:
    """Casts weights for a format of checkpoints, as the layers do, or for a dialect, as its stack does.

    `shapes` are those of the weights that become codes, [N, K] or of experts [E, N, K].
    """

    def __init__(
        self, call: str, to: str | dialects.Dialect, recipe: Recipe, shapes: Mapping[str, Sequence[int]], remedy: str
    ) -> None:
        self.coded, self._recipe, self._plan = shapes, recipe, recipe.cast_plans.weight.rows
        self.block, self._dialect = recipe.output.b.granularity.block, None
        self.scale_name = scale_name(call, to, recipe) if isinstance(to, str) else self._by_dialect(call, to)
        uneven = [f"{name} {list(s)}" for name, s in shapes.items() if any(size % BLOCK for size in s[-2:])]
        if uneven and self.block == _SQUARE:
            raise OperandError(
                f"{call}: with 128x128 scales N and K must be multiples of 128, since readers cut a matrix into equal "
                f"blocks; got {', '.join(uneven)}; leave them in high precision: {remedy}"
            )

    def _by_dialect(self, call: str, dialect: dialects.Dialect) -> str:
        names, blocks = dialect.stored.names, dialect.blocks
        if dialect.scale is None or dialect.stored.layout or not (names and names[0].startswith("weight_scale")):
            raise UnsupportedError(
                f"{call}: {dialect.name} casts no weights of a checkpoint, or stores them in a layout of its own; "
                "choose one with a weight_scale, such as vllm_weight_block, vllm_weight_channel or vllm_weight_tensor"
            )
        # Our own cast, where the model is, if it gives the dialect's bytes: its format, and blocks that it has.
        is_alike, self.block = self.block in blocks, self.block if self.block in blocks else blocks[0]
        self._dialect = dialect
        if is_alike and self._plan.format == dialect.code.format and self._recipe.delayed is None:
            try:
                self._plan, self._dialect = self._plan._replace(rule=dialect.scale_rule), None
            except UnsupportedError:
                pass  # it is computed by its own arithmetic, on the host
        return names[0]

    def cast(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, and the scales as a checkpoint has them: [ceil(N / 128), ceil(K / 128)], [N, 1] or [1]."""
        value = weight_to_cast(value.contiguous(), self._recipe)
        if self._dialect is None:
            operand, _ = cast_matrix(value, self._plan)
            assert operand is not None and operand.scale is not None, "a float8 operand was requested"
            codes, scale = operand.codes, operand.scale
        else:
            codes, scale = dialects.quantize(value, self._dialect, block=self.block)
        return codes, scale.reshape(1) if self.block == _TENSOR else scale

    def of(self, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A tensor as it is, or the codes and scales of a weight."""
        if name not in self.coded:
            yield name, value
            return
        codes, scale = self.cast(value)
        yield name, codes
        yield self.of_scale(name), scale

    def of_scale(self, name: str) -> str:
        """The name of the scales of `MODULE.weight`."""
        return f"{name.removesuffix('weight')}{self.scale_name}"
