"""qwix: a provider that puts a model's linear layers under a recipe, without a change of the model's code.

rules = [Float8Rule(module_path=r"layers_.*", recipe="rowwise")]
model = qwix.quantize_model(model, Float8Provider(rules))
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from f8emu.jax.layer.dot_general import DotGeneral, dot_general
from f8emu.spec.errors import SpecError, required_by
from f8emu.spec.exports import public
from f8emu.spec.names import EngineName, RecipeName
from f8emu.spec.recipe import Recipe

with required_by("f8emu.jax.hosts.qwix"):
    from qwix import QuantizationProvider, QuantizationRule

_OP = "dot_general"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8Rule(QuantizationRule):
    """A recipe for the modules that match `module_path`; of the other fields of qwix's rule, `op_names` counts too."""

    recipe: Recipe | RecipeName | None = None
    """None leaves the modules in high precision. Delayed scaling is refused: qwix has no place for its state."""
    engine: EngineName = "auto"


class Float8Provider(QuantizationProvider):
    """Puts `f8emu.jax.dot_general` in the place of `jax.lax.dot_general` in the layers of flax.

    The left operand is the input, the right one the weight. Sums by `jnp.einsum`, such as those of attention, stay as
    they are. The first rule that matches a module holds, as in qwix; `get_unused_rules()` returns those that match
    none.

    Raises:
        SpecError: a rule that is not a `Float8Rule`, an unknown recipe, or a recipe with delayed scaling.
    """

    def _init_rule(self, rule: QuantizationRule) -> QuantizationRule:
        if not isinstance(rule, Float8Rule):
            raise SpecError(
                f"Float8Provider: rules must be Float8Rule; got {type(rule).__name__}, whose types qwix quantizes by "
                "itself; use Float8Rule(module_path=..., recipe=...)"
            )
        _function(rule)
        return super()._init_rule(rule)

    def get_intercept_map(self) -> dict[str, Callable[..., Any]]:
        return super().get_intercept_map() | {"jax.lax.dot_general": self.dot_general}

    def dot_general(self, lhs: Any, rhs: Any, *args: Any, **options: Any) -> jax.Array:
        """`jax.lax.dot_general` under the rule of the module that calls it."""
        rule, _ = self._get_current_rule_and_op_id(_OP)
        function = _function(rule) if isinstance(rule, Float8Rule) else None
        return (jax.lax.dot_general if function is None else function)(lhs, rhs, *args, **options)


def _function(rule: Float8Rule) -> DotGeneral | None:
    return None if rule.recipe is None else dot_general(rule.recipe, engine=rule.engine)


__all__, __dir__ = public(__name__)
