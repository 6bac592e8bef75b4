"""From responses and conversation files to the token samples that will be captured."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eagle3.chat import ChatEncoder, Encoded
from eagle3.config import Config
from eagle3.errors import UserError
from eagle3.manifest import NAME, Manifest, require_match
from eagle3.records import RowError, checked_weight, stream
from eagle3.target import Target

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class TokenSample:
    """One document to capture: token ids [T] int32 and loss mask [T] uint8; `weight` is the factor
    of its losses in training. Samples with the same `conversation`, the number of the first of
    them, are turns of one conversation; None is a conversation of its own."""

    id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    weight: float = 1.0
    conversation: int | None = None

    @classmethod
    def of(
        cls,
        id: str,
        input_ids: Sequence[int],
        loss_mask: Sequence[int],
        weight: float = 1.0,
        conversation: int | None = None,
    ) -> TokenSample:
        """Of any sequences; kept in 5 bytes a token, since all samples of a run are in memory."""
        return cls(
            id=id,
            input_ids=np.asarray(input_ids, dtype=np.int32),
            loss_mask=np.asarray(loss_mask, dtype=np.uint8),
            weight=weight,
            conversation=conversation,
        )

    @property
    def num_final(self) -> int:
        """Rows whose final state is kept."""
        return int(self.loss_mask[1:].sum())


def data_hash(samples: Sequence[TokenSample]) -> str:
    """Identity of the samples and their order."""
    hasher = hashlib.sha256()
    for sample in samples:
        weight = "" if sample.weight == 1 else f"*{sample.weight}"
        hasher.update(f"{sample.id}\0{len(sample.input_ids)}{weight}\0".encode())
        hasher.update(sample.input_ids.tobytes())
        hasher.update(sample.loss_mask.tobytes())
    return hasher.hexdigest()


def load(config: Config, target: Target) -> tuple[list[TokenSample], Counter[str]]:
    """All samples in a fixed order, and how many rows were skipped and why.

    Raises:
        UserError: no sources, responses of another target, or nothing usable.
    """
    encoder = ChatEncoder(target.tokenizer, config.target.template_kwargs, target.eos_ids)
    samples: list[TokenSample] = []
    skipped: Counter[str] = Counter()
    for source, factor in _sources(config, target):
        limit = None if config.extract.of_eval else config.data.limit
        for record in stream(source, config.data.split, limit, skipped=skipped):
            try:
                encoded = encoder.encode(record)
            except RowError as error:
                skipped[str(error)] += 1
                continue
            first = len(samples)
            for turn, part in enumerate(encoded):
                if reason := _unfit(part, config.data.max_length, target.vocab_size):
                    skipped[reason] += 1
                    continue
                samples.append(
                    TokenSample.of(
                        record.id if len(encoded) == 1 else f"{record.id}#{turn}",
                        part.input_ids,
                        part.loss_mask,
                        record.weight * factor,
                        first,
                    )
                )
    if not samples:
        raise UserError(f"no usable sample; skipped rows: {dict(skipped)}")
    if skipped:
        log.warning("skipped rows: %s", dict(skipped))
    return samples, skipped


def _unfit(part: Encoded, max_length: int, vocab_size: int) -> str | None:
    """Why a sample is not captured, if so."""
    if len(part.input_ids) > max_length:
        return "longer than data.max_length"
    if sum(part.loss_mask) < 2:
        return "fewer than two generated tokens"
    if not 0 <= min(part.input_ids) <= max(part.input_ids) < vocab_size:
        return "token ids that are not in the target's vocabulary"
    return None


def _sources(config: Config, target: Target) -> list[tuple[str, float]]:
    """Files to read, and what their rows' weights are multiplied by."""
    if config.extract.of_eval:
        outputs = config.outputs_file
        if not outputs.exists():
            raise UserError(f"extract.of_eval=true, but {outputs} is missing: run `eval` first")
        return [(str(outputs), 1.0)]
    sources = list(config.data.conversations)
    if (config.responses_dir / NAME).exists():
        sources.insert(0, str(config.responses_dir / "responses.jsonl"))
    if not sources:
        raise UserError(
            f"nothing to extract: no responses in {config.responses_dir} (run `respond`) and "
            "data.conversations is empty"
        )
    try:
        off_policy = checked_weight(config.data.off_policy_weight)
    except UserError as error:
        raise UserError(f"data.off_policy_weight: {error}") from error
    return [(s, 1.0 if _on_policy(Path(s).parent, target) else off_policy) for s in sources]


def _on_policy(folder: Path, target: Target) -> bool:
    """Whether this target gave the answers in a folder: `respond` left it on record there.

    Raises:
        UserError: responses that are not all there yet, or of a model with another tokenizer (they
            hold token ids).
    """
    if not Manifest.of_ours(folder):
        return False
    manifest = Manifest.load(folder, "responses")
    if not manifest.facts.get("complete"):
        raise UserError(f"the responses in {folder} are not finished: run `respond` again")
    wanted, found = target.identity(), manifest.match["target"]
    remedy = "Let this target answer the prompts itself (`respond` under another run_name)."
    tokenizer = {"tokenizer": wanted["tokenizer"]}
    require_match(tokenizer, found, f"the responses in {folder}", remedy)
    return bool(found == wanted)
