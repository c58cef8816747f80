"""Jobs from their input to their output, with real engines and tiny models."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.adapters import greedy, merged, save_adapter
from tests.support.batch_jobs import config_of, prompts, read_records, write_lines
from tests.support.tiny_models import save_tiny, tiny_model

from teneral.handlers.batch.progress import JobProgress
from teneral.handlers.batch.spec import (
    JobFormatError,
    JobMismatchError,
    JobReport,
    JobSpec,
    Share,
    Status,
)
from teneral.loader.errors import ChangedError, NotFoundError, UsageError
from teneral.runtime.instance.instance import Instance

Run = Callable[..., JobReport]
ROOM_BYTES = 60_000  # for two tiny adapters


def call(custom_id: Any, url: str, body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


@pytest.fixture
def given(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", prompts(30))


# records


def test_calls_are_answered_as_the_server_does_in_the_order_of_the_input(run: Run, tmp_path: Path) -> None:
    lines = [
        call("a", "/v1/completions", {"prompt": "ab", "max_tokens": 3, "temperature": 0}),
        call("b", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
        call("c", "/v1/completions", {"prompt": "ab", "max_tokens": -1}),
        call("d", "/v1/completions", {"prompt": "ab", "model": "another"}),
        call("e", "/v1/embeddings", {"input": "ab"}),
        call("f", "/v1/completions", {"prompt": "x" * 600, "max_tokens": 1}),
        call("g", "/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 2}),
    ]
    report = run(write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    records = read_records(tmp_path / "out.jsonl")
    assert [record["custom_id"] for record in records] == list("abcdefg")
    assert [record["response"]["status_code"] for record in records] == [200, 200, 400, 404, 400, 400, 200]
    assert all(set(record) == {"id", "custom_id", "response", "error"} for record in records)
    assert all(record["error"] is None for record in records)
    completion, chat, refused, missing, _, too_long, several = (
        record["response"]["body"] for record in records
    )
    assert completion["usage"]["completion_tokens"] == 3
    assert chat["choices"][0]["message"]["role"] == "assistant"
    assert refused["error"]["param"] == "max_tokens"
    assert missing["error"]["code"] == "model_not_found"
    assert too_long["error"]["code"] == "context_length_exceeded"
    assert len(several["choices"]) == 4
    assert (
        len({record["id"] for record in records} | {record["response"]["request_id"] for record in records})
        == 14
    )
    assert (report.status, report.records, report.failed) == (Status.COMPLETE, 7, 4)


def test_calls_name_adapters(run: Run, tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base")
    model = tiny_model("llama")
    adapters = {f"a{seed}": save_adapter(tmp_path / f"a{seed}", model, seed=seed) for seed in range(3)}
    prompt = [(number * 7) % 90 for number in range(20)]
    models = {"base": model} | {f"base:{name}": merged(model, own) for name, own in adapters.items()}
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    names = [*models, "base:none"] * 4
    lines = [call(str(line), "/v1/completions", {**body, "model": name}) for line, name in enumerate(names)]
    settings = {"name": "base", "backend": "native", "adapters": f"{tmp_path}/{{name}}"}
    with Instance(config_of(base, max_queued=64, adapters_bytes=ROOM_BYTES, **settings)) as host:
        report = run(write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", host=host)
        tokenizer = host.tokenizer.result()
        expected = {name: tokenizer.decode(greedy(each, prompt, 6)) for name, each in models.items()}
        assert host.adapters is not None
        host.adapters.check_integrity()
        assert host.adapters.statistics().evictions_total > 0
    assert len(set(expected.values())) == len(models)
    assert (report.status, report.records, report.failed) == (Status.COMPLETE, 20, 4)
    for name, record in zip(names, read_records(tmp_path / "out.jsonl"), strict=True):
        if name == "base:none":
            assert record["response"]["status_code"] == 404
        else:
            text = record["response"]["body"]["choices"][0]["text"]
            assert text.rstrip("\ufffd") == expected[name].rstrip("\ufffd")  # or a cut character


def test_plain_lines_are_answered_flat(run: Run, tmp_path: Path) -> None:
    lines = [
        {"prompt": "ab", "max_tokens": 3, "temperature": 0, "custom_id": 12},
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        {"prompt": "ab", "max_tokens": "many"},
        {"prompt": "ab", "nonsense": 1},
        {"prompt": "x" * 600, "max_tokens": 1},
        {"input": "ab"},
    ]
    run(write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out")
    first, second, *failed = read_records(tmp_path / "out")
    assert set(first) == {"custom_id", "text", "finish_reason", "usage"}
    assert first["custom_id"] == 12
    assert first["usage"] == {"prompt_tokens": 2, "completion_tokens": 3}
    assert second["custom_id"] == "2"
    assert [record["custom_id"] for record in failed] == ["3", "4", "5", "6"]
    codes = [record["error"]["code"] for record in failed]
    assert codes == ["invalid_request", "invalid_request", "context_length_exceeded", "invalid_request"]


def test_texts_are_embedded_and_one_that_is_too_long_fails_alone(
    run: Run, tmp_path: Path, encoder: Instance
) -> None:
    lines: list[Any] = [{"input": "ab" * (number % 9 + 1)} for number in range(80)]
    lines[17] = {"input": "x" * 500}
    lines[40] = call("o", "/v1/embeddings", {"input": "ab"})
    lines[41] = {"prompt": "ab"}
    report = run(write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", host=encoder)
    records = read_records(tmp_path / "out.jsonl")
    assert [record["custom_id"] for record in records] == [
        "o" if number == 40 else str(number + 1) for number in range(80)
    ]
    assert records[17]["error"]["code"] == "context_length_exceeded"
    assert records[41]["error"]["code"] == "invalid_request"
    assert report.failed == 2
    served = records[40]["response"]["body"]["data"][0]["embedding"]
    assert len(served) == 64
    for number in (0, 9, 18):  # the same text, in whatever company
        assert records[number]["embedding"] == pytest.approx(served, abs=1e-5)


def test_a_bad_line_is_a_record_that_is_an_error(run: Run, tmp_path: Path) -> None:
    lines = [
        *prompts(2),
        "no json",
        "",
        "   ",
        b'{"prompt": "\xff"}',
        {"prompt": "x" * 2000},
        {"custom_id": "id-1", "prompt": "again"},
        call("z", "/v1/nothing", {}),
        *prompts(1, custom_id="last"),
    ]
    report = run(write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", max_line_bytes=1000)
    records = read_records(tmp_path / "out.jsonl")
    ids = [record["custom_id"] for record in records]
    assert ids == ["id-0", "id-1", None, "6", None, None, "z", "last"]
    codes = [record["error"]["code"] for record in records if record.get("error")]
    assert codes == ["invalid_json", "invalid_json", "line_too_long", "duplicate_custom_id", "unknown_url"]
    assert (report.records, report.failed) == (8, 5)
    assert json.loads((tmp_path / "out.jsonl.parts" / "manifest.json").read_bytes())["succeeded"] == 3


def test_an_empty_input_has_an_empty_output(run: Run, tmp_path: Path) -> None:
    report = run(write_lines(tmp_path / "in.jsonl", ["", ""]), tmp_path / "out.jsonl")
    assert report.status is Status.COMPLETE
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_sampled_texts_are_the_same_from_any_worker(run: Run, tmp_path: Path) -> None:
    lines: list[Any] = [{"prompt": "ab", "max_tokens": 8} for _ in range(6)]
    lines += [call(f"c{number}", "/v1/completions", {"prompt": "ab", "max_tokens": 8}) for number in range(6)]
    given = write_lines(tmp_path / "in.jsonl", lines)
    texts = []
    for name in ("one", "two"):
        run(given, tmp_path / name, part_lines=1 if name == "one" else 12)
        records = read_records(tmp_path / name)
        texts.append(
            [r["text"] if "text" in r else r["response"]["body"]["choices"][0]["text"] for r in records]
        )
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 8, "each line has a seed of its own"


def test_jobs_answer_behind_an_api_key(run: Run, tmp_path: Path, decoder: Instance, monkeypatch: Any) -> None:
    monkeypatch.setattr(decoder, "config", decoder.config.replace(api_key="new,old"))
    lines = [call("a", "/v1/completions", {"prompt": "ab", "max_tokens": 1})]
    assert run(write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out").failed == 0


def test_more_lines_than_the_queue_holds_wait_for_their_turn(
    run: Run, tmp_path: Path, decoder_dir: Path
) -> None:
    from tests.support.batch_jobs import config_of

    lines = prompts(12, teneral={}) + [
        call(f"c{number}", "/v1/completions", {"prompt": "ab", "max_tokens": 2, "n": 2})
        for number in range(12)
    ]
    for line in lines[:12]:
        del line["teneral"]
    with Instance(config_of(decoder_dir, max_running=2, max_queued=2)) as host:
        assert run(write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out", host=host).failed == 0


# once, and again


def test_a_job_that_was_done_is_not_done_again(run: Run, given: Path, tmp_path: Path) -> None:
    first = run(given, tmp_path / "out.jsonl")
    before = (tmp_path / "out.jsonl").stat()
    again = run(given, tmp_path / "out.jsonl")
    assert again.status is Status.COMPLETE
    assert (again.key, again.run_records, again.failed) == (first.key, 0, 0)
    after = (tmp_path / "out.jsonl").stat()  # a reader may have changed the time of access
    assert (after.st_ino, after.st_mtime_ns, after.st_size) == (
        before.st_ino,
        before.st_mtime_ns,
        before.st_size,
    )


def test_a_job_goes_on_where_it_was_cut_off(run: Run, given: Path, tmp_path: Path) -> None:
    out, work = tmp_path / "out.jsonl", tmp_path / "out.jsonl.parts"
    run(given, out, part_lines=4)
    whole = out.read_bytes()
    out.unlink()  # between manifest and file
    assert run(given, out).run_records == 0
    assert out.read_bytes() == whole
    out.unlink()
    (work / "manifest.json").unlink()  # between parts and manifest
    assert run(given, out).run_records == 0
    assert out.read_bytes() == whole
    out.unlink()
    (work / "manifest.json").unlink()
    (work / "parts" / "000003.jsonl").unlink()
    assert run(given, out).run_records == 4
    assert out.read_bytes() == whole
    assert sorted(path.name for path in work.iterdir()) == ["job.json", "manifest.json", "parts"]


def test_whatever_a_killed_worker_has_left_is_gone_on_from(run: Run, given: Path, tmp_path: Path) -> None:
    """All states that writing in this order can leave, and some that it cannot."""
    out, work = tmp_path / "out.jsonl", tmp_path / "out.jsonl.parts"
    run(given, out, part_lines=3)
    whole = out.read_bytes()
    chance = random.Random(3)
    for _ in range(25):
        out.unlink()
        if chance.random() < 0.7:
            (work / "manifest.json").unlink()
            gone = chance.sample(range(10), chance.randrange(4))
            for number in gone:
                (work / "parts" / f"{number:06}.jsonl").unlink()
            if gone and chance.random() < 0.5:
                partial = work / "partial" / f"{gone[0]:06}.jsonl"
                partial.parent.mkdir(exist_ok=True)
                kept = whole.splitlines()[3 * gone[0] + 1]
                partial.write_bytes(b"[%d,false,4,%s]" % (3 * gone[0] + 2, kept))
            (work / "parts" / ".teneral-0123456789abcdef.tmp").write_bytes(b"half")
        run(given, out)
        assert out.read_bytes() == whole
        assert sorted(path.name for path in work.iterdir()) == ["job.json", "manifest.json", "parts"]


def test_the_size_of_parts_is_the_first_workers(run: Run, given: Path, tmp_path: Path) -> None:
    assert run(given, tmp_path / "out", part_lines=4).parts == 8
    (tmp_path / "out" / "manifest.json").unlink()
    assert run(given, tmp_path / "out", part_lines=10).parts == 8


def test_each_of_several_workers_does_its_share_and_the_last_ends_the_job(
    run: Run, given: Path, tmp_path: Path
) -> None:
    reports = [run(given, tmp_path / "out.jsonl", part_lines=4, share=Share(index, 3)) for index in (2, 0, 1)]
    assert [report.status for report in reports] == [Status.SHARE_DONE, Status.SHARE_DONE, Status.COMPLETE]
    assert [report.run_records for report in reports] == [8, 12, 10]
    assert [record["custom_id"] for record in read_records(tmp_path / "out.jsonl")] == [
        f"id-{number}" for number in range(30)
    ]


def test_no_more_than_two_parts_of_work_are_open_at_a_time(run: Run, tmp_path: Path) -> None:
    """A killed worker loses no more than these."""
    given = write_lines(tmp_path / "in.jsonl", prompts(320, max_tokens=12))
    pending: list[int] = []

    def look(progress: JobProgress) -> None:
        pending.append(progress.records_done - 64 * progress.parts_done)

    assert run(given, tmp_path / "out", on_progress=look).parts == 5
    assert max(pending) > 0
    assert max(pending) <= 2 * 64


# another job's place


def test_a_replaced_input_is_another_job(run: Run, given: Path, tmp_path: Path) -> None:
    run(given, tmp_path / "out")
    write_lines(given, prompts(31))
    with pytest.raises(JobMismatchError, match="another version of the input"):
        run(given, tmp_path / "out")


def test_another_model_or_option_is_another_job(run: Run, given: Path, tmp_path: Path) -> None:
    run(given, tmp_path / "out", model_identity="a" * 64)
    with pytest.raises(JobMismatchError, match="another model: aaaa"):
        run(given, tmp_path / "out")
    with pytest.raises(JobMismatchError, match="max_line_bytes 1048576, not 500"):
        run(given, tmp_path / "out", model_identity="a" * 64, max_line_bytes=500)


def test_what_is_not_a_jobs_output_is_left_alone(run: Run, given: Path, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("mine\n")
    with pytest.raises(JobMismatchError, match=r"exists, but without the job\.json"):
        run(given, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "mine\n"
    run(given, tmp_path / "out2.jsonl")
    (tmp_path / "out2.jsonl").write_text("mine\n")
    with pytest.raises(JobMismatchError, match="is not this job's output"):
        run(given, tmp_path / "out2.jsonl")
    (tmp_path / "out3" / "parts").mkdir(parents=True)
    (tmp_path / "out3" / "parts" / "000000.jsonl").write_text("mine\n")
    with pytest.raises(JobMismatchError, match=r"without the job\.json"):
        run(given, tmp_path / "out3")


def test_an_input_that_is_another_version_than_asked_for_is_refused(
    run: Run, given: Path, tmp_path: Path
) -> None:
    with pytest.raises(ChangedError, match="not the expected abc"):
        run(given, tmp_path / "out", input_version="abc")
    assert not (tmp_path / "out").exists()


def test_an_input_that_changes_meanwhile_ends_the_job(run: Run, given: Path, tmp_path: Path) -> None:
    write_lines(given, prompts(60, max_tokens=60))

    def change(progress: JobProgress) -> None:
        if progress.parts_done:
            os.utime(given, ns=(1, 1))

    with pytest.raises(ChangedError):
        run(given, tmp_path / "out", part_lines=1, on_progress=change)
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("damage", [b"{}\n", b"", b"no json\n" * 4, b'{"custom_id": 1}\n' * 3])
def test_a_damaged_part_is_named(run: Run, given: Path, tmp_path: Path, damage: bytes) -> None:
    run(given, tmp_path / "out", part_lines=4)
    (tmp_path / "out" / "manifest.json").unlink()
    (tmp_path / "out" / "parts" / "000002.jsonl").write_bytes(damage)
    with pytest.raises(JobFormatError, match=r"parts/000002\.jsonl"):
        run(given, tmp_path / "out")


# invalid requests


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"input": "in/"}, "input"),
        ({"input": "s3://bucket"}, "input"),
        ({"input": "x/" + "a" * 1100}, "input"),
        ({"input": "s3://b/in.jsonl", "output": "s3://b/in.jsonl"}, "output"),
        ({"max_lines": 0}, "max_lines"),
        ({"part_lines": 0}, "part_lines"),
        ({"max_line_bytes": 1}, "max_line_bytes"),
        ({"drain_s": -1}, "drain_s"),
    ],
)
def test_an_invalid_job_is_refused(run: Run, fields: dict[str, Any], key: str) -> None:
    whole = {"input": "in.jsonl", "output": "out"} | fields
    with pytest.raises(UsageError) as caught:
        run(whole.pop("input"), whole.pop("output"), **whole)
    assert caught.value.key in (key, "")


def test_a_compressed_input_is_refused_as_a_whole(run: Run, given: Path, tmp_path: Path) -> None:
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(given.read_bytes()))
    with pytest.raises(UsageError, match="is compressed"):
        run(packed, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", "1", "4/4", "a/b", "1/0", "-1/2", "0/99999"])
def test_an_invalid_share_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Share.parse(text)
    assert caught.value.key == "worker"


def test_a_missing_input_is_named(run: Run, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"nothing\.jsonl"):
        run(tmp_path / "nothing.jsonl", tmp_path / "out")


def test_a_spec_may_be_made_without_anything_being_there() -> None:
    assert JobSpec(input="a", output="b").share is None
