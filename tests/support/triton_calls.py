"""Calls of tritonclient to a server of ours; run by a Python that has it: MODE HOST:PORT MODEL
[EXPECTED].

It checks what it sees, says it on standard output, and ends with status 0 when all was as it must be. Modes: decoder
(EXPECTED is what a greedy completion of 5 tokens of "Once" is), encoder, function (that gives back its event).
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

GREEDY = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}


def texts(*values, binary=True, name="text_input"):
    given = triton.InferInput(name, [len(values)], "BYTES")
    given.set_data_from_numpy(
        np.array([value.encode() for value in values], dtype=object), binary_data=binary
    )
    return given


def refused(call, status):
    try:
        call()
    except InferenceServerException as error:
        print("refused:", error)
        if error.status() == str(status):
            return
    raise AssertionError(f"it was not refused with {status}")


def decoder(address, model, expected):
    client = triton.InferenceServerClient(address)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(model)
    assert client.is_model_ready(model, "1")
    assert not client.is_model_ready(model, "2")
    assert not client.is_model_ready("other")
    print("server:", client.get_server_metadata())
    print("model:", client.get_model_metadata(model, "1"))
    print("config:", client.get_model_config(model))
    for binary_in in (True, False):
        for binary_out in (True, False):
            wanted = [triton.InferRequestedOutput("text_output", binary_data=binary_out)]
            given = texts("Once", "Once", binary=binary_in)
            result = client.infer(model, [given], outputs=wanted, request_id="42", parameters=GREEDY)
            found = result.as_numpy("text_output")
            assert [each.encode() if isinstance(each, str) else each for each in found] == [
                expected.encode()
            ] * 2
            assert result.get_response()["id"] == "42"
            assert ("data" in result.get_output("text_output")) is not binary_out
            print(f"infer, binary in {binary_in}, out {binary_out}:", found)
    every = client.infer(model, [texts("Once")], model_version="1", parameters=GREEDY)
    assert every.as_numpy("finish_reason").tolist() == [b"length"]
    handles = [client.async_infer(model, [texts("Once")], parameters=GREEDY) for _ in range(4)]
    assert [each.get_result().as_numpy("text_output")[0] for each in handles] == [expected.encode()] * 4
    asyncio.run(with_asyncio(address, model, expected))
    refused(lambda: client.infer("other", [texts("Once")]), 404)
    refused(lambda: client.infer(model, [texts("Once", name="INPUT0")]), 400)
    refused(lambda: client.infer(model, [texts("Once")], parameters={"max_token": 1}), 400)
    refused(lambda: client.infer(model, [texts("Once")], sequence_id=7, sequence_start=True), 400)
    repository(client, model, expected)
    print(
        "statistics:", client.get_inference_statistics(model)["model_stats"][0]["inference_stats"]["success"]
    )
    assert client.get_inference_statistics()["model_stats"][0]["name"] == model


def repository(client, model, expected):
    def index():
        (entry,) = client.get_model_repository_index()
        print("index:", entry)
        return entry["state"]

    assert index() == "READY"
    refused(lambda: client.load_model("other"), 404)
    refused(lambda: client.load_model(model, config="{}"), 400)
    client.unload_model(model)
    assert index() == "UNAVAILABLE"
    assert client.is_server_live()
    assert not client.is_server_ready()
    assert not client.is_model_ready(model)
    refused(lambda: client.infer(model, [texts("Once")]), 503)
    client.load_model(model)
    assert index() == "READY"
    assert client.is_model_ready(model)
    found = client.infer(model, [texts("Once")], parameters=GREEDY).as_numpy("text_output")
    assert found.tolist() == [expected.encode()]


async def with_asyncio(address, model, expected):
    async with triton_aio.InferenceServerClient(address) as client:
        assert await client.is_model_ready(model)
        results = await asyncio.gather(
            *(client.infer(model, [texts("Once")], parameters=GREEDY) for _ in range(8))
        )
        assert [each.as_numpy("text_output")[0] for each in results] == [expected.encode()] * 8
        print("asyncio:", await client.get_model_repository_index())


def encoder(address, model):
    client = triton.InferenceServerClient(address)
    print("model:", client.get_model_metadata(model))
    wanted = triton.InferRequestedOutput("embedding", binary_data=False)
    as_json = client.infer(model, [texts("hi", "there", binary=False)], outputs=[wanted]).as_numpy(
        "embedding"
    )
    as_bytes = client.infer(model, [texts("hi", "there")]).as_numpy("embedding")
    assert as_json.dtype == as_bytes.dtype == np.float32
    assert as_json.shape == as_bytes.shape
    assert np.array_equal(as_json, as_bytes)
    print("embedding:", as_bytes.shape, as_bytes[0, :4])


def function(address, model):
    """Every datatype, in both forms."""
    import ml_dtypes

    client = triton.InferenceServerClient(address)
    kinds = [np.bool_, *(getattr(np, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))]
    kinds += [np.float16, np.float32, np.float64, ml_dtypes.bfloat16]
    for kind in kinds:
        array = np.array([[0, 1, 1], [1, 0, 1]]).astype(kind)
        for binary in (True, False):
            name = np_to_triton_dtype(array.dtype)
            if name == "BF16" and not binary:
                continue  # which the client refuses itself
            given = triton.InferInput("x", [2, 3], name)
            given.set_data_from_numpy(array, binary_data=binary)
            for binary_out in (True, False):
                wanted = [triton.InferRequestedOutput("x", binary_data=binary_out)]
                result = client.infer(model, [given], outputs=wanted)
                found = result.as_numpy("x")
                assert found.shape == (2, 3)
                assert found.tolist() == array.astype(np.float64).tolist()
            print(f"{name}, binary {binary}: came back as {result.get_output('x')['datatype']}")
    given = triton.InferInput("image", [1], "BYTES")
    given.set_data_from_numpy(np.array([b"\xff\xd8\x00"], dtype=object))
    print("bytes:", client.infer(model, [given]).get_response())


if __name__ == "__main__":
    {"decoder": decoder, "encoder": encoder, "function": function}[sys.argv[1]](*sys.argv[2:])
