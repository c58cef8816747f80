"""A server of the Model Context Protocol with one tool, `weather`, over its standard streams, for coding agents."""

from __future__ import annotations

import json
import sys
from typing import Any

TOOL = {
    "name": "weather",
    "description": "The weather of a city",
    "inputSchema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    match method:
        case "initialize":
            info = {"name": "sky", "version": "1"}
            return {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": info,
            }
        case "tools/list":
            return {"tools": [TOOL]}
        case "tools/call":
            city = params["arguments"]["city"]
            return {"content": [{"type": "text", "text": f"It is sunny in {city}."}]}
    return {}


for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        result = answer(request["method"], request.get("params") or {})
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
