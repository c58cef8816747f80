from __future__ import annotations

import io
import json

import numpy as np
import pytest

from teneral.handlers.contrib import processing
from teneral.handlers.contrib.examples import embed_batch
from teneral.handlers.function.context import Context
from teneral.loader.errors import AlreadyExistsError, NotFoundError
from teneral.runtime.errors import RequestError

TEXTS = ["a", "soft wings", "The nymph climbs a stem. " * 20, ""]


@pytest.fixture
def embed(invoke, embedding):
    async def embed(event):
        return await invoke("embed_batch", event, embedding)

    return embed


@pytest.fixture
def expected(embedding):
    """Of the texts that need no chunks."""
    model = Context(embedding, request_id="expected", timeout_s=60).model
    return model.embed([text for text in TEXTS if len(text) < 90])


def read(cloud, key):
    return cloud.get_object(Bucket="bucket", Key=key)["Body"].read()


def rows_of(cloud, key="out.jsonl"):
    return [json.loads(line) for line in read(cloud, key).splitlines()]


async def test_texts_become_json_lines(cloud, embed, expected):
    answer = await embed({"input": TEXTS, "output": "s3://bucket/out.jsonl", "max_tokens": 90})
    assert answer == {"output": "s3://bucket/out.jsonl", "count": 4}
    rows = rows_of(cloud)
    assert [row["id"] for row in rows] == ["0", "1", "2", "3"]
    np.testing.assert_allclose([rows[index]["embedding"] for index in (0, 1, 3)], expected, atol=1e-6)
    assert np.linalg.norm(rows[2]["embedding"]) == pytest.approx(1, abs=1e-5)


def test_a_long_text_is_the_mean_of_its_chunks_by_their_tokens(embedding):
    model = Context(embedding, request_id="expected", timeout_s=60).model
    text = "The nymph climbs a stem. " * 5 + "Short end."
    found = list(processing.chunks(model, text, max_tokens=60))
    assert len({chunk.num_tokens for chunk in found}) > 1
    weighted = sum(chunk.num_tokens * model.embed(chunk.text)[0] for chunk in found)
    (vector,) = processing.embed_long(model, [text], max_tokens=60)
    np.testing.assert_allclose(vector, weighted / np.linalg.norm(weighted), atol=1e-5)


async def test_an_object_of_json_lines_becomes_parquet(cloud, embed, expected):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is an optional extra")
    lines = [json.dumps({"id": f"doc-{index}", "text": text}) for index, text in enumerate(TEXTS)]
    cloud.put_object(Bucket="bucket", Key="in.jsonl", Body="\n\n".join(lines))
    event = {"input": "s3://bucket/in.jsonl", "output": "s3://bucket/out.parquet", "max_tokens": 90}
    assert (await embed(event))["count"] == 4
    table = parquet.read_table(io.BytesIO(read(cloud, "out.parquet")))
    assert table.column("id").to_pylist() == ["doc-0", "doc-1", "doc-2", "doc-3"]
    vectors = np.array(table.column("embedding").to_pylist(), dtype=np.float32)
    np.testing.assert_allclose(vectors[[0, 1, 3]], expected, atol=1e-6)


async def test_more_texts_than_fit_a_batch_keep_their_order(cloud, embed):
    texts = [f"text {index}" for index in range(2 * embed_batch.BATCH + 5)]
    assert (await embed({"input": texts, "output": "s3://bucket/out.jsonl"}))["count"] == len(texts)
    rows = rows_of(cloud)
    assert [row["id"] for row in rows] == [str(index) for index in range(len(texts))]
    again = await embed({"input": texts[-1:], "output": "s3://bucket/last.jsonl"})
    assert again["count"] == 1
    np.testing.assert_allclose(rows_of(cloud, "last.jsonl")[0]["embedding"], rows[-1]["embedding"], atol=1e-5)


async def test_a_duplicate_of_the_event_writes_nothing(cloud, embed):
    event = {"input": ["a", "b"], "output": "s3://bucket/out.jsonl"}
    await embed(event)
    etag = cloud.head_object(Bucket="bucket", Key="out.jsonl")["LastModified"]
    assert (await embed(event))["count"] is None
    assert cloud.head_object(Bucket="bucket", Key="out.jsonl")["LastModified"] == etag
    assert (await embed({**event, "input": ["c"]}))["count"] == 1


async def test_of_two_at_the_same_time_one_writes(cloud, embed, monkeypatch):
    embed_long = processing.embed_long

    def overtaken(*arguments, **options):
        cloud.put_object(Bucket="bucket", Key="out.jsonl", Body=b"the other's")
        return embed_long(*arguments, **options)

    monkeypatch.setattr(processing, "embed_long", overtaken)
    with pytest.raises(AlreadyExistsError):
        await embed({"input": ["a"], "output": "s3://bucket/out.jsonl"})
    assert read(cloud, "out.jsonl") == b"the other's"


@pytest.mark.parametrize(
    ("event", "param"),
    [
        ([], ""),
        ({"input": ["a"], "output": "s3://bucket/o.jsonl", "max_tokens": "many"}, ""),
        ({"input": ["a"]}, "output"),
        ({"input": ["a"], "output": "/tmp/out.jsonl"}, "output"),
        ({"input": ["a"], "output": "s3://bucket/out.csv"}, "output"),
        ({"output": "s3://bucket/out.jsonl"}, "input"),
        ({"input": [5], "output": "s3://bucket/out.jsonl"}, "input"),
        ({"input": [], "output": "s3://bucket/out.jsonl"}, "input"),
        ({"input": [{"id": 1}], "output": "s3://bucket/out.jsonl"}, "input"),
        ({"input": "/etc/passwd", "output": "s3://bucket/out.jsonl"}, "input"),
    ],
)
async def test_an_invalid_event_is_refused_by_its_field(cloud, embed, event, param):
    with pytest.raises(RequestError) as caught:
        await embed(event)
    assert caught.value.param == param
    assert "Contents" not in cloud.list_objects_v2(Bucket="bucket")


async def test_a_line_that_is_no_json_is_named(cloud, embed):
    cloud.put_object(Bucket="bucket", Key="in.jsonl", Body='"fine"\n{broken\n')
    with pytest.raises(RequestError, match="line 2"):
        await embed({"input": "s3://bucket/in.jsonl", "output": "s3://bucket/out.jsonl"})


async def test_an_input_that_is_not_there_is_named(cloud, embed):
    with pytest.raises(NotFoundError, match=r"in\.jsonl"):
        await embed({"input": "s3://bucket/in.jsonl", "output": "s3://bucket/out.jsonl"})
