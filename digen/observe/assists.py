"""Trainer-assisted generation (TAG) in a run: what the policy decided, what that cost, and what it foresaw."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

from digen.observe.fold import Fold
from digen.observe.steps import StepSummary

PREDICTED = "pipeline/makespan_predicted_s"
"""Metric: the time from commit to commit that a looking-ahead policy expected at its first decision in the step."""

ACTUAL = "pipeline/makespan_s"
SEARCH = "tag/search_ms"


def summarize_assists(fold: Fold) -> dict[str, Any] | None:
    """The decisions of a run's TAG policy, or ``None`` if it was never asked.

    ``by_assists`` has a row for each number of assists that a step had, with the median over such steps of the time
    that they took and were expected to take. The first step of a run, and of each resumed segment, is in no row and in
    no prediction error: nothing was measured when it began.
    """
    inserted, skipped = fold.counts["num_tag_inserted"], fold.counts["num_tag_skipped"]
    if not inserted + skipped:
        return None
    num_assists, generated = fold.tasks("assist"), fold.tasks("generate", "assist")
    steps = list(fold.steps.values())
    search_ms = sum(step.values.get(SEARCH, 0.0) for step in steps)
    decisions = sum(_decisions(step) for step in steps if SEARCH in step.values)
    warm = [step for step in steps if not step.cold]
    return {
        "policy": fold.run.tag if fold.run is not None else "",
        "num_inserted": inserted,
        "num_skipped": skipped,
        "assist_share": num_assists / generated if generated else 0.0,
        "switch_s_per_assist": fold.seconds("switch") / num_assists if num_assists else 0.0,
        "search_ms_per_decision": search_ms / decisions if decisions else None,
        "prediction": prediction_error(warm),
        "by_assists": [
            _row(number, [step for step in warm if _inserted(step) == number])
            for number in sorted({_inserted(step) for step in warm})
        ],
    }


def prediction_error(steps: list[StepSummary]) -> dict[str, float] | None:
    """Mean and largest of |predicted / actual - 1| over the steps that have both; ``None`` without any."""
    errors = [abs(step.values[PREDICTED] / step.values[ACTUAL] - 1) for step in steps if _has_both(step)]
    return {"num_steps": len(errors), "mean": fmean(errors), "max": max(errors)} if errors else None


def _has_both(step: StepSummary) -> bool:
    return PREDICTED in step.values and step.values.get(ACTUAL, 0.0) > 0


def _inserted(step: StepSummary) -> int:
    return int(step.values.get("tag/inserted", 0))


def _decisions(step: StepSummary) -> float:
    return _inserted(step) + step.values.get("tag/skipped", 0)


def _row(num_assists: int, steps: list[StepSummary]) -> dict[str, Any]:
    predicted = [step.values[PREDICTED] for step in steps if PREDICTED in step.values]
    return {
        "num_assists": num_assists,
        "num_steps": len(steps),
        "actual_s": median(step.values.get(ACTUAL, step.duration_s) for step in steps),
        "predicted_s": median(predicted) if predicted else None,
    }
