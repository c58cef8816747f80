"""The progress bar's line, and when it is printed."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teneral.loader.tools import progress_bar
from teneral.loader.tools.progress_bar import (
    ProgressBar,
    TransferProgress,
    format_bytes,
    format_duration,
    render,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_bar, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_949, "99.9 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_600, "1.0 MB"),
        (988_097_824, "988 MB"),
        (5_000_000_000, "5.0 GB"),
        (10**18, "1000 PB"),
    ],
)
def test_sizes_have_three_digits_at_most(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (8.4, "8 s"), (59.6, "1:00 min"), (185, "3:05 min"), (3600, "1:00 h"), (7805, "2:10 h")],
)
def test_durations_read_as_clocks(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_line_says_share_bytes_rate_and_time_left() -> None:
    line = render("packing", 250_000_000, 1_000_000_000, 1.0)
    assert line == "packing  ██████··················  25%  250 MB of 1.0 GB  250 MB/s  3 s left"


def test_a_finished_line_says_how_long_it_took() -> None:
    assert render("packing", 10**9, 10**9, 4.0).endswith("100%  1.0 GB of 1.0 GB  250 MB/s  in 4 s")


def test_no_rate_is_guessed_from_the_first_moment() -> None:
    assert "/s" not in render("packing", 10**6, 10**9, 0.01)


def test_nothing_to_do_is_done() -> None:
    assert "100%" in render("packing", 0, 0, 0.0)


def test_a_narrow_terminal_gets_the_figures_without_the_bar() -> None:
    line = render("packing", 250_000_000, 10**9, 1.0, width=60)
    assert line == "packing   25%  250 MB of 1.0 GB  250 MB/s  3 s left"


@given(
    st.integers(0, 10**15),
    st.integers(0, 10**15),
    st.floats(0, 10**6),
    st.integers(1, 200),
    st.text("ab", max_size=20),
)
def test_a_line_is_never_longer_than_the_terminal_is_wide(done, total, elapsed_s, width, label) -> None:
    assert len(render(label, done, total, elapsed_s, width=width)) <= width


def test_a_terminal_gets_one_line_that_is_redrawn(clock: Clock) -> None:
    stream = Terminal()
    with ProgressBar("packing", stream=stream) as bar:
        for step in range(5):
            clock.now_s += 1
            bar.update(TransferProgress(step * 10, 40))
    assert stream.getvalue().count("\r\x1b[Kpacking") == 5
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().endswith("\n")


def test_a_terminal_is_not_redrawn_for_every_step(clock: Clock) -> None:
    stream = Terminal()
    bar = ProgressBar("packing", stream=stream)
    clock.now_s += 1
    for step in range(1000):
        clock.now_s += 0.0001
        bar.update(TransferProgress(step, 10_000))
    assert stream.getvalue().count("packing") == 1


def test_a_log_gets_plain_lines_now_and_then_and_at_the_end(clock: Clock) -> None:
    stream = io.StringIO()
    with ProgressBar("packing", stream=stream) as bar:
        for step in range(1, 26):
            clock.now_s += 1
            bar.update(TransferProgress(step, 25))
    lines = stream.getvalue().splitlines()
    assert [line.split()[2] for line in lines] == ["40%", "80%", "100%"]
    assert "\r" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_a_quiet_bar_prints_nothing(clock: Clock) -> None:
    stream = Terminal()
    with ProgressBar("packing", quiet=True, stream=stream) as bar:
        clock.now_s += 5
        bar.update(TransferProgress(40, 40))
    assert stream.getvalue() == ""


def test_a_closed_terminal_does_not_stop_the_transfer(clock: Clock) -> None:
    stream = Terminal()
    with ProgressBar("packing", stream=stream) as bar:
        stream.close()
        clock.now_s += 1
        bar.update(TransferProgress(1, 40))
        bar.update(TransferProgress(40, 40))
    assert stream.closed
