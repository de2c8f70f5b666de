"""Runs the clients that are installed, and records what happened.

    python -m tests.clients                       # all that are installed
    python -m tests.clients trl timm --json FILE  # these; rows of others stay in FILE as they are

Every script of this folder is named as the library that it imports. Each library gets a process of its own, because
libraries change torch. Exit status 1 if a library fails.
"""

import argparse
import json
import sys
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from benchmarks.runner import write_json
from f8emu.environment import versions
from tests.clients.clients import CLIENTS, errors_of, is_installed, run_apart, run_here


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"one of {', '.join(CLIENTS)}")
    parser.add_argument("--json", type=Path, help="where to record")
    parser.add_argument("--verbose", action="store_true", help="what the libraries say, and tracebacks")
    parser.add_argument("--here", action="store_true", help="one client, in this process: the row alone, as JSON")
    arguments = parser.parse_args(words)
    if unknown := set(arguments.clients) - set(CLIENTS):
        parser.error(f"no script for {', '.join(sorted(unknown))}")
    if arguments.here:
        row = run_here(arguments.clients[0])
        print(json.dumps(row))
        return 0
    rows = {}
    if arguments.json and arguments.json.exists():
        rows = {row["client"]: row for row in json.loads(arguments.json.read_text())["clients"]}
    failed = False
    for client in arguments.clients or filter(is_installed, CLIENTS):
        try:
            rows[client] = row = run_apart(client, shows_all=arguments.verbose)
        except (RuntimeError, TimeoutExpired) as error:  # of its process
            print(error, flush=True)
            failed = True
            continue
        errors = errors_of(row)
        verdict = "\n  ".join(["fails", *errors]) if errors else "works"
        print(f"{row['package']} {row['version']}: {verdict} ({row['seconds']} s)", flush=True)
        failed |= bool(errors)
        if arguments.json:
            write(arguments.json, rows)
    return int(failed)


def write(path: Path, rows: dict[str, Any]) -> None:
    report = {"command": "python -m tests.clients", "device": "cpu, 1 thread", "versions": versions()}
    write_json(path, {**report, "clients": [rows[client] for client in sorted(rows, key=str.lower)]})


if __name__ == "__main__":
    sys.exit(main())
