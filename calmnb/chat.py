"""From a conversation to the text, and the token ids, that a model was trained on.

A chat template is Jinja source that comes with the model (`calmnb.chat_sandbox` renders it). Files without one, such as
those calm made, get the format that calm would choose from the markers in their vocabulary (SPEC_calm.md 5.5), with two
repairs: the conversation so far is kept whole, and each answer in it ends with its end-of-turn token.

What people type is data. Where a user's message spells a control token (``<|im_end|>``), it is encoded as those
characters and cannot end the turn; see `ChatTemplate.encode`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jinja2

from calmnb.chat_sandbox import compile_template, render
from calmnb.errors import ConfigError, TemplateError
from calmnb.tokenizer import Tokenizer, any_of

if TYPE_CHECKING:
    from calmnb.checkpoint import CalmFile

__all__ = ["FALLBACKS", "ChatFormat", "ChatTemplate", "template_for"]

Message = Mapping[str, Any]

#: Pairs of private-use characters that fence a user's control-token text on its way through a template.
_FENCES = [(chr(0xF0000 + 2 * i), chr(0xF0001 + 2 * i)) for i in range(64)]


@dataclass(frozen=True)
class ChatFormat:
    """How calm writes a conversation for models with one marker token.

    Attributes
    ----------
    marker : str
        Token that reveals the format; "" is the format of last resort.
    system : str
        System prompt, ``{S}``, written before the first user turn; "" if it goes into `first_user`.
    user : str
        A user turn, ``{U}``.
    first_user : str
        The first user turn where a system prompt goes inside it; "" to use `user`.
    answer : str
        What announces the answer.
    end : str
        What ends an answer in the history; ``{eos}`` is the model's end-of-text token.
    """

    marker: str
    system: str
    user: str
    answer: str
    end: str
    first_user: str = ""


#: Tried in this order.
FALLBACKS: tuple[ChatFormat, ...] = (
    ChatFormat(
        "<|eot_id|>",
        "<|start_header_id|>system<|end_header_id|>\n\n{S}<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\n{U}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
    ChatFormat(
        "<|im_start|>",
        "<|im_start|>system\n{S}<|im_end|>",
        "\n<|im_start|>user\n{U}<|im_end|>",
        "\n<|im_start|>assistant\n",
        "<|im_end|>",
    ),
    ChatFormat(
        "<start_of_turn>",
        "",
        "\n<start_of_turn>user\n{U}<end_of_turn>",
        "\n<start_of_turn>model\n",
        "<end_of_turn>",
        first_user="<start_of_turn>user\nSYSTEM: {S}\n\n{U}<end_of_turn>",
    ),
    ChatFormat(
        "<|START_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{S}<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{U}<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
    ),
    ChatFormat("<|assistant|>", "<|system|>\n{S}<|end|>", "\n<|user|>\n{U}<|end|>", "\n<|assistant|>\n", "<|end|>"),
    ChatFormat(
        "<|beginofsystem|>", "<|beginofsystem|>{S}<|endofsystemprompt|>", "<|beginofuser|>{U}", "<|beginofsystem|>", "{eos}"
    ),
    ChatFormat("", "", "[INST] {U} [/INST]", "", "{eos}", first_user="[INST] <<SYS>>\n{S}\n<</SYS>>\n\n{U} [/INST]"),
)


class ChatTemplate:
    """Writes conversations the way one model expects them.

    Parameters
    ----------
    source : str or None
        Jinja source; None chooses one of `FALLBACKS` by the vocabulary.
    tokenizer : Tokenizer
    special_tokens : mapping of str to str, optional
        Texts that templates see by role (``bos_token``, ``eos_token``, ...); BOS and EOS default to the tokenizer's.

    Attributes
    ----------
    source : str or None
    fallback : ChatFormat or None
        The format in use where there is no source.
    """

    def __init__(self, source: str | None, tokenizer: Tokenizer, *, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.fallback: ChatFormat | None = None
        self._tokenizer = tokenizer
        self._variables: dict[str, Any] = {
            "bos_token": _text_of(tokenizer, tokenizer.bos_id),
            "eos_token": _text_of(tokenizer, tokenizer.eos_id),
            **(special_tokens or {}),
        }
        if source is None:
            known = (f for f in FALLBACKS if not f.marker or tokenizer.id_of(f.marker) is not None)
            self.fallback = next(known)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        assert self.source is not None
        return compile_template(self.source)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """Text of a conversation.

        Parameters
        ----------
        messages : sequence of {"role": ..., "content": ...}
        add_generation_prompt : bool
            Whether to end with what announces the model's answer.
        **variables
            Passed to the template (``tools``, ``enable_thinking``, ...); fallback formats ignore them.

        Returns
        -------
        str

        Raises
        ------
        ConfigError
            If `messages` is empty or not made of roles and contents.
        TemplateError
            If the template refuses the messages (with its own words), fails, or exceeds its bounds.
        """
        plain = _checked(messages)
        if self.fallback is not None:
            return _write(self.fallback, plain, add_generation_prompt, str(self._variables.get("eos_token") or ""))
        given = {"tools": None, "documents": None, **self._variables, **variables}
        return render(self._compiled, {**given, "messages": plain, "add_generation_prompt": add_generation_prompt})

    def encode(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        specials_in_content: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation.

        Templates write BOS themselves, so none is added to theirs; fallback formats get one if the model has one.

        Parameters
        ----------
        messages, add_generation_prompt, **variables
            See `render`.
        specials_in_content : bool
            Whether the text of a control token inside a message stands for that token. False, the default, encodes it
            as ordinary characters in every message that is not the assistant's, so that what a user types cannot end
            the turn or speak for someone else.

        Returns
        -------
        list of int

        Raises
        ------
        ConfigError, TemplateError
            As `render` does.
        """
        plain = _checked(messages)
        fence = None if specials_in_content else self._fence(plain)
        text = self.render(plain, add_generation_prompt, **variables)
        bos = None if self.fallback is not None else False
        if fence is None:
            return self._tokenizer.encode(text, bos=bos)
        ids: list[int] = []
        for i, part in enumerate(re.split(f"{fence[0]}(.*?){fence[1]}", text, flags=re.DOTALL)):
            if part:
                ids += self._tokenizer.encode(part, bos=bos if not ids else False, specials=i % 2 == 0)
        return ids

    def _fence(self, messages: list[dict[str, Any]]) -> tuple[str, str] | None:
        """Put fences around control-token texts that others than the assistant wrote; None if there are none."""
        pattern = self._pattern
        theirs = [(m, text) for m in messages if m["role"] != "assistant" for text in _texts(m["content"])]
        if pattern is None or not any(pattern.search(text) for _, text in theirs):
            return None
        everything = "".join(text for m in messages for text in _texts(m["content"]))
        fence = next(((a, b) for a, b in _FENCES if a not in everything and b not in everything), None)
        if fence is None:
            raise ConfigError("the messages use every private-use character there is; remove U+F0000 to U+F007F from them")

        def fenced(text: str) -> str:
            return pattern.sub(lambda match: f"{fence[0]}{match.group()}{fence[1]}", text)

        for message in messages:
            if message["role"] != "assistant":
                message["content"] = _mapped(message["content"], fenced)
        return fence

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        return any_of(self._tokenizer.specials)


def template_for(file: CalmFile, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the chat template that `file` carries, or calm's format for its vocabulary."""
    stored = file.extras.get("chat_template")
    roles = file.settings.get("special_tokens")
    source = stored.decode("utf-8", errors="replace") if stored else None
    if source is None:
        named = file.settings.get("chat_templates")
        source = named.get("default") if isinstance(named, dict) else None
    special = {k: v for k, v in roles.items() if isinstance(v, str)} if isinstance(roles, dict) else None
    return ChatTemplate(source, tokenizer, special_tokens=special)


def _text_of(tokenizer: Tokenizer, token: int) -> str:
    if not 0 <= token < tokenizer.vocab_size:
        return ""
    return tokenizer.token_bytes(token).decode("utf-8", errors="replace")


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Own copies of the messages, each with a role and a content."""
    accepted = 'accepted is a list of {"role": "user", "content": "..."}'
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ConfigError(f"messages is a {type(messages).__name__}; {accepted}")
    if not messages:
        raise ConfigError(f"messages is empty; {accepted} with at least one message")
    plain = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigError(f"message {i} is {_shortened(message)}; {accepted}")
        content = message.get("content")
        if content is not None and not isinstance(content, (str, list)):
            raise ConfigError(f"message {i} has a content of type {type(content).__name__}; {accepted}")
        plain.append(json.loads(json.dumps({**message, "content": content}, default=str)))
    return plain


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or [] if isinstance(part, dict) and isinstance(part.get("text"), str)]


def _mapped(content: Any, change: Callable[[str], str]) -> Any:
    if isinstance(content, str):
        return change(content)
    if isinstance(content, list):
        return [
            {**p, "text": change(p["text"])} if isinstance(p, dict) and isinstance(p.get("text"), str) else p for p in content
        ]
    return content


def _write(style: ChatFormat, messages: list[dict[str, Any]], add_generation_prompt: bool, eos: str) -> str:
    """A conversation in one of calm's formats."""
    system, turns = "", messages
    if turns[0]["role"] == "system":
        system, turns = "".join(_texts(turns[0]["content"])), turns[1:]
    pieces = [style.system.replace("{S}", system)] if system else []
    if not turns:
        raise TemplateError("the conversation holds no user message; this model's built-in chat format needs one")
    for i, turn in enumerate(turns):
        expected = ("user", "assistant")[i % 2]
        if turn["role"] != expected:
            raise TemplateError(
                f"message {len(messages) - len(turns) + i} is the {turn['role']}'s, but the {expected}'s turn was expected: "
                "after an optional system message, this model's built-in chat format alternates user and assistant"
            )
        text = "".join(_texts(turn["content"]))
        if expected == "assistant":
            pieces += [style.answer, text, style.end.replace("{eos}", eos)]
        elif system and i == 0 and style.first_user:
            before, after = style.first_user.split("{U}")
            pieces += [before.replace("{S}", system), text, after]
        else:
            pieces.append(style.user.replace("{U}", text))
    if add_generation_prompt:
        if len(turns) % 2 == 0:
            raise TemplateError("the conversation ends with the assistant's message; there is nothing to answer")
        pieces.append(style.answer)
    return "".join(pieces)


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."
