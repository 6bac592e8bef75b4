"""The target model's files: config, tokenizer, and the few tensors a drafter needs from it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3 import layers, provenance, target_shape
from eagle3.config import TargetConfig
from eagle3.errors import UserError
from eagle3.manifest import read_json

EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
)
OLDER_VOCABULARIES = ("vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "vocab.txt")
"""Files of tokenizers that come without a tokenizer.json."""
LM_HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")
BLOCK_BYTES = 4096
BLOCKS, LEAST_BLOCKS = 256, 16
"""Of all weight files together and of each, to tell weights of the same shapes apart."""


@dataclass(kw_only=True)
class Target:
    """A target model on disk; nothing is loaded until it is asked for.

    `folder` is a local folder in Hugging Face's layout with safetensors weights.
    """

    folder: Path
    trust_remote_code: bool = False

    @classmethod
    def resolve(
        cls, path: str, revision: str | None = None, trust_remote_code: bool = False
    ) -> Target:
        """Find a local folder, or fetch a hub id (through the hub's own cache).

        Raises:
            UserError: neither is to be had.
        """
        folder = Path(path)
        if not folder.is_dir():
            folder = _from_hub(path, revision)
        if not os.path.exists(folder / "config.json"):  # noqa: PTH110, Path's raises
            raise UserError(f"target.path={path}: {folder} has no config.json that can be read")
        return cls(folder=folder, trust_remote_code=trust_remote_code)

    @classmethod
    def from_config(cls, config: TargetConfig) -> Target:
        """The target of a run.

        Raises:
            UserError: it is not to be had, or is not what `target.shape` says.
        """
        target = cls.resolve(config.path, config.revision, config.trust_remote_code)
        target_shape.require_equal(config, target_shape.from_json(target.config))
        return target

    @cached_property
    def config(self) -> dict[str, Any]:
        """The language model's part of config.json (multi-modal models nest it)."""
        data = target_shape.load(self.folder / "config.json")
        return {**data, **data.get("text_config", {}), "architectures": data["architectures"]}

    @property
    def architecture(self) -> str:
        return self.config["architectures"][0]

    @property
    def hidden_size(self) -> int:
        return self.config["hidden_size"]

    @property
    def vocab_size(self) -> int:
        return self.config["vocab_size"]

    @property
    def num_layers(self) -> int:
        return self.config["num_hidden_layers"]

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(
                self.folder, trust_remote_code=self.trust_remote_code
            )
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"the tokenizer in {self.folder} cannot be loaded: {error}. Fetch the target "
                "again, or set target.trust_remote_code=true if that is what it asks for"
            ) from error

    @cached_property
    def eos_ids(self) -> list[int]:
        """Ids that end a turn: generation_config.json's, else config.json's."""
        path = self.folder / "generation_config.json"
        found = read_json(path, target_shape.FETCH).get("eos_token_id") if path.exists() else None
        found = found if found is not None else self.config.get("eos_token_id", [])
        return list(found) if isinstance(found, list) else [found]

    def embeddings(self) -> Tensor:
        """Input embeddings [vocab_size, hidden_size], in the checkpoint's dtype."""
        return self._tensor(EMBEDDING_NAMES)

    def lm_head(self) -> Tensor:
        """Output projection [vocab_size, hidden_size]; the embeddings where they are tied."""
        return self._tensor(LM_HEAD_NAMES + EMBEDDING_NAMES)

    def identity(self) -> dict[str, Any]:
        """What a later stage must find again: architecture, sizes, weights and template hashes.

        The weights are identified by file sizes and blocks from all over the files: reading
        hundreds of GB to hash them would cost more than it protects. A change of few bytes goes
        unseen; an adapter merged into the layers does not.
        """
        return {
            "architecture": self.architecture,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "num_layers": self.num_layers,
            "weights": self._weights_hash,
            "tokenizer": self._tokenizer_hash(),
        }

    def aux_layers(self, configured: list[int] | None) -> list[int]:
        """The configured canonical layer ids, or the defaults, checked against this target."""
        return layers.resolve(configured, self.num_layers, self.architecture)

    def _weight_files(self) -> dict[str, Path]:
        """Tensor name -> file that holds it."""
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            names = read_json(index, target_shape.FETCH).get("weight_map") or {}
            if not names:
                raise UserError(f"{index} names no weights: fetch the target again")
            if missing := sorted(f for f in set(names.values()) if not (self.folder / f).exists()):
                raise UserError(f"{self.folder} lacks {missing}: the download is not complete")
            return {name: self.folder / file for name, file in names.items()}
        single = self.folder / "model.safetensors"
        if not single.exists():
            raise UserError(f"{self.folder} holds no model.safetensors; convert the weights first")
        with _opened(single) as file:
            return {name: single for name in file.keys()}  # noqa: SIM118

    def _tensor(self, names: tuple[str, ...]) -> Tensor:
        files = self._weight_files()
        for name in names:
            if name in files:
                with _opened(files[name]) as file:
                    return file.get_tensor(name)
        raise UserError(f"{self.folder} holds none of {list(names)}")

    @cached_property
    def _weights_hash(self) -> str:
        paths = sorted(set(self._weight_files().values()))
        blocks = max(LEAST_BLOCKS, BLOCKS // len(paths))
        found = []
        for path in paths:
            with _opened(path):  # raises if it is no weights
                found.append([path.name, path.stat().st_size, _sampled_hash(path, blocks)])
        return provenance.hash_json(found)

    def _tokenizer_hash(self) -> str:
        """Of what decides token ids: vocabulary, merges and chat template."""
        vocabularies = [self.folder / name for name in ("tokenizer.json", "tiktoken.model")]
        if not any(path.exists() for path in vocabularies):
            vocabularies = [self.folder / name for name in OLDER_VOCABULARIES]
        template, settings = (
            self.folder / name for name in ("chat_template.jinja", "tokenizer_config.json")
        )
        chat_template: str | None
        if template.exists():
            chat_template = template.read_text()
        elif settings.exists():
            chat_template = read_json(settings, target_shape.FETCH).get("chat_template")
        else:
            raise UserError(f"{self.folder} has no {settings.name}: fetch the target's tokenizer")
        present = [provenance.hash_file(path) for path in vocabularies if path.exists()]
        return provenance.hash_json([present, chat_template])


def _sampled_hash(path: Path, blocks: int) -> str:
    """Of so many blocks evenly spaced over a file, of all of it if it is small."""
    last = max(0, path.stat().st_size - BLOCK_BYTES)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in range(blocks):
            file.seek(last * block // (blocks - 1))
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} is damaged, or a Git LFS pointer in place of the weights, or not readable for "
            f"this user: fetch it again ({error})"
        ) from error


def _from_hub(path: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, revision=revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason, _, _ = str(error).partition("\n")
        raise UserError(
            f"target.path={path} is neither a local folder nor a model the hub gives us "
            f"({type(error).__name__}: {reason})"
        ) from error
