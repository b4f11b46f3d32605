"""Renders a model's chat template, which is untrusted code, in jinja2's sandbox. Host only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxspec.weights.files import ModelFileError

ROLES = ("assistant", "developer", "function", "system", "tool", "user")


class _GenerationTag(Extension):
    """Reads `{% generation %}`, which marks the model's own text for training, as nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template with the helpers that Hugging Face templates rely on."""

    def __init__(self, source: str, *, name: str) -> None:
        """Compiles the template.

        Args:
            source: jinja2.
            name: of the model, for messages.

        Raises:
            ModelFileError: the source is not valid jinja2.
        """
        self._name = name
        self._source = source
        # Settings and helpers are those of transformers' apply_chat_template.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelFileError(
                name,
                f"its chat template is not valid jinja2 (line {error.lineno}: {error.message})",
                "replace it or remove it",
            ) from None

    def knows_role(self, role: object) -> bool:
        """Whether a role is a usual one, or the template names it."""
        named = (f"'{role}'" in self._source, f'"{role}"' in self._source)
        return isinstance(role, str) and (role in ROLES or any(named))

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Renders a conversation.

        Args:
            messages: the turns, {"role": ..., "content": ...}; content is text, or a list of
                {"type": "text", "text": ...}, joined by line ends as vLLM does for templates that
                take text.
            variables: everything else that the template may read.

        Raises:
            ValueError: a role that neither the template nor anybody else knows, or a content that
                is no text, both of which most templates would write as they are; or the template
                refuses the messages.
        """
        for index, message in enumerate(messages):
            if not self.knows_role(message.get("role")):
                raise ValueError(
                    f"message {index} has the role {message.get('role')!r}; it must be one of "
                    f"{', '.join(ROLES)}, or one that the chat template of {self._name} names."
                )
        turns = [_with_text(index, message) for index, message in enumerate(messages)]
        try:
            return self._template.render(
                messages=turns, **{"tools": None, "documents": None, **variables}
            )
        except Exception as error:  # a template can fail in any way that code can
            raise ValueError(
                f"the chat template of {self._name} refuses the messages ({error}); each needs a "
                "role that the model knows and its content, in the order the model expects."
            ) from None


def _with_text(index: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its content as text; one without content is left to the template."""
    content = message.get("content", "")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    for part, text in zip(parts, texts, strict=True):
        is_other = isinstance(part, Mapping) and part.get("type", "text") != "text"
        if is_other or not isinstance(text, str):
            raise ValueError(
                f"message {index} has the content {part!r}; it must be text, or a list of "
                '{"type": "text", "text": ...}, since models here read nothing else.'
            )
    return {**message, "content": "\n".join(texts)}


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
