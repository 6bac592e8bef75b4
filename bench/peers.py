"""Other trainers' EAGLE-3 models, given our weights and our batches in the form they take.

Row t of a document pairs hidden state h_t with token x_{t+1}; y_j is the target's final state at j.

    speculators  packs rows (x_{t+1}, h_t, y_{t+1}), supervises step k where token t + 1 + k is
                 generated, and keeps lm_head frozen. Its `verifier_norm` is replaced by the
                 identity, since our stores hold normed final states.
    SpecForge    pads documents to the longest of `batch_size`, supervises step k where token t + k
                 is generated, and divides by all positions, padding included. `norm_output` means
                 there that the lm_head reads normed states; what it feeds back is never normed.

Our stores keep y_j only where a teacher of ours needs it: where x_{j+1} is generated in the same
turn. So neither peer is taught what follows the end of a turn, which no server asks a drafter.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.batch import Batch
from eagle3.drafter import Drafter, DrafterConfig
from eagle3.errors import UserError


def documents(batch: Batch) -> list[dict[str, Tensor]]:
    """Each document's rows: ids, mask, hidden states h, and y with its mask `taught`."""
    bounds = batch.doc_starts.tolist()
    found = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        rows = slice(start, end)
        index = batch.final_index[rows]
        taught = index >= 0
        y = batch.final[index.clamp(min=0)] * taught[:, None]
        mask = batch.loss_mask[rows].bool()
        found.append({"ids": batch.input_ids[rows], "mask": mask, "h": batch.aux[rows], "y": y,
                      "taught": taught})  # fmt: skip
    return found


def whole_blocks(rows: int) -> int:
    """Rows up to a multiple of flex attention's block: speculators extends its mask by blocks."""
    return -(-rows // 128) * 128


def llama_config(config: DrafterConfig) -> Any:
    """The decoder layer as transformers describes it."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads, head_dim=config.head_dim,
        num_key_value_heads=config.num_key_value_heads, vocab_size=config.vocab_size,
        num_hidden_layers=1, rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        attention_bias=False, mlp_bias=False, hidden_act="silu", pad_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip


class Speculators:
    """speculators' Eagle3DraftModel.

    Args:
        drafter: weights to start from; its norm options become theirs.
        lm_head: the target's, [vocab_size, H].
        own_start: start from its own initial weights (the target's embeddings and lm_head, the rest
            random) and take only shape, vocabulary and embeddings from `drafter`.
        norm_before_residual: its option that neither SGLang nor our drafter has.
        attention: "simple_flex_attention" is its default and has no backward on a CPU.
    """

    name = "speculators"

    def __init__(
        self, drafter: Drafter, lm_head: Tensor, own_start: bool = False,
        norm_before_residual: bool = False, attention: str | None = None,
    ) -> None:  # fmt: skip
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.losses import resolve_loss_config
        from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
        from speculators.proposals.greedy import GreedyTokenProposalConfig

        self.version = version("speculators")
        self.config, self.vocab = drafter.config, drafter.vocab
        device = lm_head.device
        layer = llama_config(drafter.config)
        on_gpu = device.type == "cuda"
        self.attention = attention or ("simple_flex_attention" if on_gpu else "sdpa")
        layer._attn_implementation = self.attention
        speculator = Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=drafter.config.draft_vocab_size,
            norm_before_residual=norm_before_residual,
            norm_before_fc=drafter.config.norm_before_fc,
            fc_norm=drafter.config.fc_norm,
            norm_output=drafter.config.norm_output,
            eagle_aux_hidden_state_layer_ids=list(range(1, drafter.config.num_aux + 1)),
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=7)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
        )
        with torch.device(device):
            model = Eagle3DraftModel(config=speculator)
            model.load_vocab_mappings(self.vocab.t2d, self.vocab.d2t)
        model.verifier_norm = nn.Identity()
        tensors = {k.replace("midlayer.", "layers.0."): v for k, v in drafter.state_dict().items()}
        tensors["verifier_lm_head.weight"] = lm_head[self.vocab.target_ids]
        if own_start:
            tensors["lm_head.weight"] = tensors["verifier_lm_head.weight"].clone()
        _load(model, tensors, ("lm_head", "verifier_") if own_start else None)
        self.model = nn.Module.to(model, device, lm_head.dtype).train()
        if on_gpu:
            _part_kernel_configs()
        # made once: a new one each step would compile the step anew
        self.losses = resolve_loss_config("kl_div", "fused" if on_gpu else "eager")

    def inputs(self, batch: Batch, rows: int | None = None) -> list[dict[str, Tensor]]:
        """One forward's arguments; `rows` pads to a fixed length, as its collator does."""
        parts: dict[str, list[Tensor]] = {}
        for number, doc in enumerate(documents(batch)):
            length = len(doc["ids"]) - 1
            for key, value in {
                "hidden_states": doc["h"][:-1],
                "input_ids": doc["ids"][1:],
                "verifier_last_hidden_states": doc["y"][1:],
                "loss_mask": (doc["mask"] & doc["taught"])[1:],
                "position_ids": torch.arange(1, length + 1, device=batch.aux.device),
                "document_ids": torch.full((length,), number, device=batch.aux.device),
            }.items():
                parts.setdefault(key, []).append(value)
        packed = {key: torch.cat(values) for key, values in parts.items()}
        missing = max(0, (rows or 0) - len(packed["input_ids"]))
        return [
            {
                key: _padded(x, missing, -1 if key == "document_ids" else 0)[None]
                for key, x in packed.items()
            }
        ]

    def loss(self, inputs: dict[str, Tensor], num_steps: int, decay: float) -> tuple[Tensor, Any]:
        """Its loss, KL averaged over each step's rows, and its metrics (sums and totals)."""
        _, loss, metrics = self.model(
            **inputs, ttt_steps=num_steps, ttt_step_loss_decay=decay, loss_config=self.losses
        )
        return loss, metrics

    def drafter(self) -> Drafter:
        """Its weights as our drafter, float32 on the CPU."""
        tensors = {
            name.replace("layers.0.", "midlayer."): tensor
            for name, tensor in self.model.state_dict().items()
            if not name.startswith("verifier_")
        }
        return _drafter(self.config, tensors)


class SpecForge:
    """SpecForge's OnlineEagle3Model on stored states; lm_head is trained.

    Args:
        own_start: start from its own initial weights (the target's embeddings, the rest random,
            lm_head included) and take only shape, vocabulary and embeddings from `drafter`.
        batch_size: documents padded together; 1 is its default.
        compact_teacher: its option that never holds the teacher's full logits.
    """

    name = "SpecForge"

    def __init__(
        self, drafter: Drafter, lm_head: Tensor, own_start: bool = False, batch_size: int = 1,
        compact_teacher: bool = False,
    ) -> None:  # fmt: skip
        try:
            import specforge.algorithms.eagle3.model as theirs
            from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
        except ImportError as error:
            raise UserError(
                f"SpecForge cannot be imported ({error}): pip install --no-deps specforge, or "
                "unpack its wheel and name the folder with --specforge-path"
            ) from error
        if drafter.config.num_aux != 3 or drafter.config.norm_before_fc:
            raise UserError("SpecForge's drafter has three aux states and no norm_before_fc")
        if drafter.config.norm_output:
            raise UserError("SpecForge never feeds a normed state back (norm_output)")
        self.version = _specforge_version()
        self.config, self.lm_head, self.batch_size = drafter.config, lm_head, batch_size
        self.compact_teacher = compact_teacher
        layer = llama_config(drafter.config)
        layer.draft_vocab_size = drafter.config.draft_vocab_size
        layer.fc_norm = drafter.config.fc_norm
        layer.pretraining_tp = 1
        on_gpu = lm_head.device.type == "cuda"
        self.attention = "flex_attention" if on_gpu else "sdpa"
        if not on_gpu:
            # its loss is a Triton kernel; this is the definition that stands beside it
            theirs.LogSoftmaxLoss = _PlainLoss
        with torch.device(lm_head.device):
            draft = LlamaForCausalLMEagle3(layer, attention_backend=self.attention)
        _load(draft, drafter.state_dict(), () if own_start else None)
        draft = draft.to(lm_head.device, lm_head.dtype)
        draft.freeze_embedding()
        self.model = theirs.OnlineEagle3Model(draft, attention_backend=self.attention).train()

    def inputs(self, batch: Batch, rows: int | None = None) -> list[dict[str, Tensor]]:
        """Arguments of one forward for every `batch_size` documents; `rows` has no meaning here."""
        docs = documents(batch)
        groups = []
        for start in range(0, len(docs), self.batch_size):
            group = docs[start : start + self.batch_size]
            longest = max(len(doc["ids"]) for doc in group)
            columns: dict[str, list[Tensor]] = {}
            for doc in group:
                missing = longest - len(doc["ids"])
                taught = doc["taught"]
                for key, value in {
                    "input_ids": _ahead(doc["ids"]),
                    "hidden_states": doc["h"],
                    "target": _ahead(doc["y"]),
                    "loss_mask": (doc["mask"] & _ahead(taught)).long()[:, None],
                    "attention_mask": torch.ones_like(doc["ids"]),
                }.items():
                    columns.setdefault(key, []).append(_padded(value, missing, 0))
            groups.append({key: torch.stack(values) for key, values in columns.items()})
        return groups

    def loss(self, inputs: dict[str, Tensor], num_steps: int, decay: float) -> tuple[Tensor, Any]:
        """Its loss, and the steps' losses; both averaged over all positions."""
        self.model.length = num_steps
        given = dict(inputs)
        target = given.pop("target")
        if self.compact_teacher:
            given |= {"target_hidden_for_compact": target, "target_head_weight": self.lm_head}
            losses, *rest = self.model(**given, target=None)
        else:
            losses, *rest = self.model(**given, target=target @ self.lm_head.T)
        weighted = torch.stack([decay**k * loss for k, loss in enumerate(losses)])
        return weighted.sum(), {"losses": losses, "correct": rest[2], "rows": rest[3]}

    def drafter(self) -> Drafter:
        """Its weights as our drafter, float32 on the CPU."""
        return _drafter(self.config, self.model.draft_model.state_dict())


class _PlainLoss:
    """SpecForge's loss without its kernel: -sum p log q over supervised positions, over all."""

    @staticmethod
    def apply(logits: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        return -(mask * target * logits.float().log_softmax(dim=-1)).sum(dim=-1).mean()


def _part_kernel_configs() -> None:
    """Give speculators' loss kernels lists of their own: they share one, and PyTorch 2.11's
    compiler fails on a list that it meets under two names."""
    from speculators.losses import fused

    for kernel in vars(fused).values():
        if isinstance(getattr(kernel, "configs", None), list):
            kernel.configs = list(kernel.configs)


def use_specforge(folder: Path | None) -> None:
    """Import SpecForge from an unpacked wheel; its dependencies come from this environment."""
    if folder is not None:
        if not (folder / "specforge" / "__init__.py").exists():
            raise UserError(f"--specforge-path {folder}: there is no specforge package in it")
        sys.path.append(str(folder.resolve()))


def _specforge_version() -> str:
    try:
        return version("specforge")
    except PackageNotFoundError:
        return "unknown"


def _load(model: nn.Module, tensors: dict[str, Tensor], only: tuple[str, ...] | None) -> None:
    """Our tensors into a peer's model: all of them, or embeddings, vocabulary and those whose name
    starts with one of `only`."""
    names = set(model.state_dict())
    if names != set(tensors):
        raise RuntimeError(f"{type(model).__name__} differs in {names ^ set(tensors)}")
    if only is not None:
        kept = ("embed_tokens.", "d2t", "t2d", *only)
        tensors = {name: x for name, x in tensors.items() if name.startswith(kept)}
    model.load_state_dict(tensors, strict=False)
    for name, x in model.state_dict().items():
        if not torch.isfinite(x).all():
            raise RuntimeError(f"{type(model).__name__} starts with a {name} that is not finite")


def _drafter(config: DrafterConfig, tensors: dict[str, Tensor]) -> Drafter:
    drafter = Drafter(config)
    drafter.load_state_dict({k: v.detach().cpu() for k, v in tensors.items()}, strict=True)
    return drafter.float().eval()


def _ahead(x: Tensor) -> Tensor:
    """Row t of the result is row t + 1; zero at the end."""
    return torch.cat([x[1:], torch.zeros_like(x[:1])])


def _padded(x: Tensor, missing: int, value: int) -> Tensor:
    return torch.cat([x, x.new_full((missing, *x.shape[1:]), value)])
