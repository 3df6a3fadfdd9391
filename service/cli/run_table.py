"""Print docs/runs.md: the fields of a run, its options and its defaults, from the run models.

`python -m service.cli.run_table > docs/runs.md` after a change of shared/runs/requests.py; a test compares them.
"""

from typing import Any, Literal, get_args, get_origin

from service.cli.run_options import UNLESS, RunOption, options_of, run_model

_HEAD = """# The fields of a run

A run is a JSON object: the body of `POST /api/v1/runs/sft`, `/dpo`, `/distill`, `/reward` or `/rl` ([api.md](api.md)),
and the options of `longshore submit` ([cli.md](cli.md)). A dot leads into an object: `layout.tp` means
`{"layout": {"tp": 2}}`. On the command line a dataset is a URI. In JSON it is an object with `uri`, `format`,
`prompt_field`, `completion_field`, `assistant_turns` and `assistant_pattern`. `trainable` has a `kind`, `lora` or
`full`. `python -m service.cli.run_table` prints this page.

`dtype` is chosen once, when a run is accepted, and kept on every host that trains it. `auto` is `bfloat16` if the GPU
hosts compute it fast, else `float32` ([how](hosts.md#precision)). The field `precision` of a run and of an estimate has
the choice and the reason. A run that sets `dtype` gets that dtype. If the other one would be faster on these hosts, the
run carries a notice saying so.

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
