# pyright: reportUnnecessaryTypeIgnoreComment=error
"""Wrong names -> a call with each, on which pyright reports one error.

It says nothing of a line whose error is ignored, and reports a line that has none to ignore: a wrong name that passes
fails `make types`. `test_names` calls each and sees that it is refused at run time too.
"""

from collections.abc import Callable

from torch import nn, ones

import f8emu.jax as f8jax
import f8emu.numpy as f8np
import f8emu.torch as f8
from f8emu.conformance import load_subject, verify
from f8emu.dialects import quantize
from f8emu.testing import check_cast

WRONG: dict[str, Callable[[], object]] = {
    "rowize": lambda: f8.convert_to_float8_training(nn.Linear(16, 16), config="rowize"),  # pyright: ignore[reportArgumentType]
    "hardwear": lambda: f8.convert_to_float8_training(nn.Linear(16, 16), engine="hardwear"),  # pyright: ignore[reportArgumentType]
    "float8_e4m3": lambda: f8.scale_from_amax(ones(()), "float8_e4m3"),  # pyright: ignore[reportArgumentType]
    "sqrn": lambda: f8.inspect(nn.Linear(16, 16), {"statistics": ["amax", "sqrn"]}),  # pyright: ignore[reportArgumentType]
    "H10": lambda: f8np.mm([[1.0]], [[1.0]], chip="H10"),  # pyright: ignore[reportArgumentType]
    "outputs": lambda: f8np.linear("tensorwise", [[1.0]], [[1.0]], split_k={"outputs": 1}),  # pyright: ignore[reportArgumentType]
    "add": lambda: f8jax.dot_general("rowwise", sharded_k="add"),  # pyright: ignore[reportArgumentType]
    "vllm_tokens": lambda: quantize(ones(1, 1), "vllm_tokens"),  # pyright: ignore[reportArgumentType]
    "golde": lambda: verify([load_subject("f8ref.numpy")], stages=["golde"]),  # pyright: ignore[reportArgumentType]
    "saturates": lambda: check_cast(abs, overflow="saturates"),  # pyright: ignore[reportArgumentType]
}
