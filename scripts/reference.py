"""The reference pages of docs/ that are made from the code: http.md, settings.md, python.md.

`python scripts/reference.py` writes them; `--check` ends with 1 and names the pages that are out of
date.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from teneral.handlers.api_document.document import document
from teneral.handlers.app import edge_rules
from teneral.handlers.asgi import asgi_app
from teneral.handlers.engine import AsyncEngine, Engine
from teneral.handlers.function.context import Context, Model
from teneral.handlers.function.streams import Completion
from teneral.handlers.platforms import HTTP
from teneral.handlers.pool.overview import OPEN_PATHS, ROUTES
from teneral.runtime.config import PREFIX, SETTINGS
from teneral.runtime.into.files import load_file
from teneral.runtime.into.module_load import load_into
from teneral.runtime.into.slots import empty_weights
from teneral.runtime.setting import Setting

DOCS = Path(__file__).parent.parent / "docs"
MADE = "<!-- Made by `python scripts/reference.py`: change the code, not this page. -->"
SIZE = "must be a size"
INTERNAL = frozenset({"instance", "release"})  # of an engine: for other parts of Teneral


def http_page() -> str:
    """Each route of the OpenAPI document, and each type that it names."""
    described, pool = document(edge_rules(HTTP).open_paths), document(OPEN_PATHS, ROUTES)
    lines = ["# HTTP reference", "", MADE, ""]
    lines += [
        "All routes of `teneral serve`, and those that `teneral pool run` adds. Both have this page as an"
    ]
    lines += [
        "OpenAPI 3.1 document at `/openapi.json`. Where a key is set, each route needs it, but for those"
    ]
    lines += [
        "marked open. A pool passes all other requests on, to the model that the body or the path names,"
    ]
    lines += ["or else the header `x-teneral-model`.", ""]
    own = {path: item for path, item in pool["paths"].items() if path not in described["paths"]}
    operations = [
        (path, method, operation)
        for path, item in {**described["paths"], **own}.items()
        for method, operation in item.items()
    ]
    for tag in [*described["tags"], *(tag for tag in pool["tags"] if tag["name"] == "pool")]:
        lines += [f"## {tag['name']}", "", tag["description"].replace("docs/", ""), ""]
        lines += ["| route | | body | answer |", "|---|---|---|---|"]
        for path, method, operation in operations:
            if operation["tags"] == [tag["name"]]:
                summary = operation["summary"] + ("; open" if operation.get("security") == [] else "")
                body = _media(operation.get("requestBody", {}).get("content", {}))
                answer = _media(operation["responses"].get("200", {}).get("content", {}))
                lines.append(f"| `{method.upper()} {path}` | {summary} | {body} | {answer} |")
        lines.append("")
    lines += ["## Types", ""]
    for name, schema in sorted(described["components"]["schemas"].items()):
        lines += [f"### {name}", ""]
        if "enum" in schema:
            lines += [_kind(schema), ""]
        properties = schema.get("properties", {})
        if properties:
            lines += ["| field | type | |", "|---|---|---|"]
            for field, each in properties.items():
                note = "required" if field in schema.get("required", ()) else ""
                notes = "; ".join(filter(None, (note, each.get("description", ""))))
                lines.append(f"| `{field}` | {_kind(each)} | {notes} |")
            lines.append("")
    return "\n".join(lines)


def _media(content: dict[str, Any]) -> str:
    return ", ".join(
        _kind(each["schema"]) if each.get("schema") else f"`{media}`" for media, each in content.items()
    )


def _kind(schema: dict[str, Any]) -> str:
    """A schema as a few words, with links to the types that it names."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{value}`" for value in values)
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def settings_page() -> str:
    """Each setting: its flag, variable, default, allowed values and meaning."""
    lines = ["# Settings", "", MADE, ""]
    lines += [
        "A setting has one name: the flag `--max-queued` is the variable `TENERAL_MAX_QUEUED` and the key"
    ]
    lines += ["`max_queued` of the TOML file that `--config` or `TENERAL_CONFIG` names. Flags override the"]
    lines += ["environment, and the environment overrides the file. [cli.md](cli.md) has the commands."]
    group = ""
    for name, setting in SETTINGS.items():
        if setting.group != group:
            group = setting.group
            lines += ["", f"## {group[0].upper()}{group[1:]}", ""]
            lines += ["| flag | variable | default | values | meaning |", "|---|---|---|---|---|"]
        flag = "--" + name.replace("_", "-")
        if isinstance(setting.default, bool):
            flag = f"{flag}`, `--no-{flag[2:]}"
        help_text = setting.help + (" (a secret: never printed)" if setting.secret else "")
        meaning = re.sub(r"([{}<>*])", r"\\\1", help_text)
        lines.append(
            f"| `{flag}` | `{PREFIX}{name.upper()}` | {_default(setting)} | {_allowed(setting)} | {meaning} |"
        )
    return "\n".join([*lines, ""])


def _default(setting: Setting) -> str:
    value = setting.default
    if value in (None, ""):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"`{value:g}`"
    if SIZE in _refusal(setting):
        return f"`{value >> 30}GiB`" if value >= 1 << 30 else f"`{value >> 20}MiB`"
    return f"`{value}`"


def _allowed(setting: Setting) -> str:
    """The values that the parser takes, in the words of its own error."""
    text = _refusal(setting).removeprefix("must be ")
    return "a size such as 512MiB" if text.startswith("a size") else text


def _refusal(setting: Setting) -> str:
    try:
        setting.parse(object())
    except ValueError as error:
        return str(error)
    raise AssertionError("a setting takes any object")


def python_page() -> str:
    """The public functions, and the context of a user's function."""
    lines = ["# Python reference", "", MADE, ""]
    lines += [
        "The names of `import teneral`, and the `context` that a function of the user gets. Examples are in"
    ]
    lines += [
        "[engine.md](engine.md), [any-module.md](any-module.md) and [handlers.md](handlers.md).",
        "",
        "## teneral",
        "",
    ]
    for function in (asgi_app, load_into, load_file, empty_weights):
        lines += _function(f"teneral.{function.__name__}", function)
    lines += _class("teneral.Engine", Engine)
    lines += ["## teneral.AsyncEngine", "", *_docstring(AsyncEngine), ""]
    lines += _class("context", Context) + _class("context.model", Model) + _class("Completion", Completion)
    return "\n".join(lines).rstrip() + "\n"


def _class(name: str, kind: type) -> list[str]:
    lines = [f"## {name}", "", *_docstring(kind), ""]
    if name.startswith("teneral."):
        lines += _function(name, kind.__init__)[2:]
        name = "engine"
    for each, member in _public(kind):
        if isinstance(member, property):
            lines += [f"### {name}.{each}", "", *_docstring(member), ""]
        else:
            lines += _function(f"{name}.{each}", member)
    return lines


def _public(kind: type) -> Iterator[tuple[str, Any]]:
    members = {name: member for each in reversed(kind.__mro__) for name, member in vars(each).items()}
    for name, member in members.items():
        if (
            name not in INTERNAL
            and not name.startswith("_")
            and (callable(member) or isinstance(member, property))
        ):
            yield name, member


def _function(name: str, function: Callable[..., Any]) -> list[str]:
    signature = inspect.signature(function)
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    # Annotations are texts; a default keeps its quotes.
    shown = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(signature.replace(parameters=parameters)))
    return [f"### {name}", "", "```text", f"{name}{shown}", "```", "", *_docstring(function), ""]


def _docstring(documented: Any) -> list[str]:
    return (inspect.getdoc(documented) or "").splitlines()


PAGES = {"http.md": http_page, "settings.md": settings_page, "python.md": python_page}


def main(arguments: list[str]) -> int:
    stale = []
    for name, make in PAGES.items():
        text = make().rstrip() + "\n"
        path = DOCS / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in arguments:
                path.write_text(text, encoding="utf-8")
    if "--check" not in arguments or not stale:
        return 0
    print(f"out of date: {', '.join(stale)}. Run python scripts/reference.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
