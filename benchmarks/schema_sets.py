"""Sets of JSON schemas: the share that compiles to grammars, and whether these allow the right values.

Documents of the JSON Schema Test Suite that a schema refers to are embedded in it, as a client embeds them: Teneral
fetches none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag, urljoin

from benchmarks.report import note

END = 0  # the token that ends an answer
REMOTE = "http://localhost:1234/"
DIALECTS = {  # of folders whose schemas do not name theirs
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
}


def suite(folder: Path, tokenizer_json: Path) -> dict[str, Any]:
    """Each schema of the suite by itself. Instances are compact JSON with properties in the order of the schema where
    it names them: Teneral promises that order, and no other.
    """
    import tokenizers

    from teneral.runtime.errors import RequestError
    from teneral.runtime.grammar.compiler import GrammarCompiler
    from teneral.runtime.grammar.spec import GrammarSpec

    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    compiler = GrammarCompiler(tokenizer_json.read_bytes, [END])
    remotes = _remotes(folder)
    counts = dict.fromkeys(
        ("schemas", "embedded", "compiled", "right", "valid", "valid_refused", "invalid", "invalid_accepted"),
        0,
    )
    refused: dict[str, int] = {}
    for file in sorted(folder.glob("*.json")):
        for case in json.loads(file.read_bytes()):
            counts["schemas"] += 1
            schema = case["schema"]
            if isinstance(schema, dict) and folder.name in DIALECTS:
                schema = {"$schema": DIALECTS[folder.name], **schema}
            whole = _embedded(schema, remotes)
            counts["embedded"] += whole is not schema
            try:
                grammar = compiler.compile(GrammarSpec.json_schema(whole, param="schema", closes=False))
            except RequestError:
                refused[file.stem] = refused.get(file.stem, 0) + 1
                continue
            counts["compiled"] += 1
            wrong = 0
            for test in case["tests"]:
                text = json.dumps(
                    _in_order(test["data"], case["schema"]), ensure_ascii=False, separators=(",", ":")
                )
                accepted = _accepts(grammar, tokenizer.encode(text, add_special_tokens=False).ids)
                kind = "valid" if test["valid"] else "invalid"
                counts[kind] += 1
                if accepted != test["valid"]:
                    wrong += 1
                    counts["valid_refused" if test["valid"] else "invalid_accepted"] += 1
                    note(f"{file.stem}: {case['description']}: {test['description']}: {text}")
            counts["right"] += not wrong
    return {
        "draft": folder.name,
        **counts,
        "compiled_share": round(counts["compiled"] / max(1, counts["schemas"]), 3),
        "right_share": round(counts["right"] / max(1, counts["schemas"]), 3),
        "refused": refused,
    }


def kubernetes(tokenizer_json: Path) -> dict[str, Any]:
    """The newest version's objects, each with the definitions that it refers to, without descriptions."""
    import kubernetes_validate

    from teneral.runtime.errors import RequestError
    from teneral.runtime.grammar.compiler import GrammarCompiler
    from teneral.runtime.grammar.spec import GrammarSpec

    package = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    folder = max(
        package.glob("v*-local-strict"),
        key=lambda path: [int(n) for n in path.name[1:].split("-")[0].split(".")],
    )
    definitions = json.loads((folder / "_definitions.json").read_bytes())["$defs"]
    compiler = GrammarCompiler(tokenizer_json.read_bytes, [END])
    counts = {"schemas": 0, "compiled": 0}
    for file in sorted(folder.glob("*.json")):
        if file.name in ("_definitions.json", "all.json"):
            continue
        needed: dict[str, Any] = {}
        schema = _local(json.loads(file.read_bytes()), definitions, needed)
        schema.pop("$id", None)
        counts["schemas"] += 1
        try:
            compiler.compile(
                GrammarSpec.json_schema({**schema, "$defs": needed}, param="schema", closes=False)
            )
            counts["compiled"] += 1
        except RequestError as error:
            note(f"{file.name}: {error}")
    return {
        "version": folder.name,
        **counts,
        "compiled_share": round(counts["compiled"] / counts["schemas"], 3),
    }


def folder(path: Path, tokenizer_json: Path) -> dict[str, Any]:
    """The schemas in the files of a folder, without descriptions. Those beyond the bound for a schema count apart."""
    from teneral.runtime.errors import RequestError
    from teneral.runtime.grammar.compiler import GrammarCompiler
    from teneral.runtime.grammar.spec import MAX_SCHEMA_BYTES, GrammarSpec

    compiler = GrammarCompiler(tokenizer_json.read_bytes, [END])
    counts = {"schemas": 0, "compiled": 0, "too_large": 0}
    refused: dict[str, int] = {}
    for file in sorted(path.rglob("*.json")):
        schema = _without_descriptions(json.loads(file.read_bytes()))
        if not isinstance(schema, dict):
            continue
        if len(json.dumps(schema, separators=(",", ":")).encode()) > MAX_SCHEMA_BYTES:
            counts["too_large"] += 1
            continue
        counts["schemas"] += 1
        try:
            compiler.compile(GrammarSpec.json_schema(schema, param="schema", closes=False))
            counts["compiled"] += 1
        except RequestError as error:
            why = " ".join(error.message.split()[:6])
            refused[why] = refused.get(why, 0) + 1
    most = dict(sorted(refused.items(), key=lambda item: -item[1])[:10])
    return {
        **counts,
        "compiled_share": round(counts["compiled"] / max(1, counts["schemas"]), 3),
        "refused": most,
    }


def _without_descriptions(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_descriptions(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_descriptions(value)
        for key, value in schema.items()
        if key != "description" or not isinstance(value, str)
    }


def _local(schema: Any, definitions: dict[str, Any], needed: dict[str, Any]) -> Any:
    """The schema with references into itself; `needed` gets the definitions that they lead to."""
    if isinstance(schema, list):
        return [_local(each, definitions, needed) for each in schema]
    if not isinstance(schema, dict):
        return schema
    local = {}
    for key, value in schema.items():
        if key == "description" and isinstance(value, str):
            continue
        if key == "$ref" and isinstance(value, str):
            name = value.rpartition("/")[2]
            local[key] = f"#/$defs/{name}"
            if name not in needed:
                needed[name] = None
                needed[name] = _local(definitions[name], definitions, needed)
        else:
            local[key] = _local(value, definitions, needed)
    return local


def _remotes(folder: Path) -> dict[str, Any]:
    """The suite's documents by their addresses: those of this draft, and those of all."""
    root = folder.parent.parent / "remotes"
    found = {}
    for file in sorted(root.rglob("*.json")):
        path = file.relative_to(root)
        if path.parts[0] == folder.name or not path.parts[0].startswith("draft"):
            found[REMOTE + path.as_posix()] = json.loads(file.read_bytes())
    return found


def _embedded(schema: Any, remotes: dict[str, Any]) -> Any:
    """The schema with the documents that it refers to as definitions, each with its address as `$id`."""
    needed: dict[str, Any] = {}
    pending = list(_addresses(schema, REMOTE))
    while pending:
        address = pending.pop()
        if address in remotes and address not in needed:
            document = remotes[address]
            pending += _addresses(document, address)
            own = document.get("$id", address) if isinstance(document, dict) else address
            if isinstance(document, bool) or own == address:
                needed[address] = document
            elif urljoin(address, own) != address:
                needed[address] = {"$id": address, "$ref": own, "$defs": {"document": document}}
            if isinstance(document, dict) and "$id" not in document:
                needed[address] = {**document, "$id": address}
    if not needed:
        return schema
    return {**schema, "$defs": {**schema.get("$defs", {}), **needed}}


def _addresses(schema: Any, base: str) -> Iterator[str]:
    """Those of the documents to which a schema refers."""
    if isinstance(schema, list):
        for each in schema:
            yield from _addresses(each, base)
    elif isinstance(schema, dict):
        if isinstance(own := schema.get("$id"), str):
            base = urljoin(base, own)
        for key, value in schema.items():
            if key in ("$ref", "$dynamicRef") and isinstance(value, str):
                yield urldefrag(urljoin(base, value))[0]
            else:
                yield from _addresses(value, base)


def _in_order(data: Any, schema: Any) -> Any:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(data, dict) or not isinstance(properties, dict):
        return data
    return {name: data[name] for name in (*(n for n in properties if n in data), *data)}


def _accepts(grammar: Any, tokens: Sequence[int]) -> bool:
    """Every token follows, and the end of the answer is allowed then."""
    import numpy as np

    from teneral.runtime.errors import GrammarError

    matcher = grammar.start()
    try:
        for token in tokens:
            matcher.accept(token)
    except GrammarError:
        return False
    if matcher.is_finished:
        return True
    words = np.zeros(matcher.num_mask_words, np.uint32)
    matcher.mask_into(words)
    return bool(words[END // 32] >> (END % 32) & 1)
