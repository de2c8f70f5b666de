"""`python -m f8emu`, the same as `f8emu`."""

from f8emu.cli import main

if __name__ == "__main__":
    main()
