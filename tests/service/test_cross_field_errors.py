"""A rule on several fields of a run names one: as `place` and `param` of the APIs, and as an option."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from service.apis.errors import validation_problem
from service.cli.commands.submit import validated_request
from service.cli.render import Stop
from service.cli.run_options import option_at, options_of
from shared.field_rules import location_of
from shared.runs.requests import Run

MODELS: tuple[type[BaseModel], ...] = tuple(model for model in get_args(get_args(Run)[0]))
BASE: dict[str, Any] = {"model": "m", "dataset": {"uri": "u"}, "epochs": 1, "batch_size": 1}
BROKEN = [
    ("sft", {"epochs": None}, "epochs"),
    ("sft", {"steps": 3}, "epochs"),
    ("sft", {"num_samples": 3}, "num_samples"),
    ("sft", {"initial_adapter": "a", "trainable": {"kind": "full"}}, "initial_adapter"),
    ("sft", {"engine": "fsdp", "layout": {"pp": 2}}, "engine"),
    ("dpo", {"objective": "ipo", "label_smoothing": 0.1}, "label_smoothing"),
    ("distill", {"teacher": "base", "tokens": "all", "top_k": 3}, "top_k"),
    ("reward", {"per_turn": True}, "per_turn"),
]


def rules_of(model: type[BaseModel]) -> Iterator[str]:
    """The words with which the model's own validators refuse; `{}` stands for what is put in."""
    for validator in model.__pydantic_decorators__.model_validators.values():
        source = textwrap.dedent(inspect.getsource(getattr(validator.func, "__func__", validator.func)))
        for node in ast.walk(ast.parse(source)):
            if (
                isinstance(node, ast.Raise)
                and isinstance(node.exc, ast.Call)
                and not isinstance(node.exc.args[0], ast.Name)
            ):
                [words] = node.exc.args
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts(words))


def parts(words: ast.expr) -> list[ast.expr]:
    return words.values if isinstance(words, ast.JoinedStr) else [words]


@pytest.mark.parametrize("model", MODELS)
def test_every_rule_on_several_fields_says_one(model: type[BaseModel]) -> None:
    for rule in rules_of(model):
        place = location_of({"loc": (), "type": "value_error", "msg": rule}, model.model_fields.keys())
        if place != ("",):
            field = next(iter(place))
            assert field in model.model_fields, rule
        else:
            assert rule.startswith("{} would be ignored"), rule  # by the field's name


@pytest.mark.parametrize(("kind", "fields", "place"), BROKEN)
def test_errors_of_several_fields_name_one_in_the_api_and_on_the_command_line(
    kind: str, fields: dict[str, Any], place: str
) -> None:
    model = next(each for each in MODELS if each.model_fields["kind"].default == kind)
    with pytest.raises(ValidationError) as refused:
        model.model_validate(BASE | fields)
    assert validation_problem(refused.value.errors()).place == place
    with pytest.raises(Stop) as stopped:
        validated_request(model, BASE | fields, options_of(model))
    option = option_at(options_of(model), (place,))
    assert option is not None and str(stopped.value).startswith(f"--{option.flag}: ")
