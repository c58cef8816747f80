"""The metadata of the server and of its model, and their readiness."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.support.instances import TinyParts

import teneral

MODEL = "/v2/models/tiny/model"
READINESS = ("/v2/health/ready", f"{MODEL}/ready", f"{MODEL}/versions/1/ready")


async def test_the_server_tells_its_version_and_what_it_speaks(start: Any) -> None:
    async with start() as server:
        reply = (await server.get("/v2")).json
        assert (reply["name"], reply["version"]) == ("teneral", teneral.__version__)
        assert {"binary_tensor_data", "model_repository", "generate"} <= set(reply["extensions"])


async def test_a_loading_server_is_alive_and_not_ready(start: Any) -> None:
    async with start(loaded=False, api_key="sesame") as server:  # probes carry no key
        live = await server.get("/v2/health/live")
        assert (live.status, live.json) == (200, {"live": True})
        for path in READINESS:
            answer = await server.get(path)
            assert answer.status == 503
            assert answer.json["ready"] is False
            assert int(answer.headers["Retry-After"]) >= 1
        server.instance.let_in()
        for path in READINESS:
            answer = await server.get(path)
            assert (answer.status, answer.json["ready"]) == (200, True)
        assert (await server.get(f"{MODEL}/ready")).json["name"] == "tiny/model"
        server.service.in_flight.draining = True
        assert (await server.get("/v2/health/live")).status == 200
        assert [(await server.get(path)).status for path in READINESS] == [503] * 3


async def test_who_comes_while_the_model_loads_for_the_first_time_waits(start: Any) -> None:
    async with start(loaded=False) as server:
        for path in (MODEL, f"{MODEL}/config"):
            answer = await server.get(path)
            assert answer.status == 503
            assert "not loaded yet" in answer.json["error"]
        head = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Once"]}
        waiting = asyncio.create_task(server.post(f"{MODEL}/infer", {"inputs": [head]}))
        await server.eventually(lambda: len(server.service.in_flight) == 1)
        server.instance.let_in()
        assert (await waiting).status == 200


@pytest.mark.parametrize("version", ["", "/versions/1"])
async def test_a_decoder_takes_texts_and_gives_texts(start: Any, version: str) -> None:
    async with start() as server:
        reply = (await server.get(f"{MODEL}{version}")).json
        assert (reply["name"], reply["versions"], reply["platform"]) == ("tiny/model", ["1"], "teneral")
        assert reply["inputs"] == [{"name": "text_input", "datatype": "BYTES", "shape": [-1]}]
        assert [each["name"] for each in reply["outputs"]] == ["text_output", "finish_reason"]
        config = (await server.get(f"{MODEL}{version}/config")).json
        assert config["input"] == [{"name": "text_input", "data_type": "TYPE_STRING", "dims": [-1]}]


async def test_an_encoder_gives_vectors(start: Any, encoder_parts: TinyParts) -> None:
    async with start(parts=encoder_parts) as server:
        reply = (await server.get(MODEL)).json
        assert reply["outputs"] == [{"name": "embedding", "datatype": "FP32", "shape": [-1, -1]}]
        config = (await server.get(f"{MODEL}/config")).json
        assert config["output"][0]["data_type"] == "TYPE_FP32"


async def test_a_function_takes_what_it_is_sent(start: Any) -> None:
    async with start(handler=lambda event, context: 1) as server:
        reply = (await server.get(MODEL)).json
        assert (reply["inputs"], reply["outputs"]) == ([], [])


async def test_inferences_are_counted(start: Any) -> None:
    async with start() as server:
        head = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Once"]}
        await server.post(f"{MODEL}/infer", {"inputs": [head]})
        await server.post(f"{MODEL}/infer", {"inputs": []})
        for path in (f"{MODEL}/stats", f"{MODEL}/versions/1/stats", "/v2/models/stats"):
            (reply,) = (await server.get(path)).json["model_stats"]
            assert (reply["name"], reply["inference_count"]) == ("tiny/model", 1)
            assert reply["inference_stats"]["success"]["ns"] > 0
            assert reply["inference_stats"]["fail"]["count"] == 1


@pytest.mark.parametrize("verb", ["", "/ready", "/config", "/stats"])
@pytest.mark.parametrize(
    "name", ["other", "tiny", "tiny/model/x", "tiny/model/versions/", "tiny/model/versions/2"]
)
async def test_another_model_or_version_is_not_found(start: Any, name: str, verb: str) -> None:
    async with start() as server:
        answer = await server.get(f"/v2/models/{name}{verb}")
        assert (answer.status, list(answer.json)) == (404, ["error"])


async def test_errors_of_the_edge_have_the_protocols_shape(start: Any) -> None:
    async with start(api_key="sesame") as server:
        unknown = await server.get("/v2/nothing", headers={"Authorization": "Bearer sesame"})
        wrong = await server.get(f"{MODEL}/infer", headers={"Authorization": "Bearer sesame"})
        for answer, status in ((unknown, 404), (wrong, 405), (await server.get("/v2"), 401)):
            assert answer.status == status
            assert isinstance(answer.json["error"], str)
        assert wrong.headers["Allow"] == "POST"
        assert isinstance((await server.get("/v2x")).json["error"], dict)  # not ours
