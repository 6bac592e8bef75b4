"""The patched forward: an SGLang plugin that writes aux and final hidden states of marked requests.

SGLang loads it in every process through the entry point `sglang.srt.plugins`. It does nothing
unless EAGLE3_CAPTURE_SPOOL is set, and hooks two functions whose signatures are the same in SGLang
0.5.14 to 0.5.23 (checked when it loads):

- `ModelRunner.load_model`: afterwards, tells the target which layers to expose.
- `LogitsProcessor.forward`: before it, copies the rows of the flattened batch that belong to marked
  requests. At that point `hidden_states` are post-norm and `aux_hidden_states` are the residual
  stream, un-normed. The arguments are passed on untouched, so results do not change.

A failure here must not be silent: SGLang logs a plugin's exception and goes on, so the extract
process looks for `capture.json`, which is written only after everything is in place.
"""

from __future__ import annotations

import json
import logging
import os
import traceback
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3.layers import to_sglang
from extraction.assembler import Assembler
from extraction.sglang_limits import check_rows, check_settings, check_signatures
from extraction.spool import LAYERS_VARIABLE, SPOOL_VARIABLE, Spool, Ticket

log = logging.getLogger(__name__)
LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"


def register() -> None:
    """Entry point. Registers the hooks when this process is asked to capture."""
    folder = os.environ.get(SPOOL_VARIABLE)
    if not folder:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    spool = Spool(Path(folder))
    capture = Capture(spool, json.loads(os.environ[LAYERS_VARIABLE]))
    check_signatures()
    HookRegistry.register(LOAD_MODEL, capture.after_load, HookType.AFTER)
    HookRegistry.register(LOGITS, capture.around_logits, HookType.AROUND)


class Capture:
    """Hooks of one process."""

    def __init__(self, spool: Spool, aux_layers: list[int]) -> None:
        self.spool = spool
        self.aux_layers = aux_layers
        self.secret = spool.secret
        self.writes = False
        self.assembler = Assembler(spool)

    def after_load(self, result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        """Set the target's layers once its weights are loaded."""
        try:
            self._set_up(runner)
        except Exception:
            self.spool.publish_error(traceback.format_exc())
            raise

    def _set_up(self, runner: Any) -> None:
        server_args = runner.server_args
        check_settings(server_args)
        model = runner.model
        architecture = type(model).__name__
        model.set_eagle3_layers_to_capture(to_sglang(self.aux_layers, architecture))
        decoder = getattr(model, "language_model", model).model
        if list(decoder.layers_to_capture) != self.aux_layers:
            raise RuntimeError(
                f"{architecture} would capture {decoder.layers_to_capture}, not {self.aux_layers}"
            )
        rank = _attention_tp_rank()
        self.writes = rank == 0
        log.info(
            "capture plugin: layers %s of %s; attention-TP rank %d %s", self.aux_layers,
            architecture, rank, "writes" if self.writes else "leaves that to rank 0",
        )  # fmt: skip
        if self.writes:
            self.assembler.start()
            self.spool.publish_capture(
                {
                    "pid": os.getpid(),
                    "aux_layers": self.aux_layers,
                    "architecture": architecture,
                    "model_path": server_args.model_path,
                    "dtype": str(runner.dtype).removeprefix("torch."),
                    "chunked_prefill_size": server_args.chunked_prefill_size,
                }
            )

    def around_logits(
        self,
        original: Any,
        processor: Any,
        input_ids: Tensor | None,
        hidden_states: Tensor,
        lm_head: Any,
        metadata: Any,
        aux_hidden_states: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Copy marked rows, then run the original with unchanged arguments."""
        if self.writes and aux_hidden_states is not None and getattr(metadata, "rids", None):
            try:
                self._collect(input_ids, hidden_states, metadata, aux_hidden_states)
            except Exception:
                self.spool.publish_error(traceback.format_exc())
                raise
        return original(
            processor,
            input_ids,
            hidden_states,
            lm_head,
            metadata,
            aux_hidden_states,
            *args,
            **kwargs,
        )

    def _collect(self, input_ids: Tensor | None, final: Tensor, batch: Any, aux: Any) -> None:
        if not batch.forward_mode.is_extend() or batch.extend_seq_lens_cpu is None:
            return
        if input_ids is None:  # a vision wrapper hands its language model embeddings instead
            input_ids = batch.input_ids
        check_rows(sum(batch.extend_seq_lens_cpu), input_ids, aux, final)
        start = 0
        for rid, rows, prefix in zip(
            batch.rids, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True
        ):
            ticket = Ticket.parse(str(rid), self.secret)
            part = slice(start, start + rows)
            start += rows
            if ticket is None:
                continue
            states = [aux[part]] if isinstance(aux, Tensor) else [a[part] for a in aux]
            self.assembler.add(ticket, int(prefix), input_ids[part], states, final[part])


def _attention_tp_rank() -> int:
    """This process's rank in the attention-TP group; the accessor moved between versions."""
    try:
        from sglang.srt.runtime_context import get_parallel

        return get_parallel().attn_tp_rank
    except ImportError:
        from sglang.srt.layers.dp_attention import get_attention_tp_rank

        return get_attention_tp_rank()
