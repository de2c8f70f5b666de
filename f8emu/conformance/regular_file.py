"""Files of anybody are opened as files: a pipe is not waited for, a device not read without end."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path, *, follows_links: bool = True) -> BufferedReader:
    """A regular file, to read.

    Raises:
        OSError: missing or not readable; a directory, a pipe, a device; a link where none is followed.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follows_links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")
