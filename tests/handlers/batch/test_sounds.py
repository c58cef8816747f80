"""Jobs of files of sound: one, those of a folder, and those that lines of JSONL name."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.batch_jobs import config_of, read_records, write_lines
from tests.support.speech_models import noise, save_speech, wav_of

from teneral.handlers.batch.answers import Answers, answering
from teneral.handlers.batch.events.requests import _index_of
from teneral.handlers.batch.input import LineProblem, RawLine, Transcribe, parse_line
from teneral.handlers.batch.job import run_job
from teneral.handlers.batch.sounds import SoundLines
from teneral.handlers.batch.spec import JobMismatchError, JobReport, JobSpec, Status
from teneral.loader.errors import ChangedError, UnavailableError, UsageError
from teneral.loader.sources.file.store import FileStore
from teneral.runtime.instance.instance import Instance

Run = Callable[..., JobReport]
FIELDS = '{"language": "en", "logprob_threshold": "none", "compression_ratio_threshold": "none"}'


@pytest.fixture(scope="module")
def scribe(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Instance]:
    directory = tmp_path_factory.mktemp("speech")
    save_speech(directory)
    with Instance(config_of(directory, batch_audio=FIELDS)) as instance:
        yield instance


@pytest.fixture
def job(run: Run, scribe: Instance) -> Run:
    def run_here(given: Path, output: Path, **fields: Any) -> JobReport:
        return run(given, output, host=scribe, **fields)

    return run_here


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """A folder of sound, with a file that is none, and one of another kind."""
    folder = tmp_path / "calls"
    (folder / "may").mkdir(parents=True)
    for number, name in enumerate(("a.wav", "b.WAV", "may/c.wav")):
        (folder / name).write_bytes(wav_of(noise(0.8, seed=number)))
    (folder / "broken.wav").write_bytes(b"RIFF\0\0\0\0WAVEjunk")
    (folder / "notes.txt").write_text("not heard")
    return folder


def test_a_file_of_sound_is_a_job_of_one_line(job: Run, tmp_path: Path, calls: Path) -> None:
    report = job(calls / "a.wav", tmp_path / "out.jsonl")
    (record,) = read_records(tmp_path / "out.jsonl")
    assert set(record) == {"custom_id", "text"}
    assert record["custom_id"] == "a.wav"
    assert record["text"]
    assert (report.status, report.records, report.failed) == (Status.COMPLETE, 1, 0)


def test_a_folder_of_sound_has_a_line_for_each_file(job: Run, tmp_path: Path, calls: Path) -> None:
    report = job(calls, tmp_path / "out.jsonl", part_lines=1)
    records = read_records(tmp_path / "out.jsonl")
    assert [record["custom_id"] for record in records] == ["a.wav", "b.WAV", "broken.wav", "may/c.wav"]
    assert [set(record) - {"custom_id"} for record in records] == [{"text"}, {"text"}, {"error"}, {"text"}]
    assert records[2]["error"] == {"code": "invalid_request", "message": "the WAV file has no samples"}
    assert (report.status, report.records, report.failed) == (Status.COMPLETE, 4, 1)
    job(calls / "may/c.wav", tmp_path / "one.jsonl")
    assert read_records(tmp_path / "one.jsonl")[0]["text"] == records[3]["text"]
    again = job(f"{calls}/", tmp_path / "out.jsonl", part_lines=1)
    assert (again.status, again.run_records, again.key) == (Status.COMPLETE, 0, report.key)


def test_another_file_in_the_folder_is_another_job(job: Run, tmp_path: Path, calls: Path) -> None:
    job(calls, tmp_path / "out")
    (calls / "d.wav").write_bytes(wav_of(noise(0.3)))
    with pytest.raises(JobMismatchError, match="another version of the input"):
        job(calls, tmp_path / "out")


def test_an_interrupted_job_of_sound_goes_on(
    job: Run, tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_begun, num_done, answer = 0, 0, Answers.transcribe

    async def counted(self: Answers, *given: Any) -> Any:
        nonlocal num_begun, num_done
        num_begun += 1
        if num_begun == 4:
            while num_done < 3:
                await asyncio.sleep(0.02)
            raise UnavailableError("the store is down", source="s3://bucket", name="a.wav")
        record = await answer(self, *given)
        num_done += 1
        return record

    monkeypatch.setattr(Answers, "transcribe", counted)
    with pytest.raises(UnavailableError):
        job(calls, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    report = job(calls, tmp_path / "out.jsonl")
    assert (report.status, report.records, report.run_records) == (Status.COMPLETE, 4, 1)
    monkeypatch.undo()
    job(calls, tmp_path / "whole.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_lines_name_files_next_to_them(job: Run, tmp_path: Path, calls: Path) -> None:
    body = {"file": "may/c.wav", "language": "de", "response_format": "verbose_json"}
    lines = [
        {"custom_id": "x", "file": "a.wav", "language": "en", "response_format": "verbose_json"},
        {"custom_id": "y", "method": "POST", "url": "/v1/audio/transcriptions", "body": body},
        {"file": "missing.wav"},
        {"file": "../in.jsonl"},
        {"file": "a.wav", "task": "translate", "language": "en"},
        {"file": "a.wav", "version": "1-2"},
        {"file": "a.wav", "response_format": "srt"},
        {"custom_id": "z", "method": "POST", "url": "/v1/audio/translations", "body": {"file": "broken.wav"}},
        {"file": "a.wav", "prompt": "Ada", "seed": 4, "teneral": {"priority": "batch"}},
        {"prompt": "a text"},
    ]
    report = job(write_lines(calls / "in.jsonl", lines), tmp_path / "out.jsonl")
    flat, whole, missing, outside, unknown, changed, subtitles, broken, prompted, text = read_records(
        tmp_path / "out.jsonl"
    )
    assert {"custom_id", "text", "segments", "language", "duration"} <= set(flat)
    assert whole["response"]["status_code"] == 200
    assert whole["response"]["body"]["language"] == "de"
    assert (missing["error"]["code"], changed["error"]["code"]) == ("unreadable_file",) * 2
    assert "in the input's folder" in outside["error"]["message"]
    assert "unknown field 'language'" in unknown["error"]["message"]
    assert "one of json, verbose_json" in subtitles["error"]["message"]
    assert (broken["response"]["status_code"], broken["error"]) == (400, None)
    assert set(prompted) == {"custom_id", "text"}
    assert "Send sound to" in text["error"]["message"]
    assert report.failed == 7


def test_models_of_text_refuse_a_file_of_sound(run: Run, tmp_path: Path, calls: Path) -> None:
    report = run(calls / "a.wav", tmp_path / "out.jsonl")
    (record,) = read_records(tmp_path / "out.jsonl")
    assert record["error"]["message"].startswith("this model takes no sound")
    assert report.failed == 1


async def test_a_model_of_speech_is_probed_by_silence(scribe: Instance) -> None:
    async with answering(scribe, _index_of(scribe), window=1) as answers:
        await answers.probe()


def test_a_file_larger_than_a_body_may_be_is_an_error(
    tmp_path: Path, calls: Path, scribe: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scribe, "config", scribe.config.replace(max_body_bytes=8))
    (calls / "a.wav").write_bytes(wav_of(noise(40)))
    spec = JobSpec(input=str(calls / "a.wav"), output=str(tmp_path / "out"), max_line_bytes=1000)
    assert run_job(spec, scribe).failed == 1
    (record,) = read_records(tmp_path / "out")
    assert record["error"]["code"] == "unreadable_file"
    assert "that are allowed" in record["error"]["message"]


def test_a_file_replaced_during_its_job_ends_the_job(
    job: Run, tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Answers.transcribe

    async def replaced(self: Answers, *given: Any) -> Any:
        (calls / "a.wav").write_bytes(wav_of(noise(0.4)))
        return await answer(self, *given)

    monkeypatch.setattr(Answers, "transcribe", replaced)
    with pytest.raises(ChangedError, match=r"a\.wav has the version"):
        job(calls / "a.wav", tmp_path / "out.jsonl")


def test_folders_without_sound_and_with_too_much_are_refused(job: Run, tmp_path: Path, calls: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="has no files of sound"):
        job(tmp_path / "empty", tmp_path / "out.jsonl")
    with pytest.raises(UsageError, match="more than 2 lines"):
        job(calls, tmp_path / "out.jsonl", max_lines=2)
    assert sorted(os.listdir(tmp_path)) == ["calls", "empty"]


def test_lines_of_a_folder_are_the_same_on_another_node(tmp_path: Path, calls: Path) -> None:
    """A file's inode is no part of its version."""

    def lines() -> bytes:
        made = SoundLines(FileStore(calls), "", address=f"{calls}/", fields={"language": "en"}, max_lines=9)
        return made.read("x", max_bytes=1)[0]

    before = lines()
    for path in calls.rglob("*.wav"):
        times = path.stat()
        (copy := tmp_path / "copy").write_bytes(path.read_bytes())
        os.utime(copy, ns=(times.st_atime_ns, times.st_mtime_ns))
        copy.rename(path)
    assert lines() == before
    assert json.loads(before.splitlines()[0])["language"] == "en"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"file": 1}, "the name of one in the input's folder"),
        ({"file": "/etc/passwd"}, "the name of one in the input's folder"),
        ({"file": "a\\u202e.wav"}, "the name of one in the input's folder"),
        ({"file": "a.wav", "version": 1}, "an ETag"),
        ({"file": "a.wav", "task": "sing"}, "one of transcribe, translate"),
        ({"file": "a.wav", "task": ["x"]}, "one of transcribe, translate"),
        ({"file": "a.wav", "stream": True}, "do not stream"),
        ({"file": "a.wav", "response_format": []}, "one of json"),
        ({"file": "a.wav", "language": None}, "language must be a text or a number"),
        ({"file": "a.wav", "teneral": {"x": {}}}, "teneral[x] must be a text"),
    ],
)
def test_lines_that_name_no_file_are_refused(fields: dict[str, Any], words: str) -> None:
    raw = RawLine(1, 0, json.dumps(fields).encode())
    line = parse_line(raw, is_duplicate=False, job_is_openai=False, max_line_bytes=1000)
    assert isinstance(line.request, LineProblem)
    assert words in line.request.message


def test_fields_of_a_line_are_those_of_a_form() -> None:
    fields = {"file": "a.wav", "version": '"e"', "timestamp_granularities[]": ["segment"], "temperature": 0.5}
    raw = RawLine(1, 0, json.dumps({**fields, "condition_on_prev_tokens": True}).encode())
    line = parse_line(raw, is_duplicate=False, job_is_openai=False, max_line_bytes=1000)
    assert line.request == Transcribe(
        "/v1/audio/transcriptions",
        "a.wav",
        '"e"',
        (
            ("timestamp_granularities[]", "segment"),
            ("temperature", "0.5"),
            ("condition_on_prev_tokens", "true"),
        ),
    )
