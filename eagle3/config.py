"""Configuration: dataclass schemas.

All commands share one schema, so that an experiment file describes a whole run, prompts to report,
and every command checks all of it before anything starts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING


@dataclass(kw_only=True, slots=True)
class TargetShape:
    """What a run can be planned with before the target is there."""

    architecture: str = MISSING
    """First of `architectures` in config.json."""
    hidden_size: int = MISSING
    num_layers: int = MISSING
    vocab_size: int = MISSING


@dataclass(kw_only=True, slots=True)
class TargetConfig:
    """The served language model."""

    path: str = MISSING
    """Hub id or local folder."""
    revision: str | None = None
    trust_remote_code: bool = False
    aux_layers: list[int] | None = None
    """Canonical ids (indices into output_hidden_states); default 2, n // 2, n - 3."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the chat template, enable_thinking for example."""
    shape: TargetShape | None = None
    """Used where the target's config.json is not at hand, checked against it where it is."""


@dataclass(kw_only=True, slots=True)
class ServerConfig:
    """How to get servers: start them, or use running ones by URL."""

    urls: list[str] = field(default_factory=list)
    """Running servers that share the work; for extraction each was started for its spool."""
    replicas: int = 1
    """Servers to start, on GPUs of their own while there are enough, then sharing them; `eval`
    always starts one."""
    patience_s: float = 120.0
    """How long to go on while no server answers."""
    api_key: str | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    """None takes free ones; several servers take this and the following ports."""
    args: dict[str, Any] = field(default_factory=dict)
    """SGLang flags (underscores), for every server this run starts."""
    env: dict[str, str] = field(default_factory=dict)
    """More environment for them. Kept in manifests and shown in launch commands: secrets belong in
    the environment of the command itself, which its servers inherit."""
    backends: list[str] = field(default_factory=list)
    """Attention backends to try in order; empty leaves the choice to SGLang."""
    deadline_s: float = 900.0
    memory_gb: float | None = None
    """Resident memory of any one server process."""
    stall_s: float | None = None
    """Longest silence in the log while starting."""
    timeout_s: float = 600.0
    """One request."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """What to train on."""

    prompts: str | None = None
    """For `respond`: JSONL, JSON, Parquet or hub id[:subset] with prompts or conversations."""
    conversations: list[str] = field(default_factory=list)
    """For `extract`: more files with answers, beside what `respond` wrote."""
    off_policy_weight: float = 1.0
    """Multiplies the weights of answers that `respond` did not get from this very target."""
    split: str = "train"
    limit: int | None = None
    """Rows `extract` takes from each source."""
    max_length: int = 4096
    """Longer samples are skipped and counted, never cut."""


@dataclass(kw_only=True, slots=True)
class RespondConfig:
    """How the target answers the prompts."""

    skip: int = 0
    """Prompts left out at the start of data.prompts."""
    limit: int | None = None
    concurrency: int = 16
    max_new_tokens: int = 2048
    temperature: float = 0.0
    top_p: float = 1.0
    samples_per_prompt: int = 1


@dataclass(kw_only=True, slots=True)
class CodecConfig:
    """How hidden states are kept; see eagle3/store/codecs.py."""

    name: str = "bf16"


@dataclass(kw_only=True, slots=True)
class ExpectConfig:
    """What `extraction.plan` reckons with when the data itself is not at hand."""

    samples: int = MISSING
    tokens: int = MISSING
    answer_share: float = 0.8
    """Share of the tokens that the target generated."""


@dataclass(kw_only=True, slots=True)
class ExtractConfig:
    """Capture of hidden states."""

    concurrency: int = 8
    """Samples under way on each server."""
    spools: list[str] = field(default_factory=list)
    """One folder a server, on the server's host; default: folders of this run under /dev/shm."""
    spool_bytes: int = 4 << 30
    """Most bytes that running captures may take up in a spool."""
    shard_bytes: int = 1 << 28
    """Size of the store's files. When the last sample arrives, up to two of them are not on disk
    yet; opening a store takes about 3 s for a thousand."""
    max_bytes: int | None = None
    """Refuse to start if the store would be larger."""
    max_hours: float | None = None
    """Refuse to go on if it would take longer, at the given or the measured rate."""
    tokens_per_s: float | None = None
    """Rate of all servers together, if known; else it is measured over the first samples."""
    expect: ExpectConfig | None = None
    """For `extraction.plan` before there is data."""
    max_rejected: float = 0.01
    """Share of samples that may fail verification before the run is aborted."""
    of_eval: bool = False
    """Capture the answers that `eval` measured instead, into <run>/eval/store, for `parity`."""


@dataclass(kw_only=True, slots=True)
class VerifyConfig:
    """How thoroughly to look at a store."""

    recapture: int = 0
    """Random samples to capture again through a server."""
    tolerance: float = 0.05
    """Largest relative difference of a sample captured again; GPUs round differently in other
    batches, shifted or swapped rows differ by about 1."""
    min_agreement: float = 0.1
    """Least share of a sample's next tokens that its final states must predict."""


@dataclass(kw_only=True, slots=True)
class DraftConfig:
    """Shape of the drafter; what is None follows the target."""

    num_layers: int = 1
    """Decoder layers. More than one trains several times slower: no fast path, less row pruning."""
    vocab_size: int = 32000
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule; see training/optimizer.py and training/schedule.py."""

    name: str = "adamw"
    """adamw, or muon: Muon for the matrices of fc and the decoder layer, AdamW for the rest."""
    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    momentum: float = 0.95
    """Of Muon."""
    schedule: str = "cosine"
    """cosine, wsd (constant, then linear decay) or constant; each after a linear warm-up."""
    warmup_ratio: float = 0.03
    decay_ratio: float = 0.2
    """Share of the steps at the end over which wsd decays."""
    min_lr_ratio: float = 0.05
    """Where cosine and wsd end, as a share of lr."""


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """The training loop."""

    max_steps: int | None = None
    """Optimizer steps; exclusive with epochs."""
    epochs: float | None = None
    tokens_per_batch: int = 16384
    """Rows of a packed micro-batch of one rank."""
    accumulation: int = 1
    ttt_steps: int = 7
    loss: str = "soft_ce"
    """soft_ce, hard_ce, tv or log_acceptance; see eagle3/loss.py."""
    mask: str = "serving"
    """serving: all rows at which a server drafts. token: only rows whose own token was generated,
    as other systems count; for comparison."""
    fp8: bool = False
    """Matrix products and the gradients of their inputs in fp8; needs a GPU that has it, and
    deepspeed.bf16."""
    step_decay: float = 0.8
    """Weight of TTT step k is step_decay ** k."""
    ema: float | None = None
    """Decay per step of a float32 average of the weights, which then is validated and exported."""
    init_from: str | None = None
    """Drafter folder to go on from, in SGLang's or speculators' format; its shape and vocabulary
    are kept."""
    validation_ratio: float = 0.05
    simulate_samples: int = 8
    """Validation samples on which speculative decoding is replayed at validation; 0 for none."""
    peak_tflops: float | None = None
    """Peak of one device, for train/mfu; None takes it from the table in eagle3/flops.py."""
    log_every: int = 10
    validate_every: int = 200
    save_every: int = 200
    keep_checkpoints: int = 2
    resume: bool = True


@dataclass(kw_only=True, slots=True)
class ExportConfig:
    """Which formats to write besides SGLang's."""

    speculators: bool = True
    dtype: str = "bfloat16"
    checkpoint: str = "last"
    """"last", "best" (validation accept length) or a step number."""


@dataclass(kw_only=True, slots=True)
class BenchmarkConfig:
    """One set of held-out prompts."""

    path: str = MISSING
    split: str = "test"
    limit: int | None = None


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """The live comparison."""

    concurrency: list[int] = field(default_factory=lambda: [1])
    max_new_tokens: int = 256
    num_steps: int = 3
    """Drafts per verify step (a chain: topk 1, num_steps + 1 draft tokens)."""
    warmup: int = 2
    """Short requests before measuring starts, for each of those that will be under way."""
    plain_url: str | None = None
    """Measure a running server without speculation instead of starting one."""
    speculative_url: str | None = None
    """Likewise one that serves the drafter; it must run with this configuration's settings."""
    offline: bool = True
    """Predict the acceptance first, on held-out samples of the store."""
    offline_samples: int = 100
    """At most so many."""
    require_identical: bool = False
    """Exit non-zero unless every greedy output is the same with and without the drafter."""


@dataclass(kw_only=True, slots=True)
class TuneConfig:
    """Speculative settings that `eval.tune` tries: every combination of these lists.

    Benchmarks, concurrency, max_new_tokens and warm-up are those of `eval`.
    """

    num_steps: list[int] = field(default_factory=lambda: [1, 2, 3, 5])
    """Draft steps before each verification."""
    topk: list[int] = field(default_factory=lambda: [1])
    """Branches of each draft step; 1 drafts a chain."""
    draft_tokens: list[int] | None = None
    """Tokens of a tree that the target checks at a time, its root included; must be set for
    topk > 1, and is only for it (a chain always has num_steps + 1). A combination whose tree has
    fewer, 1 + topk + (num_steps - 1) * topk^2, is left out."""


@dataclass(kw_only=True, slots=True)
class LoggerConfig:
    """Metrics always go to metrics.jsonl; wandb is offline unless a key is set."""

    wandb: bool = True
    project: str = "eagle3"
    group: str | None = None
    """Default: run_name."""
    mode: str | None = None
    """online, offline or disabled; default WANDB_MODE, else online with WANDB_API_KEY set."""


@dataclass(kw_only=True, slots=True)
class Config:
    """A whole run."""

    run_name: str = MISSING
    """Names the folder under runs_dir, and the wandb group."""
    runs_dir: str = "runs"
    seed: int = 0
    target: TargetConfig = field(default_factory=TargetConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    respond: RespondConfig = field(default_factory=RespondConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)
    extract: ExtractConfig = field(default_factory=ExtractConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """Passed to DeepSpeed as it is, but for what `train` and `optimizer` decide."""
    train: TrainConfig = field(default_factory=TrainConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    benchmark: dict[str, BenchmarkConfig] = field(default_factory=dict)
    eval: EvalConfig = field(default_factory=EvalConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    train_dir: str | None = None
    """Checkpoints and metrics; default <run>/train. A sweep gives each job its own."""

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.run_name

    @property
    def responses_dir(self) -> Path:
        return self.run_dir / "responses"

    @property
    def store_dir(self) -> Path:
        return self.run_dir / "store"

    @property
    def checkpoints_dir(self) -> Path:
        return Path(self.train_dir) if self.train_dir else self.run_dir / "train"

    @property
    def drafter_dir(self) -> Path:
        return self.run_dir / "drafter"

    @property
    def eval_dir(self) -> Path:
        return self.run_dir / "eval"

    @property
    def outputs_file(self) -> Path:
        """Every request that `eval` measured."""
        return self.eval_dir / "outputs.jsonl"

    @property
    def eval_store_dir(self) -> Path:
        """Hidden states of the answers that `eval` measured."""
        return self.eval_dir / "store"

    def resolved(self) -> dict[str, Any]:
        """For manifests, without what must stay secret."""
        data = asdict(self)
        if data["server"]["api_key"]:
            data["server"]["api_key"] = "***"
        return data
