"""Commands check their configuration before anything starts: exit 2, a message, no traceback."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from eagle3 import composition
from eagle3.checks import RANGES
from eagle3.composition import from_dict_config, register
from eagle3.config import Config
from eagle3.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = sorted(p.stem for p in (ROOT / "conf" / "experiment").glob("*.yaml"))


def load(*overrides: str, command: str = "train") -> Config:
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(composition.CONF)):
        return from_dict_config(compose(command, list(overrides)))


@pytest.mark.parametrize(
    "command", ["respond", "extract", "train", "export", "eval", "tune", "verify"]
)
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_for_every_command(command: str, experiment: str) -> None:
    config = load(f"experiment={experiment}", command=command)
    assert config.run_name and config.target.path and config.benchmark


def test_the_readmes_experiment_composes(tmp_path: Path) -> None:
    example = (ROOT / "README.md").read_text().split("```yaml\n")[1].split("```")[0]
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(example)
    config = load(f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine")
    assert config.run_name == "mine" and config.optimizer.name == "muon"
    assert config.deepspeed["zero_optimization"]["stage"] == 0
    running = re.sub(r"^( *)# (urls|extract|eval): ", r"\1\2: ", example, flags=re.MULTILINE)
    (tmp_path / "experiment" / "running.yaml").write_text(running)
    config = load(f"hydra.searchpath=[file://{tmp_path}]", "experiment=running")
    assert config.server.urls == ["http://127.0.0.1:30000"] and config.server.args["tp_size"] == 1
    assert config.extract.spools == ["/dev/shm/mine"]
    assert config.eval.plain_url and config.eval.speculative_url


@pytest.mark.parametrize("group", ["server", "codec", "optimizer", "deepspeed", "logger", "target"])
def test_every_group_option_fits_the_schema(group: str) -> None:
    for file in (ROOT / "conf" / group).glob("*.yaml"):
        load("experiment=ci", f"{group}={file.stem}")


def test_missing_values_are_named() -> None:
    with pytest.raises(UserError, match=r"run_name.*target\.path"):
        load()


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("server.replicas=0", "server.replicas=0 must be 1 or more"),
        ("train.accumulation=0", "train.accumulation=0 must be 1 or more"),
        ("train.epochs=-1", "train.epochs=-1.0 must be above 0"),
        ("optimizer.lr=nan", "optimizer.lr=nan must be above 0"),
        ("verify.recapture=-1", "verify.recapture=-1 must be 0 or more"),
        ("eval.concurrency=[1,0]", r"eval.concurrency=\[1, 0\] must be 1 or more"),
        ("eval.concurrency=[]", r"eval.concurrency=\[\] must name at least one"),
        ("draft.num_key_value_heads=0", "draft.num_key_value_heads=0 must be 1 or more"),
        ("benchmark.gsm.limit=0", "benchmark.gsm.limit=0 must be 1 or more"),
        ("train.keep_checkpoints=0", "must be 1 or more"),  # would keep all
        ("train.validation_ratio=1", "must be 0 or more and below 1"),
        ("seed=9223372036854775808", "must be 0 or more and below 2"),
        ("run_name=", "run_name is empty"),
        ("+train.lr=1", r"'TrainConfig' object has no attribute 'lr': \+ only adds"),
        ("optimizer.beta2=1", "must be 0 or more and below 1"),
        ("train.epochs=inf", "train.epochs=inf must be a finite number"),
        ("verify.min_agreement=nan", "verify.min_agreement=nan must be a finite number"),
        ("extract.max_rejected=nan", "extract.max_rejected=nan must be 0 or more"),
        ("deepspeed.gradient_clipping=nan", "deepspeed.gradient_clipping=nan must be a finite"),
        ("eval.plain_url=http://me:pass@host:1", "a server's URL holds a user or password"),
        ("server.urls=[http://me@host]", "a server's URL holds a user or password"),
        ("+server.args.tp-size=2", "server.args.tp-size: write flags with .* tp_size"),
        ("+server.args.port=3", "server.args.port is decided by server.port"),
        ("+server.args.model_path=x", "server.args.model_path is decided by target.path"),
        ("+benchmark={_a: {path: p.jsonl}}", "benchmark._a: names have up to 64"),
    ],
)
def test_numbers_that_nothing_can_be_done_with_are_refused(override: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        load("experiment=ci", override)


@pytest.mark.parametrize("key", [key for _, keys in RANGES.values() for key in keys])
def test_no_number_is_below_zero(key: str) -> None:
    with pytest.raises(UserError, match=rf"{key}=\[?-1.* must be "):
        load("experiment=ci", f"{key}=-1" if key != "eval.concurrency" else f"{key}=[-1]")


def test_what_is_at_the_edge_of_a_range_can_be() -> None:
    edges = ["train.simulate_samples=0", "train.validation_ratio=0", "train.step_decay=0", "seed=0"]
    load("experiment=ci", *edges)


def test_a_benchmark_can_be_added() -> None:
    added = load("experiment=ci", "+benchmark={mine: {path: prompts.jsonl, limit: 80}}").benchmark
    assert set(added) == {"gsm", "mine"} and added["mine"].limit == 80


def test_a_part_that_is_none_can_be_set_value_by_value() -> None:
    config = load("experiment=ci")
    assert config.extract.expect is None and config.target.shape is None
    for overrides in (
        ["extract.expect.samples=3", "extract.expect.tokens=50"],
        ["extract.expect={samples: 3, tokens: 50}"],
    ):
        expect = load("experiment=ci", *overrides).extract.expect
        assert expect is not None and (expect.samples, expect.tokens) == (3, 50)
    with pytest.raises(UserError, match=r"missing: \['extract.expect.tokens'\]"):
        load("experiment=ci", "extract.expect.samples=3")
    kimi = load("experiment=kimi_k25", "target.shape.num_layers=7").target.shape
    assert kimi is not None and (kimi.num_layers, kimi.hidden_size) == (7, 7168)
    assert load("experiment=kimi_k25", "target.shape=null").target.shape is None


def test_secrets_stay_out_of_manifests() -> None:
    config = load("experiment=ci", "server.api_key=hunter2")
    assert config.resolved()["server"]["api_key"] == "***"


@pytest.mark.parametrize(
    "name", ["env.HF_TOKEN", "env.AWS_SECRET_ACCESS_KEY", "args.api_key", "env.DB_PASSWORD"]
)
def test_a_secret_for_servers_is_refused_where_it_would_be_written_down(name: str) -> None:
    load("experiment=ci", "+server.env.MAX_TOKENS='8'", "+server.env.TOKENIZERS_PARALLELISM='0'")
    with pytest.raises(UserError, match=r"(?s)server\.(env|args) holds .*Export secrets") as told:
        load("experiment=ci", f"+server.{name}=hunter2")
    assert "hunter2" not in str(told.value)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["experiment=ci", "train.lr=1"], "lr"),
        (["experiment=ci", "train.accumulation=many"], "accumulation"),
        (["experiment=nonesuch"], "nonesuch"),
        ([], "run_name"),
        (["experiment=ci", "target.path=/nowhere/model"], "target.path=/nowhere/model"),
        (["experiment=ci", "run_name=empty", "runs_dir=/tmp/eagle3-none"], "run `extract` first"),
    ],
)
def test_a_users_mistake_exits_with_2_and_no_traceback(overrides: list[str], named: str) -> None:
    done = run("training.train", *overrides)
    assert done.returncode == 2, done.stderr[-2000:]
    assert named in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["extraction.plan", "experiment=kimi_k25", "codec.name=fp7"], "codec.name=fp7 is not"),
        (["extraction.verify", "experiment=ci", "run_name=empty"], "run `extract` first"),
        (["training.export", "--check"], "usage: python -m training.export --check FOLDER"),
        (["extraction.spool", "README.md", "1,2"], "cannot make the spool"),
    ],
)
def test_mistakes_of_other_commands(arguments: list[str], named: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2, done.stderr[-2000:]
    assert named in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("contents", "told"),
    [
        (b"run_name: x\n\ttrain: 1\n", 'mine.yaml", line 3, column 1'),
        (b"run_name: [x\ntrain: 1\n", 'mine.yaml", line 2, column'),
        (b"run_name: x\nrun_name: y\n", "duplicate key run_name"),
        (b"run_name: \xff\n", "not UTF-8"),
        (b"train: 3\n", "int is not a subclass of TrainConfig"),
        (b"runname: x\n", "Key 'runname' not in 'Config'"),
        (None, "is the file's first line `# @package _global_`?"),
    ],
)
def test_a_users_own_file_that_does_not_read(
    tmp_path: Path, contents: bytes | None, told: str
) -> None:
    (tmp_path / "experiment").mkdir()
    text = b"run_name: x\n" if contents is None else b"# @package _global_\n" + contents
    (tmp_path / "experiment" / "mine.yaml").write_bytes(text)
    done = run("training.train", f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine")
    assert done.returncode == 2 and done.stderr.startswith("error: configuration: "), done.stderr
    assert told.lower() in done.stderr.lower() and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("extract.expect=5", "It has: samples, tokens, answer_share\n"),
        ("target.shape=[1]", "target.shape: "),
        ("target.shape={hiden_size: 3}", "It has: architecture, hidden_size, num_layers, vocab"),
        ("train.lr=3", "It has: max_steps, epochs"),
        ("server.args.foo=3", "use +server.args.foo=3"),
        ("+benchmark.mine.path=p.jsonl", "'+benchmark={mine: {path: prompts.jsonl, limit: 80}}'"),
        ("deepspeed=null", "is never null: leave it out"),
        ("data.prompts=a=b", "data.prompts=a=b: mismatched input"),
        ("runs_dir=???", "missing: ['runs_dir']"),
    ],
)
def test_a_value_that_does_not_fit_is_told_with_its_key(override: str, told: str) -> None:
    done = run("extraction.plan", "experiment=ci", override)
    assert done.returncode == 2 and done.stderr.startswith("error: "), done.stderr
    assert told in done.stderr and "Traceback" not in done.stderr
    assert "full_key" not in done.stderr and "HYDRA_FULL_ERROR" not in done.stderr


@pytest.mark.parametrize(
    "module",
    [
        "extraction.respond", "extraction.extract", "extraction.plan", "extraction.verify",
        "training.train", "training.export", "eval.live", "eval.offline", "eval.parity",
        "eval.tune",
    ],
)  # fmt: skip
def test_a_file_where_the_run_would_be(tmp_path: Path, module: str) -> None:
    (tmp_path / "mine").touch()
    done = run(module, "experiment=ci", f"runs_dir={tmp_path}", "run_name=mine")
    assert done.returncode == 2, done.stderr[-2000:]
    assert f"error: {tmp_path}/mine is not a folder. " in done.stderr


def test_a_file_where_a_commands_own_folder_would_be(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "responses").touch()
    done = run("extraction.respond", "experiment=ci", f"runs_dir={tmp_path}", "run_name=mine")
    assert done.returncode == 2, done.stderr[-2000:]
    assert f"error: {tmp_path}/mine/responses: File exists. " in done.stderr


def test_a_file_that_is_not_utf_8_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "good.yaml").write_text("run_name: caf\u00e9\n", encoding="utf-8")
    bad = tmp_path / "experiment" / "bad.yaml"
    bad.write_bytes(b"run_name: caf\xe9\n")
    monkeypatch.setattr(composition, "CONF", tmp_path)
    with pytest.raises(UnicodeDecodeError) as raised:
        bad.read_text(encoding="utf-8")
    assert composition.in_words(raised.value).startswith(f"{bad} is not UTF-8: ")


def test_a_plan_counts_the_data_that_there_is(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"instruction": "2 + 2?", "output": "It is 4."}\n')
    expect = "extract.expect={samples: 7, tokens: 700, answer_share: 0.5}"
    done = run("extraction.plan", "experiment=ci", "run_name=none", expect)
    assert done.returncode == 0 and done.stdout.startswith("7 samples, 700 tokens, 350 of them")
    rows = f"data.conversations=[{tmp_path}/mine.jsonl]"
    done = run("extraction.plan", "experiment=ci", "run_name=none", expect, rows)
    assert done.returncode == 0 and done.stdout.startswith("1 samples, "), done.stderr[-2000:]


def test_a_sweep_is_not_shown() -> None:
    done = run("training.train", "--multirun", "--cfg", "job", "experiment=ci", "seed=1,2")
    assert done.returncode == 2 and "Only one of --run, --multirun, --cfg" in done.stderr


def test_a_sweep_names_the_value_that_does_not_fit(tmp_path: Path) -> None:
    done = run("training.train", "--multirun", "experiment=ci", f"runs_dir={tmp_path}", "seed=1,x")
    assert done.returncode == 2 and "Error merging override seed=x\nseed: " in done.stderr


def test_a_defect_keeps_its_traceback_and_status_1() -> None:
    code = (
        "from eagle3.command import command\n"
        "@command('plan')\ndef main(config): {}['a defect']\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "experiment=ci"], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "KeyError: 'a defect'" in done.stderr


@pytest.mark.parametrize(
    "module",
    [
        "extraction.respond", "extraction.extract", "extraction.verify", "training.train",
        "training.export", "eval.live", "eval.tune",
    ],
)  # fmt: skip
def test_the_largest_run_is_shown_without_its_weights(module: str) -> None:
    done = run(module, "experiment=kimi_k25", "--cfg", "job")
    assert done.returncode == 0, done.stderr[-2000:]
    shown = OmegaConf.create(done.stdout)
    assert shown.target.aux_layers == [3, 31, 59]
    assert shown.target.shape.hidden_size == 7168
    assert shown.server.args.tp_size == 8
