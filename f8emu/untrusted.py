"""What comes from outside: files that may be pipes, devices or endless, and text that a terminal would obey."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path, *, follows_links: bool = True) -> BufferedReader:
    """A regular file, to read: a pipe is not waited for, a device not read without end.

    Raises:
        OSError: missing or not readable; a directory, a pipe, a device; a link where none is followed.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follows_links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, most: int) -> bytes:
    """A whole regular file of at most `most` bytes.

    Raises:
        OSError: as `open_regular`, or a larger file, of which nothing is read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"expected a file of at most {most} bytes; found {size}", str(path))
        return file.read(most)


def printable(text: str) -> str:
    """The text with what a terminal would obey escaped, as in a string of Python."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
