"""A prompt as the model is asked it: a chat through the model's template, a text as it is.

Law: each prompt is rendered and encoded once; a chat template writes the special tokens itself, a text gets those that
the tokenizer puts around texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.tokenizer.chat_template import ChatTemplate
from paceline.tokenizer.fast_tokenizer import FastTokenizer


class PromptRenderer:
    """Implements `core.ports.PromptRenderer`."""

    def __init__(self, tokenizer: FastTokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    @property
    def takes_chats(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def render(self, prompt: Sequence[Mapping[str, str]] | str) -> tuple[str, list[int]]:
        """See the port."""
        if isinstance(prompt, str):
            return prompt, self._tokenizer.encode(prompt)
        if self._template is None:
            raise ValueError(
                "is a chat, but the model has no chat template: use plain texts as prompts, or a model that has one"
            )
        text = self._template.render(prompt)
        return text, self._tokenizer.encode_rendered(text)
