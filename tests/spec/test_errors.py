"""The kinds of errors: what a caller may catch them as, and the text of a missing extra."""

import pytest

from f8emu.spec import F8Error, GoldenFileError, MissingExtraError, OperandError, SpecError, UnsupportedError


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (SpecError, ValueError),
        (OperandError, ValueError),
        (UnsupportedError, NotImplementedError),
        (GoldenFileError, ValueError),
        (MissingExtraError, ImportError),
    ],
)
def test_error_is_also_its_builtin_kind(kind: type[F8Error], builtin: type[Exception]) -> None:
    assert kind.__mro__[1:3] == (F8Error, builtin)


def test_missing_extra_names_the_remedy() -> None:
    assert str(MissingExtraError("f8emu.torch.scaled_mm", "jax", "jax")) == (
        "f8emu.torch.scaled_mm needs the package 'jax', which is not installed; "
        "install it with: pip install 'f8emu[jax]'"
    )
