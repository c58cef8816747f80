"""Adapters in a whole instance: loaded under requests, given up for others, held, and confirmed behind drafts."""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from tests.support.adapters import SETS, greedy, merged, save_adapter
from tests.support.early_rig import EarlyRig, packed_tiny
from tests.support.inspection import before_failures, lock_of, note_freed
from tests.support.load import patience_s
from tests.support.paced import Call, PacedSource
from tests.support.tiny_models import save_tiny, tiny_model

from teneral.handlers.function.context import Context
from teneral.loader.errors import UnavailableError, UsageError
from teneral.loader.sources.file.store import FileStore
from teneral.runtime.adapters import load, registry
from teneral.runtime.adapters.peft import AdapterPlan
from teneral.runtime.adapters.registry import AdapterRegistry, split_template
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.config import ServeConfig
from teneral.runtime.engine import step_loop
from teneral.runtime.engine.adapters import RequestAdapters
from teneral.runtime.errors import AdapterError, AdapterNotFoundError, AdapterUnavailableError, CapacityError
from teneral.runtime.instance.instance import Instance
from teneral.runtime.models.adapter import AdapterWeights
from teneral.runtime.step.requests import FirstToken, GenerationRequest, SamplingParams

WAIT_S = patience_s(15)
# docs/adapters.md has the command of the long run.
NUM_NAMES = int(os.environ.get("TENERAL_ADAPTER_NAMES", "60"))
ROOM = int(os.environ.get("TENERAL_ADAPTER_ROOM", "6"))
NUM_REQUESTS = int(os.environ.get("TENERAL_ADAPTER_REQUESTS", "1000"))
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
PROMPT = tuple((number * 7) % 90 for number in range(20))


class Rig:
    def __init__(self, folder: Path) -> None:
        self.base = save_tiny("llama", folder / "base", **SMALL)
        self.model = tiny_model("llama", **SMALL)
        self.adapters = folder / "adapters"
        self.names = [f"a{number}" for number in range(NUM_NAMES)]
        sets = [options for name, options in SETS.items() if name != "patterns"]
        for number, name in enumerate(self.names):
            options = {"r": 4, **sets[number % len(sets)]}
            save_adapter(self.adapters / name, self.model, seed=number, **options)

    def instance(self, **settings: Any) -> Instance:
        source = settings.pop("source", None)
        given = {"adapters": f"{self.adapters}/{{name}}", "kv_bytes": 1 << 21, **settings}
        config = ServeConfig(model=str(self.base), name="base", backend="native", loader="thread", **given)
        return Instance(config, source=source)

    def merged_tokens(self, name: str, num_tokens: int, prompt: tuple[int, ...] = PROMPT) -> list[int]:
        return greedy(merged(self.model, self.adapters / name), prompt, num_tokens)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("adapters"))


def request(adapter: str, prompt: tuple[int, ...] = PROMPT, num_tokens: int = 6) -> GenerationRequest:
    return GenerationRequest(
        "test", prompt, num_tokens, sampling=SamplingParams(temperature=0), ignore_eos=True, adapter=adapter
    )


def submit(instance: Instance, adapter: str, **options: Any) -> Any:
    return instance.engine.result(WAIT_S).submit(request(adapter, **options))


def tokens(generation: Any) -> list[int]:
    return list(generation.result(WAIT_S).tokens)


def eventually(condition: Any) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


class LivingWeights:
    """The bytes of all adapter arrays in existence, by whatever they are referenced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_bytes = self.peak_bytes = 0
        self._lock = threading.Lock()
        self._freed: deque[int] = deque()  # no lock: the collector may run while it is held
        allocate = AdapterPlan.allocate

        def counted(plan: AdapterPlan) -> AdapterWeights:
            weights = allocate(plan)
            sites = [site for layer in weights.layers for site in layer.values()]
            arrays = [each.array for site in sites for each in (site.a, *(part.b for part in site.parts))]
            with self._lock:
                self._gather_freed()
                self.now_bytes += sum(array.nbytes for array in arrays)
                self.peak_bytes = max(self.peak_bytes, self.now_bytes)
            for array in arrays:
                owner = array if array.base is None else array.base
                weakref.finalize(owner, self._freed.append, array.nbytes)
            return weights

        monkeypatch.setattr(AdapterPlan, "allocate", counted)

    def _gather_freed(self) -> None:
        while self._freed:
            self.now_bytes -= self._freed.popleft()


def test_random_requests_over_many_names_with_little_room_are_all_right(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig.instance() as instance:
        expected = {name: tokens(submit(instance, name, num_tokens=3)) for name in rig.names}
        expected[""] = tokens(submit(instance, "", num_tokens=3))
        assert expected["a3"] == rig.merged_tokens("a3", 3)
        all_bytes = instance.adapters.statistics().loaded_bytes
    budget_bytes = all_bytes * ROOM // NUM_NAMES
    living = LivingWeights(monkeypatch)
    chance = random.Random(1)
    with rig.instance(adapters_bytes=budget_bytes) as instance:
        under_way: list[tuple[str, Any]] = []
        for _ in range(NUM_REQUESTS):
            name = chance.choice([*rig.names, "", *rig.names[:5] * (NUM_NAMES // 15)])
            under_way.append((name, submit(instance, name, num_tokens=3)))
            while len(under_way) > chance.randint(0, 40):
                name, generation = under_way.pop(0)
                assert tokens(generation) == expected[name], name
                instance.adapters.check_integrity()
            if chance.random() < 0.05:
                submit(instance, chance.choice(rig.names)).cancel()
        assert all(tokens(generation) == expected[name] for name, generation in under_way)
        eventually(lambda: instance.adapters.statistics().pinned == 0)
        found = instance.adapters.statistics()
        print(found, f"peak of all arrays: {living.peak_bytes} bytes")  # for the long run
        assert found.evictions_total > NUM_NAMES // 2
        assert 0.8 * budget_bytes < living.peak_bytes <= budget_bytes
        instance.adapters.check_integrity()
        instance.engine.result().check_integrity()


def test_an_adapter_that_a_request_holds_is_not_given_up(rig: Rig) -> None:
    with rig.instance() as instance:
        expected = [tokens(submit(instance, "a1", num_tokens=300)), tokens(submit(instance, "a2"))]
        eventually(
            lambda: instance.adapters.statistics().loaded == 2
        )  # the last bytes' digest may be under way
        sizes = {each.name: each.size_bytes for each, _ in instance.adapters.listed()}
    with rig.instance(adapters_bytes=max(sizes["a1"], sizes["a2"])) as instance:
        long = submit(instance, "a1", num_tokens=300)
        eventually(lambda: instance.adapters.statistics().loaded == 1)
        other = submit(instance, "a2")
        assert [tokens(long), tokens(other)] == expected
        assert long.timings.finished_s <= other.timings.first_token_s
        eventually(lambda: [each.name for each, _ in instance.adapters.listed()] == ["a2"])


def paced(monkeypatch: pytest.MonkeyPatch, range_bytes: int = 2 << 20) -> list[PacedSource]:
    """The sources of adapters that are opened from now on; the weights' file is read in such ranges."""
    found: list[PacedSource] = []

    def open_paced(url: str, options: Any = None) -> Any:
        found.append(PacedSource(FileStore(Path(url))))
        return found[-1]

    monkeypatch.setattr(registry, "open_source", open_paced)
    monkeypatch.setattr(load, "RANGE_BYTES", range_bytes)
    return found


def of_weights(call: Call) -> bool:
    return call.name.endswith("adapter_model.safetensors") and call.start > 0


def test_a_cold_adapter_holds_up_nothing_else(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = paced(monkeypatch)
    with rig.instance() as instance:
        instance.engine.result(WAIT_S)
        held = sources[0].hold(lambda call: call.name.startswith("a1/"))
        running = submit(instance, "", num_tokens=100)
        cold = submit(instance, "a1")
        held.wait_reached()
        assert len(tokens(running)) == 100
        assert tokens(submit(instance, "a2")) == rig.merged_tokens("a2", 6)
        assert cold.timings.first_token_s is None
        held.release()
        assert tokens(cold) == rig.merged_tokens("a1", 6)


def test_an_adapter_that_comes_while_a_step_is_planned_does_not_end_the_engine(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as for images (test_engine_images.py). The request has been queued, and waits to follow the adapter."""
    sources, plan_step, follow = paced(monkeypatch), step_loop.plan_step, RequestAdapters.follow
    held: list[Any] = []
    is_planned = threading.Event()

    def follow_late(*args: Any) -> None:
        assert is_planned.wait(WAIT_S)
        follow(*args)

    def plan_meanwhile(*args: Any, **named: Any) -> Any:
        plan = plan_step(*args, **named)
        if held:
            held.pop().release()
            eventually(instance.adapters.listed)
            is_planned.set()
        return plan

    with rig.instance() as instance:
        instance.engine.result(WAIT_S)
        held.append(sources[0].hold(lambda call: call.name.startswith("a1/")))
        monkeypatch.setattr(RequestAdapters, "follow", follow_late)
        monkeypatch.setattr(step_loop, "plan_step", plan_meanwhile)
        assert tokens(submit(instance, "a1")) == rig.merged_tokens("a1", 6)


def test_a_prompt_follows_the_layers_of_its_adapter(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = paced(monkeypatch, 2048)
    with rig.instance() as instance:
        engine = instance.engine.result(WAIT_S)
        size_bytes = (rig.adapters / "a3" / "adapter_model.safetensors").stat().st_size
        held = sources[0].hold(lambda call: call.start > 0 and call.end == size_bytes)
        cold = submit(instance, "a3")
        held.wait_reached()
        eventually(lambda: engine.statistics().running == 1)  # in a pass that waits for the last layer
        # Another one overtakes it, and it begins again.
        assert len(tokens(submit(instance, ""))) == 6
        assert cold.timings.first_token_s is None
        eventually(lambda: engine.statistics().running == 1)
        held.release()
        assert tokens(cold) == rig.merged_tokens("a3", 6)
        eventually(lambda: instance.adapters.statistics().loaded == 1)  # blocks have names from here on
        for _ in range(2):
            again = submit(instance, "a3")
            assert tokens(again) == rig.merged_tokens("a3", 6)
        assert again.num_cached_tokens > 0
        engine.check_integrity()


def test_requests_that_are_cancelled_while_their_adapter_is_on_its_way(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = paced(monkeypatch, 2048)
    with rig.instance() as instance:
        engine = instance.engine.result(WAIT_S)
        held = sources[0].hold(of_weights)
        cold = [submit(instance, name) for name in ("a1", "a1", "a2")]
        held.wait_reached(2)
        for generation in cold:
            generation.cancel()
        eventually(lambda: engine.statistics().running == engine.statistics().queued == 0)
        assert instance.adapters.statistics().pinned == 0
        held.release()
        assert tokens(submit(instance, "a1")) == rig.merged_tokens("a1", 6)


def test_an_adapter_that_is_unloaded_before_its_load_begins_is_not_looked_for_elsewhere(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is another one of its name below the template, which no request names."""
    sources = paced(monkeypatch)
    with rig.instance() as instance:
        instance.engine.result(WAIT_S)
        names = [f"a{number}" for number in range(10, 10 + registry.MAX_LOADS)]
        files = {f"{name}/adapter_model.safetensors" for name in names}
        held = sources[0].hold(lambda call: call.name in files and call.start == 0)
        others = [submit(instance, name) for name in names]
        held.wait_reached(len(names))
        with instance.adapters.loading("a1", str(rig.adapters / "a2")):
            asked = submit(instance, "a1")
            instance.adapters.unload("a1")
        held.release()
        with pytest.raises(AdapterUnavailableError, match="'a1' was unloaded before it was there"):
            tokens(asked)
        for name, other in zip(names, others, strict=True):
            assert tokens(other) == rig.merged_tokens(name, 6)
    assert not any(call.name.startswith("a1/") for call in sources[0].calls)


def test_a_request_that_comes_as_an_unwanted_adapter_is_given_up_loads_it_anew(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = paced(monkeypatch)
    late: list[Any] = []

    def request_first(adapter: Any) -> None:
        if not late:
            late.append(submit(instance, adapter.name))

    with rig.instance() as instance:
        engine = instance.engine.result(WAIT_S)
        before_failures(instance.adapters, request_first)
        held = sources[0].hold(lambda call: call.name.startswith("a1/"))
        unwanted = submit(instance, "a1")
        held.wait_reached()  # else the load could be given up before it reads anything
        unwanted.cancel()
        eventually(lambda: engine.statistics().running == engine.statistics().queued == 0)
        held.release()
        eventually(lambda: late)
        assert tokens(late[0]) == rig.merged_tokens("a1", 6)
        instance.adapters.check_integrity()


def test_arrays_freed_by_a_thread_wait_for_no_lock_of_another(rig: Rig) -> None:
    """The collector may free them so, in a thread that the lock's holder waits for."""
    with rig.instance() as instance:
        tokens(submit(instance, "a1"))
        registry = instance.adapters
        used_bytes = registry.statistics().loaded_bytes
        with lock_of(registry):
            thread = threading.Thread(target=note_freed, args=(registry, used_bytes))
            thread.start()
            thread.join(WAIT_S)
            assert not thread.is_alive()
        assert registry.statistics().loaded_bytes == 0
        note_freed(registry, -used_bytes)  # they are there in fact
        registry.check_integrity()


def test_a_store_that_fails_fails_the_adapters_requests_and_no_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = paced(monkeypatch, 2048)
    with rig.instance() as instance:
        instance.engine.result(WAIT_S)
        gone = [True]
        sources[0].fail(
            lambda: UnavailableError("the store is gone"),
            lambda call: gone[0] and call.name.startswith("a1/"),
        )
        with pytest.raises(AdapterUnavailableError, match="the store is gone"):
            tokens(submit(instance, "a1"))
        assert len(tokens(submit(instance, ""))) == 6
        gone[0] = False
        assert tokens(submit(instance, "a1")) == rig.merged_tokens("a1", 6)
        assert instance.failure is None


def test_errors_release_what_requests_held(rig: Rig) -> None:
    with rig.instance(max_queued=0, max_running=1) as instance:
        running = submit(instance, "a1", num_tokens=200)
        with pytest.raises(CapacityError):
            submit(instance, "a2")
        with pytest.raises(AdapterNotFoundError):
            submit(instance, "../a2")
        running.cancel()
        eventually(lambda: instance.adapters.statistics().pinned == 0)  # its place is free with its adapter
        with pytest.raises(AdapterNotFoundError, match="does not exist"):
            tokens(submit(instance, "missing"))
        eventually(lambda: instance.adapters.statistics().pinned == 0)


def test_an_adapter_that_does_not_fit_the_base_is_refused(rig: Rig, tmp_path: Path) -> None:
    other = tiny_model("llama", **{**SMALL, "hidden_size": 64})
    save_adapter(tmp_path / "wide", other, target_modules=["q_proj"])
    deep = tiny_model("llama", **{**SMALL, "num_hidden_layers": 3})
    save_adapter(tmp_path / "deep", deep, target_modules=["q_proj"])
    with rig.instance(adapters=f"{tmp_path}/{{name}}") as instance:
        for name, reason in (("wide", "has shape"), ("deep", "layer 2")):
            with pytest.raises(AdapterError, match=reason):
                tokens(submit(instance, name))


def test_handlers_name_adapters(rig: Rig) -> None:
    with rig.instance() as instance:
        tokenizer = instance.tokenizer.result(WAIT_S)
        prompt = tokenizer.decode(list(PROMPT))
        expected = tokenizer.decode(rig.merged_tokens("a4", 6, tuple(tokenizer.encode(prompt))))
        completion = Context(instance, request_id="h").model.generate(
            prompt, max_tokens=6, temperature=0, ignore_eos=True, adapter="a4"
        )
        assert completion.text.rstrip("\ufffd") == expected.rstrip("\ufffd")


def test_closing_ends_loads_under_way(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = paced(monkeypatch)
    instance = rig.instance().start()
    instance.engine.result(WAIT_S)
    held = sources[0].hold()
    generation = submit(instance, "a1")
    held.wait_reached()
    instance.close()
    assert list(generation.events(WAIT_S))[-1].finish_reason is not None
    assert sources[0].closed


@pytest.mark.parametrize("first_token", [FirstToken.EXACT, FirstToken.DRAFT])
def test_drafts_are_made_with_the_adapter_and_confirmed(
    rig: Rig, tmp_path: Path, first_token: FirstToken
) -> None:
    opened: list[AdapterRegistry] = []

    def make_adapters(config: Any) -> AdapterRegistry:
        opened.append(AdapterRegistry(config, template=f"{rig.adapters}/{{name}}", max_bytes=1 << 24))
        return opened[0]

    expected = {name: rig.merged_tokens(name, 16) for name in ("a1", "a3")}
    expected[""] = greedy(rig.model, PROMPT, 16)
    artifact = packed_tiny(tmp_path, **SMALL)
    backends = [NativeBackend()]
    with EarlyRig(artifact, backends=backends, make_adapters=make_adapters, holds_draft=True) as early:
        early.start()
        generations = {
            name: early.submit(PROMPT, max_tokens=16, ignore_eos=True, adapter=name, first_token=first_token)
            for name in expected
        }
        # Together from the first token: those that come sooner would draft all that they may.
        eventually(lambda: opened and opened[0].statistics().loaded == 2)
        early.draft_hold.release()
        eventually(lambda: drafted(early) >= 4)
        early.refine()
        results = {name: each.result(WAIT_S) for name, each in generations.items()}
        for name, result in results.items():
            if first_token is FirstToken.DRAFT:
                # What the draft chose was given out; it is the adapter's own draft, and nearly always right.
                assert result.num_drafted
                assert result.tokens[0] == expected[name][0]
            else:
                assert list(result.tokens) == expected[name]
                assert result.num_accepted
        opened[0].close()


def drafted(early: EarlyRig) -> int:
    """Draft steps with the rows of three sequences."""
    spans = early.timeline.snapshot()["spans"]
    return sum(each["lane"] == "draft" and each.get("attributes", {}).get("sequences") == 3 for each in spans)


@pytest.mark.parametrize(
    ("template", "split"),
    [
        ("s3://bucket/lora/{name}", ("s3://bucket/lora", "{name}")),
        ("s3://bucket/lora-{name}/v1", ("s3://bucket", "lora-{name}/v1")),
        ("/srv/{name}", ("/srv", "{name}")),
        ("/{name}", ("/", "{name}")),
        ("{name}", (".", "{name}")),
        ("gs://bucket/a/{name}/", ("gs://bucket/a", "{name}")),
    ],
)
def test_templates_are_split_at_the_folder(template: str, split: tuple[str, str]) -> None:
    assert split_template(template) == split


@pytest.mark.parametrize(
    "template",
    ["s3://bucket/lora", "s3://{name}/lora", "s3://b/{other}/{name}", "http://h/{name}?x=1", "a/{name}//b"],
)
def test_other_templates_are_refused(template: str) -> None:
    with pytest.raises(UsageError):
        split_template(template)
