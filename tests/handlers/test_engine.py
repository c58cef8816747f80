"""`teneral.Engine` and `teneral.AsyncEngine` with real instances of tiny models."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.load import patience_s
from tests.support.store_faults import Fault, Request
from tests.support.store_server import StoreServer
from tests.support.tiny_models import save_tiny
from tests.support.vision_models import data_url, file_of, picture, save_vision

import teneral
from teneral.handlers.batch.job import run_job
from teneral.handlers.batch.spec import JobSpec
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack

WAIT_S = patience_s(60)
MESSAGES = [{"role": "user", "content": "Hello"}]
GREEDY = {"max_tokens": 6, "temperature": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    save_tiny("qwen2", folder / "decoder")
    save_tiny("bert", folder / "encoder")
    pack(FileStore(folder / "decoder"), FileStore(folder / "packed"))
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[teneral.Engine]:
    with teneral.Engine(folder / "decoder", name="tiny", max_running=4, max_queued=4, threads=1) as engine:
        yield engine


def program(source: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", source, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_a_generation_is_a_completion_and_its_stream_adds_up_to_it(engine: teneral.Engine) -> None:
    whole = engine.generate("Hello", **GREEDY)
    stream = engine.stream("Hello", **GREEDY)
    assert ("".join(stream), stream.completion) == (whole.text, whole)
    assert (whole.usage.completion_tokens, str(whole.finish_reason)) == (6, "length")
    assert engine.name == "tiny"


def test_several_prompts_are_more_than_the_queue_holds_and_keep_their_order(engine: teneral.Engine) -> None:
    prompts = [f"Prompt {number}" for number in range(20)]
    assert engine.generate(prompts, **GREEDY) == [engine.generate(each, **GREEDY) for each in prompts]
    assert engine.generate([]) == []


def test_the_first_error_of_several_prompts_ends_the_others(engine: teneral.Engine) -> None:
    with pytest.raises(teneral.ContextLengthError):
        engine.generate(["Hello", "a" * 5000], max_tokens=400, ignore_eos=True)
    assert engine.generate("Hello", **GREEDY)
    statistics = engine.statistics()["engine"]
    assert (statistics.running, statistics.queued) == (0, 0)


def test_a_chat_is_rendered_by_the_models_template(engine: teneral.Engine) -> None:
    text = "<|user|>Hello<|end|><|assistant|>"
    assert engine.chat(MESSAGES, **GREEDY).usage.prompt_tokens == len(
        engine.tokenize(text, add_special_tokens=False)
    )


def test_a_blocking_call_on_a_running_event_loop_is_allowed_as_in_a_notebook(engine: teneral.Engine) -> None:
    async def cell() -> str:
        return engine.generate("Hello", **GREEDY).text + "".join(engine.stream("Hello", **GREEDY))

    assert asyncio.run(cell()) == 2 * engine.generate("Hello", **GREEDY).text


def test_threads_share_an_engine(engine: teneral.Engine) -> None:
    expected, found = engine.generate("Hello", **GREEDY), []
    threads = [
        threading.Thread(target=lambda: found.append(engine.generate("Hello", **GREEDY))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert found == 6 * [expected]


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda engine: engine.generate("x", max_token=3), teneral.RequestError, "max_token"),
        (lambda engine: engine.generate("x", max_tokens="3"), teneral.RequestError, "max_tokens"),
        (lambda engine: engine.generate(MESSAGES), teneral.RequestError, "Pass messages to `chat`"),
        (lambda engine: engine.embed("x"), teneral.ModelError, "does not make embeddings"),
        (lambda engine: engine.run({}), teneral.ModelError, "tiny"),
    ],
)
def test_errors_are_typed_and_name_the_argument(engine: teneral.Engine, call, kind, text: str) -> None:
    with pytest.raises(kind, match=text):
        call(engine)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_runing": 3}, "unknown setting max_runing\n.*Did you mean max_running?"),
        ({"kv_bytes": "2 furlongs"}, "kv_bytes must be a size"),
        ({"api_key": ["k"]}, "api_key has no effect here"),
        ({"port": 80}, "port has no effect here"),
    ],
)
@pytest.mark.parametrize("kind", [teneral.Engine, teneral.AsyncEngine])
def test_a_setting_that_is_unknown_invalid_or_without_effect_is_refused(kind, settings, text: str) -> None:
    with pytest.raises(teneral.UsageError, match=text):
        kind("model", **settings)


def test_settings_come_from_the_environment_and_keywords_override_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENERAL_NAME", "of-the-environment")
    monkeypatch.setenv("TENERAL_PORT", "9000")
    with teneral.Engine(folder / "encoder", threads=None) as engine:
        assert engine.name == "of-the-environment"
    with teneral.Engine(folder / "encoder", name="mine") as engine:
        assert engine.name == "mine"


def test_a_model_that_is_not_there_fails_the_first_call(tmp_path: Path) -> None:
    with (
        teneral.Engine(tmp_path / "nowhere") as engine,
        pytest.raises(teneral.NotFoundError, match="nowhere"),
    ):
        engine.generate("Hello")


def test_calls_wait_for_what_they_need_of_a_model_that_arrives(folder: Path) -> None:
    may_come = threading.Event()

    def hold(request: Request) -> Fault | None:
        if not request.key.endswith(".json"):
            may_come.wait(WAIT_S)
        return None

    with (
        StoreServer(folder.parent, fault=hold) as store,
        teneral.Engine(f"{store.url}/{folder.name}/packed", threads=1) as engine,
    ):
        assert engine.tokenize("Hello")
        with pytest.raises(TimeoutError):
            engine.wait(timeout_s=0.05)
        answers: list[teneral.Completion] = []
        early = threading.Thread(target=lambda: answers.append(engine.generate("Hello", **GREEDY)))
        early.start()
        may_come.set()
        early.join(WAIT_S)
        assert answers[0].usage.completion_tokens == 6
        engine.wait(WAIT_S)


def test_closing_ends_running_calls_and_frees_everything(folder: Path) -> None:
    before = set(threading.enumerate())
    engine = teneral.Engine(folder / "decoder")
    stream = engine.stream("Hello", max_tokens=500, ignore_eos=True)
    next(stream)
    engine.close()
    engine.close()
    with pytest.raises(teneral.DrainingError):
        stream.read()
    with pytest.raises(teneral.DrainingError):
        engine.generate("Hello")
    left = [
        thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("teneral")
    ]
    assert left == []


def test_two_engines_live_in_a_process(engine: teneral.Engine, folder: Path) -> None:
    with teneral.Engine(folder / "encoder", threads=1) as second:
        rows = second.embed(["one", "two"])
        assert (rows.shape, rows.dtype.name) == ((2, 64), "float32")
    assert engine.generate("Hello", **GREEDY)


async def test_the_async_engine_gives_the_same_answers(engine: teneral.Engine, folder: Path) -> None:
    expected = engine.generate("Hello", **GREEDY)
    async with teneral.AsyncEngine(folder / "decoder", max_running=2, max_queued=0, threads=1) as other:
        assert await other.generate("Hello", **GREEDY) == expected
        assert await other.generate(["Hello"] * 5, **GREEDY) == [expected] * 5
        assert "".join([text async for text in await other.stream("Hello", **GREEDY)]) == expected.text
        assert await other.chat(MESSAGES, **GREEDY) == engine.chat(MESSAGES, **GREEDY)
        assert await other.tokenize("Hello") == engine.tokenize("Hello")
        await other.wait(WAIT_S)
        with pytest.raises(teneral.RequestError, match="Pass messages"):
            await other.generate(MESSAGES)  # type: ignore[call-overload]
    with pytest.raises(teneral.DrainingError):
        await other.generate("Hello")


async def test_a_cancelled_task_cancels_its_generation(folder: Path) -> None:
    async with teneral.AsyncEngine(folder / "decoder", threads=1) as engine:
        task = asyncio.create_task(engine.generate("Hello", max_tokens=500, ignore_eos=True))
        await engine.generate("Hello", max_tokens=1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        deadline_s = asyncio.get_running_loop().time() + WAIT_S
        while engine.statistics()["engine"].running:
            assert asyncio.get_running_loop().time() < deadline_s
            await asyncio.sleep(0.01)


def test_a_program_that_does_not_close_its_engine_ends(folder: Path) -> None:
    source = """
import sys, teneral
engine = teneral.Engine(sys.argv[1])
print(engine.generate("Hello", max_tokens=3, temperature=0).usage.completion_tokens)
"""
    done = subprocess.run(
        [sys.executable, "-c", source, folder / "packed"], capture_output=True, text=True, timeout=WAIT_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


def test_a_forked_process_gets_an_error_as_the_engine_is_not_its_own(folder: Path) -> None:
    source = """
import os, sys, warnings, teneral
warnings.simplefilter("ignore")  # newer versions of Python warn of forks of threads
with teneral.Engine(sys.argv[1]) as engine:
    engine.wait()
    child = os.fork()
    if child == 0:
        try:
            engine.generate("Hello")
        except teneral.UsageError as error:
            print(error, flush=True)
        engine.close()
        os._exit(0)
    os.waitpid(child, 0)
    print(engine.generate("Hello", max_tokens=3, temperature=0).usage.completion_tokens)
"""
    done = program(source, folder / "packed")
    assert "a fork of it has none of its threads" in done.stdout
    assert (done.returncode, done.stdout.splitlines()[-1], done.stderr) == (0, "3", "")


@pytest.mark.slow
def test_a_program_of_the_user_passes_strict_types(tmp_path: Path) -> None:
    source = """
import asyncio
import teneral

def words(engine: teneral.Engine) -> list[str]:
    completion: teneral.Completion = engine.chat([{"role": "user", "content": "Hi"}], max_tokens=5)
    several: list[teneral.Completion] = engine.generate(["a", "b"], temperature=0.5)
    rows = engine.embed("a")
    assert rows.ndim == 2
    return [completion.text, *(each.text for each in several), *engine.stream("a", stop="b")]

async def stream(engine: teneral.AsyncEngine) -> None:
    async for text in await engine.stream("a"):
        text.upper()
    answer: str = (await engine.generate("a")).text
    await engine.stream("a", max_token=3)

def handler(event: dict[str, str], context: teneral.Context) -> str:
    return context.model.generate(event["text"]).text

app = teneral.asgi_app("model", max_running=3)
try:
    asyncio.run(stream(teneral.AsyncEngine("model")))
except (teneral.CapacityError, teneral.RequestError) as error:
    print(error.hint)
"""
    path = tmp_path / "program.py"
    path.write_text(source)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--follow-imports=silent",
        "--cache-dir",
        tmp_path,
        path,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience_s(300), check=False)
    errors = [line.partition("error: ")[2] for line in done.stdout.splitlines() if "error: " in line]
    assert len(errors) == 1, done.stdout + done.stderr
    assert errors[0].startswith('Unexpected keyword argument "max_token" for "stream"'), errors


def test_engines_and_batch_jobs_take_images(folder: Path, tmp_path: Path) -> None:
    save_vision(folder / "vision")
    file = file_of(picture(70, 40))
    options = {**GREEDY, "ignore_eos": True}

    def asked(image: dict[str, object]) -> list[dict[str, object]]:
        return [{"role": "user", "content": [image, {"type": "text", "text": "What?"}]}]

    by_address = asked({"type": "image_url", "image_url": {"url": data_url(file)}})
    lines: list[dict[str, object]] = [
        {"custom_id": "plain", "messages": by_address, **options},
        {
            "custom_id": "route",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": by_address, **options},
        },
        {
            "custom_id": "bad",
            "messages": asked({"type": "image_url", "image_url": "data:image/png;base64,eA=="}),
        },
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with teneral.Engine(folder / "vision", threads=1) as engine:
        answer = engine.chat(asked({"type": "image", "image": file}), **options).text
        assert engine.chat(by_address, **options).text == answer
        run_job(
            JobSpec(input=str(tmp_path / "in.jsonl"), output=str(tmp_path / "out.jsonl")), engine.instance
        )
    plain, route, bad = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert plain["text"] == answer
    assert route["response"]["body"]["choices"][0]["message"]["content"] == answer
    assert bad["error"]["code"] == "invalid_request"

    async def chat() -> str:
        async with teneral.AsyncEngine(folder / "vision", threads=1) as engine:
            return (await engine.chat(asked({"type": "image", "image": file}), **options)).text

    assert asyncio.run(chat()) == answer
