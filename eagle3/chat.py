"""Messages -> token ids and loss mask, as the server sees them.

The loss mask is 1 on exactly the tokens the target would generate: an assistant turn and its
end-of-turn token. It is found by rendering the chat template before and after each assistant turn,
never from hard-coded markers. What comes before a turn is tokenised whole and without it, because
that is what happens live: the prompt is tokenised, then the model adds tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from eagle3.errors import UserError
from eagle3.records import Message, Record, RowError


@dataclass(kw_only=True, slots=True)
class Encoded:
    """Token ids and, per token, 1 where the target generated it."""

    input_ids: list[int]
    loss_mask: list[int]


class ChatEncoder:
    """Encodes with one tokenizer and its chat template.

    Args:
        eos_ids: tokens at which a server stops, besides the tokenizer's own end of sequence.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_kwargs: dict[str, Any] | None = None,
        eos_ids: Iterable[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs or {}
        self.eos_ids = frozenset([*eos_ids, tokenizer.eos_token_id])
        self.special_ids = set(tokenizer.all_special_ids)

    def prompt(self, messages: list[Message], tools: list[Any] | None = None) -> list[int]:
        """Token ids of a prompt, ending where the assistant starts to speak.

        Raises:
            RowError: there is nothing to render, or the template rejects it.
        """
        if not messages:
            raise RowError("no messages")
        return self._ids(self._render(messages, tools, generate=True))

    def encode(self, record: Record) -> list[Encoded]:
        """All samples of a record.

        One sample per conversation; where the template rewrites earlier turns (it drops their
        reasoning, say) or they are other tokens as part of a prompt, one per assistant turn, each
        as it was when that turn was generated.

        Raises:
            RowError: no assistant turn, or the template does not render it faithfully.
        """
        if record.input_ids is not None and record.loss_mask is not None:
            return [Encoded(input_ids=record.input_ids, loss_mask=record.loss_mask)]
        if record.output_ids is not None:
            prompt = self.prompt(record.prompt, record.tools)
            mask = [0] * len(prompt) + [1] * len(record.output_ids)
            return [Encoded(input_ids=prompt + record.output_ids, loss_mask=mask)]
        turns = [i for i, m in enumerate(record.messages) if m["role"] == "assistant"]
        if not turns:
            raise RowError("no assistant turn")
        whole = self._conversation(record, turns)
        if whole is not None:
            return [whole]
        singles = [
            self._conversation(record, turns[: n + 1], only_last=True) for n in range(len(turns))
        ]
        if None in singles:
            raise RowError("the template does not render the assistant's turn after its prompt")
        return [s for s in singles if s is not None]

    def _conversation(
        self, record: Record, turns: list[int], only_last: bool = False
    ) -> Encoded | None:
        """Encode up to the last of `turns`; None if an earlier rendering, or its tokens, are no
        prefix of it."""
        text = self._render(record.messages[: turns[-1] + 1], record.tools)
        ids: list[int] = []
        mask: list[int] = []
        for turn in turns[-1:] if only_last else turns:
            before = self._render(record.messages[:turn], record.tools, generate=True)
            after = self._render(record.messages[: turn + 1], record.tools)
            if not (text.startswith(before) and text.startswith(after)):
                return None
            said = text[len(before) : len(after)]
            if record.messages[turn]["content"].strip() not in said:
                raise RowError("the template changes the assistant's text")
            prompt_ids = self._ids(before)
            if prompt_ids[: len(ids)] != ids:
                return None
            said_ids = self._said_ids(before, prompt_ids, said)
            num_said = self._end_of_turn(said_ids)
            mask += [0] * (len(prompt_ids) - len(ids))
            mask += [1] * num_said + [0] * (len(said_ids) - num_said)
            ids = prompt_ids + said_ids
        return Encoded(input_ids=ids, loss_mask=mask)

    def _said_ids(self, before: str, prompt_ids: list[int], said: str) -> list[int]:
        """Tokens of what follows a prompt.

        Of the two texts together, for some tokenizers begin every text with a space. Where a token
        would lie across the border, which the model cannot have said, of the text alone.

        Raises:
            RowError: even so it would not be the text that the template renders.
        """
        together = self._ids(before + said)
        if together[: len(prompt_ids)] == prompt_ids:
            return together[len(prompt_ids) :]
        alone = self._ids(said)
        if self.tokenizer.decode(prompt_ids + alone) != self.tokenizer.decode(together):
            raise RowError("the tokenizer changes the assistant's text")
        return alone

    def _end_of_turn(self, ids: list[int]) -> int:
        """Number of tokens up to and including the first at which a server stops, or else the
        turn's last special token."""
        for position, token in enumerate(ids):
            if token in self.eos_ids:
                return position + 1
        for position in range(len(ids) - 1, -1, -1):
            if ids[position] in self.special_ids:
                return position + 1
        raise RowError("the template renders no end-of-turn token")

    def _render(
        self, messages: list[Message], tools: list[Any] | None, generate: bool = False
    ) -> str:
        import jinja2

        if getattr(self.tokenizer, "chat_template", "") is None:
            raise UserError(
                "the target has no chat template: put one into its folder (chat_template.jinja), "
                "or bring rows of input_ids"
            )
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=generate,
                **self.template_kwargs,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:  # of values it cannot take
            raise RowError("the chat template rejects the conversation") from error

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)
