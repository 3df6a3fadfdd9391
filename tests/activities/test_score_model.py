"""A scoring model behind a real HTTP server on loopback: what is asked, what is believed, what is retried."""

import json
from typing import Any

import pytest

from activities.grading.open_grader import NotGraded, ScoreModel, score_in
from longshore.grading import SampledItem, ScoreModelGrader
from shared.errors import InvalidInput, StoreUnavailable
from shared.settings import GradingSettings
from tests.activities.scoring_server import Judge, completion, scoring_server

judge = pytest.fixture(scoring_server)


def grader(**fields: Any) -> ScoreModelGrader:
    message = {"role": "user", "content": "{{ item.question }}: {{ sample.output_text }}"}
    defaults = {"name": "judge", "model": "m", "input": [message], "range": [0, 100]}
    return ScoreModelGrader.model_validate(defaults | fields)


def rows(*texts: str) -> list[SampledItem]:
    return [SampledItem(sample={"output_text": text}, item={"question": "q"}) for text in texts]


def settings(judge: Judge, **fields: Any) -> GradingSettings:
    return GradingSettings.model_validate({"score_model_url": judge.url, "score_model_timeout_s": 5} | fields)


def test_each_sample_is_asked_for_once_and_answers_keep_their_order(judge: Judge) -> None:
    texts = ["x" * n for n in range(40)]
    asked = ScoreModel(grader(sampling_params={"seed": 3, "max_completions_tokens": 9}), settings(judge), False)
    outcomes = asked.grade_all(rows(*texts))
    assert [outcome.grade for outcome in outcomes] == [len(text) + 3 for text in texts]
    assert sorted(body["messages"][-1]["content"] for _, _, body in judge.asked) == sorted(f"q: {t}" for t in texts)
    path, _, body = judge.asked[0]
    assert path == "/v1/chat/completions" and body["model"] == "m"
    assert body["seed"] == 3 and body["max_completion_tokens"] == 9 and "temperature" not in body
    assert body["messages"][0]["role"] == "system" and "from 0 to 100" in body["messages"][0]["content"]


def test_the_key_goes_to_the_installations_own_judge_alone(judge: Judge) -> None:
    keyed = settings(judge, score_model_key="secret")
    ScoreModel(grader(), keyed, False).grade_all(rows("a"))
    assert judge.asked[-1][1]["Authorization"] == "Bearer secret"
    elsewhere = keyed.model_copy(update={"score_model_url": "http://127.0.0.1:1/v1"})
    ScoreModel(grader(base_url=judge.url), elsewhere, True).grade_all(rows("a"))
    assert "Authorization" not in judge.asked[-1][1]


def test_a_users_server_may_not_be_in_our_network(judge: Judge) -> None:
    with pytest.raises(InvalidInput, match="this host is on a private network"):
        ScoreModel(grader(base_url=judge.url), GradingSettings(), False).grade_all(rows("a"))
    assert judge.asked == []
    for url, message in [("file:///etc/passwd", "only http"), ("http://u:p@host/v1", "may not carry a user")]:
        with pytest.raises(InvalidInput, match=message):
            ScoreModel(grader(base_url=url), GradingSettings(), True)
    with pytest.raises(InvalidInput, match=r"grading\.score_model_url"):
        ScoreModel(grader(), GradingSettings(), True)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"reasoning": "good", "result": 7}', 7),
        ('```json\n{"result": 0.5}\n```', 0.5),
        (" 3.25 ", 3.25),
        ('{"result": 10}', 10),
    ],
)
def test_scores(text: str, score: float) -> None:
    assert score_in(json.loads(completion(text)), (0, 10)) == score


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("I would say 7.", "gave no score but 'I would say 7.'"),
        ('{"score": 7}', "gave no score"),
        ('{"result": "7"}', "gave no score"),
        ('{"result": true}', "gave no score"),
        ('{"result": NaN}', "gave nan, outside its range 0 to 10"),
        ('{"result": 10.5}', "gave 10.5, outside its range 0 to 10"),
        ('{"result": 1' + "0" * 400 + "}", "gave no score"),
        ("[" * 10_000, "gave no score"),
        (None, "has no choices"),
    ],
)
def test_what_is_no_score_fails_the_sample(text: Any, message: str) -> None:
    with pytest.raises(NotGraded, match=message):
        score_in(json.loads(completion(text)), (0, 10))


def test_one_sample_without_a_score_fails_alone(judge: Judge) -> None:
    judge.replies = [(200, {}, completion("no")), (200, {}, b"<html>"), (200, {}, b"{}"), (200, {}, b"x" * (5 << 20))]
    one_by_one = settings(judge, score_model_concurrency=1)
    outcomes = ScoreModel(grader(), one_by_one, False).grade_all([*rows("a", "b", "c", "d", "e")])
    assert [outcome.grade for outcome in outcomes] == [None, None, None, None, 4.0]
    assert all(str(outcome.error).startswith("the scoring server") for outcome in outcomes[1:4])
    missing = SampledItem(sample={"output_text": "a"})
    assert ScoreModel(grader(), one_by_one, False).grade_all([missing])[0].error == (
        "item.question is not in this row: item has no field 'question'"
    )


def test_a_busy_server_is_asked_again_and_then_left_to_temporal(judge: Judge) -> None:
    busy = (503, {"Retry-After": "0"}, b"")
    judge.replies = [busy, (429, {"Retry-After": "0"}, b"")]
    assert ScoreModel(grader(), settings(judge), False).grade_all(rows("ab"))[0].grade == 5
    judge.replies = [busy] * 3
    with pytest.raises(StoreUnavailable, match="the server answered 503"):
        ScoreModel(grader(), settings(judge), False).grade_all(rows("ab"))
    assert len(judge.asked) == 6


@pytest.mark.parametrize(("status", "headers"), [(401, {}), (404, {}), (302, {"Location": "http://127.0.0.1:1/"})])
def test_a_refusal_is_told_with_what_the_server_says(judge: Judge, status: int, headers: dict[str, str]) -> None:
    judge.replies = [(status, headers, b'{"error": "no such model"}')]
    with pytest.raises(InvalidInput, match=rf"the server answered {status} .*no such model"):
        ScoreModel(grader(), settings(judge), False).grade_all(rows("ab"))


def test_a_server_that_is_away_is_unavailable() -> None:
    away = GradingSettings(score_model_url="http://127.0.0.1:9/v1")
    with pytest.raises(StoreUnavailable, match="the connection failed"):
        ScoreModel(grader(), away, False).grade_all(rows("a"))
