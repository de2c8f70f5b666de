"""f8emu: float8 training recipes, with the bits of a Hopper GPU on any machine.

Importing `f8emu` gives the recipe spec and loads neither numpy, torch nor jax. The backends are `f8emu.torch`,
`f8emu.jax` and `f8emu.numpy`.
"""

from f8emu.spec import BLOCKWISE as BLOCKWISE
from f8emu.spec import BLOCKWISE_UE8M0 as BLOCKWISE_UE8M0
from f8emu.spec import DELAYED as DELAYED
from f8emu.spec import E4M3FN as E4M3FN
from f8emu.spec import E5M2 as E5M2
from f8emu.spec import E8M0FNU as E8M0FNU
from f8emu.spec import RECIPES as RECIPES
from f8emu.spec import ROWWISE as ROWWISE
from f8emu.spec import ROWWISE_FAST as ROWWISE_FAST
from f8emu.spec import ROWWISE_WITH_GW_HP as ROWWISE_WITH_GW_HP
from f8emu.spec import TENSORWISE as TENSORWISE
from f8emu.spec import Cast as Cast
from f8emu.spec import CastFrom as CastFrom
from f8emu.spec import DelayedScaling as DelayedScaling
from f8emu.spec import F8Error as F8Error
from f8emu.spec import Format as Format
from f8emu.spec import Gemm as Gemm
from f8emu.spec import Granularity as Granularity
from f8emu.spec import Overflow as Overflow
from f8emu.spec import Recipe as Recipe
from f8emu.spec import ScaleRule as ScaleRule
from f8emu.spec import recipe_by_name as recipe_by_name
from f8emu.spec import recipe_from_json as recipe_from_json
from f8emu.spec import recipe_from_toml as recipe_from_toml
from f8emu.spec.exports import public as _public

__version__ = "0.2.0.dev0"
_ROOMS = "audit capture conformance dialects doctor interop jax numpy report rollout spec testing torch".split()
__all__, __dir__ = _public(__name__, rooms=_ROOMS)
