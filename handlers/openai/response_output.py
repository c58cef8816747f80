"""The output of a response: items that grow by deltas, and the events of a stream of them.

An answer grows by items, one after the other: reasoning, text and calls. Each is begun, continued
and ended by events whose `sequence_number`s count from 0. The same items are the whole answer's
output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from .deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from .response_items import CallableTool
from .response_store import IN_PROGRESS, Json, new_item_id
from .tools.custom import custom_input

Event = dict[str, Any]
COMPLETED, INCOMPLETE = "completed", "incomplete"


class AnswerItems:
    """One answer's. Deltas in, events out."""

    def __init__(self, response_id: str, tools: Mapping[str, CallableTool]) -> None:
        """`tools` are found by their names in a chat."""
        self.items: list[Json] = []
        self._response_id = response_id
        self._tools = tools
        self._num_events = 0
        self._is_open = False  # the last item
        self._pieces: list[str] = []  # of the last item
        self._logprobs: list[Json] = []  # of tokens whose text has not come yet
        self._own_logprobs: list[Json] = []  # of the last item

    def event(self, kind: str, **fields: Any) -> Event:
        """The next event of the stream."""
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": kind, **fields, "sequence_number": number}

    def add(self, delta: Delta, logprobs: list[Json]) -> list[Event]:
        """The stream events of one delta; `logprobs` belong to its tokens."""
        self.hold(logprobs)
        match delta:
            case TextDelta(text):
                return self._more("message", text) if text or self._logprobs else []
            case ReasoningDelta(text):
                self._logprobs = []
                return self._more("reasoning", text)
            case ToolCallDelta(_, arguments, call_id, name):
                return self._call(arguments, call_id, name)
        return []

    def hold(self, logprobs: list[Json]) -> None:
        """Keeps them for the next text: that of their tokens has not come."""
        self._logprobs += logprobs

    def finish(self, status: str) -> list[Event]:
        """The end of the last item, and an empty message where there is none."""
        is_text = not self.items or (self._is_open and self.items[-1]["type"] == "message")
        events = self._more("message", "") if is_text and (self._logprobs or not self.items) else []
        return [*events, *self._end(status)]

    # -- text and reasoning

    def _more(self, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        if not self._is_open or self.items[-1]["type"] != kind:
            events = [*self._end(COMPLETED), *self._begin_text(kind)]
        self._pieces.append(text)
        place = self._place()
        if kind == "reasoning":
            return [*events, self.event("response.reasoning_text.delta", **place, delta=text)]
        logprobs, self._logprobs = self._logprobs, []
        self._own_logprobs += logprobs
        return [*events, self.event("response.output_text.delta", **place, delta=text, logprobs=logprobs)]

    def _begin_text(self, kind: str) -> list[Event]:
        if kind == "reasoning":
            item: Json = {
                "id": self._new_id("rs"),
                "type": kind,
                "summary": [],
                "content": [],
                "status": IN_PROGRESS,
            }
        else:
            item = {
                "id": self._new_id("msg"),
                "type": kind,
                "role": "assistant",
                "content": [],
                "status": IN_PROGRESS,
            }
        events = [self._begin(item)]
        return [*events, self.event("response.content_part.added", **self._place(), part=_part(kind, "", []))]

    def _end_text(self, item: Json) -> list[Event]:
        kind, text, place = item["type"], "".join(self._pieces), self._place()
        part = _part(kind, text, self._own_logprobs)
        item["content"] = [part]
        if kind == "reasoning":
            done = self.event("response.reasoning_text.done", **place, text=text)
        else:
            done = self.event("response.output_text.done", **place, text=text, logprobs=self._own_logprobs)
        return [done, self.event("response.content_part.done", **place, part=part)]

    def _place(self) -> Json:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": 0}

    # -- calls

    def _call(self, arguments: str, call_id: str, name: str) -> list[Event]:
        events: list[Event] = []
        if call_id:
            tool = self._tools.get(name, CallableTool(name))
            head: Json = {"call_id": call_id, "name": tool.name, "status": IN_PROGRESS}
            if tool.namespace is not None:
                head["namespace"] = tool.namespace
            if tool.kind == "tool_search":
                item = {"id": self._new_id("tsc"), "type": "tool_search_call", **head, "execution": "client"}
                del item["name"]
                item["arguments"] = {}
            elif tool.kind == "custom":
                item = {"id": self._new_id("ctc"), "type": "custom_tool_call", **head, "input": ""}
            else:
                item = {"id": self._new_id("fc"), "type": "function_call", **head, "arguments": ""}
            events = [*self._end(COMPLETED), self._begin(item)]
        if arguments:
            self._pieces.append(arguments)
            if self.items[-1]["type"] != "function_call":  # known once all of their JSON is
                return events
            events.append(
                self.event("response.function_call_arguments.delta", **self._call_place(), delta=arguments)
            )
        return events

    def _end_call(self, item: Json) -> list[Event]:
        item["arguments"] = "".join(self._pieces)
        return [
            self.event(
                "response.function_call_arguments.done",
                **self._call_place(),
                name=item["name"],
                arguments=item["arguments"],
            )
        ]

    def _end_search(self, item: Json) -> list[Event]:
        item["arguments"] = _object("".join(self._pieces))
        return []

    def _end_custom(self, item: Json) -> list[Event]:
        text = item["input"] = custom_input("".join(self._pieces))
        place, kind = self._call_place(), "response.custom_tool_call_input"
        return [
            self.event(f"{kind}.delta", **place, delta=text),
            self.event(f"{kind}.done", **place, input=text),
        ]

    def _call_place(self) -> Json:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    # -- all kinds

    def _new_id(self, prefix: str) -> str:
        return new_item_id(prefix, self._response_id)

    def _begin(self, item: Json) -> Event:
        self.items.append(item)
        self._is_open, self._pieces, self._own_logprobs = True, [], []
        return self.event("response.output_item.added", output_index=len(self.items) - 1, item=dict(item))

    def _end(self, status: str) -> list[Event]:
        if not self._is_open:
            return []
        item, self._is_open = self.items[-1], False
        ends: dict[str, Callable[[Json], list[Event]]] = {
            "function_call": self._end_call,
            "custom_tool_call": self._end_custom,
            "tool_search_call": self._end_search,
        }
        events = ends.get(item["type"], self._end_text)(item)
        item["status"] = status
        index = len(self.items) - 1
        return [*events, self.event("response.output_item.done", output_index=index, item=dict(item))]


def _part(kind: str, text: str, logprobs: list[Json]) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _object(arguments: str) -> Json:
    """The object that a search's arguments are; {} where they are cut off."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}
