"""Train `tiny-gsm-llama` from scratch: a 1.4M-parameter Llama chat model for word problems.

    python tests/assets/train_tiny_llama.py OUT [--minutes 10] [--device cpu] [--gsm 60000]

Tests need a real target: one with a peaked distribution over text, a chat template and an
end-of-turn token, yet small enough for a server without a GPU. The text is reasoning-gym's
`gsm_symbolic`: question and worked answer, from seeds 1000 upwards (so evaluate on seeds from
100000). Run it where this project is installed, or with PYTHONPATH=. in its root.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from demo.prompts import TRAIN_SEED, problems

log = logging.getLogger(__name__)

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTEXT_LENGTH = 2048
TOKENIZER_DOCUMENTS = 20_000
WARMUP_STEPS = 40


def documents(count: int, seed: int) -> list[str]:
    """`count` chats as ChatML text, shuffled."""
    texts = [
        f"<|im_start|>user\n{problem.question}<|im_end|>\n"
        f"<|im_start|>assistant\n{problem.answer}<|im_end|>\n"
        for problem in problems(TRAIN_SEED + seed, count)
    ]
    np.random.default_rng(seed).shuffle(texts)
    return texts


def train_tokenizer(texts: list[str], vocab_size: int, out: Path) -> Tokenizer:
    """A byte-level BPE tokenizer that keeps digits apart, saved to `out` for transformers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:TOKENIZER_DOCUMENTS], trainer)
    tokenizer.save(str(out / "tokenizer.json"))
    end_of_text, start, end = SPECIAL_TOKENS
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_text,
        "eos_token": end,
        "pad_token": end_of_text,
        "unk_token": end_of_text,
        "additional_special_tokens": [start, end],
        "model_max_length": CONTEXT_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """All documents as one row of ids, <|endoftext|> (0) after each: [tokens]."""
    pieces = [np.array([*e.ids, 0], np.int32) for e in tokenizer.encode_batch(texts)]
    return torch.from_numpy(np.concatenate(pieces)).long()


def build_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """The Llama of the command line's shape, grouped-query attention, tied embeddings."""
    num_heads = args.hidden // args.head_dim
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 3,
        num_hidden_layers=args.layers,
        num_attention_heads=num_heads,
        num_key_value_heads=max(1, num_heads // 2),
        head_dim=args.head_dim,
        max_position_embeddings=CONTEXT_LENGTH,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(args.device)


def loss_of(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross-entropy of `rows` [batch, seq + 1]."""
    device = rows.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def sample(
    ids: torch.Tensor, args: argparse.Namespace, generator: torch.Generator | None = None
) -> torch.Tensor:
    """A batch of windows at random places: [batch, seq + 1]."""
    starts = torch.randint(0, len(ids) - args.seq - 1, (args.batch,), generator=generator)
    return torch.stack([ids[start : start + args.seq + 1] for start in starts]).to(args.device)


def train(model: LlamaForCausalLM, ids: torch.Tensor, args: argparse.Namespace) -> int:
    """Train until the minutes or the steps are used up, whichever is first; the steps taken."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    start, step = time.monotonic(), 0
    while True:
        done = max((time.monotonic() - start) / (args.minutes * 60), step / args.steps)
        if done >= 1:
            return step
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1, (step + 1) / WARMUP_STEPS) * cosine
        loss = loss_of(model, sample(ids, args))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 50 == 0:
            speed = step * args.batch * args.seq / (time.monotonic() - start)
            log.info("step %d: loss %.3f, %.0f tokens/s", step, loss.item(), speed)


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, ids: torch.Tensor, args: argparse.Namespace) -> float:
    """Mean loss of four fixed batches."""
    generator = torch.Generator().manual_seed(1)
    return sum(float(loss_of(model, sample(ids, args, generator))) for _ in range(4)) / 4


def save(model: LlamaForCausalLM, out: Path) -> None:
    """Save in float32, with the spellings of config keys that older servers read."""
    model.to(torch.float32).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    path = out / "config.json"
    config = {"rope_theta": 10_000.0, "torch_dtype": "float32"} | json.loads(path.read_text())
    path.write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gsm", type=int, default=60_000, help="number of word problems")
    sizes = {"vocab": 2048, "hidden": 128, "layers": 6, "head-dim": 64, "batch": 8, "seq": 256}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    texts = documents(args.gsm, args.seed)
    ids = encode(train_tokenizer(texts, args.vocab, args.out), texts)
    num_held_out = max(4 * args.seq, len(ids) // 200)
    model = build_model(args)
    log.info("%d tokens, %.2fM parameters", len(ids), model.num_parameters() / 1e6)
    steps = train(model, ids[num_held_out:], args)
    log.info("loss %.3f after %d steps", evaluate(model, ids[:num_held_out], args), steps)
    save(model, args.out)


if __name__ == "__main__":
    main()
