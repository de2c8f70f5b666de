"""The table of client libraries: what each ran with converted models, under which recipes, and what happened."""

from collections.abc import Callable

from results_records import Entry, record, source, table

_RECORD = "clients-cpu"


def clients() -> str:
    """A row for each library."""
    rows = [
        [
            f"{row['package']} {row['version']}",
            "<br>".join(_what(row)),
            ", ".join(dict.fromkeys(run["recipe"] for run in row["runs"])),
            _resumes(row),
            _remark(row),
        ]
        for row in record(_RECORD)["clients"]
    ]
    columns = ["library", "what ran (layers, steps)", "recipes", "resumes", "remarks"]
    return f"{table(columns, rows)}\n\n{source(_RECORD, ('python', 'torch', 'jax'))}"


def _what(row: Entry) -> list[str]:
    """A line for each kind of run, and one for each failure."""
    good = {run["run"]: f"{run['run']} ({run['layers']}, {run['steps']})" for run in row["runs"] if "error" not in run}
    return [
        *good.values(),
        *(f"{run['run']}, {run['recipe']}: **{run['error']}**" for run in row["runs"] if "error" in run),
    ]


def _resumes(row: Entry) -> str:
    return "equal bits" if any(run.get("resumes") for run in row["runs"]) else ""


def _remark(row: Entry) -> str:
    """With the versions of what else took part, where they are not those of the whole record."""
    held = record(_RECORD)["versions"]
    needs = [f"{package} {found}" for package, found in row["needs"].items() if held.get(package) != found]
    return " ".join(filter(None, (row["remark"], f"With {', '.join(needs)}." if needs else "")))


BLOCKS: dict[str, Callable[[], str]] = {"clients": clients}
