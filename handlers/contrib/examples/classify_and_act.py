"""Classify a message, and publish it to SNS if the model is sure enough that it is urgent.

    ALERT_TOPIC_ARN=arn:aws:sns:eu-central-1:123456789012:alerts \\
    teneral invoke teneral.handlers.contrib.examples.classify_and_act:handler --model MODEL --event event.json
    teneral serve MODEL --handler teneral.handlers.contrib.examples.classify_and_act:handler

An event and its answer; `label` is null if no label is sure enough:

    {"id": "ticket-7", "text": "The pump room is flooding."}
    {"id": "ticket-7", "label": "urgent", "score": 0.93, "scores": {…}}

Works with any model that generates text: it is asked for a letter, and the probability of each
letter is the label's score. A repeated invocation publishes again, with the same idempotency key.
THRESHOLD is 0.8 unless set in the environment.
"""

from __future__ import annotations

import os
from typing import Any

from teneral.handlers.contrib import processing
from teneral.handlers.function.context import Context
from teneral.runtime.errors import RequestError

LABELS = {"A": "urgent", "B": "routine", "C": "spam"}
# Of a message; the rest is ignored.
MAX_TOKENS = 2_000
PROMPT = """Which kind of message is this?
A: urgent, somebody must act now
B: routine, it can wait
C: spam, it can be ignored

Message: {text}

Answer with one letter.
Answer:
"""


def check(event: Any, context: Context) -> Any:
    """The message with its text truncated to `MAX_TOKENS`."""
    if not isinstance(event, dict) or not isinstance(event.get("text"), str) or not event["text"].strip():
        raise RequestError("the event must have a text", param="text")
    text = processing.truncate(context.model, event["text"], MAX_TOKENS, add_special_tokens=False)
    return {"id": str(event.get("id") or context.request_id), "text": text}


def is_urgent(answer: Any) -> bool:
    return bool(answer["label"] == "urgent")


def alert(answer: Any, key: str) -> None:
    """Publish the answer. The topic is read only now: a deployment without one can still classify."""
    processing.publish_sns(os.environ["ALERT_TOPIC_ARN"])(answer, key)


def key_of(answer: Any, context: Context) -> str:
    """The key of a message: at most one alert for each, however often it arrives."""
    return f"urgent-{answer['id']}"[:128]


@processing.handler(pre=check, post=processing.act(when=is_urgent, do=alert, key=key_of))
def handler(event: Any, context: Context) -> dict[str, Any]:
    """The message's label, and the model's score of each label."""
    letters = processing.choose(context.model, PROMPT.format(text=event["text"]), list(LABELS))
    scores = {LABELS[letter]: score for letter, score in letters.items()}
    prediction = processing.decide(scores, threshold=float(os.environ.get("THRESHOLD", "0.8")))
    return {"id": event["id"], **prediction.to_dict()}
