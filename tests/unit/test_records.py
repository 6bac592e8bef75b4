import json
from collections import Counter
from pathlib import Path

import pytest

from eagle3.errors import UserError
from eagle3.records import RowError, parse, read

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ASSISTANT]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": [USER, ASSISTANT]},
        {"instruction": "q", "input": "", "output": "a"},
        {"question": "q", "answer": "a"},
        {"prompt": "q", "response": "a"},
        {"data": ["q", "a"]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ASSISTANT]},
    ],
)
def test_forms_that_mean_the_same(row: dict) -> None:
    record = parse(row, 0)
    assert record.messages == [USER, ASSISTANT]
    assert record.prompt == [USER]


def test_prompts_without_answers() -> None:
    assert parse({"prompt": "q"}, 3).messages == [USER]
    assert parse({"turns": ["q", "second"], "question_id": 81}, 0).id == "81"
    system = parse({"system": "be brief", "question": "q"}, 0)
    assert [m["role"] for m in system.messages] == ["system", "user"]


def test_pretokenised_and_responses() -> None:
    assert parse({"input_ids": [1, 2], "loss_mask": [False, True]}, 0).loss_mask == [0, 1]
    assert parse({"messages": [USER, ASSISTANT], "output_ids": [5]}, 0).output_ids == [5]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (None, "not a JSON object"),
        ({"foo": 1}, "unknown form"),
        ({"messages": [ASSISTANT, USER]}, "starts with the assistant"),
        ({"messages": [USER, USER]}, "repeated role"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "empty content"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "empty content"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role"),
        ({"messages": [{"role": "system", "content": "x"}]}, "no user turn"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "lone surrogate"),
        ({"messages": [USER], "tools": "{not json"}, "tools is not JSON"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "same length"),
    ],
)
def test_bad_rows_have_a_reason(row: object, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        parse(row, 0)


def test_tool_calls_and_reasoning_are_kept() -> None:
    turn = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"x": 1}],
        "reasoning_content": "r",
    }
    kept = parse({"messages": [USER, turn], "tools": '[{"name": "f"}]'}, 0)
    assert kept.messages[1]["tool_calls"] == [{"x": 1}] and kept.tools == [{"name": "f"}]
    assert kept.messages[1]["reasoning_content"] == "r"


def test_one_bad_row_does_not_end_the_run_and_mixed_types_do_not_matter(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "q", "id": 1}, {"prompt": ["x"]}, {"prompt": "p", "id": "b", "tools": []}]
    lines = [json.dumps(r) for r in rows]
    file.write_text("\n".join([*lines, "{torn", "", '"text"']))
    records, skipped = read(str(file))
    assert [r.id for r in records] == ["1", "b"]
    assert skipped == Counter({"a turn is not an object": 1, "not a JSON object": 2})


def test_parquet_and_limit(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list([{"question": f"q{i}", "answer": "a"} for i in range(5)]).to_parquet(
        str(tmp_path / "d.parquet")
    )
    records, _ = read(str(tmp_path / "d.parquet"), limit=3)
    assert [r.messages[0]["content"] for r in records] == ["q0", "q1", "q2"]


@pytest.mark.parametrize(
    "row",
    [{"prompt": "q"}, {"messages": [USER, ASSISTANT], "output_ids": [5]}, {"question": "q"},
     {"input_ids": [1, 2], "loss_mask": [0, 1]}],
)  # fmt: skip
def test_rows_of_every_form_may_have_a_weight(row: dict) -> None:
    assert parse({**row, "weight": 0.5}, 0).weight == 0.5
    assert parse({**row, "weight": 2}, 0).weight == 2.0
    assert parse(row, 0).weight == parse({**row, "weight": None}, 0).weight == 1.0


@pytest.mark.parametrize("value", ["0", "-1", "NaN", "Infinity", "1e-40", "1e39", '"0.5"', "true"])
def test_a_weight_that_is_none_names_file_line_and_remedy(tmp_path: Path, value: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "q"}\n\n{"prompt": "p", "weight": ' + value + "}\n")
    with pytest.raises(UserError, match=r"rows.jsonl, line 3: weight .* correct it, or leave out"):
        read(str(file))


def test_a_bad_weight_in_parquet_names_the_row(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = [{"prompt": "q", "weight": 0.5}, {"prompt": "p", "weight": None}]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "good.parquet"))
    assert [r.weight for r in read(str(tmp_path / "good.parquet"))[0]] == [0.5, 1.0]
    rows[1]["weight"] = -0.5
    Dataset.from_list(rows).to_parquet(str(tmp_path / "bad.parquet"))
    with pytest.raises(UserError, match=r"bad.parquet, row 2: weight -0.5 is not a number"):
        read(str(tmp_path / "bad.parquet"))


def test_nothing_usable_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="no usable row"):
        read(str(tmp_path / "e.jsonl"))
    with pytest.raises(UserError, match="does not exist"):
        read(str(tmp_path / "missing.jsonl"))
