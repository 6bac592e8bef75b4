import bz2
import gzip
import json
import lzma
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from eagle3.errors import UserError
from eagle3.records import RowError, parse, read, stream

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
    for mask in ([False, True], [0, 1], [0.0, 1.0]):
        assert parse({"input_ids": [1, 2], "loss_mask": mask}, 0).loss_mask == [0, 1]
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
        ({"input_ids": [1, 2], "loss_mask": ["0", "1"]}, "other values than 0 and 1"),
        ({"input_ids": [1, 2], "loss_mask": [-100, 5]}, "other values than 0 and 1"),
        ({"input_ids": [1, 2], "loss_mask": [float("nan"), None]}, "other values than 0 and 1"),
        ({"input_ids": [1, 2], "loss_mask": [[0], [1]]}, "other values than 0 and 1"),
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


def test_parquets_nulls_are_not_said(tmp_path: Path) -> None:
    """Its schema gives every call the arguments of all, and every tool the keys of all."""
    from datasets import Dataset

    calls = [{"city": "Rome"}, {"a": 1, "b": [{"c": 2}, {"d": 3}]}]
    rows = [
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [{"function": {"arguments": c}}]},
            ],
            "tools": [{"function": {"parameters": {"properties": {k: {"type": "x"} for k in c}}}}],
        }
        for c in calls
    ]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "d.parquet"))
    records, _ = read(str(tmp_path / "d.parquet"))
    for record, row in zip(records, rows, strict=True):
        assert record.messages[1]["tool_calls"] == row["messages"][1]["tool_calls"]
        assert record.tools == row["tools"]


def test_parts_are_put_together_as_sglangs_chat_endpoint_does() -> None:
    parts = [{"type": "text", "text": "Look at this."}, {"type": "text", "text": "What is it?"}]
    record = parse({"messages": [{"role": "user", "content": parts}, ASSISTANT]}, 0)
    assert record.messages[0]["content"] == "Look at this. What is it?"


def test_a_null_column_beside_a_turns_text_is_as_if_absent() -> None:
    turns = [{"from": "human", "value": "q", "content": None}, ASSISTANT]
    assert parse({"conversations": turns}, 0).messages == [USER, ASSISTANT]


def test_a_row_nested_too_deep_is_counted(tmp_path: Path) -> None:
    deep: dict = {}
    for _ in range(600):
        deep = {"a": deep}
    call = {"function": {"name": "f", "arguments": deep}}
    bad = {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}
    rows = [json.dumps(bad), json.dumps({"messages": [USER, ASSISTANT]})]
    (tmp_path / "d.jsonl").write_text("\n".join(rows))
    found, skipped = read(str(tmp_path / "d.jsonl"))
    assert len(found) == 1 and skipped == {"nested too deep": 1}


def test_a_bad_weight_in_parquet_names_the_row(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = [{"prompt": "q", "weight": 0.5}, {"prompt": "p", "weight": None}]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "good.parquet"))
    assert [r.weight for r in read(str(tmp_path / "good.parquet"))[0]] == [0.5, 1.0]
    rows[1]["weight"] = -0.5
    Dataset.from_list(rows).to_parquet(str(tmp_path / "bad.parquet"))
    with pytest.raises(UserError, match=r"bad.parquet, row 2: weight -0.5 is not a number"):
        read(str(tmp_path / "bad.parquet"))


@pytest.mark.parametrize("name", ["p.jsonl", "p.json", "p.parquet"])
def test_a_folder_with_the_name_of_a_data_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"{name} is a folder: name a file in it"):
        read(str(tmp_path / name))


@pytest.mark.parametrize("name", ["p.jsonl", "p.json"])
@pytest.mark.parametrize(
    ("contents", "told"),
    [
        (gzip.compress(b'{"prompt": "q"}'), r"compressed \(gzip\): unpack it"),
        (bz2.compress(b'{"prompt": "q"}'), r"compressed \(bzip2\): unpack it"),
        (lzma.compress(b'{"prompt": "q"}'), r"compressed \(xz\): unpack it"),
        ('{"prompt": "q"}'.encode("utf-16"), "UTF-16, perhaps.*convert it to UTF-8"),
        ('{"prompt": "q"}'.encode("utf-16-le"), "UTF-16, perhaps.*convert it to UTF-8"),
        (b"[" * 100_000, "not a JSON object|is not JSON"),
        ('{"prompt": "caf\u00e9"}'.encode("latin-1"), "bad UTF-8"),
    ],
)
def test_a_file_of_another_form_is_told_from_a_bad_row(
    tmp_path: Path, name: str, contents: bytes, told: str
) -> None:
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(UserError, match=f"{name}.*({told})"):
        read(str(tmp_path / name))


@pytest.mark.parametrize("name", ["p.jsonl.gz", "p.csv", "p"])
def test_a_file_of_another_name_is_not_looked_for_on_the_hub(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"prompt": "q"}')
    with pytest.raises(
        UserError, match=f"{name} cannot be read: it is none of .jsonl, .json and .parquet"
    ):
        read(str(tmp_path / name))
    with pytest.raises(UserError, match="name of a data file is empty"):
        read("")


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "q"}')

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(UserError, match="p.jsonl cannot be read: Permission denied"):
        read(str(tmp_path / "p.jsonl"))


def test_nothing_usable_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="no usable row"):
        read(str(tmp_path / "e.jsonl"))
    with pytest.raises(UserError, match="does not exist"):
        read(str(tmp_path / "missing.jsonl"))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"instruction": 7, "output": "a"}, "content that is not text"),
        ({"instruction": "q", "input": ["x"], "output": "a"}, "content that is not text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "that is not text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "not text"),
        ({"prompt": "q", "id": "\ud800"}, "lone surrogate"),
        ({"prompt": "q", "tools": [{"name": "\udfff"}]}, "lone surrogate"),
        (
            {"messages": [USER, {**ASSISTANT, "reasoning_content": "\ud83d"}]},
            "lone surrogate",
        ),
        ({"prompt": "q", "tools": '"f"'}, "tools that are no list"),
        ({"messages": [USER, {**ASSISTANT, "tool_calls": "f()"}]}, "tool calls that are no list"),
        ({"input_ids": 5, "loss_mask": [1]}, "token ids that are no list of integers"),
        ({"input_ids": [1, "2"], "loss_mask": [0, 1]}, "token ids that are no list of integers"),
        ({"input_ids": [1, 2.5], "loss_mask": [0, 1]}, "token ids that are no list of integers"),
        ({"input_ids": [1, 2], "output_ids": [None]}, "token ids that are no list of integers"),
        ({"messages": [USER, ASSISTANT], "output_ids": "5 6"}, "no list of integers"),
    ],
)
def test_values_of_the_wrong_type_are_a_reason_not_the_end_of_the_run(
    row: dict, reason: str
) -> None:
    with pytest.raises(RowError, match=reason):
        parse(row, 0)


def test_columns_that_say_nothing_in_a_row_do_not_matter(tmp_path: Path) -> None:
    """A table has a column for every key of any row, null where a row lacks it."""
    from datasets import Dataset

    rows = [
        {"input_ids": [1, 2], "loss_mask": [0, 1], "messages": None, "output_ids": None},
        {"input_ids": None, "loss_mask": None, "messages": [USER, ASSISTANT], "output_ids": None},
        {"input_ids": None, "loss_mask": None, "messages": [USER, ASSISTANT], "output_ids": [5]},
    ]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "d.parquet"))
    records, skipped = read(str(tmp_path / "d.parquet"))
    assert not skipped and [r.input_ids for r in records] == [[1, 2], None, None]
    assert [r.output_ids for r in records] == [None, None, [5]]


def test_a_tool_call_without_text_is_something_that_was_said() -> None:
    """Whether its content is null or empty; and its arguments are what SGLang's chat endpoint hands
    to the template: an object, though OpenAI's form has it as a string."""
    for content in (None, ""):
        call = {"id": "1", "function": {"name": "f", "arguments": '{"x": [1, "é"]}'}}
        turn = {"role": "assistant", "content": content, "tool_calls": [call]}
        (_, kept) = parse({"messages": [USER, turn]}, 0).messages
        assert kept["content"] == ""
        assert kept["tool_calls"][0]["function"]["arguments"] == {"x": [1, "é"]}
        assert call["function"]["arguments"] == '{"x": [1, "é"]}'
    for arguments in ("{torn", "[1]", {"x": 1}, None):
        calls = [{"function": {"name": "f", "arguments": arguments}}]
        turn = {**ASSISTANT, "tool_calls": calls}
        assert parse({"messages": [USER, turn]}, 0).messages[1]["tool_calls"] == calls


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.json"):
        (tmp_path / name).write_bytes(b'\xef\xbb\xbf{"prompt": "q"}\n')
        assert len(read(str(tmp_path / name))[0]) == 1


def test_files_that_cannot_be_read_are_a_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "lines.json").write_text('{"prompt": "q"}\n{"prompt": "p"}\n')
    with pytest.raises(UserError, match=r"lines\.json is not JSON .*\.jsonl"):
        read(str(tmp_path / "lines.json"))
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    (tmp_path / "table.csv").write_text("prompt\nq\n")
    for name in ("torn.parquet", "table.csv", "nobody/nothing:at-all"):
        with pytest.raises(UserError, match=rf"{name}.* cannot be read"):
            read(str(tmp_path / name) if "." in name else name)


def test_rows_are_handed_on_one_by_one(tmp_path: Path) -> None:
    """A run's token ids are kept in 4 bytes each; as rows of JSON they take ten times that."""
    file = tmp_path / "rows.jsonl"
    row = json.dumps({"input_ids": list(range(1000, 6000)), "loss_mask": [1] * 5000})
    file.write_text(f"{row}\n" * 200)
    skipped: Counter[str] = Counter()
    tracemalloc.start()
    assert sum(len(r.input_ids or ()) for r in stream(str(file), skipped=skipped)) == 10**6
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3e6, peak


def test_rows_that_are_no_utf8_are_counted_not_altered(tmp_path: Path) -> None:
    good, bad = (f'{{"prompt": "{text}"}}'.encode(code) for text, code in
                 (("über", "utf-8"), ("über", "latin-1")))  # fmt: skip
    (tmp_path / "rows.jsonl").write_bytes(good + b"\n" + bad + b"\n")
    records, skipped = read(str(tmp_path / "rows.jsonl"))
    assert [r.messages[0]["content"] for r in records] == ["über"]
    assert skipped == Counter({"lone surrogate or bad UTF-8": 1})
    (tmp_path / "rows.json").write_bytes(b"[" + good + b"," + bad + b"]")
    assert read(str(tmp_path / "rows.json"))[1] == skipped
