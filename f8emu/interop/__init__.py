"""Conversion between torch, JAX and numpy: arrays, scaled tensors, parameter trees, delayed scaling.

No bit changes on the way. Every function copies by default; `copy` changes that, as in the array API standard.
torch and numpy can write to shared memory, while JAX takes its arrays for immutable.

Importing this package loads no array library; each function imports the ones that it needs.
"""

from f8emu.interop.arrays import to_jax as to_jax
from f8emu.interop.arrays import to_numpy as to_numpy
from f8emu.interop.arrays import to_torch as to_torch
from f8emu.interop.delayed import delayed_state_dict_from_float8_states as delayed_state_dict_from_float8_states
from f8emu.interop.delayed import float8_states_from_delayed_state_dict as float8_states_from_delayed_state_dict
from f8emu.interop.frameworks import jax_device as jax_device
from f8emu.interop.frameworks import require_jax as require_jax
from f8emu.interop.frameworks import require_torch as require_torch
from f8emu.interop.parameters import DEFAULT_RULES as DEFAULT_RULES
from f8emu.interop.parameters import ParameterRule as ParameterRule
from f8emu.interop.parameters import params_from_state_dict as params_from_state_dict
from f8emu.interop.parameters import state_dict_from_params as state_dict_from_params
from f8emu.spec.exports import public as _public

__all__, __dir__ = _public(__name__)
