"""A chat request without a wire: from its body to the engine's requests, and from the engine's events to deltas of
text, reasoning and tool calls. Every route that answers chats uses it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from msgspec.structs import replace

from ...runtime.errors import RequestError
from ...runtime.step.requests import FinishReason, GenerationEvent, GenerationRequest
from ...runtime.text.chat import mentions
from .deltas import (
    REASONING_OFF,
    Answer,
    Delta,
    Finish,
    ReasoningDelta,
    ReasoningReader,
    ReasoningTags,
    TextDelta,
    ToolCallDelta,
    answers_in_channels,
    reasoning_tags,
)
from .fields import CHAT, refuse_unsupported
from .generation import SequenceOutcome
from .parameters import (
    check_extras,
    check_stream,
    check_top_logprobs,
    max_tokens_of,
    num_choices,
    prompt_tokens,
    sequences,
    wanted_first_token,
)
from .prompts import (
    ChatPrompt,
    ChatSettings,
    budget_of,
    template_messages,
    thinks_of,
    with_arguments,
    with_ids,
)
from .responses import CompletionTokensDetails, Usage
from .schemas import ChatBody, PlacedChat
from .structured import grammar_of
from .tools.functions import ToolMode, ToolPlan, described, tool_plan

if TYPE_CHECKING:
    from ...runtime.grammar.matcher import Grammar
    from ...runtime.grammar.spec import GrammarSpec
    from ...runtime.text.settings import TextSettings
    from ...runtime.text.tokenizer import TextTokenizer
    from ..function.images import ChatImages, ImageSource
    from .tools.format import ToolFormat
    from .tools.harmony import ChannelReader, PromptEnd
    from .tools.reader import CallReader

logger = logging.getLogger("teneral.http")
_REASONING_FORMATS = ("auto", "deepseek", "none", "parsed", "raw", "hidden")


def log_warnings(request_id: str, warnings: Sequence[str]) -> None:
    """Log what of a request is left out or without effect."""
    for warning in warnings:
        logger.info("request %s: %s", request_id, warning)


class ChatRequest:
    """An `Asked`. Its answer is read choice by choice: `read` for streams, `answer` for the whole.

    Raises `RequestError` for an invalid body.
    """

    needs_context = False

    def __init__(
        self,
        body: ChatBody,
        *,
        request_id: str,
        settings: ChatSettings,
    ) -> None:
        check_stream(body)
        check_extras(body)
        refuse_unsupported(body, CHAT)
        if any(modality != "text" for modality in body.modalities or []):
            raise RequestError("modalities other than 'text' are not supported", param="modalities")
        self.body = body
        self.max_tokens = body.max_completion_tokens
        if self.max_tokens is None:
            self.max_tokens = max_tokens_of(body, default=None)
        self.first_token = wanted_first_token(body, default=settings.first_token)
        self.num_sequences = num_choices(body, num_prompts=1, max_sequences=settings.max_sequences)
        self.prompt: tuple[int, ...] = ()  # its tokens, once it is prepared
        self.num_top_logprobs = _num_top_logprobs(body)
        self.warnings: list[str] = []  # what of the request has no effect with this model
        self._id = request_id
        self._settings = settings
        self._reasoning_parser = _reasoning_parser(body, settings)
        self._budget = budget_of(body)
        self._templates: Mapping[str, str] = {}  # the model's
        self._messages = template_messages(body.messages)
        self.images = _images_of(body)
        places = body.tool_places if isinstance(body, PlacedChat) else None
        self._tool_warnings: list[str] = []
        tools = body.tools
        self.custom_tools: frozenset[str] = frozenset()
        if tools:
            from .tools.custom import functions_for  # of requests with tools

            tools, self.custom_tools = functions_for(tools, self._tool_warnings)
        self._plan = tool_plan(tools, body.tool_choice, body.parallel_tool_calls, places)
        self._form = grammar_of(body)
        self._prompt = ChatPrompt(body, self._settings)
        if (
            self._plan.mode is ToolMode.REQUIRED
            and self._form is not None
            and not self._form.param.startswith("response_format")  # its schema is named, too
        ):
            raise RequestError(
                f"{self._form.param} and a required tool call contradict one another", param=self._form.param
            )
        self._readers: dict[int, AnswerReader] = {}
        self._reasoning: list[str] = []  # of all choices, as it is read
        self._tokenizer: TextTokenizer | None = None  # once it is prepared
        self.counts_reasoning = False  # True, once it is prepared, if `with_reasoning` asks the tokenizer
        # Known once there is a prompt
        self._format: ToolFormat | None = None
        self._tags: ReasoningTags | None = None
        self._is_open = self._is_guided = False
        self._prompt_end: PromptEnd | None = None  # of a model that answers in channels

    def with_images(self, files: Mapping[str, bytes]) -> ChatRequest:
        """The same request with these files in place of their addresses."""
        from .images import with_files

        body = replace(self.body, messages=with_files(self.body.messages, files))
        return ChatRequest(body, request_id=self._id, settings=self._settings)

    @property
    def grammar(self) -> GrammarSpec | None:
        """The form of every answer, whatever the model's family; None where calls or reasoning may come first."""
        return self._form if self._plan.mode is ToolMode.NONE else None

    def begins_with_answer(self, templates: Mapping[str, str]) -> bool:
        """True if no reasoning can come first. False without a chat template: the request is refused then."""
        return bool(self._prompt.templates(templates)) and not self.may_reason(templates)

    def may_reason(self, templates: Mapping[str, str]) -> bool:
        """True if the model's chat templates let an answer begin with reasoning."""
        templates = self._prompt.templates(templates)
        return self._has_channels(templates) or self._reasoning_tags(templates) is not None

    def render(self, tokenizer: TextTokenizer) -> str:
        """The prompt as text. Blocks. Raises `RequestError` for what the model's template does not take."""
        self._tokenizer, self._templates = tokenizer, tokenizer.templates
        self.counts_reasoning = self.may_reason(tokenizer.templates)
        templates = self._prompt.templates(tokenizer.templates)
        self._tags = None if self._has_channels(templates) else self._reasoning_tags(templates)
        self._format = self._format_of(templates)
        return self._render(tokenizer, templates)

    def prepare(self, tokenizer: TextTokenizer, max_tokens: int | None) -> list[GenerationRequest]:
        text = self.render(tokenizer)
        has_channels = self._has_channels(self._prompt.templates(tokenizer.templates))
        self.warnings = [*self._tool_warnings, *self._prompt.warnings, *self._without_reasoning()]
        log_warnings(self._id, self.warnings)
        self._is_open = self._tags is not None and self._tags.is_open(text)
        if has_channels:
            from .tools.harmony import PromptEnd  # of few models

            self._prompt_end = PromptEnd.of(text)
        if self.images is not None:
            text = self.images.expanded(text, tokenizer.images, max_tokens)
        prompt = prompt_tokens(
            self.body,
            text,
            tokenizer,
            add_special_tokens=bool(self.body.add_special_tokens),  # the template wrote them
            max_prompt_tokens=max_tokens,
            max_tokens=self.max_tokens,
        )
        self.prompt = prompt
        images = self.images.placed(prompt, tokenizer) if self.images is not None else ()
        grammar = self._grammar()
        return sequences(
            self.body,
            [prompt],
            tokenizer,
            request_id=self._id,
            n=self.num_sequences,
            max_tokens=self.max_tokens,
            num_top_logprobs=self.num_top_logprobs,
            num_prompt_logprobs=self.body.prompt_logprobs,
            first_token=self.first_token,
            grammar=self._within_budget(
                tokenizer, None if grammar is None else tokenizer.compile_grammar(grammar)
            ),
            shown_tokens=self._shown_tokens(tokenizer),
            images=images,
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def last_message(self) -> Mapping[str, Any]:
        return self._messages[-1]

    def read(self, index: int, event: GenerationEvent) -> list[Delta]:
        """The deltas of an event of choice `index`; the last event's end with `Finish`."""
        if index not in self._readers:
            self._readers[index] = self._reader(is_eager=True)
        is_cut = _is_cut(event.finish_reason, event.stopped_by)
        deltas = self._readers[index].push(event.text, event.finish_reason, is_cut=is_cut)
        self._reasoning += [delta.text for delta in deltas if isinstance(delta, ReasoningDelta)]
        return deltas

    def answer(self, outcome: SequenceOutcome) -> Answer:
        """A whole choice. Of one that was cut off, a call is given as far as it came, as in a stream."""
        is_cut = _is_cut(outcome.finish_reason, outcome.stopped_by)
        reader = self._reader(is_eager=is_cut)
        answer = Answer.of(reader.push(outcome.text, outcome.finish_reason, is_cut=is_cut))
        self._reasoning.append(answer.reasoning)
        return answer

    def with_reasoning(self, usage: Usage) -> Usage:
        """The usage with the tokens of the reasoning that was read, for a model that reasons. Blocks."""
        if self._tokenizer is None or not self.counts_reasoning:
            return usage
        text, details = "".join(self._reasoning), usage.completion_tokens_details
        num_tokens = len(self._tokenizer.encode(text, add_special_tokens=False)) if text else 0
        details = replace(
            CompletionTokensDetails() if details is UNSET else details,
            reasoning_tokens=min(num_tokens, usage.completion_tokens),
        )
        return replace(usage, completion_tokens_details=details)

    def _has_channels(self, templates: Mapping[str, str]) -> bool:
        return answers_in_channels(templates, self._settings.tool_parser)

    def _reasoning_tags(self, templates: Mapping[str, str]) -> ReasoningTags | None:
        return reasoning_tags(templates, self._reasoning_parser)

    def _reader(self, *, is_eager: bool) -> AnswerReader:
        if self._prompt_end is not None:
            functions = {} if self._format is None else self._plan.parameters
            channels = self._prompt_end.reader(
                functions,
                max_calls=self._plan.max_calls,
                is_eager=is_eager,
                gives_reasoning=self._reasoning_parser != REASONING_OFF,
            )
            return AnswerReader(channels, None)
        reasoning = None if self._tags is None else ReasoningReader(self._tags, is_open=self._is_open)
        calls = None
        if self._format is not None:
            from .tools.reader import CallReader  # of requests with tools

            calls = CallReader(
                self._format,
                self._plan.parameters,
                is_guided=self._is_guided,
                max_calls=self._plan.max_calls,
                is_eager=is_eager,
            )
        return AnswerReader(reasoning, calls)

    def _format_of(self, templates: Mapping[str, str]) -> ToolFormat | None:
        """None where no calls are read. Raises `RequestError` where they are required all the same."""
        if self._plan.mode is ToolMode.NONE:
            return None
        from .tools.choose import tool_format  # of requests with tools

        fmt = tool_format(templates, self._settings.tool_parser)
        if fmt is None and self._plan.mode is ToolMode.REQUIRED:
            raise RequestError(
                "tool_choice other than 'none' and 'auto' needs a tool parser, which is off on this server",
                param="tool_choice",
                hint="Its operator can set --tool-parser.",
            )
        return fmt

    def _render(self, tokenizer: TextTokenizer, templates: Mapping[str, str]) -> str:
        messages = with_arguments(self._messages)
        tools = self._plan.tools
        if templates and not mentions(templates, "tools"):
            messages, tools = described(messages, tools), None
        elif self._has_channels(templates):
            from .tools.harmony import harmony_messages, harmony_tools  # of few models

            messages, tools = harmony_messages(messages), harmony_tools(tools)
        elif self._format is not None and self._format.given_ids is not None:
            messages = self._format.given_ids(messages)
        elif self._format is not None:
            messages = with_ids(messages, self._format.given_id)
        return self._prompt.render(tokenizer, messages, tools)

    def _grammar(self) -> GrammarSpec | None:
        plan, fmt = self._plan, self._format
        if fmt is None and self._form is None:
            return None
        from .tools.grammar import calls_grammar, channels_grammar, reasoning_grammar  # of few requests

        if fmt is not None and (plan.mode is ToolMode.REQUIRED or plan.is_strict or self._form is not None):
            self._is_guided = True
            if self._prompt_end is not None:
                return channels_grammar(plan, self._form, self._prompt_end)
            return calls_grammar(fmt, plan, self._form, self._tags, is_open=self._is_open)
        if self._form is None:
            return None
        if self._prompt_end is not None:
            return channels_grammar(None, self._form, self._prompt_end)
        if self._tags is None:
            return self._form
        return reasoning_grammar(self._form, self._tags, is_open=self._is_open)

    def _without_reasoning(self) -> list[str]:
        """Warnings of fields about reasoning, for a model that does not reason."""
        if self._tags is not None or self._has_channels(self._prompt.templates(self._templates)):
            return []
        if self._budget is None and not thinks_of(self.body):
            return []
        return ["the budget or switch of reasoning is without effect: the model does not reason"]

    def _within_budget(self, tokenizer: TextTokenizer, grammar: Grammar | None) -> Grammar | None:
        """The grammar, behind reasoning of a bounded number of tokens."""
        if self._budget is None:
            return grammar
        if self._prompt_end is not None:
            (opened, closed), is_open = self._prompt_end.reasoning_marks, self._prompt_end.is_reasoning
            forced = closed
        elif self._tags is not None:
            opened, closed, is_open = self._tags.open, self._tags.close, self._is_open
            forced = f"\n{closed}\n\n"
        else:
            return grammar
        from ...runtime.grammar.budget import ReasoningBudget, ReasoningTokens  # of few requests

        def tokens(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        return ReasoningBudget(
            grammar,
            ReasoningTokens(tokens(opened), tokens(closed), tokens(forced)),
            vocab_size=tokenizer.vocab_size,
            max_tokens=self._budget,
            is_open=is_open,
        )

    def _shown_tokens(self, tokenizer: TextTokenizer) -> dict[int, str]:
        """Special tokens that the readers look for, which have no text else."""
        source = self._prompt_end or self._format
        markers = () if source is None else source.markers
        if self._tags is not None:
            markers = (*markers, self._tags.open, self._tags.close)
        shown = {}
        for marker in markers:
            token = tokenizer.piece_to_id(marker)
            if token is not None and not tokenizer.decode([token]):
                shown[token] = marker
        return shown


class AnswerReader:
    """One answer's text, as it comes, as deltas."""

    def __init__(self, reasoning: ReasoningReader | ChannelReader | None, calls: CallReader | None) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._has_called = False

    def push(self, text: str, finish_reason: FinishReason | None, *, is_cut: bool = False) -> list[Delta]:
        """The deltas of this much more text; with a reason it is the last, and they end with `Finish`. `is_cut` says
        that the model would have gone on.
        """
        deltas: list[Delta] = [TextDelta(text)] if text else []
        if self._reasoning is not None:
            deltas = self._reasoning.push(text)
            if finish_reason is not None:
                deltas += self._reasoning.finish()
        if self._calls is not None:
            deltas = self._with_calls(self._calls, deltas)
            if finish_reason is not None:
                deltas += self._calls.finish(is_cut=is_cut)
        self._has_called |= any(isinstance(delta, ToolCallDelta) for delta in deltas)
        if finish_reason is not None:
            is_call = self._has_called and finish_reason is FinishReason.STOP
            deltas.append(Finish("tool_calls" if is_call else str(finish_reason)))
        return deltas

    @staticmethod
    def _with_calls(calls: CallReader, deltas: list[Delta]) -> list[Delta]:
        result: list[Delta] = []
        for delta in deltas:
            result += calls.push(delta.text) if isinstance(delta, TextDelta) else [delta]
        return result


def _is_cut(finish_reason: FinishReason | None, stopped_by: str | int | None) -> bool:
    """True if `max_tokens` or a stop string ended the answer, and not the model."""
    return finish_reason is FinishReason.LENGTH or isinstance(stopped_by, str)


def _reasoning_parser(body: ChatBody, settings: ChatSettings) -> str:
    """The server's setting, unless the request wants reasoning in the text."""
    if body.reasoning_format not in (None, *_REASONING_FORMATS):
        raise RequestError(
            f"reasoning_format {body.reasoning_format[:50]!r} is none of {', '.join(_REASONING_FORMATS)}",
            param="reasoning_format",
        )
    in_text = body.separate_reasoning is False or body.reasoning_format in ("none", "raw")
    return REASONING_OFF if in_text else settings.reasoning_parser


def _images_of(body: ChatBody) -> ChatImages | None:
    if not body.has_images:
        return None
    if body.truncate_prompt_tokens is not None:
        raise RequestError(
            "truncate_prompt_tokens cannot be used with images", param="truncate_prompt_tokens"
        )
    from .images import images_of  # of few requests

    return images_of(body.messages)


def _num_top_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return check_top_logprobs(body.top_logprobs or 0, param="top_logprobs") if body.logprobs else None


class FormatOfChat:
    """The part of a `Format` that its chat answers, whatever the wire."""

    needs_context = False

    def __init__(self, chat: ChatRequest) -> None:
        self._chat = chat
        self.body = chat.body
        self.max_tokens = chat.max_tokens
        self.first_token = chat.first_token
        self.num_sequences = chat.num_sequences
        self.grammar = chat.grammar

    @property
    def remote_images(self) -> tuple[ImageSource, ...]:
        """The images that must be fetched before `prepare`."""
        images = self._chat.images
        return () if images is None else images.remote

    def give_images(self, files: Mapping[str, bytes]) -> None:
        """Put the files of the remote images, by their addresses, in their places."""
        self._chat = self._chat.with_images(files)
        self.body = self._chat.body

    @property
    def num_prompt_tokens(self) -> int:
        return self._chat.num_prompt_tokens

    @property
    def counts_reasoning(self) -> bool:
        return self._chat.counts_reasoning

    @property
    def begins_with_grammar(self) -> Callable[[TextSettings], bool]:
        return lambda settings: self._chat.begins_with_answer(settings.templates)


__all__ = ["AnswerReader", "ChatRequest", "ChatSettings", "FormatOfChat", "ToolPlan"]
