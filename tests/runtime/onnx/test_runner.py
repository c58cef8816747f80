"""The runner: checked inputs, shared runs, given-up calls, the exchange of segments for the whole session."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from tests.support.paced import WAIT_S

from teneral.handlers.function.lifetime import Lifetime
from teneral.loader.errors import LoadError
from teneral.runtime.errors import CancelledError, CapacityError, DrainingError, ModelError, RequestError
from teneral.runtime.onnx import runner as running
from teneral.runtime.onnx.inputs import as_input
from teneral.runtime.onnx.runner import OnnxRunner
from teneral.runtime.onnx.sessions import Run
from teneral.runtime.onnx.spec import OnnxSpec, SegmentSpec, Value, choose_cuts

SPEC = OnnxSpec(
    (Value("x", "tensor(float)", ("n", 2)), Value("ids", "tensor(int32)", ("n",))),
    (Value("sum", "tensor(float)", ("n",)),),
    (SegmentSpec("segment-000.onnx", ("x", "ids"), ("sum",), ()),),
)


class Summing:
    """Adds up rows. Waits for `gate`, as for weights, and fails where an id is 13."""

    name = "segments"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Semaphore(0)
        self.runs: list[int] = []
        self.threads: list[threading.Thread] = []
        self.closed = False
        self.outputs_rows: int | None = None

    def run(self, inputs: Mapping[str, Any], run: Run) -> dict[str, Any]:
        self.began.release()
        while not self.gate.wait(0.005):
            run.check()
        run.check()
        self.runs.append(len(inputs["x"]))
        self.threads.append(threading.current_thread())
        if 13 in inputs["ids"]:
            raise ModelError("the model failed: 13")
        rows = inputs["x"].sum(axis=1) + inputs["ids"].astype("f4")
        return {"sum": rows if self.outputs_rows is None else rows[: self.outputs_rows]}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def model() -> Summing:
    return Summing()


@pytest.fixture
def runner(model: Summing) -> Iterator[OnnxRunner]:
    runner = OnnxRunner(SPEC, model, max_queued=4, max_batch=8)
    runner.start()
    yield runner
    model.gate.set()
    assert runner.stop(WAIT_S)


def call(*ids: int) -> dict[str, Any]:
    return {"x": np.ones((len(ids), 2), "f4"), "ids": np.array(ids, "i4")}


def test_calls_that_wait_share_a_run(runner: OnnxRunner, model: Summing) -> None:
    model.gate.clear()
    first = runner.submit(call(0))
    model.began.acquire()
    others = [runner.submit(call(*ids)) for ids in ((1,), (2, 3), (4,))]
    model.gate.set()
    assert first.result(WAIT_S)["sum"].tolist() == [2]
    assert [future.result(WAIT_S)["sum"].tolist() for future in others] == [[3], [4, 5], [6]]
    assert model.runs == [1, 4]
    statistics = runner.statistics()
    assert (statistics.runs_total, statistics.calls_total, statistics.rows_total) == (2, 4, 5)


def test_one_callers_input_fails_no_other_call(runner: OnnxRunner, model: Summing) -> None:
    model.gate.clear()
    runner.submit(call(0))
    model.began.acquire()
    good, bad = runner.submit(call(1)), runner.submit(call(13))
    model.gate.set()
    assert good.result(WAIT_S)["sum"].tolist() == [3]
    with pytest.raises(ModelError, match="13"):
        bad.result(WAIT_S)


def test_a_model_without_rows_in_its_outputs_runs_calls_alone(runner: OnnxRunner, model: Summing) -> None:
    model.gate.clear()
    model.outputs_rows = 1
    futures = [runner.submit(call(0))]
    model.began.acquire()
    futures += [runner.submit(call(number)) for number in (1, 2)]
    model.gate.set()
    assert [future.result(WAIT_S)["sum"].tolist() for future in futures] == [[2], [3], [4]]
    assert model.runs == [1, 2, 1, 1]


def test_a_call_that_is_given_up_ends_its_run(runner: OnnxRunner, model: Summing) -> None:
    model.gate.clear()
    future = runner.submit(call(0))
    model.began.acquire()
    runner.give_up(future)
    with pytest.raises(CancelledError):
        future.result(WAIT_S)
    model.gate.set()
    assert runner.submit(call(1)).result(WAIT_S)["sum"].tolist() == [3]
    assert model.runs == [1]


def test_a_run_goes_on_for_the_caller_that_stays(runner: OnnxRunner, model: Summing) -> None:
    model.gate.clear()
    runner.submit(call(0))
    model.began.acquire()
    gone, stays = runner.submit(call(1)), runner.submit(call(2))
    model.gate.set()
    model.began.acquire()
    runner.give_up(gone)
    assert stays.result(WAIT_S)["sum"].tolist() == [4]


def test_a_call_that_is_alone_runs_in_its_callers_thread(runner: OnnxRunner, model: Summing) -> None:
    assert runner.run(call(1), Lifetime())["sum"].tolist() == [3]
    assert runner.submit(call(2)).result(WAIT_S)["sum"].tolist() == [4]
    here = threading.current_thread()
    assert [thread is here for thread in model.threads] == [True, False]
    with pytest.raises(ModelError, match="13"):
        runner.run(call(13), Lifetime())
    assert runner.statistics().queued == 0
    assert runner.run(call(1), Lifetime())["sum"].tolist() == [3]


def test_calls_that_come_meanwhile_share_the_next_run(runner: OnnxRunner, model: Summing) -> None:
    model.gate.clear()
    results: list[Any] = []
    threads = [in_thread(lambda: results.append(runner.run(call(0), Lifetime())))]
    model.began.acquire()
    threads += [in_thread(lambda: results.append(runner.run(call(1), Lifetime()))) for _ in range(2)]
    waiting = runner.submit(call(1))
    while runner.statistics().queued < 4:
        threading.Event().wait(0.005)
    model.gate.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert waiting.result(WAIT_S)["sum"].tolist() == [3]
    assert sorted(outputs["sum"].tolist() for outputs in results) == [[2], [3], [3]]
    assert model.runs == [1, 3]


def test_a_run_in_its_callers_thread_ends_with_the_request(runner: OnnxRunner, model: Summing) -> None:
    model.gate.clear()
    lifetime, outcome = Lifetime(), []
    thread = in_thread(lambda: outcome.append(raised_by(lambda: runner.run(call(0), lifetime))))
    model.began.acquire()
    lifetime.cancel()
    thread.join(WAIT_S)
    assert isinstance(outcome[0], CancelledError)
    with pytest.raises(CancelledError, match="deadline"):
        runner.run(call(0), Lifetime(0.02))  # at a gate
    model.gate.set()
    assert runner.run(call(1), Lifetime(WAIT_S))["sum"].tolist() == [3]
    assert model.runs == [1]


def test_a_run_in_its_callers_thread_ends_with_the_runner(runner: OnnxRunner, model: Summing) -> None:
    model.gate.clear()
    outcome: list[Any] = []
    thread = in_thread(lambda: outcome.append(raised_by(lambda: runner.run(call(0), Lifetime()))))
    model.began.acquire()
    runner.abort(LoadError("the load failed"))
    thread.join(WAIT_S)
    assert isinstance(outcome[0], LoadError)
    assert not model.closed
    assert runner.stop(WAIT_S)
    assert model.closed


def test_an_interrupt_leaves_the_runner_usable(
    runner: OnnxRunner, model: Summing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            runner.run(call(1), Lifetime())
    assert runner.statistics().queued == 0
    assert runner.run(call(1), Lifetime())["sum"].tolist() == [3]


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def raised_by(work: Callable[[], object]) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error
    return None


def test_a_full_queue_refuses(runner: OnnxRunner, model: Summing) -> None:
    model.gate.clear()
    runner.submit(call(0))
    model.began.acquire()
    futures = [runner.submit(call(1)) for _ in range(4)]
    with pytest.raises(CapacityError, match="4 calls are waiting"):
        runner.submit(call(2))
    runner.give_up(futures[0])
    runner.submit(call(2))
    model.gate.set()


def test_a_call_between_two_runs_has_the_place_of_the_one_that_ended(model: Summing) -> None:
    runner = OnnxRunner(SPEC, model, max_queued=1, max_batch=8)
    runner.start()
    model.gate.clear()
    ended, waits = runner.submit(call(0)), runner.submit(call(1))
    model.began.acquire()
    next_calls: list[object] = []
    # In the runner's thread, before it takes up the call that waits.
    ended.add_done_callback(lambda _: next_calls.append(raised_by(lambda: runner.submit(call(2)))))
    model.gate.set()
    assert waits.result(WAIT_S)
    assert next_calls == [None]
    assert runner.drain(WAIT_S)


def test_without_places_to_wait_a_call_runs_where_nothing_else_does(model: Summing) -> None:
    runner = OnnxRunner(SPEC, model, max_queued=0, max_batch=8)
    runner.start()
    assert runner.submit(call(0)).result(WAIT_S)
    model.began.acquire()
    model.gate.clear()
    running = runner.submit(call(1))
    model.began.acquire()
    with pytest.raises(CapacityError, match="0 calls are waiting"):
        runner.submit(call(2))
    model.gate.set()
    assert running.result(WAIT_S)
    assert runner.stop(WAIT_S)


def test_the_whole_session_takes_over_between_two_runs(runner: OnnxRunner, model: Summing) -> None:
    whole = Summing()
    whole.name = "whole"
    model.gate.clear()
    future = runner.submit(call(0))
    model.began.acquire()
    exchanged: list[bool] = []
    thread = threading.Thread(target=lambda: exchanged.append(runner.exchange(lambda: whole, 1)))
    thread.start()
    assert not model.closed
    model.gate.set()
    thread.join(WAIT_S)
    assert future.result(WAIT_S)["sum"].tolist() == [2]
    assert exchanged == [True]
    assert model.closed
    assert runner.submit(call(1)).result(WAIT_S)["sum"].tolist() == [3]
    assert (model.runs, whole.runs, runner.statistics().is_whole) == ([1], [1], True)


def test_the_whole_session_takes_over_although_calls_always_wait(runner: OnnxRunner, model: Summing) -> None:
    whole, ended = Summing(), threading.Event()
    whole.name = "whole"

    def ask() -> None:
        while not ended.is_set():
            runner.submit(call(1)).result(WAIT_S)

    threads = [in_thread(ask) for _ in range(3)]
    try:
        assert runner.exchange(lambda: whole, 1)
        assert model.closed
        num_runs = len(model.runs)
        assert runner.submit(call(1)).result(WAIT_S)["sum"].tolist() == [3]
        assert len(model.runs) == num_runs
    finally:
        ended.set()
        for thread in threads:
            thread.join(WAIT_S)


def test_the_first_answer_comes_before_the_whole_session(
    runner: OnnxRunner, model: Summing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "FIRST_WAIT_S", WAIT_S)
    made = threading.Event()

    def make() -> Summing:
        made.set()
        return Summing()

    thread = in_thread(lambda: runner.exchange(make, 1))
    assert not made.wait(0.05)
    assert runner.run(call(1), Lifetime())["sum"].tolist() == [3]
    thread.join(WAIT_S)
    assert made.is_set()
    assert model.closed


def test_without_memory_the_segments_stay(
    runner: OnnxRunner, model: Summing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(running, "available_bytes", lambda: 1 << 20)
    assert not runner.exchange(Summing, 1 << 20)
    assert "stays in segments" in caplog.text
    assert runner.submit(call(1)).result(WAIT_S)["sum"].tolist() == [3]
    assert model.runs == [1]


def test_weights_that_are_lost_end_all_calls(runner: OnnxRunner, model: Summing) -> None:
    model.gate.clear()
    futures = [runner.submit(call(0))]
    model.began.acquire()
    futures.append(runner.submit(call(1)))
    runner.abort(LoadError("the load failed"))
    for future in futures:
        with pytest.raises(LoadError):
            future.result(WAIT_S)
    with pytest.raises(LoadError):
        runner.submit(call(2))


def test_a_drain_finishes_what_was_taken(runner: OnnxRunner) -> None:
    future = runner.submit(call(0))
    assert runner.drain(WAIT_S)
    assert future.result(0)["sum"].tolist() == [2]
    with pytest.raises(DrainingError):
        runner.submit(call(1))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": [[1, 2]]}, "the input 'ids' is missing"),
        ({**call(0), "y": 1}, "no input 'y'"),
        ({"x": [[1, 2], [3]], "ids": [1]}, "not evenly nested"),
        ({"x": [["a", "b"]], "ids": [1]}, "but the model takes float32"),
        ({"x": [[1, 2, 3]], "ids": [1]}, r"has the shape \[1, 3\], but the model takes \[n, 2\]"),
        ({"x": [1, 2], "ids": [1]}, r"has the shape \[2\]"),
        ({"x": [[1, 2]], "ids": [1.5]}, "from -2147483648 to 2147483647"),
        ({"x": [[1, 2]], "ids": [1 << 40]}, "from -2147483648 to 2147483647"),
        ({"x": [[1, 2]], "ids": [True]}, "is bool"),
        ({"x": [[1e300, 2]], "ids": [1]}, "too large for float32"),
        ({"x": np.ones((1, 2)), "ids": [1]}, "is float64, but the model takes float32"),
    ],
)
def test_inputs_that_do_not_fit_are_named(runner: OnnxRunner, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        runner.submit(inputs)


def test_numbers_become_what_the_model_takes(runner: OnnxRunner) -> None:
    outputs = runner.submit({"x": [[1, 2.5], [3, 4]], "ids": [7, 8]}).result(WAIT_S)
    assert outputs["sum"].tolist() == [10.5, 15.0]


def test_cuts_are_where_few_tensors_cross() -> None:
    sizes, crossing = [4] * 12, [1, 3, 3, 1, 3, 3, 1, 3, 3, 1, 3, 3]
    assert choose_cuts(sizes, crossing, target_bytes=12) == [3, 6, 9, 11]  # the last may be small
    assert choose_cuts(sizes, [-1] * 12, target_bytes=12) == []
    assert choose_cuts([], [], target_bytes=12) == []
    assert choose_cuts([0, 0, 5, 0], [1] * 4, target_bytes=1) == []


@pytest.mark.parametrize("seed", range(20))
def test_segments_are_never_too_many(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_nodes = int(rng.integers(1, 2000))
    sizes = (rng.integers(0, 1 << 20, num_nodes) * (rng.random(num_nodes) < 0.4)).tolist()
    crossing = rng.integers(-1, 9, num_nodes).tolist()
    cuts = choose_cuts(sizes, crossing, target_bytes=1)
    assert len(cuts) < 24
    assert cuts == sorted(set(cuts))
    assert all(crossing[cut] >= 0 and 0 < cut < num_nodes for cut in cuts)


@pytest.mark.parametrize("given", [16_000, np.int64(16_000), np.array(16_000)])
def test_a_single_number_stays_without_dimensions(given: Any) -> None:
    """ONNX Runtime takes it with one, too, and then results have one more than the model says."""
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Identity", ["rate"], ["same"])],
            "g",
            [helper.make_tensor_value_info("rate", TensorProto.INT64, [])],
            [helper.make_tensor_value_info("same", TensorProto.INT64, [])],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rate = as_input(Value("rate", "tensor(int64)", ()), {"rate": given})
    (same,) = session.run(["same"], {"rate": rate})
    assert (same.shape, same.item()) == ((), 16_000)
