"""A document's hidden states, as captured and as a store keeps them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle3.batch import needed_final
from eagle3.store.codecs import Codec


@dataclass(kw_only=True, slots=True)
class Sample:
    """One document: token ids and loss mask [T], aux [T, A * H], final (post-norm) [T, H].

    `weight` is the factor of its losses in training. Samples with the same `conversation`, the
    number of the first of them, are turns of one conversation; None is a conversation of its own.
    """

    id: str
    input_ids: Tensor
    loss_mask: Tensor
    aux: Tensor
    final: Tensor
    weight: float = 1.0
    conversation: int | None = None

    def encode(self, codec: Codec) -> Encoded:
        """As a store with this codec keeps it."""
        final = self.final[needed_final(self.loss_mask)]
        return Encoded(
            id=self.id,
            tensors={
                "input_ids": self.input_ids.to(torch.int32),
                "loss_mask": self.loss_mask.to(torch.uint8),
                **codec.encode(aux=self.aux, final=final),
            },
            weight=self.weight,
            conversation=self.conversation,
        )


@dataclass(kw_only=True)
class Encoded:
    """One document as it lies in a shard.

    tensors: input_ids int32 [T], loss_mask uint8 [T], the codec's aux.* of T rows and final.* of
    the rows that some teacher needs. The weight and the conversation lie in the index.
    """

    id: str
    tensors: dict[str, Tensor]
    weight: float = 1.0
    conversation: int | None = None
    _sha256: str | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def rows(self) -> int:
        return len(self.tensors["input_ids"])

    @property
    def final_rows(self) -> int:
        return int(needed_final(self.tensors["loss_mask"]).sum())

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def sha256(self) -> str:
        """Of the tensors, worked out once. Not a cached_property: Python 3.11's holds one lock for
        the samples of all threads meanwhile."""
        if self._sha256 is None:
            self._sha256 = digest(self.tensors)
        return self._sha256


def digest(tensors: dict[str, Tensor]) -> str:
    """sha256 over the bytes of a sample's encoded tensors, by name."""
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        hasher.update(name.encode())
        hasher.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return hasher.hexdigest()
