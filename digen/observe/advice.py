"""What to try next, in one honest sentence derived from where the time went."""

from __future__ import annotations

from collections import defaultdict

from digen.observe.fold import Fold
from digen.observe.ledger import HANDOVER, WORKER_LOST
from digen.observe.text import format_duration, format_share

LINEAR_NOTE = (
    "Where every stage scales linearly with the number of GPUs, disaggregation cannot beat colocation: pipelining and "
    "assists only win back what the split lost. A gain over colocated execution comes from a stage that does not scale "
    "linearly, from a cheaper update (timestep chunks), or from unequal hardware. Compare runs of equal resources."
)
"""The note that belongs to every comparison with colocated execution."""

_SMALL = 0.10
"""A bubble share below this is not worth a change of schedule."""

_REMEDY = {
    "wait_weights": "they wait for new weights: {weights}",
    "wait_rollout": "it waits for generations: {rollout}",
    "wait_score": "rewards come too slowly: use a faster reward, or scorers of their own",
    "wait_group": "groups are complete too late: try a smaller plan.micro_batch_size, or fewer samples per prompt",
    "wait_order": "scored micro-batches wait for their turn: try schedule.update_order=ready",
    "wait_barrier": "the barrier between stages holds them back: try schedule.mode=gap",
    "wait_hold": "they stop together for every weight sync: try schedule.sync=pull",
    "wait_limit": "schedule.max_generating is reached: raise it",
    "wait_memory": "schedule.max_rollout_bytes is reached: raise it",
    "wait_encode": "prompts are encoded too slowly: encode on a GPU, or use a smaller text encoder",
    "wait_evaluate": "commits wait for evaluations: raise evaluation.every, or draw fewer samples",
    "wait_checkpoint": "checkpoints are written too slowly: raise checkpoint.every, or use a faster disk",
    "wait_skip": "the TAG policy skipped these bubbles: compare with schedule.tag=greedy",
    HANDOVER: "the driver hands out tasks too slowly for their length: try a larger plan.micro_batch_size",
}


def balance(fold: Fold) -> float | None:
    """Generators that one trainer would keep busy: worker-seconds of generating and scoring over those of training.

    Measured on the workers of this run, assists counted as generations; ``None`` before anything was trained.
    """
    training = fold.seconds("update", "commit", "publish")
    return fold.seconds("generate", "assist", "score") / training if training > 0 else None


def advise(fold: Fold) -> str:
    """The largest avoidable bubble and what would shrink it, or that there is none.

    Of a run that failed it says how to go on, and where losses took more time than any bubble, that times cannot be
    compared.
    """
    if fold.finished is not None and fold.finished.outcome == "failed":
        go_on = "continue with --resume latest" if fold.checkpoint else "start again; no checkpoint was saved"
        return f"Mend what the error says, then {go_on}."
    if len(fold.steps) < 3:
        return "Too few steps to tell where time is lost; run at least three."
    if not fold.of_role("generator"):
        return "One worker does every stage, so nothing overlaps; compare with schedule.mode=tag on equal resources."
    shares: defaultdict[tuple[str, str], float] = defaultdict(float)
    for role in ("generator", "trainer"):
        totals = [ledger.totals(fold.now) for ledger in fold.of_role(role)]
        wall = sum(busy + idle for busy, idle in totals)
        for ledger in fold.of_role(role):
            for cause, seconds in ledger.bubble_s.items():
                shares[role, cause] += seconds / wall
    avoidable = [(share, role, cause) for (role, cause), share in shares.items() if cause in _REMEDY]
    share, role, cause = max(avoidable, default=(0.0, "", ""))
    if max(shares["generator", WORKER_LOST], shares["trainer", WORKER_LOST]) >= max(share, _SMALL):
        lost, idle = format_duration(fold.lost_s), format_duration(fold.idle_s(WORKER_LOST))
        return (
            f"Workers were lost for {lost} in all, and others idled {idle} meanwhile, more than for any other cause: "
            "these times say nothing about the schedule. Find out why workers are lost: each loss, with its error, is "
            "in report.html."
        )
    if share < _SMALL:
        return (
            f"Both pools are busy: no avoidable bubble reaches {format_share(_SMALL)}. "
            "More speed needs cheaper stages (algorithm.tsp_chunk, fewer denoising steps) or more hardware."
        )
    balanced, present = balance(fold) or 0.0, len(fold.of_role("generator"))
    surplus = present - round(balanced)
    remedy = _REMEDY[cause].format(weights=_remedy_weights(fold, surplus), rollout=_remedy_rollout(fold, surplus))
    who = "Generators idle" if role == "generator" else "The trainer idles"
    return (
        f"{who} {format_share(share)} of the time because {remedy}. "
        f"(The work measured here would keep {balanced:.1f} such generators a trainer busy; it ran {present}.)"
    )


def _remedy_weights(fold: Fold, surplus: int) -> str:
    if fold.run is not None and fold.run.window == 1:
        split = ", or fewer generators and a larger trainer" if surplus > 0 else ""
        return f"try schedule.mode=tcss, if one step of staleness is acceptable{split}"
    return "give the trainer more of the GPUs" if surplus > 0 else "raise schedule.stale_fraction"


def _remedy_rollout(fold: Fold, surplus: int) -> str:
    if fold.run is not None and fold.run.tag == "never":
        return "try schedule.mode=tag" + (", or more generators" if surplus < 0 else "")
    return "give generation more of the GPUs" if surplus < 0 else "try a smaller plan.micro_batch_size"
