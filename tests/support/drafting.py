"""An engine's reports of drafts, written over a real engine's: for tests of the layers above."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from teneral.runtime.engine.engine import Engine
from teneral.runtime.step.requests import FirstToken, GenerationEvent, GenerationRequest


def tell_of_drafts(
    engine: Engine, *, drafted: int = 0, accepted: int = 0, rejected: int = 0
) -> list[GenerationRequest]:
    """From now on, the first `drafted` tokens of each sequence that allows it count as the draft's, and the first
    event of each sequence reports that number of proposals. Returns the requests that the engine gets; the list grows.
    """
    requests: list[GenerationRequest] = []
    submit = engine.submit

    def submit_telling(
        request: GenerationRequest, on_event: Callable[[GenerationEvent], None], *, joins: bool = False
    ) -> Any:
        requests.append(request)
        num_left = drafted if request.first_token is FirstToken.DRAFT else 0
        judged = (accepted, rejected)

        def tell(event: GenerationEvent) -> None:
            nonlocal num_left, judged
            num_drafted = min(num_left, len(event.tokens))
            num_left -= num_drafted
            on_event(replace(event, num_drafted=num_drafted, num_accepted=judged[0], num_rejected=judged[1]))
            judged = (0, 0)

        return submit(request, tell, joins=joins)

    engine.submit = submit_telling  # type: ignore[method-assign, assignment]
    return requests
