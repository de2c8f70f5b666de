"""Float8 dialects: the quantizers of other stacks, byte for byte.

A `Dialect` is data: how a stack computes the scale of a block and its codes, what it stores, in which version that was
read, and whether the package itself was compared with it. `DIALECTS` has them by name, `STACK_WHAT`.
"""

from f8emu.dialects.names import DialectName as DialectName
from f8emu.dialects.quantize import Quantized as Quantized
from f8emu.dialects.quantize import dequantize as dequantize
from f8emu.dialects.quantize import quantize as quantize
from f8emu.dialects.quantize import zero_block_scale as zero_block_scale
from f8emu.dialects.recipes import serving_recipe as serving_recipe
from f8emu.dialects.rules import CodeForm as CodeForm
from f8emu.dialects.rules import Dialect as Dialect
from f8emu.dialects.rules import ScaleForm as ScaleForm
from f8emu.dialects.rules import Stored as Stored
from f8emu.dialects.stacks import DIALECTS as DIALECTS
from f8emu.dialects.stacks import dialect_by_name as dialect_by_name
from f8emu.spec.exports import public as _public

__all__, __dir__ = _public(__name__)
