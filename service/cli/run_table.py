"""Print docs/runs.md: the fields of a run, its options and its defaults, from the run models.

`python -m service.cli.run_table > docs/runs.md` after a change of shared/runs/requests.py; a test compares them.
"""

from typing import Any, Literal, get_args, get_origin

from service.cli.run_options import UNLESS, RunOption, options_of, run_model

_HEAD = """# The fields of a run

A run is a JSON object: the body of `POST /api/v1/runs/sft`, `/dpo`, `/distill`, `/reward` or `/rl` ([api.md](api.md)),
and the options of `longshore submit` ([cli.md](cli.md)). A dot leads into an object: `layout.tp` is
`{"layout": {"tp": 2}}`. A dataset is a URI on the command line, and an object in JSON: `uri`, `format`,
`prompt_field`, `completion_field`, `assistant_turns`, `assistant_pattern`. `trainable` has a `kind`, `lora` or `full`.
This page is printed by `python -m service.cli.run_table`.

`dtype` is chosen once, where a run is accepted, and kept whatever host trains it: `auto` is `bfloat16` where that is
fast on the GPU hosts, else `float32` ([how](hosts.md#precision)). The run's `precision`, and an estimate's, says
which and why. Who names one has it; where the other is fast, the run has a notice.

| field | option | runs | type | default | meaning |
|---|---|---|---|---|---|
"""


def table() -> str:
    """The whole page. A field that is the same in several kinds of runs is one row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for kind in ("sft", "dpo", "distill", "reward", "rl"):
        for option in options_of(run_model(kind)):
            rows.setdefault(_cells(option), []).append(kind)
    lines = []
    for (field, flag, *cells), kinds in rows.items():
        lines.append("| " + " | ".join([field, flag, ", ".join(kinds), *cells]) + " |\n")
    return _HEAD + "".join(lines)


def _cells(option: RunOption) -> tuple[str, ...]:
    field = f"{option.field}.kind" if option.form == "variant" else option.field
    meaning = option.help.replace("|", "\\|")
    return f"`{field}`", f"`--{option.flag}`", _type(option), _default(option), meaning


def _type(option: RunOption) -> str:
    match option.form:
        case "value" | "reading" if get_origin(option.parsed_as) is Literal:
            words = " \\| ".join(f"`{choice}`" for choice in get_args(option.parsed_as))
        case "names" | "value" | "reading":
            names: dict[Any, str] = {
                str: "text",
                int: "integer",
                float: "number",
                bool: "boolean",
                list[int]: "list of integers",
                list[float]: "list of numbers",
            }
            words = "list of text" if option.form == "names" else names.get(option.parsed_as, "list of text")
        case "variant":
            words = f"`{option.kind}`"
        case "source":
            words = "dataset"
        case _:
            words = "object"
    return f"{words}, {option.bounds}" if option.bounds else words


def _default(option: RunOption) -> str:
    if option.is_required:
        return "required"
    if option.field in UNLESS and option.default is None:
        value, other = UNLESS[option.field]
        return f"{value:g} on the command line, without `{other}`"
    if option.form in ("layout", "variant") or option.default is None:
        return ""
    return f"`{option.default}`" if option.parsed_as is not bool else str(option.default).lower()


if __name__ == "__main__":
    print(table(), end="")
