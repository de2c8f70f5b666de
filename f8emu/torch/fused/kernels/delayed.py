"""The Triton kernel of the update of delayed scaling: all layers of a model at once.

Compiled code may not take views of one storage that it writes to, so a layer's tensors are allocated one by one. A
table has their addresses, eight a layer, those of `delayed.STATE`.

Exactness: the bits of `delayed.update_delayed` in plain torch, for the reasons in `scales`.
"""

# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false
# (Triton is optional, and its branches are decided at compile time.)
import triton
import triton.language as tl

from f8emu.torch.fused.kernels.scales import inv_scale_of


@triton.jit
def update_delayed_kernel(
    taken,
    table,
    report,
    length,
    QUOTIENT_0: tl.constexpr,
    QUOTIENT_1: tl.constexpr,
    QUOTIENT_2: tl.constexpr,
    AT_FLOOR_0: tl.constexpr,
    AT_FLOOR_1: tl.constexpr,
    AT_FLOOR_2: tl.constexpr,
    IS_CAST_0: tl.constexpr,
    IS_CAST_1: tl.constexpr,
    IS_CAST_2: tl.constexpr,
    FLOOR: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    MOST_RECENT: tl.constexpr,
    UNCALLED: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """`delayed.update_delayed` of one tensor of one layer."""
    item = tl.program_id(0)
    tensor = item % 3
    state = table + item // 3 * 8
    # 1. Whether any tensor of the layer was cast.
    three = taken + (item - tensor)
    is_step = (tl.load(three) >= 0) | (tl.load(three + 1) >= 0) | (tl.load(three + 2) >= 0)
    # 2. This amax.
    bits = tl.load(taken + item)
    is_finite = bits < 0x7F800000
    is_usable = (bits > 0) & is_finite
    newest = tl.where(is_usable, bits, 0)
    # 3. Shift the history by one, of a tensor that was cast.
    history = tl.load(state).to(tl.pointer_type(tl.int32)) + tensor * length
    at = tl.arange(0, BLOCK_H)
    old = tl.load(history + at - 1, mask=(at > 0) & (at < length), other=0)
    new = tl.where(at == 0, newest, old)
    tl.debug_barrier()  # every thread has read before one writes
    tl.store(history + at, new, mask=(at < length) & (bits >= 0))
    reference = newest if MOST_RECENT else tl.max(new, 0)
    # 4. The inv_scale and the amax of the next pass.
    inv = inv_scale_of(reference, QUOTIENT_0, FLOOR, AT_FLOOR_0, POWER_OF_TWO)
    inv_1 = inv_scale_of(reference, QUOTIENT_1, FLOOR, AT_FLOOR_1, POWER_OF_TWO)
    inv_2 = inv_scale_of(reference, QUOTIENT_2, FLOOR, AT_FLOOR_2, POWER_OF_TWO)
    inv = tl.where(tensor == 0, inv, tl.where(tensor == 1, inv_1, inv_2))
    inv_scale = tl.load(state + 2 + tensor).to(tl.pointer_type(tl.float32))
    inv = tl.where(is_usable, inv, tl.load(inv_scale))
    tl.store(inv_scale, inv)
    amax = tl.load(state + 5 + tensor).to(tl.pointer_type(tl.float32))
    tl.store(amax, tl.zeros_like(inv) + UNCALLED)
    # 5. The counts of amaxes that were not usable.
    counts = tl.load(state + 1).to(tl.pointer_type(tl.int64)) + tensor
    is_cast = tl.where(tensor == 0, IS_CAST_0, tl.where(tensor == 1, IS_CAST_1, IS_CAST_2)) & is_step
    not_finite = tl.load(counts + 6) + ((bits >= 0x7F800000) & is_cast).to(tl.int64)
    tl.store(counts, tl.load(counts) + ((bits == 0) & is_cast).to(tl.int64))
    tl.store(counts + 3, tl.load(counts + 3) + ((bits < 0) & is_cast).to(tl.int64))
    tl.store(counts + 6, not_finite)
    tl.store(report + item, 2 * not_finite.to(tl.int32) + (inv > 0).to(tl.int32))
