"""The ``digen`` command. Imports only what a subcommand needs, when it needs it.

Exit codes: 0 done, or preempted (SIGUSR1); 1 the run failed; 2 usage, configuration or checkpoint, so that nothing was
trained, unless the message names a step; 130 interrupted by SIGINT or SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from digen import __version__
from digen.signals import obey, remembered

if TYPE_CHECKING:
    from digen.config import RunConfig, ScheduleConfig
    from digen.durations import Durations
    from digen.runner import Prepared


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    with remembered() if list(words[:1]) == ["train"] else nullcontext():
        return _main(words)


def _main(argv: Sequence[str]) -> int:
    from digen.errors import CheckpointError, ConfigError, DigenError

    try:
        sys.path.append(str(Path.cwd()))  # where a user's own rewards are looked for last
        words, overrides = _split(argv)
        options = _parser().parse_args(words)
        code: int = options.command(options, overrides)
    except (ConfigError, CheckpointError) as error:
        return _complain(str(error), error, 2)
    except DigenError as error:
        return _complain(str(error), error, 2 if isinstance(error.__cause__, ConfigError) else 1)
    except BrokenPipeError:  # whoever read the output has gone, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error), error, 1)
    except KeyboardInterrupt as error:
        return _complain("interrupted", error, 130)
    return code


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        from digen.errors import ConfigError

        raise ConfigError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="digen", description="Post-train diffusion and flow models with RL on two pools of workers.")
    parser.add_argument("--version", action="version", version=f"digen {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = _command(commands, "train", "run a config", _train)
    _add_config(train)
    train.add_argument("--resume", metavar="latest|PATH", help="continue the run in its folder from a checkpoint")
    train.add_argument("--no-progress", action="store_true", help="print nothing while it runs")
    train.add_argument(
        "--preset", choices=["tiny"], help="tiny: two small steps on the CPU, on a tiny random model of the family"
    )
    train.add_argument("--fields", action="store_true", help="list every field of the config and exit")

    check = _command(commands, "check", "validate a config, print it and what it comes to, start nothing", _check)
    _add_config(check)

    doctor = _command(commands, "doctor", "say what this machine has, and what a config is missing here", _doctor)
    _add_config(doctor)
    doctor.add_argument("--json", action="store_true", help="print everything as JSON")
    doctor.epilog = "Exit code 0: nothing is missing; 1: something is."

    evaluate = _command(commands, "eval", "evaluate a checkpoint, or the model before training; trains nothing", _eval)
    _add_config(evaluate)
    evaluate.add_argument("--checkpoint", metavar="latest|PATH", help="of the run; default: the model before training")
    _add_weights(evaluate)
    evaluate.add_argument(
        "--out", metavar="DIR", type=_path, help="a new folder; default: NAME-eval/... beside the run's"
    )

    export = _command(commands, "export", "write a run's policy as diffusers loads it", _export)
    export.add_argument("source", metavar="RUN|CHECKPOINT", type=Path, help="a run's folder, or a checkpoint in it")
    export.add_argument("--out", metavar="DIR", type=_path, required=True, help="a new folder")
    _add_weights(export)
    export.epilog = "Where the base model has moved since, say where it is with --model.path."

    simulate = _command(
        commands, "simulate", "play a schedule of micro-batches in virtual time; starts no process", _simulate
    )
    _add_config(simulate)
    source = simulate.add_mutually_exclusive_group()
    source.add_argument(
        "--durations",
        metavar="TEXT",
        help="a bare model, for example 'B=8 S=2 g=10 r=1 u=5 h=12 c_load=1 c_off=1 y_opt=2 y_sync=3 G=1 T=1'; by "
        "group: g=10,12 u=5,6; several trainer groups (up to 8) are played by the exact model",
    )
    source.add_argument("--profile", metavar="RUN", type=Path, help="mean durations of a real run, from its folder")
    simulate.add_argument("--mode", help="schedule.mode")
    simulate.add_argument("--policy", help="schedule.tag")
    simulate.add_argument("--window", help="schedule.window")
    simulate.add_argument("--stale-fraction", help="schedule.stale_fraction")
    simulate.add_argument("--sync", help="schedule.sync")
    simulate.add_argument("--order", help="schedule.update_order")
    output = simulate.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print makespan, step ends, assists and every task as JSON")
    output.add_argument("--explain", action="store_true", help="print Algorithm 2's decision tree of the first step")
    simulate.add_argument("--out", metavar="DIR", type=_path, help="also write events, report.html and trace.json here")
    simulate.epilog = (
        "Without --durations and --profile, durations come from the config's costs section. Any field of the config "
        "can be set with --section.field VALUE; with a source of its own, only schedule has a say."
    )

    plan = _command(
        commands, "plan", "rank the ways to use GPUs for a config, in virtual time; starts no process", _plan
    )
    _add_config(plan)
    plan.add_argument("--gpus", metavar="N|TYPE=N,...", required=True, help="for example 16, or a=8,c=8 (costs.types)")
    plan.add_argument("--rows", metavar="N", type=int, default=5, help="layouts to show; default 5")
    plan.add_argument(
        "--keep",
        metavar="FIELD",
        action="append",
        default=[],
        help="leave a field as it is, for example schedule.window",
    )
    plan.add_argument(
        "--write", metavar="FILE", type=_path, help="write the fastest as a config for train and simulate"
    )
    plan.add_argument("--json", action="store_true", help="print candidates and the planned config as JSON")

    report = _command(commands, "report", "write a run's report and trace anew and summarise it", _report)
    report.add_argument("run", type=Path, help="a run's folder")
    return parser


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("is empty; give a path")
    return Path(text)


def _command(commands: Any, name: str, what: str, function: Callable[..., int]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.set_defaults(command=function)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", type=Path, help="YAML file; without it, the embedded digits job")
    parser.epilog = (
        "Any field of the config can be set with --section.field VALUE, for example --schedule.window 2; "
        "digen train --fields lists them."
    )


def _add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        choices=["raw", "ema"],
        default="raw",
        help="the trained weights or their moving average; default: raw",
    )


def _train(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    if options.fields:
        print("\n".join(_fields()))
        return 0
    config = _load(options.config, overrides)
    from digen.errors import CheckpointError, ConfigError, DigenError
    from digen.runner import how_to_continue, run

    obey()
    if options.preset is not None:
        from digen.presets import ensure_model, tiny

        config = tiny(config, overrides)
        ensure_model(config)
    try:
        report = run(config, resume=options.resume, progress=not options.no_progress)
    except (DigenError, KeyboardInterrupt) as error:
        if any(map(_is_traceback, getattr(error, "__notes__", ()))):
            error.add_note(f"the traceback is in the worker's log in {config.folder / 'logs'}")
        if not isinstance(error, ConfigError | CheckpointError):
            error.add_note(how_to_continue(config.folder))
        raise
    print(report.summary())
    print(f"\nreport: {report.folder / 'report.html'}")
    if report.outcome == "completed":
        return 0
    if report.outcome == "preempted":
        print(f"digen: preempted; {how_to_continue(config.folder)}", file=sys.stderr)
        return 0
    print(f"digen: interrupted; {how_to_continue(config.folder)}", file=sys.stderr)
    return 130


def _check(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    config = _load(options.config, overrides)
    from digen.config import dump_yaml
    from digen.runner import prepare

    prepared = prepare(config)
    print(dump_yaml(config))
    print("\n".join(f"# {fact}" for fact in _facts(prepared)))
    return 0


def _doctor(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    config = _load(options.config, overrides)
    from digen.doctor import as_json, describe, diagnose

    found = diagnose(config)
    if options.json:
        import json

        print(json.dumps(as_json(found)))
    else:
        print("\n".join(describe(found)))
    return 1 if found.missing else 0


def _eval(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    config = _load(options.config, overrides)
    from digen.observe.text import format_metrics
    from digen.offline import evaluate

    report, folder = evaluate(config, checkpoint=options.checkpoint, weights=options.weights, out=options.out)
    print(f"eval  v{report.version}  {report.num_samples} samples  {format_metrics(report.metrics)}")
    print(f"\nsamples and report: {folder}")
    return 0


def _export(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    from digen.offline import export

    print(f"exported: {export(options.source, options.out, weights=options.weights, overrides=overrides)}")
    return 0


def _facts(prepared: Prepared) -> list[str]:
    """What a config comes to: the plan's arithmetic, the schedule, the workers, and what is not installed here."""
    from digen import placement
    from digen.errors import MissingExtra
    from digen.extras import require
    from digen.machine import look
    from digen.placement import worker_names
    from digen.sched.admission import stale_limit

    plan, config = prepared.plan, prepared.config
    schedule, evaluation, generators = config.schedule, config.evaluation, config.num_generators
    total = plan.num_micro_batches
    limit = stale_limit(schedule.resolved_stale_fraction, total)
    facts = plan.describe()
    facts.append(
        f"schedule: mode {schedule.mode}, window {schedule.resolved_window}, at most {limit} of {total} micro-batches "
        f"stale, TAG {schedule.resolved_tag}, sync {schedule.sync}, updates in {schedule.update_order} order"
        + (", a barrier between stages" if schedule.resolved_barrier else "")
    )
    pools = f"{generators} generator{'s' * (generators > 1)}, 1 trainer" if generators else "1, which does every stage"
    scorers = config.workers.scorers
    pools += f", {scorers} scorer{'s' * (scorers > 1)}" if scorers else ""
    pools += "".join(f", judge {name} x {judge.replicas}" for name, judge in config.workers.judges.items())
    counts = {name: config.workers.num_ranks(name) for name in worker_names(config)}
    ranks = [f"{name} of {count} ranks" for name, count in counts.items() if count > 1]
    facts.append(f"workers: {'; '.join([pools, *ranks])}")
    times = (
        ("at the start", evaluation.at_start),
        (f"every {evaluation.every} steps", evaluation.every),
        ("at the end", evaluation.at_end),
    )
    when = ", ".join(words for words, on in times if on)
    prompts = min(evaluation.num_prompts, len(prepared.prompts.held_out))
    samples = f"{prompts} prompts x {evaluation.samples_per_prompt} samples"
    facts.append(f"evaluation: {samples} {when}" if when else "evaluation: none")
    facts += placement.remarks(config)
    for extra in prepared.extras:
        try:
            require(extra)
        except MissingExtra as error:
            facts.append(f"not here yet: {error}")
    facts += [f"not here yet: {line}" for line in placement.missing(config, look(), plan)]
    return facts


_SCHEDULE_FLAGS = {
    "mode": "mode",
    "policy": "tag",
    "window": "window",
    "stale_fraction": "stale_fraction",
    "sync": "sync",
    "order": "update_order",
}
"""Short flags of ``digen simulate`` and the fields of the schedule that they set."""


_MANY = 500_000
"""Simulated micro-batches that take more than a minute."""


def _simulate(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    from digen.errors import ConfigError

    if options.explain and options.out is not None:
        raise ConfigError("--explain plays nothing that --out could write; give one of them")
    durations, schedule, origin = _what_to_simulate(options, overrides)
    from digen.timeline import describe, shown_steps
    from digen.twin import instance_of, simulate, write_folder

    if options.explain:
        from digen.sched.explain import Tree, draw

        tree = Tree(instance_of(durations, schedule))
        print(f"simulated: what Algorithm 2 decides in the first step of {durations}; {origin}")
        print("\n".join(draw(tree, per_s=int(1 / durations.tick))))
        if schedule.resolved_tag.partition("(")[0] != "search":
            print(f"this schedule's own policy is {schedule.resolved_tag}, which need not decide the same")
        return 0
    if (total := durations.num_steps * durations.num_micro_batches) >= _MANY:
        print(f"digen: playing {total:,} micro-batches, which takes minutes", file=sys.stderr)
    keep = None if options.json else shown_steps(durations)
    num_traced = 0
    if options.out is None:
        twin = simulate(durations, schedule, keep=keep)
    else:
        twin, num_traced = write_folder(options.out, durations, schedule, keep=keep)
    if options.json:
        import json

        print(json.dumps(twin.as_json()))
        return 0
    print("\n".join(describe(twin, schedule, origin=origin)))
    if options.out is not None:
        print(f"\nreport: {options.out / 'report.html'}")
        if num_traced < durations.num_steps:
            print(f"trace.json holds the first {num_traced} whole steps; digen report {options.out} writes all")
    return 0


def _what_to_simulate(options: argparse.Namespace, overrides: dict[str, str]) -> tuple[Durations, ScheduleConfig, str]:
    """Durations, schedule, and where the durations come from."""
    from digen.errors import ConfigError

    path, profile = options.config, options.profile
    flags = {
        f"schedule.{field}": value
        for flag, field in _SCHEDULE_FLAGS.items()
        if (value := getattr(options, flag)) is not None
    }
    bare = options.durations is not None or (profile is not None and path is None)
    others = [key for key in overrides if not key.startswith("schedule.")]
    if bare and others:
        raise ConfigError(
            f"--{others[0]} changes nothing here: beside --durations, and --profile without a config, only fields of "
            "schedule have a say"
        )
    if bare:
        from digen.durations import parse_durations, profiled_durations
        from digen.events import read_events

        if profile is None:
            return parse_durations(options.durations), _load(path, overrides | flags).schedule, "given durations"
        events = _run_folder(profile) / "events.jsonl"
        # The schedule that was profiled, unless flags say otherwise.
        path = profile / "config.yaml" if (profile / "config.yaml").is_file() else None
        schedule = _load(path, overrides | flags).schedule
        return profiled_durations(read_events(events)), schedule, f"mean durations of the run in {profile}"
    if profile is not None:
        overrides = overrides | {"costs.profile": str(profile)}
    config = _load(path, overrides | flags)
    if config.costs.model is None and config.costs.durations is None and config.costs.profile is None:
        raise ConfigError(
            "costs: the config does not say how long tasks take; set costs.model, costs.durations or costs.profile, or "
            "give --durations or --profile"
        )
    from digen.costs import durations_for, origin

    return durations_for(config), config.schedule, origin(config)


def _plan(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    config = _load(options.config, overrides)
    from digen.capacity import parse_gpus
    from digen.errors import ConfigError
    from digen.planned import as_json, as_yaml, describe, planned_config
    from digen.planner import plan

    if options.write is not None and options.write.exists():
        raise ConfigError(f"--write {options.write}: the file exists; choose another name, or delete it")
    if options.write is not None and not options.write.parent.is_dir():
        raise ConfigError(f"--write {options.write}: there is no folder {options.write.parent}; make it first")
    if options.write is not None and not os.access(options.write.parent, os.W_OK):
        raise ConfigError(f"--write {options.write}: nothing can be written in {options.write.parent}")
    outcome = plan(config, parse_gpus(options.gpus, config.costs), keep=options.keep, num_rows=options.rows)
    if options.json:
        import json

        print(json.dumps(as_json(outcome)))
    else:
        print("\n".join(describe(outcome)))
    if options.write is not None:
        options.write.write_text(as_yaml(planned_config(outcome)), encoding="utf-8")
        if not options.json:
            print(f"\nplanned config: {options.write}")
    return 0


def _report(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    from digen.errors import ConfigError
    from digen.events import read_events
    from digen.observe.report import text_summary, write_report
    from digen.observe.trace import write_trace

    if overrides:
        raise ConfigError(f"digen report takes no config fields, got --{next(iter(overrides))}")
    print(text_summary(write_report(_run_folder(options.run))))
    write_trace(read_events(options.run / "events.jsonl"), options.run / "trace.json")
    print(f"\nreport: {options.run / 'report.html'}")
    return 0


def _run_folder(folder: Path) -> Path:
    """The folder, if it holds the whole events of a run."""
    from digen.errors import ConfigError
    from digen.events import read_events

    events = folder / "events.jsonl"
    if not events.is_file():
        raise ConfigError(f"{folder} is not a run's folder: it has no events.jsonl")
    try:
        for _ in read_events(events):
            pass
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return folder


def _load(path: Path | None, overrides: dict[str, str]) -> RunConfig:
    from digen.config import load_config

    config = load_config(path, overrides)
    _configure_logging(config.observe.log_level)
    return config


def _configure_logging(level: str) -> None:
    import logging

    import structlog

    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),  # as it is then: the live view replaces it
    )


def _split(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Take ``--section.field VALUE`` and ``--section.field=VALUE`` out of the words; the others are argparse's."""
    from digen.errors import ConfigError

    others: list[str] = []
    overrides: dict[str, str] = {}
    words = iter(argv)
    for word in words:
        key, equals, value = word.partition("=")
        if not key.startswith("--") or "." not in key:
            others.append(word)
            continue
        if not equals:
            value = next(words, "--")
            if value.startswith("--"):
                raise ConfigError(f"{word} needs a value")
        overrides[key[2:]] = value
    return others, overrides


def _fields() -> list[str]:
    """Every field with its default and help, from the models' docstrings."""
    import json
    from typing import get_args

    from digen.config import RunConfig

    lines: list[str] = []

    def walk(model: Any, defaults: dict[str, Any], prefix: str) -> None:
        for name, field in model.model_fields.items():
            default = defaults[name]
            if hasattr(field.annotation, "model_fields"):
                walk(field.annotation, default, f"{prefix}{name}.")
                continue
            shown = default if isinstance(default, str) else json.dumps(default)
            lines.append(f"--{prefix}{name}" + (f"  (default: {shown})" if default is not None else ""))
            lines.append(f"    {field.description}".replace("``", ""))
            for section in get_args(field.annotation):  # one that may be absent
                if default is None and hasattr(section, "model_fields"):
                    walk(section, section().model_dump(mode="json"), f"{prefix}{name}.")

    walk(RunConfig, RunConfig().model_dump(mode="json"), "")
    return lines


def _complain(message: str, error: BaseException, code: int) -> int:
    """Say what happened in one line, then what is worth knowing beside it; tracebacks are in the workers' logs."""
    notes = [note for note in getattr(error, "__notes__", ()) if not _is_traceback(note)]
    print("\n".join([f"digen: {message}", *notes]), file=sys.stderr)
    return code


def _is_traceback(note: str) -> bool:
    return note.startswith("traceback in ")


if __name__ == "__main__":
    sys.exit(main())
