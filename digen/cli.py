"""The ``digen`` command. Imports only what a subcommand needs, when it needs it.

Exit codes: 0 done; 1 the run failed; 2 usage or configuration; 130 interrupted (a checkpoint was saved where a step
had begun).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from digen.config import RunConfig

_OVERRIDES = "Any field of the config can be set with --section.field VALUE, for example --schedule.window 2."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    from digen.errors import ConfigError, DigenError

    try:
        words, overrides = _split(sys.argv[1:] if argv is None else argv)
        options = _parser().parse_args(words)
        code: int = options.command(options, overrides)
    except ConfigError as error:
        return _complain(error, 2)
    except DigenError as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        print("digen: interrupted before the first step; nothing was trained", file=sys.stderr)
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="digen", description="Post-train diffusion and flow models with RL on two pools of workers."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="run a config", epilog=_OVERRIDES)
    train.add_argument("config", nargs="?", type=Path, help="YAML file; without it, the embedded digits job")
    train.add_argument("--resume", metavar="latest|PATH", help="continue the run in its folder from a checkpoint")
    train.add_argument("--no-progress", action="store_true", help="print nothing while it runs")
    train.add_argument("--fields", action="store_true", help="list every field of the config and exit")
    train.set_defaults(command=_train)

    check = commands.add_parser(
        "check", help="validate a config, print it and the plan's arithmetic, start nothing", epilog=_OVERRIDES
    )
    check.add_argument("config", nargs="?", type=Path, help="YAML file; without it, the embedded digits job")
    check.set_defaults(command=_check)

    report = commands.add_parser("report", help="write report.json and report.html of a run anew and summarise it")
    report.add_argument("run", type=Path, help="a run's folder")
    report.set_defaults(command=_report)
    return parser


def _train(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    if options.fields:
        print("\n".join(_fields()))
        return 0
    config = _load(options.config, overrides)
    from digen.runner import run

    report = run(config, resume=options.resume, progress=not options.no_progress)
    print(report.summary())
    print(f"\nreport: {report.folder / 'report.html'}")
    return 0 if report.outcome == "completed" else 130


def _check(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    config = _load(options.config, overrides)
    from digen.config import dump_yaml
    from digen.runner import prepare
    from digen.sched.admission import stale_limit

    prepared = prepare(config)
    schedule, plan = config.schedule, prepared.plan
    limit = stale_limit(schedule.resolved_stale_fraction, plan.num_micro_batches)
    print(dump_yaml(config))
    print("\n".join(plan.describe()))
    print(
        f"schedule: mode {schedule.mode}, window {schedule.resolved_window}, "
        f"at most {limit} of {plan.num_micro_batches} micro-batches stale, tag {schedule.resolved_tag}, "
        f"sync {schedule.sync}, updates in {schedule.update_order} order"
        + (", a barrier between stages" if schedule.resolved_barrier else "")
    )
    print(f"workers: {config.num_generators or 'no'} generator{'s' * (config.num_generators != 1)}, 1 trainer")
    print(f"prompts: {len(prepared.prompts.train)} to train on, {len(prepared.prompts.held_out)} for evaluation")
    return 0


def _report(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    from digen.errors import ConfigError
    from digen.events import read_events
    from digen.observe.report import text_summary, write_report
    from digen.observe.trace import write_trace

    if overrides:
        raise ConfigError(f"digen report takes no config fields, got --{next(iter(overrides))}")
    events = options.run / "events.jsonl"
    if not events.is_file():
        raise ConfigError(f"{options.run} is not a run's folder: it has no events.jsonl")
    print(text_summary(write_report(options.run)))
    write_trace(read_events(events), options.run / "trace.json")
    print(f"\nreport: {options.run / 'report.html'}")
    return 0


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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
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
            try:
                value = next(words)
            except StopIteration:
                raise ConfigError(f"{word} needs a value") from None
        overrides[key[2:]] = value
    return others, overrides


def _fields() -> list[str]:
    """Every field with its default and help, from the models' docstrings."""
    from digen.config import RunConfig

    lines: list[str] = []

    def walk(model: Any, prefix: str) -> None:
        for name, field in model.model_fields.items():
            default = field.get_default(call_default_factory=True)
            if hasattr(default, "model_fields_set"):
                walk(type(default), f"{prefix}{name}.")
            else:
                lines.append(f"--{prefix}{name}  (default: {default})")
                lines.append(f"    {field.description}")

    walk(RunConfig, "")
    return lines


def _complain(error: Exception, code: int) -> int:
    print(f"digen: {error}", file=sys.stderr)
    for note in getattr(error, "__notes__", ()):
        print(note, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
