"""POST /v2/models/{name}/infer: texts to a decoder and to an encoder, tensors to a function, in JSON and in bytes."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
from typing import Any

import numpy as np
import pytest
from tests.support.instances import TinyParts

from teneral.handlers.http.limits import Limits
from teneral.handlers.platforms.kserve.api import HEADER_LENGTH, MAX_RESULTS

URL = "/v2/models/tiny/model/infer"
GREEDY = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}


def texts(*values: str, name: str = "text_input") -> dict[str, Any]:
    return {"name": name, "shape": [len(values)], "datatype": "BYTES", "data": list(values)}


def tensor(name: str, datatype: str, *data: Any, shape: list[int] | None = None) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape or [len(data)], "data": list(data)}


def outputs(answer: Any) -> dict[str, list[Any]]:
    assert answer.status == 200, answer.body
    return {each["name"]: each["data"] for each in answer.json["outputs"]}


def error(answer: Any, status: int = 400) -> str:
    assert answer.status == status, answer.body
    assert set(answer.json) == {"error"}
    assert isinstance(answer.json["error"], str)
    return str(answer.json["error"])


async def completion(server: Any, prompt: str, **options: Any) -> str:
    answer = await server.post("/v1/completions", {"prompt": prompt, **GREEDY, **options})
    return str(answer.json["choices"][0]["text"])


async def infer(server: Any, *inputs: Any, url: str = URL, **body: Any) -> Any:
    return await server.post(url, {"inputs": list(inputs), **body})


async def test_each_text_is_gone_on_from_as_a_completion_is(start: Any) -> None:
    async with start() as server:
        answer = await infer(server, texts("Once", "upon a"), id="42", parameters=GREEDY)
        assert answer.json["id"] == "42"
        assert (answer.json["model_name"], answer.json["model_version"]) == ("tiny/model", "1")
        assert outputs(answer) == {
            "text_output": [await completion(server, "Once"), await completion(server, "upon a")],
            "finish_reason": ["length", "length"],
        }
        assert answer.headers["Content-Type"] == "application/json"


async def test_a_version_may_be_named_and_the_shape_is_kept(start: Any) -> None:
    async with start() as server:
        column = {**texts("Once", "upon"), "shape": [2, 1], "data": [["Once"], ["upon"]]}
        answer = await infer(server, column, url="/v2/models/tiny/model/versions/1/infer", parameters=GREEDY)
        assert [each["shape"] for each in answer.json["outputs"]] == [[2, 1], [2, 1]]
        assert "id" not in answer.json


async def test_options_come_as_parameters_as_inputs_or_as_one_json_text(start: Any) -> None:
    sampling = texts(json.dumps(GREEDY), name="sampling_parameters")
    as_inputs = [
        tensor("temperature", "FP32", 0),
        tensor("max_tokens", "INT32", 5),
        tensor("ignore_eos", "BOOL", True),
    ]
    async with start() as server:
        expected = {"text_output": [await completion(server, "Once")], "finish_reason": ["length"]}
        once = texts("Once")
        for answer in (
            await infer(server, once, parameters=GREEDY),
            await infer(server, once, *as_inputs),
            await infer(server, once, sampling),
            await infer(server, texts("Once", name="text"), parameters=GREEDY),
            await infer(server, once, tensor("stream", "BOOL", False), parameters=GREEDY),
        ):
            assert outputs(answer) == expected
        longer = await infer(server, once, sampling, parameters={"max_tokens": 7})
        assert outputs(longer)["text_output"] == [await completion(server, "Once", max_tokens=7)]


async def test_the_prompt_stands_before_the_answer_where_it_is_not_excluded(start: Any) -> None:
    async with start() as server:
        answer = await infer(
            server, texts("Once"), tensor("exclude_input_in_output", "BOOL", False), parameters=GREEDY
        )
        assert outputs(answer)["text_output"] == ["Once" + await completion(server, "Once")]


async def test_stop_strings_may_be_several_texts(start: Any) -> None:
    async with start() as server:
        text = await completion(server, "Once", max_tokens=12)
        stop = text[len(text) // 2]
        answer = await infer(
            server, texts("Once"), texts(stop, "never", name="stop"), parameters={**GREEDY, "max_tokens": 12}
        )
        assert outputs(answer) == {"text_output": [text.partition(stop)[0]], "finish_reason": ["stop"]}


async def test_only_the_outputs_that_are_asked_for_come_and_in_that_order(start: Any) -> None:
    async with start() as server:
        wanted = [{"name": "finish_reason"}, {"name": "text_output"}]
        answer = await infer(server, texts("Once"), parameters=GREEDY, outputs=wanted)
        assert [each["name"] for each in answer.json["outputs"]] == ["finish_reason", "text_output"]
        assert "'logits'" in error(await infer(server, texts("Once"), outputs=[{"name": "logits"}]))


def body_with_bytes(head: dict[str, Any], *blobs: bytes) -> tuple[bytes, dict[str, str]]:
    text = json.dumps(head).encode()
    return text + b"".join(blobs), {HEADER_LENGTH: str(len(text))}


async def test_texts_come_and_go_as_bytes(start: Any) -> None:
    blob = b"".join(struct.pack("<I", len(text)) + text for text in (b"Once", "ü".encode()))
    given = {**texts("", ""), "parameters": {"binary_data_size": len(blob)}}
    del given["data"]
    head = {"inputs": [given], "parameters": {**GREEDY, "binary_data_output": True}}
    async with start() as server:
        data, headers = body_with_bytes(head, blob)
        answer = await server.request("POST", URL, data=data, headers=headers)
        assert answer.status == 200, answer.body
        assert answer.headers["Content-Type"] == "application/octet-stream"
        length = int(answer.headers[HEADER_LENGTH])
        header, rest = json.loads(answer.body[:length]), answer.body[length:]
        sizes = [each["parameters"]["binary_data_size"] for each in header["outputs"]]
        assert sum(sizes) == len(rest)
        first = (await completion(server, "Once")).encode()
        assert rest.startswith(struct.pack("<I", len(first)) + first)
        assert rest.endswith((struct.pack("<I", 6) + b"length") * 2)
        mixed = {**head, "outputs": [{"name": "text_output", "parameters": {"binary_data": False}}]}
        data, headers = body_with_bytes(mixed, blob)
        answer = await server.request("POST", URL, data=data, headers=headers)
        assert HEADER_LENGTH not in answer.headers
        assert outputs(answer)["text_output"][0].encode() == first


@pytest.mark.parametrize("length", ["-1", "1e3", "", "x", "99999999", "9" * 5000, "٣"])
async def test_a_length_of_the_json_that_cannot_be_is_refused(start: Any, length: str) -> None:
    async with start() as server:
        answer = await server.request("POST", URL, data=b"{}", headers={HEADER_LENGTH: length})
        assert HEADER_LENGTH in error(answer)


@pytest.mark.parametrize(
    ("inputs", "body", "named"),
    [
        ([], {}, "text_input"),
        ([tensor("text_input", "INT32", 1)], {}, "BYTES"),
        ([texts()], {}, "0 texts"),
        ([texts("")], {}, "text_input"),
        ([texts("a"), texts("b", name="text")], {}, "text_input"),
        ([texts("a"), tensor("input_ids", "INT32", 1)], {}, "input_ids"),
        ([texts("a"), tensor("max_tokens", "INT32", 1, 2)], {}, "max_tokens"),
        ([texts("a"), tensor("max_tokens", "FP32", 1.5)], {}, "max_tokens"),
        ([texts("a"), tensor("stream", "BOOL", True)], {}, "generate_stream"),
        ([texts("a"), texts("{", name="sampling_parameters")], {}, "sampling_parameters"),
        ([texts("a"), texts("[1]", name="sampling_parameters")], {}, "sampling_parameters"),
        ([texts("a")], {"parameters": {"max_token": 1}}, "max_token"),
        ([texts("a")], {"parameters": {"n": 2}}, "'n'"),
        ([texts("a")], {"parameters": {"temperature": "hot"}}, "temperature"),
        ([texts("a")], {"parameters": {"temperature": -1}}, "temperature"),
        ([texts("a")], {"parameters": {"session": "has space"}}, "session"),
        ([texts("a")], {"parameters": {"sequence_id": 7}}, "sequences"),
        ([texts("a")], {"parameters": {"timeout": "soon"}}, "timeout"),
        ([texts("a")], {"parameters": {"binary_data_output": 1}}, "binary_data_output"),
        ([texts("a")], {"parameters": [1]}, "parameters"),
        ([texts("a")], {"outputs": [{"name": "x", "parameters": {"classification": 3}}]}, "classification"),
        ([texts("a")], {"outputs": [{"name": "x", "parameters": {"shared_memory_region": "r"}}]}, "shared"),
        ([texts("a")], {"outputs": [{"name": "x"}] * 65}, "outputs"),
        ([{"name": "text_input", "shape": ["1"], "datatype": "BYTES", "data": ["a"]}], {}, "shape"),
        ([{"name": "text_input", "shape": [1], "data": ["a"]}], {}, "datatype"),
    ],
)
async def test_invalid_values_are_refused_by_name(
    start: Any, inputs: list[Any], body: dict[str, Any], named: str
) -> None:
    async with start() as server:
        assert named in error(await infer(server, *inputs, **body))


async def test_reserved_parameters_of_triton_change_nothing(start: Any) -> None:
    given = {"priority": 3, "timeout": 0, "sequence_id": 0, "triton_enable_empty_final_response": True}
    async with start() as server:
        answer = await infer(server, texts("Once"), parameters={**GREEDY, **given})
        assert outputs(answer)["text_output"] == [await completion(server, "Once")]


async def test_a_timeout_ends_the_work(start: Any) -> None:
    async with start() as server:
        server.instance.model.hold()
        answer = await infer(server, texts("Once"), parameters={"timeout": 1000})
        error(answer, 504)
        server.instance.model.release()
        await server.eventually(lambda: server.running() == 0)


async def test_a_client_that_goes_away_frees_its_place(start: Any) -> None:
    async with start() as server:
        server.instance.model.hold()
        asking = asyncio.create_task(infer(server, texts("a", "b"), parameters={"max_tokens": 10_000}))
        await server.eventually(lambda: server.running() + server.queued() == 2)
        asking.cancel()
        server.instance.model.release()
        await server.eventually(lambda: server.running() + server.queued() == 0)


async def test_too_many_texts_are_refused_and_too_much_work_gets_retry_after(start: Any) -> None:
    async with start(limits=Limits(max_sequences=2, max_taken=1)) as server:
        assert "3 texts" in error(await infer(server, texts("a", "b", "c")))
        answer = await infer(server, texts("a", "b"))
        error(answer, 429)
        assert int(answer.headers["Retry-After"]) >= 1


async def test_another_model_or_version_is_not_found(start: Any) -> None:
    async with start() as server:
        for path in ("other", "tiny", "tiny/model/versions/2", "tiny/model/versions/1/versions/1"):
            error(await infer(server, texts("a"), url=f"/v2/models/{path}/infer"), 404)


async def test_an_encoder_gives_a_vector_a_text(start: Any, encoder_parts: TinyParts) -> None:
    async with start(parts=encoder_parts) as server:
        listed = (await server.post("/v1/embeddings", {"input": ["hi", "there you"]})).json["data"]
        vectors = np.array([each["embedding"] for each in listed], dtype=np.float32)
        answer = await infer(server, texts("hi", "there you"))
        (found,) = answer.json["outputs"]
        assert (found["name"], found["datatype"], found["shape"]) == (
            "embedding",
            "FP32",
            list(vectors.shape),
        )
        assert np.allclose(np.array(found["data"]).reshape(vectors.shape), vectors, atol=1e-6)
        answer = await infer(server, texts("hi"), parameters={"binary_data_output": True})
        blob = answer.body[int(answer.headers[HEADER_LENGTH]) :]
        assert np.allclose(np.frombuffer(blob, "<f4"), vectors[0], atol=1e-6)
        assert "'max_tokens'" in error(await infer(server, texts("hi"), parameters={"max_tokens": 1}))
        error(await infer(server, texts("hi" * 5000)))


async def test_a_function_takes_tensors_and_gives_tensors(start: Any) -> None:
    def handler(event: Any, context: Any) -> Any:
        seen.append(event)
        return {
            "sum": [a + b for a, b in zip(event["a"], event["b"], strict=True)],
            "text": event["parameters"]["say"],
        }

    seen: list[Any] = []
    async with start(handler=handler) as server:
        inputs = [tensor("a", "INT32", 1, 2), tensor("b", "FP32", 0.5, 1.5)]
        answer = await infer(server, *inputs, parameters={"say": "ü", "timeout": 10**9})
        assert outputs(answer) == {"sum": [1.5, 3.5], "text": ["ü"]}
        assert [each["datatype"] for each in answer.json["outputs"]] == ["FP64", "BYTES"]
        assert seen == [{"a": [1, 2], "b": [0.5, 1.5], "parameters": {"say": "ü"}}]


async def test_a_function_that_gives_several_values_gives_one_list(start: Any) -> None:
    def handler(event: Any, context: Any) -> Any:
        yield from range(event["n"][0])

    async with start(handler=handler) as server:
        assert outputs(await infer(server, tensor("n", "INT32", 3))) == {"output": [0, 1, 2]}
        assert outputs(await infer(server, tensor("n", "INT32", 1))) == {"output": [0]}
        assert str(MAX_RESULTS) in error(await infer(server, tensor("n", "INT32", MAX_RESULTS + 1)))


async def test_a_function_that_fails_is_an_error_and_not_the_clients(start: Any) -> None:
    def handler(event: Any, context: Any) -> Any:
        return 1 / 0

    async with start(handler=handler) as server:
        assert "ZeroDivisionError" in error(await infer(server, tensor("n", "INT32", 3)), 500)


async def test_a_function_asks_the_model_and_ends_with_its_client(start: Any) -> None:
    begun = threading.Event()

    def handler(event: Any, context: Any) -> Any:
        begun.set()
        return context.model.generate("Once", max_tokens=5, temperature=0).text

    async with start(handler=handler) as server:
        answer = await infer(server, texts("x", name="any"))
        assert outputs(answer)["output"] == [await completion(server, "Once", ignore_eos=False)]
        begun.clear()
        server.instance.model.hold()
        asking = asyncio.create_task(infer(server, texts("x", name="any")))
        await server.eventually(begun.is_set)
        await server.eventually(lambda: server.running() + server.queued() == 1)
        asking.cancel()
        server.instance.model.release()
        await server.eventually(lambda: server.running() + server.queued() == 0)


async def test_what_a_body_costs_is_given_back(start: Any) -> None:
    async with start() as server:
        error(await infer(server, texts("a"), parameters={"max_token": 1}))
        await infer(server, texts("a"), parameters=GREEDY)
        assert server.service.admission.body_bytes == 0
        assert len(server.service.in_flight) == 0
