"""The view of a pool for people."""

from __future__ import annotations

import threading

from tests.support.engine_rig import BLOCK_SIZE, TIMEOUT_S, EngineRig, finish

from teneral.runtime.kv.view import MAX_CHAINS, render

PROMPT = tuple(range(4 * BLOCK_SIZE + 1))


def test_every_block_is_counted_once() -> None:
    with EngineRig(num_blocks=40) as rig:
        finish(rig.submit(PROMPT, max_tokens=1, session="s"))
        finish(rig.submit((50, *PROMPT), max_tokens=1))
        running = threading.Event()
        generations = [
            rig.submit((*PROMPT, 60), max_tokens=30, on_event=lambda event: running.set()),
            rig.submit((*PROMPT, 61), max_tokens=30),
        ]
        assert running.wait(TIMEOUT_S)
        rig.model.gate.clear()
        view = rig.engine.kv_view()
        assert view.num_free + view.num_idle + view.num_pinned + view.num_in_use == view.num_blocks == 40
        assert view.num_shared <= view.num_in_use
        rig.model.gate.set()
        for generation in generations:
            finish(generation)


def test_a_chain_tells_its_length_its_hits_and_who_keeps_it() -> None:
    with EngineRig(num_blocks=40) as rig:
        finish(rig.submit(PROMPT, max_tokens=1, session="s", tenant="t"))
        finish(rig.submit((50, 51, 52, 53, 54), max_tokens=1))
        for _ in range(3):
            finish(rig.submit(PROMPT, max_tokens=1))
        view = rig.engine.kv_view()
        assert (view.num_pinned, view.num_idle, view.num_sessions, view.num_chains) == (4, 1, 1, 2)
        last, other = view.chains
        assert (last.num_blocks, last.num_tokens, last.num_hits) == (4, 4 * BLOCK_SIZE, 3)
        assert (last.num_sessions, last.num_pinned_blocks, last.num_sequences) == (1, 4, 0)
        assert (other.num_blocks, other.num_hits, other.num_pinned_blocks) == (1, 0, 0)
        assert 0 <= last.unused_s <= other.unused_s < TIMEOUT_S


def test_chains_with_the_same_beginning_are_several() -> None:
    with EngineRig(num_blocks=40) as rig:
        for number in range(3):
            finish(rig.submit((*PROMPT[:8], *[number] * 5), max_tokens=1))
        view = rig.engine.kv_view()
        assert [chain.num_blocks for chain in view.chains] == [3, 3, 3]
        assert view.num_idle == 2 + 3
        stem, *ends = view.prefixes
        assert (stem.parent, stem.num_blocks, stem.num_tokens, stem.num_hits) == (None, 2, 2 * BLOCK_SIZE, 2)
        assert [(end.parent, end.num_blocks, end.num_hits) for end in ends] == [(0, 1, 0)] * 3


def test_a_view_has_a_bound() -> None:
    with EngineRig(num_blocks=MAX_CHAINS + 40) as rig:
        for number in range(MAX_CHAINS + 5):
            finish(rig.submit((number % 60, number // 60, 1, 2, 3), max_tokens=1))
        view = rig.engine.kv_view()
        assert (view.num_chains, len(view.chains)) == (MAX_CHAINS + 5, MAX_CHAINS)
        assert render(view).endswith("… and 5 chains more")
        assert len(view.prefixes) <= 2 * MAX_CHAINS
        assert sum(node.num_blocks for node in view.prefixes) == MAX_CHAINS


def test_an_empty_pool_is_reported_as_free() -> None:
    with EngineRig(num_blocks=10) as rig:
        assert render(rig.engine.kv_view()) == (
            "10 blocks of 4 tokens: 0 in use (0 shared), 0 idle, 0 pinned, 10 free\n"
            "0 sessions of 0 owners may pin 5 blocks"
        )


def test_the_text_has_a_line_for_each_chain() -> None:
    with EngineRig(num_blocks=40) as rig:
        finish(rig.submit(PROMPT, max_tokens=1, session="s"))
        *_, head, chain = render(rig.engine.kv_view()).split("\n")
        assert head.split() == ["tokens", "hits", "unused", "in", "use", "sessions", "pinned"]
        assert [word for number, word in enumerate(chain.split()) if number != 2] == [
            "16",
            "0",
            "s",
            "0",
            "1",
            "4",
        ]
