"""Loading and unloading a model while its server lives on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.http_server import running_server
from tests.support.instances import StagedInstance, TinyParts

from teneral.handlers.http.limits import Limits
from teneral.loader.errors import NotFoundError

MODEL = "tiny/model"
INDEX, LOAD, UNLOAD = (
    "/v2/repository/index",
    f"/v2/repository/models/{MODEL}/load",
    f"/v2/repository/models/{MODEL}/unload",
)
BODY = {"prompt": "Once", "max_tokens": 3}


class Instances:
    """The instances that a server makes, one after another; each is let in by the test, or as it starts."""

    def __init__(self, parts: TinyParts, **settings: Any) -> None:
        self.made: list[StagedInstance] = []
        self._parts = parts
        self._settings = {"model_control": True, **settings}
        self.first = StagedInstance(parts, **self._settings)
        self.on_start: Callable[[StagedInstance], object] = StagedInstance.let_in

    def make(self) -> StagedInstance:
        instance = StagedInstance(self._parts, **self._settings)
        instance.start = lambda: self.on_start(instance)
        self.made.append(instance)
        return instance

    @property
    def now(self) -> StagedInstance:
        return self.made[-1]

    def serving(self, **options: Any) -> Any:
        self.first.let_in()
        return running_server(self.first, make_instance=self.make, **options)


@pytest.fixture
def instances(tiny_parts: TinyParts) -> Instances:
    return Instances(tiny_parts)


async def state_of(server: Any) -> tuple[str, str]:
    (entry,) = (await server.request("POST", INDEX)).json
    assert (entry["name"], entry["version"]) == (MODEL, "1")
    return entry["state"], entry["reason"]


async def test_a_model_goes_and_comes_while_the_server_lives_on(instances: Instances) -> None:
    async with instances.serving() as server:
        assert await state_of(server) == ("READY", "")
        for _ in range(3):
            assert (await server.post(UNLOAD)).status == 200
            assert await state_of(server) == ("UNAVAILABLE", "unloaded")
            assert (await server.post(LOAD)).status == 200
            assert await state_of(server) == ("READY", "")
            assert (await server.post("/v1/completions", BODY)).status == 200
        assert not server.task.done()
        assert instances.first.ended.done()
        loaded = [each for each in instances.made if each.engine.done()]
        assert [each.ended.done() for each in loaded] == [True, True, False]
    assert instances.now.ended.done()


async def test_while_there_is_no_model_work_is_sent_away_and_probes_are_answered(
    instances: Instances,
) -> None:
    head = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Once"]}
    async with instances.serving() as server:
        await server.post(UNLOAD)
        for path, body in (
            ("/v1/completions", BODY),
            ("/v1/embeddings", {"input": "x"}),
            ("/invoke", {}),
            (f"/v2/models/{MODEL}/infer", {"inputs": [head]}),
            (f"/v2/models/{MODEL}/generate", {"text_input": "x"}),
        ):
            answer = await server.post(path, body)
            assert answer.status == 503, path
            assert int(answer.headers["Retry-After"]) >= 1
            assert "not loaded" in str(answer.json["error"])
        for path, status in (
            ("/livez", 200),
            ("/v2/health/live", 200),
            ("/v2/health/ready", 503),
            (f"/v2/models/{MODEL}/ready", 503),
            (f"/v2/models/{MODEL}", 503),
            ("/ping", 503),
            ("/metrics", 200),
            ("/timeline", 200),
            ("/debug/kv", 503),
            ("/v1/models", 200),
        ):
            assert (await server.get(path)).status == status, path
        readiness = await server.get("/readyz")
        assert (readiness.status, readiness.json["state"]) == (503, "unloaded")
        assert 'teneral_state{state="unloaded"} 1' in (await server.get("/metrics")).body.decode()
        assert (await server.post(INDEX, {"ready": True})).json == []
        assert len((await server.post(INDEX, {"ready": False})).json) == 1


async def test_while_a_model_loads_work_is_sent_away_and_the_index_says_so(instances: Instances) -> None:
    instances.on_start = lambda instance: None
    async with instances.serving() as server:
        await server.post(UNLOAD)
        loading = asyncio.create_task(server.post(LOAD))
        await server.eventually(lambda: len(instances.made) == 2)
        assert await state_of(server) == ("LOADING", "")
        assert (await server.get("/readyz")).json["state"] == "loading"
        answer = await server.post("/v1/completions", BODY)
        assert (answer.status, answer.error["code"]) == (503, "model_unloaded")
        assert not loading.done()
        instances.now.let_in()
        assert (await loading).status == 200
        assert (await server.post("/v1/completions", BODY)).status == 200


async def test_what_runs_is_finished_before_its_model_goes(instances: Instances) -> None:
    async with instances.serving() as server:
        instances.first.model.hold()
        running = asyncio.create_task(server.post("/v1/completions", BODY))
        await server.eventually(lambda: len(server.service.in_flight) == 1)
        going = asyncio.create_task(server.post(UNLOAD))
        await server.eventually(lambda: str(server.service.state) == "draining")
        assert await state_of(server) == ("UNLOADING", "")
        assert (await server.post("/v1/completions", BODY)).status == 503
        assert not going.done()
        instances.first.model.release()
        assert (await running).status == 200
        assert (await going).status == 200


async def test_what_takes_too_long_is_ended(tiny_parts: TinyParts) -> None:
    instances = Instances(tiny_parts)
    async with instances.serving(limits=Limits(unload_drain_s=0.05)) as server:
        instances.first.model.step_s = 0.02
        endless = {"prompt": "Once", "max_tokens": 10_000, "ignore_eos": True}
        running = asyncio.create_task(server.post("/v1/completions", endless))
        await server.eventually(lambda: server.running() == 1)
        assert (await server.post(UNLOAD)).status == 200
        answer = await running
        assert (answer.status, answer.error["code"]) == (503, "draining")
        assert "was unloaded" in answer.error["message"]


async def test_changes_at_the_same_time_come_one_after_another(instances: Instances) -> None:
    async with instances.serving() as server:
        paths = [UNLOAD, LOAD, UNLOAD, UNLOAD, LOAD, LOAD, UNLOAD, LOAD]
        answers = await asyncio.gather(*(server.post(path) for path in paths))
        assert {answer.status for answer in answers} == {200}
        await server.post(LOAD)
        assert await state_of(server) == ("READY", "")
        assert (await server.post("/v1/completions", BODY)).status == 200
        assert sum(not each.ended.done() and each.engine.done() for each in instances.made) == 1


async def test_loading_what_is_loaded_and_unloading_what_is_not_change_nothing(instances: Instances) -> None:
    async with instances.serving() as server:
        assert (await server.post(LOAD)).status == 200
        assert instances.made == []
        await server.post(UNLOAD)
        assert (await server.post(UNLOAD)).status == 200
        assert len(instances.made) == 1


async def test_a_load_that_fails_says_why_and_can_be_tried_again(instances: Instances) -> None:
    instances.on_start = lambda instance: instance.fail(NotFoundError("there is no s3://bucket/model"))
    async with instances.serving() as server:
        await server.post(UNLOAD)
        answer = await server.post(LOAD)
        assert (answer.status, answer.json) == (503, {"error": "there is no s3://bucket/model"})
        assert await state_of(server) == ("UNAVAILABLE", "there is no s3://bucket/model")
        assert not server.task.done()
        instances.on_start = StagedInstance.let_in
        assert (await server.post(LOAD)).status == 200
        assert await state_of(server) == ("READY", "")


async def test_an_instance_that_was_loaded_again_ends_the_server_with_its_failure(
    instances: Instances,
) -> None:
    async with instances.serving() as server:
        await server.post(UNLOAD)
        await server.post(LOAD)
        failure = NotFoundError("the store is gone")
        instances.now.fail(failure)
        assert await server.task is failure


async def test_a_load_goes_on_when_its_client_disconnects(instances: Instances) -> None:
    instances.on_start = lambda instance: None
    async with instances.serving() as server:
        await server.post(UNLOAD)
        asking = asyncio.create_task(server.post(LOAD))
        await server.eventually(lambda: len(instances.made) == 2)
        asking.cancel()
        await server.eventually(lambda: len(server.service.in_flight) == 0)
        instances.now.let_in()
        assert (await server.post(LOAD)).status == 200
        assert len(instances.made) == 2


async def test_a_server_that_ends_while_it_loads_ends_the_load(instances: Instances) -> None:
    instances.on_start = lambda instance: None
    async with instances.serving(drain_timeout_s=0.05) as server:
        await server.post(UNLOAD)
        asking = asyncio.create_task(server.post(LOAD))
        await server.eventually(lambda: len(instances.made) == 2)
        server.stop.set()
        assert await server.task is None
        assert (await asking).status == 503
    assert instances.now.ended.done()


async def test_a_change_of_another_model_is_not_found(instances: Instances) -> None:
    async with instances.serving() as server:
        for action in ("load", "unload"):
            answer = await server.post(f"/v2/repository/models/other/{action}")
            assert (answer.status, list(answer.json)) == (404, ["error"])
        assert (await server.post(f"/v2/repository/models/{MODEL}/pause")).status == 404


@pytest.mark.parametrize(
    ("path", "parameters", "status"),
    [
        (UNLOAD, {"unload_dependents": True}, 200),
        (UNLOAD, {"unload_dependents": "yes"}, 400),
        (UNLOAD, {"force": True}, 400),
        (LOAD, {"config": "{}"}, 400),
        (LOAD, {"file:1/model": "eA=="}, 400),
        (LOAD, None, 200),
    ],
)
async def test_parameters_that_would_change_what_is_loaded_are_refused(
    instances: Instances, path: str, parameters: Any, status: int
) -> None:
    async with instances.serving() as server:
        assert (await server.post(path, {"parameters": parameters})).status == status


async def test_no_client_unloads_the_model_of_a_server_that_does_not_allow_it(tiny_parts: TinyParts) -> None:
    async with Instances(tiny_parts, model_control=False).serving() as server:
        for path in (LOAD, UNLOAD):
            answer = await server.post(path)
            assert answer.status == 403
            assert "--model-control" in answer.json["error"]
        assert await state_of(server) == ("READY", "")
