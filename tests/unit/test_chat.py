"""The loss mask covers exactly what the assistant says, on templates of several families."""

import pytest
from transformers import LlamaTokenizer

from eagle3.chat import ChatEncoder
from eagle3.errors import UserError
from eagle3.records import Record, RowError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# each marker below is spelled with this tokenizer's two special tokens
LLAMA3 = (
    "{{ '<|endoftext|>' }}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '<|im_start|>\n\n' }}"
    "{{ m['content'] | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_start|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
)
# drops the reasoning of all turns but the last, as several reasoning models do
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALK = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "It is 6.\nSurely."},
]


def encoder(target, template: str) -> ChatEncoder:
    tokenizer = type(target.tokenizer).from_pretrained(target.folder)
    tokenizer.chat_template = template
    return ChatEncoder(tokenizer)


def spoken(chat: ChatEncoder, ids: list[int], mask: list[int]) -> list[str]:
    """Decoded text of each masked run."""
    runs, current = [], []
    for token, flag in zip([*ids, 0], [*mask, 0], strict=True):
        if flag:
            current.append(token)
        elif current:
            runs.append(chat.tokenizer.decode(current))
            current = []
    return runs


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL])
def test_mask_decodes_to_the_assistants_texts_and_end_of_turn(target, template: str) -> None:
    chat = encoder(target, template)
    samples = chat.encode(Record(id="t", messages=TALK))
    # this tokenizer splits the blank line after a header otherwise once a text follows it
    assert len(samples) == (2 if template == LLAMA3 else 1)
    texts = [t.strip() for s in samples for t in spoken(chat, s.input_ids, s.loss_mask)]
    assert texts == ["It is 4.<|im_end|>", "It is 6.\nSurely.<|im_end|>"]
    prompt = chat.prompt(TALK[:3])
    assert samples[-1].input_ids[: len(prompt)] == prompt


@pytest.mark.parametrize("answer", ["It is 4.", "\n\nIt is 4.", " It is 4.", "```py\nx```"])
def test_every_turn_follows_what_a_server_would_tokenise(target, answer: str) -> None:
    chat = encoder(target, CHATML)
    talk = [TALK[0], {"role": "assistant", "content": answer}, *TALK[2:]]
    samples = chat.encode(Record(id="t", messages=talk))
    for turn, sample in zip((1, 3), samples[-2:] * (3 - len(samples)), strict=True):
        prompt = chat.prompt(talk[:turn])
        assert sample.input_ids[: len(prompt)] == prompt
        assert sample.loss_mask[len(prompt)] == 1
    said = [t for s in samples for t in spoken(chat, s.input_ids, s.loss_mask)]
    assert said == [f"{answer}<|im_end|>", "It is 6.\nSurely.<|im_end|>"]


def test_a_tokenizer_that_begins_every_text_with_a_space_does_not_begin_turns_so() -> None:
    letters = [*"\u2581abcdefghijklmnopqrstuvwxyz<|>/", *(f"<0x{i:02X}>" for i in range(256))]
    names = dict.fromkeys(["<unk>", "<s>", "</s>", *letters])
    tokenizer = LlamaTokenizer(vocab={name: i for i, name in enumerate(names)}, merges=[])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("yes", add_special_tokens=False)) == [
        "\u2581", "y", "e", "s",
    ]  # fmt: skip
    words = ["hi", "yes", "so", "no"]
    roles = ["user", "assistant"] * 2
    talk = [{"role": r, "content": w} for r, w in zip(roles, words, strict=True)]
    (sample,) = ChatEncoder(tokenizer).encode(Record(id="t", messages=talk))
    text = tokenizer.apply_chat_template(talk, tokenize=False)
    assert sample.input_ids == tokenizer.encode(text, add_special_tokens=False)
    said = [i for i, m in zip(sample.input_ids, sample.loss_mask, strict=True) if m]
    assert tokenizer.convert_ids_to_tokens(said) == [*"yes", "</s>", *"no", "</s>"]


def test_a_server_stops_at_the_tokenizers_end_of_sequence_too(target) -> None:
    template = "{{ messages[0].content + '<|im_start|>' }}{% if messages | length > 1 %}" + (
        "{{ messages[1].content + '<|im_end|>\n<|endoftext|>' }}{% endif %}"
    )
    chat = encoder(target, template)
    last = chat.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert chat.tokenizer.eos_token == "<|im_end|>"
    chat = ChatEncoder(chat.tokenizer, eos_ids=[last])
    (sample,) = chat.encode(Record(id="t", messages=TALK[:2]))
    assert spoken(chat, sample.input_ids, sample.loss_mask) == ["It is 4.<|im_end|>"]


def test_a_template_that_rewrites_history_gives_one_sample_a_turn(target) -> None:
    chat = encoder(target, FORGETFUL)
    talk = [dict(m) for m in TALK]
    talk[1]["content"] = "<think>two and two</think>It is 4."
    samples = chat.encode(Record(id="t", messages=talk))
    said = [spoken(chat, s.input_ids, s.loss_mask) for s in samples]
    assert said == [
        ["<think>two and two</think>It is 4.<|im_end|>"],
        ["It is 6.\nSurely.<|im_end|>"],
    ]


def test_output_ids_are_taken_as_they_are(target) -> None:
    chat = encoder(target, CHATML)
    record = Record(id="t", messages=TALK[:2], output_ids=[7, 8, 9])
    (sample,) = chat.encode(record)
    assert sample.input_ids == chat.prompt(TALK[:1]) + [7, 8, 9]
    assert sum(sample.loss_mask) == 3 and sample.loss_mask[-3:] == [1, 1, 1]


def test_a_cut_off_answer_gets_no_invented_end_of_turn(target) -> None:
    chat = encoder(target, CHATML)
    (sample,) = chat.encode(Record(id="t", messages=TALK[:2], output_ids=[7, 8]))
    assert sample.input_ids[-1] == 8


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (CHATML, TALK[:1], "no assistant turn"),
        (CHATML.replace("m['content']", "m['content'] | upper"), TALK, "changes the assistant"),
        ("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", TALK[:2], "no end-of-turn"),
        ("{{ raise_exception('no system') }}", TALK, "rejects the conversation"),
        ("{{ 'a' + messages[0]['name'] + 1 }}", TALK, "rejects the conversation"),
        ("{{ messages[0]['content'] + 1 }}", TALK, "rejects the conversation"),
    ],
)  # fmt: skip
def test_unfaithful_templates_are_counted_not_trained_on(
    target, template, messages, reason
) -> None:
    with pytest.raises(RowError, match=reason):
        encoder(target, template).encode(Record(id="t", messages=messages))


def test_a_target_without_a_chat_template_is_a_users_mistake(target) -> None:
    chat = encoder(target, CHATML)
    chat.tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        chat.encode(Record(id="t", messages=TALK))
    ids = Record(id="t", input_ids=[1, 2, 3], loss_mask=[0, 1, 1])
    assert chat.encode(ids)[0].input_ids == [1, 2, 3]


# ends a conversation with a token that no server would wait for, as Phi-3's does
TRAILING = CHATML.replace("{% endif %}", "{% else %}{{ '<|endoftext|>' }}{% endif %}")


def test_nothing_after_the_token_that_ends_a_turn_is_supervised(target) -> None:
    chat = encoder(target, TRAILING)
    chat.eos_ids = frozenset(target.eos_ids)
    (sample,) = chat.encode(Record(id="t", messages=TALK[:2]))
    assert spoken(chat, sample.input_ids, sample.loss_mask) == ["It is 4.<|im_end|>"]
    assert chat.tokenizer.decode(sample.input_ids).endswith("<|im_end|>\n<|endoftext|>")
