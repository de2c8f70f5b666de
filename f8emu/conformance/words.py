"""Words of messages: numbers of things, and what an exception says."""


def counted(count: int, one: str, many: str = "") -> str:
    """`1 case differs`, `2 cases differ`; without `many` the plural is `one` and an s."""
    return f"{count} {one if count == 1 else many or f'{one}s'}"


def text_of(error: BaseException) -> str:
    """`str(error)`, or nothing: the text of a foreign exception may raise."""
    try:
        return str(error).strip()
    except Exception:  # whatever it raises, the error itself is still told
        return ""


def said_by(error: BaseException, longest: int = 400) -> str:
    """`ValueError: the first line of its text`, or the type alone where it has none."""
    lines = text_of(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:longest]}" if lines else type(error).__name__
