from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from grpo_lab.tracking.board import Board, replayed
from grpo_lab.tracking.clock import PhaseClock
from grpo_lab.tracking.panel import NUMBERS, closing_table, duration, number, panel, plain_line, sparkline
from grpo_lab.tracking.summary import Summary
from grpo_lab.tracking.view import LiveView, PlainView, QuietView, build_view

SECONDS = {"collect": 600.0, "sync": 6.0, "learn": 300.0, "evaluate": 60.0, "save": 10.0, "other": 24.0}
ROW = {
    "mismatch/k3": 1.234e-4,
    "mismatch/ess_sequence": 0.9312,
    "entropy": 0.4123,
    "response/length": 512.34,
    "grad_norm": 0.01234,
    "response/truncated": 0.021,
    "reward/retained": 0.5,
    "reward/drawn": 0.25,
    "sample_age": 3.5,
    "collect/mixed_fraction": 0.433,
}


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def board(total: int | None = 8000) -> Board:
    start = Board(title="ggpo gsm8k v=8 i=1 seed=42", total=total).since(0, 0.0)
    start = start.with_evaluation(0, {"pass@1": 0.25}).with_evaluation(80, {"pass@1": 0.5})
    return start.with_evaluation(160, {"pass@1": 0.4375}).with_update(160, ROW, 12345.6)


def drawn(renderable: object, width: int = 80) -> list[str]:
    console = Console(record=True, width=width, file=io.StringIO(), color_system=None)
    console.print(renderable)
    return console.export_text().splitlines()


# --- the board --------------------------------------------------------------------------------------------------


def test_metrics_that_a_row_leaves_out_keep_their_last_value() -> None:
    later = board().with_update(161, {"mismatch/k3": 0.5}, None)
    assert later.latest["mismatch/ess_sequence"] == 0.9312
    assert later.latest["mismatch/k3"] == 0.5
    assert later.tokens_per_second == 12345.6
    assert later.rewards == (0.5,)


def test_best_is_the_earliest_of_equals() -> None:
    assert board().with_evaluation(240, {"pass@1": 0.5}).best == (80, 0.5)
    assert Board(title="", total=None).best is None


def test_the_pace_is_this_sessions_own() -> None:
    resumed = Board(title="", total=200, update=100).since(100, 5000.0)
    assert resumed.seconds_left(5100.0) is None
    assert resumed.with_update(110, {}, None).seconds_left(5100.0) == 900.0
    assert resumed.since(105, 1.0) == resumed, "the start of the pace is set once"
    assert board(total=None).seconds_left(10.0) is None


def test_a_resumed_board_shows_the_whole_history() -> None:
    rows = [
        {"kind": "evaluation", "update": 0, "pass@1": 0.25, "time": {"at": "x"}},
        {"kind": "update", "update": 1, "reward/retained": 0.5, "time": {"tokens_per_second": 9.0}},
        {"kind": "checkpoint", "update": 1, "math500/mean@32": 0.5, "pass@1": 0.75, "time": {"at": "x"}},
        {"kind": "update", "update": 2, "reward/retained": None, "non_finite": {"reward/retained": "nan"}, "time": {}},
    ]
    after = replayed(Board(title="", total=None), rows)
    assert after.evaluations == ((0, 0.25),)
    assert after.rewards == (0.5,)
    assert (after.update, after.tokens_per_second) == (2, 9.0)
    assert set(after.latest) == {"reward/retained"}


# --- how it looks -----------------------------------------------------------------------------------------------


def test_numbers_durations_and_sparklines() -> None:
    assert number(None, ".3f") == "-"
    assert number(1234.5, ",.1f") == "1,234.5"
    assert duration(3725.4) == "1:02:05"
    assert sparkline([], 8) == ""
    assert sparkline([0.0, 0.5, 1.0], 8) == "▁▅█"
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 4) == "▁▃▆█"
    assert sparkline([2.0, 2.0], 8) == "▁▁"


def test_the_panel_at_80_columns() -> None:
    assert drawn(panel(board(), SECONDS, "collect")) == [
        "╭──────────────────── grpo_lab  ggpo gsm8k v=8 i=1 seed=42 ────────────────────╮",
        "│ update 160 / 8,000  2%  ╸                             0:16:40  13:36:40 left │",
        "│                                                                              │",
        "│ held-out pass@1  0.4375  first 0.2500  best 0.5000 @80                   ▁█▆ │",
        "│ reward           0.5000  drawn 0.2500                                      ▁ │",
        "│                                                                              │",
        "│ K3              1.23e-04  entropy           0.412  length              512.3 │",
        "│ ESS (seq.)         0.931  grad norm        0.0123  truncated            2.1% │",
        "│ sample age           3.5  mixed             43.3%  tokens/s           12,346 │",
        "│                                                                              │",
        "│ collect   ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━                       60%  0:10:00 │",
        "│ sync                                                             1%  0:00:06 │",
        "│ learn     ━━━━━━━━━━━━━━━╸                                      30%  0:05:00 │",
        "│ evaluate  ━━━                                                    6%  0:01:00 │",
        "│ save      ╸                                                      1%  0:00:10 │",
        "│ other     ━                                                      2%  0:00:24 │",
        "╰──────────────────────────────── now: collect ────────────────────────────────╯",
    ]


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("total", [None, 8000])
def test_the_panel_fits_every_width(width: int, total: int | None) -> None:
    for shown in (board(total), Board(title="a [b] c", total=total)):
        assert {len(line) for line in drawn(panel(shown, SECONDS, "learn"), width)} == {width}


def test_before_the_first_row_there_are_dashes_and_no_bars() -> None:
    text = "\n".join(drawn(panel(Board(title="t", total=10), dict.fromkeys(SECONDS, 0.0), "other")))
    assert "update 0 / 10  0%" in text
    assert "not evaluated yet" in text
    assert "left" not in text


def test_names_in_brackets_are_not_read_as_markup() -> None:
    assert "a [b] c" in drawn(panel(Board(title="a [b] c", total=10), SECONDS, "other"))[0]


def test_the_plain_line() -> None:
    assert plain_line(board(), SECONDS) == (
        "update 160/8000 | held-out 0.4375 @160 (best 0.5000 @80) | reward 0.500 (drawn 0.250) | K3 1.23e-04 | "
        "entropy 0.412 | length 512.3 | ESS (seq.) 0.931 | grad norm 0.0123 | truncated 2.1% | 12,346 tokens/s | "
        "0:16:40, 13:36:40 left"
    )
    assert plain_line(Board(title="", total=None), SECONDS) == "update 0 | 0:16:40"


def test_the_closing_table() -> None:
    summary = Summary("abc")
    for update, score in [(0, 0.25), (8, 0.5), (16, 0.375)]:
        summary.evaluated(update, {"pass@1": score, "problems": 1024})
    summary.updated(16, {"total/tokens": 123456, "total/responses": 512})
    lines = drawn(closing_table(summary, SECONDS, "finished"))
    assert [cell.strip() for cell in lines[1].split("┃")[1:-1]] == ["held-out", "first @0", "best @8", "last @16"]
    assert [cell.strip() for cell in lines[3].split("│")[1:-1]] == ["pass@1", "0.2500", "0.5000", "0.3750"]
    assert [cell.strip() for cell in lines[4].split("│")[1:-1]] == ["problems", "1,024", "1,024", "1,024"]
    assert " ".join(line.strip() for line in lines[6:]) == (
        "finished: 16 updates, 512 responses, 123,456 tokens, 0:16:40 (collect 60%, sync 1%, learn 30%, evaluate 6%, "
        "save 1%, other 2%)"
    )


def test_the_closing_table_over_checkpoints() -> None:
    summary = Summary("abc")
    # As they arrive: a later checkpoint may come first.
    for update, score in [(160, 0.5), (80, 0.25), (240, 0.375)]:
        summary.evaluated_checkpoint(update, {"math500/mean@32": score, "math500/response/length": 400.0})
    lines = drawn(closing_table(summary, SECONDS, "finished"))
    titles, values = lines[1].split("┃")[1:-1], lines[3].split("│")[1:-1]
    assert [cell.strip() for cell in titles] == ["over 3 checkpoints", "min", "max", "median", "mean"]
    assert [cell.strip() for cell in values] == ["math500/mean@32", "0.2500", "0.5000", "0.3750", "0.3750"]
    assert lines[4].startswith("└")


def test_what_the_panel_shows_is_defined_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for name in [name for _, name, _ in NUMBERS if name] + ["reward/retained", "reward/drawn", "pass@1"]:
        assert f"| `{name}` |" in page, f"{name} is not in docs/metrics.md"


def test_a_run_without_evaluations_closes_with_its_cost() -> None:
    lines = drawn(closing_table(Summary("abc"), dict.fromkeys(SECONDS, 0.0), "failed"))
    assert lines == ["failed: 0 updates, 0 responses, 0 tokens, 0:00:00 ()"]


# --- the views --------------------------------------------------------------------------------------------------


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80)


def test_which_view_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    clock, file = PhaseClock(), Console(file=io.StringIO())
    assert type(build_view("auto", terminal(), clock, board())) is LiveView
    assert type(build_view("live", terminal(), clock, board())) is LiveView
    assert type(build_view("plain", terminal(), clock, board())) is PlainView
    ascii_file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert type(build_view("auto", Console(file=ascii_file, force_terminal=True), clock, board())) is PlainView
    assert type(build_view("auto", file, clock, board())) is PlainView
    assert type(build_view("off", terminal(), clock, board())) is QuietView
    assert capsys.readouterr().err == ""
    assert type(build_view("live", file, clock, board())) is PlainView
    assert capsys.readouterr().err == "warning: tracking.view=live needs a UTF-8 terminal: plain lines instead\n"


def test_plain_lines_come_every_ten_seconds_and_at_every_evaluation() -> None:
    now = [0.0]
    out = io.StringIO()
    view = PlainView(Console(file=out, width=80), PhaseClock(), lambda: now[0])
    for at, evaluated in [(0.0, False), (9.0, False), (9.5, True), (19.0, False), (19.5, False)]:
        now[0] = at
        view.show(board().with_update(int(at * 10), {}, None), evaluated=evaluated)
    assert [line.split("/")[0] for line in out.getvalue().splitlines()] == ["update 0", "update 95", "update 195"]


def test_the_live_view_draws_messages_above_the_panel_and_leaves_the_last_state() -> None:
    console = terminal()
    view = LiveView(console, PhaseClock(), board())
    view.start()
    view.message("saved [x]")
    view.warning("slow")
    view.show(board().with_update(161, {}, None), evaluated=False)
    view.close("next: this")
    view.close()
    out = console.file
    assert isinstance(out, io.StringIO)
    text = out.getvalue()
    assert text.index("saved [x]") < text.index("warning: slow") < text.index("update 161 / 8,000")
    assert text.rstrip().endswith("next: this")


def test_the_quiet_view_says_nothing_but_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    view = QuietView()
    view.start()
    view.show(board(), evaluated=True)
    view.message("hello")
    view.warning("careful")
    view.close("bye")
    assert capsys.readouterr() == ("", "warning: careful\n")
