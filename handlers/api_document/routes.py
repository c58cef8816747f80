"""All routes of a server, from the tables that it registers. Imports no route's module."""

from __future__ import annotations

import functools
import re

from ..anthropic.routes import ROUTES as ANTHROPIC
from ..console.routes import PAGES
from ..console.routes import ROUTES as CONSOLE
from ..http.routes import DOCUMENT, ROUTES, Route
from ..openai.routes import ROUTES as OPENAI
from ..platforms import PLATFORMS, routes_of


@functools.cache
def server_routes() -> tuple[Route, ...]:
    platforms = (route for row in PLATFORMS for route in routes_of(row))
    return (*OPENAI, *ANTHROPIC, *ROUTES, *CONSOLE, *platforms, DOCUMENT, *PAGES)


def has_route(path: str) -> bool:
    """True if a server has a route with this path, whatever the method."""
    return _pattern().fullmatch(path) is not None


@functools.cache
def _pattern() -> re.Pattern[str]:
    """A parameter takes slashes, too: names of models have them, and versions follow them."""
    paths = {re.sub(r"\\{\w+\\}", ".+", re.escape(each.canonical)) for each in server_routes()}
    return re.compile("|".join(sorted(paths)))
