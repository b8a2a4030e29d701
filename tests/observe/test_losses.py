"""What is said after workers died: how long they were away, what became of their tasks, and no advice on scheduling."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from digen import Plan, Scheduler, SimWorker
from digen.events import (
    AnyEvent,
    BubbleOpened,
    CheckpointSaved,
    MicroBatchSettled,
    Quarantined,
    RolledBack,
    RunFinished,
    RunStarted,
    StepCommitted,
    TaskFailed,
    TaskFinished,
    TaskRetried,
    TaskStarted,
    WorkerJoined,
    WorkerLost,
    WorkerRestarted,
)
from digen.observe.advice import advise
from digen.observe.fold import Fold
from digen.observe.ledger import WORKER_LOST, Span
from digen.observe.losses import GivenUp, WentBack
from digen.observe.page import MAX_LOSSES, render
from digen.observe.progress import Progress
from digen.observe.report import build_report, losses_shown, text_summary
from digen.observe.trace import build_trace
from digen.types import GroupSlice, MicroBatch, Prompt
from digen.workers.clock import run_virtual
from tests.observe.test_report import check_page
from tests.sched.test_faults_simulated import Run, Scripted

Started = Callable[..., RunStarted]
EVIL = "</td><script>alert(1)</script>\x1b[2J"


def joined() -> list[AnyEvent]:
    return [WorkerJoined(0.0, name, role, 0) for name, role in (("gen0", "generator"), ("trainer", "trainer"))]  # type: ignore[arg-type]  # roles


def lost(time: float, worker: str = "gen0", wait_s: float | None = 0.0, error: str = "died") -> WorkerLost:
    return WorkerLost(time, worker, "trainer" if worker == "trainer" else "generator", "died", error, wait_s)


def back(time: float, down_s: float, worker: str = "gen0") -> WorkerRestarted:
    return WorkerRestarted(time, worker, "trainer" if worker == "trainer" else "generator", 0, down_s)


def given_up(time: float, index: int, attempts: int, error: str, prompt: str = "a cat") -> Quarantined:
    slices = (GroupSlice("s0p0", Prompt(prompt), 0, 2, 4), GroupSlice("s0p1", Prompt(prompt), 0, 2, 4))
    return Quarantined(time, "generate", 0, index, attempts, error, MicroBatch(0, 0, index, slices), ())


def a_loss(started: Started, *, loss_s: float = 6.0, num_steps: int = 3) -> list[AnyEvent]:
    """gen0 generates for 1 s, dies, is back after ``loss_s``, and then one step takes 2 s; the trainer waits for it."""
    again = 1.0 + loss_s
    events: list[AnyEvent] = [
        started(num_steps, info={"name": "digits"}),
        *joined(),
        BubbleOpened(0.0, "trainer", "wait_rollout"),
        TaskStarted(0.0, 0, "generate", "gen0", 0, 0, 0),
        TaskFailed(1.0, 0, "generate", "gen0", 0, 0, 0.0, "died"),
        lost(1.0),
        TaskRetried(1.0, "generate", 0, 0, 2, "died"),
        back(again, loss_s),
    ]
    for step in range(num_steps):
        now = again + 2.0 * step
        events += [
            TaskStarted(now, 2 * step + 1, "generate", "gen0", step, 0, step),
            TaskFinished(now + 1, 2 * step + 1, "generate", "gen0", step, 0, step, now),
            TaskStarted(now + 1, 2 * step + 2, "update", "trainer", step, 0, step),
            TaskFinished(now + 2, 2 * step + 2, "update", "trainer", step, 0, step, now + 1),
            MicroBatchSettled(now + 2, step, 0, "updated", step, 0),
            StepCommitted(now + 2, step, step + 1, {}),
            BubbleOpened(now + 2, "trainer", "wait_rollout"),
            BubbleOpened(now + 2, "gen0", "wait_weights"),
        ]
    return [*events, RunFinished(events[-1].time, "completed")]


# ---- where the time goes -----------------------------------------------------------------------------------------


def test_what_others_idle_while_a_worker_is_lost_has_a_cause_of_its_own(started: Started) -> None:
    spans: list[Span] = []
    fold = Fold.of(a_loss(started), spans.append)
    trainer, generator = fold.workers["trainer"], fold.workers["gen0"]
    assert trainer.bubble_s == {"wait_rollout": 1.0 + 3 * 1.0, WORKER_LOST: 6.0}
    assert [(span.label, span.start, span.end) for span in spans if span.worker == "trainer"][:3] == [
        ("wait_rollout", 0.0, 1.0),
        (WORKER_LOST, 1.0, 7.0),
        ("wait_rollout", 7.0, 8.0),
    ]
    assert (generator.lost_s, generator.wall_s) == (6.0, 1.0 + 6.0)
    assert [(span.label, span.start, span.end) for span in spans if span.kind == "lost"] == [("lost: died", 1.0, 7.0)]
    assert (fold.lost_s, fold.idle_s(WORKER_LOST)) == (6.0, 6.0)


@pytest.mark.parametrize("faults", [{"gen0__1_3": "death"}, {"trainer__1_9": "death", "gen1__1_4": "hang"}])
def test_every_second_of_a_worker_is_busy_idle_or_lost(faults: dict[str, str]) -> None:
    run, spans = Run(Scripted(**faults)), list[Span]()
    fold = Fold.of(run.events, spans.append)
    assert fold.lost_s > 0
    for name, ledger in fold.workers.items():
        own = sorted((span for span in spans if span.worker == name), key=lambda span: span.start)
        assert ledger.busy_s + sum(ledger.bubble_s.values()) + ledger.lost_s == pytest.approx(fold.now)
        assert all(one.end == pytest.approx(other.start) for one, other in pairwise(own))
    for event in run.of(WorkerLost):
        until = next(each.time for each in run.of(WorkerRestarted) if each.time > event.time)
        idle = [span for span in spans if span.kind == "bubble" and event.time < span.end and span.start < until]
        assert {span.cause for span in idle if span.end > span.start} <= {WORKER_LOST}


def test_a_worker_that_is_out_for_good_is_lost_until_the_end(started: Started) -> None:
    fold = Fold.of([started(), *joined(), lost(1.0, wait_s=None), RunFinished(5.0, "completed")])
    assert fold.workers["gen0"].lost_s == 4.0
    fold = Fold.of([started(), *joined(), lost(1.0), TaskStarted(3.0, 0, "update", "trainer", 0, 0, 0), started()])
    assert fold.workers["gen0"].lost_s == 2.0, "the next segment begins with everybody"
    assert not fold.workers["trainer"].others_lost


def test_steps_in_which_a_worker_is_away_are_marked(started: Started) -> None:
    def steps(wait_s: float | None) -> list[bool]:
        commits = [StepCommitted(float(number), number, number + 1, {}) for number in (1, 2, 3)]
        events = [started(4), *joined(), commits[0], lost(1.5, wait_s=wait_s), commits[1]]
        returns = [back(2.5, 1.0)] if wait_s is not None else []
        fold = Fold.of([*events, *returns, commits[2], StepCommitted(4.0, 4, 5, {})])
        return [summary.disturbed for summary in fold.steps.values()]

    assert steps(0.0) == [False, True, True, False]
    assert steps(None) == [False, True, False, False], "the others are the run's measure then"


# ---- advice ------------------------------------------------------------------------------------------------------


def test_no_loss_is_taken_for_a_matter_of_scheduling(started: Started) -> None:
    assert advise(Fold.of(a_loss(started))).startswith(
        "Workers were lost for 6.0 s in all, and others idled 6.0 s meanwhile, more than for any other cause: these "
    )
    assert advise(Fold.of(a_loss(started, loss_s=1.0))).startswith("The trainer idles 50 % of the time"), "4 s of 8"


def test_of_a_run_that_failed_nothing_is_said_about_speed(started: Started) -> None:
    stream = a_loss(started, loss_s=1.0)[:-1]
    failed = RunFinished(stream[-1].time, "failed", "step 3 failed")
    assert advise(Fold.of([*stream, failed])) == "Mend what the error says, then start again; no checkpoint was saved."
    report = build_report([*stream, CheckpointSaved(stream[-1].time, 3, "runs/digits/checkpoints/3"), failed])
    assert report["advice"] == "Mend what the error says, then continue with --resume latest."
    assert text_summary(report).endswith("  next            " + report["advice"])


@pytest.mark.parametrize(("outcome", "said"), [("drained", "; continue from it with"), ("completed", "")])
def test_a_run_that_is_not_finished_says_how_to_continue(started: Started, outcome: Any, said: str) -> None:
    stream = [*a_loss(started)[:-1], CheckpointSaved(13.0, 3, "runs/digits/checkpoints/3")]
    rows = text_summary(build_report(stream))
    assert "v3 runs/digits/checkpoints/3; unless it still runs, continue from it with --resume latest" in flat(rows)
    rows = flat(text_summary(build_report([*stream, RunFinished(13.0, outcome)])))
    assert said in rows
    assert ("--resume" in rows) == bool(said)
    assert "--resume" not in text_summary(build_report(a_loss(started)[:-1])), "there is no checkpoint"


def flat(text: str) -> str:
    return " ".join(text.split())


# ---- what is counted ---------------------------------------------------------------------------------------------


def test_what_is_trained_again_is_counted_once(started: Started) -> None:
    def settled(step: int, *indices: int) -> list[AnyEvent]:
        return [MicroBatchSettled(1.0, step, index, "updated", step - index % 2, index % 2) for index in indices]

    fold = Fold()
    before = [*settled(0, 0, 1), StepCommitted(1.0, 0, 1, {}), *settled(1, 0, 1), StepCommitted(1.0, 1, 2, {})]
    for event in [started(3), *joined(), *before, *settled(2, 0), MicroBatchSettled(1.0, 2, 1, "empty", 2, 0)]:
        fold.apply(event)
    assert (fold.staleness, fold.counts["num_updated"], fold.counts["num_empty"]) == ({0: 3, 1: 2}, 5, 1)
    fold.apply(lost(1.0, "trainer"))
    fold.apply(RolledBack(2.0, 1, 2, 3))
    fold.apply(back(2.0, 1.0, "trainer"))
    assert (fold.staleness, fold.counts["num_updated"], fold.counts["num_empty"]) == ({0: 1, 1: 1}, 2, 0)
    for event in [*settled(1, 0, 1), StepCommitted(3.0, 1, 2, {}), *settled(2, 0)]:
        fold.apply(event)
    assert (fold.staleness, fold.counts["num_updated"]) == ({0: 3, 1: 2}, 5)
    fold.apply(started(3, start_step=1))
    assert (fold.staleness, fold.counts["num_updated"]) == ({0: 1, 1: 1}, 2), "a resumed run trains them again, too"


def test_a_real_rollback_counts_every_micro_batch_once() -> None:
    run = Run(Scripted(trainer__1_23="death"), num_steps=5, every=2, rules={"snapshot_every": 0})
    report = build_report(run.events)
    assert report["staleness"]["histogram"] == {"0": 5 * 4}
    assert report["conservation"]["num_updated"] == 20
    assert report["conservation"]["holds"]
    (record,) = report["losses"]["workers"]
    assert (record["worker"], record["task"], record["task_fate"]) == ("trainer", "update s3 mb3", "repeated")
    assert record["back_s"] == pytest.approx(3)
    (rollback,) = report["losses"]["rollbacks"]
    assert (rollback["version"], rollback["from_version"]) == (2, 3)


def test_cancelled_tasks_have_not_failed(started: Started) -> None:
    stream: list[AnyEvent] = [
        started(),
        *joined(),
        TaskStarted(0.0, 0, "generate", "gen0", 0, 0, 0),
        TaskStarted(0.0, 1, "update", "trainer", 0, 0, 0),
        TaskFailed(1.0, 0, "generate", "gen0", 0, 0, 0.0, "cancelled: the run ended"),
        TaskFailed(1.0, 1, "update", "trainer", 0, 0, 0.0, "cancelled: the run ended"),
        RunFinished(1.0, "stopped"),
    ]
    report = build_report(stream)
    assert (report["counts"]["num_tasks_failed"], report["counts"]["num_tasks_cancelled"]) == (0, 2)
    assert report["conservation"]["holds"]
    assert "0 failed, 2 cancelled\n" in text_summary(report)
    assert '<i class="cancelled"></i>cancelled' in render(report)
    unfinished = text_summary(build_report(stream[:-3]))
    assert "0 failed, 2 unfinished\n" in unfinished


def test_a_real_run_that_is_stopped_at_once_has_cancelled_tasks() -> None:
    events: list[AnyEvent] = []
    times = {"generate": 4, "score": 1, "load": 1, "update": 2, "commit": 1, "publish": 1}

    async def main() -> None:
        plan = Plan(["a", "b"], num_steps=3, prompts_per_step=2, samples_per_prompt=2, micro_batch_size=2)
        workers = [SimWorker("gen0", times), SimWorker("trainer", times)]
        async with Scheduler(plan, generators=workers[:1], trainer=workers[1], sinks=[events.append]) as scheduler:
            asyncio.get_running_loop().call_later(6, scheduler.stop)
            assert [report async for report in scheduler] == []

    run_virtual(main())
    counts = build_report(events)["counts"]
    assert counts["num_tasks_cancelled"] > 0
    assert counts["num_tasks_failed"] == counts["num_tasks_unfinished"] == 0


# ---- records -----------------------------------------------------------------------------------------------------


def test_what_became_of_each_loss(started: Started) -> None:
    fold = Fold.of(
        [
            started(),
            *joined(),
            TaskStarted(0.0, 0, "generate", "gen0", 0, 0, 0),
            TaskFailed(1.0, 0, "generate", "gen0", 0, 0, 0.0, "boom"),  # it raised, and lives
            TaskRetried(1.0, "generate", 0, 0, 2, "boom"),
            lost(2.0, error="died while it idled"),
            lost(4.0, error="could not be started"),
            back(7.0, 5.0),
            TaskStarted(7.0, 1, "generate", "gen0", 0, 1, 0),
            TaskFailed(8.0, 1, "generate", "gen0", 0, 1, 7.0, "died"),
            lost(8.0, wait_s=None),
            given_up(8.0, 1, 3, "died"),
            given_up(8.0, 2, 0, "its groups are lost with micro-batch 1"),
            RolledBack(9.0, 0, 1, 4),
            RunFinished(10.0, "completed"),
            started(start_step=0),
            *joined(),
            given_up(0.0, 1, 3, "in quarantine since an earlier run: died"),
        ]
    )
    seen = [(each.time, each.task, each.task_fate, each.back_s, each.comes_back) for each in fold.losses.workers]
    assert seen == [
        (2.0, "", "", 5.0, True),
        (4.0, "", "", 3.0, True),
        (8.0, "generate s0 mb1", "quarantined", None, False),
    ]
    assert fold.losses.quarantined == [
        GivenUp(8.0, 0, 1, ["a cat"], 3, "died"),
        GivenUp(8.0, 0, 2, ["a cat"], 0, "its groups are lost with micro-batch 1"),
    ]
    assert fold.counts["num_quarantined"] == 1
    assert fold.losses.rollbacks == [WentBack(9.0, 0, 1, 4)]


def test_the_page_shows_losses_quarantine_and_rollbacks(started: Started) -> None:
    stream = a_loss(started)
    stream[-1:] = [given_up(13.0, 3, 3, EVIL, prompt=EVIL), RolledBack(13.0, 2, 3, 4), RunFinished(13.0, "completed")]
    report = build_report(stream)
    assert json.loads(json.dumps(report)) == report
    page = render(report)
    check_page(page)
    rows = re.findall(r"<tr>(.*?)</tr>", page)
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in rows]
    assert ["1.0", "gen0", "generator", "died", "generate s0 mb0", "repeated", "6.00", "died"] in cells
    assert ["13.0", "v3", "v2", "1", "4"] in cells
    (quarantined,) = [row for row in cells if row[1:3] == ["0", "3"]]
    assert quarantined[4] == "3"
    assert quarantined[3] == quarantined[5] == "&lt;/td&gt;&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J"
    (worker,) = [row for row in cells if row[:2] == ["gen0", "generator"]]
    assert worker[3:5] == ["7.0 s", "6.0 s"]
    assert '<rect class="lost done"' in page
    assert '<li><i class="lost"></i>lost</li>' in page
    quiet = render(build_report(a_loss(started)[:5]))
    assert "<h2>Losses" not in quiet
    assert '<i class="lost">' not in quiet


def test_a_page_of_many_losses_stays_light(started: Started) -> None:
    losses = [event for at in range(1000) for event in (lost(at + 0.1), back(at + 0.5, 0.4))]
    report = build_report([started(), *joined(), *losses, RunFinished(1000.0, "completed")])
    assert len(report["losses"]["workers"]) == 1000
    page = render(report)
    assert page.count("<td>generator</td>") == MAX_LOSSES + 1
    assert "900 earlier ones are in report.json" in page


def test_the_trace_has_the_time_that_a_worker_was_lost(started: Started) -> None:
    (item,) = [item for item in build_trace(a_loss(started))["traceEvents"] if item.get("cat") == "lost"]
    assert (item["name"], item["ts"], item["dur"]) == ("lost: died", 1e6, 6e6)


# ---- words -------------------------------------------------------------------------------------------------------


def test_the_terminal_after_a_loss(started: Started) -> None:
    text = text_summary(build_report(a_loss(started)))
    assert "  losses          1 worker lost, 1 restarted, 1 task repeated\n" in text
    assert "  lost time       workers were lost for 6.0 s in all; others idled 6.0 s meanwhile\n" in text
    assert "  speed           30.0 steps/min, 2.0 s a step (median of 1 step)\n" in text
    assert "  trainer idle    77 % (worker_lost 46 %, wait_rollout 31 %)\n" in text
    counts = {f"num_{name}": 2 for name in ("workers_lost", "restarts", "retries", "rollouts_lost", "rollbacks")}
    assert losses_shown(counts | {"num_quarantined": 1}) == (
        "2 workers lost, 2 restarted, 2 tasks repeated, 2 rollouts lost, 1 quarantined, 2 rollbacks"
    )


def test_lines_of_one_thing(started: Started) -> None:
    stream = io.StringIO()
    progress = Progress(stream, live=False)
    events = a_loss(started, num_steps=1)
    events[-1:] = [given_up(9.0, 0, 1, "died"), given_up(9.0, 1, 0, "lost with it"), events[-1]]
    for event in events:
        progress(event)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("start 1 step of 4 micro-batches")
    assert "quarantined  step 0 micro-batch 0 after 1 failure: died" in lines
    assert "quarantined  step 0 micro-batch 1: lost with it" in lines
    assert lines[-1] == "completed after 1 step in 9.0 s, 6.7 steps/min (median of 1 step)"


def test_the_live_view_says_who_is_lost(started: Started) -> None:
    from rich.console import Console

    progress = Progress(io.StringIO(), live=False)
    for event in a_loss(started)[:8]:
        progress(event)
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(progress.render())
    text = console.export_text()
    assert re.search(r"gen0 .* lost  0\.0\d s", text)
    assert re.search(r"trainer .* idle: worker_lost", text)
